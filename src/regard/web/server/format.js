// @ts-check
// Tokens, numbers and probabilities as the pages of the server show them.

import { h } from "../shared/dom.js";
import { isEnd, word as tokenWord } from "../shared/text.js";

/** A token as an element; the end token is written "end". @param {string} token */
export const word = (token) => (isEnd(token) ? h("bdi", { class: "special" }, "end") : tokenWord(token));

/** Limits of the beam width on the page. */
export const BEAM = { min: 1, max: 20, step: 1 };

/** @param {number} x */
export const number = (x) => x.toFixed(Math.abs(x) >= 100 ? 1 : 2).replace("-", "−");

/** A bar whose length is a share. @param {number} part */
export const bar = (part) =>
  h("span", { class: "meter", "aria-hidden": "true" }, h("span", { style: { width: `${Math.max(1, 100 * part)}%` } }));

/** The probability of a score. @param {number} score */
export const share = (score) => Math.min(1, Math.exp(score));

/** Set a number from an address; the usual one if there is none or it is not allowed. */
export function setNumber(field, text, usual) {
  field.value = /^(\d+(\.\d+)?)?$/.test(text) ? text : usual;
  if (!field.checkValidity()) field.value = usual;
}
