// @ts-check
// The engine of a live page: text in; hypotheses, traces and attributions out. It does not use a document, so it
// also runs outside a browser.

import { constants, setConstants } from "../shared/constants.js";
import { direction } from "../shared/direction.js";
import { Model } from "./model.js";
import { beamSearch, best, greedySearch, logSoftmax, sampleSearch } from "./search.js";
import { Codec } from "./tokenizer.js";
import { entryOf, makeTrace, Recorder } from "./tracing.js";
import { shownPixels } from "./weights.js";

const STEP = 0.002; // of the difference quotient of attributions, relative to the embedding
/** @typedef {{source?: string, features?: string | null, pixels?: Float32Array, name?: string, number?: number}} Input */

/**
 * @typedef {object} Hypothesis
 * @property {string} text
 * @property {number} score  sum of the token log-probabilities
 * @property {number} normalized  score per token
 * @property {number[]} ids
 * @property {string[]} tokens
 * @property {number[]} scores
 * @property {boolean} limited  whether it reached the length limit
 */

/**
 * @typedef {object} SearchOptions
 * @property {"greedy" | "beam" | "sample"} [strategy]
 * @property {number} [beam]
 * @property {number} [nbest]
 * @property {number} [temperature]
 * @property {number} [seed]
 * @property {number[]} [prefix]  forced ids at the start of the output
 * @property {number[]} [forbid]  ids that may not occur
 * @property {number | null} [maxLength]
 */

export class Engine {
  constructor(block, template, simd = true) {
    this.block = block;
    this.template = template;
    this.task = block.task;
    this.model = new Model(block.config, block.tensors, block.bytes, simd);
    block.bytes = ""; // the weights are copied by now
    this.codec = block.text ? new Codec(block.text) : null;
    this.features = this.codec ? this.codec.features : null;
    // output tokens are separated by spaces
    this.spaced = Boolean(block.text) && (block.text.target || block.text.source).kind === "space";
    this.labels = block.labels;
    this.image = block.config.patches && { ...block.config.patches, ...block.pixels };
    this.examples = block.examples;
    this.continues = this.task === "lm";
    this.decodes = this.model.decoder !== null;
    this.read = { key: null, record: null, state: null }; // the last encoded source
  }

  // The state before the first output token, and the record of the encoder. Search and trace share the encoded
  // source.
  startOf(source) {
    const key = `${source.join()} ${[...this.silenced].sort().join()}`;
    if (this.read.key !== key) {
      const record = new Recorder();
      record.rows.encoder = source.length;
      this.read = { key, record, state: this.model.start(source, { record }) };
    }
    return this.read;
  }

  get silenced() {
    return this.model.silenced;
  }

  targetToken(id) {
    return this.codec.piece(this.codec.target, id);
  }

  encodeTarget(text) {
    return { ids: this.codec.target.encode(text), unknown: this.codec.target.unknownTokens(text) };
  }

  /**
   * An error message for an input that cannot be read, or null.
   * @param {Input} input
   * @returns {string | null}
   */
  problem(input) {
    if (!this.codec) return null;
    if (!input.source.trim() && !this.continues) return "Type something.";
    if (this.features && !(input.features || "").trim()) return "This model needs features, too.";
    const { max_source: most } = this.block.limits,
      length = this.ids(input).length - (this.continues ? 0 : this.codec.after.length + this.codec.before.length);
    return length > most ? `The text has ${length} tokens, more than the ${most} that this model can read.` : null;
  }

  // The ids of the source, or of the text to continue.
  ids(input) {
    if (!this.continues) return this.codec.encodeSource(input);
    const ids = [...this.codec.before, ...this.codec.target.encode(input.source)];
    return ids.length ? ids : [this.block.start_id];
  }

  // The arguments of a search.
  job(input, { prefix = [], forbid = [], maxLength = null } = {}) {
    const { limits, never } = this.block,
      ids = this.ids(input),
      { eos } = this.codec.ids;
    const usual = this.continues
      ? (limits.usual ?? limits.continuation)
      : Math.min(limits.usual ?? Infinity, limits.ratio * (ids.length - 1) + limits.extra);
    const limit = Math.min(this.continues ? limits.max_target - ids.length : limits.max_target, maxLength ?? usual);
    let state = this.continues ? this.model.start() : this.startOf(ids).state;
    if (this.continues && ids.length > 1) ({ state } = this.model.read(ids.slice(0, -1), state));
    return {
      model: this.model,
      state,
      first: this.continues ? ids[ids.length - 1] : this.block.start_id,
      eos,
      blocked: never,
      limit: Math.max(limit, prefix.length),
      openEnd: this.continues,
      prefix,
      forbid,
    };
  }

  /**
   * @param {Input} input
   * @param {SearchOptions} [options]
   * @returns {{hypotheses: Hypothesis[], unknown: string[], problem: string | null}}
   */
  generate(input, options = {}) {
    const problem = this.problem(input);
    if (problem || !this.decodes)
      return { hypotheses: [], unknown: problem || !this.codec ? [] : this.codec.unknown(input), problem };
    const job = this.job(input, options),
      { strategy = "greedy", beam = 5, nbest = strategy === "greedy" ? 1 : beam } = options,
      penalty = 1;
    const found =
      strategy === "beam"
        ? beamSearch(job, { beam, nbest, penalty })
        : strategy === "sample"
          ? sampleSearch(job, { ...options, nbest: options.nbest || 1 })
          : greedySearch(job);
    const hypotheses = found.map(({ ids, scores, score, limited }) => ({
      text: this.codec.decodeTarget(ids),
      score,
      normalized: score / Math.max(1, ids.length) ** penalty,
      ids,
      tokens: ids.map((id) => this.targetToken(id)),
      scores,
      limited,
    }));
    return {
      hypotheses,
      unknown: this.codec.unknown(input),
      problem: hypotheses.length ? null : "No output satisfies the constraints.",
    };
  }

  // The most probable next tokens after the output `ids`.
  next(input, ids, { forbid = [] } = {}, count = 8) {
    const job = this.job(input),
      fed = [job.first, ...ids],
      { x } = this.model.read(fed, job.state),
      width = x.length / fed.length;
    const logits = this.model.predict(x.slice((fed.length - 1) * width), 1),
      logp = logSoftmax(logits, 0, logits.length, [...job.blocked, ...forbid]);
    return best(logp, Math.min(count, logp.length))
      .filter((id) => logp[id] > -Infinity)
      .map((id) => ({ id, token: this.targetToken(id), probability: Math.exp(logp[id]) }));
  }

  /**
   * The log-probability of each output id, as in the search.
   * @param {Input} input
   * @param {number[]} ids
   * @returns {number[]}
   */
  forced(input, ids) {
    const job = this.job(input),
      { x } = this.model.read([job.first, ...ids.slice(0, -1)], job.state),
      logits = this.model.predict(x, ids.length),
      vocab = logits.length / ids.length;
    return ids.map((id, t) => logSoftmax(logits, t * vocab, vocab, job.blocked)[id]);
  }

  // Traces

  /**
   * @param {Input} input
   * @param {number[]} [ids]  of the output
   * @returns {import("./core.js").Trace}
   */
  trace(input, ids = []) {
    const how =
      this.task === "image"
        ? this.traceImage
        : !this.decodes
          ? this.traceText
          : this.continues
            ? this.traceContinuation
            : this.tracePair;
    return makeTrace(this.template, this.model, {
      heads: this.block.alignment_heads,
      notes: [],
      ...how.call(this, input, ids),
    });
  }

  // The directions of token rows, which are those of their texts.
  directions(tokens, texts) {
    const textOf = (name) => texts[name === "input" ? "output" : name] || texts.text || "";
    return Object.fromEntries(Object.keys(tokens).map((name) => [name, direction(textOf(name))]));
  }

  tracePair(input, ids) {
    const all = this.codec.encodeSource(input),
      output = ids.length ? ids : [this.codec.ids.eos];
    const source = all.slice(0, constants.max_tokens),
      labels = output.slice(0, constants.max_tokens);
    const { state, record } = this.startOf(source);
    return {
      ...this.traceDecoder(
        state,
        record.fork(),
        labels,
        {
          source: source.map((id) => this.codec.piece(this.codec.source, id)),
        },
        { ...this.sourceTexts("source", input), output: this.codec.decodeTarget(labels) },
      ),
      notes: [...shortened("source", all), ...shortened("output", output)],
    };
  }

  traceContinuation(input, ids) {
    const all = [...this.codec.target.encode(input.source), ...ids];
    const texts = { text: input.source, ...(ids.length ? { continuation: this.codec.decodeTarget(ids) } : {}) };
    return {
      ...this.traceDecoder(this.model.start(), new Recorder(), all.slice(0, constants.max_tokens), {}, texts),
      notes: shortened("text", all),
    };
  }

  // The part of a trace that is the same for every decoder: it reads the labels, shifted by the start token.
  traceDecoder(state, record, labels, sourceTokens, texts) {
    const fed = [this.block.start_id, ...labels.slice(0, -1)],
      nameOf = (id) => this.targetToken(id);
    record.rows.decoder = fed.length;
    const { x } = this.model.read(fed, state, { record });
    const tokens = { ...sourceTokens, input: fed.map(nameOf), output: labels.map(nameOf) };
    const logits = this.model.predict(x, fed.length, record);
    return { record, logits, labels, nameOf, texts, tokens, directions: this.directions(tokens, texts) };
  }

  // Encoder models: a classifier or a masked language model.
  traceText(input) {
    const record = new Recorder(),
      all = this.codec.encodeSource(input),
      source = all.slice(0, constants.max_tokens),
      piece = (id) => this.codec.piece(this.codec.source, id);
    record.rows.encoder = source.length;
    const { states } = this.model.encode(source, { record }),
      notes = [...shortened("text", all), ...this.template.notes.filter((note) => note.kind === "method")];
    const texts = this.sourceTexts("text", input),
      tokens = { source: source.map(piece) },
      made = { record, texts, tokens, directions: this.directions(tokens, texts), notes };
    if (this.model.classifies)
      return {
        ...made,
        ...this.classify(states, record),
        texts: { ...texts, prediction: this.classify(states).prediction },
      };
    if (!this.model.output) return { ...made, logits: null, labels: [], nameOf: piece };
    const masked = this.maskEach(source);
    return { ...made, labels: source, nameOf: piece, logits: masked.logits, lensVectors: masked.vectors };
  }

  // Normalise pixels as the model expects.
  scaledPixels(pixels) {
    const { height, width, mean, scale } = this.image,
      channel = (i) => Math.floor(i / (height * width));
    return mean ? pixels.map((v, i) => (v - mean[channel(i)]) / scale[channel(i)]) : pixels;
  }

  traceImage({ pixels, name }) {
    const record = new Recorder(),
      { height, width, channels, size } = this.image;
    const { states, rows } = this.model.encode(this.scaledPixels(pixels), { record }),
      across = width / size;
    record.rows.encoder = rows;
    const names = [
        constants.tokens.cls,
        ...Array.from({ length: rows - 1 }, (_, i) => `${Math.floor(i / across) + 1}·${(i % across) + 1}`),
      ],
      found = this.classify(states, record);
    return {
      ...found,
      record,
      texts: { image: name || "image", prediction: found.prediction },
      tokens: { source: names },
      directions: { source: "ltr" },
      image: shownPixels(pixels, { height, width, channels, size }),
    };
  }

  classify(states, record = null) {
    const logits = this.model.predict(this.model.pool(states), 1, record),
      [label] = best(logits, 1),
      nameOf = (id) => this.labels[id];
    return { logits, labels: [label], nameOf, prediction: nameOf(label) };
  }

  sourceTexts(name, { source, features }) {
    return { [name]: source, ...(this.features && features ? { features } : {}) };
  }

  // A text with token t masked, unless it is special.
  masking(source, t) {
    const { mask } = this.codec.ids;
    return mask !== null && !this.codec.source.special.has(source[t])
      ? source.map((each, i) => (i === t ? mask : each))
      : source;
  }

  // Logits and lens vectors of every token, from one copy of the text per token with it masked.
  maskEach(source) {
    const layers = this.model.encoder.blocks,
      logits = [],
      vectors = layers.map(() => []);
    source.forEach((_, t) => {
      const record = new Recorder(),
        { states } = this.model.encode(this.masking(source, t), { record });
      logits.push(this.model.predict(rowOf(states, t, source.length), 1));
      layers.forEach((block, i) => vectors[i].push(rowOf(record.get(`${block.name}:out`), t, source.length)));
    });
    const flat = (rows) => {
      const out = new Float32Array(rows.length * rows[0].length);
      rows.forEach((row, r) => out.set(row, r * row.length));
      return out;
    };
    return { logits: flat(logits), vectors: (i) => flat(vectors[i]) };
  }

  // Explanations of the log-probability of predictions: output tokens, a class, or every masked token.

  // The explained quantity as parts; each part maps factors of the input embeddings to the log-probabilities of
  // some predictions. Also the number of inputs and the names of both token rows. Null if nothing is predicted.
  explained(input, ids) {
    const { model } = this;
    if (!model.output) return null;
    if (model.classifies) {
      const read = this.codec
        ? this.codec.encodeSource(input).slice(0, constants.max_tokens)
        : this.scaledPixels(input.pixels);
      const first = model.encode(read),
        [label] = this.classify(first.states).labels;
      const part = (factors) => {
        const logits = model.predict(model.pool(model.encode(read, { factors }).states), 1);
        return [logSoftmax(logits, 0, logits.length, [])[label]];
      };
      return { parts: [part], inputs: first.rows, rows: "output", columns: "source" };
    }
    if (!this.decodes) {
      const source = this.codec.encodeSource(input).slice(0, constants.max_tokens);
      const parts = source.map((id, t) => (factors) => {
        const { states } = model.encode(this.masking(source, t), { factors });
        const logits = model.predict(rowOf(states, t, source.length), 1);
        return [logSoftmax(logits, 0, logits.length, [])[id]];
      });
      return { parts, inputs: source.length, rows: "source", columns: "source" };
    }
    const source = this.continues ? null : this.codec.encodeSource(input).slice(0, constants.max_tokens);
    const labels = (this.continues ? [...this.codec.target.encode(input.source), ...ids] : ids).slice(
      0,
      constants.max_tokens,
    );
    const fed = [this.block.start_id, ...labels.slice(0, -1)];
    const part = (factors) => {
      const state = this.continues ? model.start() : model.start(source, { factors });
      const { x } = model.read(fed, state, this.continues ? { factors } : {});
      const logits = model.predict(x, fed.length),
        vocab = logits.length / fed.length;
      return labels.map((label, t) => logSoftmax(logits, t * vocab, vocab, [])[label]);
    };
    const inputs = this.continues ? labels.length : source.length;
    return { parts: [part], inputs, rows: "output", columns: this.continues ? "input" : "source" };
  }

  // Gradient x input: the derivative of the log-probability of each output token along each input embedding. A
  // difference quotient needs no backward pass.
  attribution(input, ids) {
    const found = this.explained(input, ids);
    if (!found) return null;
    const { parts, inputs, rows, columns } = found,
      lines = [];
    for (const part of parts) {
      const slopes = Array.from({ length: inputs }, (_, s) => {
        const [up, down] = [1 + STEP, 1 - STEP].map((factor) =>
          part(Array.from({ length: inputs }, (_, i) => (i === s ? factor : 1))),
        );
        return up.map((value, t) => (value - down[t]) / (2 * STEP));
      });
      slopes[0].forEach((_, t) => lines.push(slopes.map((slope) => slope[t])));
    }
    return { values: entryOf(Float32Array.from(lines.flat()), lines.length, inputs), rows, columns };
  }

  // Estimated milliseconds of an attribution, from one of its forward passes.
  attributionTime(input, ids) {
    const found = this.explained(input, ids);
    if (!found) return 0;
    const began = performance.now();
    found.parts[0](null);
    return 2 * found.inputs * found.parts.length * (performance.now() - began);
  }

  // The lost log-probability of the output per silenced head, one head at a time. Yields null after intermediate
  // steps.
  *importance(input, ids) {
    const found = this.explained(input, ids);
    if (!found) return;
    const sum = (part) => part(null).reduce((a, b) => a + b, 0),
      whole = [];
    for (const part of found.parts) {
      whole.push(sum(part));
      if (whole.length < found.parts.length) yield null;
    }
    for (const attention of this.model.attentions) {
      for (let index = 0; index < attention.heads; index++) {
        let change = 0;
        for (const [i, part] of found.parts.entries()) {
          if (i) yield null;
          change += whole[i] - this.without(`${attention.name}/${index}`, () => sum(part));
        }
        yield { map: attention.name, index, change };
      }
    }
  }

  // Compute with a head silenced, then restore it.
  without(key, compute) {
    const had = this.silenced.has(key);
    this.silenced.add(key);
    try {
      return compute();
    } finally {
      if (!had) this.silenced.delete(key);
    }
  }
}

const rowOf = (x, t, rows) => x.slice((t * x.length) / rows, ((t + 1) * x.length) / rows);

const shortened = (side, ids) =>
  ids.length > constants.max_tokens
    ? [
        {
          kind: "shortened",
          text: constants.notes.shortened
            .replace("{side}", side)
            .replace("{count}", ids.length.toLocaleString("en"))
            .replace("{limit}", String(constants.max_tokens)),
        },
      ]
    : [];

export function makeEngine(block, template, simd = true) {
  setConstants(template.constants);
  return new Engine(block, template, simd);
}
