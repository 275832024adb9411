// Whole vectors and matrices as pictures: a strip of as many cells as a vector has numbers, or one row for every token.

import { clamp, h, plane, put, values } from "./core.js";
import { css } from "./colours.js";
import { matrix, shadeOf } from "./matrix.js";
import { canvasSurface } from "./surface.js";
import { show, tokensOf } from "./text.js";

// The numbers of a vector for one head (or -1): {T, D, at(t, i), max}
function numbersOf(entry, head) {
  const [T, D] = entry.shape.slice(-2), all = values(entry), from = Math.max(0, head) * T * D;
  let max = 1e-9;
  for (let i = from; i < from + T * D; i++) if (Math.abs(all[i]) > max) max = Math.abs(all[i]);
  return { T, D, at: (t, i) => all[from + t * D + i], max };
}

export const hasWhole = (layer) => layer.some((c) => c.vectors.some((vector) => vector.all));

function vectorStrip({ D, at, max }, t, room) {
  const cell = clamp(Math.floor(room / Math.min(D, 128)), 3, 14), across = Math.min(D, Math.floor(room / cell)), lines = Math.ceil(D / across), high = 14;
  const surface = canvasSurface(across * cell, lines * (high + 2));
  const paint = (on) => { for (let i = 0; i < D; i++) on.rect((i % across) * cell, Math.floor(i / across) * (high + 2), cell, high, { fill: css(shadeOf(at(t, i), max, true)) }); };
  paint(surface);
  const read = h("span", { class: "dim" }, "");
  const node = h("div", { class: "strip", pointermove: (event) => {
    const box = surface.node.getBoundingClientRect(), i = Math.floor((event.clientX - box.left) / cell) + across * Math.floor((event.clientY - box.top) / (high + 2));
    put(read, i >= 0 && i < D ? `number ${i + 1}: ${show(at(t, i))}` : null);
  }, pointerleave: () => put(read) }, surface.node, read);
  return node;
}

function allTokensGrid(found, tokens, chosen, room, label) {
  const { T, D, at, max } = found, rows = tokens.slice(0, T);
  const made = matrix({
    rows, columns: Array.from({ length: D }, (_, i) => String(i + 1)), at, max, signed: true, stretch: true, numbered: true, tall: clamp(16 * T, 60, 480), room, label,
    tell: (t, i) => [`${label}, token ${t + 1}`, i === null ? "" : `, number ${i + 1}: `, i === null ? "" : h("b", {}, show(at(t, i)))],
  });
  made.mark(chosen, null);
  return made.node;
}

function scoreGrid(map, k, room) {
  const rows = tokensOf(map.rows), columns = tokensOf(map.columns), m = plane(map.weights, k);
  return matrix({ rows, columns, at: m.at, max: m.max, room: Math.min(room, 520), label: "softmax", tell: (t, s) => [`query ${t + 1}`, s === null ? "" : `, key ${s + 1}: `, s === null ? "" : h("b", {}, m.at(t, s).toFixed(3))] }).node;
}

// at: as for the numbers of a card; whole: all tokens instead of one
export function vectorPictures(c, { t, k, map }, { room, tokens, whole }) {
  const parts = c.vectors.filter((vector) => vector.all).map((vector) => {
    const found = numbersOf(vector.all, vector.all.shape.length === 3 ? k : -1), only = found.T === 1 ? 0 : t;
    const name = vector.label + (vector.all.shape.length === 3 && map ? `, head ${map.heads[k] + 1}` : "");
    return h("div", { class: "picture" }, h("span", { class: "dim" }, `${name}: ${whole ? `${found.T} × ` : ""}${found.D} numbers, from ${show(-found.max)} to ${show(found.max)}`),
      whole ? allTokensGrid(found, found.T === 1 ? [""] : tokens, only, room, vector.label) : vectorStrip(found, only, room));
  });
  if (whole && c.show === "scores") parts.push(h("div", { class: "picture" }, h("span", { class: "dim" }, "softmax, all queries"), scoreGrid(map, k, room)));
  return parts.length ? h("div", { class: "pictures" }, parts) : null;
}
