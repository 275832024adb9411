// The engine of a live page: text in; hypotheses, traces, attributions out. No document, so that it also runs elsewhere.

import { Model } from "./model.js";
import { beamSearch, best, greedySearch, logSoftmax, sampleSearch } from "./search.js";
import { makeTokenizer } from "./tokenizer.js";
import { Recorder, entryOf, makeTrace } from "./tracing.js";
import { encodeBytes } from "./weights.js";

const MAX_SHOWN = 300; // tokens per side in a trace
const STEP = 0.002; // of the difference quotient of attributions, relative to the embedding
const RIGHT_TO_LEFT = /^\P{L}*[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}\p{Script=Samaritan}\p{Script=Mandaic}]/u;
const directionOfText = (text) => (RIGHT_TO_LEFT.test(text) ? "rtl" : "ltr");

// The text side: examples to ids, ids to text and to shown tokens.
class Codec {
  constructor({ source, target, features, columns, separator, frame, ids }) {
    this.ids = ids;
    this.source = makeTokenizer(source.state, source.kind, ids);
    this.target = target ? makeTokenizer(target.state, target.kind, ids) : this.source;
    this.features = columns.includes("features") ? { names: features, separator } : null;
    this.featureIds = new Map(features.map((name, i) => [name, this.source.size + i]));
    this.names = features;
    this.before = frame === "both" || frame === "start" ? [ids.sos] : [];
    this.after = frame === "both" || frame === "end" ? [ids.eos] : [];
  }

  split(features) { return (features || "").split(this.features ? this.features.separator : ";").map((name) => name.trim()).filter(Boolean); }

  encodeSource({ source, features }) {
    const names = this.features ? this.split(features) : [];
    return [...this.before, ...names.map((name) => this.featureIds.get(name) ?? this.ids.unk), ...this.source.encode(source), ...this.after];
  }

  unknown({ source, features }) {
    const names = this.features ? this.split(features) : [];
    return [...this.source.unknownTokens(source), ...names.filter((name) => !this.featureIds.has(name))];
  }

  decodeTarget(ids) { return this.target.decode(ids.filter((id) => id < this.target.size)); }

  piece(tokenizer, id) { return id < tokenizer.size ? tokenizer.piece(id) : this.names[id - tokenizer.size] ?? `<${id}>`; }
}

export class Engine {
  constructor(block, template, simd = true) {
    this.block = block;
    this.template = template;
    this.task = block.task;
    this.model = new Model(block.config, block.tensors, block.bytes, simd);
    block.bytes = ""; // the weights are in memory now
    this.codec = block.text ? new Codec(block.text) : null;
    this.features = this.codec ? this.codec.features : null;
    this.spaced = Boolean(block.text) && (block.text.target || block.text.source).kind === "space"; // tokens of the output stand apart
    this.labels = block.labels;
    this.image = block.config.patches && { ...block.config.patches, ...block.pixels };
    this.examples = block.examples;
    this.continues = this.task === "lm";
    this.decodes = this.model.decoder !== null;
  }

  get silenced() { return this.model.silenced; }

  targetToken(id) { return this.codec.piece(this.codec.target, id); }

  encodeTarget(text) { return { ids: this.codec.target.encode(text), unknown: this.codec.target.unknownTokens(text) }; }

  // Why an input cannot be read, in words; null if it can.
  problem(input) {
    if (!this.codec) return null;
    if (!input.source.trim() && !this.continues) return "Type something.";
    if (this.features && !(input.features || "").trim()) return "This model needs features, too.";
    const { max_source: most } = this.block.limits, length = this.ids(input).length - (this.continues ? 0 : this.codec.after.length + this.codec.before.length);
    return length > most ? `The text has ${length} tokens, more than the ${most} that this model can read.` : null;
  }

  // The ids that the model reads first: the source, or the text to continue.
  ids(input) {
    if (!this.continues) return this.codec.encodeSource(input);
    const ids = [...this.codec.before, ...this.codec.target.encode(input.source)];
    return ids.length ? ids : [this.block.start_id];
  }

  // What the search needs of an input.
  job(input, { prefix = [], forbid = [], maxLength = null } = {}) {
    const { limits, never } = this.block, ids = this.ids(input), { eos } = this.codec.ids;
    const usual = this.continues ? limits.usual ?? limits.continuation : Math.min(limits.usual ?? Infinity, limits.ratio * (ids.length - 1) + limits.extra);
    const limit = Math.min(this.continues ? limits.max_target - ids.length : limits.max_target, maxLength ?? usual);
    let state = this.model.start(ids);
    if (this.continues && ids.length > 1) ({ state } = this.model.read(ids.slice(0, -1), state));
    return { model: this.model, state, first: this.continues ? ids[ids.length - 1] : this.block.start_id, eos, blocked: never, limit: Math.max(limit, prefix.length), openEnd: this.continues, prefix, forbid };
  }

  generate(input, options = {}) {
    const problem = this.problem(input);
    if (problem || !this.decodes) return { hypotheses: [], unknown: problem || !this.codec ? [] : this.codec.unknown(input), problem };
    const job = this.job(input, options), { strategy = "greedy", beam = 5, nbest = strategy === "greedy" ? 1 : beam } = options, penalty = 1;
    const found = strategy === "beam" ? beamSearch(job, { beam, nbest, penalty }) : strategy === "sample" ? sampleSearch(job, { ...options, nbest: options.nbest || 1 }) : greedySearch(job);
    const hypotheses = found.map(({ ids, scores, score, limited }) => ({
      text: this.codec.decodeTarget(ids), score, normalized: score / Math.max(1, ids.length) ** penalty, ids, tokens: ids.map((id) => this.targetToken(id)), scores, limited,
    }));
    return { hypotheses, unknown: this.codec.unknown(input), problem: hypotheses.length ? null : "Nothing fits what was asked for." };
  }

  // The most probable tokens after `ids` of the output.
  next(input, ids, { forbid = [] } = {}, count = 8) {
    const job = this.job(input), fed = [job.first, ...ids], { x } = this.model.read(fed, job.state), width = x.length / fed.length;
    const logits = this.model.predict(x.slice((fed.length - 1) * width), 1), logp = logSoftmax(logits, 0, logits.length, [...job.blocked, ...forbid]);
    return best(logp, Math.min(count, logp.length)).filter((id) => logp[id] > -Infinity).map((id) => ({ id, token: this.targetToken(id), probability: Math.exp(logp[id]) }));
  }

  // The log-probability of each of the output's ids, as the search computes it.
  forced(input, ids) {
    const job = this.job(input), { x } = this.model.read([job.first, ...ids.slice(0, -1)], job.state), logits = this.model.predict(x, ids.length), vocab = logits.length / ids.length;
    return ids.map((id, t) => logSoftmax(logits, t * vocab, vocab, job.blocked)[id]);
  }

  // Traces

  trace(input, ids = []) {
    const record = new Recorder(), made = (this.task === "image" ? this.traceImage : !this.decodes ? this.traceText : this.continues ? this.traceContinuation : this.tracePair).call(this, input, ids, record);
    return makeTrace(this.template, this.model, { record, heads: this.block.alignment_heads, notes: [], ...made });
  }

  rows(tokens) { return { tokens, directions: (texts) => Object.fromEntries(Object.keys(tokens).map((name) => [name, directionOfText(texts[name === "input" ? "output" : name] || texts.text || "")])) }; }

  tracePair(input, ids, record) {
    const all = this.codec.encodeSource(input), output = ids.length ? ids : [this.codec.ids.eos];
    const source = all.slice(0, MAX_SHOWN), labels = output.slice(0, MAX_SHOWN), fed = [this.block.start_id, ...labels.slice(0, -1)];
    record.rows = { encoder: source.length, decoder: fed.length };
    const { x } = this.model.read(fed, this.model.start(source, { record }), { record }), nameOf = (id) => this.targetToken(id);
    const texts = { ...this.sourceTexts("source", input), output: this.codec.decodeTarget(labels) };
    const { tokens, directions } = this.rows({ source: source.map((id) => this.codec.piece(this.codec.source, id)), input: fed.map(nameOf), output: labels.map(nameOf) });
    return { logits: this.model.predict(x, fed.length, record), labels, nameOf, texts, tokens, directions: directions(texts), notes: [...shortened("source", all), ...shortened("output", output)] };
  }

  traceContinuation(input, ids, record) {
    const all = [...this.codec.target.encode(input.source), ...ids], labels = all.slice(0, MAX_SHOWN), fed = [this.block.start_id, ...labels.slice(0, -1)];
    record.rows = { decoder: fed.length };
    const { x } = this.model.read(fed, this.model.start(), { record }), nameOf = (id) => this.targetToken(id);
    const texts = { text: input.source, ...(ids.length ? { continuation: this.codec.decodeTarget(ids) } : {}) };
    const { tokens, directions } = this.rows({ input: fed.map(nameOf), output: labels.map(nameOf) });
    return { logits: this.model.predict(x, fed.length, record), labels, nameOf, texts, tokens, directions: directions(texts), notes: shortened("text", all) };
  }

  // An encoder alone: a classifier, or a masked language model.
  traceText(input, _, record) {
    const all = this.codec.encodeSource(input), source = all.slice(0, MAX_SHOWN), piece = (id) => this.codec.piece(this.codec.source, id);
    record.rows = { encoder: source.length };
    const { states } = this.model.encode(source, { record }), notes = [...shortened("text", all), ...this.template.notes.filter((note) => !/the first \d+\.$/.test(note))];
    const texts = this.sourceTexts("text", input), { tokens, directions } = this.rows({ source: source.map(piece) }), made = { texts, tokens, directions: directions(texts), notes };
    if (this.model.classifies) return { ...made, ...this.classify(states, record), texts: { ...texts, prediction: this.classify(states).prediction } };
    if (!this.model.output) return { ...made, logits: null, labels: [], nameOf: piece };
    const masked = this.maskEach(source);
    return { ...made, labels: source, nameOf: piece, logits: masked.logits, lensVectors: masked.vectors };
  }

  traceImage({ pixels, name }, _, record) {
    const { height, width, channels, size, mean, scale } = this.image, scaled = mean ? pixels.map((v, i) => { const c = Math.floor(i / (height * width)); return (v - mean[c]) / scale[c]; }) : pixels;
    const { states, rows } = this.model.encode(scaled, { record }), across = width / size;
    record.rows = { encoder: rows };
    const names = ["<cls>", ...Array.from({ length: rows - 1 }, (_, i) => `${Math.floor(i / across) + 1}·${(i % across) + 1}`)], found = this.classify(states, record);
    return { ...found, texts: { image: name || "image", prediction: found.prediction }, tokens: { source: names }, directions: { source: "ltr" }, image: shownPixels(pixels, { height, width, channels, size }) };
  }

  classify(states, record = null) {
    const logits = this.model.predict(this.model.pool(states), 1, record), [label] = best(logits, 1), nameOf = (id) => this.labels[id];
    return { logits, labels: [label], nameOf, prediction: nameOf(label) };
  }

  sourceTexts(name, { source, features }) { return { [name]: source, ...(this.features && features ? { features } : {}) }; }

  // Read a text once per token with that token masked -> logits and lens vectors of the masked tokens.
  maskEach(source) {
    const { mask } = this.codec.ids, layers = this.model.encoder.blocks, logits = [], vectors = layers.map(() => []);
    source.forEach((id, t) => {
      const hides = mask !== null && !this.codec.source.special.has(id), record = new Recorder();
      const { states } = this.model.encode(hides ? source.map((each, i) => (i === t ? mask : each)) : source, { record });
      const row = (x) => x.slice((t * x.length) / source.length, ((t + 1) * x.length) / source.length);
      logits.push(this.model.predict(row(states), 1));
      layers.forEach((block, i) => vectors[i].push(row(record.get(`${block.name}:out`))));
    });
    const flat = (rows) => { const out = new Float32Array(rows.length * rows[0].length); rows.forEach((row, r) => out.set(row, r * row.length)); return out; };
    return { logits: flat(logits), vectors: (i) => flat(vectors[i]) };
  }

  // Log-probabilities of the output tokens (or of the class), with embeddings of the input scaled by `factors`.
  logProbabilities(input, ids, factors = null) {
    if (!this.decodes) {
      const logits = this.model.predict(this.model.pool(this.model.encode(this.codec.encodeSource(input), { factors }).states), 1);
      return [logSoftmax(logits, 0, logits.length, [])[ids[0]]];
    }
    const labels = this.continues ? [...this.codec.target.encode(input.source), ...ids] : ids, fed = [this.block.start_id, ...labels.slice(0, -1)];
    const state = this.continues ? this.model.start() : this.model.start(this.codec.encodeSource(input), { factors });
    const { x } = this.model.read(fed, state, this.continues ? { factors } : {}), logits = this.model.predict(x, fed.length), vocab = logits.length / fed.length;
    return labels.map((label, t) => logSoftmax(logits, t * vocab, vocab, [])[label]);
  }

  // The class that the model predicts, as the ids whose log-probability attribution and importance measure.
  measured(input, ids) {
    if (this.decodes) return ids;
    return this.model.classifies ? this.classify(this.model.encode(this.codec.encodeSource(input)).states).labels : null;
  }

  // Gradient x input: how the log-probability of each output token changes as the embedding of each input token grows.
  // It is the derivative along the embedding itself, so a difference quotient gives it without a backward pass.
  attribution(input, given) {
    const ids = this.codec ? this.measured(input, given) : null;
    if (!ids) return null;
    const length = this.continues ? this.codec.target.encode(input.source).length + ids.length : this.codec.encodeSource(input).length;
    const columns = Array.from({ length }, (_, s) => {
      const [up, down] = [1 + STEP, 1 - STEP].map((factor) => this.logProbabilities(input, ids, Array.from({ length }, (_, i) => (i === s ? factor : 1))));
      return up.map((value, t) => (value - down[t]) / (2 * STEP));
    });
    const rows = columns[0].length, out = new Float32Array(rows * length);
    columns.forEach((column, s) => column.forEach((value, t) => { out[t * length + s] = value; }));
    return { values: entryOf(out, rows, length), rows: "output", columns: this.continues ? "input" : "source" };
  }

  // For each head: the log-probability of the output that is lost when it is silenced, one head at a time.
  *importance(input, given) {
    const ids = this.codec ? this.measured(input, given) : null;
    if (!ids) return;
    const sum = () => this.logProbabilities(input, ids).reduce((a, b) => a + b, 0), whole = sum();
    for (const attention of this.model.attentions) {
      for (let index = 0; index < attention.heads; index++) {
        const key = `${attention.name}/${index}`, had = this.silenced.has(key);
        this.silenced.add(key);
        const without = sum();
        if (!had) this.silenced.delete(key);
        yield { map: attention.name, index, change: whole - without };
      }
    }
  }
}

const shortened = (side, ids) => (ids.length > MAX_SHOWN ? [`The ${side} has ${ids.length.toLocaleString("en")} tokens; the model was shown, and you see, the first ${MAX_SHOWN}.`] : []);

// Pixels as bytes (H, W, C) in base 64, stretched between the smallest and the largest, as the image view reads them.
function shownPixels(pixels, { height, width, channels, size }) {
  const shown = channels >= 3 ? 3 : 1, plane = height * width, some = pixels.subarray(0, shown * plane);
  let low = Infinity, high = -Infinity;
  for (const v of some) { if (v < low) low = v; if (v > high) high = v; }
  const bytes = new Uint8Array(shown * plane);
  for (let i = 0; i < plane; i++) for (let c = 0; c < shown; c++) bytes[i * shown + c] = Math.round(((some[c * plane + i] - low) * 255) / (high - low || 1));
  return { height, width, channels: shown, size, pixels: encodeBytes(bytes) };
}

export const makeEngine = (block, template, simd = true) => new Engine(block, template, simd);
