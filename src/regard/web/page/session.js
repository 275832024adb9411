// @ts-check
// Requests to a model and their results, for one input or two compared inputs. No document.

import { constants } from "../shared/constants.js";

export const BOUNDS = { beam: [2, 10], temperature: [0.1, 2], seed: [0, 9999], length: [1, 400] };
export const STRATEGIES = ["greedy", "beam", "sample"];
export const MORE = 20; // tokens added to a continuation
const DRAFT_LENGTH = 4; // tokens of the draft of a continuation

// The search settings, shared by all inputs.
export function firstWishes(engine) {
  const continues = engine.task === "lm";
  return { strategy: continues ? "greedy" : "beam", beam: 5, temperature: 1, seed: 1, length: MORE, forbid: [] };
}

/**
 * One input and its answer.
 * @typedef {object} Side
 * @property {import("./engine.js").Input | null} input
 * @property {number[]} prefix  forced ids at the start of the output
 * @property {boolean} begins  the prefix was typed and applies to any input
 * @property {import("./engine.js").Hypothesis[]} hypotheses
 * @property {number} chosen  index of the inspected hypothesis
 * @property {string[]} unknown
 * @property {string | null} problem
 * @property {import("./core.js").Trace | null} trace
 * @property {{text: string, score: number, tokens: string[]} | {steps: import("./core.js").Step[]} | null} before
 * @property {string} [key]  identifies the trace
 * @property {any} [importance]
 * @property {any} [attribution]
 */

/**
 * @param {import("./engine.js").Input | null} input
 * @returns {Side}
 */
export const newSide = (input) => ({
  input,
  prefix: [],
  begins: false,
  hypotheses: [],
  chosen: 0,
  unknown: [],
  problem: null,
  trace: null,
  before: null,
});

// A draft is cheaper while the user types: one output, greedy instead of a beam, and only the beginning of a
// continuation.
export const hasDraft = (engine, wishes) => wishes.strategy === "beam" || engine.task === "lm";

function optionsOf(engine, side, wishes, draft) {
  const { beam, temperature, seed, forbid } = wishes,
    { prefix } = side;
  const strategy = draft && wishes.strategy === "beam" ? "greedy" : wishes.strategy,
    length = draft ? Math.min(DRAFT_LENGTH, wishes.length) : wishes.length;
  return {
    strategy,
    beam,
    nbest: draft || strategy === "greedy" ? 1 : beam,
    temperature,
    seed,
    forbid,
    prefix,
    ...(engine.task === "lm" ? { maxLength: Math.max(length, prefix.length + 1) } : {}),
  };
}

// Without an end token that was forced by the length limit.
export const shownIds = (engine, hypothesis) =>
  hypothesis.limited && engine.task !== "lm" ? hypothesis.ids.slice(0, -1) : hypothesis.ids;

// Search the output of an input, and trace the best one.
export function answer(engine, side, wishes, draft = false) {
  if (!side.input) return;
  const found = guarded(() => engine.generate(side.input, optionsOf(engine, side, wishes, draft)));
  side.unknown = found.unknown || [];
  side.problem = found.problem;
  side.hypotheses = side.problem ? [] : found.hypotheses; // never the output of an earlier input
  if (side.problem) return;
  side.chosen = 0;
  side.before =
    engine.silenced.size && !draft
      ? unsilenced(engine, () =>
          outcome(
            engine,
            side.input,
            engine.generate(side.input, optionsOf(engine, side, wishes, false)).hypotheses[0],
          ),
        )
      : null;
  look(engine, side);
}

// Trace the inspected hypothesis.
export function look(engine, side) {
  const hypothesis = side.hypotheses[side.chosen] || null;
  const key = JSON.stringify([
    side.input.source,
    side.input.features,
    side.input.number,
    hypothesis && hypothesis.ids,
    [...engine.silenced].sort(),
  ]);
  if (side.key === key) return; // unchanged
  const found = guarded(() => ({ trace: engine.trace(side.input, idsOf(engine, side)) }));
  side.problem = found.problem || null;
  if (side.problem) return;
  side.key = key;
  side.trace = found.trace;
  side.importance = null;
  side.attribution = undefined;
  if (hypothesis && hypothesis.limited && engine.task !== "lm")
    side.trace.notes = [...side.trace.notes, { kind: "limit", text: constants.notes.limit }];
}

// The reference for a comparison: the best output or the predictions of the model without silenced heads.
const outcome = (engine, input, hypothesis) =>
  hypothesis
    ? { text: hypothesis.text, score: hypothesis.score, tokens: hypothesis.tokens }
    : engine.decodes
      ? null
      : { steps: engine.trace(input, []).steps };

function unsilenced(engine, compute) {
  const keys = [...engine.silenced];
  engine.silenced.clear();
  try {
    return compute();
  } finally {
    for (const key of keys) engine.silenced.add(key);
  }
}

// Return errors as problems, so that the page stays usable.
function guarded(compute) {
  try {
    return compute();
  } catch (error) {
    return { problem: `The computation failed: ${error.message}` };
  }
}

// The most probable alternatives for token `at` of the inspected hypothesis.
export function alternatives(engine, side, wishes, at, count = 8) {
  return engine.next(side.input, side.hypotheses[side.chosen].ids.slice(0, at), { forbid: wishes.forbid }, count);
}

// Continue from another token at position `at`.
export function force(side, at, id) {
  side.prefix = [...side.hypotheses[side.chosen].ids.slice(0, at), id];
  side.begins = false;
}

export const silenceKey = (map, index) => `${map.name}/${index}`;

// Estimated milliseconds of the attribution; 0 if it is cached.
export function attributionCost(engine, side) {
  if (side.attribution !== undefined) return 0;
  const found = guarded(() => ({ time: engine.attributionTime(side.input, idsOf(engine, side)) }));
  return found.time || 0;
}

export function attributionOf(engine, side) {
  if (side.attribution === undefined)
    side.attribution = guarded(() => ({ found: engine.attribution(side.input, idsOf(engine, side)) })).found || null;
  return side.attribution;
}

export const idsOf = (engine, side) => {
  const found = side.hypotheses[side.chosen];
  return found ? shownIds(engine, found) : [];
};

// The importance of heads, measured one at a time: {changes: {map name/index: lost log-probability}, done, step()}.
export function importanceOf(engine, side) {
  if (!side.importance) {
    const changes = new Map(),
      steps = engine.importance(side.input, idsOf(engine, side));
    side.importance = {
      changes,
      done: false,
      step() {
        const { value, done } = steps.next();
        if (done) this.done = true;
        else if (value) changes.set(`${value.map}/${value.index}`, value.change); // null: an intermediate step
      },
    };
  }
  return side.importance;
}

// The importance in a stored trace.
export function storedImportance(trace) {
  const measured = Object.entries(trace.importance).flatMap(([map, lost]) =>
    lost.map((change, index) => [`${map}/${index}`, change]),
  );
  return measured.length ? { changes: new Map(measured.filter(([, change]) => change !== null)), done: true } : null;
}
