"""Beam search equals greedy search, exhaustive search and beam search without early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kit.decoding import NAMES, names, run_of, same, seeds, sources, trained, words
from regard.decode.ensemble import Scorer, States
from regard.decode.forced import force
from regard.decode.hypothesis import DecodedIds, Hypothesis
from regard.decode.request import Options
from regard.decode.search import BeamSearch, best, decode_paths, make_rules, search
from regard.decode.search_inputs import SearchInput
from regard.decode.torch_engine import TorchEngine, generate
from regard.nn.cache import KV, KVCache
from regard.run import Run


def inputs_of(run: Run, texts: list[str], **settings: object) -> tuple[Scorer, list[SearchInput]]:
    engine = TorchEngine(run, Options.of(**settings))
    return engine.scorer, [item for item in engine.prepare(texts) if not item.flags]


def run_beam(
    scorer: Scorer, inputs: list[SearchInput], width: int, keep: int = 1, groups: int = 1, **settings: object
) -> list[list[DecodedIds]]:
    options = Options.model_construct(beam=width * groups, nbest=keep, groups=groups, **settings)  # type: ignore[arg-type]
    with torch.inference_mode():
        return BeamSearch(scorer, inputs, make_rules(scorer, inputs, Options(), one_path=False), options).run()


def enumerate_outputs(
    scorer: Scorer, item: SearchInput, usable: list[int], penalty: float
) -> list[tuple[float, tuple[int, ...]]]:
    """All outputs up to the length limit as (value, ids), best first."""
    outputs = [(*ids, scorer.eos) for length in range(item.limit + 1) for ids in product(usable, repeat=length)]
    scores = force(scorer, [item.sources] * len(outputs), outputs)
    return sorted(((sum(s) / len(ids) ** penalty, ids) for s, ids in zip(scores, outputs, strict=True)), reverse=True)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(names, seeds, st.lists(words, min_size=1, max_size=6))
def test_beam_of_one_equals_greedy(name: str, seed: int, texts: list[str]) -> None:
    scorer, inputs = inputs_of(run_of(name, seed), texts, max_length=15)
    with torch.inference_mode():
        greedy = decode_paths(scorer, inputs, make_rules(scorer, inputs, Options(), one_path=True))
    beam = run_beam(scorer, inputs, width=1)
    assert [row[0].ids for row in beam] == [row[0].ids for row in greedy]
    for ours, theirs in zip(beam, greedy, strict=True):
        assert ours[0].token_scores == pytest.approx(theirs[0].token_scores, abs=1e-5)


class CertainScorer(Scorer):
    """Predicts 4, 5, 6, ... and then the end token; the other tokens share the remaining probability `rest`."""

    def __init__(self, length: int, rest: float) -> None:
        self.length = length
        self.rest = rest
        self.step_number = 0
        self.device = torch.device("cpu")
        self.eos = 3
        self.vocab = 30
        self.continues = False

    def start(self, inputs: Sequence[SearchInput]) -> tuple[list[Tensor], States]:
        self.step_number = 0
        return [torch.zeros(len(inputs), dtype=torch.long)], ()

    def step(self, tokens_N: Tensor | list[Tensor], states: States) -> tuple[Tensor, States]:
        rows = len(tokens_N[0] if isinstance(tokens_N, list) else tokens_N)
        p_NV = torch.full((rows, self.vocab), self.rest / (self.vocab - 1))
        p_NV[:, self.eos] *= 1.01  # the end token ranks first among the improbable tokens
        p_NV[:, 4 + self.step_number if self.step_number < self.length else self.eos] = 1 - self.rest
        self.step_number += 1
        return p_NV.log().log_softmax(-1), ()


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_improbable_endings_do_not_stop_the_beam_search(width: int, penalty: float) -> None:
    scorer = CertainScorer(12, 0.05)
    length = 12
    for groups in (1, 2):
        rows = run_beam(
            scorer, [SearchInput(((3,),), 20)] * 2, width, width, groups, length_penalty=penalty, diversity=0.0
        )
        for row in rows:
            assert row[0].ids == (*range(4, 4 + length), 3)
            assert row[0].score == pytest.approx((length + 1) * math.log(0.95), abs=0.02)


def test_ties_are_broken_by_the_lowest_token_id() -> None:
    run = run_of("transformer-tiny", 5)
    weight = run.model.output.weight.detach().clone()
    try:
        run.model.output.weight.data.zero_()  # every token is equally likely
        scorer, inputs = inputs_of(run, ["ab", "cde"], max_length=4, min_length=2)
        assert [row[0].ids for row in search(scorer, inputs, Options(min_length=2))] == [(4, 4, 3), (4, 4, 3)]
        assert [row[0].ids for row in run_beam(scorer, inputs, width=1)] == [(4, 4, 3), (4, 4, 3)]
    finally:
        run.model.output.weight.data.copy_(weight)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(names, seeds, words, st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.booleans(), st.integers(1, 4))
def test_full_width_beam_equals_exhaustive_search(
    name: str, seed: int, text: str, penalty: float, exact: bool, keep: int
) -> None:
    scorer, (item,) = inputs_of(run_of(name, seed, "char", "ab"), [text], max_length=4)
    expected = enumerate_outputs(scorer, item, [4, 5], penalty)
    (outputs,) = run_beam(scorer, [item], width=len(expected), keep=keep, length_penalty=penalty, exact=exact)
    assert [output.value for output in outputs] == pytest.approx([value for value, _ in expected[:keep]], abs=1e-5)
    assert outputs[0].ids == expected[0][1] or expected[0][0] - expected[1][0] < 1e-5


@settings(max_examples=25, deadline=None, derandomize=True)
@given(names, seeds, st.lists(words, min_size=1, max_size=4), st.sampled_from([0.0, 1.0, 1.5]), st.booleans())
def test_early_stopping_does_not_change_the_best_output(
    name: str, seed: int, texts: list[str], penalty: float, exact: bool
) -> None:
    """A search with an n-best list of 1000 never stops early."""
    scorer, inputs = inputs_of(run_of(name, seed), texts, max_length=10)
    early = run_beam(scorer, inputs, width=3, length_penalty=penalty, exact=exact)
    late = run_beam(scorer, inputs, width=3, length_penalty=penalty, exact=exact, keep=1000)
    for ours, theirs in zip(early, late, strict=True):
        assert ours[0].value == pytest.approx(theirs[0].value, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_nbest_outputs_are_ordered_and_distinct(name: str) -> None:
    """Without exact search, a better output that finishes after the first has been chosen comes second."""
    for exact in (False, True):
        options = Options(beam=6, nbest=6, exact=exact, max_length=12)
        for hypotheses in generate(run_of(name, 2), sources(1, 12), options):
            assert len({h.ids for h in hypotheses}) == len(hypotheses) >= 4
            values = [h.normalized for h in hypotheses]
            assert all(a >= b - 1e-5 for a, b in pairwise(values if exact else values[1:]))


SEARCHES: dict[str, dict[str, object]] = {
    "plain": {},
    "exact": {"exact": True},
    "sum": {"length_penalty": 0.0},
    "long": {"length_penalty": 2.0},
    "groups": {"groups": 2},
    "coverage": {"coverage_penalty": 0.4},
    "phrases": {"require": ("cab", "ff"), "forbid": ("dd",), "stop": ("eb",)},
    "steered": {"prefix": "fa", "min_length": 4, "no_repeat_ngram": 3, "repetition_penalty": 1.3},
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    names, seeds, st.sampled_from(sorted(SEARCHES)), st.lists(words, min_size=1, max_size=5), st.integers(2, 4),
    st.booleans(),
)  # fmt: skip
def test_longer_nbest_lists_have_the_same_best_output(
    name: str, seed: int, search_name: str, texts: list[str], nbest: int, ensemble: bool
) -> None:
    runs = [run_of(name, seed), run_of(name, seed + 1)][: 1 + (ensemble and search_name != "coverage")]
    settings: dict[str, object] = {"beam": 4, "max_length": 14, **SEARCHES[search_name]}
    one, several = (list(generate(runs, texts, Options.of(**settings, nbest=n))) for n in (1, nbest))
    assert all(same(first, row[:1]) for first, row in zip(one, several, strict=True))


@pytest.mark.parametrize("penalty", [1.0, 0.6])
@pytest.mark.parametrize("name", NAMES)
def test_nbest_lists_of_trained_models_equal_those_of_exact_search(
    name: str, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list takes fewer steps than an exact search, and the best output no more than before."""
    steps: list[int] = []
    step = Scorer.step
    monkeypatch.setattr(Scorer, "step", lambda *inputs: (steps.append(1), step(*inputs))[1])

    def decode(**settings: object) -> tuple[list[list[Hypothesis]], int]:
        steps.clear()
        options = Options.of(beam=5, length_penalty=penalty, **settings)
        return [next(generate(trained(name), [text], options)) for text in sources(5, 30, 6)], len(steps)

    exact, exact_steps = decode(nbest=3, exact=True)
    lists, list_steps = decode(nbest=3)
    assert sum(not same(a, b) for a, b in zip(lists, exact, strict=True)) <= 1
    assert decode()[1] <= list_steps < exact_steps


def test_beam_search_rarely_copies_the_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are never reordered and are copied only when the cache grows, less often the larger it is."""
    run = run_of("transformer-tiny", 1)
    copies = []
    scorer = Scorer([run.model])
    gather = KV.gather

    def count(kv: KV, rows_A: Tensor, slot_AL: Tensor, free: int) -> KV:
        copies.append(slot_AL.shape[1])
        return gather(kv, rows_A, slot_AL, free)

    def refuse(kv: KV, rows: Tensor) -> KV:
        raise AssertionError("beam search reordered its keys")

    monkeypatch.setattr(KV, "gather", count)
    monkeypatch.setattr(KVCache, "select", refuse)
    for groups, width in ((1, 4), (2, 3)):
        copies.clear()
        inputs = [SearchInput(([4, 5, 6, 3],), 60, minimum=60), SearchInput(([7, 3],), 60, minimum=60)]
        rows = run_beam(scorer, inputs, width, groups=groups)
        assert [len(outputs[0].ids) for outputs in rows] == [61, 61]
        tokens = 60 * width * groups * 2  # two layers
        # Copying the cache at every step would give a factor of 30.
        assert len(copies) <= 60 * 2 // 4 and sum(copies) < 3 * tokens


@pytest.mark.parametrize("name", NAMES)
def test_exact_search_is_never_worse_than_default_search(name: str) -> None:
    texts = sources(3, 12)
    quick = list(generate(run_of(name, 3), texts, Options(beam=4, max_length=12)))
    exact = list(generate(run_of(name, 3), texts, Options(beam=4, max_length=12, exact=True)))
    assert all(b[0].normalized >= a[0].normalized - 1e-5 for a, b in zip(quick, exact, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_diverse_groups_start_with_different_tokens(name: str) -> None:
    run = run_of(name, 1)
    texts = sources(2, 8)
    alike = list(generate(run, texts, Options(beam=4, nbest=4, groups=2, diversity=0.0, max_length=8)))
    diverse = list(generate(run, texts, Options(beam=4, nbest=4, groups=2, diversity=50.0, max_length=8, min_length=1)))
    narrow = list(generate(run, texts, Options(beam=2, nbest=2, max_length=8)))
    # Without a diversity penalty, both groups equal a plain beam of their width.
    assert [[h.ids for h in row] for row in alike] == [[h.ids for h in row] for row in narrow]
    assert all(len({h.ids[0] for h in row}) > 1 for row in diverse)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5000), st.integers(1, 12), st.integers(0, 2**31))
def test_best_equals_topk(rows: int, vocab: int, count: int, seed: int) -> None:
    value = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    count = min(count, vocab)
    ours, places = best(value, count)
    assert torch.equal(ours, value.topk(count).values)
    assert torch.equal(value.gather(1, places), ours)
