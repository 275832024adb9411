"""Generating from lines: order, limited read-ahead, and unusual input."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kit.decoding import NAMES, blank, lesson, run_of, sources, tokenizer, trained
from regard.batch import by_length, windows
from regard.decode.request import Options, Request
from regard.decode.torch_engine import TorchEngine, generate, score
from regard.errors import UserError
from regard.model import Model
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec, Example


@pytest.mark.parametrize("name", NAMES)
def test_outputs_of_a_trained_model_are_correct_and_in_order(name: str) -> None:
    texts = sources(3, 40, 6)
    for options in (Options(batch_tokens=50, window=7), Options(beam=4)):
        rows = list(generate(trained(name), texts, options))
        assert sum(row[0].text == lesson(text) for text, row in zip(texts, rows, strict=True)) > 15


def test_generate_reads_one_window_ahead() -> None:
    line_numbers = []

    def lines() -> Iterator[str]:
        for i in range(10**9):
            line_numbers.append(i)
            yield "abc"

    answers = generate(run_of("rnn-luong", 1), lines(), Options(window=5, max_length=3))
    for _ in range(7):
        next(answers)
    assert len(line_numbers) == 10


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 100))
def test_batches_contain_every_index_once_and_respect_the_token_budget(lengths: list[int], budget: int) -> None:
    batches = list(by_length(lengths, budget))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= budget for b in batches)


@given(st.lists(st.integers()), st.integers(1, 9))
def test_windows_partition_the_items_in_order(items: list[int], size: int) -> None:
    parts = list(windows(iter(items), size))
    assert [x for part in parts for x in part] == items and all(len(part) == size for part in parts[:-1])


@pytest.mark.parametrize(
    "settings", [{}, {"beam": 3, "nbest": 3}, {"mbr": 4}, {"alternatives": 2}, {"alignment": True}]
)
def test_empty_lines_give_empty_outputs_without_a_forward_pass(settings: dict[str, object]) -> None:
    run = run_of("transformer-tiny", 1)
    rows = list(generate(run, ["", "abc", "  ", "\t"], Options.of(max_length=9, **settings)))
    for i in (0, 2, 3):
        (h,) = rows[i]
        assert (h.text, h.score, h.ids, h.token_scores) == ("", 0.0, (), ()) and "empty" in h.flags
    assert "empty" not in rows[1][0].flags
    calls = []
    handle = run.model.register_forward_hook(lambda *_: calls.append(1))
    list(generate(run, ["", ""], Options()))
    handle.remove()
    assert not calls and list(generate(run, [])) == []


@pytest.mark.parametrize("name", NAMES)
def test_an_overlong_source_is_flagged_without_a_forward_pass(name: str) -> None:
    long = "abcdef" * 17_000
    (h,), (other,) = generate(run_of(name, 1), [long, "abc"], Options(max_length=5))
    assert h.text == "" and "102000 tokens, more than 2048 (max_source)" in h.flags["too_long"]
    assert "too_long" not in other.flags
    one, two, three = score(run_of(name, 1), [(long, "abc"), ("abc", long), ("abc", "cab")])
    assert "source has 102000" in one.flags["too_long"] and "target has 102000" in two.flags["too_long"]
    assert not three.flags and three.score < 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=4), st.sampled_from([{}, {"beam": 2}, {"sample": True}]))
def test_any_text_gives_json_serialisable_outputs(texts: list[str], strategy: dict[str, object]) -> None:
    """The texts contain unknown tokens, control characters and other scripts."""
    rows = list(generate(run_of("rnn-bahdanau", 1), texts, Options.of(max_length=4, **strategy)))
    assert len(rows) == len(texts)
    for row in rows:
        for h in row:
            json.dumps(h.as_dict(), allow_nan=False)


def test_learned_positions_limit_source_and_target() -> None:
    codec = Codec(tokenizer("char"), tokenizer("char"))
    stack = {"layers": 1, "width": 16, "ff": 16, "heads": 2, "position": "learned", "max_length": 9}
    vocabs = {"source_vocab": codec.source_vocab, "target_vocab": codec.target_vocab}
    config = preset("transformer-tiny", **vocabs, changes={"encoder": stack, "decoder": stack})
    torch.manual_seed(0)
    run = Run(config, codec, Model(config).eval(), Path("here"))
    (fits,), (too_long,) = generate(run, ["abcdabcd", "abcdabcda"], Options(min_length=8))
    assert len(fits.ids) == 9 and "9 tokens, more than the 8 that fit" in too_long.flags["too_long"]
    pairs = [("abcdabcd", "abcdabcd"), ("abcdabcda", "abc"), ("abc", "abcdabcda"), ("abc", "fed")]
    scored = list(score(run, pairs))
    (single,) = score(run, pairs[-1:])
    assert [bool(item.flags) for item in scored] == [False, True, True, False] and scored[3].score == single.score
    assert math.isnan(scored[1].score) and scored[1].as_dict()["score"] is None
    for item, side in zip(scored[1:3], ("source", "target"), strict=True):
        assert f"the {side} has 9 tokens, more than the 8 that fit" in item.as_dict()["flags"]["too_long"]
    with pytest.raises(UserError, match="learned positions"):
        list(generate(run, ["abc"], Options(min_length=9)))


def test_equivalent_input_types_give_equal_outputs() -> None:
    codec = Codec(tokenizer("char"), tokenizer("char"), features=("PL", "SG"))
    model = blank("rnn-luong", 1, codec)
    run = Run(model.config, codec, model, Path("here"))
    decoder = TorchEngine(run, Options(max_length=5))
    plain, example, featured, request = decoder(
        ["abc", Example("abc", "ignored"), Example("abc", features="PL"), Request("abc", features="PL")]
    )
    assert plain == example and featured == request and plain[0].score != featured[0].score


def test_special_tokens_are_never_produced() -> None:
    codec = Codec(shared := tokenizer("char"), shared, features=("PL", "SG"))
    model = blank("transformer-tiny", 1, codec)
    with torch.no_grad():  # make the special tokens the most probable
        model.output.weight.normal_()
        model.decoder.norm.bias += 20 * model.output.weight[[0, 1, 2, -1]].sum(0)
    run = Run(model.config, codec, model, Path("here"))
    for strategy in ({}, {"beam": 3}, {"sample": True}):
        for h, *_ in generate(run, sources(1, 5), Options.of(max_length=6, **strategy)):
            assert not {0, 1, 2, codec.target.size, codec.target.size + 1} & set(h.ids)
    produced_ids = {i for row in generate(run, sources(1, 5), Options(max_length=6, unknown=True)) for i in row[0].ids}
    assert 1 in produced_ids


def test_nan_weights_are_an_error() -> None:
    run = run_of("transformer-tiny", 1)
    model = Model(run.config).eval()
    model.output.weight.data[5, 0] = float("nan")
    for strategy in ({}, {"beam": 2}, {"sample": True}):
        with pytest.raises(UserError, match="not numbers"):
            list(generate(Run(run.config, run.codec, model, run.path), ["abc"], Options.of(**strategy)))


def test_a_model_in_training_is_refused() -> None:
    run = run_of("transformer-tiny", 1)
    with pytest.raises(ValueError, match="training mode"):
        list(generate(Run(run.config, run.codec, Model(run.config).train(), run.path), ["a"]))
