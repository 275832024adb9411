// @ts-check
// Attention: output against source (alignment), single or several heads in colours, and all heads of the model.

import { h, put, roving } from "../shared/dom.js";
import {
  chosenPlane,
  clickChoice,
  headButton,
  mapControls,
  oneHead,
  ROLLED,
  rolls,
  select,
  severalHeads,
  silenceButton,
  silencing,
  toggle,
  told,
} from "./controls.js";
import { clamp, data, plane, planeOf } from "./core.js";
import { legend, links, matrix } from "./figures.js";
import { css, hue, hueShade, ink, thumbnail, thumbnailImage } from "./surface.js";
import { go, refresh, saveButtons, state } from "./tabs.js";
import { walkTo } from "./view-walk.js";
import { axesOf, canGroup, kindName, rightToLeft } from "./words.js";

// The alignment view: output against source, as lines and as a matrix.

export const alignmentView = {
  name: "alignment",
  title: "Alignment",
  when: () => data.alignment.length > 0,
  fill: fillAlignment,
};

export const wordsToggle = (...names) =>
  canGroup(...names)
    ? toggle("words", state.words, "Pieces of a word as one: the sum over keys, the mean over queries", () => {
        state.words = !state.words;
        refresh();
      })
    : null;

function fillAlignment(panel, room) {
  const entry = data.alignment[Math.min(state.alignment, data.alignment.length - 1)];
  const {
    planes: [m],
    rows,
    columns,
    token,
    row,
  } = axesOf([plane(entry.weights, 0)], "output", "source", state.words);
  const strings = links({
    rows,
    columns,
    at: m.at,
    max: m.max,
    chosen: state.pinned === undefined ? undefined : row(state.pinned),
    label: "Lines between the source and the output",
    rowsName: "output",
    columnsName: "source",
    onHover: (t, s) => {
      if (t !== null) grid.mark(t, null);
      else if (s === null) grid.mark(null);
    },
    onPick: (t) => {
      state.pinned = t === null ? undefined : token(t);
      if (t !== null) state.step = token(t);
    },
  });
  const grid = matrix({
    rows,
    columns,
    at: m.at,
    max: m.max,
    room: room - 44,
    mirrored: rightToLeft("source"),
    label: "Attention of the output, down, over the source, across",
    tell: (t, s) => told(m, rows, columns, t, s),
    onHover: (t) => strings.mark(t),
    onPick: (t) => {
      state.step = token(t);
      go("output");
    },
  });
  put(
    panel,
    h(
      "p",
      { class: "dim" },
      "How much each output token attends to each source token. Point at a token to see its links.",
    ),
    h(
      "div",
      { class: "controls" },
      data.alignment.length > 1
        ? select(
            "weights",
            data.alignment.map((a) => a.name),
            state.alignment,
            (i) => {
              state.alignment = i;
              refresh();
            },
          )
        : null,
      wordsToggle("output", "source"),
      legend(m.max),
    ),
    h(
      "div",
      { class: "beside" },
      h(
        "section",
        { class: "card" },
        h("h2", {}, "Each output token (below) and the source tokens it attends to (above)"),
        strings.node,
        saveButtons(strings, "lines"),
      ),
      h("section", { class: "card" }, h("h2", {}, "The same as a matrix"), grid.node, saveButtons(grid, "matrix")),
    ),
  );
  return strings.settle;
}

// The heads view: any attention map, one head or several in colours, and thumbnails of all heads.

export const headsView = { name: "heads", title: "Heads", when: () => data.maps.length > 0, fill: fillHeads };

function fillHeads(panel, room) {
  const map = data.maps[state.map],
    several = severalHeads(map);
  const { planes, rows, columns, token, row } = axesOf(
    several.length ? several.map(({ index }) => plane(map.weights, index)) : [chosenPlane(map)],
    map.rows,
    map.columns,
    state.words,
  );
  const heads = several.map((head, i) => ({ ...head, plane: planes[i] })),
    { m, winner } = together(planes);
  const rolledOut = state.head === ROLLED && rolls(map) && !heads.length;
  const strings = links({
    rows,
    columns,
    at: m.at,
    max: m.max,
    upright: true,
    chosen: state.pinnedHead === undefined ? undefined : row(state.pinnedHead),
    label: "Queries and keys",
    rowsName: map.rows,
    columnsName: map.columns,
    layers: heads.length ? heads.map((head) => ({ at: head.plane.at, stroke: () => css(hue(head.number)) })) : null,
    onHover: (t, s) => {
      if (t !== null) grid.mark(t, null);
      else if (s === null) grid.mark(null);
    },
    onPick: (t) => {
      state.pinnedHead = t === null ? undefined : token(t);
    },
  });
  const grid = matrix({
    rows,
    columns,
    at: m.at,
    max: m.max,
    room: room > 780 ? room - 470 : room - 44,
    mirrored: rightToLeft(map.columns),
    label: `${kindName(map.kind)} attention, layer ${map.layer + 1}`,
    shade: heads.length ? (t, s) => hueShade(heads[winner(t, s)].number, m.at(t, s) / (m.max || 1)) : null,
    tell: (t, s) => told(m, rows, columns, t, s, heads),
    onHover: (t) => strings.mark(t),
    onPick: (t) => walkTo(map, token(t)),
  });
  const keydown = silencing(map, oneHead(map));
  put(
    panel,
    h(
      "p",
      { class: "dim" },
      "Where the heads of one layer read from. Choose a layer and a head, or several heads at once.",
    ),
    h(
      "div",
      { class: "controls", keydown },
      mapControls({ several: true }),
      wordsToggle(map.rows, map.columns),
      silenceButton(map, oneHead(map)),
      heads.length ? hueLegend(heads) : legend(m.max),
    ),
    h(
      "section",
      { class: "card split", keydown },
      h(
        "div",
        { class: "with-save" },
        h(
          "h2",
          {},
          rolledOut
            ? `The share of each input (right) in each position (left) after layer ${map.layer + 1}`
            : "Queries (left) and the keys they attend to (right)",
        ),
        strings.node,
        saveButtons(strings, "lines"),
      ),
      h(
        "div",
        { class: "with-save" },
        h("h2", {}, heads.length ? "As a matrix: the strongest head of each cell" : "As a matrix"),
        grid.node,
        saveButtons(grid, "matrix"),
      ),
    ),
  );
  return strings.settle;
}

// The largest weight over several planes, and the index of its plane.
function together(planes) {
  if (planes.length === 1) return { m: planes[0], winner: () => 0 };
  const { T, S } = planes[0],
    out = new Float32Array(T * S),
    whose = new Uint8Array(T * S);
  planes.forEach((m, k) =>
    m.data.forEach((v, i) => {
      if (v > out[i]) {
        out[i] = v;
        whose[i] = k;
      }
    }),
  );
  return { m: planeOf(out, T, S), winner: (t, s) => whose[t * S + s] };
}

const hueLegend = (heads) =>
  h(
    "span",
    { class: "legend" },
    heads.map(({ number }) =>
      h("span", { class: "hue" }, h("i", { style: { backgroundColor: css(hue(number)) } }), `head ${number + 1}`),
    ),
  );

export const allHeadsView = {
  name: "model",
  title: "All heads",
  when: () => data.maps.some((m) => m.heads.length > 1) || data.maps.length > 1,
  fill: fillAllHeads,
};

function fillAllHeads(panel, room) {
  const kinds = [...new Set(data.maps.map((m) => m.kind))];
  put(
    panel,
    h(
      "p",
      { class: "dim" },
      "Every head of every layer, each with its own scale: queries down, keys across. Choose one to enlarge it.",
    ),
    clickChoice() ? h("div", { class: "controls" }, clickChoice()) : null,
    kinds.map((kind) => {
      const grid = headGrid(kind, room);
      return h(
        "section",
        { class: "card" },
        h("h2", {}, kindName(kind)),
        h("div", { class: "scroll" }, grid.node),
        saveButtons(grid, kindName(kind)),
      );
    }),
  );
}

const GRID_NAMES = 64,
  GRID_STEP = 10; // pixels: layer names, gap between pictures

// A row of thumbnails per layer; a pruned head leaves a gap.
function headGrid(kind, room) {
  const maps = data.maps.filter((m) => m.kind === kind),
    mirrored = rightToLeft(maps[0].columns);
  const most = Math.max(...maps.map((m) => Math.max(...m.heads) + 1));
  const size = clamp(Math.floor((room - 110) / most) - 18, 28, 104);
  const node = h(
    "div",
    { class: "grid", style: { gridTemplateColumns: `max-content repeat(${most}, max-content)` } },
    h("span"),
  );
  for (let k = 0; k < most; k++)
    node.append(h("span", { class: "side", style: { textAlign: "center" } }, String(k + 1)));
  const cells = [];
  for (const map of maps) {
    node.append(h("span", { class: "side" }, `layer ${map.layer + 1}`));
    for (let k = 0; k < most; k++) {
      const index = map.heads.indexOf(k);
      cells.push(
        index < 0
          ? null
          : headButton(map, index, { class: "thumb" }, thumbnail(plane(map.weights, index), size, mirrored)),
      );
      node.append(
        cells[cells.length - 1] || h("span", { class: "dim", title: "pruned", style: { textAlign: "center" } }, "·"),
      );
    }
  }
  roving(cells, { across: most });
  const step = size + GRID_STEP;
  const paint = (surface) => {
    const faint = { size: 12.5, fill: ink("--faint") };
    for (let k = 0; k < most; k++)
      surface.text(String(k + 1), GRID_NAMES + k * step + size / 2, 12, { ...faint, align: "center" });
    maps.forEach((map, row) => {
      const y = 20 + row * step;
      surface.text(`layer ${map.layer + 1}`, 0, y + size / 2 + 4, faint);
      map.heads.forEach((number, index) => {
        surface.pixels(thumbnailImage(plane(map.weights, index), mirrored), GRID_NAMES + number * step, y, size, size);
        surface.rect(GRID_NAMES + number * step, y, size, size, { stroke: ink("--line") });
      });
    });
  };
  return { node, paint, width: GRID_NAMES + most * step - GRID_STEP, height: 20 + maps.length * step - GRID_STEP };
}
