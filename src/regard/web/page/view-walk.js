// @ts-check
// The walk: one token through one layer, card by card.

import { h, put } from "../shared/dom.js";
import { visible, word } from "../shared/text.js";
import { choice, pick, select } from "./controls.js";
import { data, row } from "./core.js";
import { hasWhole, vectorPictures } from "./pictures.js";
import { colour, css, inkOn } from "./surface.js";
import { go, refresh, state } from "./tabs.js";
import { candidates } from "./view-output.js";
import { rightToLeft, shorter, show, tokensOf } from "./words.js";

// The cards of the walk: formulas with the numbers of this model.

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
const largest = (list) =>
  Math.max(
    1e-9,
    ...list
      .flat()
      .filter((v) => v !== null)
      .map(Math.abs),
  );

// Rows of numbers: [label node, numbers, end text, chosen]
function rowsOfNumbers(lines, width) {
  const max = largest(lines.map((line) => line[1] || []));
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "numbers" },
      h(
        "tbody",
        {},
        lines.map(([label, list, end, chosen]) =>
          list === null
            ? h("tr", {}, label, h("td", { class: "end", colspan: 10 }, end))
            : h(
                "tr",
                { class: chosen ? "on" : null },
                label,
                list.map((v) => h("td", {}, numberCell(v, max))),
                width > list.length ? h("td", { class: "dim" }, "…") : null,
                h("td", { class: "end" }, end),
              ),
        ),
      ),
    ),
  );
}
const italic = (text) => {
  const made = h("th", { scope: "row" });
  made.append(...formula(text).childNodes);
  return made;
};
const tokenHead = (token) => h("th", { scope: "row", class: "token" }, word(token));
const vectorRow = (vector, t, label) => {
  const list = row(vector.first, t),
    norm = row(vector.norm)[t];
  return [italic(label || vector.label), list, `${vector.width} numbers, length ${show(norm)}`];
};
const headRow = (vector, head, t) => [row(vector.first, head, t), row(vector.norm, head)[t]];
const between = (...content) => h("p", { class: "dim", style: { margin: "10px 0 4px" } }, ...content);

// The numbers of a card by its kind. at: {t: token, k: head of the map, map, keys, weights, all: keys with a weight,
// in decreasing order}
const NUMBERS = {
  qkv(c, { t, k, keys, all }) {
    const lines = c.vectors.filter((v) => v.first.shape.length === 2).map((v) => vectorRow(v, t, v.label + "_t"));
    const q = c.vectors.find((v) => v.first.shape.length === 3),
      [list, norm] = headRow(q, k, t);
    lines.push([italic(`q_t`), list, `${q.width} numbers, length ${show(norm)}`, true]);
    const shown = all.slice(0, SHOWN_KEYS).map((s) => {
      const [l, n] = headRow(c.scores.keys, k, s);
      return [tokenHead(keys[s]), l, `length ${show(n)}`];
    });
    return [
      rowsOfNumbers(lines, q.width),
      between(all.length > SHOWN_KEYS ? "the six keys with the largest weights" : "the keys with a weight"),
      rowsOfNumbers(shown, c.scores.keys.width),
    ];
  },
  scores: (c, at) => [scoreTable(c.scores, at)],
  sum(c, { t, k, keys, weights, all }) {
    const order = all.slice(0, SHOWN_KEYS),
      rest = order.reduce((left, s) => left - weights[s], 1),
      [z, norm] = headRow(c.vectors[0], k, t);
    const lines = order.map((s) => {
      const [l] = headRow(c.scores.values, k, s);
      return [tokenHead(keys[s]), l, `× ${weights[s].toFixed(3)}`];
    });
    if (all.length > SHOWN_KEYS)
      lines.push([h("th"), null, `and ${all.length - SHOWN_KEYS} more, with ${Math.max(0, rest).toFixed(3)} in all`]);
    lines.push([italic(c.vectors[0].label + "_t"), z, `the sum; length ${show(norm)}`, true]);
    return [rowsOfNumbers(lines, c.vectors[0].width)];
  },
  heads(c, { t, k, map }) {
    const [z, o] = c.vectors;
    const lines = Array.from({ length: z.first.shape[0] }, (_, i) => {
      const [l, n] = headRow(z, i, t);
      return [italic(`z^{${map.heads[i] + 1}}`), l, `length ${show(n)}`, i === k];
    });
    return [
      rowsOfNumbers(lines, z.width),
      between("through W", h("sub", {}, "O")),
      rowsOfNumbers([vectorRow(o, t, "o_t")], o.width),
    ];
  },
  prediction(c, { t }) {
    const only = c.vectors[0].first.shape[0] === 1 ? 0 : t; // a class has one prediction, whichever token is selected
    const numbers = rowsOfNumbers(
        c.vectors.map((v) => vectorRow(v, only, v.label + "_t")),
        c.vectors[0].width,
      ),
      step = data.steps[only];
    return step
      ? [
          numbers,
          h("div", { style: { marginTop: "10px" } }, candidates(step)),
          h(
            "p",
            { class: "dim", style: { margin: "6px 0 0" } },
            `p = exp(logit − ${show(step.normaliser)}), where ${show(step.normaliser)} is the logarithm of the sum`,
            ` over the vocabulary. Entropy ${step.entropy.toFixed(2)} bits.`,
          ),
        ]
      : [numbers];
  },
  vectors: (c, { t }) => [
    rowsOfNumbers(
      c.vectors.map((v) => vectorRow(v, t)),
      Math.max(...c.vectors.map((v) => v.width)),
    ),
  ],
};

// One card for token `t` and a head number; pictures: 1 full vectors, 2 those of all tokens
export function walkCard(c, t, head, { room, tokens, pictures }) {
  const map = c.scores ? data.maps.find((m) => m.name === c.scores.map) : null;
  const k = map ? Math.max(0, map.heads.indexOf(head)) : 0; // an attention without this head shows its first one
  const weights = map ? row(map.weights, k, t) : [];
  const all = weights
    .map((_, s) => s)
    .filter((s) => weights[s] > 0.0004)
    .sort((a, b) => weights[b] - weights[a]);
  const at = { t, k, map, weights, all, keys: map ? tokensOf(map.columns) : [] };
  const active =
    typeof c.active === "number" ? ` ${Math.round(100 * c.active)}% of all neurons are not zero here.` : "";
  return h(
    "li",
    {},
    h("h2", {}, c.title),
    h(
      "div",
      { class: "when-seen" },
      formula(c.formula),
      h("p", {}, c.text, active),
      map && map.heads.indexOf(head) < 0
        ? h("p", { class: "note" }, `Head ${head + 1} of this attention was pruned; head ${map.heads[0] + 1} is shown.`)
        : null,
      (NUMBERS[c.show] || NUMBERS.vectors)(c, at),
      pictures ? vectorPictures(c, at, { room, tokens, whole: pictures > 1 }) : null,
      shapeOf(c, map) ? h("div", { class: "shape", style: { marginTop: "8px" } }, shapeOf(c, map)) : null,
    ),
  );
}

function shapeOf(c, map) {
  if (c.show !== "scores") return c.shape;
  const [H, T, S] = map.weights.shape;
  return `${H > 1 ? `${H} heads, each ` : ""}${T} × ${S}`;
}

function scoreTable(scores, { map, weights, k, t, keys }) {
  const raw = row(scores.raw, k, t),
    bias = scores.bias ? row(scores.bias, k, t) : null,
    mask = scores.mask ? row(scores.mask, t) : null;
  const scaled = raw.map((v) => (v === null ? null : v * scores.scale));
  const masked = scaled.map((v, s) => (mask && !mask[s] ? null : bias ? v + bias[s] : v));
  /** @type {[string, (number | null)[]][]} */
  const lines = [["score", raw]];
  if (scores.scale !== 1) lines.push(["scaled", scaled]);
  if (bias) lines.push(["bias", bias]);
  if (mask || bias) lines.push([mask ? "masked" : "sum", masked]);
  const max = largest(lines.map((line) => line[1]));
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "numbers", dir: rightToLeft(map.columns) ? "rtl" : null },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th"),
          keys.map((token) => h("th", { scope: "col" }, word(shorter(token, 12)))),
        ),
      ),
      h(
        "tbody",
        {},
        lines.map(([label, list]) =>
          h(
            "tr",
            {},
            italic(label),
            list.map((v) => h("td", {}, numberCell(v, max))),
          ),
        ),
        h(
          "tr",
          { class: "on" },
          italic("softmax"),
          weights.map((v) => h("td", {}, numberCell(v, Math.max(...weights), true))),
        ),
      ),
    ),
  );
}

const AMOUNTS = ["first eight", "whole vectors", "all tokens"];

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

function fillWalk(panel, room) {
  const walk = data.walks[state.walk],
    number = Math.min(state.walkLayer, walk.layers.length - 1),
    layer = walk.layers[number];
  const tokens = tokensOf(walk.rows),
    first = layer.flatMap((c) => c.vectors)[0];
  const many = first ? first.first.shape[first.first.shape.length - 2] : tokens.length,
    token = Math.min(state.walkRow, many - 1);
  const maps = data.maps.filter((m) => layer.some((c) => c.scores && c.scores.map === m.name));
  const heads = [...new Set(maps.flatMap((m) => m.heads))].sort((a, b) => a - b); // of any attention of this layer
  const head = heads.includes(state.walkHead) ? state.walkHead : heads[0];
  const names = tokens.slice(0, many).map((each, i) => `${i + 1}  ${visible(each)}`),
    whole = hasWhole(layer),
    pictures = whole ? state.numbers : 0;
  const intro =
    walk.layers.length > 1 || walk.layers[0].length > 8 ? "One token through one layer" : "One step of the decoder";
  put(
    panel,
    h(
      "p",
      { class: "dim" },
      `${intro}, with this model's own numbers. Of each vector the first eight are shown`,
      pictures ? ", and the full vector as a picture." : ".",
    ),
    h(
      "div",
      { class: "controls" },
      data.walks.length > 1
        ? choice(
            "stack",
            data.walks.map((w) => w.name),
            state.walk,
            (i) => {
              state.walk = i;
              state.walkRow = 0;
              refresh();
            },
          )
        : null,
      walk.layers.length > 1
        ? pick(
            "layer",
            walk.layers.map((_, i) => String(i + 1)),
            number,
            (i) => {
              state.walkLayer = i;
              refresh();
            },
          )
        : null,
      select("token", names, token, (i) => {
        state.walkRow = i;
        refresh();
      }),
      heads.length > 1
        ? pick(
            "head",
            heads.map((n) => String(n + 1)),
            heads.indexOf(head),
            (i) => {
              state.walkHead = heads[i];
              refresh();
            },
          )
        : null,
      whole
        ? choice("numbers", AMOUNTS, state.numbers, (i) => {
            state.numbers = i;
            refresh();
          })
        : null,
    ),
    many < tokens.length
      ? h("p", { class: "note" }, `The walk is available for the first ${many} of ${tokens.length} tokens.`)
      : null,
    h(
      "ol",
      { class: "walk" },
      layer.map((c) => walkCard(c, token, head, { room: room - 44, tokens, pictures })),
    ),
  );
}
