// @ts-check
// Search over token ids: greedy, beam, sampling; with the same rules for ties, ends and limits as `regard generate`.

import { constants } from "../shared/constants.js";

// The log-sum-exp of one row of logits and the entropy of its softmax in bits, in one pass.
function logSumExp(logits, from, vocab) {
  let top = -Infinity,
    sum = 0,
    mean = 0;
  for (let i = from; i < from + vocab; i++) if (logits[i] > top) top = logits[i];
  for (let i = from; i < from + vocab; i++) {
    const below = logits[i] - top,
      share = Math.exp(below);
    sum += share;
    mean += share * below;
  }
  return { normaliser: top + Math.log(sum), entropy: (Math.log(sum) - mean / sum) / Math.LN2 };
}

// Log-probabilities of one row of logits; blocked tokens get minus infinity.
export function logSoftmax(logits, from, vocab, blocked) {
  const out = new Float64Array(vocab),
    { normaliser } = logSumExp(logits, from, vocab);
  for (let i = 0; i < vocab; i++) out[i] = logits[from + i] - normaliser;
  for (const id of blocked) out[id] = -Infinity;
  return out;
}

// The indices of the `count` highest values in order; ties go to the lower index.
export function best(values, count) {
  const out = [];
  for (let i = 0; i < values.length; i++) {
    if (out.length === count && !(values[i] > values[out[count - 1]])) continue;
    let at = out.length;
    while (at > 0 && values[i] > values[out[at - 1]]) at--;
    out.splice(at, 0, i);
    if (out.length > count) out.pop();
  }
  return out;
}

// A seeded generator of numbers in [0, 1).
export function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

// The scores for choosing at step t: the prefix is forced, forbidden tokens are removed, and at the limit only the
// end is allowed.
function steer(logp, t, { eos, limit, openEnd, prefix, forbid }) {
  const values = logp.slice();
  for (const id of forbid) values[id] = -Infinity;
  if (t >= limit) {
    const end = openEnd ? 0 : values[eos];
    values.fill(-Infinity);
    values[eos] = end;
  }
  if (t < prefix.length) {
    values.fill(-Infinity);
    values[prefix[t]] = logp[prefix[t]];
  }
  return values;
}

// job: {model, state, first, eos, blocked, limit, openEnd, prefix, forbid}; choose(values) -> token
function followPath(job, choose) {
  let state = job.state,
    token = job.first;
  const ids = [],
    scores = [];
  for (let t = 0; ; t++) {
    const next = job.model.step([token], [state]),
      logp = logSoftmax(next.logits, 0, next.logits.length, job.blocked),
      values = steer(logp, t, job);
    token = choose(values);
    if (values[token] === -Infinity) return null; // nothing is allowed
    const limited = t === job.limit;
    if (token === job.eos && limited && job.openEnd) return output(ids, scores, limited);
    ids.push(token);
    scores.push(logp[token]);
    if (token === job.eos) return output(ids, scores, limited);
    [state] = next.states;
  }
}

const total = (scores) => scores.reduce((a, b) => a + b, 0);
const output = (ids, scores, limited) => ({ ids, scores, score: total(scores), limited });

export function greedySearch(job) {
  const found = followPath(job, (values) => best(values, 1)[0]);
  return found ? [found] : [];
}

export function sampleSearch(job, { nbest = 1, temperature = 1, topK = 0, topP = 1, seed = 1 }) {
  const draw = randomNumbers(seed),
    out = [];
  for (let n = 0; n < nbest; n++) {
    const found = followPath(job, (values) => {
      const order = best(values, topK || values.length),
        top = values[order[0]];
      const weights = order.map((i) => Math.exp((values[i] - top) / Math.max(temperature, 1e-30)));
      let sum = weights.reduce((a, b) => a + b, 0),
        kept = 0,
        count = 0;
      const enough = topP < 1 ? topP * sum : Infinity;
      while (count < weights.length && (count === 0 || kept < enough)) kept += weights[count++];
      sum = kept * draw();
      let rank = 0;
      while (rank < count - 1 && sum >= weights[rank]) sum -= weights[rank++];
      return order[rank];
    });
    if (found) out.push(found);
  }
  return out;
}

export function beamSearch(job, { beam = 5, nbest = beam, penalty = 1 }) {
  const { eos, limit, openEnd } = job;
  let rows = [{ state: job.state, sum: 0, token: job.first, ids: [], scores: [] }],
    ended = 0,
    closed = false; // the best output is final
  const finished = []; // best first, at most nbest
  for (let t = 0; t <= limit; t++) {
    const next = job.model.step(
        rows.map((row) => row.token),
        rows.map((row) => row.state),
      ),
      vocab = next.logits.length / rows.length;
    const ends = [],
      goes = [];
    rows.forEach((row, r) => {
      const logp = logSoftmax(next.logits, r * vocab, vocab, job.blocked),
        values = steer(logp, t, job),
        end = values[eos];
      ends.push({ row, sum: row.sum + end, score: logp[eos], end: true });
      values[eos] = -Infinity;
      for (const token of best(values, Math.min(beam, vocab)))
        goes.push({ row, sum: row.sum + values[token], token, score: logp[token], state: next.states[r] });
    });
    // Ends come first and rows are in order, so ties are resolved by end, row, rank.
    const candidates = [...ends, ...goes].sort((a, b) => b.sum - a.sum || 0);
    const length = Math.max(1, t + (openEnd && t === limit ? 0 : 1));
    for (const found of candidates.slice(0, beam)) {
      if (!found.end || found.sum === -Infinity) continue;
      ended++;
      const whole = !(openEnd && t === limit),
        { ids, scores } = found.row;
      finished.push({
        value: found.sum / length ** penalty,
        ...output(whole ? [...ids, eos] : ids, whole ? [...scores, found.score] : scores, t === limit),
      });
    }
    const final = finished.splice(0, closed ? 1 : 0);
    finished.sort((a, b) => b.value - a.value);
    finished.unshift(...final);
    finished.length = Math.min(finished.length, nbest);
    rows = candidates
      .filter((found) => !found.end && found.sum > -Infinity)
      .slice(0, beam)
      .map(({ row, sum, token, score, state }) => ({
        state,
        sum,
        token,
        ids: [...row.ids, token],
        scores: [...row.scores, score],
      }));
    if (!rows.length) break;
    // With enough ended hypotheses, the best is final unless the best open one is currently better. Several outputs
    // are complete when no open hypothesis would enter the list at nbest_growth times its length.
    const top = rows[0].sum,
      worst = finished.length < nbest ? -Infinity : Math.min(...finished.map((each) => each.value));
    closed ||= ended >= beam && !(top / (t + 1) ** penalty > finished[0].value);
    const complete = nbest === 1 || !(top / (constants.nbest_growth * (t + 1)) ** penalty > worst);
    if ((closed && complete) || !(top / (limit + 1) ** penalty > worst)) break;
  }
  return finished.filter((found, i) => finished.findIndex((other) => other.ids.join() === found.ids.join()) === i);
}

// Predictions: the most probable tokens of every step and of every layer.

const LENS_ROWS = 16; // tokens of the lens computed together

// The most probable tokens of one row of logits: [token, probability, logit].
function topPredictions(row, count, nameOf, { normaliser } = logSumExp(row, 0, row.length)) {
  return best(row, Math.min(count, row.length)).map((id) => [nameOf(id), Math.exp(row[id] - normaliser), row[id]]);
}

export function outputSteps(logits, labels, nameOf) {
  const vocab = logits.length / labels.length;
  return labels.map((label, t) => {
    const row = logits.subarray(t * vocab, (t + 1) * vocab),
      sums = logSumExp(row, 0, vocab);
    return {
      token: nameOf(label),
      probability: Math.exp(row[label] - sums.normaliser),
      entropy: sums.entropy,
      normaliser: sums.normaliser,
      candidates: topPredictions(row, constants.step_candidates, nameOf, sums),
    };
  });
}

// Apply the LM head to the vectors of each layer, with the labels of the template. Predictions over a large
// vocabulary are expensive, and the overview shows the first tokens only, so they are computed when read.
export function logitLens(template, model, vectorsOf, nameOf) {
  const { top } = model;
  return template.lens.map(({ label }, i) => {
    let x = vectorsOf(i);
    if (top.norm) x = top.norm(x, x.length / model.output.width);
    if (model.classifies) x = model.pool(x);
    const { width } = model.transform || model.output;
    const steps = lazyArray(x.length / width, LENS_ROWS, (from, to) => {
      const rows = to - from,
        logits = model.predict(x.subarray(from * width, to * width), rows);
      const vocab = logits.length / rows;
      return Array.from({ length: rows }, (_, t) =>
        topPredictions(logits.subarray(t * vocab, (t + 1) * vocab), constants.lens_candidates, nameOf),
      );
    });
    return { label, steps };
  });
}

// An array that computes its elements in blocks when they are first read: compute(from, to) -> elements.
function lazyArray(length, few, compute) {
  const out = new Array(length),
    known = new Map();
  const block = (from) => {
    if (!known.has(from)) known.set(from, compute(from, Math.min(from + few, length)));
    return known.get(from);
  };
  for (let i = 0; i < length; i++)
    Object.defineProperty(out, i, { enumerable: true, get: () => block(i - (i % few))[i % few] });
  return out;
}
