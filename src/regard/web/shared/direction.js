// @ts-check
// The writing direction of a text, by the rule of `direction` in regard/text/codec.py.

import { constants } from "./constants.js";

/**
 * Whether a number is in one of the ranges [start, end, start, end, ...].
 * @param {number[]} ranges  in ascending order
 * @param {number} number
 */
function inRanges(ranges, number) {
  let low = 0,
    high = ranges.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ranges[middle] <= number) low = middle + 1;
    else high = middle;
  }
  return low % 2 === 1;
}

/**
 * The direction of the first strong character of a text; left to right without one.
 * @param {string} text
 * @returns {"ltr" | "rtl"}
 */
export function direction(text) {
  for (const character of text) {
    const code = /** @type {number} */ (character.codePointAt(0));
    if (inRanges(constants.strong.ltr, code)) return "ltr";
    if (inRanges(constants.strong.rtl, code)) return "rtl";
  }
  return "ltr";
}
