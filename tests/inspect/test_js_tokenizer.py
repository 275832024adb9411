"""The tokenizer of the page in JavaScript gives the tokens of the tokenizer in Python."""

from __future__ import annotations

import json
import re
import unicodedata
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer as Library, models, normalizers, pre_tokenizers

from kit.node import JS_TESTS, WEB, needs_node, run_node
from regard.text.tokenizer import SPECIALS, Tokenizer, byte_letters, pre_tokenizer

pytestmark = needs_node

MODULE = WEB / "page" / "tokenizer.js"
SCHEMES = ("char", "nfd", "space", "word", "byte", "bpe:300", "bpe:900", "unigram:300", "unigram:700")
TEXTS = (
    "The quick brown fox isn't the one who'll jump; they've said it's 12 o'clock, we're late and I'd rather I'm not.",
    "Größe, naïve Façade, crème brûlée, Ångström, ﬁne, ǅ, İstanbul, Việt Nam, ộ o\u0323\u0302 o\u0302\u0323 ḍ̇",
    "בְּרֵאשִׁית בָּרָא אֱלֹהִים אֵת הַשָּׁמַיִם וְאֵת הָאָרֶץ׃",
    "한국어 문장은 띄어 쓴다. 각 갂 \u1112\u1161\u11ab 모든 국민은 법 앞에 평등하다.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है। क्‍ष १२३ क़ ज़",
    "人人生而自由,在尊严和权利上一律平等。 人間は生まれながらにして自由である。 がぎぐ",
    "😀 👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ ½ ² Ⅷ ٣٤ 3.14 1,000,000 x_1 a-b (c) [d] {e} «f» … — '' \"\" `` !!! ??? ###",
    "tab\tline\nreturn\r\nno-break\u00a0space\u202fthin\u2009ideographic\u3000zero\u200bwidth\u200cnon\u200djoin",
    "  two   three ",
)
SPACES = "\x85\u00a0\u1680\u180e\u2028\u2029\u202f\u205f\u3000\ufeff"  # some are white space only by name
ODD = SPACES + "\x00\x1c\x1f\x7f\u00ad\u200b\u200c\u200d\u2060\ufffd\uffff'_"
MARKS = "\u0300\u0301\u0308\u0323\u0327\u0334\u0344\u0345\u05b0\u05bc\u05c1\u093c\u094d\u0f71\u0f73\u0f75\u0f81\u3099"
RANGES = (
    (0, 0x7F),
    (0x80, 0x24F),
    (0x370, 0x6FF),
    (0x900, 0x1FFF),
    (0x2000, 0x33FF),
    (0xAC00, 0xD7FF),
    (0xE000, 0xFFFF),
)
ASTRAL = ((0x10000, 0x1FFFF), (0x10000, 0x10FFFF))

PROGRAM = """
import { readFileSync } from "node:fs";
const [folder, input] = process.argv.slice(-2);
const { setConstants } = await import(`${folder}/shared/constants.js`);
const { makeTokenizer } = await import(`${folder}/page/tokenizer.js`);
setConstants(JSON.parse(process.env.PAGE_CONSTANTS));
const answers = JSON.parse(readFileSync(input)).map(({ state, kind, ids, texts, sequences }) => {
  const { encode, decode, piece, unknownTokens, size, special } = makeTokenizer(state, kind, ids);
  return {
    encoded: texts.map(encode), unknown: texts.map(unknownTokens), decoded: sequences.map(decode),
    pieces: Array.from({ length: size }, (_, id) => piece(id)), special: [...special],
  };
});
process.stdout.write(JSON.stringify(answers));
"""


def random_text(random: Random) -> str:
    """Random words, odd spaces, marks, characters of any script, and some lone surrogates."""

    def piece() -> str:
        choice = random.random()
        if choice < 0.4:
            words = random.choice(TEXTS).split(" ")
            start = random.randrange(len(words))
            return " ".join(words[start : start + random.randint(1, 4)])
        if choice < 0.6:
            return random.choice(
                ("", " ", " ", "  ", "   ", "\t", "\n", "\r\n", " \n ", "\u00a0", " 's", "'ll", "<", " >")
            )
        if choice < 0.7:
            return random.choice(ODD)
        if choice < 0.8:
            return "".join(random.choices(MARKS, k=random.randint(1, 4)))
        if choice < 0.81:
            return chr(random.randint(0xD800, 0xDFFF)) + "."  # in JavaScript two halves in a row would be one character
        first, last = random.choice(RANGES if choice < 0.93 else ASTRAL)
        return chr(random.randint(first, last))

    return "".join(piece() for _ in range(random.randint(0, 8)))


def answer(path: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of the module for all cases, from one process."""
    path.write_text(json.dumps(cases))
    answers: list[dict[str, Any]] = json.loads(run_node(path, program=PROGRAM))
    return answers


def case(tokenizer: Tokenizer, texts: list[str], sequences: list[list[int]]) -> dict[str, Any]:
    kind = tokenizer.scheme.partition(":")[0]
    state, ids = json.loads(tokenizer.to_json()), tokenizer.ids.model_dump()
    return {"kind": kind, "state": state, "ids": ids, "texts": texts, "sequences": sequences}


def same_unicode(kind: str, text: str) -> bool:
    """Whether Python and Node.js, which have different versions of Unicode, normalize a text alike."""
    return kind != "nfd" or all(unicodedata.category(character) != "Cn" for character in text)


def same_library(kind: str, text: str) -> bool:
    """Whether Python and the library, which has an older version of Unicode, normalize a text alike."""
    clean = re.sub("[\ud800-\udfff]", "\ufffd", text)
    return kind != "nfd" or normalizers.NFD().normalize_str(clean) == unicodedata.normalize("NFD", clean)


def test_tokens_texts_and_pieces_equal_those_of_python(tmp_path: Path) -> None:
    random = Random(15)
    cases, expected = [], []
    for number, scheme in enumerate(SCHEMES):
        corpus = [*TEXTS, "\ufffd \ufffd", *(random_text(random) for _ in range(20))]
        corpus = [text.encode("utf-8", "replace").decode() for text in corpus]
        tokenizer = Tokenizer.train(scheme, corpus, mask=number % 2 == 1)
        kind = scheme.partition(":")[0]
        texts = [*TEXTS, "", *(random_text(random) for _ in range(800))]
        texts += ["a" * 5000, "ab" * 3000 + " " * 3000, "< pad >< unk > < mask >", "__proto__ constructor 12 toString"]
        texts = [text for text in texts if same_unicode(kind, text)]
        assert len(texts) > 500
        encoded = tokenizer.encode(texts)
        size = tokenizer.size
        sequences = [[random.randrange(size) for _ in range(random.randint(0, 12))] for _ in range(500)]
        sequences += [[random.randrange(8) for _ in range(6)] for _ in range(50)]  # many special tokens
        sequences += encoded
        cases.append(case(tokenizer, texts, sequences))
        expected.append(
            {
                "encoded": encoded,
                "unknown": [tokenizer.unknown_tokens(t) if same_library(kind, t) else None for t in texts],
                "decoded": [tokenizer.decode(ids) for ids in sequences],
                "pieces": tokenizer.pieces(range(size)),
                "special": sorted(tokenizer.special),
            }
        )
    for request, reference, output in zip(cases, expected, answer(tmp_path / "cases.json", cases), strict=True):
        for key, inputs in {"encoded": "texts", "unknown": "texts", "decoded": "sequences"}.items():
            for text, correct, actual in zip(request[inputs], reference[key], output[key], strict=True):
                assert correct is None or actual == correct, f"{request['kind']}: {key} of {text!r}"
        assert output["pieces"] == reference["pieces"], request["kind"]
        assert output["special"] == reference["special"], request["kind"]


def make_tokenizer(model: Any, kind: str) -> Tokenizer:
    library = Library(model)
    library.pre_tokenizer = pre_tokenizer(kind)
    return Tokenizer(library)


def vocabulary_of(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate([*SPECIALS[:-1], *dict.fromkeys([*byte_letters(), *tokens])])}


def test_invalid_utf8_is_decoded_as_in_python(tmp_path: Path) -> None:
    random = Random(16)
    bytes_of_note = bytes.fromhex("00 41 7f 80 8f 90 9f a0 bb bf c0 c1 c2 df e0 e1 ed ee ef f0 f3 f4 f5 ff")
    letters = [byte_letters()[byte] for byte in bytes_of_note]
    tokens = ["".join(random.choices(letters, k=random.randint(2, 6))) for _ in range(3000)]
    tokenizer = make_tokenizer(models.BPE(vocabulary_of(tokens), []), "bpe")
    sequences = [[random.randrange(tokenizer.size) for _ in range(random.randint(1, 3))] for _ in range(3000)]
    [output] = answer(tmp_path / "cases.json", [case(tokenizer, [], sequences)])
    assert output["decoded"] == [tokenizer.decode(ids) for ids in sequences]
    assert output["pieces"] == tokenizer.pieces(range(tokenizer.size))


def test_ties_between_pieces_are_resolved_as_in_python(tmp_path: Path) -> None:
    """Merges in random order, many with equal results; sums of scores that are equal or nearly equal."""
    random = Random(17)
    cases, expected = [], []
    texts = ["".join(random.choices("ab", k=random.randint(1, 24))) for _ in range(300)]
    for number in range(12):
        tokens, merges = ["a", "b"], []
        while len(merges) < 40:
            left, right = random.choices(tokens, k=2)
            if len(left + right) <= 6 and (left, right) not in merges:
                merges.append((left, right))
                tokens = list(dict.fromkeys([*tokens, left + right]))
        random.shuffle(merges)
        vocabulary = vocabulary_of(tokens)
        if number % 2:
            tokenizer = make_tokenizer(models.BPE(vocabulary, merges), "bpe")
        else:
            scores = {token: random.choice((-0.1, -0.2, -0.3, -0.7)) * len(token) for token in vocabulary}
            pieces = [(token, 0.0 if token in SPECIALS else scores[token]) for token in vocabulary]
            tokenizer = make_tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=False), "unigram")
        cases.append(case(tokenizer, texts, []))
        expected.append(tokenizer.encode(texts))
    for asked, wanted, got in zip(cases, expected, answer(tmp_path / "cases.json", cases), strict=True):
        assert got["encoded"] == wanted, asked["kind"]


def test_character_classes_equal_those_of_the_library() -> None:
    """If this fails, the library has a newer Unicode; the message contains the new table for the module."""
    assigned = [*range(0xD800), *range(0xE000, 0x33500), *range(0xE0000, 0xE0200)]  # nothing but "-" elsewhere
    classes = bytearray(b"-" * 0x110000)
    for start in range(0, len(assigned), 50_000):
        part = assigned[start : start + 50_000]
        text = "".join(map(chr, part))
        for name in "LMN":
            split = pre_tokenizers.Split(Regex(rf"\p{{{name}}}+"), "removed", invert=True)
            for _, (first, last) in split.pre_tokenize_str(text):
                for code in part[first:last]:
                    classes[code] = ord(name)
    table = ""
    for name, group in groupby(classes):
        length = len(list(group))
        table += ("" if length == 1 else base36(length)) + chr(name)
    [module_table] = re.findall(r"CHARACTER_RUNS = `([^`]*)`", MODULE.read_text(encoding="utf-8"))
    assert module_table.replace("\n", "") == table


def base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return (base36(number // 36) if number >= 36 else "") + digits[number % 36]


def test_javascript_unit_tests_pass() -> None:
    run_node("--test", JS_TESTS / "tokenizer.test.js")
