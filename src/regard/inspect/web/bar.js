// The bar above the views: input fields with their answers, and what was wished for.

import { answerNodes, writeAnswer } from "./answers.js";
import { h, put } from "./core.js";
import { roving } from "./controls.js";
import { featureField, textField } from "./fields.js";
import { padOf } from "./pad.js";
import { searches } from "./session.js";
import { plural, shorter } from "./text.js";
import { wishesOf } from "./wishes.js";

export function barOf(live) {
  const sides = h("div", { class: "sides" }), silenced = h("span", { class: "silenced" }), tools = h("div", { class: "tools" });
  const wishes = searches(live.engine) ? wishesOf(live) : null;
  let parts = [];
  const node = h("section", { class: "bar-top", "aria-label": "Input and output" }, sides, tools);
  function rebuild() {
    parts = live.sides.map((side, i) => sideOf(live, side, i));
    put(sides, parts.map((part) => part.node));
    sides.classList.toggle("two", parts.length > 1);
    const compare = live.engine.task === "image" ? null : h("button", { class: "quiet", type: "button", click: () => compareOrNot(live) }, parts.length > 1 ? "One input" : "Compare two inputs");
    put(tools, wishes && wishes.node, compare, silenced, examplesOf(live));
  }
  function write() {
    for (const part of parts) part.write();
    if (wishes) wishes.write();
    const count = live.engine.silenced.size;
    put(silenced, count ? [`${plural(count, "head")} silenced: `, h("button", { class: "quiet", type: "button", click: () => live.restoreHeads() }, "restore")] : null);
  }
  rebuild();
  return { node, rebuild, write };
}

function compareOrNot(live) {
  const { source, features } = live.sides[0].input;
  live.compare(live.sides.length > 1 ? null : { source, features });
  const field = document.querySelectorAll(".sides .field")[live.sides.length > 1 ? (live.engine.features ? 2 : 1) : 0];
  if (field) field.focus();
}

// Inputs that the page offers, if it has several.
function examplesOf(live) {
  const { examples } = live.engine;
  if (live.engine.task === "image" || !examples || examples.length < 2) return null;
  const buttons = examples.slice(0, 6).map(({ source, features }) => h("button", { class: "quiet example", type: "button", title: source, click: () => live.read({ source, features: features || "" }) }, h("bdi", {}, shorter(source, 28))));
  roving(buttons);
  return h("span", { class: "examples", role: "group", "aria-label": "examples" }, h("span", { class: "dim" }, "or: "), buttons);
}

const inputName = (engine) => (searches(engine) && engine.task !== "lm" ? "source" : engine.task === "image" ? "image" : "text");

const outputName = (engine) => (searches(engine) ? (engine.task === "lm" ? "continuation" : "output") : engine.task === "masked" ? "predicted" : "class");

// One input with its answer.
function sideOf(live, side, number) {
  const { engine } = live, id = `input-${number}`;
  const rows = [], row = (label, content) => { rows.push(h("div", { class: "row" }, label, content)); return rows[rows.length - 1]; };
  const changed = () => { if (!side.begins) side.prefix = []; live.ask(); }; // tokens chosen for another input mean nothing for this one
  if (engine.task === "image") row(h("span", { class: "name" }, "image"), padOf(live, side)).classList.add("tall");
  else row(h("label", { class: "name", for: id }, inputName(engine)), textField(id, side.input.source, engine.task !== "lm", (text) => { side.input = { ...side.input, source: text }; changed(); }));
  if (engine.features) row(h("label", { class: "name", for: id + "-features" }, "features"), featureField(id + "-features", side.input.features, engine.features, (text) => { side.input = { ...side.input, features: text }; changed(); }));
  const answer = answerNodes();
  row(h("span", { class: "name" }, outputName(engine)), h("div", {}, Object.values(answer)));
  return { node: h("div", { class: "side" }, rows), write: () => writeAnswer(live, side, answer) };
}
