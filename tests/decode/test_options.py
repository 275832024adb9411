"""Invalid options are refused by name, and unsatisfiable constraints are refused or flagged."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.decoding import blank, run_of, tokenizer
from regard.decode.request import Options, Request
from regard.decode.torch_engine import TorchEngine, generate
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

NAN = float("nan")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam": 0}, "beam: input should be greater than or equal to 1, not 0"),
        ({"beam": -3}, "beam"),
        ({"beam": 10**9}, "beam: input should be less than or equal to 10000"),
        ({"beam": 2.5}, "beam"),
        ({"nbest": 0}, "nbest"),
        ({"nbest": 3}, "nbest 3 needs a beam at least as wide, not 1"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 1}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"length_penalty": NAN}, "length_penalty"),
        ({"length_penalty": -1}, "length_penalty"),
        ({"coverage_penalty": -1}, "coverage_penalty"),
        ({"repetition_penalty": 0.5}, "repetition_penalty"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram"),
        ({"beam": 4, "groups": 3}, "beam 4 is not a multiple of groups 3"),
        ({"sample": True, "beam": 2}, "sample and beam 2 are two strategies"),
        ({"mbr": 9, "beam": 4}, "mbr 9 needs a beam"),
        ({"mbr": 2, "nbest": 3}, "nbest 3 is more than the 2 candidates of mbr"),
        ({"mbr": -1}, "mbr"),
        ({"utility": "rouge"}, "utility"),
        ({"alternatives": 3, "mbr": 2}, "alternatives and mbr"),
        ({"alternatives": 3, "nbest": 2, "beam": 2}, "alternatives"),
        ({"alternatives_at": 3}, "alternatives_at needs alternatives"),
        ({"min_length": 5, "max_length": 3}, "min_length 5 is more than max_length 3"),
        ({"min_ratio": 2.0, "max_ratio": 1.0}, "min_ratio 2.0 is more than max_ratio 1.0"),
        ({"max_length": 0}, "max_length"),
        ({"require": ("",)}, "require"),
        ({"temperature": 0.5}, "temperature needs sample, or mbr without a beam"),
        ({"top_k": 3, "mbr": 2, "beam": 2}, "top_k needs sample"),
        ({"top_p": 0.5, "beam": 2}, "top_p needs sample"),
        ({"min_p": 0.5}, "min_p needs sample"),
        ({"utility": "edit", "beam": 2}, "utility needs mbr"),
        ({"diversity": 1.0, "beam": 2}, "diversity needs groups"),
        ({"exact": True}, "exact needs a beam"),
        ({"coverage_penalty": 1.0}, "coverage_penalty needs a beam"),
        ({"alignment_heads": [[0, 0]]}, "alignment_heads needs alignment or coverage_penalty"),
        ({"weights": (1.0, 0.0)}, "weights"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"beem": 3}, "beem: no such key; did you mean 'beam'"),
    ],
)
def test_invalid_options_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        Options.of(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"mbr": 3, "temperature": 0.5, "utility": "edit"},
        {"beam": 4, "groups": 2, "diversity": 1.0, "exact": True, "coverage_penalty": 0.5, "alignment_heads": [[0, 0]]},
        {"alignment": True, "alignment_heads": [[0, 0]]},
        {"seed": 3},
        {"temperature": 1.0, "utility": "chrf"},
    ],
)
def test_valid_options_are_accepted_and_survive_a_round_trip(settings: dict[str, object]) -> None:
    options = Options.of(**settings)
    assert Options.of(**options.model_dump()) == options


@pytest.mark.parametrize(
    ("request_", "settings", "message"),
    [
        (Request("abc", prefix="aß"), {}, "prefix 'aß': 'ß' is not in the target vocabulary"),
        (Request("abc", prefix="abcdef"), {"max_length": 5}, "prefix 'abcdef': its 6 tokens exceed the output limit"),
        (Request("abc", prefix="ab", forbid=("b",)), {}, "prefix 'ab' contains a phrase that forbid rules out"),
        (Request("abc", require=("abcdef",)), {"max_length": 4}, "require 'abcdef': needs at least 6 tokens"),
        (Request("abc", prefix="ff", require=("abc",)), {"max_length": 4}, "needs at least 5 tokens"),
        (Request("abc", require=("ß",)), {}, "require 'ß': no output contains this"),
        (Request("abc", require=("ab", "cd")), {"forbid": ("b",)}, "require 'ab', 'cd': no output contains this"),
        (
            Request("abc", require=tuple("abcdef") + tuple("bcdefa")[:0] + ("ab", "bc", "cd", "de", "ef")),
            {},
            "at most 10",
        ),
        (Request("abc", prefix="abc"), {"alternatives": 2, "alternatives_at": 1}, "alternatives_at 1 lies within"),
        (Request("abcdef"), {"min_ratio": 2.0, "max_length": 5}, "min_ratio"),
        (Request("abc"), {"prefix": "abcd", "max_ratio": 1.0}, "prefix 'abcd': its 4 tokens exceed the output limit"),
    ],
)
def test_unsatisfiable_constraints_of_a_request_are_flagged(
    request_: Request, settings: dict[str, object], message: str
) -> None:
    run = run_of("rnn-luong", 1)
    others = [Request("ab", prefix="fade"), Request("fa", prefix="fade")]
    for strategy in ({}, {"beam": 2}, {"sample": True}):
        options = Options.of(**settings, **strategy)
        first, bad, last = generate(run, [others[0], request_, others[1]], options)
        assert bad[0].text == "" and message in bad[0].flags["unsatisfied"]
        assert [first, last] == list(generate(run, others, options))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix": "aß"}, "prefix 'aß': 'ß' is not in the target vocabulary"),
        ({"prefix": "abcdef", "max_length": 4}, "prefix 'abcdef': its 6 tokens exceed the output limit"),
        ({"prefix": "ab", "forbid": ("b",)}, "prefix 'ab' contains a phrase that forbid rules out"),
        ({"require": ("abcdef",), "max_length": 4}, "require 'abcdef': needs at least 6 tokens"),
        ({"require": ("abc",), "forbid": ("b",)}, "require 'abc': no output contains this"),
        ({"prefix": "abc", "alternatives": 2, "alternatives_at": 1}, "alternatives_at 1 lies within"),
    ],
)
def test_unsatisfiable_options_are_refused_before_reading_input(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        TorchEngine(run_of("rnn-luong", 1), Options.of(**settings))
    assert message in str(error.value)


def test_parts_of_space_separated_tokens_do_not_conflict() -> None:
    codec = Codec(tokenizer("char"), Tokenizer.train("space", ["S SH H A AH"]))
    model = blank("rnn-luong", 1, codec)
    run = Run(model.config, codec, model, Path("here"))
    for strategy in ({}, {"beam": 3}, {"sample": True}):
        options = Options.of(require=("SH",), forbid=("S", "H"), max_length=6, **strategy)
        (h,) = next(generate(run, ["abc"], options))
        assert "SH" in h.text.split(" ") and not {"S", "H"} & set(h.text.split(" "))
    with pytest.raises(UserError, match="no output contains this"):
        TorchEngine(run, Options(require=("A SH",), forbid=("SH",)))


def test_phrases_with_a_space_separated_vocabulary() -> None:
    run = run_of("rnn-luong", 1, "space")
    with pytest.raises(UserError, match="require 'a ß': 'ß' is not in the target vocabulary"):
        list(generate(run, ["abc"], Options(require=("a ß",))))
    with pytest.raises(UserError, match="require ' ': this phrase is empty"):
        list(generate(run, ["abc"], Options(require=(" ",))))
    # Not in the vocabulary, so it is never produced.
    (h,) = next(generate(run, ["abc"], Options(forbid=("ß",), max_length=4)))
    assert "unsatisfied" not in h.flags


def test_rules_that_allow_no_output_give_a_flagged_empty_output() -> None:
    options = Options(forbid=tuple("abcdef"), min_length=3, max_length=5)
    for strategy in ({}, {"beam": 3}, {"sample": True}, {"mbr": 2}, {"alternatives": 2}):
        (h,) = next(generate(run_of("rnn-luong", 1), ["abc"], options.model_copy(update=strategy)))
        assert h.text == "" and "unsatisfied" in h.flags
