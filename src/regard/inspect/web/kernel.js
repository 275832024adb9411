// Memory and the one product that everything else is made of: rows of x times a matrix whose rows are stored padded.
// WebAssembly with SIMD computes it where the browser has that; plain JavaScript is the fallback, with the same layout.

const LANES = 8; // floats that one turn of the inner loop multiplies; rows are padded with zeros to a multiple
export const padded = (width) => Math.ceil(width / LANES) * LANES;

// The WebAssembly module, written out: (x, rows, w, y, stride in bytes, outputs) -> nothing.
//   for each row of w: for each row of x: y = sum of products, two accumulators of four floats
function simdModule() {
  const [X, ROWS, W, Y, STRIDE, OUTS, LEFT, ROW, XP, YP, P, Q, END, SPAN, A, B] = Array.from({ length: 16 }, (_, i) => i);
  const get = (i) => [0x20, i], set = (i) => [0x21, i], i32 = (n) => [0x41, n], add = [0x6a], sub = [0x6b];
  const grow = (i, by) => [...get(i), ...by, ...add, ...set(i)];
  const load = (i, offset) => [...get(i), 0xfd, 0x00, 4, offset]; // v128.load, aligned to 16 bytes
  const product = (sum, offset) => [...get(sum), ...load(P, offset), ...load(Q, offset), 0xfd, 0xe6, 0x01, 0xfd, 0xe4, 0x01, ...set(sum)];
  const loop = (...code) => [0x03, 0x40, ...code.flat(), 0x0b];
  const again = [0x0d, 0]; // br_if to the head of the innermost loop
  const zero = [0xfd, 0x0c, ...new Array(16).fill(0)];
  const lane = (k) => [...get(A), 0xfd, 0x1f, k]; // f32x4.extract_lane
  const body = [
    ...get(OUTS), ...i32(2), 0x74, ...set(SPAN), ...get(OUTS), ...set(LEFT),
    ...loop(
      get(X), set(XP), get(Y), set(YP), get(ROWS), set(ROW), get(W), get(STRIDE), add, set(END),
      loop(
        zero, set(A), zero, set(B), get(W), set(P), get(XP), set(Q),
        loop(product(A, 0), product(B, 16), grow(P, i32(32)), grow(Q, i32(32)), get(P), get(END), [0x49], again),
        get(A), get(B), [0xfd, 0xe4, 0x01], set(A),
        get(YP), lane(0), lane(1), [0x92], lane(2), [0x92], lane(3), [0x92], [0x38, 2, 0],
        grow(XP, get(STRIDE)), grow(YP, get(SPAN)), get(ROW), i32(1), sub, [0x22, ROW], again),
      get(END), set(W), grow(Y, i32(4)), get(LEFT), i32(1), sub, [0x22, LEFT], again),
    0x0b,
  ];
  const leb = (n) => (n < 128 ? [n] : [(n & 127) | 128, ...leb(n >> 7)]);
  const name = (text) => [text.length, ...Array.from(text, (c) => c.charCodeAt(0))];
  const section = (id, content) => [id, ...leb(content.length), ...content];
  const code = [2, 8, 0x7f, 2, 0x7b, ...body]; // locals: eight i32, two v128
  return new Uint8Array([
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0,
    ...section(1, [1, 0x60, 6, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0]),
    ...section(2, [1, ...name("m"), ...name("m"), 2, 0, 1]),
    ...section(3, [1, 0]),
    ...section(7, [1, ...name("f"), 0, 0]),
    ...section(10, [1, ...leb(code.length), ...code]),
  ]);
}

// Weights and scratch space in one buffer of floats, and the product over it.
export class Kernel {
  // `floats`: room for all weights; `simd` false: plain JavaScript.
  constructor(floats, simd = true) {
    this.used = LANES;
    this.multiply = null;
    const pages = Math.ceil((4 * (floats + LANES)) / 65536) + 16;
    if (simd && typeof WebAssembly === "object") {
      try {
        this.memory = new WebAssembly.Memory({ initial: pages });
        const module = new WebAssembly.Module(simdModule()); // small enough to be compiled at once
        this.multiply = new WebAssembly.Instance(module, { m: { m: this.memory } }).exports.f;
      } catch { this.memory = null; } // no SIMD, or a policy forbids it
    }
    this.buffer = this.multiply ? this.memory.buffer : new ArrayBuffer(65536 * pages);
    this.floats = new Float32Array(this.buffer);
  }

  get simd() { return this.multiply !== null; }

  // The index of the first of so many new floats.
  allocate(count) {
    const at = this.used;
    this.used += padded(count);
    return at;
  }

  // Room behind the weights for the input and the output of a product.
  scratch(count) {
    const missing = this.used + count - this.floats.length;
    if (missing > 0) {
      if (this.multiply) { this.memory.grow(Math.ceil(missing / 16384)); this.buffer = this.memory.buffer; }
      else {
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
    const { at, outs, width, bias } = matrix, stride = padded(width);
    const from = this.scratch(rows * stride + padded(rows * outs)), to = from + rows * stride, f = this.floats;
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
      let a = 0, b = 0, c = 0, d = 0;
      for (let p = w, q = x + r * stride, end = w + stride; p < end; p += 4, q += 4) {
        a += f[p] * f[q]; b += f[p + 1] * f[q + 1]; c += f[p + 2] * f[q + 2]; d += f[p + 3] * f[q + 3];
      }
      f[y + r * outs + o] = a + b + c + d;
    }
  }
}
