"""Language models: continuing a prompt gives the same guarantees as decoding a source."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_batch_independence import STRATEGIES

from kit.decoding import POSITIONS, language_model, run_of, same, sources, words
from regard.answers import Answerer
from regard.decode.request import Options, Request
from regard.decode.torch_engine import generate, score
from regard.errors import UserError
from regard.model import Model
from regard.nn.cache import State
from regard.run import Run

FRAMES = ("start", "none", "end", "both")
positions = st.sampled_from(POSITIONS)
frames = st.sampled_from(FRAMES)
prompts = st.lists(st.one_of(st.just(""), words), min_size=1, max_size=5)
strategies = st.sampled_from(sorted(set(STRATEGIES) - {"coverage"}))


def prompt_ids(run: Run, prompt: str) -> list[int]:
    ids = run.codec.target.encode([prompt])[0]
    return [*([2] if run.config.frame in ("start", "both") else []), *ids] or [run.config.start_id]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(positions, st.integers(0, 3), frames, st.sampled_from([0, 4]), strategies, prompts)
def test_scores_equal_forced_scores_in_any_batch(
    position: str, seed: int, frame: str, memory: int, strategy: str, texts: list[str]
) -> None:
    run = language_model(position, seed, frame, memory if position in ("rotary", "alibi", "relative") else 0)
    options = Options.of(max_length=9, **STRATEGIES[strategy])
    batched = list(generate(run, texts, options))
    for text, row in zip(texts, batched, strict=True):
        assert same(next(generate(run, [text], options)), row)
        for h in row:
            (forced,) = score(run, [(text, h.text)])
            assert h.score == pytest.approx(sum(h.token_scores), abs=1e-6)
            assert forced.token_scores[: len(h.ids)] == pytest.approx(h.token_scores, abs=1e-5)
            # An output that reaches the length limit has no end token.
            assert len(forced.tokens) == len(h.ids) + (h.ids[-1:] != (3,))
            assert (h.ids[-1:] == (3,)) or (len(h.ids) == 9 and "max_length" in h.flags)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("position", POSITIONS)
def test_greedy_search_takes_the_best_token_at_every_step(position: str, frame: str) -> None:
    """The reference runs a forward pass over the whole text for every token."""
    run = language_model(position, 1, frame)
    for prompt in ("", "fad", "cafebabe"):
        ids = prompt_ids(run, prompt)
        output = []
        while len(output) < 12 and output[-1:] != [3]:
            with torch.no_grad():
                logits_V = run.model(torch.tensor([[*ids, *output]]), None)[0, -1]
            logits_V[[0, 1, 2]] = -torch.inf
            output.append(int(logits_V.argmax()))
        (hypothesis,) = next(generate(run, [prompt], Options(max_length=12)))
        assert hypothesis.ids == tuple(output)
        assert "".join(p.text for p in Answerer([run], Options(max_length=12)).stream(prompt)) == hypothesis.text


def test_the_cache_is_bounded_by_the_attention_window() -> None:
    """Keys outside the window are removed from the cache, which does not change the outputs."""
    run = language_model("relative", 2, "none", 4)
    text = "abcdefabcdef"
    # Two layers with windows of 4 see 9 tokens.
    (far,), (near,) = generate(run, [text, text[-9:]], Options(max_length=3))
    assert far.ids == near.ids and far.token_scores == pytest.approx(near.token_scores, abs=1e-5)
    with torch.inference_mode():
        tokens = torch.tensor(run.codec.target.encode([text]))
        state = run.model.read(tokens, State(()))[1]
        _, state = run.model.step(tokens[:, 0], state)
    assert state.length == 13 and all(memory[0].shape[2] == 4 for memory in state.layers)


def test_constraints_are_satisfied() -> None:
    run = language_model("rotary", 3)
    requests = [Request("fad", prefix="cc"), Request("", require=("bad",)), Request("ab", forbid=("a", "b"))]
    for strategy in ({}, {"beam": 3}, {"sample": True}):
        prefixed, required, forbidden = generate(run, requests, Options.of(max_length=15, **strategy))
        assert prefixed[0].text.startswith("cc") and "bad" in required[0].text
        assert not set(forbidden[0].text) & set("ab")
    ends = list(generate(run, sources(1, 6), Options(alternatives=4, max_length=8)))
    assert all(len({h.ids[0] for h in row}) == len(row) == 4 for row in ends)
    assert all(h.ids == (3,) for row in ends for h in row if h.ids[0] == 3)


def test_prompt_and_continuation_share_the_learned_positions() -> None:
    run = language_model("learned", 1)  # 40 positions, including the start token
    (full,) = next(generate(run, ["abc" * 12], Options(min_length=3)))
    assert len(full.ids) == 3 and "limit of 3 tokens" in full.flags["max_length"]
    assert "too_long" in next(generate(run, ["a" * 39]))[0].flags
    (unsatisfied,), (satisfied,) = generate(run, ["abc" * 12, "abc"], Options(min_length=4))
    assert "learned positions" in unsatisfied.flags["unsatisfied"] and len(satisfied.ids) >= 4
    with pytest.raises(UserError, match=r"min_length.*learned positions for 39"):
        list(generate(run, ["abc"], Options(min_length=40)))
    unsatisfied, satisfied = score(run, [("abc" * 12, "abcd"), ("abc" * 12, "abc")])
    assert "the text has 41 tokens, more than the 40" in unsatisfied.flags["too_long"] and satisfied.score < 0
    (unbounded,) = next(generate(language_model("rotary", 0), ["a"], Options(forbid=tuple("abcdef"), min_length=0)))
    assert unbounded.ids == (3,)


@pytest.mark.parametrize("strategy", [{}, {"beam": 3}, {"sample": True}])
def test_long_prompt_does_not_shorten_other_outputs_of_the_batch(strategy: dict[str, object]) -> None:
    """A row that has reached its last position is not decoded further."""
    run = language_model("learned", 1, "none")
    long = "abcdef" * 6 + "ab"
    options = Options.of(min_ratio=0.05, forbid=("ff",), **strategy)
    others = [Request(text, prefix="abcabcabcabc") for text in ("ab", "fade", "c") * 6]
    rows = list(generate(run, [long, *others], options))
    assert 1 < len(rows[0][0].ids) <= 3 and min(len(row[0].ids) for row in rows[1:]) > 12
    assert same(next(generate(run, [long], options)), rows[0])


def test_default_output_limit_is_100_tokens() -> None:
    run = language_model("rotary", 0)
    (hypothesis,) = next(generate(run, [""], Options(sample=True, min_length=90)))
    assert 90 <= len(hypothesis.ids) <= 101


def test_ensembles_of_language_models() -> None:
    one, other = language_model("rotary", 1), language_model("learned", 2)
    texts = ["fad", "", "abcabc"]
    options = Options(beam=3, max_length=8)
    assert all(map(same, generate([one, one], texts, options), generate(one, texts, options)))
    for text, (h, *_) in zip(texts, generate([one, other], texts, options), strict=True):
        (forced,) = score([one, other], [(text, h.text)])
        assert forced.token_scores[: len(h.ids)] == pytest.approx(h.token_scores, abs=1e-5)
    with pytest.raises(UserError, match="language model and a model that reads a source"):
        list(generate([one, run_of("transformer-tiny", 0)], ["a"]))


def test_options_that_need_a_source_or_a_decoder_are_refused() -> None:
    run = language_model("rotary", 1)
    for options in ({"alignment": True}, {"beam": 2, "coverage_penalty": 0.5}):
        with pytest.raises(UserError, match="language model has no source"):
            list(generate(run, ["a"], Options.of(**options)))
    pairs_run = run_of("transformer-tiny", 1)
    config = pairs_run.config.model_copy(update={"decoder": None})
    with pytest.raises(UserError, match="with a decoder"):
        list(generate(Run(config, pairs_run.codec, Model(config).eval(), pairs_run.path), ["a"]))
