// Position: the position encoding as a picture, and how alike two positions are.

import { data, h, put, values } from "./core.js";
import { choice } from "./controls.js";
import { legend, matrix } from "./matrix.js";
import { saveButtons } from "./save.js";
import { refresh, state } from "./tabs.js";
import { show } from "./text.js";

export const positionView = { name: "position", title: "Position", when: () => data.positions.length > 0, fill: fillPosition };

const plurals = (name) => name.replace(/^\w+/, "$&s"); // pair of dimensions -> pairs of dimensions

function fillPosition(panel, room) {
  const found = data.positions[state.picture], [T, S] = found.values.shape, all = values(found.values);
  const at = (t, s) => all[t * S + s] * found.values.scale;
  let max = 0;
  for (const v of all) max = Math.max(max, Math.abs(v) * found.values.scale);
  const numbersFrom = (count, first) => Array.from({ length: count }, (_, i) => String(i + first));
  const grid = matrix({
    rows: numbersFrom(T, found.rows === "head" ? 1 : 0), columns: numbersFrom(S, found.first_column), at, max, signed: true, stretch: true, tall: found.rows === "head" ? 300 : 520, first: found.first_column, firstRow: found.rows === "head" ? 1 : 0, numbered: true,
    room: room - 44, label: found.caption, tell: (t, s) => [`${found.rows} ${found.rows === "head" ? t + 1 : t}`, s === null ? "" : `, ${found.columns} ${s + found.first_column}: `, h("b", {}, s === null ? "" : show(at(t, s)))],
  });
  const cards = [h("section", { class: "card" }, h("p", {}, found.caption), h("p", { class: "dim" }, `${plurals(found.rows)} down, ${plurals(found.columns)} across`), grid.node, saveButtons(grid, found.name))];
  if (found.columns === "dimension") {
    const N = Math.min(T, 64), like = new Float32Array(N * N);
    for (let i = 0; i < N; i++) for (let j = 0; j < N; j++) {
      let dot = 0, a = 0, b = 0;
      for (let s = 0; s < S; s++) { const u = at(i, s), v = at(j, s); dot += u * v; a += u * u; b += v * v; }
      like[i * N + j] = dot / (Math.sqrt(a * b) || 1);
    }
    const near = matrix({ rows: numbersFrom(N, 0), columns: numbersFrom(N, 0), at: (t, s) => like[t * N + s], max: 1, signed: true, numbered: true, first: 0, firstRow: 0, tall: 400, room: Math.min(room - 44, 480), label: "How alike two positions are",
      tell: (t, s) => [`positions ${t} and ${s === null ? t : s}: `, h("b", {}, show(like[t * N + (s === null ? t : s)]))] });
    cards.push(h("section", { class: "card" }, h("h2", {}, "How alike two positions are"), h("p", { class: "dim" }, "The cosine between their vectors: a model can tell near from far by it."), near.node, saveButtons(near, `${found.name} likeness`)));
  }
  put(panel, h("div", { class: "controls" },
    data.positions.length > 1 ? choice("stack", data.positions.map((p) => p.name), state.picture, (i) => { state.picture = i; refresh(); }) : null, legend(max, true)), ...cards);
}
