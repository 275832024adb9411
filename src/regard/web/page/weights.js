// @ts-check
// The weights of a model, decoded from bytes, and the matrix product.

import { PRODUCT } from "./product.js";

// Memory and the only matrix product: rows of x times a matrix. A matrix is stored in panels of 16 outputs, as in the
// native engine: [panel][input][output]. WebAssembly with SIMD computes the product of the native engine where available
// (product.js); plain JavaScript is the fallback, with the same layout. It sums in double precision.

const LANES = 16;
const STACK = 1024; // floats at the start of the memory: the stack of the compiled product
const padded = (width) => Math.ceil(width / LANES) * LANES;

// Where row `o` of a matrix in panels starts; its numbers are LANES apart.
const rowStart = (at, o, width) => at + (o - (o % LANES)) * width + (o % LANES);

// Weights and scratch space in one buffer of floats, and the product over it.
export class Kernel {
  // `floats`: capacity for all weights; `simd` false: plain JavaScript.
  constructor(floats, simd = true) {
    this.used = STACK;
    /** @type {Function | null} */
    this.multiply = null;
    const pages = Math.ceil((4 * (floats + STACK)) / 65536) + 16;
    if (simd && typeof WebAssembly === "object") {
      try {
        this.memory = new WebAssembly.Memory({ initial: pages });
        const module = new WebAssembly.Module(decodeBytes(PRODUCT)); // small enough to compile synchronously
        const instance = new WebAssembly.Instance(module, { env: { memory: this.memory } });
        this.multiply = /** @type {Function} */ (instance.exports.multiply);
      } catch {
        this.memory = null;
      } // no SIMD, or forbidden by a policy
    }
    this.buffer = this.multiply ? this.memory.buffer : new ArrayBuffer(65536 * pages);
    this.floats = new Float32Array(this.buffer);
  }

  get simd() {
    return this.multiply !== null;
  }

  // Allocate `count` floats -> the index of the first.
  allocate(count) {
    const at = this.used;
    this.used += padded(count);
    return at;
  }

  // Scratch space after the weights for the input and output of a product.
  scratch(count) {
    const missing = this.used + count - this.floats.length;
    if (missing > 0) {
      if (this.multiply) {
        this.memory.grow(Math.ceil(missing / 16384));
        this.buffer = this.memory.buffer;
      } else {
        const larger = new ArrayBuffer(4 * (this.used + 2 * count));
        new Float32Array(larger).set(this.floats);
        this.buffer = larger;
      }
      this.floats = new Float32Array(this.buffer);
    }
    return this.used;
  }

  // x (rows, width) times the matrix {at, outs, width}, plus the bias at index `bias`, 0 for none -> (rows, outs)
  linear(x, rows, { at, outs, width, bias }) {
    const stride = padded(outs),
      from = this.scratch(padded(rows * width) + rows * stride),
      to = from + padded(rows * width),
      f = this.floats;
    f.set(x.subarray(0, rows * width), from);
    if (this.multiply) this.multiply(4 * at, 4 * bias, width, outs, 4 * from, rows, 4 * to);
    else plainMultiply(f, at, bias, width, outs, from, rows, to);
    if (outs === stride) return f.slice(to, to + rows * outs);
    const y = new Float32Array(rows * outs);
    for (let r = 0; r < rows; r++) y.set(f.subarray(to + r * stride, to + r * stride + outs), r * outs);
    return y;
  }
}

function plainMultiply(f, at, bias, width, outs, from, rows, to) {
  const stride = padded(outs);
  for (let o = 0; o < outs; o += 4) {
    const start = rowStart(at, o, width);
    for (let r = 0; r < rows; r++) {
      let a = 0,
        b = 0,
        c = 0,
        d = 0;
      for (let p = start, q = from + r * width, end = q + width; q < end; p += LANES, q++) {
        const v = f[q];
        a += v * f[p];
        b += v * f[p + 1];
        c += v * f[p + 2];
        d += v * f[p + 3];
      }
      const y = to + r * stride + o;
      f[y] = a;
      f[y + 1] = b;
      f[y + 2] = c;
      f[y + 3] = d;
      if (bias) for (let i = 0; i < 4; i++) f[y + i] += f[bias + o + i];
    }
  }
}

// The weights of a model from their bytes: 8 bits per number with a scale per row, or floats of 2 or 4 bytes.

const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// Base64 without browser functions, so that the code runs in any engine.
export function decodeBytes(text) {
  const value = new Uint8Array(128);
  for (let i = 0; i < 64; i++) value[DIGITS.charCodeAt(i)] = i;
  const end = text.endsWith("==") ? 2 : text.endsWith("=") ? 1 : 0;
  const bytes = new Uint8Array((text.length / 4) * 3 - end);
  for (let i = 0, j = 0; i < text.length; i += 4) {
    const n =
      (value[text.charCodeAt(i)] << 18) |
      (value[text.charCodeAt(i + 1)] << 12) |
      (value[text.charCodeAt(i + 2)] << 6) |
      value[text.charCodeAt(i + 3)];
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
    out += digits
      .slice(0, Math.min(4, bytes.length - i + 1))
      .join("")
      .padEnd(4, "=");
  }
  return out;
}

// Pixels as bytes (H, W, C) in base64, stretched to the full range, as the image view reads them.
export function shownPixels(pixels, { height, width, channels, size }) {
  const shown = channels >= 3 ? 3 : 1,
    plane = height * width,
    some = pixels.subarray(0, shown * plane);
  let low = Infinity,
    high = -Infinity;
  for (const v of some) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  const bytes = new Uint8Array(shown * plane);
  for (let i = 0; i < plane; i++)
    for (let c = 0; c < shown; c++)
      bytes[i * shown + c] = Math.round(((some[c * plane + i] - low) * 255) / (high - low || 1));
  return { height, width, channels: shown, size, pixels: encodeBytes(bytes) };
}

// Decode a two-byte float.
export function halfToFloat(h) {
  const sign = h & 0x8000 ? -1 : 1,
    exponent = (h >> 10) & 31,
    fraction = h & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return exponent === 31 ? (fraction ? NaN : sign * Infinity) : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

export class Weights {
  // tensors: name -> {shape, type, at}; two names may share an entry. `simd` false: no WebAssembly.
  constructor(tensors, text, simd = true) {
    const bytes = decodeBytes(text),
      entries = new Map(Object.values(tensors).map((entry) => [entry.at, entry]));
    const sizes = new Map(Array.from(entries, ([at, { shape }]) => [at, sizeOf(shape)]));
    let floats = 0;
    for (const { outs, width, panels } of sizes.values())
      floats += padded(panels ? padded(outs) * width : outs * width);
    this.kernel = new Kernel(floats, simd);
    const placed = new Map();
    for (const [at, entry] of entries) {
      const { outs, width, panels } = sizes.get(at),
        start = this.kernel.allocate(panels ? padded(outs) * width : outs * width),
        f = this.kernel.floats;
      if (panels)
        readRows(bytes, entry, outs, width, (r, i, value) => {
          f[rowStart(start, r, width) + i * LANES] = value;
        });
      else
        readRows(bytes, entry, outs, width, (r, i, value) => {
          f[start + r * width + i] = value;
        });
      placed.set(at, { at: start, outs, width, panels, shape: entry.shape });
    }
    this.tensors = new Map(Object.entries(tensors).map(([name, entry]) => [name, placed.get(entry.at)]));
  }

  has(name) {
    return this.tensors.has(name);
  }

  // A tensor as floats, or null if the model lacks it.
  vector(name) {
    const tensor = this.tensors.get(name);
    if (!tensor) return null;
    const { at, outs, width, panels } = tensor;
    if (!panels) return this.kernel.floats.slice(at, at + outs * width);
    const out = new Float32Array(outs * width);
    for (let r = 0; r < outs; r++) out.set(this.row(name, r), r * width);
    return out;
  }

  // A matrix with its bias, or null.
  matrix(weight, bias) {
    const matrix = this.tensors.get(weight);
    return matrix ? { ...matrix, bias: this.has(bias) ? this.tensors.get(bias).at : 0 } : null;
  }

  // A linear layer, or null.
  linear(name) {
    return this.matrix(`${name}.weight`, `${name}.bias`);
  }

  // One row of a table.
  row(name, index) {
    const { at, width } = this.tensors.get(name),
      start = rowStart(at, index, width),
      f = this.kernel.floats,
      out = new Float32Array(width);
    for (let i = 0; i < width; i++) out[i] = f[start + i * LANES];
    return out;
  }
}

// The rows of a tensor and their width. Matrices are stored in panels.
function sizeOf(shape) {
  const width = shape[shape.length - 1];
  return { outs: shape.slice(0, -1).reduce((a, b) => a * b, 1), width, panels: shape.length === 2 };
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
