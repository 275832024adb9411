// @ts-check
// The model: token ids or an image in, logits out; and the layers of a Transformer. The same computation as in
// Python, from the same config.

import { Attention, Position, sigmoid } from "./attention.js";
import { RecurrentDecoder, RecurrentEncoder } from "./recurrent.js";
import { Weights } from "./weights.js";

// Layers of a Transformer: norms, feed-forward, and the stack that runs an encoder or a decoder.

// The error function, to 1e-7.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const y =
    1 -
    ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * Math.exp(-x * x);
  return x < 0 ? -y : y;
}
export const ACTIVATIONS = {
  relu: (x) => (x > 0 ? x : 0),
  gelu: (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  silu: (x) => x * sigmoid(x),
  tanh: Math.tanh,
};

export function sumOf(a, b) {
  const out = new Float32Array(a.length);
  for (let i = 0; i < a.length; i++) out[i] = a[i] + b[i];
  return out;
}

// LayerNorm or RMSNorm over rows; null if the model has no norm of this name.
export function makeNorm(weights, name, stack) {
  const gamma = weights.vector(`${name}.weight`),
    beta = weights.vector(`${name}.bias`);
  if (!gamma) return null;
  const width = gamma.length,
    rms = stack.norm === "rms";
  return (x, rows) => {
    const out = new Float32Array(x.length);
    for (let r = 0, at = 0; r < rows; r++, at += width) {
      let mean = 0,
        square = 0;
      if (!rms) {
        for (let i = 0; i < width; i++) mean += x[at + i];
        mean /= width;
      }
      for (let i = 0; i < width; i++) square += (x[at + i] - mean) ** 2;
      const scale = 1 / Math.sqrt(square / width + stack.norm_eps);
      for (let i = 0; i < width; i++) out[at + i] = (x[at + i] - mean) * scale * gamma[i] + (beta ? beta[i] : 0);
    }
    return out;
  };
}

class FeedForward {
  constructor(weights, name, stack) {
    this.kernel = weights.kernel;
    this.name = name;
    this.up = weights.linear(`${name}.up`);
    this.gate = weights.linear(`${name}.gate`);
    this.down = weights.linear(`${name}.down`);
    this.act = ACTIVATIONS[stack.activation];
  }

  forward(x, rows, record) {
    const up = this.kernel.linear(x, rows, this.up),
      gate = this.gate ? this.kernel.linear(x, rows, this.gate) : null;
    for (let i = 0; i < up.length; i++) up[i] = gate ? this.act(gate[i]) * up[i] : this.act(up[i]);
    const out = this.kernel.linear(up, rows, this.down);
    if (record) record.keepAll(this.name, { x, neurons: up, o: out });
    return out;
  }
}

// One layer; `pass` holds the values shared by all layers of a forward pass (see Transformer.run).
class Block {
  constructor(weights, name, stack, index, sourced) {
    this.name = name;
    this.pre = stack.norm_at === "pre";
    this.reversible = stack.residual === "reversible";
    this.attention = new Attention(weights, `${name}.attention`, stack, {
      relative: stack.position === "relative",
      kept: stack.kept_heads && stack.kept_heads[index],
    });
    this.cross = sourced
      ? new Attention(weights, `${name}.cross`, stack, {
          cross: true,
          kept: stack.kept_cross_heads && stack.kept_cross_heads[index],
        })
      : null;
    this.feedForward = new FeedForward(weights, `${name}.feed_forward`, stack);
    const norm = (part) => makeNorm(weights, `${name}.${part}_residual.norm`, stack);
    this.norms = { attention: norm("attention"), cross: norm("cross"), feed_forward: norm("feed_forward") };
  }

  forward(x, rows, pass, lists, source) {
    const { positions, position, silenced, record } = pass;
    const attend = (inner) => {
      this.attention.addKeys(inner, rows, positions, position, lists);
      return this.attention.attend(inner, rows, positions, position, lists, pass.seen, silenced, record);
    };
    const feed = (inner) => this.feedForward.forward(inner, rows, record);
    if (record) record.keep(`${this.name}:x`, x);
    if (this.reversible) x = this.twoStreams(x, rows, attend, feed);
    else {
      x = this.residual(x, rows, "attention", attend, record);
      if (this.cross)
        x = this.residual(
          x,
          rows,
          "cross",
          (inner) => this.cross.attend(inner, rows, positions, null, source, pass.seenSource, silenced, record),
          record,
        );
      x = this.residual(x, rows, "feed_forward", feed, record);
    }
    if (record) record.keep(`${this.name}:out`, x);
    return x;
  }

  // Add & norm: norm(x + f(x)) (post), or x + f(norm(x)) (pre).
  residual(x, rows, part, sublayer, record) {
    const norm = this.norms[part],
      o = sublayer(this.pre ? norm(x, rows) : x),
      sum = sumOf(x, o),
      out = this.pre ? sum : norm(sum, rows);
    if (record) record.keepAll(`${this.name}.${part}_residual`, { x, o, sum, out });
    return out;
  }

  // Reversible layers: y1 = x1 + attention(norm(x2)), y2 = x2 + feed_forward(norm(y1)); the streams are
  // concatenated.
  twoStreams(x, rows, attend, feed) {
    const wide = x.length / rows,
      half = wide / 2;
    const stream = (k) => {
      const out = new Float32Array(rows * half);
      for (let r = 0; r < rows; r++) out.set(x.subarray(r * wide + k * half, r * wide + (k + 1) * half), r * half);
      return out;
    };
    const second = stream(1),
      one = sumOf(stream(0), attend(this.norms.attention(second, rows))),
      two = sumOf(second, feed(this.norms.feed_forward(one, rows)));
    const out = new Float32Array(x.length);
    for (let r = 0; r < rows; r++) {
      out.set(one.subarray(r * half, (r + 1) * half), r * wide);
      out.set(two.subarray(r * half, (r + 1) * half), r * wide + half);
    }
    return out;
  }
}

const emptyLists = (count) => Array.from({ length: count }, () => ({ k: [], v: [] }));
const fork = (list) => ({ k: list.k.slice(), v: list.v.slice() });

export class Transformer {
  constructor(weights, name, stack, { causal, sourced = false }) {
    this.name = name;
    this.stack = stack;
    this.causal = causal;
    this.position = new Position(stack, causal, weights, name);
    this.embedNorm = makeNorm(weights, `${name}.embed_norm`, stack);
    this.blocks = Array.from(
      { length: stack.layers },
      (_, i) => new Block(weights, `${name}.blocks.${i}`, stack, i, sourced),
    );
    this.norm = makeNorm(weights, `${name}.norm`, stack);
    this.window = Math.min(stack.window || Infinity, stack.memory || Infinity);
    this.sourceWindow = stack.cross_center === "step" && stack.cross_window ? stack.cross_window : Infinity;
  }

  get attentions() {
    return this.blocks.flatMap((block) => (block.cross ? [block.attention, block.cross] : [block.attention]));
  }

  // Run rows through all layers. lists[layer][r]: the keys that row r appends to and attends to.
  run(x, rows, positions, lists, source, { silenced, record }) {
    const { position, causal, window, sourceWindow } = this,
      embedded = new Float32Array(x);
    const width = x.length / rows,
      vectors = positions.map((p) => position.embed(p));
    if (vectors[0])
      for (let r = 0; r < rows; r++) for (let i = 0; i < width; i++) embedded[r * width + i] += vectors[r][i];
    let hidden = this.embedNorm ? this.embedNorm(embedded, rows) : embedded;
    if (record)
      record.keepAll(this.name, {
        embedding: x,
        position: vectors[0] ? Float32Array.from(vectors.flatMap((v) => Array.from(v))) : null,
      });
    if (this.stack.residual === "reversible") {
      const two = new Float32Array(2 * hidden.length);
      for (let r = 0; r < rows; r++)
        for (const k of [0, 1]) two.set(hidden.subarray(r * width, (r + 1) * width), (2 * r + k) * width);
      hidden = two;
    }
    const pass = {
      positions,
      position,
      silenced,
      record,
      seen: (r, keys) => {
        const p = positions[r],
          end = causal ? p + 1 : Math.min(keys, p + window + 1);
        return [Math.max(0, p - window), end];
      },
      seenSource: (r, keys) => {
        const end = Math.min(keys, positions[r] + sourceWindow + 1);
        return [Math.min(end, Math.max(0, positions[r] - sourceWindow)), end];
      },
    };
    this.blocks.forEach((block, i) => {
      hidden = block.forward(hidden, rows, pass, lists[i], source && source[i]);
    });
    return this.norm ? this.norm(hidden, rows) : hidden;
  }

  // Encode a whole input at once.
  encode(x, rows, options) {
    const positions = Array.from({ length: rows }, (_, i) => i);
    const lists = emptyLists(this.blocks.length).map((list) => new Array(rows).fill(list)); // all rows append to the same list
    return { states: this.run(x, rows, positions, lists, null, options), rows };
  }

  // The state before the first token, with the keys of the source.
  start(encoded) {
    const layers = emptyLists(this.blocks.length);
    if (!encoded) return { length: 0, layers, source: null };
    const source = emptyLists(this.blocks.length);
    this.blocks.forEach((block, i) =>
      block.cross.addKeys(encoded.states, encoded.rows, null, null, new Array(encoded.rows).fill(source[i])),
    );
    return { length: 0, layers, source };
  }

  // Run tokens of one sequence from a state.
  read(x, rows, state, options) {
    const next = { ...state, length: state.length + rows, layers: state.layers.map(fork) };
    const each = (list) => new Array(rows).fill(list),
      positions = Array.from({ length: rows }, (_, i) => state.length + i);
    return {
      x: this.run(x, rows, positions, next.layers.map(each), state.source && state.source.map(each), options),
      state: next,
    };
  }

  // Run one token for every hypothesis.
  step(x, states, options) {
    const next = states.map((state) => ({ ...state, length: state.length + 1, layers: state.layers.map(fork) }));
    const lists = this.blocks.map((_, i) => next.map((state) => state.layers[i]));
    const source = states[0].source && this.blocks.map((_, i) => states.map((state) => state.source[i]));
    return {
      x: this.run(
        x,
        states.length,
        states.map((state) => state.length),
        lists,
        source,
        options,
      ),
      states: next,
    };
  }
}

// The model: token ids or an image in, logits out. The same computation as in Python, from the same config.

const isRecurrent = (stack) => stack.mixer === "gru" || stack.mixer === "lstm";

export class Model {
  constructor(config, tensors, bytes, simd = true) {
    const weights = new Weights(tensors, bytes, simd);
    this.config = config;
    this.weights = weights;
    this.kernel = weights.kernel;
    const { encoder, decoder } = config;
    this.encoder = !encoder
      ? null
      : isRecurrent(encoder)
        ? new RecurrentEncoder(weights, "encoder", encoder)
        : new Transformer(weights, "encoder", encoder, { causal: false });
    this.decoder = !decoder
      ? null
      : isRecurrent(decoder)
        ? new RecurrentDecoder(weights, "decoder", decoder)
        : new Transformer(weights, "decoder", decoder, { causal: true, sourced: Boolean(encoder) });
    this.top = this.decoder || this.encoder;
    this.output = weights.linear("output");
    this.pooler = weights.linear("pooler");
    this.transform = weights.linear("transform.dense");
    this.transformNorm = this.transform && makeNorm(weights, "transform.norm", decoder || encoder);
    this.silenced = new Set(); // `${attention}/${head}`: heads with zero output
  }

  // All attentions, encoder first.
  get attentions() {
    return [this.encoder, this.decoder].flatMap((stack) => (stack ? stack.attentions : []));
  }

  get classifies() {
    return this.config.output === "classes";
  }

  // Embeddings of ids, scaled by `factors` (for attribution).
  embed(side, ids, factors = null) {
    const name = `${side}_embedding.weight`,
      width = this.weights.tensors.get(name).width,
      out = new Float32Array(ids.length * width);
    const scale = this.config.scale_embeddings ? Math.sqrt(width) : 1;
    ids.forEach((id, r) => {
      const row = this.weights.row(name, id),
        times = scale * (factors ? factors[r] : 1);
      for (let i = 0; i < width; i++) out[r * width + i] = row[i] * times;
    });
    return out;
  }

  // Patches of an image (channels, height, width), row by row, after the class token.
  embedImage(pixels, factors = null) {
    const { channels, height, width, size } = this.config.patches,
      across = width / size,
      count = across * (height / size);
    const patches = new Float32Array(count * channels * size * size);
    for (let s = 0, at = 0; s < count; s++)
      for (let c = 0; c < channels; c++)
        for (let y = 0; y < size; y++)
          for (let x = 0; x < size; x++) {
            patches[at++] = pixels[(c * height + Math.floor(s / across) * size + y) * width + (s % across) * size + x];
          }
    const rows = this.kernel.linear(patches, count, this.weights.linear("image.project")),
      first = this.weights.vector("image.first"),
      out = new Float32Array(first.length + rows.length);
    out.set(first);
    out.set(rows, first.length);
    return factors ? out.map((v, i) => v * factors[Math.floor(i / first.length)]) : out;
  }

  // Encode a source, ids or pixels -> {states, rows}
  encode(source, { record = null, factors = null } = {}) {
    const image = this.config.patches !== null,
      x = image ? this.embedImage(source, factors) : this.embed("source", source, factors);
    const rows = image ? x.length / this.config.encoder.width : source.length,
      types = this.weights.has("token_type_embedding.weight")
        ? this.weights.row("token_type_embedding.weight", 0)
        : null;
    if (record) record.keepAll("source", { embedding: x, segment: types });
    const typed = types ? x.map((v, i) => v + types[i % types.length]) : x;
    return this.encoder.encode(typed, rows, { silenced: this.silenced, record });
  }

  // The state before the first output token.
  start(source, options) {
    return this.decoder.start(this.encoder ? this.encode(source, options) : null);
  }

  // Feed tokens of one sequence -> a hidden state for each, and the state after them.
  read(ids, state, { record = null, factors = null } = {}) {
    return this.decoder.read(this.embed("target", ids, factors), ids.length, state, {
      silenced: this.silenced,
      record,
    });
  }

  // Feed one token to every hypothesis -> their logits, one row each, and their states.
  step(tokens, states) {
    const { x, states: next } = this.decoder.step(this.embed("target", tokens), states, {
      silenced: this.silenced,
      record: null,
    });
    return { logits: this.predict(x, tokens.length), states: next };
  }

  // The first hidden state, through the pooler if there is one.
  pool(x) {
    const first = x.slice(0, this.output.width);
    return this.pooler ? this.kernel.linear(first, 1, this.pooler).map(Math.tanh) : first;
  }

  predict(x, rows, record = null) {
    if (!this.output) return x;
    let inner = x;
    if (this.transform)
      inner = this.transformNorm(
        this.kernel
          .linear(x, rows, this.transform)
          .map(ACTIVATIONS[(this.config.decoder || this.config.encoder).activation]),
        rows,
      );
    if (record) record.keep("output:x", inner);
    return this.kernel.linear(inner, rows, this.output);
  }
}
