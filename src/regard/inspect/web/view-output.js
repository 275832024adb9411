// Output: every step with its probability and candidates; and what each layer would predict (the logit lens).

import { colour, css, inkOn } from "./colours.js";
import { roving } from "./controls.js";
import { data, h, put } from "./core.js";
import { go, refresh, shell, state } from "./tabs.js";
import { percent, rightToLeft, shorter, show, visible, word } from "./text.js";

export const outputView = { name: "output", title: "Output", when: () => data.steps.length > 0, fill: fillOutput };

function fillOutput(panel) {
  const chosen = Math.min(state.step, data.steps.length - 1);
  const most = Math.max(...data.steps.map((s) => s.entropy), 1);
  const lines = data.steps.map((step, t) => {
    const choose = () => { state.step = t; refresh(); };
    return h("tr", { class: t === chosen ? "on" : "", "aria-expanded": String(t === chosen), click: choose,
      keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } } },
      h("td", {}, String(t + 1)), h("td", {}, word(step.token)),
      h("td", {}, h("span", { class: "bar", style: { width: 70 * step.probability + "px" } }), percent(step.probability)),
      h("td", {}, h("span", { class: "bar other", style: { width: (46 * step.entropy) / most + "px" } }), step.entropy.toFixed(2)),
      h("td", {}, step.candidates.slice(0, 4).map(([token, p]) => h("span", { class: "chip" + (token === step.token ? " chosen" : "") }, word(token), h("small", {}, percent(p))))));
  });
  // The details of the chosen step stand right below it, so that they are on the screen wherever it is.
  const step = data.steps[chosen];
  const details = h("tr", { class: "details" }, h("td"), h("td", { colspan: 4 },
    h("h2", {}, data.unit === "class" ? "Class: " : `Token ${chosen + 1}: `, word(step.token)), candidates(step),
    speaking() >= 0 ? h("button", { class: "quiet", type: "button", click: () => { state.walk = speaking(); state.walkLayer = data.walks[state.walk].layers.length - 1; state.walkRow = chosen; go("walk"); } }, "Walk through this step") : null));
  roving(lines, { start: chosen });
  put(panel, h("section", { class: "card scroll" }, h("table", { class: "steps" },
    h("thead", {}, h("tr", {}, ["", data.unit, "probability", "entropy, bits", "candidates"].map((t) => h("th", { scope: "col" }, t)))),
    h("tbody", {}, lines.flatMap((line, t) => (t === chosen ? [line, details] : [line]))))));
  return () => { if (!shell.still) for (const line of [details, lines[chosen]]) line.scrollIntoView({ block: "nearest" }); };
}

export const lensView = { name: "lens", title: "Logit lens", when: () => data.lens.length > 0, fill: fillLens };

function fillLens(panel) {
  const read = h("p", { class: "read", "aria-live": "polite" }, "Point at a cell to see the runners-up.");
  const tell = (lens, t) => put(read, `${lens.label}, ${data.unit} ${t + 1}:  `, ...lens.steps[t].map(([token, p]) => h("span", { class: "chip" }, h("b", {}, word(token)), h("small", {}, percent(p)))));
  const cells = [];
  const line = (lens) => h("tr", {}, h("th", { scope: "row" }, lens.label), lens.steps.map((step, t) => {
    const [token, p] = step[0], rgb = colour(0.75 * p);
    cells.push(h("span", { class: "cell" + (token === data.steps[t].token ? " chosen" : ""), style: { backgroundColor: css(rgb), color: inkOn(rgb) },
      pointerenter: () => tell(lens, t), focus: () => tell(lens, t) }, h("bdi", {}, shorter(visible(token), 12)), h("small", { dir: "ltr" }, percent(p))));
    return h("td", {}, cells[cells.length - 1]);
  }));
  const rows = data.lens.map(line), mirrored = rightToLeft("output");
  roving(cells, { across: data.steps.length, mirrored });
  const last = data.lens[data.lens.length - 1].steps, other = data.steps.filter((step, t) => last[t][0][0] !== step.token).length;
  const differs = data.unit === "class" ? "The class shown is another one." : `At ${other} of ${data.steps.length} tokens the output has another one, which the search or a given text preferred.`;
  put(panel, h("p", { class: "dim" }, `What each layer would predict if the LM head read its vector. The last row is what the whole model finds most probable. ${other ? differs + " " : ""}The stronger the colour the surer; bold agrees with the output.`),
    h("section", { class: "card" }, h("div", { class: "scroll" }, h("table", { class: "lens", dir: mirrored ? "rtl" : null },
      h("thead", {}, h("tr", {}, h("th"), data.steps.map((step) => h("th", { scope: "col" }, word(step.token))))),
      h("tbody", {}, rows))), read));
}

// Predictions: the candidates of one step of the output.

export function candidates(step) {
  const top = Math.max(...step.candidates.map((c) => c[1]), 1e-9);
  return h("table", {}, h("thead", {}, h("tr", {}, ["", "logit", "probability"].map((t) => h("th", { scope: "col" }, t)))),
    h("tbody", {}, step.candidates.map(([token, p, logit]) => h("tr", { class: token === step.token ? "chosen" : null },
      h("td", {}, word(token)), h("td", { class: "dim" }, show(logit)), h("td", {}, h("span", { class: "bar", style: { width: (150 * p) / top + "px" } }), percent(p))))));
}

// The walk that ends in a prediction.
export const speaking = () => data.walks.findIndex((w) => w.layers[w.layers.length - 1].some((c) => c.show === "prediction"));
