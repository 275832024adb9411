from __future__ import annotations

import io
import sys

import pytest

from regard.training.report import Lines, Live, Reporter, duration, make_reporter

EVENTS = [
    {"event": "train", "step": 50, "epoch": 0.5, "loss": 2.5, "lr": 1e-3, "tokens_per_second": 12345.6, "seconds": 9.0},
    {"event": "valid", "step": 50, "epoch": 0.5, "loss": 2.25, "wer": 81.234, "best": True, "seconds": 10.0},
    {"event": "skip", "step": 51, "loss": None, "norm": None},
    {"event": "average", "checkpoints": 3, "loss": 2.0, "wer": 80.0, "best": False, "seconds": 10.0},
    {"event": "end", "step": 99, "reason": "patience", "skipped": 1, "wer": 81.234, "seconds": 75.0},
]


def told(talk: Reporter, stream: io.StringIO) -> str:
    talk.say("choice [not markup] of /a/path")
    for step in (1, 50):
        talk.tick(step, step / 100, float(step))
    for event in EVENTS:
        talk.event(event)
    talk.close()
    return stream.getvalue()


def test_lines() -> None:
    stream = io.StringIO()
    text = told(Lines(stream), stream)
    assert "choice [not markup] of /a/path\n" in text
    assert "step 50 · epoch 0.50 · loss 2.5000 · lr 1.00e-03 · 12,346 tokens/s · 50 s left\n" in text
    assert "validation: loss 2.2500, wer 81.23 · best so far" in text
    assert "step 51 · skipped" in text
    assert "mean of the last 3 checkpoints: loss 2.0000, wer 80.00 · not better, not used" in text
    assert "finished at step 99 after 1 min 15 s: no better for too long" in text


def test_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    talk = make_reporter(stream)
    assert isinstance(talk, Live)
    talk.event(EVENTS[0])
    text = told(talk, stream)
    assert "choice [not markup] of /a/path" in text
    assert "loss 2.500" in text and "12,346 tokens/s" in text and "1 min 39 s left" in text
    assert "validation: loss 2.2500, wer 81.23" in text
    assert isinstance(make_reporter(io.StringIO()), Lines)
    assert isinstance(make_reporter(sys.__stderr__), Lines | Live)


def test_durations() -> None:
    assert [duration(x) for x in (0.4, 59, 60, 3599.6, 7260)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "1 h 00 min",
        "2 h 01 min",
    ]
