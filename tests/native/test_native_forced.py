"""Forced decoding with the native engine: scores, most probable tokens and alignments equal those of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kit.models import letters
from regard.config import Config
from regard.decode.alignment import forced_attention, mean_heads
from regard.decode.ensemble import Scorer
from regard.decode.forced import force, force_top

pytest.importorskip("regard_native")

from regard_native.core import Core, NativeError, available_kernels

from kit.native_models import BLOCKED, EOS, accepting_amplified_errors, configs, describe, make_inputs, make_model

TOLERANCE = 1e-4


def make_pairs(config: Config, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Sources with several targets each."""
    rng = np.random.default_rng(seed)
    sources = []
    targets = []
    for item in make_inputs(config, seed):
        for _ in range(rng.integers(1, 8)):
            sources.append(list(item.sources[0]))
            targets.append([*rng.integers(4, config.target_vocab, rng.integers(0, 30)).tolist(), EOS])
    return sources, targets


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
@given(configs(), st.integers(0, 1000), st.integers(0, 5))
def test_forced_pass_equals_that_of_torch(config, seed, count):
    model = make_model(config, seed)
    description = describe(model)
    core = Core(description.numbers, description.tensors)
    sources, targets = make_pairs(config, seed)
    heads = heads_of(config, seed)
    results = core.force(sources, targets, top_tokens=min(count, config.target_vocab), blocked=BLOCKED, heads=heads)
    scorer = Scorer([model], blocked=BLOCKED)
    sources_by_run = [(source,) for source in sources]
    scored = force(scorer, sources_by_run, targets)
    with accepting_amplified_errors([model], lambda: np.concatenate(force(scorer, sources_by_run, targets)).tolist()):
        for result, scores in zip(results, scored, strict=True):
            assert result.token_scores == pytest.approx(scores, abs=TOLERANCE)
    tops = force_top(scorer, sources_by_run, targets, count, 8192) if count else [[]] * len(targets)
    for result, top in zip(results, tops, strict=True):
        for ours, theirs in zip(result.top_tokens, top, strict=True):
            assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=TOLERANCE)
            clear = np.diff([score for _, score in theirs], prepend=1, append=-1e9) < -2 * TOLERANCE
            exact = clear[:-1] & clear[1:]
            assert np.array_equal(np.array([t for t, _ in ours])[exact], np.array([t for t, _ in theirs])[exact])
    if heads:
        weights = mean_heads(forced_attention(model, sources, targets, {layer for layer, _ in heads}), heads).numpy()
        for result, expected, source, target in zip(results, weights, sources, targets, strict=True):
            assert result.alignment == pytest.approx(expected[: len(target), : len(source)], abs=TOLERANCE)


@pytest.mark.parametrize("int8", [False, True])
@settings(max_examples=25)
@given(config=configs(), seed=st.integers(0, 1000))
def test_bits_do_not_depend_on_batch_or_instruction_set(int8, config, seed):
    description = describe(make_model(config, seed))
    sources, targets = make_pairs(config, seed)
    settings: dict[str, Any] = {"top_tokens": 3, "blocked": BLOCKED, "heads": heads_of(config, seed)}
    expected = None
    for name in available_kernels():
        core = Core(description.numbers, description.tensors, int8, name)
        together = [*map(plain, core.force(sources, targets, **settings))]
        expected = expected or together
        assert together == expected
        reverse = core.force(sources[::-1], targets[::-1], **settings)
        assert [*map(plain, reverse)] == together[::-1]
        alone = [core.force([source], [target], **settings)[0] for source, target in zip(sources, targets, strict=True)]
        assert [*map(plain, alone)] == together


def plain(forced: Any) -> tuple[Any, ...]:
    return forced.token_scores, forced.top_tokens, None if forced.alignment is None else forced.alignment.tolist()


def test_heads_and_tokens_that_the_model_does_not_have_are_refused():
    description = describe(letters().model)
    core = Core(description.numbers, description.tensors)
    for wrong in (
        {"heads": [(2, 0)]},
        {"heads": [(0, 4)]},
        {"heads": [(-1, 0)]},
        {"top_tokens": 999},
        {"blocked": [99]},
    ):
        with pytest.raises(NativeError, match="invalid"):
            core.force([[5, EOS]], [[5, EOS]], **wrong)
