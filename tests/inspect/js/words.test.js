// Words formed from subword pieces, and the attention between words.
import "./setup.js";
import assert from "node:assert/strict";
import { test } from "node:test";

import { planeOf } from "../../../src/regard/web/page/core.js";
import { groupPlane, wordSpans } from "../../../src/regard/web/page/words.js";

const spelled = (tokens, features) => wordSpans(tokens, features).map(([from, to]) => tokens.slice(from, to).join(""));

test("a token with a leading space starts a word", () => {
  assert.deepEqual(spelled(["the", " ca", "t", " sa", "t", "<eos>"]), ["the", " cat", " sat", "<eos>"]);
  assert.deepEqual(spelled(["c", "a", "t", " ", "s", "a", "t"]), ["cat", " sat"]);
});

test("special tokens and features are separate words", () => {
  assert.deepEqual(spelled(["<sos>", "V", "PST", "V", "a", "<eos>"], "V;PST"), ["<sos>", "V", "PST", "Va", "<eos>"]);
  assert.deepEqual(spelled(["<sos>", "a", "<eos>", "b"]), ["<sos>", "a", "<eos>", "b"]);
  assert.deepEqual(spelled([]), []);
});

test("attention between words is summed over keys and averaged over queries", () => {
  const m = planeOf(Float32Array.from([0.5, 0.25, 0.25, 0, 0.5, 0.5, 1, 0, 0]), 3, 3);
  const grouped = groupPlane(
    m,
    [
      [0, 2],
      [2, 3],
    ],
    [
      [0, 1],
      [1, 3],
    ],
  );
  assert.deepEqual(Array.from(grouped.data), [0.25, 0.75, 1, 0]);
  assert.equal(grouped.max, 1);
});
