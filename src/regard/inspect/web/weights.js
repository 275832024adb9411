// The weights of a model from their bytes: 8 bits per number with a scale per row, or floats of 2 or 4 bytes.

import { Kernel, padded } from "./kernel.js";

const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// Base 64 without the help of a browser, so that the same code runs where there is none.
export function decodeBytes(text) {
  const value = new Uint8Array(128);
  for (let i = 0; i < 64; i++) value[DIGITS.charCodeAt(i)] = i;
  const end = text.endsWith("==") ? 2 : text.endsWith("=") ? 1 : 0;
  const bytes = new Uint8Array((text.length / 4) * 3 - end);
  for (let i = 0, j = 0; i < text.length; i += 4) {
    const n = (value[text.charCodeAt(i)] << 18) | (value[text.charCodeAt(i + 1)] << 12) | (value[text.charCodeAt(i + 2)] << 6) | value[text.charCodeAt(i + 3)];
    bytes[j++] = n >> 16;
    if (j < bytes.length) bytes[j++] = (n >> 8) & 255;
    if (j < bytes.length) bytes[j++] = n & 255;
  }
  return bytes;
}

export function encodeBytes(bytes) {
  let out = "";
  for (let i = 0; i < bytes.length; i += 3) {
    const n = (bytes[i] << 16) | ((bytes[i + 1] || 0) << 8) | (bytes[i + 2] || 0);
    const digits = [n >> 18, (n >> 12) & 63, (n >> 6) & 63, n & 63].map((d) => DIGITS[d]);
    out += digits.slice(0, Math.min(4, bytes.length - i + 1)).join("").padEnd(4, "=");
  }
  return out;
}

// A float of two bytes.
export function halfToFloat(h) {
  const sign = h & 0x8000 ? -1 : 1, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return exponent === 31 ? (fraction ? NaN : sign * Infinity) : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

export class Weights {
  // tensors: name -> {shape, type, at}; two names may share an entry. `simd` false: no WebAssembly.
  constructor(tensors, text, simd = true) {
    const bytes = decodeBytes(text), entries = [...new Set(Object.values(tensors).map((entry) => entry.at))];
    const one = new Map(Object.values(tensors).map((entry) => [entry.at, entry]));
    const matrix = ({ shape }) => [shape.slice(0, -1).reduce((a, b) => a * b, 1), shape[shape.length - 1]];
    this.kernel = new Kernel(entries.reduce((sum, at) => { const [rows, width] = matrix(one.get(at)); return sum + padded(rows * padded(width)); }, 0), simd);
    const placed = new Map();
    for (const at of entries) {
      const entry = one.get(at), [rows, width] = matrix(entry), stride = padded(width);
      const start = this.kernel.allocate(rows * stride);
      readRows(bytes, entry, rows, width, (r, i, value) => { this.kernel.floats[start + r * stride + i] = value; });
      placed.set(at, { at: start, outs: rows, width, shape: entry.shape });
    }
    this.tensors = new Map(Object.entries(tensors).map(([name, entry]) => [name, placed.get(entry.at)]));
  }

  has(name) { return this.tensors.has(name); }

  // A tensor as plain floats, or null if the model has none of this name.
  vector(name) {
    const found = this.tensors.get(name);
    if (!found) return null;
    const out = new Float32Array(found.outs * found.width), stride = padded(found.width);
    for (let r = 0; r < found.outs; r++) out.set(this.kernel.floats.subarray(found.at + r * stride, found.at + r * stride + found.width), r * found.width);
    return out;
  }

  // A linear layer: the matrix `name`.weight with the bias `name`.bias, or null.
  linear(name) {
    const found = this.tensors.get(`${name}.weight`);
    return found ? { ...found, bias: this.vector(`${name}.bias`) } : null;
  }

  // One row of a table.
  row(name, index) {
    const found = this.tensors.get(name), start = found.at + index * padded(found.width);
    return this.kernel.floats.slice(start, start + found.width);
  }
}

function readRows(bytes, { type, at }, rows, width, put) {
  const view = new DataView(bytes.buffer, bytes.byteOffset);
  for (let r = 0, k = 0; r < rows; r++) {
    const scale = type === "q8" ? view.getFloat32(at + rows * width + 4 * r, true) : 1;
    for (let i = 0; i < width; i++, k++) {
      if (type === "q8") put(r, i, view.getInt8(at + k) * scale);
      else put(r, i, type === "f2" ? halfToFloat(view.getUint16(at + 2 * k, true)) : view.getFloat32(at + 4 * k, true));
    }
  }
}
