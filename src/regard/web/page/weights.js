// @ts-check
// The weights of a model, decoded from bytes, and the matrix product.

// Memory and the only matrix product: rows of x times a matrix with padded rows. WebAssembly with SIMD computes it
// where available; plain JavaScript is the fallback, with the same layout.

const LANES = 8; // floats per iteration of the inner loop; rows are zero-padded to a multiple
export const padded = (width) => Math.ceil(width / LANES) * LANES;

// product.wat, assembled: (x, rows, w, y, bytes of a padded row, rows of w)
const PRODUCT =
  "AGFzbQEAAAABCgFgBn9/f39/fwACCAEBbQFtAgABAwIBAAcFAQFmAAAK8QEB7gECCH8CeyAFQQJ0IQ0gBSEGA0AgACEIIAMhCSABIQcgAiAEaiEM" +
  "A0D9DAAAAAAAAAAAAAAAAAAAAAAhDv0MAAAAAAAAAAAAAAAAAAAAACEPIAIhCiAIIQsDQCAOIAr9AAQAIAv9AAQA/eYB/eQBIQ4gDyAK/QAEECAL" +
  "/QAEEP3mAf3kASEPIApBIGohCiALQSBqIQsgCiAMSQ0ACyAOIA/95AEhDiAJIA79HwAgDv0fAZIgDv0fApIgDv0fA5I4AgAgCCAEaiEIIAkgDWoh" +
  "CSAHQQFrIgcNAAsgDCECIANBBGohAyAGQQFrIgYNAAsL";

// Weights and scratch space in one buffer of floats, and the product over it.
export class Kernel {
  // `floats`: capacity for all weights; `simd` false: plain JavaScript.
  constructor(floats, simd = true) {
    this.used = LANES;
    /** @type {Function | null} */
    this.multiply = null;
    const pages = Math.ceil((4 * (floats + LANES)) / 65536) + 16;
    if (simd && typeof WebAssembly === "object") {
      try {
        this.memory = new WebAssembly.Memory({ initial: pages });
        const module = new WebAssembly.Module(decodeBytes(PRODUCT)); // small enough to compile synchronously
        this.multiply = /** @type {Function} */ (new WebAssembly.Instance(module, { m: { m: this.memory } }).exports.f);
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

  // x (rows, width) times the matrix {at, outs, width}, plus its bias -> (rows, outs)
  linear(x, rows, matrix) {
    const { at, outs, width, bias } = matrix,
      stride = padded(width);
    const from = this.scratch(rows * stride + padded(rows * outs)),
      to = from + rows * stride,
      f = this.floats;
    for (let r = 0; r < rows; r++) {
      const start = from + r * stride;
      f.set(x.subarray(r * width, (r + 1) * width), start);
      if (width < stride) f.fill(0, start + width, start + stride);
    }
    if (this.multiply) this.multiply(4 * from, rows, 4 * at, 4 * to, 4 * stride, outs);
    else plainMultiply(f, from, rows, at, to, stride, outs);
    const y = f.slice(to, to + rows * outs);
    if (bias) for (let r = 0; r < rows; r++) for (let o = 0; o < outs; o++) y[r * outs + o] += bias[o];
    return y;
  }
}

function plainMultiply(f, x, rows, w, y, stride, outs) {
  for (let o = 0; o < outs; o++, w += stride) {
    for (let r = 0; r < rows; r++) {
      let a = 0,
        b = 0,
        c = 0,
        d = 0;
      for (let p = w, q = x + r * stride, end = w + stride; p < end; p += 4, q += 4) {
        a += f[p] * f[q];
        b += f[p + 1] * f[q + 1];
        c += f[p + 2] * f[q + 2];
        d += f[p + 3] * f[q + 3];
      }
      f[y + r * outs + o] = a + b + c + d;
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
      entries = [...new Set(Object.values(tensors).map((entry) => entry.at))];
    const one = new Map(Object.values(tensors).map((entry) => [entry.at, entry]));
    const matrix = ({ shape }) => [shape.slice(0, -1).reduce((a, b) => a * b, 1), shape[shape.length - 1]];
    this.kernel = new Kernel(
      entries.reduce((sum, at) => {
        const [rows, width] = matrix(one.get(at));
        return sum + padded(rows * padded(width));
      }, 0),
      simd,
    );
    const placed = new Map();
    for (const at of entries) {
      const entry = one.get(at),
        [rows, width] = matrix(entry),
        stride = padded(width);
      const start = this.kernel.allocate(rows * stride);
      readRows(bytes, entry, rows, width, (r, i, value) => {
        this.kernel.floats[start + r * stride + i] = value;
      });
      placed.set(at, { at: start, outs: rows, width, shape: entry.shape });
    }
    this.tensors = new Map(Object.entries(tensors).map(([name, entry]) => [name, placed.get(entry.at)]));
  }

  has(name) {
    return this.tensors.has(name);
  }

  // A tensor as floats, or null if the model lacks it.
  vector(name) {
    const found = this.tensors.get(name);
    if (!found) return null;
    const out = new Float32Array(found.outs * found.width),
      stride = padded(found.width);
    for (let r = 0; r < found.outs; r++)
      out.set(this.kernel.floats.subarray(found.at + r * stride, found.at + r * stride + found.width), r * found.width);
    return out;
  }

  // A linear layer: the matrix `name`.weight with the bias `name`.bias, or null.
  linear(name) {
    const found = this.tensors.get(`${name}.weight`);
    return found ? { ...found, bias: this.vector(`${name}.bias`) } : null;
  }

  // One row of a table.
  row(name, index) {
    const found = this.tensors.get(name),
      start = found.at + index * padded(found.width);
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
