// The page that is the model: what is typed is computed here, and the views show it.

import { addToAddress } from "./address.js";
import { askedParts } from "./asked.js";
import { barOf } from "./bar.js";
import { h, setData, storedData } from "./core.js";
import { makeEngine } from "./engine.js";
import { buildPage, tooOld, writeTexts } from "./page.js";
import { alternatives, answer, attributionCost, attributionOf, firstWishes, force, importanceOf, look, newSide, silenceKey } from "./session.js";
import { refresh, shell, state, tellChanged } from "./tabs.js";

const QUICK = 50, DRAFTED = 150; // milliseconds: a search that takes longer waits until typing pauses; a draft of it may take so long
const PAUSE = 120;
const FORGET = 0.7; // what is too slow is tried again after a while: the first time is the slowest

// Input that the page begins with: that of the stored trace. An image is shown as stored until another is drawn.
function firstInput(engine, stored) {
  if (engine.task === "image") return null;
  const { source, text, features } = stored.texts;
  return { source: source ?? text ?? "", features: features || "" };
}

class Live {
  constructor(engine, stored) {
    this.engine = engine;
    this.stored = stored;
    this.wishes = firstWishes(engine);
    this.sides = [newSide(firstInput(engine, stored))];
    this.explains = ["pairs", "span", "lm", "classify"].includes(engine.task); // has one output whose log-probability can be explained
    this.cost = { draft: 0, whole: 0 };
    this.bar = barOf(this);
  }

  traces() {
    const found = this.sides.map((side) => side.trace).filter(Boolean);
    return found.length ? found : [this.stored];
  }

  // Something was asked: compute in the next frame; if that takes long, only a draft of it, and the whole when nothing more is
  // asked for a moment after the draft was painted.
  ask() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.bar.node.setAttribute("aria-busy", "true");
    const later = () => { this.timer = setTimeout(() => this.compute(false), PAUSE); };
    if (this.cost.whole <= QUICK) this.frame = requestAnimationFrame(() => this.compute(false));
    else if (this.wishes.strategy === "beam" && this.cost.draft <= DRAFTED) this.frame = requestAnimationFrame(() => { this.compute(true); this.frame = requestAnimationFrame(later); });
    else { this.cost.draft *= FORGET; later(); }
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

  // An address may name a hypothesis, which is there once the search is done.
  lookAtWanted(draft) {
    const [side] = this.sides, chosen = (this.wanted || 1) - 1;
    if (draft) return;
    this.wanted = null;
    if (chosen > 0 && chosen < side.hypotheses.length) { side.chosen = chosen; look(this.engine, side); }
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
    shell.panel.classList.toggle("stale", this.sides.some((side) => side.problem));
    const traces = this.traces(), same = this.drawn && traces.length === this.drawn.length && traces.every((trace, i) => trace === this.drawn[i]);
    if (same) { tellChanged(); return; } // a search that found what its draft had found
    shell.still = true;
    refresh();
    shell.still = false;
    this.drawn = shell.draft && state.view === "attribution" ? null : traces; // which draws no drafts
  }

  // Another first input, which was not typed.
  read(input) {
    this.sides[0] = newSide(input);
    this.bar.rebuild();
    this.ask();
  }

  alternatives(side, at) { return alternatives(this.engine, side, this.wishes, at); }
  force(side, at, id) { force(side, at, id); this.ask(); }
  free(side) { side.prefix = []; side.begins = false; this.ask(); }

  // Heads

  isSilenced(map, index) { return this.engine.silenced.has(silenceKey(map, index)); }
  silence(map, index) {
    const key = silenceKey(map, index);
    if (!this.engine.silenced.delete(key)) this.engine.silenced.add(key);
    this.compute(false);
  }
  restoreHeads() { this.engine.silenced.clear(); this.compute(false); }

  sideOf(trace) { return this.sides.find((side) => side.trace === trace) || null; }
  attributionCost(trace) { const side = this.sideOf(trace); return side ? attributionCost(side) : 0; }
  attribution(trace) { const side = this.sideOf(trace); return side ? attributionOf(this.engine, side) : trace.attribution; }
  importance(trace) { const side = this.sideOf(trace); return side && this.explains ? importanceOf(this.engine, side) : null; }

  compare(input) {
    this.sides.length = 1;
    if (input) this.sides.push(newSide(input));
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
    buildPage(h("p", { class: "note" }, `The model in this page cannot be run in this browser: ${error.message}`));
    return;
  }
  addToAddress(askedParts(shell.live));
  buildPage(shell.live.bar.node);
  shell.live.ask();
}

storedData().then(begin, tooOld);
