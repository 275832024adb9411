// The model: token ids or an image in, logits out. The same computation as regard's own, from the same config.

import { ACTIVATIONS, Transformer, makeNorm } from "./layers.js";
import { RecurrentDecoder, RecurrentEncoder } from "./recurrent.js";
import { Weights } from "./weights.js";

const isRecurrent = (stack) => stack.mixer === "gru" || stack.mixer === "lstm";

export class Model {
  constructor(config, tensors, bytes, simd = true) {
    const weights = new Weights(tensors, bytes, simd);
    this.config = config;
    this.weights = weights;
    this.kernel = weights.kernel;
    const { encoder, decoder } = config;
    this.encoder = !encoder ? null : isRecurrent(encoder) ? new RecurrentEncoder(weights, "encoder", encoder) : new Transformer(weights, "encoder", encoder, { causal: false });
    this.decoder = !decoder ? null : isRecurrent(decoder) ? new RecurrentDecoder(weights, "decoder", decoder) : new Transformer(weights, "decoder", decoder, { causal: true, sourced: Boolean(encoder) });
    this.top = this.decoder || this.encoder;
    this.output = weights.linear("output");
    this.pooler = weights.linear("pooler");
    this.transform = weights.linear("transform.dense");
    this.transformNorm = this.transform && makeNorm(weights, "transform.norm", decoder || encoder);
    this.silenced = new Set(); // `${attention}/${head}`: heads whose output is zero
  }

  // Every attention, encoder first.
  get attentions() { return [this.encoder, this.decoder].flatMap((stack) => (stack ? stack.attentions : [])); }

  get classifies() { return this.config.output === "classes"; }

  // Embeddings of ids, `factors` times as large each if given (for attribution).
  embed(side, ids, factors = null) {
    const name = `${side}_embedding.weight`, width = this.weights.tensors.get(name).width, out = new Float32Array(ids.length * width);
    const scale = this.config.scale_embeddings ? Math.sqrt(width) : 1;
    ids.forEach((id, r) => { const row = this.weights.row(name, id), times = scale * (factors ? factors[r] : 1); for (let i = 0; i < width; i++) out[r * width + i] = row[i] * times; });
    return out;
  }

  // Patches of an image (channels, height, width), row by row, after the class token.
  embedImage(pixels, factors = null) {
    const { channels, height, width, size } = this.config.patches, across = width / size, count = across * (height / size);
    const patches = new Float32Array(count * channels * size * size);
    for (let s = 0, at = 0; s < count; s++) for (let c = 0; c < channels; c++) for (let y = 0; y < size; y++) for (let x = 0; x < size; x++) {
      patches[at++] = pixels[(c * height + Math.floor(s / across) * size + y) * width + (s % across) * size + x];
    }
    const rows = this.kernel.linear(patches, count, this.weights.linear("image.project")), first = this.weights.vector("image.first"), out = new Float32Array(first.length + rows.length);
    out.set(first);
    out.set(rows, first.length);
    return factors ? out.map((v, i) => v * factors[Math.floor(i / first.length)]) : out;
  }

  // Encode a source, ids or pixels -> {states, rows}
  encode(source, { record = null, factors = null } = {}) {
    const image = this.config.patches !== null, x = image ? this.embedImage(source, factors) : this.embed("source", source, factors);
    const rows = image ? x.length / this.config.encoder.width : source.length, types = this.weights.has("token_type_embedding.weight") ? this.weights.row("token_type_embedding.weight", 0) : null;
    if (record) record.keepAll("source", { embedding: x, segment: types });
    const typed = types ? x.map((v, i) => v + types[i % types.length]) : x;
    return this.encoder.encode(typed, rows, { silenced: this.silenced, record });
  }

  // The state before the first output token.
  start(source, options) { return this.decoder.start(this.encoder ? this.encode(source, options) : null); }

  // Feed tokens of one sequence -> a hidden state for each, and the state after them.
  read(ids, state, { record = null, factors = null } = {}) {
    return this.decoder.read(this.embed("target", ids, factors), ids.length, state, { silenced: this.silenced, record });
  }

  // Feed one token to every hypothesis -> their logits, one row each, and their states.
  step(tokens, states) {
    const { x, states: next } = this.decoder.step(this.embed("target", tokens), states, { silenced: this.silenced, record: null });
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
    if (this.transform) inner = this.transformNorm(this.kernel.linear(x, rows, this.transform).map(ACTIVATIONS[(this.config.decoder || this.config.encoder).activation]), rows);
    if (record) record.keep("output:x", inner);
    return this.kernel.linear(inner, rows, this.output);
  }
}
