// What a head does on this input, in the words and by the rules of `regard heads` (inspect/heads.py).

import { plane } from "./core.js";

const MAIN_SHARE = 0.5; // of a head's weight: enough to say what it does
const PART_SHARE = 0.1, MOST_PARTS = 3; // enough to be named as a part of it, and how many are
const EVEN_SHARE = 0.9; // of the largest possible entropy: enough to say that it attends to everything evenly
const LEAST_SEEN = 3; // queries that must have had the choice: one short input shows less than the data of `regard heads`
const MOST_ALIGNING = 4, NEARLY = 0.9; // alignment heads: the best, and up to 4 in all with so much of its merit

function offsetName(kind, offset) {
  const near = kind === "cross" ? { 0: "same position" } : { "-1": "previous token", 0: "own token", 1: "next token" };
  return near[offset] || `${kind === "cross" ? "position" : "token"} ${Math.abs(offset)} ${offset < 0 ? "back" : "ahead"}`;
}

// Sums over the queries of one head that have more than one key: weight on kinds of keys, and the queries that have one.
class HeadSums {
  constructor() { this.queries = 0; this.entropy = 0; this.mostEntropy = 0; this.targets = new Map(); }

  addQuery(weights, keys) {
    this.queries++;
    this.mostEntropy += Math.log2(keys);
    for (const w of weights) this.entropy -= w * Math.log2(Math.max(w, 1e-12));
  }

  add(what, weight, count) {
    const before = this.targets.get(what) || [0, 0];
    this.targets.set(what, [before[0] + weight, before[1] + count]);
  }

  describe() {
    let what = null, share = 0;
    for (const [name, [weight, count]] of this.targets) {
      if (count >= Math.max(Math.min(LEAST_SEEN, this.queries), Math.floor(this.queries / 4)) && (what === null || weight / count > share)) { what = name; share = weight / count; }
    }
    const evenness = this.mostEntropy ? this.entropy / this.mostEntropy : 0;
    const main = what !== null && share >= MAIN_SHARE ? { what, share } : evenness >= EVEN_SHARE ? { what: "everything evenly", share: evenness } : { what: "mixed", share };
    return { ...main, parts: this.parts() };
  }

  parts() {
    const shares = Array.from(this.targets, ([what, [weight]]) => [what, weight / Math.max(1, this.queries)]);
    return shares.sort((a, b) => b[1] - a[1]).slice(0, MOST_PARTS).filter(([, share]) => share >= PART_SHARE);
  }
}

function sumTokens(m, kind, queries, keys) {
  const sums = new HeadSums(), { T, S } = m, offsets = new Float64Array(T + S - 1), counts = new Float64Array(T + S - 1);
  let first = 0, last = 0, same = 0, withSame = 0;
  for (let t = 0; t < T; t++) {
    const end = kind === "decoder" ? Math.min(S, t + 1) : S;
    if (end < 2) continue; // with one key only, there is nothing to choose
    const weights = m.data.subarray(t * S, t * S + end);
    sums.addQuery(weights, end);
    let has = false;
    weights.forEach((w, s) => {
      offsets[s - t + T - 1] += w;
      counts[s - t + T - 1]++;
      if (kind !== "cross" && s !== t && keys[s] === queries[t]) { same += w; has = true; }
    });
    first += weights[0];
    last += weights[S - 1] || 0;
    withSame += has ? 1 : 0;
  }
  counts.forEach((count, i) => { if (count) sums.add(offsetName(kind, i - T + 1), offsets[i], count); });
  sums.add("first token", first, sums.queries);
  if (kind !== "decoder") sums.add("last token", last, sums.queries);
  if (kind !== "cross") sums.add("same token elsewhere", same, withSame);
  return sums;
}

function sumPatches(m, { width, size }) {
  const sums = new HeadSums(), across = width / size, S = m.S - 1;
  let own = 0, inRow = 0, inColumn = 0, cls = 0;
  for (let t = 1; t < m.T; t++) {
    sums.addQuery(m.data.subarray(t * m.S, (t + 1) * m.S), m.S);
    cls += m.at(t, 0);
    for (let s = 1; s <= S; s++) {
      const w = m.at(t, s);
      if (s === t) own += w;
      else if (Math.floor((s - 1) / across) === Math.floor((t - 1) / across)) inRow += w;
      else if ((s - 1) % across === (t - 1) % across) inColumn += w;
    }
  }
  for (const [what, weight] of [["class token", cls], ["own patch", own], ["same row", inRow], ["same column", inColumn]]) sums.add(what, weight, sums.queries);
  return sums;
}

// Sharpness times coverage of a head of the cross-attention, without the output's end token; the last key is the source's end.
function alignmentMerit(m) {
  const T = Math.max(1, m.T - 1), keys = Math.max(1, m.S - 1), got = new Float64Array(keys);
  let sharpness = 0;
  for (let t = 0; t < T; t++) {
    let top = 0;
    for (let s = 0; s < m.S; s++) { const w = m.at(t, s); if (w > top) top = w; if (s < keys) got[s] += w; }
    sharpness += top / T;
  }
  return (sharpness * got.reduce((sum, w) => sum + Math.min(1, w), 0)) / keys;
}

// For every map of a trace, by name, what each of its heads does: {what, share, parts}.
const described = new WeakMap();
export function describeHeads(trace) {
  if (described.has(trace)) return described.get(trace);
  const out = new Map(), merits = [];
  for (const map of trace.maps) {
    out.set(map.name, map.heads.map((_, index) => {
      const m = plane(map.weights, index);
      if (map.kind === "cross") merits.push([map.name, index, alignmentMerit(m)]);
      return (trace.image ? sumPatches(m, trace.image) : sumTokens(m, map.kind, trace.tokens[map.rows], trace.tokens[map.columns])).describe();
    }));
  }
  const ranked = [...merits].sort((a, b) => b[2] - a[2]).slice(0, MOST_ALIGNING);
  for (const [name, index, merit] of ranked) if (merit >= NEARLY * ranked[0][2]) Object.assign(out.get(name)[index], { what: "alignment", share: merit });
  described.set(trace, out);
  return out;
}

const percentOf = (share) => `${Math.round(100 * share)}%`;
const sharesOf = (parts) => parts.map(([name, part]) => `${percentOf(part)} ${name}`).join(", ");
export const headDescription = ({ what, share, parts }) => (what === "mixed" && parts.length ? "mixed: " + sharesOf(parts) : `${what} ${percentOf(share)}`);
// The same where there is little room: of a mixed head its largest part alone.
export const headLabel = ({ what, share, parts }) => (what === "mixed" ? (parts.length ? `mixed, ${sharesOf(parts.slice(0, 1))}` : what) : `${what} ${percentOf(share)}`);
