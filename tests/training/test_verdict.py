"""Remarks after training: early ends, degenerate outputs, models at chance level."""

from __future__ import annotations

import random
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.backwards import TINY
from kit.decoding import run_of
from regard.data.plain_text import Stream
from regard.data.statistics import OutputLimits, Statistics
from regard.decode.hypothesis import DecodedIds, Hypothesis
from regard.decode.torch_engine import TorchEngine
from regard.recipe import Train, load_recipe
from regard.run import Run
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer
from regard.training import summary
from regard.training.fit import fit
from regard.training.report import Reporter
from regard.training.summary import at_chance, degenerate, no_better_than_frequencies, still_improving


def log(values: list[float], metric: str) -> list[dict[str, Any]]:
    return [{"event": "valid", "step": 10 * (i + 1), metric: value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("wer", [90, 60, 40, 30], True),
        ("wer", [90, 30, 22, 21.5], False),
        ("wer", [90, 30, 20, 25], False),  # no longer improving
        ("bleu", [1, 5, 10, 14], True),
        ("bleu", [10, 20, 28, 29], False),
        ("loss", [4.0, 3.0, 2.5, 2.0], True),
        ("wer", [50], False),
        ("wer", [0, 0, 0, 0], False),
        ("bleu", [0, 0, 0, 0], False),
    ],
)
def test_metric_that_still_improves_at_the_end_causes_a_remark(
    metric: str, values: list[float], expected: bool
) -> None:
    remark = still_improving(log(values, metric), Train(metric=metric, minutes=5))  # type: ignore[arg-type]
    assert (remark is not None) == expected
    if remark:
        assert remark.startswith(metric) and "--resume --minutes 10" in remark


def output(text: str, *flags: str) -> Hypothesis:
    return Hypothesis(text, 0.0, (), (), 0.0, flags=dict.fromkeys(flags, "reason"))


def test_repetitive_and_identical_outputs_cause_a_remark() -> None:
    references = [f"word {i}" for i in range(10)]
    good = [output(text) for text in references]
    assert degenerate(good, references) is None
    assert degenerate([], []) is None
    loops = [output("a a a a", "repetition") for _ in range(4)]
    assert "4 of 10 outputs repeat tokens" in str(degenerate(loops + good[4:], references))
    assert degenerate(loops[:2] + good[2:], references) is None  # a few are tolerated
    same = [output("word 1") for _ in range(6)]
    assert "6 of 10 outputs are 'word 1'" in str(degenerate(same + good[6:], references))
    assert degenerate(same + good[6:], ["word 1"] * 6 + references[6:]) is None  # the references repeat as well
    assert degenerate([output("x", "low_score") for _ in range(3)], ["x"] * 3) is None


def test_references_cause_no_remark() -> None:
    references = [unicodedata.name(chr(code)) for code in range(0x21, 0x7F)]
    codec = Codec(Tokenizer.train("char", map(chr, range(0x21, 0x7F))), Tokenizer.train("char", references))
    run = replace(run_of("transformer-tiny"), codec=codec)
    ratios = sorted(map(len, references))
    limits = OutputLimits(max_ratio=1.5 * ratios[-1], min_ratio=ratios[0] / 1.5)
    rows = codec.encode_target(references)

    def remark(run: Run) -> str | None:
        engine = TorchEngine(run)
        inputs = engine.prepare([chr(code) for code in range(0x21, 0x7F)])
        outputs = engine.finish(inputs, [[DecodedIds(tuple(ids), (), 0.0)] for ids in rows])
        return degenerate([best for best, *_ in outputs], references)

    assert remark(replace(run, statistics=Statistics(limits=limits))) is None
    assert "unusual length" in str(remark(run))


def test_classifier_at_chance_level_causes_a_remark() -> None:
    labels = ["a"] * 6 + ["b"] * 4
    assert "always answering 'a' is correct in 60.0 %" in str(at_chance(61.0, labels))
    assert "hardly better" in str(at_chance(10.0, labels))
    assert at_chance(70.0, labels) is None
    assert at_chance(100.0, ["a"] * 5) is None


def test_language_model_no_better_than_token_frequencies_causes_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = np.asarray([0.5, 0.25, 0.125, 0.125])
    entropy = float(-(shares * np.log(shares)).sum())
    ids = np.random.default_rng(1).choice(4, 40_000, p=shares).astype(np.uint16)
    train, valid = Stream(ids[:30_000], 30_000), Stream(ids[30_000:], 10_000)
    remark = no_better_than_frequencies(entropy, train, valid)
    assert f"loss {entropy:.2f}, with token frequencies alone {entropy:.2f}" in str(remark)
    assert no_better_than_frequencies(2 * entropy, train, valid) is not None
    assert no_better_than_frequencies(0.9 * entropy, train, valid) is None
    monkeypatch.setattr(summary, "SAMPLE_WINDOW_TOKENS", 100)  # long texts are counted in windows
    assert no_better_than_frequencies(entropy, train, valid) is not None
    assert no_better_than_frequencies(0.9 * entropy, train, valid) is None
    one = Stream(np.zeros(50, np.uint16), 50)
    assert no_better_than_frequencies(0.001, one, one) is None  # the entropy is zero: no model is better
    unseen = Stream(np.asarray([9, 9], np.uint16), 2)
    assert no_better_than_frequencies(1.0, one, unseen) is None


def test_only_unpredictable_text_causes_a_remark_after_training(tmp_path: Path) -> None:
    """Random letters cannot be predicted; letters in a fixed order can."""
    draw = random.Random(3)
    remarks = {}
    train = {"steps": 60, "lr": 1e-2, "batch_tokens": 256, "context": 16, "workers": 1}
    for name, text in (("noise", "".join(draw.choices("abcdefgh", k=4000))), ("order", "abcdefgh" * 500)):
        (tmp_path / f"{name}.txt").write_text(text)
        tables = {"task": "lm", "preset": "llama-tiny", "model": {"decoder": {**TINY, "kv_heads": 2}}, "train": train}
        tables |= {"data": {"train": str(tmp_path / f"{name}.txt")}, "text": {"source_tokens": "char"}}
        reporter = CollectingReporter()
        fit(load_recipe(tables), tmp_path / name, reporter=reporter)
        remarks[name] = [line for line in reporter.lines if "hardly better than the frequencies of tokens" in line]
    assert len(remarks["noise"]) == 1 and not remarks["order"]


class CollectingReporter(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)
