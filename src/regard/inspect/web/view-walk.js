// The walk: cards with formulas and this model's own numbers.

import { data, h, put, row } from "./core.js";
import { colour, css, inkOn } from "./colours.js";
import { choice, pick, select } from "./controls.js";
import { candidates } from "./predictions.js";
import { go, refresh, state } from "./tabs.js";
import { rightToLeft, shorter, show, tokensOf, visible, word } from "./text.js";

function formula(text) {
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

function card(c, t, head, walk) {
  const parts = [h("h2", {}, c.title), formula(c.formula), h("p", {}, c.text)];
  const scores = c.scores, map = scores && data.maps.find((m) => m.name === scores.map);
  const keys = map ? tokensOf(map.columns) : [];
  const k = map ? Math.max(0, map.heads.indexOf(head)) : 0; // an attention that lost this head shows its first
  if (map && map.heads.indexOf(head) < 0) parts.push(h("p", { class: "note" }, `This attention has no head ${head + 1}, it was pruned; head ${map.heads[0] + 1} is shown.`));
  const weights = map ? row(map.weights, k, t) : [];
  const all = weights.map((_, s) => s).filter((s) => weights[s] > 0.0004).sort((a, b) => weights[b] - weights[a]), order = all.slice(0, 6);
  const rest = order.reduce((left, s) => left - weights[s], 1);
  if (c.show === "qkv") {
    const lines = c.vectors.filter((v) => v.first.shape.length === 2).map((v) => vectorRow(v, t, v.label + "_t"));
    const q = c.vectors.find((v) => v.first.shape.length === 3);
    const [list, norm] = headRow(q, k, t);
    lines.push([italic(`q_t`), list, `${q.width} numbers, length ${show(norm)}`, true]);
    parts.push(rowsOfNumbers(lines, q.width));
    parts.push(h("p", { class: "dim", style: { margin: "10px 0 4px" } }, all.length > 6 ? "the six keys with the largest weights" : "the keys with a weight"));
    parts.push(rowsOfNumbers(order.map((s) => { const [l, n] = headRow(scores.keys, k, s); return [tokenHead(keys[s]), l, `length ${show(n)}`]; }), scores.keys.width));
  } else if (c.show === "scores") {
    parts.push(scoreTable(scores, map, weights, k, t));
  } else if (c.show === "sum") {
    const lines = order.map((s) => { const [l] = headRow(scores.values, k, s); return [tokenHead(keys[s]), l, `× ${weights[s].toFixed(3)}`]; });
    const [z, norm] = headRow(c.vectors[0], k, t);
    if (all.length > 6) lines.push([h("th"), null, `and ${all.length - 6} more, with ${Math.max(0, rest).toFixed(3)} in all`]);
    lines.push([italic(c.vectors[0].label + "_t"), z, `the sum; length ${show(norm)}`, true]);
    parts.push(rowsOfNumbers(lines, c.vectors[0].width));
  } else if (c.show === "heads") {
    const z = c.vectors[0];
    const lines = Array.from({ length: z.first.shape[0] }, (_, i) => { const [l, n] = headRow(z, i, t); return [italic(`z^{${map.heads[i] + 1}}`), l, `length ${show(n)}`, i === k]; });
    parts.push(rowsOfNumbers(lines, z.width), h("p", { class: "dim", style: { margin: "8px 0 4px" } }, "through W", h("sub", {}, "O")), rowsOfNumbers([vectorRow(c.vectors[1], t, "o_t")], c.vectors[1].width));
  } else if (c.show === "prediction") {
    const only = c.vectors[0].first.shape[0] === 1 ? 0 : t; // there is one prediction of a class, whichever token walks
    parts.push(rowsOfNumbers(c.vectors.map((v) => vectorRow(v, only, v.label + "_t")), c.vectors[0].width));
    const step = data.steps[only];
    if (step) parts.push(h("div", { style: { marginTop: "10px" } }, candidates(step)), h("p", { class: "dim", style: { margin: "6px 0 0" } },
      `p = exp(logit − ${show(step.normaliser)}), where ${show(step.normaliser)} is the logarithm of the sum over the vocabulary. Entropy ${step.entropy.toFixed(2)} bits.`));
  } else parts.push(rowsOfNumbers(c.vectors.map((v) => vectorRow(v, t)), Math.max(...c.vectors.map((v) => v.width))));
  if (c.shape) parts.push(h("div", { class: "shape", style: { marginTop: "8px" } }, c.shape));
  return h("li", {}, parts);
}

function scoreTable(scores, map, weights, k, t) {
  const keys = tokensOf(map.columns);
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

export function walkTo(map, t) {
  const name = map.kind === "encoder" ? "encoder" : "decoder";
  const index = data.walks.findIndex((w) => w.name === name);
  if (index < 0) return;
  state.walk = index;
  state.walkLayer = Math.min(map.layer, data.walks[index].layers.length - 1);
  state.walkRow = t;
  state.walkHead = map.heads[Math.max(0, state.head)];
  go("walk");
}

export const walkView = { name: "walk", title: "Walk", when: () => data.walks.length > 0, fill: fillWalk };

function fillWalk(panel) {
  const walk = data.walks[state.walk];
  state.walkLayer = Math.min(state.walkLayer, walk.layers.length - 1);
  const layer = walk.layers[state.walkLayer];
  const tokens = tokensOf(walk.rows), first = layer.flatMap((c) => c.vectors)[0];
  const many = first ? first.first.shape[first.first.shape.length - 2] : tokens.length;
  state.walkRow = Math.min(state.walkRow, many - 1);
  const maps = data.maps.filter((m) => layer.some((c) => c.scores && c.scores.map === m.name));
  const heads = [...new Set(maps.flatMap((m) => m.heads))].sort((a, b) => a - b); // of any attention of this layer
  if (!heads.includes(state.walkHead)) state.walkHead = heads[0];
  const names = tokens.slice(0, many).map((token, i) => `${i + 1}  ${visible(token)}`);
  put(panel,
    h("p", { class: "dim" }, walk.layers.length > 1 || walk.layers[0].length > 8 ? "One token through one layer, with this model's own numbers. Of each vector the first eight are shown." : "One step of the decoder, with this model's own numbers. Of each vector the first eight are shown."),
    h("div", { class: "controls" },
      data.walks.length > 1 ? choice("stack", data.walks.map((w) => w.name), state.walk, (i) => { state.walk = i; state.walkRow = 0; refresh(); }) : null,
      walk.layers.length > 1 ? pick("layer", walk.layers.map((_, i) => String(i + 1)), state.walkLayer, (i) => { state.walkLayer = i; refresh(); }) : null,
      select("token", names, state.walkRow, (i) => { state.walkRow = i; refresh(); }),
      heads.length > 1 ? pick("head", heads.map((n) => String(n + 1)), heads.indexOf(state.walkHead), (i) => { state.walkHead = heads[i]; refresh(); }) : null),
    many < tokens.length ? h("p", { class: "note" }, `The walk is kept for the first ${many} of ${tokens.length} tokens.`) : null,
    h("ol", { class: "walk" }, layer.map((c) => card(c, state.walkRow, state.walkHead, walk))));
}
