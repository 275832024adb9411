"""Requests with individual constraints, and requests read from JSON."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import regard
from kit.decoding import LETTERS, NAMES, language_model, names, run_of, same, seeds, sources, words
from regard.decode.request import Options, Request, parse_request
from regard.decode.torch_engine import generate, score as force
from regard.errors import UserError

short = st.text(LETTERS, min_size=1, max_size=2)
requests = st.builds(
    Request,
    source=words,
    prefix=st.one_of(st.just(""), short),
    require=st.lists(st.one_of(short, st.lists(short, min_size=1, max_size=2)), max_size=2),
    forbid=st.lists(short, max_size=1),
    stop=st.lists(short, max_size=2),
    min_length=st.one_of(st.none(), st.integers(0, 4)),
    max_length=st.one_of(st.none(), st.integers(4, 14)),
    seed=st.one_of(st.none(), st.integers(0, 3)),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(names, seeds, st.lists(requests, min_size=1, max_size=4), st.sampled_from(["greedy", "beam", "sample"]))
def test_request_constraints_equal_options_in_any_batch(
    name: str, seed: int, batch: list[Request], strategy: str
) -> None:
    strategy_options: dict[str, Any] = {"greedy": {}, "beam": {"beam": 3, "nbest": 2}, "sample": {"sample": True}}[
        strategy
    ]
    run = run_of(name, seed)
    options = Options.of(max_length=9, **strategy_options)
    for request, row in zip(batch, generate(run, batch, options), strict=True):
        assert same(next(generate(run, [request], options)), row)
        own = {key: value for key, value in request.model_dump().items() if value is not None}
        if any(len(each) > 1 for each in own["require"]):
            continue  # the option require_any supports one group of alternatives only
        own |= {"require": [x for each in own["require"] for x in each]}
        text = own.pop("source")
        try:
            assert same(next(generate(run, [text], Options.of(**{"max_length": 9, **strategy_options, **own}))), row)
        except UserError as error:
            assert str(error) == row[0].flags["unsatisfied"] or "min_length" in str(error)


def test_input_types_may_be_mixed() -> None:
    run = run_of("rnn-luong", 1)
    inputs = ["fade", regard.Request("fade"), regard.Example("fade"), regard.Request("fade", max_length=1)]
    first, second, third, last = generate(run, inputs, Options(max_length=5))
    assert first == second == third and len(last[0].text) <= 1


def test_requests_with_different_seeds_give_different_samples() -> None:
    run = run_of("transformer-tiny", 1)
    texts = {row[0].text for row in generate(run, [Request("fade", seed=i) for i in range(9)], Options(sample=True))}
    assert len(texts) > 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"source": 3}, "source: input should be a valid string, not 3"),
        ({"source": "a", "require": "cat"}, "require: takes a list, each item a phrase or a list of phrases"),
        ({"source": "a", "require": [["a", 1]]}, "require: takes a list"),
        ({"source": "a", "require": [[]]}, "require: takes a list"),
        ({"source": "a", "forbid": "cat"}, "forbid: takes a list of texts, such as ['cat']"),
        ({"source": "a", "stop": [""]}, "stop.0"),
        ({"source": "a", "max_length": 0}, "max_length: input should be greater than or equal to 1, not 0"),
        ({"source": "a", "max_length": "3"}, "max_length: input should be a valid integer, not '3'"),
        ({"source": "a", "seed": -1}, "seed"),
    ],
)
def test_invalid_values_are_refused_with_the_name_of_the_key(wrong: dict[str, Any], message: str) -> None:
    for make in (lambda: Request(**wrong), lambda: parse_request(wrong)):
        with pytest.raises(UserError) as error:
            make()
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "source: is required; a request has source, features, prefix"),
        ({"source": None}, "source: is required"),
        ({"sorce": "a"}, "sorce: no such key; did you mean 'source'?"),
        ({"text": "a"}, "text: no such key; did you mean 'source'?"),
        ({"source": "a", "max_tokens": 3}, "max_tokens: no such key; did you mean 'max_length'?"),
        ({"source": "a", "stop_sequences": []}, "did you mean 'stop'?"),
        ({"source": "a", "beam": 3}, "beam: is an option for all requests (--beam)"),
        ({"source": "a", "top_k": 3}, "(--top-k)"),
        ({"source": "a", "hypotheses": []}, "hypotheses: is a key of the answer"),
    ],
)
def test_likely_mistakes_in_keys_are_refused_with_a_suggestion(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_request(data)
    assert message in str(error.value)


def test_unrelated_keys_and_null_values_are_ignored() -> None:
    own = {"id": 7, "score": 1, "target": "b", "reference": "c", "lang": "nl", "features2": 1}
    assert parse_request({"source": "a", "prefix": None, "features": "V", **own}) == Request("a", "V")
    with pytest.raises(UserError, match="prefix: not for this run; a request has source, features here"):
        parse_request({"source": "a", "prefix": "b"}, ("source", "features"))


@pytest.mark.parametrize("name", [*NAMES, "language model"])
def test_top_tokens_equal_forced_scores(name: str) -> None:
    run = language_model("rotary", 1) if name == "language model" else run_of(name, 1)
    options = Options(beam=3, nbest=2, max_length=7, top_tokens=4, forbid=("a",))
    for text, row in zip(sources(3, 2), generate(run, sources(3, 2), options), strict=True):
        for h in row:
            assert len(h.top_tokens) == len(h.ids)
            for position, (token, score, top) in enumerate(zip(h.tokens, h.token_scores, h.top_tokens, strict=True)):
                assert len(top) == 4 and [x for _, x in top] == sorted((x for _, x in top), reverse=True)
                assert dict(top).get(token, score) == pytest.approx(score, abs=1e-5)
                assert token in dict(top) or score <= top[-1][1] + 1e-5
                before = "".join(h.tokens[:position])  # top tokens ignore the rules and may include forbidden tokens
                forced = force(run, [(text, before + letter) for letter in LETTERS])
                best = sorted((scored.token_scores[position] for scored in forced), reverse=True)
                shown = [x for piece, x in top if piece in LETTERS]
                assert shown == pytest.approx(best[: len(shown)], abs=1e-5)
    (plain,) = next(generate(run, ["fade"], Options(max_length=7)))
    assert plain.top_tokens == () and "top_tokens" not in plain.as_dict()
