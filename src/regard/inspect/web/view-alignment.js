// Alignment: the output against the source, as lines and as a matrix.

import { select, toggle } from "./controls.js";
import { data, h, plane, put } from "./core.js";
import { links } from "./links.js";
import { told } from "./maps.js";
import { legend, matrix } from "./matrix.js";
import { saveButtons } from "./save.js";
import { go, refresh, state } from "./tabs.js";
import { axesOf, canGroup, rightToLeft } from "./text.js";

export const alignmentView = { name: "alignment", title: "Alignment", when: () => data.alignment.length > 0, fill: fillAlignment };

export const wordsToggle = (...names) => (canGroup(...names) ? toggle("words", state.words, "Pieces of a word as one: the sum over keys, the mean over queries", () => { state.words = !state.words; refresh(); }) : null);

function fillAlignment(panel, room) {
  const entry = data.alignment[Math.min(state.alignment, data.alignment.length - 1)];
  const { planes: [m], rows, columns, token, row } = axesOf([plane(entry.weights, 0)], "output", "source", state.words);
  const strings = links({
    rows, columns, at: m.at, max: m.max, chosen: state.pinned === undefined ? undefined : row(state.pinned), label: "Lines between the source and the output",
    rowsName: "output", columnsName: "source",
    onHover: (t, s) => { if (t !== null) grid.mark(t, null); else if (s === null) grid.mark(null); },
    onPick: (t) => { state.pinned = t === null ? undefined : token(t); if (t !== null) state.step = token(t); },
  });
  const grid = matrix({
    rows, columns, at: m.at, max: m.max, room: room - 44, mirrored: rightToLeft("source"), label: "Attention of the output, down, over the source, across",
    tell: (t, s) => told(m, rows, columns, t, s),
    onHover: (t) => strings.mark(t),
    onPick: (t) => { state.step = token(t); go("output"); },
  });
  put(panel,
    h("div", { class: "controls" },
      data.alignment.length > 1 ? select("weights", data.alignment.map((a) => a.name), state.alignment, (i) => { state.alignment = i; refresh(); }) : null,
      wordsToggle("output", "source"), legend(m.max)),
    h("div", { class: "beside" },
      h("section", { class: "card" }, h("h2", {}, "Each output token (below) and the source tokens that it attends to (above)"), strings.node, saveButtons(strings, "lines")),
      h("section", { class: "card" }, h("h2", {}, "The same as a matrix"), grid.node, saveButtons(grid, "matrix"))));
  return strings.settle;
}
