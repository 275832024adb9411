// @ts-check
// The trace that the page shows, and its numbers.

import { constants, setConstants } from "../shared/constants.js";

// The trace that views read when they draw; it is replaced when a model in the page computes another.
export let data = null;
export function setData(next) {
  data = next;
}

// Draw with another trace; what the drawing made must not read `data` later.
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

// Give every array of a stored trace its numbers.
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

// The trace in the document, with its numbers.
export async function storedData() {
  const stored = JSON.parse(document.getElementById("data").textContent);
  setConstants(stored.constants);
  attachNumbers(stored, await inflate(stored.numbers));
  return stored;
}

export const values = (entry) => entry.values;

// A row along the last axis, as numbers; null where there is none.
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

// One matrix of weights with its largest number. `head` -1 is the mean over heads.
const planes = new WeakMap();
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

export function planeOf(numbers, T, S) {
  let max = 0;
  for (const v of numbers) if (v > max) max = v;
  return { T, S, data: numbers, max, at: (t, s) => numbers[t * S + s] };
}

// The key to which a query attends most.
export function strongest(m, t) {
  let at = 0;
  for (let s = 1; s < m.S; s++) if (m.at(t, s) > m.at(t, at)) at = s;
  return at;
}

// Sharpness times coverage of a head of the cross-attention, over its first `rows` queries; the last key is the end of
// the source.
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
