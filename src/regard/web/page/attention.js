// @ts-check
// Multi-head attention with every score function, and position encodings.

export const sigmoid = (x) => 1 / (1 + Math.exp(-x));

// Position encodings: added to the embeddings, rotating queries and keys, or added to the scores.

// PE(p, 2i) = sin(p / 10000^(2i/width)), PE(p, 2i+1) = cos of the same; with `halves` all sines come first.
export function sinusoid(position, width, halves = false) {
  const out = new Float32Array(width),
    half = Math.ceil(width / 2);
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

const BUCKETS = 32,
  FAR = 128;

// The bucket of an offset: exact when near, logarithmic when far.
export function bucketOf(offset, bothWays) {
  const count = bothWays ? BUCKETS / 2 : BUCKETS,
    base = bothWays && offset > 0 ? count : 0;
  const distance = bothWays ? Math.abs(offset) : Math.max(0, -offset),
    exact = count / 2;
  if (distance < exact) return base + distance;
  const far =
    exact +
    Math.trunc(
      Math.fround(
        Math.fround(Math.log(Math.fround(distance / exact))) * Math.fround((count - exact) / Math.log(FAR / exact)),
      ),
    );
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

  // The vector added to the embedding at a position, or null.
  embed(position) {
    const { kind, stack, weights, name } = this;
    if (kind === "sinusoid" || kind === "sinusoid_halves")
      return sinusoid(position, stack.width, kind === "sinusoid_halves");
    if (kind === "learned") return weights.row(`${name}.table.weight`, position);
    if (kind !== "axial") return null;
    const out = new Float32Array(stack.width),
      { columns, row_width: wide } = stack.axial;
    out.set(weights.row(`${name}.rows.weight`, Math.floor(position / columns)));
    out.set(weights.row(`${name}.columns.weight`, position % columns), wide);
    return out;
  }

  // Rotates one vector of `heads` heads in place: pairs (i, i + E/2) by an angle proportional to the position.
  rotate(x, heads, position) {
    if (this.kind !== "rotary") return;
    const half = this.head / 2;
    for (let i = 0; i < half; i++) {
      const angle = Math.fround(position * Math.fround(this.rates[i])),
        cos = Math.cos(angle),
        sin = Math.sin(angle);
      for (let h = 0; h < heads; h++) {
        const at = h * this.head + i,
          a = x[at],
          b = x[at + half];
        x[at] = a * cos - b * sin;
        x[at + half] = b * cos + a * sin;
      }
    }
  }

  get biased() {
    return this.kind === "alibi" || this.kind === "bucket";
  }

  // The bias of the score of head `head` between two positions.
  bias(head, query, key) {
    if (this.kind === "alibi") return -this.slopes[head] * Math.abs(query - key);
    return this.table[bucketOf(key - query, !this.causal) * this.stack.heads + head];
  }
}

// Multi-head attention with every score function. Keys and values are lists with one row per token, owned by the
// caller: hypotheses of a beam share rows, and continuing a hypothesis copies nothing.

const range = (count) => Array.from({ length: count }, (_, i) => i);

// x (heads, from) times a tensor (heads, from, to); `of` is the index of the matrix per head.
function perHead(x, heads, from, matrices, to, of = (h) => h) {
  const out = new Float32Array(heads * to);
  for (let h = 0; h < heads; h++) {
    const start = of(h) * from * to;
    for (let i = 0; i < from; i++) {
      const v = x[h * from + i],
        row = start + i * to;
      for (let j = 0; j < to; j++) out[h * to + j] += v * matrices[row + j];
    }
  }
  return out;
}

function normalised(x, heads, width) {
  const out = new Float32Array(x.length);
  for (let h = 0; h < heads; h++) {
    let sum = 0;
    for (let i = 0; i < width; i++) sum += x[h * width + i] ** 2;
    const length = Math.max(Math.sqrt(sum), 1e-12);
    for (let i = 0; i < width; i++) out[h * width + i] = x[h * width + i] / length;
  }
  return out;
}

export class Attention {
  // `project` false: one head attends with the states themselves, as in recurrent decoders. `kept`: remaining
  // heads.
  constructor(weights, name, stack, { project = true, cross = false, relative = false, kept = null }) {
    this.weights = weights;
    this.kernel = weights.kernel;
    this.name = name;
    this.headNumbers = project ? kept || range(stack.heads) : [0];
    const kv = stack.kv_heads || stack.heads,
      groups = project ? this.headNumbers.map((h) => Math.floor((h * kv) / stack.heads)) : [0];
    const used = [...new Set(groups)].sort((a, b) => a - b);
    this.heads = groups.length;
    this.kvHeads = used.length;
    this.kvOf = groups.map((group) => used.indexOf(group));
    this.project = project;
    this.width = project ? stack.head_width || stack.width / stack.heads : stack.width;
    this.valueWidth = project ? stack.value_width || this.width : stack.width;
    this.queryLayer = weights.linear(`${name}.query`);
    this.keyValueLayer = weights.linear(`${name}.key_value`);
    this.outLayer = weights.linear(`${name}.out`);
    this.scoreName = stack.score;
    this.scale = stack.score === "scaled_dot" ? 1 / Math.sqrt(this.width) : 1;
    this.score = makeScore(this, (part) => weights.vector(`${name}.score.${part}`));
    this.window = cross && stack.cross_center === "predicted" ? stack.cross_window : null; // local-p
    if (this.window)
      this.center = { hidden: weights.vector(`${name}.center.hidden`), v: weights.vector(`${name}.center.v`) };
    if (relative) {
      const part = (end) => `${name}.relative.${end}`;
      this.relative = {
        content: weights.vector(part("content")),
        place: weights.vector(part("place")),
        layer: weights.linear(part("project")),
        reach: stack.reach ?? Infinity,
        width: stack.width,
        rows: [],
      };
    }
  }

  // Append the keys and values of `rows` rows to lists[r] = {k, v}.
  addKeys(x, rows, positions, position, lists) {
    const { kvHeads, width, valueWidth } = this;
    if (!this.project) {
      for (let r = 0; r < rows; r++) {
        const row = x.slice(r * this.valueWidth, (r + 1) * this.valueWidth);
        lists[r].k.push(this.score.key(row));
        lists[r].v.push(row);
      }
      return;
    }
    const both = this.kernel.linear(x, rows, this.keyValueLayer),
      wide = kvHeads * (width + valueWidth);
    for (let r = 0; r < rows; r++) {
      const k = both.slice(r * wide, r * wide + kvHeads * width);
      if (position) position.rotate(k, kvHeads, positions[r]);
      lists[r].k.push(this.score.key(k));
      lists[r].v.push(both.slice(r * wide + kvHeads * width, (r + 1) * wide));
    }
  }

  // The output for each row of x. seen(r) -> [first, end) of the visible keys, numbered by position. `silenced`:
  // heads with zero output. `record` receives the values that the page shows.
  attend(x, rows, positions, position, lists, seen, silenced, record) {
    const { heads, width, valueWidth, kvHeads } = this,
      most = Math.max(...lists.map((list) => list.k.length));
    const q = this.project ? this.kernel.linear(x, rows, this.queryLayer) : x.slice();
    const mixed = new Float32Array(rows * heads * valueWidth),
      scores = new Float32Array(most);
    const seenBy = record && record.begin(this, rows, most);
    const muted = silenced && silenced.size ? this.headNumbers.map((_, h) => silenced.has(`${this.name}/${h}`)) : [];
    for (let r = 0; r < rows; r++) {
      const own = q.subarray(r * heads * width, (r + 1) * heads * width),
        { k, v } = lists[r],
        [first, end] = seen(r, k.length);
      if (position) position.rotate(own, heads, positions[r]);
      const by = this.relative ? this.byDistance(own, Math.max(0, end - 1)) : null;
      if (by) for (let i = 0; i < own.length; i++) own[i] += this.relative.content[i];
      const query = this.score.query(own),
        wide = query.length / heads;
      for (let h = 0; h < heads; h++) {
        const group = this.kvOf[h],
          bias = by
            ? (s) => by(h, positions[r] - s)
            : position && position.biased
              ? (s) => position.bias(this.headNumbers[h], positions[r], s)
              : null;
        const near = this.center ? this.nearCenter(own, h, end - first) : null;
        let top = -Infinity;
        const all = seenBy ? k.length : end;
        for (let s = seenBy ? 0 : first; s < all; s++) {
          const raw = this.score.compare(query, h, wide, k[s], group, s),
            added = bias ? bias(s) : 0;
          if (seenBy) seenBy.score(h, r, s, raw / this.scale, bias ? added : null, s >= first && s < end);
          if (s < first || s >= end) continue;
          scores[s] = near && !near.within(s) ? -Infinity : raw + added;
          if (scores[s] > top) top = scores[s];
        }
        let sum = 0;
        for (let s = first; s < end; s++) {
          scores[s] = top === -Infinity ? 0 : Math.exp(scores[s] - top);
          sum += scores[s];
        }
        const out = (r * heads + h) * valueWidth,
          from = group * valueWidth;
        for (let s = first; s < end; s++) {
          let weight = sum ? scores[s] / sum : 0;
          if (near) weight *= near.weight(s);
          if (seenBy) seenBy.weight(h, r, s, weight);
          if (muted[h] || weight === 0) continue;
          const row = v[s];
          for (let i = 0; i < valueWidth; i++) mixed[out + i] += weight * row[from + i];
        }
      }
    }
    const out = this.project ? this.kernel.linear(mixed, rows, this.outLayer) : mixed;
    if (seenBy) seenBy.end({ x, q, mixed, out, lists, kvHeads });
    return out;
  }

  // Relative positions: (q + v) . W r(distance) for every head and distance, computed on first use.
  byDistance(q, farthest) {
    const { place, layer, reach, width, rows } = this.relative,
      E = this.width,
      limit = Math.min(farthest, reach);
    while (rows.length <= limit) rows.push(this.kernel.linear(sinusoid(rows.length, width, true), 1, layer));
    return (h, distance) => {
      const row = rows[Math.max(0, Math.min(distance, limit))];
      let sum = 0;
      for (let i = h * E; i < (h + 1) * E; i++) sum += (q[i] + place[i]) * row[i];
      return sum * this.scale;
    };
  }

  // Local-p: keys within the window around a predicted position, weighted by a Gaussian.
  nearCenter(q, h, length) {
    const E = this.width,
      { hidden, v } = this.center,
      D = this.window;
    let sum = 0;
    for (let j = 0; j < E; j++) {
      let x = 0;
      for (let i = 0; i < E; i++) x += q[h * E + i] * hidden[(h * E + i) * E + j];
      sum += Math.tanh(x) * v[h * E + j];
    }
    const center = length / (1 + Math.exp(-sum));
    return { within: (s) => Math.abs(s - center) <= D, weight: (s) => Math.exp(-((s - center) ** 2) / (D ** 2 / 2)) };
  }
}

// Compares queries with keys: transform the query, transform the key once, compare. `part` reads the weights.
function makeScore(attention, part) {
  const { heads, kvHeads, width, scale } = attention,
    same = (x) => x;
  const keyWidth = width; // the width in recurrent stacks, too
  const dot = (q, h, wide, k, group) => {
    let sum = 0;
    for (let i = 0, a = h * wide, b = group * wide; i < wide; i++) sum += q[a + i] * k[b + i];
    return sum * scale;
  };
  switch (attention.scoreName) {
    case "general": {
      const weight = part("weight");
      return { query: (q) => perHead(q, heads, width, weight, keyWidth), key: same, compare: dot };
    }
    case "cosine": {
      const temperature = part("log_temperature").map(Math.exp);
      return {
        query: (q) => normalised(q, heads, width).map((v, i) => v * temperature[Math.floor(i / width)]),
        key: (k) => normalised(k, kvHeads, width),
        compare: dot,
      };
    }
    case "additive":
    case "concat": {
      const joined = attention.scoreName === "concat" ? part("weight") : null,
        v = part("v"),
        bias = part("bias");
      const half = (from) => {
        // of W [q ; k], per head
        const out = new Float32Array(heads * width * keyWidth);
        for (let h = 0; h < heads; h++)
          out.set(
            joined.subarray((h * 2 * width + from) * keyWidth, (h * 2 * width + from + width) * keyWidth),
            h * width * keyWidth,
          );
        return out;
      };
      const forQuery = joined ? half(0) : part("query_weight"),
        forKey = joined ? half(width) : part("key_weight");
      return {
        query: (q) => {
          const out = perHead(q, heads, width, forQuery, keyWidth);
          if (bias) for (let i = 0; i < out.length; i++) out[i] += bias[i];
          return out;
        },
        key: (k) => perHead(k, kvHeads, width, forKey, keyWidth),
        compare: (q, h, wide, k, group) => {
          let sum = 0;
          for (let i = 0; i < wide; i++) sum += Math.tanh(q[h * wide + i] + k[group * wide + i]) * v[h * wide + i];
          return sum;
        },
      };
    }
    case "location": {
      const weight = part("weight"),
        length = weight.length / (heads * width);
      return {
        query: (q) => perHead(q, heads, width, weight, length),
        key: same,
        compare: (q, h, wide, k, group, s) => (s < length ? q[h * wide + s] : -Infinity),
      };
    }
  }
  return { query: same, key: same, compare: dot };
}
