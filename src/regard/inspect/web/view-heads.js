// Heads: any attention map, head by head, and all heads of the model as small pictures.

import { clamp, data, h, plane, put } from "./core.js";
import { roving } from "./controls.js";
import { links } from "./links.js";
import { chosenPlane, mapControls, ROLLED, rolls, told } from "./maps.js";
import { legend, matrix } from "./matrix.js";
import { go, state } from "./tabs.js";
import { kindName, rightToLeft, tokensOf } from "./text.js";
import { thumbnail } from "./thumbnail.js";
import { walkTo } from "./view-walk.js";

export const headsView = { name: "heads", title: "Heads", when: () => data.maps.length > 0, fill: fillHeads };

function fillHeads(panel, room) {
  const map = data.maps[state.map], m = chosenPlane(map);
  const rows = tokensOf(map.rows), columns = tokensOf(map.columns);
  const strings = links({
    rows, columns, at: m.at, max: m.max, upright: true, chosen: state.pinnedHead, label: "Queries and keys",
    rowsName: map.rows, columnsName: map.columns,
    onHover: (t, s) => { if (t !== null) grid.mark(t, null); else if (s === null) grid.mark(null); },
    onPick: (t) => { state.pinnedHead = t === null ? undefined : t; },
  });
  const grid = matrix({
    rows, columns, at: m.at, max: m.max, room: room > 780 ? room - 470 : room - 44, mirrored: rightToLeft(map.columns), label: `${kindName(map.kind)} attention, layer ${map.layer + 1}`,
    tell: (t, s) => told(m, rows, columns, t, s),
    onHover: (t) => strings.mark(t),
    onPick: (t) => walkTo(map, t),
  });
  put(panel, h("div", { class: "controls" }, mapControls(), legend(m.max)),
    h("section", { class: "card split" },
      h("div", {}, h("h2", {}, state.head === ROLLED && rolls(map) ? `What is left of each (right) in each (left) after layer ${map.layer + 1}` : "Queries (left) and the keys that they attend to (right)"), strings.node),
      h("div", {}, h("h2", {}, "As a matrix"), grid.node)));
  return strings.settle;
}

export const allHeadsView = { name: "model", title: "All heads", when: () => data.maps.some((m) => m.heads.length > 1) || data.maps.length > 1, fill: fillAllHeads };

function fillAllHeads(panel, room) {
  const kinds = [...new Set(data.maps.map((m) => m.kind))];
  put(panel, h("p", { class: "dim" }, "Every head of every layer, each with its own scale: queries down, keys across. Choose one to enlarge it."),
    kinds.map((kind) => h("section", { class: "card" }, h("h2", {}, kindName(kind)), h("div", { class: "scroll" }, headGrid(kind, room)))));
}

// A line of small pictures for each layer; a pruned head leaves a gap.
function headGrid(kind, room) {
  const maps = data.maps.filter((m) => m.kind === kind), all = data.maps;
  const most = Math.max(...maps.map((m) => Math.max(...m.heads) + 1));
  const size = clamp(Math.floor((room - 110) / most) - 18, 28, 104);
  const grid = h("div", { class: "grid", style: { gridTemplateColumns: `max-content repeat(${most}, max-content)` } }, h("span"));
  for (let k = 0; k < most; k++) grid.append(h("span", { class: "side", style: { textAlign: "center" } }, String(k + 1)));
  const cells = [];
  for (const map of maps) {
    grid.append(h("span", { class: "side" }, `layer ${map.layer + 1}`));
    for (let k = 0; k < most; k++) {
      const index = map.heads.indexOf(k);
      cells.push(index < 0 ? null : h("button", {
        class: "thumb", type: "button", "aria-label": `${kindName(kind)} layer ${map.layer + 1} head ${k + 1}`,
        click: () => { state.map = all.indexOf(map); state.head = index; go("heads"); },
      }, thumbnail(plane(map.weights, index), size, rightToLeft(map.columns))));
      grid.append(cells[cells.length - 1] || h("span", { class: "dim", title: "pruned", style: { textAlign: "center" } }, "·"));
    }
  }
  roving(cells, { across: most });
  return grid;
}
