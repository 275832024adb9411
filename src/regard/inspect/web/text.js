// Tokens and numbers as people read them.

import { data, h } from "./core.js";

// A token as it can be seen: blanks and controls shown, a lone mark on a circle.
export function visible(token) {
  let text = token.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
  text = text.replace(/[\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u007f-\u009f]/gu, "·");
  if (/^\p{M}/u.test(text)) text = "◌" + text;
  return text || "∅";
}

const cutter = typeof Intl !== "undefined" && Intl.Segmenter ? new Intl.Segmenter() : null;
export function shorter(text, most) {
  const parts = cutter ? Array.from(cutter.segment(text), (s) => s.segment) : Array.from(text);
  return parts.length > most ? parts.slice(0, most - 1).join("") + "…" : text;
}

export const SPECIAL = new Set(["<sos>", "<eos>", "<pad>"]);
// A space before a word is part of many tokens: it is shown, but quietly.
export const leads = (token) => /^ [^ ]/.test(token);
export const word = (token) => h("bdi", { class: SPECIAL.has(token) ? "special" : null }, leads(token) ? [h("i", {}, "␣"), visible(token.slice(1))] : visible(token));
// A token on a figure, where there is little room.
export const figureLabel = (token) => shorter(visible(leads(token) ? token.slice(1) : token), 14);

export const tokensOf = (name) => data.tokens[name] || [];
// A token row is written in the direction of its text: features, which stand before it, are written like names.
export const rightToLeft = (name) => data.directions[name] === "rtl";
export const directionOf = (token) => (/^\P{L}*[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u.test(token) ? "rtl" : "ltr"); // of one token

export function show(x, digits = 3) {
  if (x === null || x === undefined) return "−∞";
  const text = Math.abs(x) >= 100 ? x.toFixed(0) : Math.abs(x) >= 10 ? x.toFixed(digits - 2) : x.toFixed(digits - 1);
  return text.replace("-", "−");
}
export const percent = (p) => (p === null ? "" : p >= 0.995 && p < 0.9995 ? (100 * p).toFixed(1) + "%" : p >= 0.01 || p === 0 ? Math.round(100 * p) + "%" : p >= 0.0005 ? (100 * p).toFixed(1) + "%" : "<0.1%");
export const plural = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;

const KIND_NAMES = { cross: "Cross", encoder: "Encoder self", decoder: "Decoder self" };
export const kindName = (kind) => KIND_NAMES[kind] || kind;
