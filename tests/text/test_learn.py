"""`choose` selects a suitable tokenisation scheme and gives the reason with numbers."""

from __future__ import annotations

import random
import unicodedata

import pytest

from regard.text.learn import choose

RANDOM = random.Random(1)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(count: int, shortest: int, longest: int, alphabet: str = LETTERS) -> list[str]:
    return ["".join(RANDOM.choices(alphabet, k=RANDOM.randint(shortest, longest))) for _ in range(count)]


def lines(count: int, vocabulary: list[str], shortest: int, longest: int) -> list[str]:
    return [" ".join(RANDOM.choices(vocabulary, k=RANDOM.randint(shortest, longest))) for _ in range(count)]


PHONES = ["a", "aː", "b", "d", "t͡ʃ", "e", "ɡ", "ŋ", "o", "r", "s", "HH", "AH0"]
NATURAL = words(4000, 3, 9)
HAN = "".join(chr(0x4E00 + index) for index in range(2000))


@pytest.mark.parametrize(
    ("kind", "sample"),
    [
        ("char", words(500, 3, 12)),
        ("char", [f"{word} {word}" if index % 3 else word for index, word in enumerate(words(500, 3, 9))]),  # lemmas
        ("char", words(300, 100, 400, "ACGT")),
        ("char", words(500, 1, 4, HAN)),
        ("space", lines(500, PHONES, 1, 12)),
        ("space", lines(20, PHONES, 3, 8)),
        ("space", ["a b c", "b c", "c a"]),
        ("space", lines(500, ["I_JUMP", "I_TURN_LEFT", "I_WALK"], 2, 20)),
        ("bpe", lines(500, NATURAL, 5, 25)),
        ("bpe", words(500, 15, 40, HAN)),
        ("bpe", lines(500, NATURAL, 3, 8)),
    ],
)
def test_choose_selects_a_suitable_scheme(kind: str, sample: list[str]) -> None:
    scheme, reason = choose(sample)
    assert scheme.split(":")[0] == kind, reason


def test_more_lines_give_a_larger_vocabulary() -> None:
    sample = lines(200, NATURAL, 5, 25)
    assert choose(sample, 29_000).scheme == "bpe:8000"
    sizes = [int(choose(sample, count).scheme[4:]) for count in (1, 10**3, 10**4, 10**5, 10**6, 10**7)]
    assert sizes == sorted(sizes)
    assert "29,000 lines" in str(choose(sample, 29_000))


def test_reason_contains_counts() -> None:
    choice = choose(lines(500, ["aa", "b"], 3, 5))
    assert choice.scheme == "space" and choice.reason.startswith("2 distinct tokens separated by spaces, 1.")


def test_unusual_samples_have_a_scheme() -> None:
    for sample in ([""], [" "], ["a"], ["\0"], []):
        assert choose(sample).reason


def test_characters_with_few_distinct_parts_are_decomposed() -> None:
    syllables = [chr(0xAC00 + 37 * i) for i in range(300)]
    assert choose(["".join(syllables[i : i + 3]) for i in range(290)]).scheme == "nfd"
    assert choose([unicodedata.normalize("NFD", "".join(syllables[i : i + 3])) for i in range(290)]).scheme == "char"
