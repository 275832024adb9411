// Requests to an engine and the state kept from its answers, tested with an engine that gives fixed answers.
import "./setup.js";
import assert from "node:assert/strict";
import { test } from "node:test";

import {
  alternatives,
  answer,
  attributionOf,
  firstWishes,
  force,
  hasDraft,
  importanceOf,
  look,
  newSide,
  shownIds,
} from "../../../src/regard/web/page/session.js";

function fixedEngine(task = "pairs") {
  const requests = [];
  const hypothesis = (ids, silenced) => ({
    text: ids.join("-") + (silenced ? "!" : ""),
    ids,
    tokens: ids.map(String),
    scores: ids.map(() => -0.5),
    score: -0.5 * ids.length,
    limited: false,
  });
  return {
    task,
    decodes: true,
    requests,
    silenced: new Set(),
    traced: 0,
    generate(input, options) {
      requests.push(options);
      if (!input.source) return { hypotheses: [], unknown: [], problem: "Type something." };
      if (input.source === "bad") throw new Error("no");
      const loud = this.silenced.size > 0;
      return {
        hypotheses: [
          [...options.prefix, 1, 2],
          [...options.prefix, 3],
        ]
          .slice(0, options.nbest)
          .map((ids) => hypothesis(ids, loud)),
        unknown: input.source === "x" ? ["x"] : [],
        problem: null,
      };
    },
    trace(input, ids) {
      this.traced++;
      return { notes: [], ids, steps: [{ candidates: [["a", 1, 0]] }] };
    },
    next: (input, ids, options, count) => [{ id: ids.length, token: "t", probability: 1, options, count }],
    attribution: () => ({ rows: "output" }),
    *importance() {
      yield { map: "m", index: 0, change: 1 };
      yield { map: "m", index: 1, change: -1 };
    },
  };
}

test("the best hypothesis is traced, and drafts use greedy search", () => {
  const engine = fixedEngine(),
    side = newSide({ source: "a" }),
    wishes = firstWishes(engine);
  answer(engine, side, wishes, true);
  assert.equal(engine.requests[0].strategy, "greedy");
  assert.equal(side.hypotheses.length, 1);
  answer(engine, side, wishes);
  assert.equal(engine.requests[1].strategy, "beam");
  assert.deepEqual(side.trace.ids, [1, 2]);
  assert.equal(engine.traced, 1, "the same output is not traced again");
  side.chosen = 1;
  look(engine, side);
  assert.deepEqual(side.trace.ids, [3]);
});

test("the draft of a continuation is a shorter output of the same search", () => {
  const engine = fixedEngine(),
    side = newSide({ source: "a" });
  engine.task = "lm";
  const wishes = { ...firstWishes(engine), strategy: "sample" };
  assert.ok(hasDraft(engine, wishes));
  assert.ok(!hasDraft({ ...engine, task: "pairs" }, wishes), "a draft would save no time");
  answer(engine, side, wishes, true);
  answer(engine, side, wishes);
  const [draft, whole] = engine.requests;
  assert.equal(draft.strategy, "sample");
  assert.equal(draft.nbest, 1);
  assert.ok(draft.maxLength < whole.maxLength);
  side.prefix = [1, 2, 3, 4, 5, 6];
  answer(engine, side, wishes, true);
  assert.equal(engine.requests[2].maxLength, 7, "the prefix is kept, and one token follows");
});

test("problems and failures are reported, and the last trace is kept", () => {
  const engine = fixedEngine(),
    side = newSide({ source: "x" }),
    wishes = firstWishes(engine);
  answer(engine, side, wishes);
  assert.deepEqual(side.unknown, ["x"]);
  const before = side.trace;
  side.input = { source: "" };
  answer(engine, side, wishes);
  assert.equal(side.problem, "Type something.");
  assert.deepEqual(side.hypotheses, [], "the output of the last input is gone");
  side.input = { source: "bad" };
  answer(engine, side, wishes);
  assert.equal(side.problem, "The computation failed: no");
  assert.equal(side.trace, before);
});

test("a forced token replaces another", () => {
  const engine = fixedEngine(),
    side = newSide({ source: "a" }),
    wishes = firstWishes(engine);
  wishes.forbid = [9];
  answer(engine, side, wishes);
  const [alternative] = alternatives(engine, side, wishes, 1);
  assert.deepEqual([alternative.id, alternative.options, alternative.count], [1, { forbid: [9] }, 8]);
  force(side, 1, 7);
  assert.deepEqual(side.prefix, [1, 7]);
  answer(engine, side, wishes);
  assert.deepEqual(engine.requests.at(-1).prefix, [1, 7]);
  assert.deepEqual(engine.requests.at(-1).forbid, [9]);
});

test("with silenced heads, the original output is kept for comparison", () => {
  const engine = fixedEngine(),
    side = newSide({ source: "a" }),
    wishes = firstWishes(engine);
  engine.silenced.add("m/0");
  answer(engine, side, wishes);
  assert.equal(side.hypotheses[0].text, "1-2!");
  assert.equal(side.before.text, "1-2");
  assert.deepEqual([...engine.silenced], ["m/0"], "the silenced heads are restored");
  engine.silenced.clear();
  answer(engine, side, wishes);
  assert.equal(side.before, null);
});

test("an end token added by the length limit is not shown", () => {
  const limited = { ids: [1, 2, 3], limited: true };
  assert.deepEqual(shownIds(fixedEngine(), limited), [1, 2]);
  assert.deepEqual(shownIds(fixedEngine("lm"), limited), [1, 2, 3]);
});

test("importance is measured in steps, once per output", () => {
  const engine = fixedEngine(),
    side = newSide({ source: "a" });
  answer(engine, side, firstWishes(engine));
  const importance = importanceOf(engine, side);
  importance.step();
  assert.deepEqual([...importanceOf(engine, side).changes], [["m/0", 1]]);
  importance.step();
  importance.step();
  assert.ok(importance.done);
  assert.equal(attributionOf(engine, side), attributionOf(engine, side));
  side.chosen = 1;
  look(engine, side);
  assert.notEqual(importanceOf(engine, side), importance);
});
