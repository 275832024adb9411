// Attribution (gradient x input) beside attention.

import { data, h, plane, put, values } from "./core.js";
import { legend, matrix } from "./matrix.js";
import { saveButtons } from "./save.js";
import { refresh, shell, state } from "./tabs.js";
import { rightToLeft, show, tokensOf, word } from "./text.js";

const CAVEAT = "Attention is where a head read from, not why the model decided. Attribution is how the log-probability of an output token changes as the embedding of an input token, or of a patch, grows (gradient × input). The two need not agree, and neither is an explanation by itself.";

export const attributionView = {
  name: "attribution", title: "Attribution", when: () => Boolean(data.attribution) || (shell.live !== null && shell.live.explains), fill: fillAttribution,
};

// The attention to compare with: the alignment, or the mean of the heads of the last layer; of a classifier, its first row.
function attentionBeside(count) {
  if (data.alignment.length) { const entry = data.alignment[Math.min(state.alignment, data.alignment.length - 1)]; return { name: entry.name, m: plane(entry.weights, 0) }; }
  const last = data.maps[data.maps.length - 1];
  if (!last) return null;
  const m = plane(last.weights, -1);
  return { name: `layer ${last.layer + 1}, mean of heads${m.T > count ? ", first token" : ""}`, m };
}

const PATIENCE = 2000; // milliseconds that a page may be busy without having been asked
let agreed = null; // the trace whose attribution was asked for

function fillAttribution(panel, room) {
  if (shell.draft && panel.firstChild) return; // too much to compute for a draft
  const trace = data, cost = shell.live ? shell.live.attributionCost(data) : 0;
  if (cost > PATIENCE && agreed !== trace) {
    put(panel, h("p", { class: "dim" }, CAVEAT), h("button", { class: "quiet", type: "button", click: () => { agreed = trace; refresh(); } }, `Compute it: about ${Math.round(cost / 1000)} seconds`));
    return;
  }
  const found = shell.live ? shell.live.attribution(data) : data.attribution;
  const caveat = h("p", { class: "dim" }, CAVEAT);
  if (!found) { put(panel, caveat, h("p", { class: "note" }, "There is no attribution of this input.")); return; }
  const [, S] = found.values.shape, all = values(found.values), scale = found.values.scale;
  const { rows, columns, inputs, place } = data.image ? patchAxes(data.image) : tokenAxes(found);
  const at = (t, s) => { const [row, column] = place(t, s); return all[row * S + column] * scale; };
  let max = 1e-9;
  for (const v of all) max = Math.max(max, Math.abs(v) * scale);
  const beside = room > 900, each = beside ? (room - 18) / 2 - 44 : room - 44;
  const mirrored = !data.image && rightToLeft(found.columns), attention = attentionBeside(found.values.shape[0]);
  const output = (t) => h("b", {}, word(data.image ? data.steps[0].token : rows[t])), input = (t, s) => h("b", {}, inputs(t, s));
  const moved = matrix({
    rows, columns, at, max, signed: true, numbers: true, room: each, mirrored, label: "Attribution of the output, down, to the input, across",
    tell: (t, s) => (s === null ? [output(t)] : [input(t, s), at(t, s) < 0 ? "  speaks against  " : "  speaks for  ", output(t), `:  ${show(at(t, s))}`]),
    onHover: (t, s) => { if (read) read.mark(t, s); },
  });
  const seen = (t, s) => attention.m.at(...place(t, s));
  const read = attention && attention.m.T >= found.values.shape[0] && attention.m.S >= S ? matrix({
    rows, columns, at: seen, max: attention.m.max, room: each, mirrored, label: "Attention of the output, down, over the input, across",
    tell: (t, s) => (s === null ? [output(t)] : [data.image ? h("b", {}, "the class token") : output(t), "  attends to  ", input(t, s), `  with  ${show(seen(t, s), 3)}`]),
    onHover: (t, s) => moved.mark(t, s),
  }) : null;
  put(panel, caveat, h("div", { class: "beside" },
    h("section", { class: "card" }, h("h2", {}, "Attribution: gradient × input, natural-log units"), legend(max, true), moved.node, saveButtons(moved, "attribution")),
    read ? h("section", { class: "card" }, h("h2", {}, `Attention: ${attention.name}`), legend(attention.m.max), read.node, saveButtons(read, "attention")) : null));
}

// Rows and columns of the matrix; inputs(t, s): the name of an input; place(t, s): its row and column among the values.
function tokenAxes(found) {
  const [T, S] = found.values.shape, columns = tokensOf(found.columns).slice(0, S);
  const rows = (tokensOf("output").length ? tokensOf("output") : data.steps.map((step) => step.token)).slice(0, T);
  return { rows, columns, inputs: (t, s) => word(columns[s]), place: (t, s) => [t, s] };
}

// Of an image, patches as they lie in it, without the class token.
function patchAxes({ width, height, size }) {
  const numbers = (count) => Array.from({ length: count }, (_, i) => String(i + 1)), across = width / size;
  return { rows: numbers(height / size), columns: numbers(across), inputs: (t, s) => `patch ${t + 1}·${s + 1}`, place: (t, s) => [0, 1 + t * across + s] };
}
