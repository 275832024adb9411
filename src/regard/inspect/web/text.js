// Tokens and numbers as people read them.

import { data, h, planeOf } from "./core.js";

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

// Words from subword pieces: a token that begins with a space begins a word.

const bracketed = (token) => SPECIAL.has(token) || /^<.+>$/.test(token);

// The words of a token row as [from, to); special tokens, and the features in front, stand for themselves.
export function wordSpans(tokens, features = "") {
  const names = features.split(/[;,|]/).map((name) => name.trim()).filter(Boolean), before = tokens.length && bracketed(tokens[0]) ? 1 : 0;
  let alone = before;
  while (alone - before < names.length && tokens[alone] === names[alone - before]) alone++;
  const begins = (token, i) => i <= alone || /^\s/.test(token) || bracketed(token) || bracketed(tokens[i - 1]);
  const starts = tokens.map((_, i) => i).filter((i) => begins(tokens[i], i));
  return starts.map((from, k) => [from, k + 1 < starts.length ? starts[k + 1] : tokens.length]);
}

const spansOf = (name) => wordSpans(tokensOf(name), name === "source" ? data.texts.features || "" : "");

// Whether a row has words of several tokens, and more than one word.
const hasWords = (name) => tokensOf(name).some((token, i) => i > 0 && /^\s/.test(token)) && spansOf(name).length < tokensOf(name).length;
export const canGroup = (...names) => names.some(hasWords);

// The attention between words: the sum over the keys of a word, the mean over its queries.
export function groupPlane(m, rows, columns) {
  const out = new Float32Array(rows.length * columns.length);
  rows.forEach(([t0, t1], r) => columns.forEach(([s0, s1], c) => {
    let sum = 0;
    for (let t = t0; t < t1; t++) for (let s = s0; s < s1; s++) sum += m.at(t, s);
    out[r * columns.length + c] = sum / (t1 - t0);
  }));
  return planeOf(out, rows.length, columns.length);
}

// Planes with the tokens of their axes, or with words instead. token(t): the first token of a row.
export function axesOf(planes, rowsName, columnsName, grouped) {
  if (!grouped || !canGroup(rowsName, columnsName)) return { planes, rows: tokensOf(rowsName), columns: tokensOf(columnsName), token: (t) => t, row: (t) => t };
  const rows = spansOf(rowsName), columns = spansOf(columnsName);
  const join = (name) => ([from, to]) => tokensOf(name).slice(from, to).join("");
  return {
    planes: planes.map((m) => groupPlane(m, rows, columns)), rows: rows.map(join(rowsName)), columns: columns.map(join(columnsName)),
    token: (t) => rows[t][0], row: (t) => rows.findIndex(([from, to]) => t >= from && t < to),
  };
}
