// Position encodings: added to the embeddings, rotating queries and keys, or added to the scores.

// PE(p, 2i) = sin(p / 10000^(2i/width)), PE(p, 2i+1) = cos of the same; with `halves` all sines come first.
export function sinusoid(position, width, halves = false) {
  const out = new Float32Array(width), half = Math.ceil(width / 2);
  for (let i = 0; i < half; i++) {
    const angle = position * Math.exp((2 * i * -Math.log(10000)) / width);
    out[halves ? i : 2 * i] = Math.sin(angle);
    const second = halves ? half + i : 2 * i + 1;
    if (second < width) out[second] = Math.cos(angle);
  }
  return out;
}

// The angle per position of every pair of dimensions.
export function rotaryRates(rotary, width) {
  return Array.from({ length: width / 2 }, (_, i) => {
    const rate = rotary.base ** ((-2 * i) / width);
    if (rotary.factor === 1) return rate;
    const turns = (rotary.original * rate) / (2 * Math.PI);
    const kept = Math.max(0, Math.min(1, (turns - rotary.low) / (rotary.high - rotary.low)));
    return rate * (kept + (1 - kept) / rotary.factor);
  });
}

export function alibiSlopes(heads) {
  const power = 2 ** Math.floor(Math.log2(heads));
  const slopes = Array.from({ length: power }, (_, i) => 2 ** ((-8 * (i + 1)) / power));
  return slopes.concat(Array.from({ length: heads - power }, (_, i) => 2 ** ((-4 * (2 * i + 1)) / power)));
}

const BUCKETS = 32, FAR = 128;

// The bucket of an offset: exact when near, logarithmic when far.
export function bucketOf(offset, bothWays) {
  const count = bothWays ? BUCKETS / 2 : BUCKETS, base = bothWays && offset > 0 ? count : 0;
  const distance = bothWays ? Math.abs(offset) : Math.max(0, -offset), exact = count / 2;
  if (distance < exact) return base + distance;
  const far = exact + Math.trunc(Math.fround(Math.fround(Math.log(Math.fround(distance / exact))) * Math.fround((count - exact) / Math.log(FAR / exact))));
  return base + Math.min(count - 1, far);
}

export class Position {
  constructor(stack, causal, weights, name) {
    this.kind = stack.position;
    this.stack = stack;
    this.causal = causal;
    this.weights = weights;
    this.name = `${name}.position`;
    this.head = stack.head_width || stack.width / stack.heads;
    if (this.kind === "rotary") this.rates = rotaryRates(stack.rotary, this.head);
    if (this.kind === "alibi") this.slopes = alibiSlopes(stack.heads);
    if (this.kind === "bucket") this.table = weights.vector(`${this.name}.table.weight`); // (buckets, heads)
  }

  // What is added to the embedding at a position; null: nothing.
  embed(position) {
    const { kind, stack, weights, name } = this;
    if (kind === "sinusoid" || kind === "sinusoid_halves") return sinusoid(position, stack.width, kind === "sinusoid_halves");
    if (kind === "learned") return weights.row(`${name}.table.weight`, position);
    if (kind !== "axial") return null;
    const out = new Float32Array(stack.width), { columns, row_width: wide } = stack.axial;
    out.set(weights.row(`${name}.rows.weight`, Math.floor(position / columns)));
    out.set(weights.row(`${name}.columns.weight`, position % columns), wide);
    return out;
  }

  // Rotates one vector of `heads` heads in place: pairs (i, i + E/2) by an angle proportional to the position.
  rotate(x, heads, position) {
    if (this.kind !== "rotary") return;
    const half = this.head / 2;
    for (let i = 0; i < half; i++) {
      const angle = Math.fround(position * Math.fround(this.rates[i])), cos = Math.cos(angle), sin = Math.sin(angle);
      for (let h = 0; h < heads; h++) {
        const at = h * this.head + i, a = x[at], b = x[at + half];
        x[at] = a * cos - b * sin;
        x[at + half] = b * cos + a * sin;
      }
    }
  }

  get biased() { return this.kind === "alibi" || this.kind === "bucket"; }

  // What is added to the score of head number `head` between two positions.
  bias(head, query, key) {
    if (this.kind === "alibi") return -this.slopes[head] * Math.abs(query - key);
    return this.table[bucketOf(key - query, !this.causal) * this.stack.heads + head];
  }
}
