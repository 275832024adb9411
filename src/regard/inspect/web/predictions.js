// Predictions: the candidates of one step of the output.

import { data, h } from "./core.js";
import { percent, show, word } from "./text.js";

export function candidates(step) {
  const top = Math.max(...step.candidates.map((c) => c[1]), 1e-9);
  return h("table", {}, h("thead", {}, h("tr", {}, ["", "logit", "probability"].map((t) => h("th", { scope: "col" }, t)))),
    h("tbody", {}, step.candidates.map(([token, p, logit]) => h("tr", { class: token === step.token ? "chosen" : null },
      h("td", {}, word(token)), h("td", { class: "dim" }, show(logit)), h("td", {}, h("span", { class: "bar", style: { width: (150 * p) / top + "px" } }), percent(p))))));
}

// The walk that ends in a prediction.
export const speaking = () => data.walks.findIndex((w) => w.layers[w.layers.length - 1].some((c) => c.show === "prediction"));
