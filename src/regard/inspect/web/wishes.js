// How the output is searched: greedy, beam or sampling, a forced beginning, forbidden tokens. Small until it is opened.

import { h, put } from "./core.js";
import { choice } from "./controls.js";
import { tokenChips } from "./fields.js";
import { BOUNDS, STRATEGIES } from "./session.js";
import { plural } from "./text.js";

const NAMES = { greedy: "greedy", beam: "beam", sample: "sampling" };

function summaryOf({ strategy, beam, temperature, seed, forbid }, prefix) {
  const how = { greedy: "Greedy search", beam: `Beam of ${beam}`, sample: `Sampling, temperature ${temperature}, seed ${seed}` }[strategy];
  return how + (prefix.length ? `, ${plural(prefix.length, "token")} forced` : "") + (forbid.length ? `, ${plural(forbid.length, "token")} forbidden` : "");
}

export function wishesOf(live) {
  const { engine, wishes } = live;
  const set = (changes) => { Object.assign(wishes, changes); write(); live.ask(); };
  const summary = h("summary"), search = h("div", { class: "controls" });
  const side = () => live.sides[0];
  const forced = tokenChips("forced beginning", "type, then Enter", { // a token less is the beginning up to there
    read: () => side().prefix, change: (ids, at) => { Object.assign(side(), at === undefined ? { prefix: ids, begins: true } : { prefix: side().prefix.slice(0, at) }); write(); live.ask(); },
    encode: (text) => engine.encodeTarget(text), name: (id) => engine.targetToken(id),
  });
  const forbidden = tokenChips("forbidden tokens", "type, then Enter", { read: () => wishes.forbid, change: (ids) => set({ forbid: [...new Set(ids)] }), encode: (text) => engine.encodeTarget(text), name: (id) => engine.targetToken(id) });
  const slider = (name, step) => {
    const [min, max] = BOUNDS[name], shown = h("output", {}, String(wishes[name]));
    const field = h("input", { type: "range", min, max, step, "aria-label": name, value: wishes[name] });
    field.addEventListener("input", () => { put(shown, String(Number(field.value))); wishes[name] = Number(field.value); put(summary, summaryOf(wishes, side().prefix)); live.ask(); });
    return h("label", { class: "control" }, h("span", {}, name), field, shown);
  };
  const seedField = () => {
    const [min, max] = BOUNDS.seed, field = h("input", { type: "number", min, max, step: 1, "aria-label": "seed", value: wishes.seed });
    field.addEventListener("input", () => { const seed = Number(field.value); if (Number.isInteger(seed) && seed >= min && seed <= max) { wishes.seed = seed; put(summary, summaryOf(wishes, side().prefix)); live.ask(); } });
    return h("label", { class: "control" }, h("span", {}, "seed"), field, h("button", { type: "button", class: "quiet", click: () => set({ seed: (wishes.seed + 1) % max }) }, "another"));
  };
  let drawn = null;
  function write() {
    put(summary, summaryOf(wishes, side().prefix));
    forced.write();
    forbidden.write();
    const now = JSON.stringify([wishes.strategy, wishes.seed]);
    if (drawn === now) return; // a slider that is being dragged stays
    drawn = now;
    put(search, choice("search", STRATEGIES.map((name) => NAMES[name]), STRATEGIES.indexOf(wishes.strategy), (i) => set({ strategy: STRATEGIES[i] })),
      wishes.strategy === "beam" ? slider("beam", 1) : null, wishes.strategy === "sample" ? [slider("temperature", 0.05), seedField()] : null);
  }
  write();
  return { node: h("details", { class: "wishes" }, summary, search, h("div", { class: "controls" }, forced.node, forbidden.node)), write };
}
