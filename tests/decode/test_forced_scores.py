"""Token scores sum to the score, and forced decoding gives the same token scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_batch_independence import STRATEGIES

from kit.decoding import LETTERS, NAMES, names, run_of, seeds, sources, trained, words
from regard.decode.request import Options
from regard.decode.torch_engine import generate, score
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Example


def check_scores(run: Run, texts: list[str], options: Options) -> None:
    rows = list(generate(run, texts, options))
    pairs = [(text, h) for text, row in zip(texts, rows, strict=True) for h in row]
    forced = list(score(run, [(text, h.text) for text, h in pairs]))
    for (_, h), rescored in zip(pairs, forced, strict=True):
        assert math.fsum(h.token_scores) == pytest.approx(h.score, abs=1e-6)
        assert all(s <= 1e-6 for s in h.token_scores)
        assert h.normalized == pytest.approx(h.score / len(h.ids) ** options.length_penalty)
        assert len(h.tokens) == len(h.token_scores) == len(h.ids) and h.ids[-1] == 3
        if "segmentation" not in h.flags:
            assert rescored.tokens == h.tokens
            assert rescored.token_scores == pytest.approx(h.token_scores, abs=1e-5)
            assert rescored.score == pytest.approx(h.score, abs=1e-5 * len(h.ids))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    names, seeds, st.sampled_from(["char", "space", "word", "bpe:290"]), st.sampled_from(sorted(STRATEGIES)),
    st.lists(words, min_size=1, max_size=3),
)  # fmt: skip
def test_scores_of_every_strategy_equal_forced_scores(
    name: str, seed: int, scheme: str, strategy: str, texts: list[str]
) -> None:
    options = dict(STRATEGIES[strategy])
    for key in ("require", "forbid"):
        if key in options and scheme == "space":
            options[key] = tuple(" ".join(phrase) for phrase in options[key])
    if scheme == "word":  # the vocabulary contains whole words only
        options.pop("require", None)
    check_scores(run_of(name, seed, scheme), texts, Options.of(max_length=12, **options))


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_a_trained_model_equal_forced_scores(name: str) -> None:
    check_scores(trained(name), sources(8, 20, 6), Options(beam=5, nbest=5))


@pytest.mark.parametrize("name", NAMES)
def test_probabilities_of_all_short_outputs_sum_to_at_most_one(name: str) -> None:
    run = run_of(name, 1)
    outputs = ["", *LETTERS, *(a + b for a in LETTERS for b in LETTERS)]
    total = sum(math.exp(s.score) for s in score(run, [("fade", output) for output in outputs]))
    assert 0 < total <= 1


def test_forced_scores_do_not_depend_on_the_batch() -> None:
    run = run_of("transformer-tiny", 3)
    pairs = list(zip(sources(1, 9), sources(2, 9), strict=True))
    batched = list(score(run, pairs))
    small_batches = list(score(run, pairs, Options(batch_tokens=1)))
    for pair, a, b in zip(pairs, batched, small_batches, strict=True):
        (single,) = score(run, [Example(*pair)])
        assert single.token_scores == pytest.approx(a.token_scores, abs=1e-5)
        assert single.token_scores == pytest.approx(b.token_scores, abs=1e-5)


def test_forced_scores_are_log_probabilities_of_the_model() -> None:
    run = run_of("rnn-luong", 3)
    (scored,) = score(run, [("fad", "ba")])
    source = torch.tensor(run.codec.encode_source([Example("fad")]))
    target = run.codec.encode_target(["ba"])[0]
    with torch.no_grad():
        logits = run.model(source, None, torch.tensor([[2, *target[:-1]]]))
    expected = logits[0].log_softmax(-1).gather(1, torch.tensor(target)[:, None]).flatten().tolist()
    assert scored.token_scores == pytest.approx(expected, abs=1e-5)
    assert scored.tokens == ("b", "a", "<eos>") and scored.as_dict()["score"] == scored.score


def test_scores_of_empty_sources_and_targets() -> None:
    run = run_of("transformer-tiny", 0)
    both, target, source = score(run, [("", ""), ("abc", ""), ("", "abc")])
    assert (both.score, both.tokens) == (0.0, ())
    assert len(target.tokens) == 1 and len(source.tokens) == 4
    (hypothesis,) = next(generate(run, [""]))
    assert hypothesis.score == both.score
    with pytest.raises(UserError, match="no target"):
        list(score(run, [Example("abc")]))
