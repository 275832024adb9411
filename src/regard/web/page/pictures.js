// @ts-check
// Vectors as pictures: position encodings as a view, and full vectors of the walk.

import { h, put } from "../shared/dom.js";
import { choice } from "./controls.js";
import { clamp, data, plane, values } from "./core.js";
import { legend, matrix, shadeOf } from "./figures.js";
import { canvasSurface, css } from "./surface.js";
import { refresh, saveButtons, state } from "./tabs.js";
import { show, tokensOf } from "./words.js";

// The position view: the encoding as a picture, and the similarity of positions.

export const positionView = {
  name: "position",
  title: "Position",
  when: () => data.positions.length > 0,
  fill: fillPosition,
};

const plurals = (name) => name.replace(/^\w+/, "$&s"); // pair of dimensions -> pairs of dimensions

function fillPosition(panel, room) {
  const found = data.positions[state.picture],
    [T, S] = found.values.shape,
    all = values(found.values);
  const at = (t, s) => all[t * S + s] * found.values.scale;
  let max = 0;
  for (const v of all) max = Math.max(max, Math.abs(v) * found.values.scale);
  const numbersFrom = (count, first) => Array.from({ length: count }, (_, i) => String(i + first));
  const grid = matrix({
    rows: numbersFrom(T, found.rows === "head" ? 1 : 0),
    columns: numbersFrom(S, found.first_column),
    at,
    max,
    signed: true,
    stretch: true,
    tall: found.rows === "head" ? 300 : 520,
    first: found.first_column,
    firstRow: found.rows === "head" ? 1 : 0,
    numbered: true,
    room: room - 44,
    label: found.caption,
    tell: (t, s) => [
      `${found.rows} ${found.rows === "head" ? t + 1 : t}`,
      s === null ? "" : `, ${found.columns} ${s + found.first_column}: `,
      h("b", {}, s === null ? "" : show(at(t, s))),
    ],
  });
  const cards = [
    h(
      "section",
      { class: "card" },
      h("p", {}, found.caption),
      h("p", { class: "dim" }, `${plurals(found.rows)} down, ${plurals(found.columns)} across`),
      grid.node,
      saveButtons(grid, found.name),
    ),
  ];
  if (found.columns === "dimension") {
    const N = Math.min(T, 64),
      like = new Float32Array(N * N);
    for (let i = 0; i < N; i++)
      for (let j = 0; j < N; j++) {
        let dot = 0,
          a = 0,
          b = 0;
        for (let s = 0; s < S; s++) {
          const u = at(i, s),
            v = at(j, s);
          dot += u * v;
          a += u * u;
          b += v * v;
        }
        like[i * N + j] = dot / (Math.sqrt(a * b) || 1);
      }
    const near = matrix({
      rows: numbersFrom(N, 0),
      columns: numbersFrom(N, 0),
      at: (t, s) => like[t * N + s],
      max: 1,
      signed: true,
      numbered: true,
      first: 0,
      firstRow: 0,
      tall: 400,
      room: Math.min(room - 44, 480),
      label: "Similarity of positions",
      tell: (t, s) => [
        `positions ${t} and ${s === null ? t : s}: `,
        h("b", {}, show(like[t * N + (s === null ? t : s)])),
      ],
    });
    cards.push(
      h(
        "section",
        { class: "card" },
        h("h2", {}, "Similarity of positions"),
        h("p", { class: "dim" }, "The cosine of two position vectors; a model can derive distance from it."),
        near.node,
        saveButtons(near, `${found.name} likeness`),
      ),
    );
  }
  put(
    panel,
    h("p", { class: "dim" }, "How the model represents the position of a token, or the distance between two tokens."),
    h(
      "div",
      { class: "controls" },
      data.positions.length > 1
        ? choice(
            "stack",
            data.positions.map((p) => p.name),
            state.picture,
            (i) => {
              state.picture = i;
              refresh();
            },
          )
        : null,
      legend(max, true),
    ),
    ...cards,
  );
}

// Full vectors and matrices as pictures: a strip with one cell per number, or one row per token.

// The numbers of a vector for one head (or -1): {T, D, at(t, i), max}
function numbersOf(entry, head) {
  const [T, D] = entry.shape.slice(-2),
    all = values(entry),
    from = Math.max(0, head) * T * D;
  let max = 1e-9;
  for (let i = from; i < from + T * D; i++) if (Math.abs(all[i]) > max) max = Math.abs(all[i]);
  return { T, D, at: (t, i) => all[from + t * D + i], max };
}

export const hasWhole = (layer) => layer.some((c) => c.vectors.some((vector) => vector.all));

function vectorStrip({ D, at, max }, t, room) {
  const cell = clamp(Math.floor(room / Math.min(D, 128)), 3, 14),
    across = Math.min(D, Math.floor(room / cell)),
    lines = Math.ceil(D / across),
    high = 14;
  const surface = canvasSurface(across * cell, lines * (high + 2));
  const paint = (on) => {
    for (let i = 0; i < D; i++)
      on.rect((i % across) * cell, Math.floor(i / across) * (high + 2), cell, high, {
        fill: css(shadeOf(at(t, i), max, true)),
      });
  };
  paint(surface);
  const read = h("span", { class: "dim" }, "");
  const node = h(
    "div",
    {
      class: "strip",
      pointermove: (event) => {
        const box = surface.node.getBoundingClientRect(),
          i =
            Math.floor((event.clientX - box.left) / cell) + across * Math.floor((event.clientY - box.top) / (high + 2));
        put(read, i >= 0 && i < D ? `number ${i + 1}: ${show(at(t, i))}` : null);
      },
      pointerleave: () => put(read),
    },
    surface.node,
    read,
  );
  return node;
}

function allTokensGrid(found, tokens, chosen, room, label) {
  const { T, D, at, max } = found,
    rows = tokens.slice(0, T);
  const made = matrix({
    rows,
    columns: Array.from({ length: D }, (_, i) => String(i + 1)),
    at,
    max,
    signed: true,
    stretch: true,
    numbered: true,
    tall: clamp(16 * T, 60, 480),
    room,
    label,
    tell: (t, i) => [
      `${label}, token ${t + 1}`,
      i === null ? "" : `, number ${i + 1}: `,
      i === null ? "" : h("b", {}, show(at(t, i))),
    ],
  });
  made.mark(chosen, null);
  return made.node;
}

function scoreGrid(map, k, room) {
  const rows = tokensOf(map.rows),
    columns = tokensOf(map.columns),
    m = plane(map.weights, k);
  return matrix({
    rows,
    columns,
    at: m.at,
    max: m.max,
    room: Math.min(room, 520),
    label: "softmax",
    tell: (t, s) => [
      `query ${t + 1}`,
      s === null ? "" : `, key ${s + 1}: `,
      s === null ? "" : h("b", {}, m.at(t, s).toFixed(3)),
    ],
  }).node;
}

// at: as for the numbers of a card; whole: all tokens instead of one
export function vectorPictures(c, { t, k, map }, { room, tokens, whole }) {
  const parts = c.vectors
    .filter((vector) => vector.all)
    .map((vector) => {
      const found = numbersOf(vector.all, vector.all.shape.length === 3 ? k : -1),
        only = found.T === 1 ? 0 : t;
      const name = vector.label + (vector.all.shape.length === 3 && map ? `, head ${map.heads[k] + 1}` : "");
      return h(
        "div",
        { class: "picture" },
        h(
          "span",
          { class: "dim" },
          `${name}: ${whole ? `${found.T} × ` : ""}${found.D} numbers, from ${show(-found.max)} to ${show(found.max)}`,
        ),
        whole
          ? allTokensGrid(found, found.T === 1 ? [""] : tokens, only, room, vector.label)
          : vectorStrip(found, only, room),
      );
    });
  if (whole && c.show === "scores")
    parts.push(
      h("div", { class: "picture" }, h("span", { class: "dim" }, "softmax, all queries"), scoreGrid(map, k, room)),
    );
  return parts.length ? h("div", { class: "pictures" }, parts) : null;
}
