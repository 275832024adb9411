"""Streaming gives piece by piece what `generate` gives at once."""

from __future__ import annotations

import pytest
import torch
from decode_kit import LETTERS, NAMES, run_of, sources

from regard.decode.generate import generate, stream
from regard.decode.options import Options
from regard.decode.request import Request
from regard.errors import UserError


@pytest.mark.parametrize("scheme", ["char", "space", "word", "byte", "bpe:290", "nfd"])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_join_to_the_output(name: str, scheme: str) -> None:
    run = run_of(name, 1, scheme, "eéèaà가각나" if scheme == "nfd" else LETTERS)
    for settings in ({}, {"sample": True, "top_p": 0.9}, {"no_repeat_ngram": 2}):
        options = Options.of(max_length=12, **settings)
        for text in sources(1, 2):
            (whole,) = next(generate(run, [text], options))
            pieces = list(stream(run, text, options))
            assert "".join(piece.text for piece in pieces) == whole.text
            assert tuple(piece.id for piece in pieces) == whole.ids
            assert tuple(piece.token for piece in pieces) == whole.tokens
            assert [piece.score for piece in pieces] == pytest.approx(whole.token_scores, abs=1e-5)


def test_it_comes_as_it_is_decided() -> None:
    run, calls = run_of("rnn-luong", 1), []
    handle = run.model.output.register_forward_hook(lambda *_: calls.append(1))
    try:
        pieces = stream(run, "abc", Options(max_length=9, min_length=9))
        for count in range(1, 4):
            next(pieces)
            assert len(calls) == count and not torch.is_inference_mode_enabled()
    finally:
        handle.remove()


def test_constraints_are_kept() -> None:
    request = Request("fade", prefix="cc", require=("bad",), forbid=("e",))
    for options in (Options(max_length=12), Options(max_length=12, sample=True)):
        text = "".join(piece.text for piece in stream(run_of("transformer-tiny", 2), request, options))
        assert text.startswith("cc") and "bad" in text and "e" not in text


def test_what_cannot_stream() -> None:
    run = run_of("rnn-luong", 1)
    assert list(stream(run, "")) == []
    for settings in ({"beam": 2}, {"mbr": 3}, {"alternatives": 2}):
        with pytest.raises(UserError, match="stream"):
            next(stream(run, "abc", Options.of(**settings)))
