// @ts-check
// The trace of one example with the values of all views, computed as in `regard inspect`. Titles, formulas and
// labels come from the template, a trace that Python made of the same model.

import { constants } from "../shared/constants.js";
import { alignmentMerit } from "./core.js";
import { logitLens, outputSteps } from "./search.js";

export const entryOf = (values, ...shape) => ({ shape, type: "f4", scale: 1, values });

// Properties that are computed on first access, because a view reads a small part of a trace.
function withLazy(made, parts) {
  for (const [name, compute] of Object.entries(parts)) {
    const read = once(compute);
    Object.defineProperty(made, name, { enumerable: true, configurable: true, get: read });
  }
  return made;
}

function once(compute) {
  let value = null,
    known = false;
  return () => {
    if (!known) {
      value = compute();
      known = true;
    }
    return value;
  };
}

function concatenated(parts) {
  if (parts.length === 1) return parts[0];
  const out = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => {
    out.set(part, at);
    return at + part.length;
  }, 0);
  return out;
}

// Collects values from a forward pass; a recurrent decoder delivers them step by step.
export class Recorder {
  constructor() {
    this.parts = new Map();
    this.calls = new Map(); // by attention
    this.rows = {}; // by stack
    this.joined = new Map();
  }

  // A copy to continue from.
  fork() {
    const other = new Recorder();
    for (const name of ["parts", "calls"]) other[name] = new Map(this[name]);
    Object.assign(other.rows, this.rows);
    return other;
  }

  keep(key, x) {
    if (x) this.parts.set(key, [...(this.parts.get(key) || []), x]);
  }

  keepAll(name, vectors) {
    for (const [part, x] of Object.entries(vectors)) this.keep(`${name}:${part}`, x);
  }

  get(key) {
    return this.parts.has(key) ? concatenated(this.parts.get(key)) : null;
  }

  begin(attention, rows, keys) {
    const size = attention.heads * rows * keys,
      call = {
        rows,
        keys,
        weights: new Float32Array(size),
        raw: new Float32Array(size),
        bias: null,
        mask: new Float32Array(rows * keys),
      };
    this.calls.set(attention, [...(this.calls.get(attention) || []), call]);
    const at = (h, r, s) => (h * rows + r) * keys + s;
    return {
      score: (h, r, s, raw, bias, seen) => {
        call.raw[at(h, r, s)] = raw;
        if (bias !== null) {
          call.bias = call.bias || new Float32Array(size);
          call.bias[at(h, r, s)] = bias;
        }
        call.mask[r * keys + s] = seen ? 1 : 0;
      },
      weight: (h, r, s, weight) => {
        call.weights[at(h, r, s)] = weight;
      },
      end: (found) => Object.assign(call, found),
    };
  }

  // All calls of an attention as one: arrays (H, T, S), and vectors by row.
  attention(attention) {
    if (!this.joined.has(attention)) this.joined.set(attention, this.joinCalls(attention));
    return this.joined.get(attention);
  }

  joinCalls(attention) {
    const calls = this.calls.get(attention),
      { heads } = attention,
      { keys } = calls[0],
      rows = calls.reduce((sum, call) => sum + call.rows, 0);
    const join = (name) => {
      if (!calls[0][name]) return null;
      if (calls.length === 1) return entryOf(calls[0][name], heads, rows, keys);
      const out = new Float32Array(heads * rows * keys);
      for (let h = 0; h < heads; h++)
        calls.reduce((at, call) => {
          out.set(call[name].subarray(h * call.rows * keys, (h + 1) * call.rows * keys), (h * rows + at) * keys);
          return at + call.rows;
        }, 0);
      return entryOf(out, heads, rows, keys);
    };
    const list = calls[calls.length - 1].lists[0];
    const maskOf = () => {
      const mask = concatenated(calls.map((call) => call.mask));
      return mask.every(Boolean) ? null : entryOf(mask, rows, keys);
    };
    const vectors = (name) => concatenated(calls.map((call) => call[name]));
    const perKey = (rowsOf, width) => {
      // (H, S, width), per head
      const out = new Float32Array(heads * keys * width);
      for (let h = 0; h < heads; h++)
        for (let s = 0; s < keys; s++)
          out.set(
            rowsOf[s].subarray(attention.kvOf[h] * width, (attention.kvOf[h] + 1) * width),
            (h * keys + s) * width,
          );
      return { values: out, rows: keys, heads };
    };
    return withLazy(
      { rows, keys, weights: join("weights") },
      {
        raw: () => join("raw"),
        bias: () => join("bias"),
        mask: maskOf,
        x: () => vectors("x"),
        out: () => vectors("out"),
        q: () => byHead(vectors("q"), rows, heads),
        mixed: () => byHead(vectors("mixed"), rows, heads),
        k: () => perKey(list.k, list.k[0].length / attention.kvHeads),
        v: () => perKey(list.v, attention.valueWidth),
      },
    );
  }
}

// (T, H * E) -> (H, T, E)
function byHead(x, rows, heads) {
  const wide = x.length / rows / heads,
    out = new Float32Array(x.length);
  for (let r = 0; r < rows; r++)
    for (let h = 0; h < heads; h++)
      out.set(x.subarray((r * heads + h) * wide, (r * heads + h + 1) * wide), (h * rows + r) * wide);
  return { values: out, rows, heads };
}

// A vector per token (T, D), or per head and token (H, T, E), in the form of the cards.
function vectorOf(label, { values, rows, heads }) {
  const count = rows * (heads || 1),
    width = values.length / count,
    some = Math.min(constants.shown_numbers, width);
  const first = new Float32Array(count * some),
    norm = new Float32Array(count),
    shape = heads ? [heads, rows] : [rows];
  for (let r = 0; r < count; r++) {
    let sum = 0;
    for (let i = 0; i < width; i++) {
      const v = values[r * width + i];
      sum += v * v;
      if (i < some) first[r * some + i] = v;
    }
    norm[r] = Math.sqrt(sum);
  }
  return {
    label,
    first: entryOf(first, ...shape, some),
    norm: entryOf(norm, ...shape),
    width,
    all: entryOf(values, ...shape, width),
  };
}

// The numbers of the cards of one layer, in the card order of Python.
function cardNumbers(model, stack, index, record, source) {
  const block = stack.blocks[index],
    name = block.name,
    get = (key) => record.get(key),
    rows = record.rows[stack.name];
  const flat = (x, count = rows) => ({ values: x, rows: count });
  const cards = [];
  if (index === 0) {
    const side = source ? "source" : stack.name,
      vectors = [get(`${side}:embedding`)];
    const segment = get(`${side}:segment`),
      place = get(`${stack.name}:position`);
    if (segment) vectors.push(concatenated(new Array(rows).fill(segment)));
    if (place) vectors.push(place);
    if (stack.embedNorm || vectors.length > 1) vectors.push(get(`${name}:x`));
    cards.push({ vectors: vectors.map((x) => flat(x)) });
  } else cards.push({ vectors: [flat(get(`${name}:x`))] });
  const attentionCards = (attention, part) => {
    const found = record.attention(attention),
      scores = {
        raw: found.raw,
        bias: found.bias,
        mask: found.mask,
        keys: vectorOf("k", found.k),
        values: vectorOf("v", found.v),
      };
    cards.push(
      { vectors: [flat(found.x), found.q], scores },
      { vectors: [], scores },
      { vectors: [found.mixed], scores },
      { vectors: [found.mixed, flat(found.out)], scores },
    );
    residualCard(part);
  };
  const residualCard = (part) => {
    const parts = block.pre ? ["x", "o", "out"] : ["x", "o", "sum", "out"];
    cards.push({ vectors: parts.map((each) => flat(get(`${name}.${part}_residual:${each}`))) });
  };
  attentionCards(block.attention, "attention");
  if (block.cross) attentionCards(block.cross, "cross");
  const neurons = get(`${name}.feed_forward:neurons`);
  cards.push({
    vectors: ["x", "neurons", "o"].map((each) => flat(get(`${name}.feed_forward:${each}`))),
    active: neurons.filter((v) => Math.abs(v) > constants.active_neuron).length / neurons.length,
  });
  residualCard("feed_forward");
  if (index === stack.blocks.length - 1 && (!source || model.classifies)) {
    const x = get("output:x");
    cards.push({ vectors: [flat(x, x.length / model.output.width)] });
  }
  return cards;
}

function recurrentNumbers(model, record) {
  const { decoder } = model,
    rows = record.rows.decoder,
    found = record.attention(decoder.cross),
    flat = (x) => ({ values: x, rows });
  const get = (key) => flat(record.get(`decoder${key}`));
  const values = vectorOf("v", found.v),
    scores = { raw: found.raw, bias: found.bias, mask: found.mask, keys: values, values };
  const state = { vectors: decoder.cells.map((_, i) => get(`.blocks.${i}:out`)) };
  const attend = [
    { vectors: [found.q], scores },
    { vectors: [], scores },
    { vectors: [{ ...flat(found.out), heads: 1 }], scores },
  ];
  const order = decoder.stack.attend_first ? [...attend, state] : [state, ...attend];
  return [
    { vectors: [get(":embedding")] },
    ...order,
    { vectors: [get(":context"), get(":state"), get(":attentional")] },
    { vectors: [flat(record.get("output:x"))] },
  ];
}

// A card whose numbers are computed on first access.
const fillCard = (card, numbers) =>
  withLazy(
    { ...card },
    {
      vectors: () => card.vectors.map((vector, i) => vectorOf(vector.label, numbers().vectors[i])),
      scores: () => card.scores && { ...card.scores, ...numbers().scores },
      active: () => numbers().active ?? card.active,
    },
  );

function fillWalks(template, model, record) {
  return template.walks.map((walk) => {
    const stack = model[walk.name];
    const numbers = walk.layers.map((_, i) =>
      once(() =>
        stack.cells ? recurrentNumbers(model, record) : cardNumbers(model, stack, i, record, walk.name === "encoder"),
      ),
    );
    return {
      ...walk,
      layers: walk.layers.map((cards, i) => cards.map((card, k) => fillCard(card, () => numbers[i]()[k]))),
    };
  });
}

// The hook of lens row i: the output of a layer, or the final attentional vector of a recurrent decoder.
const lensHook = (model, i) =>
  model.top.cells && i === model.top.cells.length ? "decoder:attentional" : `${model.top.name}.blocks.${i}:out`;

function positionHeatmap(model, found, length) {
  const { position, stack, causal } = model[found.name],
    { kind } = position;
  if (kind === "rotary") {
    const rates = position.rates,
      out = new Float32Array(length * rates.length);
    for (let p = 0; p < length; p++)
      rates.forEach((rate, i) => {
        out[p * rates.length + i] = Math.cos(p * rate);
      });
    return { ...found, values: entryOf(out, length, rates.length) };
  }
  if (position.biased) {
    const columns = (causal ? length : 2 * length) + 1,
      out = new Float32Array(stack.heads * columns);
    for (let h = 0; h < stack.heads; h++)
      for (let s = 0; s < columns; s++) out[h * columns + s] = position.bias(h, length, s);
    return { ...found, first_column: -length, values: entryOf(out, stack.heads, columns) };
  }
  const rows = Math.min(length, kind === "learned" ? stack.max_length : length),
    width = Math.min(stack.width, constants.heatmap_columns),
    out = new Float32Array(rows * width);
  for (let p = 0; p < rows; p++) out.set(position.embed(p).subarray(0, width), p * width);
  return { ...found, values: entryOf(out, rows, width) };
}

// Maps from the output to the source: the chosen or sharpest heads first, then the mean of each layer.
function alignments(maps, chosen) {
  const cross = maps.filter((map) => map.kind === "cross");
  if (!cross.length) return [];
  const [, T, S] = cross[0].weights.shape,
    size = T * S,
    head = (map, h) => map.weights.values.subarray(h * size, (h + 1) * size);
  const mean = (planes) => {
    const out = new Float32Array(size);
    for (const plane of planes) for (let i = 0; i < size; i++) out[i] += plane[i] / planes.length;
    return entryOf(out, T, S);
  };
  const all = (map) => map.heads.map((_, h) => head(map, h)),
    several = cross.length > 1 || cross.some((map) => map.heads.length > 1),
    out = [];
  if (several) {
    let heads = chosen
      .map(([layer, h]) => [cross.find((map) => map.layer === layer), h])
      .filter(([map, h]) => map && h < map.heads.length);
    const title = heads.length ? "alignment heads" : "sharpest heads";
    if (!heads.length) {
      const merits = cross.flatMap((map) =>
        map.heads.map((_, h) => ({ map, h, merit: alignmentMerit(head(map, h), T, S) })),
      );
      const ranked = [...merits]
        .sort((a, b) => b.merit - a.merit)
        .slice(0, constants.max_alignment_heads)
        .filter((each, _, top) => each.merit >= constants.nearly_best * top[0].merit);
      heads = merits.filter((each) => ranked.includes(each)).map(({ map, h }) => [map, h]);
    }
    out.push({
      name: `${title} ${heads.map(([map, h]) => `${map.layer + 1}.${map.heads[h] + 1}`).join(", ")}`,
      weights: mean(heads.map(([map, h]) => head(map, h))),
    });
  }
  for (const map of cross)
    out.push({ name: several ? `layer ${map.layer + 1}, mean of heads` : "attention", weights: mean(all(map)) });
  if (cross.length > 1)
    out.push({ name: "mean of everything", weights: mean(cross.map((map) => mean(all(map)).values)) });
  return out;
}

// The mean attention distance of every head over the patches of an image, in pixels.
function attentionDistances(map, patches) {
  const [H, T, S] = map.weights.shape,
    across = patches.width / patches.size,
    w = map.weights.values,
    out = [];
  for (let h = 0; h < H; h++) {
    let mean = 0;
    for (let t = 1; t < T; t++) {
      let far = 0,
        sum = 0;
      for (let s = 1; s < S; s++) {
        const dx = ((t - 1) % across) - ((s - 1) % across),
          dy = Math.floor((t - 1) / across) - Math.floor((s - 1) / across),
          weight = w[(h * T + t) * S + s];
        far += weight * patches.size * Math.hypot(dx, dy);
        sum += weight;
      }
      mean += far / Math.max(sum, 1e-9) / (T - 1);
    }
    out.push(mean);
  }
  return out;
}

// Fill the template. found: {record, logits, labels, tokens, directions, texts, notes, nameOf, lensVectors?, image?,
// heads}
export function makeTrace(template, model, found) {
  const { record, logits, labels, tokens, nameOf } = found,
    byName = new Map(model.attentions.map((attention) => [attention.name, attention]));
  const maps = template.maps.map((map) => ({ ...map, weights: record.attention(byName.get(map.name)).weights }));
  const length = Math.max(constants.min_positions, ...Object.values(tokens).map((row) => row.length)),
    steps = labels.length ? outputSteps(logits, labels, nameOf) : [];
  const lensVectors = found.lensVectors || ((i) => record.get(lensHook(model, i)));
  const made = {
    ...template,
    texts: found.texts,
    tokens,
    directions: found.directions,
    maps,
    steps,
    notes: found.notes,
    walks: fillWalks(template, model, record),
    score: steps.reduce((sum, step) => sum + Math.log(step.probability), 0),
    image: found.image || null,
    numbers: "",
    attribution: null,
    importance: {}, // computed by the engine on demand
  };
  return withLazy(made, {
    alignment: () => (tokens.source && model.decoder ? alignments(maps, found.heads) : []),
    lens: () => (model.output ? logitLens(template, model, lensVectors, nameOf) : []),
    positions: () => template.positions.map((each) => positionHeatmap(model, each, length)),
    distances: () =>
      found.image
        ? Object.fromEntries(maps.map((map) => [map.name, attentionDistances(map, model.config.patches)]))
        : {},
  });
}
