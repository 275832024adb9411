// Words from subword pieces: a token that begins with a space begins a word.

import { data, planeOf } from "./core.js";
import { SPECIAL, tokensOf } from "./text.js";

const bracketed = (token) => SPECIAL.has(token) || /^<.+>$/.test(token);

// The words of a token row as [from, to); special tokens, and the features in front, stand for themselves.
export function wordSpans(tokens, features = "") {
  const names = features.split(/[;,|]/).map((name) => name.trim()).filter(Boolean), before = tokens.length && bracketed(tokens[0]) ? 1 : 0;
  let alone = before;
  while (alone - before < names.length && tokens[alone] === names[alone - before]) alone++;
  const begins = (token, i) => i <= alone || /^\s/.test(token) || bracketed(token) || bracketed(tokens[i - 1]);
  const starts = tokens.map((_, i) => i).filter((i) => begins(tokens[i], i));
  return starts.map((from, k) => [from, k + 1 < starts.length ? starts[k + 1] : tokens.length]);
}

const spansOf = (name) => wordSpans(tokensOf(name), name === "source" ? data.texts.features || "" : "");

// Whether a row has words of several tokens, and more than one word.
const hasWords = (name) => tokensOf(name).some((token, i) => i > 0 && /^\s/.test(token)) && spansOf(name).length < tokensOf(name).length;
export const canGroup = (...names) => names.some(hasWords);

// The attention between words: the sum over the keys of a word, the mean over its queries.
export function groupPlane(m, rows, columns) {
  const out = new Float32Array(rows.length * columns.length);
  rows.forEach(([t0, t1], r) => columns.forEach(([s0, s1], c) => {
    let sum = 0;
    for (let t = t0; t < t1; t++) for (let s = s0; s < s1; s++) sum += m.at(t, s);
    out[r * columns.length + c] = sum / (t1 - t0);
  }));
  return planeOf(out, rows.length, columns.length);
}

// Planes with the tokens of their axes, or with words instead. token(t): the first token of a row.
export function axesOf(planes, rowsName, columnsName, grouped) {
  if (!grouped || !canGroup(rowsName, columnsName)) return { planes, rows: tokensOf(rowsName), columns: tokensOf(columnsName), token: (t) => t, row: (t) => t };
  const rows = spansOf(rowsName), columns = spansOf(columnsName);
  const join = (name) => ([from, to]) => tokensOf(name).slice(from, to).join("");
  return {
    planes: planes.map((m) => groupPlane(m, rows, columns)), rows: rows.map(join(rowsName)), columns: columns.map(join(columnsName)),
    token: (t) => rows[t][0], row: (t) => rows.findIndex(([from, to]) => t >= from && t < to),
  };
}
