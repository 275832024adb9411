// @ts-check
// The page with a model: it computes results for typed input, and the views show them.

import { constants } from "../shared/constants.js";
import { h } from "../shared/dom.js";
import { barOf } from "./bar.js";
import { data, setData, storedData } from "./core.js";
import { makeEngine } from "./engine.js";
import { addToAddress, buildPage, tooOld, writeTexts } from "./page.js";
import {
  alternatives,
  answer,
  attributionCost,
  attributionOf,
  BOUNDS,
  firstWishes,
  force,
  hasDraft,
  importanceOf,
  look,
  newSide,
  silenceKey,
  storedImportance,
  STRATEGIES,
} from "./session.js";
import { refresh, shell, state, tellChanged } from "./tabs.js";

// milliseconds: longest search that does not wait for a pause in typing; longest draft
const QUICK = 70,
  DRAFTED = 150;
const PAUSE = 120,
  REST = 500; // milliseconds after the last key: start of the full search; end of typing
const FORGET = 0.7; // a slow search is retried after a while, because the first one is the slowest

// The first side: the first example of the page, or nothing. A stored image is shown until another is drawn.
function firstSide(engine, stored) {
  if (engine.task === "image") return { ...newSide(null), trace: stored };
  const [{ source, features } = { source: "", features: null }] = engine.examples;
  return newSide({ source, features: features || "" });
}

class Live {
  constructor(engine, stored) {
    this.engine = engine;
    this.stored = stored;
    this.wishes = firstWishes(engine);
    this.sides = [firstSide(engine, stored)];
    this.explains = engine.model.output !== null; // the model predicts something, so its log-probability can be explained
    this.cost = { draft: 0, whole: 0 };
    this.bar = barOf(this);
  }

  traces() {
    const found = this.sides.map((side) => side.trace).filter(Boolean);
    return found.length ? found : [this.stored];
  }

  // Compute a request before the next frame. If that is slow, compute a draft, then the rest after a pause without
  // new requests.
  ask() {
    clearTimeout(this.timer);
    this.bar.node.setAttribute("aria-busy", "true");
    // after all pending keys, before the next frame
    const soon = (work) => {
      this.timer = setTimeout(work, 0);
    };
    const later = () => {
      this.timer = setTimeout(() => this.compute(false), PAUSE);
    };
    if (this.cost.whole <= QUICK) soon(() => this.compute(false));
    else if (hasDraft(this.engine, this.wishes) && this.cost.draft <= DRAFTED)
      soon(() => {
        this.compute(true);
        later();
      });
    else {
      this.cost.draft *= FORGET;
      later();
    }
  }

  compute(draft) {
    const began = performance.now();
    for (const side of this.sides) answer(this.engine, side, this.wishes, draft);
    this.lookAtWanted(draft);
    shell.draft = draft;
    this.show();
    shell.draft = false;
    if (!draft) this.bar.node.setAttribute("aria-busy", "false");
    this.cost[draft ? "draft" : "whole"] = performance.now() - began;
  }

  // Select the hypothesis of the address, after the search.
  lookAtWanted(draft) {
    const [side] = this.sides,
      chosen = (this.wanted || 1) - 1;
    if (draft) return;
    this.wanted = null;
    if (chosen > 0 && chosen < side.hypotheses.length) {
      side.chosen = chosen;
      look(this.engine, side);
    }
  }

  inspect(side, chosen) {
    side.chosen = chosen;
    look(this.engine, side);
    this.show();
  }

  show() {
    const [first] = this.traces();
    setData(first);
    writeTexts();
    this.bar.write();
    shell.panel.classList.toggle(
      "stale",
      this.sides.some((side) => side.problem),
    );
    const traces = this.traces(),
      same = this.drawn && traces.length === this.drawn.length && traces.every((trace, i) => trace === this.drawn[i]);
    this.layOutLittle();
    shell.still = true;
    if (same)
      tellChanged(); // the search confirmed its draft
    else refresh();
    shell.still = false;
    if (same) return;
    this.drawn = shell.draft && state.view === "attribution" ? null : traces; // this view does not draw drafts
  }

  // While the user types, lay out only the visible part.
  layOutLittle() {
    shell.panel.classList.add("typing");
    clearTimeout(this.resting);
    this.resting = setTimeout(() => shell.panel.classList.remove("typing"), REST);
  }

  // Replace the first input without typing.
  read(input) {
    this.sides[0] = newSide(input);
    this.bar.rebuild();
    this.ask();
  }

  alternatives(side, at) {
    return alternatives(this.engine, side, this.wishes, at);
  }
  force(side, at, id) {
    force(side, at, id);
    this.ask();
  }
  free(side) {
    side.prefix = [];
    side.begins = false;
    this.ask();
  }

  // Heads

  isSilenced(map, index) {
    return this.engine.silenced.has(silenceKey(map, index));
  }
  silence(map, index) {
    const key = silenceKey(map, index);
    if (!this.engine.silenced.delete(key)) this.engine.silenced.add(key);
    this.compute(false);
  }
  restoreHeads() {
    this.engine.silenced.clear();
    this.compute(false);
  }

  sideOf(trace) {
    return this.sides.find((side) => side.input && !side.problem && side.trace === trace) || null;
  }
  attributionCost(trace) {
    const side = this.sideOf(trace);
    return side ? attributionCost(this.engine, side) : 0;
  }
  attribution(trace) {
    const side = this.sideOf(trace);
    return side ? attributionOf(this.engine, side) : trace.attribution;
  }
  importance(trace) {
    const side = this.sideOf(trace);
    return side ? (this.explains ? importanceOf(this.engine, side) : null) : storedImportance(trace);
  }

  // Show one input, or compare it with a second one that starts as a copy.
  compare(two) {
    const [first] = this.sides;
    this.sides = two ? [first, { ...newSide(first.input && { ...first.input }), trace: first.trace }] : [first];
    this.bar.rebuild();
    this.compute(false);
  }
}

function begin(stored) {
  setData(stored);
  try {
    const engine = makeEngine(JSON.parse(document.getElementById("model").textContent), stored);
    shell.live = new Live(engine, stored);
    shell.traces = () => shell.live.traces();
  } catch (error) {
    buildPage(h("p", { class: "note" }, `This browser cannot run the model in this page: ${error.message}`));
    return;
  }
  addToAddress(askedParts(shell.live));
  buildPage(shell.live.bar.node);
  shell.live.ask();
}

storedData().then(begin, tooOld);

// The inputs, search settings and silenced heads as parts of the address. Values read from an address are validated.

const inBounds = (name, text) => {
  const [low, high] = BOUNDS[name],
    n = Number(text);
  return text !== null && text.trim() !== "" && n >= low && n <= high ? n : null;
};
const integer = (n) => (n === null ? null : Math.round(n));

// Ids of target tokens in the vocabulary.
const tokenIds = (engine, text) =>
  (text || "")
    .split(",")
    .filter((part) => /^\d{1,7}$/.test(part))
    .map(Number)
    .filter((id) => engine.codec && id < engine.codec.target.size)
    .slice(0, 400);

// The parts of an input carry its name, except for the first input: source, features, forced; compare,
// compare-features, compare-forced.
const partOf = (name, part) => (name === "source" ? part : `${name}-${part}`);

function writeSide(side, name, first) {
  if (!side || !side.input || side.input.pixels) return []; // an image is too large for an address
  const changed = (part) => (side.input[part] === (first || { features: "" })[part] ? null : side.input[part]);
  return [
    [name, changed("source")],
    [partOf(name, "features"), changed("features")],
    [partOf(name, "forced"), side.prefix.join(",") || null],
  ];
}

export function askedParts(live) {
  const { engine, wishes } = live,
    first = live.sides[0].input,
    usual = firstWishes(engine);
  const unusual = (name) => (wishes[name] === usual[name] ? null : wishes[name]);
  function write() {
    const [one, two] = live.sides,
      sampling = wishes.strategy === "sample";
    return [
      ...writeSide(one, "source", first),
      ...writeSide(two, "compare", null),
      ["hypothesis", one.chosen ? one.chosen + 1 : null],
      ["search", unusual("strategy")],
      ["beam", wishes.strategy === "beam" ? unusual("beam") : null],
      ["temperature", sampling ? wishes.temperature : null],
      ["seed", sampling ? wishes.seed : null],
      ["length", unusual("length")],
      ["forbidden", wishes.forbid.join(",") || null],
      ["silenced", [...engine.silenced].join(",") || null],
    ];
  }
  // The input with this name, or the default if the address has none.
  function readSide(parts, name, usualInput) {
    const text = parts.get(name),
      features = parts.get(partOf(name, "features"));
    if (text === null && !usualInput) return null;
    const { source, features: usualFeatures } = usualInput || { source: "", features: "" };
    const side = newSide({
      source: (text ?? source).slice(0, constants.max_text),
      features: (features ?? usualFeatures).slice(0, constants.max_text),
    });
    if (engine.decodes) side.prefix = tokenIds(engine, parts.get(partOf(name, "forced")));
    return side;
  }
  function read(parts) {
    if (engine.task !== "image")
      live.sides = [readSide(parts, "source", first), readSide(parts, "compare", null)].filter(Boolean);
    Object.assign(wishes, firstWishes(engine));
    if (STRATEGIES.includes(parts.get("search"))) wishes.strategy = parts.get("search");
    for (const name of ["beam", "seed", "length"])
      wishes[name] = integer(inBounds(name, parts.get(name))) ?? wishes[name];
    wishes.temperature = inBounds("temperature", parts.get("temperature")) ?? wishes.temperature;
    wishes.forbid = engine.decodes ? tokenIds(engine, parts.get("forbidden")) : [];
    const known = new Set(data.maps.flatMap((map) => map.heads.map((_, index) => silenceKey(map, index))));
    engine.silenced.clear();
    for (const key of (parts.get("silenced") || "").split(",")) if (known.has(key)) engine.silenced.add(key);
    live.wanted = integer(inBounds("beam", parts.get("hypothesis"))); // of the first answer
    live.bar.rebuild();
    live.ask();
  }
  return { write, read };
}
