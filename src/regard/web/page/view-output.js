// @ts-check
// Predictions: every output step, every layer (logit lens), and attribution to the inputs.

import { h, put, roving } from "../shared/dom.js";
import { percent, visible, word } from "../shared/text.js";
import { data, plane, values } from "./core.js";
import { legend, matrix } from "./figures.js";
import { colour, css, inkOn } from "./surface.js";
import { go, refresh, saveButtons, shell, state } from "./tabs.js";
import { rightToLeft, shorter, show, tokensOf } from "./words.js";

// The output view: every step with probability and candidates; and the logit lens.

export const outputView = { name: "output", title: "Output", when: () => data.steps.length > 0, fill: fillOutput };

function fillOutput(panel) {
  const chosen = Math.min(state.step, data.steps.length - 1);
  const most = Math.max(...data.steps.map((s) => s.entropy), 1);
  const lines = data.steps.map((step, t) => {
    const choose = () => {
      state.step = t;
      refresh();
    };
    return h(
      "tr",
      {
        class: t === chosen ? "on" : "",
        "aria-expanded": String(t === chosen),
        click: choose,
        keydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            choose();
          }
        },
      },
      h("td", {}, String(t + 1)),
      h("td", {}, word(step.token)),
      h(
        "td",
        {},
        h("span", { class: "bar", style: { width: 70 * step.probability + "px" } }),
        percent(step.probability),
      ),
      h(
        "td",
        {},
        h("span", { class: "bar other", style: { width: (46 * step.entropy) / most + "px" } }),
        step.entropy.toFixed(2),
      ),
      h(
        "td",
        {},
        step.candidates
          .slice(0, 4)
          .map(([token, p]) =>
            h(
              "span",
              { class: "chip" + (token === step.token ? " chosen" : "") },
              word(token),
              h("small", {}, percent(p)),
            ),
          ),
      ),
    );
  });
  // The details of the chosen step follow directly below it, so they are always visible.
  const step = data.steps[chosen];
  const details = h(
    "tr",
    { class: "details" },
    h("td"),
    h(
      "td",
      { colspan: 4 },
      h("h2", {}, data.unit === "class" ? "Class: " : `Token ${chosen + 1}: `, word(step.token)),
      candidates(step),
      speaking() >= 0
        ? h(
            "button",
            {
              class: "quiet",
              type: "button",
              click: () => {
                state.walk = speaking();
                state.walkLayer = data.walks[state.walk].layers.length - 1;
                state.walkRow = chosen;
                go("walk");
              },
            },
            "Walk through this step",
          )
        : null,
    ),
  );
  roving(lines, { start: chosen });
  put(
    panel,
    h(
      "p",
      { class: "dim" },
      data.unit === "class"
        ? "The predicted class and the other classes with their probabilities."
        : "Each token of the output with its probability and the tokens considered instead; choose a row for details.",
    ),
    h(
      "section",
      { class: "card scroll" },
      h(
        "table",
        { class: "steps" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["", data.unit, "probability", "entropy, bits", "candidates"].map((t) => h("th", { scope: "col" }, t)),
          ),
        ),
        h(
          "tbody",
          {},
          lines.flatMap((line, t) => (t === chosen ? [line, details] : [line])),
        ),
      ),
    ),
  );
  return () => {
    if (!shell.still) for (const line of [details, lines[chosen]]) line.scrollIntoView({ block: "nearest" });
  };
}

export const lensView = { name: "lens", title: "Logit lens", when: () => data.lens.length > 0, fill: fillLens };

function fillLens(panel) {
  const read = h("p", { class: "read", "aria-live": "polite" }, "Hover over a cell to see the next candidates.");
  const tell = (lens, t) =>
    put(
      read,
      `${lens.label}, ${data.unit} ${t + 1}:  `,
      ...lens.steps[t].map(([token, p]) =>
        h("span", { class: "chip" }, h("b", {}, word(token)), h("small", {}, percent(p))),
      ),
    );
  const cells = [];
  const line = (lens) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, lens.label),
      lens.steps.map((step, t) => {
        const [token, p] = step[0],
          rgb = colour(0.75 * p);
        cells.push(
          h(
            "span",
            {
              class: "cell" + (token === data.steps[t].token ? " chosen" : ""),
              style: { backgroundColor: css(rgb), color: inkOn(rgb) },
              pointerenter: () => tell(lens, t),
              focus: () => tell(lens, t),
            },
            h("bdi", {}, shorter(visible(token), 12)),
            h("small", { dir: "ltr" }, percent(p)),
          ),
        );
        return h("td", {}, cells[cells.length - 1]);
      }),
    );
  const rows = data.lens.map(line),
    mirrored = rightToLeft("output");
  roving(cells, { across: data.steps.length, mirrored });
  const last = data.lens[data.lens.length - 1].steps,
    other = data.steps.filter((step, t) => last[t][0][0] !== step.token).length;
  const differs =
    data.unit === "class"
      ? "The shown class is a different one."
      : `At ${other} of ${data.steps.length} tokens the output has another one, which the search or a given text` +
        " preferred.";
  put(
    panel,
    h(
      "p",
      { class: "dim" },
      "What each layer would predict if the LM head read its vector. The last row is what the whole model finds most",
      ` probable. ${other ? differs + " " : ""}Stronger colours mean higher probability; bold tokens agree with the output.`,
    ),
    h(
      "section",
      { class: "card" },
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "lens", dir: mirrored ? "rtl" : null },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th"),
              data.steps.map((step) => h("th", { scope: "col" }, word(step.token))),
            ),
          ),
          h("tbody", {}, rows),
        ),
      ),
      read,
    ),
  );
}

// Predictions: the candidates of one step of the output.

export function candidates(step) {
  const top = Math.max(...step.candidates.map((c) => c[1]), 1e-9);
  return h(
    "table",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        ["", "logit", "probability"].map((t) => h("th", { scope: "col" }, t)),
      ),
    ),
    h(
      "tbody",
      {},
      step.candidates.map(([token, p, logit]) =>
        h(
          "tr",
          { class: token === step.token ? "chosen" : null },
          h("td", {}, word(token)),
          h("td", { class: "dim" }, show(logit)),
          h("td", {}, h("span", { class: "bar", style: { width: (150 * p) / top + "px" } }), percent(p)),
        ),
      ),
    ),
  );
}

// The walk that ends in a prediction.
export const speaking = () =>
  data.walks.findIndex((w) => w.layers[w.layers.length - 1].some((c) => c.show === "prediction"));

// Attribution (gradient x input) next to attention.

const CAVEAT =
  "Attention shows where a head reads from, not why the model decides. Attribution shows how the log-probability of an" +
  " output token changes with the length of an input embedding (gradient × input). The two need" +
  " not agree, and neither is an explanation by itself.";

export const attributionView = {
  name: "attribution",
  title: "Attribution",
  when: () => Boolean(data.attribution) || (shell.live !== null && shell.live.explains),
  fill: fillAttribution,
};

// The attention for the comparison: the alignment, or the mean over heads of the last layer; of a classifier, its
// first row.
function attentionBeside(count) {
  if (data.alignment.length) {
    const entry = data.alignment[Math.min(state.alignment, data.alignment.length - 1)];
    return { name: entry.name, m: plane(entry.weights, 0) };
  }
  const last = data.maps[data.maps.length - 1];
  if (!last) return null;
  const m = plane(last.weights, -1);
  return { name: `layer ${last.layer + 1}, mean of heads${m.T > count ? ", first token" : ""}`, m };
}

const PATIENCE = 2000; // milliseconds that a page may compute without a request
let agreed = null; // the trace with a requested attribution

function fillAttribution(panel, room) {
  if (shell.draft && panel.firstChild) return; // too expensive for a draft
  const trace = data,
    cost = shell.live ? shell.live.attributionCost(data) : 0;
  if (cost > PATIENCE && agreed !== trace) {
    put(
      panel,
      h("p", { class: "dim" }, CAVEAT),
      h(
        "button",
        {
          class: "quiet",
          type: "button",
          click: () => {
            agreed = trace;
            refresh();
          },
        },
        `Compute it: about ${Math.round(cost / 1000)} seconds`,
      ),
    );
    return;
  }
  const found = shell.live ? shell.live.attribution(data) : data.attribution;
  const caveat = h("p", { class: "dim" }, CAVEAT);
  if (!found) {
    put(panel, caveat, h("p", { class: "note" }, "There is no attribution for this input."));
    return;
  }
  const [, S] = found.values.shape,
    all = values(found.values),
    scale = found.values.scale;
  const { rows, columns, inputs, place } = data.image ? patchAxes(data.image) : tokenAxes(found);
  const at = (t, s) => {
    const [row, column] = place(t, s);
    return all[row * S + column] * scale;
  };
  let max = 1e-9;
  for (const v of all) max = Math.max(max, Math.abs(v) * scale);
  const beside = room > 900,
    each = beside ? (room - 18) / 2 - 44 : room - 44;
  const mirrored = !data.image && rightToLeft(found.columns),
    attention = attentionBeside(found.values.shape[0]);
  const output = (t) => h("b", {}, word(data.image ? data.steps[0].token : rows[t])),
    input = (t, s) => h("b", {}, inputs(t, s));
  const moved = matrix({
    rows,
    columns,
    at,
    max,
    signed: true,
    numbers: true,
    room: each,
    mirrored,
    label: "Attribution of the output, down, to the input, across",
    tell: (t, s) =>
      s === null
        ? [output(t)]
        : [input(t, s), at(t, s) < 0 ? "  speaks against  " : "  speaks for  ", output(t), `:  ${show(at(t, s))}`],
    onHover: (t, s) => {
      if (read) read.mark(t, s);
    },
  });
  const seen = (t, s) => {
    const [row, column] = place(t, s);
    return attention.m.at(row, column);
  };
  const read =
    attention && attention.m.T >= found.values.shape[0] && attention.m.S >= S
      ? matrix({
          rows,
          columns,
          at: seen,
          max: attention.m.max,
          room: each,
          mirrored,
          label: "Attention of the output, down, over the input, across",
          tell: (t, s) =>
            s === null
              ? [output(t)]
              : [
                  data.image ? h("b", {}, "the class token") : output(t),
                  "  attends to  ",
                  input(t, s),
                  `  with  ${show(seen(t, s), 3)}`,
                ],
          onHover: (t, s) => moved.mark(t, s),
        })
      : null;
  put(
    panel,
    caveat,
    h(
      "div",
      { class: "beside" },
      h(
        "section",
        { class: "card" },
        h("h2", {}, "Attribution: gradient × input, natural-log units"),
        legend(max, true),
        moved.node,
        saveButtons(moved, "attribution"),
      ),
      read
        ? h(
            "section",
            { class: "card" },
            h("h2", {}, `Attention: ${attention.name}`),
            legend(attention.m.max),
            read.node,
            saveButtons(read, "attention"),
          )
        : null,
    ),
  );
}

// Rows and columns of the matrix; inputs(t, s): the name of an input; place(t, s): its row and column in the values.
function tokenAxes(found) {
  const [T, S] = found.values.shape,
    columns = tokensOf(found.columns).slice(0, S);
  const rows = (tokensOf("output").length ? tokensOf("output") : data.steps.map((step) => step.token)).slice(0, T);
  return { rows, columns, inputs: (t, s) => word(columns[s]), place: (t, s) => [t, s] };
}

// For an image, patches in their layout, without the class token.
function patchAxes({ width, height, size }) {
  const numbers = (count) => Array.from({ length: count }, (_, i) => String(i + 1)),
    across = width / size;
  return {
    rows: numbers(height / size),
    columns: numbers(across),
    inputs: (t, s) => `patch ${t + 1}·${s + 1}`,
    place: (t, s) => [0, 1 + t * across + s],
  };
}
