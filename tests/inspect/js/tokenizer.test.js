// Unit tests of the page's tokenizer; test_js_tokenizer.py compares it with the one in Python.
import "./setup.js";
import assert from "node:assert/strict";
import { test } from "node:test";

import { makeTokenizer } from "../../../src/regard/web/page/tokenizer.js";

const IDS = { pad: 0, unk: 1, sos: 2, eos: 3, mask: null };
const SPECIALS = ["< pad >", "< unk >", "< sos >", "< eos >"];
const vocabularyOf = (tokens) => Object.fromEntries([...SPECIALS, ...tokens].map((token, id) => [token, id]));
const simple = (kind, tokens) => makeTokenizer({ model: { vocab: vocabularyOf(tokens) } }, kind, IDS);

const isPrintable = (byte) => (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
let nextLetter = 256;
const BYTES = Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPrintable(byte) ? byte : nextLetter++));
const bpe = (merges) => {
  const merged = new Set(merges.map((pair) => pair.join("")));
  return makeTokenizer({ model: { vocab: vocabularyOf([...BYTES, ...merged]), merges } }, "bpe", IDS);
};
const unigram = (scores) => {
  const all = { ...Object.fromEntries(BYTES.map((letter) => [letter, -5])), ...scores };
  const vocab = [...SPECIALS.map((name) => [name, 0]), ...Object.entries(all)];
  return makeTokenizer({ model: { vocab } }, "unigram", IDS);
};
const pieces = (tokenizer, text) => tokenizer.encode(text).map(tokenizer.piece);

test("char splits into code points, not UTF-16 units", () => {
  const tokenizer = simple("char", ["a", "😀"]);
  assert.deepEqual(tokenizer.encode("a😀b\ud83d"), [4, 5, 1, 1]);
  assert.equal(tokenizer.decode([2, 4, 5, 1, 3, 0]), "a😀⁇");
  assert.deepEqual(tokenizer.unknownTokens("a😀b\ud83d"), ["b", "\ufffd"]);
  assert.deepEqual([0, 1, 2, 3, 5].map(tokenizer.piece), ["<pad>", "⁇", "<sos>", "<eos>", "😀"]);
  assert.equal(tokenizer.size, 6);
  assert.deepEqual(tokenizer.special, new Set([0, 1, 2, 3]));
});

test("nfd separates letters and marks, and decoding composes them", () => {
  const tokenizer = simple("nfd", ["e", "\u0301", "ᄀ", "ᅡ"]);
  assert.deepEqual(tokenizer.encode("é가"), [4, 5, 6, 7]);
  assert.equal(tokenizer.decode([4, 5, 6, 7]), "é가");
  assert.deepEqual(tokenizer.unknownTokens("è각"), ["è", "각"]);
  assert.deepEqual(tokenizer.unknownTokens("é\u0323e"), ["\u0323"]);
});

test("space splits only at U+0020", () => {
  const tokenizer = simple("space", ["a", "b\u00a0c", "__proto__", "12"]);
  assert.deepEqual(tokenizer.encode("  a b\u00a0c  d\t __proto__ 12 toString"), [4, 5, 1, 6, 7, 1]);
  assert.equal(tokenizer.decode([4, 1, 5]), "a ⁇ b\u00a0c");
});

test("word keeps the space before a word, and decodes an unknown word with a space", () => {
  const tokenizer = simple("word", ["a", " b", ",", " "]);
  assert.deepEqual(tokenizer.encode("a b,  c"), [4, 5, 6, 7, 1]);
  assert.deepEqual(tokenizer.unknownTokens("a b,  c\ud800"), [" c", "\ufffd"]);
  assert.equal(tokenizer.decode([1, 5, 1, 3]), "⁇ b ⁇");
});

test("bpe: the first merge of the list is applied first, from the left", () => {
  assert.deepEqual(
    pieces(
      bpe([
        ["a", "a"],
        ["aa", "b"],
      ]),
      "aaab aaa",
    ),
    ["aa", "a", "b", " ", "aa", "a"],
  );
  assert.deepEqual(
    pieces(
      bpe([
        ["b", "c"],
        ["a", "b"],
        ["a", "bc"],
      ]),
      "abcab",
    ),
    ["abc", "ab"],
  );
  assert.deepEqual(pieces(bpe([]), "ä"), ["\\xc3", "\\xa4"]);
});

test("bpe: text is split into words by character classes that do not depend on the browser", () => {
  const joined = bpe([
    ["Ġ", "a"],
    ["a", "1"],
    ["ï", "»"],
    ["Ï", "Ġ"],
  ]);
  assert.deepEqual(pieces(joined, "  a1"), [" ", " a", "1"]);
  const tokenizer = bpe([
    ["Ġ", "Â"],
    ["ĠÂ", "ħ"],
    ["Ġ", "ï"],
    ["Ġï", "»"],
    ["Ġï»", "¿"],
  ]);
  assert.deepEqual(pieces(tokenizer, " \x85"), [" \x85"]); // white space for the library, but not for \s in JavaScript
  assert.deepEqual(pieces(tokenizer, "  \ufeff"), [" ", " \ufeff"]); // white space for \s, but not for the library
});

test("unigram: the segmentation has the largest sum of scores", () => {
  const tokenizer = unigram({ a: -1, b: -1, ab: -2, abc: -4, c: -1 });
  assert.deepEqual(pieces(tokenizer, "abc"), ["ab", "c"]);
  assert.equal(tokenizer.decode(tokenizer.encode("abc ä😀\r\n")), "abc ä😀\r\n");
});

test("incomplete UTF-8 is decoded to replacement characters", () => {
  const { encode, decode, piece, unknownTokens } = bpe([["ð", "Ł"]]);
  const ids = encode("😀");
  assert.equal(piece(ids[0]), "\\xf0\\x9f");
  assert.equal(decode(ids), "😀");
  assert.equal(decode([...ids.slice(0, 2), 1, ids[2]]), "\ufffd⁇\ufffd");
  assert.equal(decode(encode("\ufeffa\ud800")), "\ufeffa\ufffd");
  assert.deepEqual(unknownTokens("\ud800 ä"), []);
});

test("unknown schemes are refused", () => {
  assert.throws(() => simple("byte", ["a"]), /bytes/);
  assert.throws(() => simple("foreign", ["a"]), /foreign/);
});

test("long words and large vocabularies take less than three seconds", () => {
  const names = Array.from({ length: 32000 }, (_, i) => (i + 36 ** 4).toString(36));
  const merges = names.flatMap((name) => [2, 3, 4, 5].map((n) => [name.slice(0, n - 1), name[n - 1]]));
  const unique = [...new Map(merges.map((pair) => [pair.join(" "), pair])).values()];
  const begin = performance.now();
  const tokenizer = bpe(unique);
  unigram(Object.fromEntries(names.map((name, i) => [name, -i])));
  tokenizer.encode("10".repeat(20000));
  assert.ok(performance.now() - begin < 3000);
});
