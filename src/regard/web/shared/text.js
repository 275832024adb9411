// @ts-check
// Tokens and numbers as people read them.

import { constants } from "./constants.js";
import { h } from "./dom.js";

/** Whether a token marks the start, the end or padding. @param {string} token */
export function isSpecial(token) {
  const { sos, eos, pad } = constants.tokens;
  return token === sos || token === eos || token === pad;
}

/** @param {string} token */
export const isEnd = (token) => token === constants.tokens.eos;

/** A token with visible blanks and control characters, and a lone combining mark on a circle. @param {string} token */
export function visible(token) {
  let text = token
    .replace(/ /g, "␣")
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
  text = text.replace(/[\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u007f-\u009f]/gu, "·");
  if (/^\p{M}/u.test(text)) text = "◌" + text;
  return text || "∅";
}

/** Whether a token begins with the space before a word. @param {string} token */
export const startsWord = (token) => /^ [^ ]/.test(token);

/**
 * A token as an element; the space before a word is shown in a lighter colour, and a lone combining mark larger.
 * @param {string} token
 */
export const word = (token) =>
  h(
    "bdi",
    { class: isSpecial(token) ? "special" : /^ ?\p{M}/u.test(token) ? "mark" : null },
    startsWord(token) ? [h("i", {}, "␣"), visible(token.slice(1))] : visible(token),
  );

/** A probability; an empty string for null. @param {number | null} p */
export function percent(p) {
  if (p === null) return "";
  if (p > 0 && p < 0.0005) return "<0.1%";
  const decimals = (p > 0 && p < 0.01) || (p >= 0.995 && p < 0.9995) ? 1 : 0;
  return (decimals ? (100 * p).toFixed(1) : Math.round(100 * p)) + "%";
}

/** A count with its noun. @param {number} count @param {string} noun */
export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
