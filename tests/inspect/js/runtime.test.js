// The runtime of the live page without a model: products, number formats, search against brute force.

import "./setup.js";
import assert from "node:assert/strict";
import { test } from "node:test";

import {
  beamSearch,
  best,
  greedySearch,
  logitLens,
  logSoftmax,
  outputSteps,
  randomNumbers,
  sampleSearch,
} from "../../../src/regard/web/page/search.js";
import { decodeBytes, encodeBytes, halfToFloat, Weights } from "../../../src/regard/web/page/weights.js";

const numbers = (seed, count) => {
  const draw = randomNumbers(seed);
  return Float32Array.from({ length: count }, () => 2 * draw() - 1);
};

// A tensor as a page stores it: fp32 in base64.
const stored = (shapes) => {
  const tensors = {},
    all = [];
  Object.entries(shapes).forEach(([name, [shape, values]]) => {
    tensors[name] = { shape, type: "f4", at: 4 * all.length };
    all.push(...values);
  });
  return [tensors, Buffer.from(Float32Array.from(all).buffer).toString("base64")];
};

function layer(simd, width, outs, biased = true) {
  const shapes = { "a.weight": [[outs, width], numbers(1, outs * width)] };
  if (biased) shapes["a.bias"] = [[outs], numbers(3, outs)];
  const weights = new Weights(...stored(shapes), simd);
  assert.equal(weights.kernel.simd, simd);
  return { weights, multiply: (x, rows) => weights.kernel.linear(x, rows, weights.linear("a")) };
}

test("products: SIMD sums in the order of the inputs and rounds every product and sum, plain JavaScript the total", () => {
  const { fround } = Math;
  for (const [rows, width, outs] of [
    [1, 1, 1],
    [1, 3, 5],
    [2, 8, 16],
    [3, 16, 17],
    [5, 17, 33],
    [40, 192, 64],
  ]) {
    const bias = numbers(3, outs),
      w = numbers(1, outs * width),
      x = numbers(2, rows * width);
    for (const simd of [true, false])
      for (const biased of [true, false]) {
        const rounded = simd ? fround : (v) => v;
        const y = layer(simd, width, outs, biased).multiply(x, rows);
        assert.equal(y.length, rows * outs);
        for (let r = 0; r < rows; r++)
          for (let o = 0; o < outs; o++) {
            let sum = 0;
            for (let i = 0; i < width; i++) sum = rounded(sum + rounded(x[r * width + i] * w[o * width + i]));
            assert.equal(y[r * outs + o], biased ? fround(fround(sum) + bias[o]) : fround(sum));
          }
      }
  }
});

test("products: the result of a row does not depend on the other rows", () => {
  const width = 40,
    outs = 9,
    most = 11,
    x = numbers(2, most * width);
  const { multiply } = layer(true, width, outs);
  const single = (r) => multiply(x.subarray(r * width, (r + 1) * width), 1);
  for (let rows = 1; rows <= most; rows++) {
    const y = multiply(x.subarray(0, rows * width), rows);
    for (let r = 0; r < rows; r++)
      assert.deepEqual(y.slice(r * outs, (r + 1) * outs), single(r), `row ${r} of ${rows}`);
  }
});

test("products: growing scratch space does not change the weights", () => {
  for (const simd of [true, false]) {
    const { weights, multiply } = layer(simd, 8, 8),
      x = numbers(4, 8),
      before = multiply(x, 1);
    const many = multiply(new Float32Array(8 * 300_000).fill(0.5), 300_000);
    assert.equal(many.length, 8 * 300_000);
    assert.deepEqual(multiply(x, 1), before);
    assert.deepEqual(weights.vector("a.weight"), numbers(1, 64));
  }
});

test("tensors of any shape are read as they were stored", () => {
  const shapes = {
    vector: [[5], numbers(1, 5)],
    matrix: [[19, 7], numbers(2, 19 * 7)],
    heads: [[3, 2, 5], numbers(3, 30)],
    last: [[16, 1], numbers(4, 16)],
  };
  const weights = new Weights(...stored(shapes));
  for (const [name, [, values]] of Object.entries(shapes)) assert.deepEqual(weights.vector(name), values);
  for (let r = 0; r < 19; r++) assert.deepEqual(weights.row("matrix", r), shapes.matrix[1].slice(7 * r, 7 * (r + 1)));
  assert.equal(weights.vector("absent"), null);
  assert.equal(weights.linear("absent"), null);
});

test("bytes of any length round-trip through base 64", () => {
  for (let length = 0; length < 40; length++) {
    const bytes = Uint8Array.from(numbers(length + 1, length), (v) => (v + 1) * 127),
      text = encodeBytes(bytes);
    assert.equal(text, Buffer.from(bytes).toString("base64"));
    assert.deepEqual(decodeBytes(text), bytes);
  }
});

test("half-precision floats are converted exactly", () => {
  for (const [bits, value] of [
    [0x0000, 0],
    [0x3c00, 1],
    [0xc000, -2],
    [0x7bff, 65504],
    [0x0001, 2 ** -24],
    [0x0400, 2 ** -14],
    [0x3555, 0.333251953125],
  ])
    assert.equal(halfToFloat(bits), value);
  assert.equal(halfToFloat(0x7c00), Infinity);
  assert.ok(Number.isNaN(halfToFloat(0x7e00)));
});

test("best() prefers the first of equal values", () => {
  assert.deepEqual(best([1, 3, 3, 2, 3], 3), [1, 2, 4]);
  assert.deepEqual(best([-Infinity, -Infinity], 1), [0]);
});

test("steps: probabilities and entropy of every label", () => {
  const vocab = 7,
    labels = [3, 0],
    logits = numbers(4, vocab * labels.length).map((v) => 6 * v);
  outputSteps(logits, labels, String).forEach((step, t) => {
    const logp = logSoftmax(logits, t * vocab, vocab, []);
    const entropy = -logp.reduce((sum, x) => sum + Math.exp(x) * Math.log2(Math.exp(x)), 0);
    assert.ok(Math.abs(step.entropy - entropy) < 1e-9);
    assert.ok(Math.abs(step.probability - Math.exp(logp[labels[t]])) < 1e-12);
    assert.deepEqual(
      step.candidates.map(([token]) => Number(token)),
      best(logp, vocab),
    );
  });
});

test("the logit lens computes only the steps that are read", () => {
  const rows = 40,
    width = 2,
    vocab = 3,
    x = numbers(5, rows * width);
  let computed = 0;
  const predict = (some, count) => {
    computed += count;
    return Float32Array.from({ length: count * vocab }, (_, i) => some[Math.floor(i / vocab) * width] * (i % vocab));
  };
  const model = { top: { norm: null }, classifies: false, output: { width }, predict };
  const [{ label, steps }] = logitLens({ lens: [{ label: "layer 1" }] }, model, () => x, String);
  assert.equal(label, "layer 1");
  assert.equal(steps.length, rows);
  assert.equal(computed, 0);
  assert.equal(steps[3][0][0], x[3 * width] > 0 ? "2" : "0");
  assert.ok(computed < rows);
  assert.deepEqual(
    JSON.parse(JSON.stringify(steps)).map((step) => step[0][0]),
    Array.from({ length: rows }, (_, t) => (x[t * width] > 0 ? "2" : "0")),
  );
  assert.equal(computed, rows, "each step is computed once");
});

// A model whose logits are pseudo-random numbers seeded by all previous tokens.
const EOS = 0,
  VOCAB = 4;
const logitsAfter = (ids) =>
  numbers(
    ids.reduce((sum, id) => 7 * sum + id + 1, 3),
    VOCAB,
  ).map((v) => 3 * v);
const model = {
  step: (tokens, states) => {
    const next = states.map((state, r) => (tokens[r] < 0 ? state : [...state, tokens[r]])),
      logits = new Float32Array(tokens.length * VOCAB);
    next.forEach((ids, r) => logits.set(logitsAfter(ids), r * VOCAB));
    return { logits, states: next };
  },
};
const job = (more = {}) => ({
  model,
  state: [],
  first: -1,
  eos: EOS,
  blocked: [],
  limit: 4,
  openEnd: false,
  prefix: [],
  forbid: [],
  ...more,
});

// All outputs up to the length limit, with their scores.
function enumerateOutputs({ limit, openEnd, prefix, forbid, blocked }, ids = [], scores = []) {
  const logp = logSoftmax(logitsAfter(ids), 0, VOCAB, blocked),
    t = ids.length,
    out = [];
  if (t === limit && openEnd) return [{ ids, score: scores.reduce((a, b) => a + b, 0) }];
  for (let id = 0; id < VOCAB; id++) {
    if (
      logp[id] === -Infinity ||
      (t < prefix.length ? id !== prefix[t] : forbid.includes(id)) ||
      (t === limit && id !== EOS)
    )
      continue;
    const all = [...scores, logp[id]];
    if (id === EOS) out.push({ ids: [...ids, id], score: all.reduce((a, b) => a + b, 0) });
    else out.push(...enumerateOutputs({ limit, openEnd, prefix, forbid, blocked }, [...ids, id], all));
  }
  return out;
}

const CASES = {
  plain: {},
  prefix: { prefix: [2, 1] },
  forbidden: { forbid: [3] },
  blocked: { blocked: [1] },
  continuation: { openEnd: true },
  short: { limit: 1 },
};

for (const [name, more] of Object.entries(CASES)) {
  test(`full-width beam search equals enumeration: ${name}`, () => {
    const request = job(more),
      length = (ids) => Math.max(1, ids.length);
    const all = enumerateOutputs(request)
      .map((each) => ({ ...each, value: each.score / length(each.ids) }))
      .sort((a, b) => b.value - a.value);
    const outputs = beamSearch(request, { beam: 400, nbest: 5 });
    assert.deepEqual(
      outputs.map((each) => each.ids),
      all.slice(0, 5).map((each) => each.ids),
    );
    outputs.forEach((each, i) => assert.ok(Math.abs(each.score - all[i].score) < 1e-9));
  });
}

test("the best output does not depend on the length of the n-best list", () => {
  for (const penalty of [0, 1, 2])
    for (const beam of [2, 3, 5]) {
      const request = job({ limit: 9, prefix: [beam % VOCAB] });
      const [first] = beamSearch(request, { beam, nbest: 1, penalty });
      assert.deepEqual(beamSearch(request, { beam, nbest: beam, penalty })[0].ids, first.ids);
    }
});

test("greedy search takes the best token at every step", () => {
  const [output] = greedySearch(job());
  output.ids.forEach((id, t) => {
    const logp = logSoftmax(logitsAfter(output.ids.slice(0, t)), 0, VOCAB, []);
    assert.equal(id, t === 4 ? EOS : best(logp, 1)[0]);
    assert.equal(output.scores[t], logp[id]);
  });
});

test("searches return no output if all tokens are forbidden", () => {
  assert.deepEqual(greedySearch(job({ forbid: [0, 1, 2, 3] })), []);
  assert.deepEqual(beamSearch(job({ forbid: [0, 1, 2, 3] }), { beam: 3 }), []);
});

test("samples depend on the probabilities and on the seed", () => {
  const draw = (seed, more) =>
    sampleSearch(job({ limit: 1, openEnd: true }), { nbest: 4000, seed, ...more }).map(({ ids }) =>
      ids.length ? ids[0] : EOS,
    );
  const logp = logSoftmax(logitsAfter([]), 0, VOCAB, []),
    samples = draw(1);
  for (let id = 0; id < VOCAB; id++) {
    const p = Math.exp(logp[id]),
      share = samples.filter((each) => each === id).length / samples.length;
    assert.ok(Math.abs(share - p) < 5 * Math.sqrt((p * (1 - p)) / samples.length) + 1e-3, `${id}: ${share} for ${p}`);
  }
  assert.deepEqual(draw(1), samples);
  assert.notDeepEqual(draw(2), samples);
  assert.deepEqual(new Set(draw(3, { topK: 1 })), new Set(best(logp, 1)));
  assert.deepEqual(new Set(draw(3, { topP: 1e-6 })), new Set(best(logp, 1)));
  assert.deepEqual(new Set(draw(3, { temperature: 1e-3 })), new Set(best(logp, 1)));
});
