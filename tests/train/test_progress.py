from __future__ import annotations

import math

from regard.training.checkpoint import Best, Window, better


def best(metric: str, value: float, loss: float = 1.0) -> Best:
    return Best(step=1, value=value, scores={"loss": loss, metric: value})


def test_which_scores_are_better() -> None:
    assert better("loss", {"loss": 2.0}, None)
    assert better("loss", {"loss": 0.9}, best("loss", 1.0, 1.0))
    assert better("wer", {"loss": 9.0, "wer": 9.0}, best("wer", 10.0))
    assert not better("wer", {"loss": 0.1, "wer": 11.0}, best("wer", 10.0))
    assert better("bleu", {"loss": 9.0, "bleu": 11.0}, best("bleu", 10.0))
    assert better("bleu", {"loss": 0.9, "bleu": 10.0}, best("bleu", 10.0))
    assert not better("bleu", {"loss": 1.0, "bleu": 10.0}, best("bleu", 10.0))
    assert not better("loss", {"loss": math.nan}, None)


def test_means_of_a_window() -> None:
    window = Window(steps=2, examples=10, tokens=40, symbols=100, nll=20.0, smoothed=30.0, norm=3.0)
    means = window.means(4.0)
    assert means == {
        "loss": 0.5,
        "objective": 0.75,
        "norm": 1.5,
        "tokens_per_second": 25.0,
        "examples_per_second": 2.5,
    }
