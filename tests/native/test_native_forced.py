"""Forced decoding with the native engine: scores, most probable tokens and alignments equal those of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kit.models import letters
from regard.config import Config
from regard.decode.cross_attention import forced_attention, mean_heads
from regard.decode.ensemble import Scorer
from regard.decode.forced import force, force_top

pytest.importorskip("regard_native")

from regard_native.core import Core, NativeError, available_kernels

from kit.native_models import (
    BLOCKED,
    EOS,
    accepting_amplified_errors,
    configs,
    describe,
    ensembles,
    make_inputs,
    make_model,
)

TOLERANCE = 1e-4


def make_pairs(models: Config | Sequence[Config], seed: int) -> tuple[list[tuple[list[int], ...]], list[list[int]]]:
    """Sources of each model, with several targets each."""
    rng = np.random.default_rng(seed)
    sources = []
    targets = []
    for item in make_inputs(models, seed):
        for _ in range(rng.integers(1, 8)):
            sources.append(tuple(map(list, item.sources)))
            vocab = (models if isinstance(models, Config) else models[0]).target_vocab
            targets.append([*rng.integers(4, vocab, rng.integers(0, 30)).tolist(), EOS])
    return sources, targets


def force_with(cores: Sequence[Core], sources: Sequence[tuple[list[int], ...]], *args: Any, **options: Any) -> Any:
    """The forced pass of one model or an ensemble."""
    first, *others = zip(*sources, strict=True)
    return cores[0].force(first, *args, others=[*zip(cores[1:], others, strict=True)], **options)


def heads_of(config: Config, seed: int) -> list[tuple[int, int]]:
    """Some cross-attention heads; none without an encoder."""
    decoder = config.decoder
    assert decoder is not None
    if config.encoder is None:
        return []
    if decoder.mixer != "attention":
        return [(decoder.layers - 1, 0)]
    counts = [decoder.heads] * decoder.layers
    if decoder.kept_cross_heads is not None:
        counts = [len(kept) for kept in decoder.kept_cross_heads]
    return [(layer, int(np.random.default_rng(seed).integers(count))) for layer, count in enumerate(counts)]


@settings(max_examples=60)
@given(configs() | ensembles(), st.integers(0, 1000), st.integers(0, 5))
def test_forced_pass_equals_that_of_torch(members, seed, count):
    members = [members] if isinstance(members, Config) else members
    config = members[0]
    models = [make_model(each, seed) for each in members]
    cores = [Core(each.numbers, each.tensors) for each in map(describe, models)]
    mix = np.random.default_rng(seed).uniform(0.1, 1, len(models)).tolist()
    sources, targets = make_pairs(members, seed)
    heads = heads_of(config, seed)
    count = min(count, config.target_vocab)
    results = force_with(cores, sources, targets, weights=mix, top_tokens=count, blocked=BLOCKED, heads=heads)
    scorer = Scorer(models, mix, BLOCKED)
    scored = force(scorer, sources, targets)
    with accepting_amplified_errors(models, lambda: np.concatenate(force(scorer, sources, targets)).tolist()):
        for result, scores in zip(results, scored, strict=True):
            assert result.token_scores == pytest.approx(scores, abs=TOLERANCE)
    tops = force_top(scorer, sources, targets, count, 8192) if count else [[]] * len(targets)
    for result, top in zip(results, tops, strict=True):
        for ours, theirs in zip(result.top_tokens, top, strict=True):
            assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=TOLERANCE)
            after = theirs[-1][1] if len(theirs) == count else -1e9  # the next token may have the same score
            clear = np.diff([score for _, score in theirs], prepend=1, append=after) < -2 * TOLERANCE
            exact = clear[:-1] & clear[1:]
            assert np.array_equal(np.array([t for t, _ in ours])[exact], np.array([t for t, _ in theirs])[exact])
    if heads:
        first = [source for source, *_ in sources]
        weights = mean_heads(forced_attention(models[0], first, targets, {layer for layer, _ in heads}), heads).numpy()
        for result, expected, source, target in zip(results, weights, first, targets, strict=True):
            assert result.alignment == pytest.approx(expected[: len(target), : len(source)], abs=TOLERANCE)


@pytest.mark.parametrize("int8", [False, True])
@settings(max_examples=25)
@given(members=configs() | ensembles(), seed=st.integers(0, 1000))
def test_bits_do_not_depend_on_batch_or_instruction_set(int8, members, seed):
    members = [members] if isinstance(members, Config) else members
    descriptions = [describe(make_model(config, seed)) for config in members]
    sources, targets = make_pairs(members, seed)
    settings: dict[str, Any] = {"top_tokens": 3, "blocked": BLOCKED, "heads": heads_of(members[0], seed)}
    expected = None
    for name in available_kernels():
        cores = [Core(each.numbers, each.tensors, int8, name) for each in descriptions]
        together = [*map(plain, force_with(cores, sources, targets, **settings))]
        expected = expected or together
        assert together == expected
        reverse = force_with(cores, sources[::-1], targets[::-1], **settings)
        assert [*map(plain, reverse)] == together[::-1]
        for source, target, row in zip(sources, targets, together, strict=True):
            assert plain(force_with(cores, [source], [target], **settings)[0]) == row


def plain(forced: Any) -> tuple[Any, ...]:
    return forced.token_scores, forced.top_tokens, None if forced.alignment is None else forced.alignment.tolist()


def test_heads_and_tokens_that_the_model_does_not_have_are_refused():
    description = describe(letters().model)
    core = Core(description.numbers, description.tensors)
    for wrong, problem in (
        ({"heads": [(2, 0)]}, "no such cross-attention head"),
        ({"heads": [(0, 4)]}, "no such cross-attention head"),
        ({"heads": [(-1, 0)]}, "no such cross-attention head"),
        ({"top_tokens": 999}, "number of tokens"),
        ({"blocked": [99]}, "blocked token id"),
    ):
        with pytest.raises(NativeError, match=problem):
            core.force([[5, EOS]], [[5, EOS]], **wrong)
