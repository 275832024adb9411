// @ts-check
// Tokens, numbers and heads in words.

import { constants } from "../shared/constants.js";
import { h } from "../shared/dom.js";
import { isSpecial, startsWord, visible } from "../shared/text.js";
import { alignmentMerit, data, plane, planeOf } from "./core.js";

const cutter = typeof Intl !== "undefined" && Intl.Segmenter ? new Intl.Segmenter() : null;
export function shorter(text, most) {
  const parts = cutter ? Array.from(cutter.segment(text), (s) => s.segment) : Array.from(text);
  return parts.length > most ? parts.slice(0, most - 1).join("") + "…" : text;
}

// A short token label for figures.
export const figureLabel = (token) => shorter(visible(startsWord(token) ? token.slice(1) : token), 14);

export const tokensOf = (name) => data.tokens[name] || [];
// A token row has the direction of its text. Features precede the text and are names, so single tokens cannot
// decide.
export const rightToLeft = (name) => data.directions[name] === "rtl";
export function show(x, digits = 3) {
  if (x === null || x === undefined) return "−∞";
  const text = Math.abs(x) >= 100 ? x.toFixed(0) : Math.abs(x) >= 10 ? x.toFixed(digits - 2) : x.toFixed(digits - 1);
  return text.replace("-", "−");
}
export const kindName = (kind) => constants.kind_names[kind] || kind;

// Words from subword pieces: a token with a leading space begins a word.

const bracketed = (token) => isSpecial(token) || /^<.+>$/.test(token);

// The words of a token row as [from, to); special tokens and leading features are words of their own.
export function wordSpans(tokens, features = "") {
  const names = features
      .split(/[;,|]/)
      .map((name) => name.trim())
      .filter(Boolean),
    before = tokens.length && bracketed(tokens[0]) ? 1 : 0;
  let alone = before;
  while (alone - before < names.length && tokens[alone] === names[alone - before]) alone++;
  const begins = (token, i) => i <= alone || /^\s/.test(token) || bracketed(token) || bracketed(tokens[i - 1]);
  const starts = tokens.map((_, i) => i).filter((i) => begins(tokens[i], i));
  return starts.map((from, k) => [from, k + 1 < starts.length ? starts[k + 1] : tokens.length]);
}

const spansOf = (name) => wordSpans(tokensOf(name), name === "source" ? data.texts.features || "" : "");

// Whether a row has several words, some with several tokens.
const hasWords = (name) =>
  tokensOf(name).some((token, i) => i > 0 && /^\s/.test(token)) && spansOf(name).length < tokensOf(name).length;
export const canGroup = (...names) => names.some(hasWords);

// The attention between words: the sum over the keys of a word, the mean over its queries.
export function groupPlane(m, rows, columns) {
  const out = new Float32Array(rows.length * columns.length);
  rows.forEach(([t0, t1], r) =>
    columns.forEach(([s0, s1], c) => {
      let sum = 0;
      for (let t = t0; t < t1; t++) for (let s = s0; s < s1; s++) sum += m.at(t, s);
      out[r * columns.length + c] = sum / (t1 - t0);
    }),
  );
  return planeOf(out, rows.length, columns.length);
}

// Planes with tokens or words on their axes. token(t): the first token of a row.
export function axesOf(planes, rowsName, columnsName, grouped) {
  if (!grouped || !canGroup(rowsName, columnsName))
    return { planes, rows: tokensOf(rowsName), columns: tokensOf(columnsName), token: (t) => t, row: (t) => t };
  const rows = spansOf(rowsName),
    columns = spansOf(columnsName);
  const join =
    (name) =>
    ([from, to]) =>
      tokensOf(name).slice(from, to).join("");
  return {
    planes: planes.map((m) => groupPlane(m, rows, columns)),
    rows: rows.map(join(rowsName)),
    columns: columns.map(join(columnsName)),
    token: (t) => rows[t][0],
    row: (t) => rows.findIndex(([from, to]) => t >= from && t < to),
  };
}

// Describe the attention of heads with the words and rules of `regard heads` (inspect/heads.py).

// Queries that must have the choice; one short input shows fewer than the data of `regard heads`.
const MIN_QUERIES = 3;

function offsetName(kind, offset) {
  const names = constants.offset_names[kind === "cross" ? "cross" : "self"];
  return names[offset] || names[offset < 0 ? "back" : "ahead"].replace("{}", String(Math.abs(offset)));
}

// Sums over the queries of one head with several keys: weight per kind of key, and the number of queries with such a
// key.
class HeadSums {
  constructor() {
    this.queries = 0;
    this.entropy = 0;
    this.mostEntropy = 0;
    this.targets = new Map();
  }

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
    let what = null,
      share = 0;
    for (const [name, [weight, count]] of this.targets) {
      if (
        count >= Math.max(Math.min(MIN_QUERIES, this.queries), Math.floor(this.queries / 4)) &&
        (what === null || weight / count > share)
      ) {
        what = name;
        share = weight / count;
      }
    }
    const evenness = this.mostEntropy ? this.entropy / this.mostEntropy : 0;
    const main =
      what !== null && share >= constants.main_share
        ? { what, share }
        : evenness >= constants.even_share
          ? { what: constants.head_names.even, share: evenness }
          : { what: constants.head_names.mixed, share };
    return { ...main, parts: this.parts() };
  }

  parts() {
    const shares = Array.from(this.targets, ([what, [weight]]) => [what, weight / Math.max(1, this.queries)]);
    return shares
      .sort((a, b) => b[1] - a[1])
      .slice(0, constants.max_parts)
      .filter(([, share]) => share >= constants.part_share);
  }
}

function sumTokens(m, kind, queries, keys) {
  const sums = new HeadSums(),
    { T, S } = m,
    offsets = new Float64Array(T + S - 1),
    counts = new Float64Array(T + S - 1);
  let first = 0,
    last = 0,
    same = 0,
    withSame = 0;
  for (let t = 0; t < T; t++) {
    const end = kind === "decoder" ? Math.min(S, t + 1) : S;
    if (end < 2) continue; // a query with a single key has no choice
    const weights = m.data.subarray(t * S, t * S + end);
    sums.addQuery(weights, end);
    let has = false;
    weights.forEach((w, s) => {
      offsets[s - t + T - 1] += w;
      counts[s - t + T - 1]++;
      if (kind !== "cross" && s !== t && keys[s] === queries[t]) {
        same += w;
        has = true;
      }
    });
    first += weights[0];
    last += weights[S - 1] || 0;
    withSame += has ? 1 : 0;
  }
  counts.forEach((count, i) => {
    if (count) sums.add(offsetName(kind, i - T + 1), offsets[i], count);
  });
  const names = constants.head_names;
  sums.add(names.first, first, sums.queries);
  if (kind !== "decoder") sums.add(names.last, last, sums.queries);
  if (kind !== "cross") sums.add(names.same, same, withSame);
  return sums;
}

function sumPatches(m, { width, size }) {
  const sums = new HeadSums(),
    across = width / size,
    S = m.S - 1;
  let own = 0,
    inRow = 0,
    inColumn = 0,
    cls = 0;
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
  const names = constants.head_names;
  sums.add(names.class, cls, sums.queries);
  sums.add(names.patch, own, sums.queries);
  sums.add(names.row, inRow, sums.queries);
  sums.add(names.column, inColumn, sums.queries);
  return sums;
}

// The description of every head by map name: {what, share, parts}.
const described = new WeakMap();
export function describeHeads(trace) {
  if (described.has(trace)) return described.get(trace);
  const out = new Map(),
    merits = [];
  for (const map of trace.maps) {
    out.set(
      map.name,
      map.heads.map((_, index) => {
        const m = plane(map.weights, index);
        if (map.kind === "cross") merits.push([map.name, index, alignmentMerit(m.data, Math.max(1, m.T - 1), m.S)]);
        return (
          trace.image
            ? sumPatches(m, trace.image)
            : sumTokens(m, map.kind, trace.tokens[map.rows], trace.tokens[map.columns])
        ).describe();
      }),
    );
  }
  const ranked = [...merits].sort((a, b) => b[2] - a[2]).slice(0, constants.max_alignment_heads);
  for (const [name, index, merit] of ranked)
    if (merit >= constants.nearly_best * ranked[0][2])
      Object.assign(out.get(name)[index], { what: constants.head_names.alignment, share: merit });
  described.set(trace, out);
  return out;
}

const percentOf = (share) => `${Math.round(100 * share)}%`;
const sharesOf = (parts) => parts.map(([name, part]) => `${percentOf(part)} ${name}`).join(", ");
export const isMixed = (what) => what === constants.head_names.mixed;
export const headDescription = ({ what, share, parts }) =>
  isMixed(what) && parts.length ? `${what}: ${sharesOf(parts)}` : `${what} ${percentOf(share)}`;
// A shorter form: only the largest part of a mixed head.
export const headLabel = ({ what, share, parts }) =>
  isMixed(what) ? (parts.length ? `${what}, ${sharesOf(parts.slice(0, 1))}` : what) : `${what} ${percentOf(share)}`;
