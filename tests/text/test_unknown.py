"""The report of unknown tokens counts all and names the most frequent."""

from __future__ import annotations

from regard.text import codec as module
from regard.text.codec import UnknownTokens
from regard.text.tokenizer import Tokenizer


def test_counts_add_up(monkeypatch) -> None:
    monkeypatch.setattr(module, "DISTINCT", 2)
    tokenizer = Tokenizer.train("char", ["ab"])
    texts = ["axb", "ab", "yxz", "x"]
    report = UnknownTokens()
    assert (bool(report), report.summary()) == (False, "")
    report.add(tokenizer, texts, tokenizer.encode(texts))
    assert (report.total, report.texts) == (5, 3)
    assert report.counts == {"x": 3, "y": 1}  # z is one too many to be kept, but counted


def test_the_summary_is_short_and_tells_look_alikes_apart() -> None:
    report = UnknownTokens()
    report.count(["\u0430", "\u0430", *"bcdefghij", "w" * 100])
    told = report.summary()
    assert told.startswith("12 unknown tokens in 1 line: 'а' (U+0430) 2x, 'b' 1x, ")
    assert told.endswith(" and 3 more")
    assert len(told) < 200
    assert report.summary(1, what="label").startswith("12 unknown labels in 1 line: ")
