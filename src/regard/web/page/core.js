// @ts-check
// The trace that the page shows, and its numbers.

import { constants, setConstants } from "../shared/constants.js";

/**
 * An array of numbers: `values[i] * scale`, in row-major order.
 * @typedef {object} Entry
 * @property {number[]} shape
 * @property {"u2" | "i2" | "f4"} type
 * @property {number} scale
 * @property {number} [at]  offset of the bytes in a stored trace
 * @property {Uint16Array | Int16Array | Float32Array} values
 */

/** @typedef {"encoder" | "decoder" | "cross"} Kind */

/**
 * @typedef {object} AttentionMap
 * @property {string} name
 * @property {Kind} kind
 * @property {number} layer
 * @property {Entry} weights  (heads, queries, keys)
 * @property {string} rows  name of the token row of the queries
 * @property {string} columns
 * @property {number[]} heads  head numbers; pruned models have gaps
 */

/**
 * @typedef {object} Step
 * @property {string} token
 * @property {number} probability
 * @property {number} entropy  in bits
 * @property {number} normaliser
 * @property {[string, number, number][]} candidates  token, probability, logit
 */

/** @typedef {{kind: "shortened" | "method" | "unmeasured" | "limit", text: string}} Note */

/**
 * The page data of a trace: `Trace.page_data` in Python, or `makeTrace`.
 * @typedef {object} Trace
 * @property {string} title
 * @property {Record<string, string>} facts
 * @property {Record<string, string>} texts
 * @property {Record<string, string[]>} tokens
 * @property {Record<string, "ltr" | "rtl">} directions
 * @property {AttentionMap[]} maps
 * @property {{name: string, weights: Entry}[]} alignment
 * @property {Step[]} steps
 * @property {{label: string, steps: [string, number, number][][]}[]} lens
 * @property {{name: string, caption: string, rows: string, columns: string, values: Entry, first_column: number}[]} positions
 * @property {{name: string, rows: string, layers: Record<string, any>[][]}[]} walks
 * @property {Note[]} notes
 * @property {number} score
 * @property {"token" | "class"} unit
 * @property {{height: number, width: number, channels: number, size: number, pixels: string} | null} image
 * @property {Record<string, number[]>} distances
 * @property {{values: Entry, rows: string, columns: string} | null} attribution
 * @property {Record<string, number[]>} importance
 * @property {import("../shared/constants.js").Constants} constants
 * @property {string} numbers
 */

/**
 * A matrix with its maximum.
 * @typedef {object} Plane
 * @property {number} T
 * @property {number} S
 * @property {Float32Array} data
 * @property {number} max
 * @property {(t: number, s: number) => number} at
 */

/**
 * The trace that views read while drawing; a model in the page replaces it.
 * @type {Trace}
 */
export let data = null;

/** @param {Trace} next */
export function setData(next) {
  data = next;
}

/**
 * Draw with another trace. Event handlers created meanwhile must not read `data`.
 * @template T
 * @param {Trace} other
 * @param {() => T} draw
 * @returns {T}
 */
export function withData(other, draw) {
  const before = data;
  data = other;
  try {
    return draw();
  } finally {
    data = before;
  }
}

const ARRAYS = { u2: Uint16Array, i2: Int16Array, f4: Float32Array };

async function inflate(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// Attach the numbers to every array of a stored trace.
export function attachNumbers(node, buffer) {
  if (node === null || typeof node !== "object") return;
  if (node.shape && node.type in ARRAYS)
    node.values = new ARRAYS[node.type](
      buffer,
      node.at,
      node.shape.reduce((a, b) => a * b, 1),
    );
  else for (const child of Object.values(node)) attachNumbers(child, buffer);
}

/**
 * The trace in the document, with its numbers.
 * @returns {Promise<Trace>}
 */
export async function storedData() {
  const stored = JSON.parse(document.getElementById("data").textContent);
  setConstants(stored.constants);
  attachNumbers(stored, await inflate(stored.numbers));
  return stored;
}

export const values = (entry) => entry.values;

/**
 * A row along the last axis as numbers; null for missing ones.
 * @param {Entry} entry
 * @param {...number} index
 * @returns {(number | null)[]}
 */
export function row(entry, ...index) {
  const shape = entry.shape,
    width = shape[shape.length - 1],
    all = values(entry);
  let start = 0;
  for (let i = 0; i < shape.length - 1; i++) start = start * shape[i] + index[i];
  start *= width;
  const out = new Array(width);
  for (let i = 0; i < width; i++) {
    const v = all[start + i];
    out[i] = (entry.type === "i2" && v === constants.missing) || !Number.isFinite(v) ? null : v * entry.scale;
  }
  return out;
}

/** @type {WeakMap<Entry, Map<number, Plane>>} */
const planes = new WeakMap();

/**
 * One matrix of weights with its maximum. `head` -1 is the mean over heads.
 * @param {Entry} entry
 * @param {number} head
 * @returns {Plane}
 */
export function plane(entry, head) {
  if (!planes.has(entry)) planes.set(entry, new Map());
  const made = planes.get(entry);
  if (!made.has(head)) made.set(head, makePlane(entry, head));
  return made.get(head);
}

function makePlane(entry, head) {
  const all = values(entry),
    scale = entry.scale;
  const [T, S] = entry.shape.slice(-2),
    size = T * S,
    heads = entry.shape.length === 3 ? entry.shape[0] : 1;
  const out = new Float32Array(size);
  for (let i = 0; i < size; i++) {
    let v = 0;
    if (head >= 0) v = all[head * size + i];
    else {
      for (let h = 0; h < heads; h++) v += all[h * size + i];
      v /= heads;
    }
    out[i] = v * scale;
  }
  return planeOf(out, T, S);
}

/**
 * @param {Float32Array} numbers
 * @param {number} T
 * @param {number} S
 * @returns {Plane}
 */
export function planeOf(numbers, T, S) {
  let max = 0;
  for (const v of numbers) if (v > max) max = v;
  return { T, S, data: numbers, max, at: (t, s) => numbers[t * S + s] };
}

/**
 * The key with the largest weight.
 * @param {Plane} m
 * @param {number} t
 */
export function strongest(m, t) {
  let at = 0;
  for (let s = 1; s < m.S; s++) if (m.at(t, s) > m.at(t, at)) at = s;
  return at;
}

/**
 * Sharpness times coverage of a cross-attention head over its first `rows` queries; the last key is the end of the source.
 * @param {ArrayLike<number>} weights
 * @param {number} rows
 * @param {number} S
 */
export function alignmentMerit(weights, rows, S) {
  const keys = Math.max(1, S - 1),
    received = new Float64Array(keys);
  let sharpness = 0;
  for (let t = 0; t < rows; t++) {
    let top = 0;
    for (let s = 0; s < S; s++) {
      const w = weights[t * S + s];
      if (w > top) top = w;
      if (s < keys) received[s] += w;
    }
    sharpness += top / rows;
  }
  return (sharpness * received.reduce((sum, w) => sum + Math.min(1, w), 0)) / keys;
}

export const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
