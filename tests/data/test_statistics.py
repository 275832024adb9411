"""Statistics of the data: limits that references keep, characters, and examples that are stored in a run."""

from __future__ import annotations

import gzip
import random
import shutil
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kit.backwards import TINY, write_pairs
from regard.data.prepare import prepare
from regard.data.statistics import MAX_CHARACTERS, STATISTICS, OutputLimits, Statistics, measure
from regard.decode.hypothesis import DEGENERATE, output_flags
from regard.errors import UserError
from regard.recipe import load_recipe
from regard.run import Run, accept_run, verify_run
from regard.tasks import TASKS
from regard.text.codec import Codec, Example
from regard.training.fit import fit

SMALL = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
Pair = tuple[str, str]


def in_words(number: int) -> str:
    if number < 20:
        return SMALL[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{SMALL[number % 10]}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    return f"{in_words(number // unit)} {name}" + (f" {in_words(number % unit)}" if number % unit else "")


def numbers() -> list[Pair]:
    return [(str(number), in_words(number)) for number in random.Random(1).sample(range(1_000_000), 1500)]


def digits() -> list[Pair]:
    """Digits that are read one by one, so that equal ones are a loop."""
    draw = random.Random(4)
    words = ["".join(draw.choice("01") * draw.randint(1, 4) for _ in range(3)) for _ in range(1500)]
    return [(word, " ".join(SMALL[int(digit)] for digit in word)) for word in words]


def names() -> list[Pair]:
    named = [(chr(code), unicodedata.name(chr(code), "")) for code in range(0x21, 0x2000)]
    return random.Random(2).sample([pair for pair in named if pair[1] and not pair[0].isspace()], 1500)


def words() -> list[Pair]:
    draw = random.Random(3)
    sources = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 14))) for _ in range(1500)]
    return [(word, word[::-1].upper()) for word in sources]


def prepared(path: Path, pairs: list[Pair], **data: Any) -> Any:
    (path / "train.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    text = {"source_tokens": "char", "target_tokens": "char"}
    recipe = load_recipe({"text": text, "data": {"train": str(path / "train.tsv"), **data}})
    return prepare(recipe, path / "data")


def flagged(codec: Codec, limits: OutputLimits, pairs: list[Pair]) -> int:
    """The number of degenerate targets."""
    sources = codec.source.encode([source for source, _ in pairs])
    targets = codec.target.encode([target for _, target in pairs])
    flags = [output_flags(target, len(source), (), limits) for source, target in zip(sources, targets, strict=True)]
    return sum(any(name in DEGENERATE for name in each) for each in flags)


@pytest.mark.parametrize("make", [numbers, digits, names, words])
def test_references_keep_the_limits_and_degenerate_outputs_do_not(tmp_path: Path, make: Any) -> None:
    pairs = make()
    data = prepared(tmp_path, pairs[:1200])
    statistics = measure(TASKS["pairs"], data)
    assert statistics is not None
    limits = statistics.limits
    references = pairs[1200:]
    assert flagged(data.codec, limits, references) == 0
    if make is not words:
        assert flagged(data.codec, OutputLimits(), references) > 100
    empty = [(source, "") for source, _ in references]
    loops = [(source, target[-3:] * 60) for source, target in references]
    longest = max(len(target) / len(source) for source, target in pairs)
    letters = "".join(data.codec.target._tokens[5:])  # without repetitions
    long = [(s, (letters * 999)[: int(2 * longest * len(s)) + 20]) for s, _ in references]
    for outputs in (empty, loops, long):
        assert flagged(data.codec, limits, outputs) == len(references)


def test_a_few_wrong_pairs_do_not_widen_the_limits(tmp_path: Path) -> None:
    clean = [("abcdefghijkl"[: 3 + i % 9], "ABCDEFGHIJKL"[: 3 + i % 9]) for i in range(3000)]
    (tmp_path / "clean").mkdir()
    (tmp_path / "noisy").mkdir()
    noise = [("a", "-" * 400), ("abcdefghijkl" * 20, "A")]
    one, two = (
        measure(TASKS["pairs"], prepared(tmp_path / name, rows))
        for name, rows in (("clean", clean), ("noisy", [*clean[:1500], *noise, *clean[1500:]]))
    )
    assert one is not None and two is not None
    assert one.limits == two.limits


def test_characters_and_examples_are_those_of_the_data(tmp_path: Path) -> None:
    pairs = [*words(), ("x" * 14, "Y" * 300)]
    data = prepared(tmp_path, pairs)
    statistics = measure(TASKS["pairs"], data)
    assert statistics is not None
    counts = Counter("".join(data.codec.source.decode(data.train.source(row)) for row in range(len(data.train))))
    assert dict(statistics.source_characters) == dict(counts)
    assert list(statistics.source_characters.values()) == sorted(counts.values(), reverse=True)
    assert set(statistics.target_characters) <= {*"ABCDEFGHY"}
    assert len(set(statistics.examples)) == 3 and set(statistics.examples) <= set(data.valid_examples)
    assert all(6 <= len(example.source) <= 9 for example in statistics.examples)
    many = [(chr(0x4E00 + i), chr(0xAC00 + i)) for i in range(900)]
    shutil.rmtree(tmp_path / "data")
    ideographs = measure(TASKS["pairs"], prepared(tmp_path, many))
    assert ideographs is not None and len(ideographs.source_characters) == MAX_CHARACTERS


def test_statistics_do_not_depend_on_the_number_of_processes_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.data.encode.BLOCK_BYTES", 4000)
    monkeypatch.setattr("regard.data.encode.MIN_PARALLEL_BYTES", 0)
    train = write_pairs(tmp_path / "train.tsv", 2500)
    recipe = load_recipe({"data": {"train": str(train)}})
    cached = load_recipe({"data": {"train": str(train), "cache": str(tmp_path / "cache")}})
    results = [
        measure(TASKS["pairs"], prepare(order, tmp_path / name, processes=processes))
        for name, order, processes in (("a", recipe, 1), ("b", recipe, 3), ("c", cached, 1), ("d", cached, 1))
    ]
    assert results[0] is not None and results == results[:1] * 4


def tiny(train: Path, **settings: Any) -> Any:
    tables = {"preset": "transformer-tiny", "data": {"train": str(train)}, "model": {"encoder": TINY, "decoder": TINY}}
    return load_recipe({**tables, "train": {"steps": 2, "workers": 1, **settings}})


def test_a_run_has_the_statistics_and_works_without_them(tmp_path: Path) -> None:
    train = write_pairs(tmp_path / "train.tsv", 300)
    fit(tiny(train), tmp_path / "run")
    run = Run.load(tmp_path / "run", verify=True)
    statistics = run.statistics
    assert statistics.examples and set(statistics.source_characters) == {*"abcdefg"}
    assert all(example.target == " ".join(example.source[::-1]) for example in statistics.examples)
    run.save(tmp_path / "copy")
    assert Run.load(tmp_path / "copy").statistics == statistics
    (tmp_path / "run" / STATISTICS).write_text("{}")
    with pytest.raises(UserError, match=r"statistics\.json: has changed"):
        Run.load(tmp_path / "run")
    (tmp_path / "run" / STATISTICS).unlink()
    assert Run.load(tmp_path / "run").statistics == Statistics()
    accept_run(tmp_path / "run")
    assert "as saved" in verify_run(tmp_path / "run")
    fit(tiny(train, steps=4), tmp_path / "run", resume=True)
    assert Run.load(tmp_path / "run").statistics == Statistics()  # stays deleted


def test_a_resumed_run_keeps_its_statistics(tmp_path: Path) -> None:
    train = write_pairs(tmp_path / "train.tsv", 300)
    fit(tiny(train), tmp_path / "run")
    before = (tmp_path / "run" / STATISTICS).read_bytes()
    fit(tiny(train, steps=4), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / STATISTICS).read_bytes() == before


@pytest.mark.parametrize("task", ["lm", "masked", "span"])
def test_examples_of_plain_text_are_lines_or_their_beginnings(tmp_path: Path, task: str) -> None:
    lines = [f"the {'quick ' * (1 + i % 4)}fox {i}" for i in range(400)]
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    recipe = load_recipe({"task": task, "data": {"train": str(tmp_path / "t.txt.gz")}})
    statistics = measure(TASKS[task], prepare(recipe, tmp_path / "data"))
    assert statistics is not None and 2 <= len(set(statistics.examples)) <= 3
    for example in statistics.examples:
        whole = [line for line in lines if line.startswith(example.source)]
        assert whole and (example.source in whole) == (task != "lm")
    assert {*"the quick fox"} <= set(statistics.source_characters)


def test_examples_have_features_and_labels(tmp_path: Path) -> None:
    draw = random.Random(5)
    rows = [(w, f"V;{draw.choice('AB')}", w.upper()) for w, _ in words()]
    (tmp_path / "f.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    columns = {"columns": ("source", "features", "target")}
    recipe = load_recipe({"data": {"train": str(tmp_path / "f.tsv"), **columns}})
    statistics = measure(TASKS["pairs"], prepare(recipe, tmp_path / "data"))
    assert statistics is not None
    assert all(e.features in ("V;A", "V;B") and e.target == e.source.upper() for e in statistics.examples)
    assert set(statistics.source_characters) == {*"abcdefgh"}
    (tmp_path / "l.tsv").write_text("".join(f"{w}\t{draw.choice(['x', 'y'])}\n" for w, _ in words()))
    recipe = load_recipe({"task": "classify", "data": {"train": str(tmp_path / "l.tsv")}})
    labelled = measure(TASKS["classify"], prepare(recipe, tmp_path / "labels"))
    assert labelled is not None and labelled.limits == OutputLimits()
    assert sorted(str(example.target) for example in labelled.examples) == ["x", "y"]


def test_examples_of_long_documents_are_left_out() -> None:
    from regard.data.statistics import _typical

    assert _typical([Example("x" * 501, "y"), Example("x", "y" * 501), Example("", "y")]) == ()
    assert _typical([]) == ()
