// The cards of the walk: a formula and this model's own numbers.

import { data, h, row } from "./core.js";
import { colour, css, inkOn } from "./colours.js";
import { candidates } from "./predictions.js";
import { rightToLeft, shorter, show, tokensOf, word } from "./text.js";
import { vectorPictures } from "./vectors.js";

const SHOWN_KEYS = 6;

export function formula(text) {
  const out = [];
  const pattern = /([_^])(\{[^}]*\}|.)/gu;
  let end = 0;
  for (const hit of text.matchAll(pattern)) {
    out.push(text.slice(end, hit.index), h(hit[1] === "_" ? "sub" : "sup", {}, hit[2].replace(/^\{|\}$/g, "")));
    end = hit.index + hit[0].length;
  }
  out.push(text.slice(end));
  return h("p", { class: "formula" }, out);
}

const numberCell = (v, max, weight) => {
  if (v === null) return h("span", { class: "n minus", dir: "ltr" }, "−∞");
  const rgb = weight ? colour(v / (max || 1)) : colour(0.5 + (0.42 * v) / (max || 1), "over");
  return h("span", { class: "n", dir: "ltr", style: { backgroundColor: css(rgb), color: inkOn(rgb) } }, show(v));
};
const largest = (list) => Math.max(1e-9, ...list.flat().filter((v) => v !== null).map(Math.abs));

// Rows of numbers: [label node, numbers, end text, chosen]
function rowsOfNumbers(lines, width) {
  const max = largest(lines.map((line) => line[1] || []));
  return h("div", { class: "scroll" }, h("table", { class: "numbers" }, h("tbody", {}, lines.map(([label, list, end, chosen]) => list === null ? h("tr", {}, label, h("td", { class: "end", colspan: 10 }, end)) :
    h("tr", { class: chosen ? "on" : null }, label, list.map((v) => h("td", {}, numberCell(v, max))), width > list.length ? h("td", { class: "dim" }, "…") : null, h("td", { class: "end" }, end))))));
}
const italic = (text) => { const made = h("th", { scope: "row" }); made.append(...formula(text).childNodes); return made; };
const tokenHead = (token) => h("th", { scope: "row", class: "token" }, word(token));
const vectorRow = (vector, t, label) => {
  const list = row(vector.first, t), norm = row(vector.norm)[t];
  return [italic(label || vector.label), list, `${vector.width} numbers, length ${show(norm)}`];
};
const headRow = (vector, head, t) => [row(vector.first, head, t), row(vector.norm, head)[t]];
const between = (...content) => h("p", { class: "dim", style: { margin: "10px 0 4px" } }, ...content);

// The numbers of a card by its kind. at: {t: token, k: head of the map, map, keys, weights, all: keys with a weight, the largest first}
const NUMBERS = {
  qkv(c, { t, k, keys, all }) {
    const lines = c.vectors.filter((v) => v.first.shape.length === 2).map((v) => vectorRow(v, t, v.label + "_t"));
    const q = c.vectors.find((v) => v.first.shape.length === 3), [list, norm] = headRow(q, k, t);
    lines.push([italic(`q_t`), list, `${q.width} numbers, length ${show(norm)}`, true]);
    const shown = all.slice(0, SHOWN_KEYS).map((s) => { const [l, n] = headRow(c.scores.keys, k, s); return [tokenHead(keys[s]), l, `length ${show(n)}`]; });
    return [rowsOfNumbers(lines, q.width), between(all.length > SHOWN_KEYS ? "the six keys with the largest weights" : "the keys with a weight"), rowsOfNumbers(shown, c.scores.keys.width)];
  },
  scores: (c, at) => [scoreTable(c.scores, at)],
  sum(c, { t, k, keys, weights, all }) {
    const order = all.slice(0, SHOWN_KEYS), rest = order.reduce((left, s) => left - weights[s], 1), [z, norm] = headRow(c.vectors[0], k, t);
    const lines = order.map((s) => { const [l] = headRow(c.scores.values, k, s); return [tokenHead(keys[s]), l, `× ${weights[s].toFixed(3)}`]; });
    if (all.length > SHOWN_KEYS) lines.push([h("th"), null, `and ${all.length - SHOWN_KEYS} more, with ${Math.max(0, rest).toFixed(3)} in all`]);
    lines.push([italic(c.vectors[0].label + "_t"), z, `the sum; length ${show(norm)}`, true]);
    return [rowsOfNumbers(lines, c.vectors[0].width)];
  },
  heads(c, { t, k, map }) {
    const [z, o] = c.vectors;
    const lines = Array.from({ length: z.first.shape[0] }, (_, i) => { const [l, n] = headRow(z, i, t); return [italic(`z^{${map.heads[i] + 1}}`), l, `length ${show(n)}`, i === k]; });
    return [rowsOfNumbers(lines, z.width), between("through W", h("sub", {}, "O")), rowsOfNumbers([vectorRow(o, t, "o_t")], o.width)];
  },
  prediction(c, { t }) {
    const only = c.vectors[0].first.shape[0] === 1 ? 0 : t; // there is one prediction of a class, whichever token walks
    const numbers = rowsOfNumbers(c.vectors.map((v) => vectorRow(v, only, v.label + "_t")), c.vectors[0].width), step = data.steps[only];
    return step ? [numbers, h("div", { style: { marginTop: "10px" } }, candidates(step)), h("p", { class: "dim", style: { margin: "6px 0 0" } },
      `p = exp(logit − ${show(step.normaliser)}), where ${show(step.normaliser)} is the logarithm of the sum over the vocabulary. Entropy ${step.entropy.toFixed(2)} bits.`)] : [numbers];
  },
  vectors: (c, { t }) => [rowsOfNumbers(c.vectors.map((v) => vectorRow(v, t)), Math.max(...c.vectors.map((v) => v.width)))],
};

// One card for token `t` and the head of this number; pictures: 1 whole vectors, 2 those of all tokens
export function walkCard(c, t, head, { room, tokens, pictures }) {
  const map = c.scores ? data.maps.find((m) => m.name === c.scores.map) : null;
  const k = map ? Math.max(0, map.heads.indexOf(head)) : 0; // an attention that lost this head shows its first
  const weights = map ? row(map.weights, k, t) : [];
  const all = weights.map((_, s) => s).filter((s) => weights[s] > 0.0004).sort((a, b) => weights[b] - weights[a]);
  const at = { t, k, map, weights, all, keys: map ? tokensOf(map.columns) : [] };
  const active = typeof c.active === "number" ? ` ${Math.round(100 * c.active)}% of all neurons are not zero here.` : "";
  return h("li", {}, h("h2", {}, c.title), formula(c.formula), h("p", {}, c.text, active),
    map && map.heads.indexOf(head) < 0 ? h("p", { class: "note" }, `This attention has no head ${head + 1}, it was pruned; head ${map.heads[0] + 1} is shown.`) : null,
    (NUMBERS[c.show] || NUMBERS.vectors)(c, at), pictures ? vectorPictures(c, at, { room, tokens, whole: pictures > 1 }) : null,
    shapeOf(c, map) ? h("div", { class: "shape", style: { marginTop: "8px" } }, shapeOf(c, map)) : null);
}

function shapeOf(c, map) {
  if (c.show !== "scores") return c.shape;
  const [H, T, S] = map.weights.shape;
  return `${H > 1 ? `${H} heads, each ` : ""}${T} × ${S}`;
}

function scoreTable(scores, { map, weights, k, t, keys }) {
  const raw = row(scores.raw, k, t), bias = scores.bias ? row(scores.bias, k, t) : null, mask = scores.mask ? row(scores.mask, t) : null;
  const scaled = raw.map((v) => (v === null ? null : v * scores.scale));
  const masked = scaled.map((v, s) => (mask && !mask[s] ? null : bias ? v + bias[s] : v));
  const lines = [["score", raw]];
  if (scores.scale !== 1) lines.push(["scaled", scaled]);
  if (bias) lines.push(["bias", bias]);
  if (mask || bias) lines.push([mask ? "masked" : "sum", masked]);
  const max = largest(lines.map((line) => line[1]));
  return h("div", { class: "scroll" }, h("table", { class: "numbers", dir: rightToLeft(map.columns) ? "rtl" : null },
    h("thead", {}, h("tr", {}, h("th"), keys.map((token) => h("th", { scope: "col" }, word(shorter(token, 12)))))),
    h("tbody", {}, lines.map(([label, list]) => h("tr", {}, italic(label), list.map((v) => h("td", {}, numberCell(v, max))))),
      h("tr", { class: "on" }, italic("softmax"), weights.map((v) => h("td", {}, numberCell(v, Math.max(...weights), true)))))));
}
