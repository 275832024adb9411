// @ts-check
// The bar above the views: input fields with their answers, and search settings.

import { h, put, roving } from "../shared/dom.js";
import { featureField } from "../shared/fields.js";
import { plural } from "../shared/text.js";
import { answerNodes, writeAnswer } from "./answers.js";
import { choice } from "./controls.js";
import { padOf, textField, tokenChips } from "./fields.js";
import { BOUNDS, STRATEGIES } from "./session.js";
import { shorter } from "./words.js";

export function barOf(live) {
  const sides = h("div", { class: "sides" }),
    silenced = h("span", { class: "silenced" }),
    tools = h("div", { class: "tools" });
  const wishes = live.engine.decodes ? wishesOf(live) : null;
  let parts = [];
  const node = h("section", { class: "bar-top", "aria-label": "Input and output" }, sides, tools);
  function rebuild() {
    parts = live.sides.map((side, i) => sideOf(live, side, i));
    put(
      sides,
      parts.map((part) => part.node),
    );
    sides.classList.toggle("two", parts.length > 1);
    const compare = h(
      "button",
      { class: "quiet", type: "button", click: () => compareOrNot(live) },
      parts.length > 1 ? "One input" : "Compare two inputs",
    );
    put(tools, wishes && wishes.node, compare, silenced, examplesOf(live));
  }
  function write() {
    for (const part of parts) part.write();
    if (wishes) wishes.write();
    const count = live.engine.silenced.size;
    put(
      silenced,
      count
        ? [
            `${plural(count, "head")} silenced: `,
            h("button", { class: "quiet", type: "button", click: () => live.restoreHeads() }, "restore"),
          ]
        : null,
    );
  }
  rebuild();
  return { node, rebuild, write };
}

function compareOrNot(live) {
  live.compare(live.sides.length === 1);
  /** @type {NodeListOf<HTMLElement>} */
  const fields = document.querySelectorAll(".sides .field");
  fields[live.sides.length > 1 ? (live.engine.features ? 2 : 1) : 0]?.focus();
}

// Example inputs of the page, if there are several.
function examplesOf(live) {
  const { examples } = live.engine;
  if (live.engine.task === "image" || !examples || examples.length < 2) return null;
  const buttons = examples.slice(0, 6).map(({ source, features }) =>
    h(
      "button",
      {
        class: "quiet example",
        type: "button",
        title: source,
        click: () => live.read({ source, features: features || "" }),
      },
      h("bdi", {}, shorter(source, 28)),
    ),
  );
  roving(buttons);
  return h(
    "span",
    { class: "examples", role: "group", "aria-label": "examples" },
    h("span", { class: "dim" }, "examples: "),
    buttons,
  );
}

const inputName = (engine) =>
  engine.decodes && engine.task !== "lm" ? "source" : engine.task === "image" ? "image" : "text";

const outputName = (engine) =>
  engine.decodes
    ? engine.task === "lm"
      ? "continuation"
      : "output"
    : engine.task === "masked"
      ? "predicted"
      : "class";

// One input with its answer.
function sideOf(live, side, number) {
  const { engine } = live,
    id = `input-${number}`;
  const rows = [],
    row = (label, content) => {
      rows.push(h("div", { class: "row" }, label, content));
      return rows[rows.length - 1];
    };
  // tokens chosen for another input do not apply to this one
  const changed = () => {
    if (!side.begins) side.prefix = [];
    live.ask();
  };
  if (engine.task === "image") row(h("span", { class: "name" }, "image"), padOf(live, side)).classList.add("tall");
  else
    row(
      h("label", { class: "name", for: id }, inputName(engine)),
      textField(id, side.input.source, engine.task !== "lm", (text) => {
        side.input = { ...side.input, source: text };
        changed();
      }),
    );
  if (engine.features)
    row(
      h("label", { class: "name", for: id + "-features" }, "features"),
      featureField({ id: id + "-features", class: "field features" }, side.input.features, engine.features, (text) => {
        side.input = { ...side.input, features: text };
        changed();
      }),
    );
  const answer = answerNodes();
  row(h("span", { class: "name" }, outputName(engine)), h("div", {}, Object.values(answer)));
  return { node: h("div", { class: "side" }, rows), write: () => writeAnswer(live, side, answer) };
}

// Search settings: greedy, beam or sampling, a forced beginning, forbidden tokens. Collapsed by default.

const NAMES = { greedy: "greedy", beam: "beam", sample: "sampling" };

function summaryOf({ strategy, beam, temperature, seed, forbid }, prefix) {
  const how = {
    greedy: "Greedy search",
    beam: `Beam of ${beam}`,
    sample: `Sampling, temperature ${temperature}, seed ${seed}`,
  }[strategy];
  return (
    how +
    (prefix.length ? `, ${plural(prefix.length, "token")} forced` : "") +
    (forbid.length ? `, ${plural(forbid.length, "token")} forbidden` : "")
  );
}

export function wishesOf(live) {
  const { engine, wishes } = live;
  const set = (changes) => {
    Object.assign(wishes, changes);
    write();
    live.ask();
  };
  const summary = h("summary"),
    search = h("div", { class: "controls" });
  const side = () => live.sides[0];
  const forced = tokenChips("forced beginning", "type, then Enter", {
    // keep the beginning up to the removed token
    read: () => side().prefix,
    change: (ids, at) => {
      Object.assign(side(), at === undefined ? { prefix: ids, begins: true } : { prefix: side().prefix.slice(0, at) });
      write();
      live.ask();
    },
    encode: (text) => engine.encodeTarget(text),
    name: (id) => engine.targetToken(id),
  });
  const forbidden = tokenChips("forbidden tokens", "type, then Enter", {
    read: () => wishes.forbid,
    change: (ids) => set({ forbid: [...new Set(ids)] }),
    encode: (text) => engine.encodeTarget(text),
    name: (id) => engine.targetToken(id),
  });
  const slider = (name, step) => {
    const [min, max] = BOUNDS[name],
      shown = h("output", {}, String(wishes[name]));
    const field = h("input", { type: "range", min, max, step, "aria-label": name, value: wishes[name] });
    field.addEventListener("input", () => {
      put(shown, String(Number(field.value)));
      wishes[name] = Number(field.value);
      put(summary, summaryOf(wishes, side().prefix));
      live.ask();
    });
    return h("label", { class: "control" }, h("span", {}, name), field, shown);
  };
  const seedField = () => {
    const [min, max] = BOUNDS.seed,
      field = h("input", { type: "number", min, max, step: 1, "aria-label": "seed", value: wishes.seed });
    field.addEventListener("input", () => {
      const seed = Number(field.value);
      if (Number.isInteger(seed) && seed >= min && seed <= max) {
        wishes.seed = seed;
        put(summary, summaryOf(wishes, side().prefix));
        live.ask();
      }
    });
    return h(
      "label",
      { class: "control" },
      h("span", {}, "seed"),
      field,
      h("button", { type: "button", class: "quiet", click: () => set({ seed: (wishes.seed + 1) % max }) }, "another"),
    );
  };
  let drawn = null;
  function write() {
    put(summary, summaryOf(wishes, side().prefix));
    forced.write();
    forbidden.write();
    const now = JSON.stringify([wishes.strategy, wishes.seed]);
    if (drawn === now) return; // do not move a slider while it is dragged
    drawn = now;
    put(
      search,
      choice(
        "search",
        STRATEGIES.map((name) => NAMES[name]),
        STRATEGIES.indexOf(wishes.strategy),
        (i) => set({ strategy: STRATEGIES[i] }),
      ),
      wishes.strategy === "beam" ? slider("beam", 1) : null,
      wishes.strategy === "sample" ? [slider("temperature", 0.05), seedField()] : null,
    );
  }
  write();
  return {
    node: h(
      "details",
      { class: "wishes" },
      summary,
      search,
      h("div", { class: "controls" }, forced.node, forbidden.node),
    ),
    write,
  };
}
