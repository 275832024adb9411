from __future__ import annotations

from typing import Any

import pytest

from regard.decode.hypothesis import Hypothesis
from regard.recipe import Train
from regard.training.verdict import at_chance, degenerate, still_improving


def log(values: list[float], metric: str) -> list[dict[str, Any]]:
    return [{"event": "valid", "step": 10 * (i + 1), metric: value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("metric", "values", "told"),
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
def test_a_run_that_ends_too_early_is_told(metric: str, values: list[float], told: bool) -> None:
    remark = still_improving(log(values, metric), Train(metric=metric, minutes=5))  # type: ignore[arg-type]
    assert (remark is not None) == told
    if remark:
        assert remark.startswith(metric) and "--resume --minutes 10" in remark


def output(text: str, *flags: str) -> Hypothesis:
    return Hypothesis(text, 0.0, (), (), 0.0, flags=dict.fromkeys(flags, "reason"))


def test_outputs_that_degenerate() -> None:
    references = [f"word {i}" for i in range(10)]
    good = [output(text) for text in references]
    assert degenerate(good, references) is None
    assert degenerate([], []) is None
    loops = [output("a a a a", "repetition") for _ in range(4)]
    assert "4 of 10 outputs repeat tokens" in str(degenerate(loops + good[4:], references))
    assert degenerate(loops[:2] + good[2:], references) is None  # a few may happen
    same = [output("word 1") for _ in range(6)]
    assert "6 of 10 outputs are 'word 1'" in str(degenerate(same + good[6:], references))
    assert degenerate(same + good[6:], ["word 1"] * 6 + references[6:]) is None  # as the references are
    assert degenerate([output("x", "low_score") for _ in range(3)], ["x"] * 3) is None


def test_a_classifier_at_chance() -> None:
    labels = ["a"] * 6 + ["b"] * 4
    assert "'a' to everything is right in 60.0 %" in str(at_chance(61.0, labels))
    assert "hardly better" in str(at_chance(10.0, labels))
    assert at_chance(70.0, labels) is None
    assert at_chance(100.0, ["a"] * 5) is None
