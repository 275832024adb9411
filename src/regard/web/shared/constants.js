// @ts-check
// Values that Python owns and sends with a page: names of special tokens, limits and thresholds.

/**
 * @typedef {object} Constants
 * @property {Record<"pad" | "unk" | "sos" | "eos" | "mask" | "cls", string>} tokens  names of special tokens
 * @property {Record<"ltr" | "rtl", number[]>} strong  ranges of code points of each direction: [start, end, ...]
 * @property {number} max_tokens  tokens per side in a trace
 * @property {number} max_inputs  inputs of a request to the server
 * @property {number} max_text  characters of a text that a page shows
 * @property {number} missing  stands for "no number" in packed signed integers
 * @property {number} shown_numbers  first numbers of a vector on a card
 * @property {number} min_positions  rows of a position heatmap, at least
 * @property {number} heatmap_columns
 * @property {number} active_neuron  absolute value above which a neuron counts as active
 * @property {number} step_candidates  most probable tokens of an output step
 * @property {number} lens_candidates  most probable tokens of a layer in the logit lens
 * @property {number} max_alignment_heads
 * @property {number} nearly_best  share of the best merit that another alignment head must reach
 * @property {number} nbest_growth  multiple of its length to which a live hypothesis may grow to enter an n-best list
 * @property {number} main_share  share of a head's weight that characterises it
 * @property {number} part_share  share of a head's weight that is worth naming
 * @property {number} max_parts  named parts of a head's weight
 * @property {number} even_share  share of the largest possible entropy that counts as even attention
 * @property {Record<import("../page/core.js").Kind, string>} kind_names
 * @property {Record<"first" | "last" | "same" | "class" | "patch" | "row" | "column" | "even" | "mixed" | "alignment", string>} head_names
 * @property {Record<"self" | "cross", Record<string, string>>} offset_names  by offset; `back` and `ahead` with {}
 * @property {string[]} ramp  colours of increasing values in the light theme
 * @property {{shortened: string, limit: string}} notes  texts of notes; `shortened` with {side}, {count} and {limit}
 */

/** @type {Constants} */
export let constants;

/** @param {Constants} values */
export function setConstants(values) {
  constants = values;
}
