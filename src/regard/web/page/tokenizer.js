// @ts-check
// Text to token ids and back, equal to regard.text.tokenizer.Tokenizer in Python.

import { constants } from "../shared/constants.js";

// UTF-8 by hand, because not every JavaScript engine has TextEncoder and TextDecoder.

export function encodeUtf8(text) {
  const out = [];
  for (const letter of text) {
    // lone surrogates are not text
    const code = letter.codePointAt(0) >= 0xd800 && letter.codePointAt(0) < 0xe000 ? 0xfffd : letter.codePointAt(0);
    if (code < 0x80) out.push(code);
    else if (code < 0x800) out.push(0xc0 | (code >> 6), 0x80 | (code & 63));
    else if (code < 0x10000) out.push(0xe0 | (code >> 12), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63));
    else out.push(0xf0 | (code >> 18), 0x80 | ((code >> 12) & 63), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63));
  }
  return out;
}

// The length of a character by its first byte, and the range of its second byte: [length, lowest, highest].
function sequence(lead) {
  if (lead < 0x80) return [1, 0, 0];
  if (lead >= 0xc2 && lead < 0xe0) return [2, 0x80, 0xbf];
  if (lead >= 0xe0 && lead < 0xf0) return [3, lead === 0xe0 ? 0xa0 : 0x80, lead === 0xed ? 0x9f : 0xbf];
  if (lead >= 0xf0 && lead < 0xf5) return [4, lead === 0xf0 ? 0x90 : 0x80, lead === 0xf4 ? 0x8f : 0xbf];
  return [0, 0, 0];
}

/**
 * Bytes as text; `broken` gives the replacement of the bytes of an incomplete character.
 * @param {Uint8Array | number[]} bytes
 * @param {(bytes: number[]) => string} [broken]
 */
export function decodeUtf8(bytes, broken = () => "\ufffd") {
  let text = "";
  for (let at = 0; at < bytes.length;) {
    const [length, low, high] = sequence(bytes[at]);
    let end = at + 1;
    while (
      end < at + length &&
      end < bytes.length &&
      bytes[end] >= (end === at + 1 ? low : 0x80) &&
      bytes[end] <= (end === at + 1 ? high : 0xbf)
    )
      end++;
    if (end - at === length) {
      let code = length === 1 ? bytes[at] : bytes[at] & (0x7f >> length);
      for (let i = at + 1; i < end; i++) code = (code << 6) | (bytes[i] & 63);
      text += String.fromCodePoint(code);
    } else text += broken(Array.from(bytes.slice(at, end)));
    at = end;
  }
  return text;
}

// Characters are code points. Browsers know different versions of Unicode, so \p{L}, \p{M} and \p{N} would cut the
// same text differently; these classes are those of Unicode 16, as in Oniguruma, the library behind the tokenizers
// in Python. A run is its length in base 36 (none: 1) and its class; "-" is any other class.
export const CHARACTER_RUNS = `
1c-aN7-qL6-qL1b-L7-2N-L3-NL-3N-nL-vL-cqL4-cLe-5L7-L-Lh-34M5L-2L2-4L-L6-L-3L-L-kL-2bL-3vL-7M4mL-12L2-L6-15L8-19M-M-2M-2M-
M8-rL4-4Lt-bM5-17LlMaN4-2LM2rL-L7M2-6M2L2M-4M2LaN3L2-Lg-LMuLrM2-2hLbMLe-aNxL9M2L4-L2-M2-mL4ML9ML3ML5Mi-pL3M4-bL5-oL-6L8-
9M16LoM-xM1iL3MLiML7MaL2M2-aN-gL3M-8L2-2L2-mL-7L-L3-4L2-ML7M2-2M2-3ML8-M4-2L-3L2M2-aN2L2-6N2-L-M2-3M-6L4-2L2-mL-7L-2L-2L
-2L2-M-5M4-2M2-3M3-M7-4L-L7-aN2M3LMb-3M-9L-3L-mL-7L-2L-5L2-ML8M-3M-3M2-Lf-2L2M2-aN9-L6M-3M-8L2-2L2-mL-7L-2L-5L2-ML7M2-2M
2-3M7-3M4-2L-3L2M2-aN-L6Na-ML-6L3-3L-4L3-2L-L-2L3-2L3-3L3-cL4-5M3-3M-4M2-L6-Me-dNd-5M8L-3L-nL-gL2-ML7M-3M-4M7-2M-3L2-L2-
2L2M2-aN8-7N-L3M-8L-3L-nL-aL-5L2-ML7M-3M-4M7-2M6-2L-2L2M2-aN-2LMc-4M9L-3L-15L2ML7M-3M-4ML5-3LM7N3L2M2-jN-6L-3M-iL3-oL-9L
-L2-7L3-M4-6M-M-8M6-aN2-2Md-1cLM2L7M5-7L8M-aN13-2L-L-5L-oL-L-aLM2L9ML2-5L-L-7M-aN2-4Lw-Ln-2M6-kN-M-M-M4-2M8L-10L4-kM-2M
5LbM-10M9-M1l-17LkMLaN6-6L4M4L3ML3M2L7M3L4MdLcMLMaN4M2-12L-L5-L2-17L-99L-4L2-7L-L-4L2-15L-4L2-xL-4L2-7L-L-4L2-fL-1lL-4L
2-1vL2-3M9-kN3-gLg-2eL2-6L3-h8L2-hL-qL5-23L3-3N8L7-iL4M9-jL3Mb-iL2Mc-dL-3L-2Mc-1gLwM3-L4-LM2-aN6-aNh-3M-MaN6-2hL7-5L2MyL
ML5-1yLa-vL-cM4-cMa-aNuL2-5Lb-18L4-qL6-bN11-nL5M4-1hLaM-tM2-MaN6-aNd-L8-vM1d-5M1bLhM8L3-aNh-9Mc-3MuLdM2LaN18LeMc-10LkM8-
aN3-3LaN10L2-bL5-17L2-3Lg-3M-lM4LM6LM2L3ML5-5cL1sM7qL2-6L2-12L2-6L2-8L-L-L-L-vL2-1hL-7L-L3-3L-7L3-4L2-6L4-dL5-3L-7L37-NL
2-6N5-LaN6-dL1f-xMh-L4-L2-aL-L3-5L6-L-L-L-4L-bL2-4L5-5L4-L-1fN2L5Nk6-1oN26-mNhi-uNvg-6dL6-4L3M2L9-N2-12L-L5-L2-1kL7-Lf-M
nL9-7L-7L-7L-7L-7L-7L-7L-7L-wM1b-Ld1-2LNp-9N6M-5L2-3N2L4-2eL2-2M2-3L-2iL-4L5-17L-2mL3-4Na-wL1c-gLw-aNu-8N-fNw-aN13-fN8w-
534L1s-h3hL1v-1aL2-7hL3-gLaN2Lk-1bL4M-aM-vL2M1yLaN2M11-9L2-2vL2-1vL2-2L-L-8Ll-gLM3LM4LMnL5M4-M3-6Na-1gLc-2M1eLiMa-aN6-iM
6L3-L-2LMaNsL8M2-nLdMc-tL3-4M1bLeMe-LaN6-5LMaLaN5L-15LeM9-3LM8L2M2-aN6-nL3-L3M1eLML3M2L2M5L2MLMLo-3L2-bL5M2-3L2Ma-6L2-6L
2-6L9-7L-7L-17L-eL6-37L8M-2M2-aN6-8mcLc-nL4-1dL6is-a6L2-2yL12-7Lc-5L5-LMaL-dL-5L-L-2L-2L-30Lx-a3Li-1sL2-1iL14-cL4-gMg-gM
1s-5L-3rLj-aN7-qL6-qLb-2hL3-6L2-6L2-6L2-3Lz-cL-qL-jL-2L-fL2-eLy-3fLc-19Nc-1lNh-2N35-M3m-tL3-1dLf-MrN4-wL4N9-kLN8LN5-12L
5M5-uL2-10L4-8L-5N16-4eL2-aN6-10L4-10L4-14L8-1gLc-bL-fL-7L-2L-bL-fL-7L-2L3-1gLc-8nL9-mLa-8Lo-6L-16L-9L1x-6L2-L-18L-2L3-L
2-nL2-8NnL2-7NvL8-9N1c-jL-2L5-5NmL6N4-qL1y-1kL4-2N2LgN2-1aNL3M-2M5-4M4L-3L-tL2-3M4-M9Nn-tL2N-tL3Nw-8L-sL2M4-5Ng-1iLa-mL
2-8NjL5-8NiLn-7N28-21L1j-1fLd-1fL7-6N10L4M8-aN6-aNsL3-5M-nL62-vN-16L-2M3-2Lg-3L1j-4MtLaNL8-mLbM4Nr-iL4M16-lL7Nk-nL9-3M
1hLfMb-uNM2L2ML9-4M19LbM7-Md-pL7-aN6-3M10LeM-aN4-L2ML8-zLM2-L9-3M1cLeM4L4-4M-2MaNL-L4-kNb-iL-pLcM6-M2LM1q-7L-L-4L-fL-aL
7-1bLcM5-aN6-4M-8L2-2L2-mL-7L-2L-5L-2ML7M2-2M2-3M2-L6-M5-5L2M2-7M3-5Mb-aL-L2-L-12L-L9M-M2-M-4M-5MLMLd-2Mt-1hLiM4L5-aN4-M
3Lu-1cLkM2L-L8-aN4m-1bL7M2-9Mn-4L2My-1cLhM3-Lb-aN12-17LdML7-aN6-kNs-rL2-fM4-cN4-7L55-18LfM2t-1sLjNc-8L2-L2-8L-2L-oL6M-2M
2-4MLML2Mc-aN1y-8L2-13L7M2-7ML-LMr-LaM14L7ML4M8-M8-LbM1aLgM3-Li-21L5j-xLf-aN6-9L-11L8M-8MLf-tN5-uL2-mM-eM21-7L-2L-12L6M
3-M-2M-7MLM8-aN6-6L-2L-wL5M-2M-5ML7-aN8m-jL4M9-2MLMdL-yL7M3-5Md-aNM2d-Lf-lN17-pmL2u-33Nh-5gL218-2pLf-tsLg-M6LfMa-32zL5-
g7L5a1-uLiMaN1c6-ftL7-vL-aN6-27L-aN6-uL2-5Mb-1cL7M9-4Lc-aN-7N-lL5-jLc0-19L3-aN5i-1sLnN2x-23L4-ML1jM7-4MdL1s-2L-LMb-2Me-
4qgL8-yeL15-aL6w7-4L-7L-2L-83Lf-Lt-3L2-Le-4L8-b0L1s4-2zL5-dL3-9L7-aL3-2M381-aNee-1aM2-nMf2-5M3-6M8-8M2-7Mu-4M44-3M3f-kN
c-kN30-pN3r-2dL-1zL-2L2-L2-2L2-4L-cL-L-7L-1tL-4L2-8L-7L-sL-4L-5L-L3-7L-9gL2-pL-pL-vL-pL-vL-pL-vL-pL-vL-pL-8L2-1eNe8-1jM
4-1eM8-Me-Mm-5M-fMuo-vL6-6L5x-7M-hM2-7M-2M-5M5-1qLx-M34-19L3-7M7L2-aN4-L8x-uLMh-18L4MaNd2-sL4MaN5y-uL2MLaNdh-7L-4L-2L-fL
-5hL2-9N7M15-1wL7ML4-aNlz-1nN-3N-4N24-19N-fN5e-4L-rL-2L-L2-L-aL-4L-L-L6-L4-L-L-L-3L-2L-L2-L-L-L-L-L-2L-L2-4L-7L-4L-4L-L-
aL-hL5-3L-5L-hLg4-dN25f-aNsm-wyoLw-37eL6-66L2-4g2Le-5rlLf-haL1wi-f2L15u-3t7L5-38gLf9e8-6oM47bk-`;

// The characters of some classes, in the syntax of a character class of a regular expression.
function characterRanges(classes) {
  let next = 0,
    ranges = "";
  for (const [, length, name] of CHARACTER_RUNS.matchAll(/([0-9a-z]*)([LMN-])/g)) {
    const first = next;
    next += length ? parseInt(length, 36) : 1;
    if (classes.includes(name)) ranges += `\\u{${first.toString(16)}}-\\u{${(next - 1).toString(16)}}`;
  }
  return ranges;
}

// White_Space is \s of Oniguruma; \s of JavaScript has U+FEFF in addition and lacks U+0085.
function wordPattern() {
  const inside = `${characterRanges("LMN")}_\\u200c\\u200d`;
  return new RegExp(` ?[${inside}]+| ?[^\\p{White_Space}${inside}]|[\\s\\S]`, "gu");
}

// The GPT-2 pattern that splits text into words.
function byteLevelPattern() {
  const letters = characterRanges("L"),
    digits = characterRanges("N"),
    space = "\\p{White_Space}";
  const words = ` ?[${letters}]+| ?[${digits}]+| ?[^${space}${letters}${digits}]+`;
  return new RegExp(`'s|'t|'re|'ve|'m|'ll|'d|${words}|${space}+(?!\\P{White_Space})|${space}+`, "gu");
}

// The letter for each of the 256 bytes in byte-level tokens: printable bytes stand for themselves.
const BYTE_LETTERS = [];
for (let byte = 0, unseen = 256; byte < 256; byte++) {
  const seen = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
  BYTE_LETTERS.push(String.fromCharCode(seen ? byte : unseen++));
}
const BYTE_OF_LETTER = new Map(BYTE_LETTERS.map((letter, byte) => [letter, byte]));

// Display text of bytes; incomplete characters are written as \xe4.
const showBytes = (bytes) =>
  decodeUtf8(bytes, (broken) => broken.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join(""));

// A min-heap of numbers.
function pushMerge(heap, number) {
  let at = heap.length;
  for (; at > 0; at = (at - 1) >> 1) {
    const parent = heap[(at - 1) >> 1];
    if (parent <= number) break;
    heap[at] = parent;
  }
  heap[at] = number;
}

function popMerge(heap) {
  const smallest = heap[0],
    last = heap.pop();
  let at = 0;
  for (let child = 1; child < heap.length; child = 2 * at + 1) {
    if (heap[child + 1] < heap[child]) child++;
    if (heap[child] >= last) break;
    heap[at] = heap[child];
    at = child;
  }
  if (heap.length) heap[at] = last;
  return smallest;
}

// Byte-pair encoding: repeatedly apply the first applicable merge of the list, leftmost first.
function makeBpe(merges, idOf) {
  const ranks = new Map(),
    merged = new Int32Array(merges.length);
  const wide = 2 ** 21; // larger than any vocabulary
  merges.forEach((merge, rank) => {
    const [left, right] = typeof merge === "string" ? merge.split(" ") : merge; // older files have "l o" for ["l", "o"]
    ranks.set(idOf.get(left) * wide + idOf.get(right), rank);
    merged[rank] = idOf.get(left + right);
  });
  const byteIds = BYTE_LETTERS.map((letter) => idOf.get(letter));

  return (word) => {
    const ids = encodeUtf8(word).map((byte) => byteIds[byte]),
      length = ids.length;
    const next = Int32Array.from(ids, (_, i) => i + 1),
      previous = Int32Array.from(ids, (_, i) => i - 1);
    const rankAt = (at) => (next[at] < length ? ranks.get(ids[at] * wide + ids[next[at]]) : undefined);
    const heap = []; // entries: rank * length + place
    const offer = (at) => {
      const rank = rankAt(at);
      if (rank !== undefined) pushMerge(heap, rank * length + at);
    };
    for (let at = 0; at < length - 1; at++) offer(at);
    while (heap.length) {
      const entry = popMerge(heap),
        at = entry % length,
        rank = (entry - at) / length,
        right = next[at];
      if (ids[at] < 0 || rankAt(at) !== rank) continue; // another merge used one of the two
      ids[at] = merged[rank];
      ids[right] = -1;
      next[at] = next[right];
      if (next[at] < length) previous[next[at]] = at;
      if (previous[at] >= 0) offer(previous[at]);
      offer(at);
    }
    return ids.filter((id) => id >= 0);
  };
}

// Unigram: the segmentation with the largest sum of scores. Ties go to the last piece that starts first.
function makeUnigram(vocabulary, idOf) {
  const scores = Float64Array.from(vocabulary, ([, score]) => score);
  const longest = vocabulary.reduce((most, [piece]) => Math.max(most, piece.length), 0);

  return (word) => {
    const letters = encodeUtf8(word)
      .map((byte) => BYTE_LETTERS[byte])
      .join("");
    const length = letters.length;
    const best = new Float64Array(length + 1),
      piece = new Int32Array(length + 1); // of the pieces ending here
    const start = new Int32Array(length + 1).fill(-1);
    for (let from = 0; from < length; from++) {
      for (let to = from + 1; to <= length && to <= from + longest; to++) {
        const id = idOf.get(letters.slice(from, to));
        if (id === undefined) continue;
        const score = scores[id] + best[from];
        if (start[to] < 0 || score > best[to]) [best[to], start[to], piece[to]] = [score, from, id];
      }
    }
    const ids = [];
    for (let to = length; to > 0; to = start[to]) ids.push(piece[to]);
    return ids.reverse();
  };
}

// The unknown tokens of nfd as characters of the text: each unknown letter or mark gives its character. When
// normalization reorders marks, a part that is not the first of its character belongs to the character before it, as
// in the library.
function unknownDecomposed(text, isKnown) {
  const characters = Array.from(text);
  const firsts = new Map(); // per letter or mark in text order: whether it is the first part of a character
  for (const character of characters) {
    Array.from(character.normalize("NFD")).forEach((part, i) => {
      if (!firsts.has(part)) firsts.set(part, []);
      firsts.get(part).push(i === 0);
    });
  }
  const unknown = [],
    taken = new Map(); // normalization reorders marks, but keeps the order of equal ones
  let at = -1;
  for (const part of text.normalize("NFD")) {
    const count = taken.get(part) ?? 0;
    taken.set(part, count + 1);
    if (firsts.get(part)[count]) at++;
    if (!isKnown(part)) unknown.push(characters[at]);
  }
  return unknown;
}

// A tokenizer of a run. `state` is the content of its file, `ids` are the special ids.
export function makeTokenizer(state, kind, ids) {
  const vocabulary = state.model.vocab,
    tokens = [];
  if (Array.isArray(vocabulary)) for (const [token] of vocabulary) tokens.push(token);
  else for (const [token, id] of Object.entries(vocabulary)) tokens[id] = token;

  const names = ["pad", "unk", "sos", "eos", "mask"].filter((name) => (ids[name] ?? null) !== null);
  /** @type {Map<number, string>} */
  const shown = new Map(names.map((name) => [ids[name], constants.tokens[name]]));
  const special = new Set(shown.keys());
  const idOf = new Map(); // tokens that are text
  tokens.forEach((token, id) => special.has(id) || idOf.set(token, id));

  // Lone surrogates are not text.
  const clean = (text) => text.replace(/\p{Surrogate}/gu, "\ufffd");
  const kept = (sequence) => Array.from(sequence).filter((id) => id === ids.unk || !special.has(id));
  const common = { size: tokens.length, special };

  if (["byte", "bpe", "unigram"].includes(kind)) {
    if (!BYTE_LETTERS.every((letter) => idOf.has(letter))) throw new Error("the vocabulary lacks some of the bytes");
    const cutWord = kind === "unigram" ? makeUnigram(vocabulary, idOf) : makeBpe(state.model.merges, idOf);
    const pattern = kind === "byte" ? /[\s\S]/gu : byteLevelPattern();
    const cache = new Map();
    const cached = (word) => {
      let found = cache.get(word);
      if (!found) {
        if (cache.size >= 10000) cache.clear();
        cache.set(word, (found = cutWord(word)));
      }
      return found;
    };
    const bytesOf = (id) =>
      id === ids.unk
        ? encodeUtf8(constants.tokens.unk)
        : Uint8Array.from(tokens[id], (letter) => BYTE_OF_LETTER.get(letter));
    return {
      ...common,
      encode: (text) => (clean(text).match(pattern) ?? []).flatMap(cached),
      decode: (sequence) => decodeUtf8(kept(sequence).flatMap((id) => [...bytesOf(id)])),
      piece: (id) => shown.get(id) ?? showBytes(bytesOf(id)),
      unknownTokens: () => [],
    };
  }

  const pattern = kind === "word" ? wordPattern() : null;
  const cutters = {
    char: (text) => Array.from(text),
    nfd: (text) => Array.from(text.normalize("NFD")),
    space: (text) => text.split(" ").filter((token) => token),
    word: (text) => clean(text).match(pattern) ?? [],
  };
  const cut = cutters[kind];
  if (!cut) throw new Error(`the page cannot cut text into tokens of the kind ${kind}`);
  const isKnown = (token) => idOf.has(token);
  const tokenText = (id, i) => {
    if (id !== ids.unk) return tokens[id];
    return kind === "word" && i ? " ⁇" : "⁇"; // most words include their leading space; an unknown word has lost it
  };
  return {
    ...common,
    encode: (text) => cut(text).map((token) => idOf.get(token) ?? ids.unk),
    decode: (sequence) => {
      const text = kept(sequence)
        .map(tokenText)
        .join(kind === "space" ? " " : "");
      return kind === "nfd" ? text.normalize("NFC") : text;
    },
    piece: (id) => shown.get(id) ?? tokens[id],
    unknownTokens: (text) => {
      const whole = clean(text);
      return kind === "nfd" ? unknownDecomposed(whole, isKnown) : cut(whole).filter((token) => !isKnown(token));
    },
  };
}

// The text side: examples to ids, ids to text and to displayed tokens.
export class Codec {
  constructor({ source, target, features, columns, separator, frame, ids }) {
    this.ids = ids;
    this.source = makeTokenizer(source.state, source.kind, ids);
    this.target = target ? makeTokenizer(target.state, target.kind, ids) : this.source;
    this.features = columns.includes("features") ? { names: features, separator } : null;
    this.featureIds = new Map(features.map((name, i) => [name, this.source.size + i]));
    this.names = features;
    this.before = frame === "both" || frame === "start" ? [ids.sos] : [];
    this.after = frame === "both" || frame === "end" ? [ids.eos] : [];
  }

  split(features) {
    return (features || "")
      .split(this.features ? this.features.separator : ";")
      .map((name) => name.trim())
      .filter(Boolean);
  }

  /** @param {import("./engine.js").Input} input */
  encodeSource({ source, features }) {
    const names = this.features ? this.split(features) : [];
    return [
      ...this.before,
      ...names.map((name) => this.featureIds.get(name) ?? this.ids.unk),
      ...this.source.encode(source),
      ...this.after,
    ];
  }

  /** @param {import("./engine.js").Input} input */
  unknown({ source, features }) {
    const names = this.features ? this.split(features) : [];
    return [...this.source.unknownTokens(source), ...names.filter((name) => !this.featureIds.has(name))];
  }

  decodeTarget(ids) {
    return this.target.decode(ids.filter((id) => id < this.target.size));
  }

  piece(tokenizer, id) {
    return id < tokenizer.size ? tokenizer.piece(id) : (this.names[id - tokenizer.size] ?? `<${id}>`);
  }
}
