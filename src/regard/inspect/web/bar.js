// The bar above the views: input fields, output, hypotheses, and what was wished for.

import { h, put } from "./core.js";
import { roving } from "./controls.js";
import { featureField, textField } from "./fields.js";
import { padOf } from "./pad.js";
import { MORE, searches } from "./session.js";
import { percent, plural, shorter, show, SPECIAL, visible, word } from "./text.js";
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

// One input with its answer.
function sideOf(live, side, number) {
  const { engine } = live, id = `input-${number}`;
  const rows = [], row = (label, content) => { rows.push(h("div", { class: "row" }, label, content)); return rows[rows.length - 1]; };
  const changed = () => { side.prefix = []; live.ask(); };
  if (engine.task === "image") row(h("span", { class: "name" }, "image"), padOf(live, side)).classList.add("tall");
  else row(h("label", { class: "name", for: id }, inputName(engine)), textField(id, side.input.source, engine.task !== "lm", (text) => { side.input = { ...side.input, source: text }; changed(); }));
  if (engine.features) row(h("label", { class: "name", for: id + "-features" }, "features"), featureField(id + "-features", side.input.features, engine.features, (text) => { side.input = { ...side.input, features: text }; changed(); }));
  const output = h("div", { class: "output", dir: "auto" }), choices = h("div", { class: "alternatives" }), before = h("div", { class: "before" }), nbest = h("div", { class: "nbest", role: "group", "aria-label": "hypotheses", title: "Ranked by the log-probability per token" }), status = h("p", { class: "status", role: "status" });
  const outputName = searches(engine) ? (engine.task === "lm" ? "continuation" : "output") : engine.task === "masked" ? "predicted" : "class";
  row(h("span", { class: "name" }, outputName), h("div", {}, output, choices, before, nbest, status));
  function write() {
    put(choices);
    put(status, ...statusOf(side));
    put(before);
    if (!side.trace) return;
    if (searches(engine)) writeHypothesis(live, side, output, choices, nbest);
    else if (!side.trace.steps.length) put(output, h("span", { class: "dim" }, "This model gives vectors, and predicts nothing."));
    else if (engine.task === "masked") writeMasked(output, side.trace.steps);
    else writeClasses(output, side.trace.steps[0], side.before && side.before.steps[0]);
    if (side.before && searches(engine)) put(before, "before: ", h("bdi", {}, side.before.text), h("small", {}, ` log-probability ${show(side.before.score)}`));
  }
  return { node: h("div", { class: "side" }, rows), write };
}

function statusOf(side) {
  const out = [];
  if (side.problem) out.push(side.problem);
  const unknown = [...new Set(side.unknown)];
  if (unknown.length) out.push(`${out.length ? " " : ""}Not in the vocabulary: `, ...unknown.slice(0, 12).flatMap((token, i) => [i ? ", " : "", h("b", {}, word(token))]), unknown.length > 12 ? ` and ${unknown.length - 12} more` : "", ".");
  return out;
}

// The output token by token; each leads to the alternatives in its place.
function writeHypothesis(live, side, output, choices, nbest) {
  const chosen = side.hypotheses[side.chosen];
  if (!chosen) { put(output); put(nbest); return; }
  const tokens = chosen.tokens.map((token, t) => tokenButton(token, chosen.scores[t], t < side.prefix.length, () => openAlternatives(live, side, t, choices, tokens)));
  roving(tokens, {});
  put(output, ...tokens, h("small", { class: "score", dir: "ltr" }, `log-probability ${show(chosen.score)}`),
    live.engine.task === "lm" && chosen.limited ? h("button", { class: "quiet", type: "button", click: () => { live.wishes.length += MORE; live.ask(); } }, "more") : null);
  const others = side.hypotheses.length > 1 ? side.hypotheses.map((each, i) => h("button", { type: "button", class: "hypothesis", "aria-pressed": String(i === side.chosen), click: () => live.inspect(side, i) },
    h("bdi", {}, each.text.trim() ? each.text : visible(each.text)), h("small", {}, percent(Math.exp(each.score))))) : [];
  roving(others, { start: side.chosen });
  put(nbest, ...others);
}

// The surer, the fainter the line below it.
function tokenButton(token, score, forced, open) {
  const p = Math.exp(score), special = SPECIAL.has(token);
  const plain = /^[ \p{L}\p{M}\p{N}\p{P}\p{S}]*[\p{L}\p{M}\p{N}\p{P}\p{S}]$/u.test(token); // text as it is read, so that letters join
  const text = token === "<eos>" ? "■" : plain || token === "\n" ? token : visible(token);
  return h("span", {
    role: "button", class: "token" + (special ? " special" : "") + (forced ? " forced" : ""), title: `${percent(p)}${forced ? ", forced" : ""}`, "aria-label": `${visible(token)}, ${percent(p)}${forced ? ", forced" : ""}. Alternatives`,
    style: { borderBottomColor: `rgba(208,138,60,${(1 - p).toFixed(3)})` }, click: open,
    keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } },
  }, text);
}

function openAlternatives(live, side, at, choices, tokens) {
  const chosen = side.hypotheses[side.chosen], found = live.alternatives(side, at), top = Math.max(...found.map((each) => each.probability), 1e-9);
  const close = () => { put(choices); tokens[at].focus(); };
  const buttons = found.map(({ id, token, probability }) => h("button", { type: "button", class: "alternative", "aria-pressed": String(id === chosen.ids[at]),
    click: () => live.force(side, at, id), keydown: (event) => { if (event.key === "Escape") close(); } },
  h("span", { class: "fill", style: { width: (100 * probability) / top + "%" } }), word(token), h("small", {}, percent(probability))));
  const start = Math.max(0, found.findIndex(({ id }) => id === chosen.ids[at]));
  roving(buttons, { start });
  put(choices, h("span", { class: "dim" }, "in place of ", h("b", {}, word(chosen.tokens[at])), ": "), ...buttons, h("button", { class: "quiet", type: "button", click: close }, "close"));
  buttons[start].focus();
}

function writeMasked(output, steps) {
  put(output, ...steps.filter((step) => !SPECIAL.has(step.token)).map((step) => {
    const [token, p] = step.candidates[0], same = token === step.token;
    return h("span", { class: "masked" + (same ? "" : " other"), title: `${percent(step.probability)} for ${visible(step.token)}` }, word(token), h("small", {}, percent(p)));
  }));
}

// Bars of probabilities; those before heads were silenced stand as lines.
function writeClasses(output, step, before) {
  const was = new Map((before ? before.candidates : []).map(([name, p]) => [name, p]));
  put(output, ...step.candidates.map(([name, p]) => h("div", { class: "class-row" },
    h("span", { class: "class-name" }, h("bdi", {}, name)),
    h("span", { class: "gauge" }, h("span", { class: "bar", style: { width: 100 * p + "%" } }), was.has(name) ? h("span", { class: "was", style: { left: 100 * was.get(name) + "%" }, title: `before: ${percent(was.get(name))}` }) : null),
    h("small", {}, percent(p)))));
}
