"""Streaming yields the output of `generate` in pieces."""

from __future__ import annotations

import pytest
import torch

from kit.decoding import LETTERS, NAMES, run_of, sources
from regard.answers import Answerer
from regard.decode.request import Options, Request
from regard.decode.torch_engine import generate
from regard.errors import UserError


@pytest.mark.parametrize("scheme", ["char", "space", "word", "byte", "bpe:290", "nfd"])
@pytest.mark.parametrize("name", NAMES)
def test_streamed_pieces_join_to_the_output(name: str, scheme: str) -> None:
    run = run_of(name, 1, scheme, "eéèaà가각나" if scheme == "nfd" else LETTERS)
    for settings in ({}, {"sample": True, "top_p": 0.9}, {"no_repeat_ngram": 2}):
        options = Options.of(max_length=12, **settings)
        for text in sources(1, 2):
            (whole,) = next(generate(run, [text], options))
            pieces = list(Answerer([run], options).stream(text))
            assert "".join(piece.text for piece in pieces) == whole.text
            assert tuple(piece.id for piece in pieces) == whole.ids
            assert tuple(piece.token for piece in pieces) == whole.tokens
            assert [piece.score for piece in pieces] == pytest.approx(whole.token_scores, abs=1e-5)


def test_pieces_are_yielded_during_the_search() -> None:
    run = run_of("rnn-luong", 1)
    calls = []
    handle = run.model.output.register_forward_hook(lambda *_: calls.append(1))
    try:
        pieces = Answerer([run], Options(max_length=9, min_length=9)).stream("abc")
        for count in range(1, 4):
            next(pieces)
            assert len(calls) == count and not torch.is_inference_mode_enabled()
    finally:
        handle.remove()


@pytest.mark.parametrize("scheme", ["char", "nfd"])
def test_constraints_are_satisfied(scheme: str) -> None:
    run = run_of("transformer-tiny", 2, scheme, "fadebcé" if scheme == "nfd" else LETTERS)
    request = Request("fade", prefix="cc", require=("bad",), forbid=("e",))
    for settings in ({}, {"sample": True}, {"top_tokens": 2}, {"sample": True, "top_tokens": 2, "alignment": True}):
        options = Options.of(max_length=12, **settings)
        pieces = Answerer([run], options).stream(request)
        piece_list = list(pieces)
        text = "".join(piece.text for piece in piece_list)
        assert text.startswith("cc") and "bad" in text and "e" not in text
        ((whole, *_),) = generate(run, [request], options)
        assert pieces.hypothesis is not None and text == whole.text == pieces.hypothesis.text
        assert pieces.hypothesis.flags == whole.flags and pieces.hypothesis.ids == whole.ids
        assert (pieces.hypothesis.alignment is None) == (whole.alignment is None)
        for piece, top in zip(piece_list, whole.top_tokens, strict=bool(whole.top_tokens)):
            assert [x for _, x in piece.top_tokens] == pytest.approx([x for _, x in top], abs=1e-5)


def test_close_stops_decoding() -> None:
    run = run_of("rnn-luong", 1)
    calls = []
    handle = run.model.output.register_forward_hook(lambda *_: calls.append(1))
    try:
        pieces = Answerer([run], Options(max_length=9, min_length=9)).stream("abc")
        next(pieces)
        pieces.close()
        assert list(pieces) == [] and pieces.hypothesis is None and len(calls) == 1
    finally:
        handle.remove()


def test_stream_without_an_allowed_token_is_empty_and_flagged() -> None:
    options = Options(forbid=tuple("abcdef"), min_length=3, max_length=5)
    pieces = Answerer([run_of("rnn-luong", 1)], options).stream("abc")
    assert list(pieces) == [] and pieces.hypothesis is not None and "unsatisfied" in pieces.hypothesis.flags


def test_options_that_cannot_stream_are_refused() -> None:
    run = run_of("rnn-luong", 1)
    assert list(Answerer([run]).stream("")) == []
    for settings in ({"beam": 2}, {"mbr": 3}, {"alternatives": 2}):
        with pytest.raises(UserError, match="stream"):
            next(Answerer([run], Options.of(**settings)).stream("abc"))
