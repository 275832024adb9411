"""The native engine gives the outputs and scores of the torch engine, with the same bits on every instruction set."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kit.models import family
from regard.config import Config, Stack
from regard.decode.ensemble import Scorer
from regard.decode.hypothesis import DecodedIds
from regard.decode.request import Options
from regard.decode.search import _next_tokens, search
from regard.decode.search_inputs import SearchInput

pytest.importorskip("regard_native")

from regard_native.core import Core, Decoded, NativeError, available_kernels

from kit.native_models import (
    BLOCKED,
    EOS,
    TOLERANCE,
    accepting_amplified_errors,
    arguments_of,
    configs,
    describe,
    ensembles,
    make_inputs,
    make_model,
    native_search,
    options,
)


@settings(max_examples=60)
@given(configs(), options(), st.integers(0, 1000))
def test_outputs_and_scores_equal_those_of_torch_on_every_instruction_set(config, chosen, seed):
    model = make_model(config, seed)
    inputs = make_inputs(config, seed)
    expected = search(Scorer([model], blocked=BLOCKED), inputs, Options(**chosen))
    description = describe(model)
    results = [
        native_search(Core(description.numbers, description.tensors, kernels=name), inputs, chosen)
        for name in available_kernels()
    ]
    assert all(result == results[0] for result in results)
    with accepting_amplified_errors([model], lambda: numbers_of(Scorer([model], blocked=BLOCKED), inputs, chosen)):
        for outputs, reference in zip(results[0], expected, strict=True):
            check_outputs(outputs, reference)


def numbers_of(scorer: Scorer, inputs: list[SearchInput], chosen: dict[str, Any]) -> list[float]:
    outputs = [output for row in search(scorer, inputs, Options(**chosen)) for output in row]
    return [number for output in outputs for number in (*output.ids, *output.token_scores)]


def check_outputs(outputs: list[Decoded], reference: list[DecodedIds]) -> None:
    assert [tuple(output.ids) for output in outputs] == [output.ids for output in reference]
    for output, other in zip(outputs, reference, strict=True):
        assert output.token_scores == pytest.approx(other.token_scores, abs=TOLERANCE)
        assert output.value == pytest.approx(other.value, abs=TOLERANCE * max(1, len(output.ids)))
        assert output.limited == other.limited


@settings(max_examples=40)
@given(ensembles(), options(), st.integers(0, 1000))
def test_ensembles_give_the_outputs_of_torch_in_any_batch(members, chosen, seed):
    models = [make_model(config, seed + i) for i, config in enumerate(members)]
    weights = np.random.default_rng(seed).uniform(0.1, 1, len(models)).tolist()
    inputs = make_inputs(members, seed)
    descriptions = [describe(model) for model in models]
    cores = [Core(each.numbers, each.tensors) for each in descriptions]
    together = native_search(cores, inputs, chosen, weights)
    scorer = Scorer(models, weights, BLOCKED)
    expected = search(scorer, inputs, Options(**chosen))
    with accepting_amplified_errors(models, lambda: numbers_of(scorer, inputs, chosen)):
        for outputs, reference in zip(together, expected, strict=True):
            check_outputs(outputs, reference)
    assert [native_search(cores, [item], chosen, weights)[0] for item in inputs] == together


def test_an_ensemble_of_one_model_twice_gives_its_outputs():
    config = Config(
        source_vocab=30,
        target_vocab=30,
        encoder=Stack(layers=1, width=16, heads=2, ff=16),
        decoder=Stack(layers=1, width=16, heads=2, ff=16),
    )
    description = describe(make_model(config, 0))
    core = Core(description.numbers, description.tensors)
    for seed in range(5):
        inputs = make_inputs([config] * 2, seed)
        twice = [replace(item, sources=item.sources[:1] * 2) for item in inputs]
        assert native_search([core, core], twice, {"beam": 3}) == native_search(core, inputs, {"beam": 3})


@settings(max_examples=40)
@given(ensembles() | configs(), options(), st.integers(0, 1000))
def test_a_stream_gives_the_tokens_of_the_search_and_the_most_probable_ones(members, chosen, seed):
    chosen = {**chosen, "beam": 1, "nbest": 1, "exact": False}
    members = [members] if isinstance(members, Config) else members
    models = [make_model(config, seed) for config in members]
    cores = [Core(each.numbers, each.tensors) for each in map(describe, models)]
    for item in make_inputs(members, seed):
        if item.stages and "sample" not in chosen:  # a beam search
            continue
        outputs = native_search(cores, [item], chosen)[0]
        arguments = arguments_of(cores, [item], chosen)
        stream = list(cores[0].stream(**arguments, top_tokens=4))
        if not outputs:
            assert EOS not in [token.id for token in stream]
            continue
        assert [token.id for token in stream] == outputs[0].ids
        assert [token.score for token in stream] == outputs[0].token_scores
        if outputs[0].ids:
            ids = [outputs[0].ids]
            forced = cores[0].force(
                arguments["sources"], ids, others=arguments["others"], top_tokens=4, blocked=BLOCKED
            )
            assert [token.top for token in stream] == forced[0].top_tokens


def test_streams_and_searches_of_a_model_do_not_disturb_each_other():
    config = Config(
        source_vocab=30,
        target_vocab=30,
        encoder=Stack(layers=1, width=16, heads=2, ff=16),
        decoder=Stack(layers=1, width=16, heads=2, ff=16),
    )
    description = describe(make_model(config, 0))
    core = Core(description.numbers, description.tensors)
    sources = [[4, 5, 6, EOS], [7, 8, EOS], [9, EOS]]
    expected = [row[0].ids for row in core.search(sources, [9] * 3)]
    streams = [core.stream([source], [9]) for source in sources]
    ids: list[list[int]] = [[], [], []]
    for _ in range(10):
        for row, stream in zip(ids, streams, strict=True):
            row += [token.id for token in islice(stream, 1)]
        core.search(sources, [9] * 3, beam=4)
    assert ids == expected


@settings(max_examples=40)
@given(ensembles() | configs(), st.integers(0, 1000), st.integers(1, 9))
def test_alternatives_are_the_best_tokens_after_the_prefix(members, seed, count):
    members = [members] if isinstance(members, Config) else members
    models = [make_model(config, seed) for config in members]
    cores = [Core(each.numbers, each.tensors) for each in map(describe, models)]
    inputs = make_inputs(members, seed)
    rows = native_search(cores, inputs, {"alternatives": count})
    scorer = Scorer(models, blocked=BLOCKED)

    @torch.inference_mode()
    def tokens() -> list[list[int]]:
        return _next_tokens(scorer, inputs, Options(alternatives=count))

    expected = tokens()
    with accepting_amplified_errors(models, lambda: [token for row in tokens() for token in row]):
        assert [[output.ids[-1] for output in row] for row in rows] == expected
    for item, row in zip(inputs, rows, strict=True):
        assert all(tuple(output.ids[:-1]) == item.prefix for output in row)
    assert [native_search(cores, [item], {"alternatives": count})[0] for item in inputs] == rows


def test_a_search_that_would_exhaust_the_memory_is_refused():
    config = Config(
        source_vocab=30,
        target_vocab=30,
        encoder=Stack(layers=1, width=256, heads=2, ff=16),
        decoder=Stack(layers=2, width=256, heads=2, ff=16),
    )
    description = describe(make_model(config, 0))
    core = Core(description.numbers, description.tensors)
    sources = [[4, 5, EOS], [6, EOS]] * 20
    outputs = core.search(sources, [30] * 40, beam=4)
    with pytest.raises(MemoryError, match=r"500,000 tokens .* 1000 hypotheses"):
        core.search([[4, EOS]], [500_000], beam=1000)
    assert core.search(sources, [30] * 40, beam=4) == outputs


@pytest.mark.parametrize("int8", [False, True])
@settings(max_examples=25)
@given(config=configs(), chosen=options(), seed=st.integers(0, 1000))
def test_bits_do_not_depend_on_batch_order_or_instruction_set(int8, config, chosen, seed):
    inputs = make_inputs(config, seed)
    description = describe(make_model(config, seed))
    cores = [Core(description.numbers, description.tensors, int8, name) for name in available_kernels()]
    together = native_search(cores[0], inputs, chosen)
    for core in cores:
        assert native_search(core, inputs[::-1], chosen)[::-1] == together
        assert [native_search(core, [item], chosen)[0] for item in inputs] == together


@settings(max_examples=40)
@given(configs(), st.integers(0, 1000))
def test_forced_scores_equal_those_of_the_search_and_of_torch(config, seed):
    model = make_model(config, seed)
    description = describe(model)
    core = Core(description.numbers, description.tensors)
    inputs = make_inputs(config, seed)
    outputs = native_search(core, inputs, {"beam": 3, "keep": 3})
    pairs = [
        (item.sources[0], output) for item, row in zip(inputs, outputs, strict=True) for output in row if output.ids
    ]
    forced = core.score([source for source, _ in pairs], [output.ids for _, output in pairs])
    for (source, output), scores in zip(pairs, forced, strict=True):
        assert scores == output.token_scores  # to the bit
        ids = output.ids
        with torch.inference_mode():
            if config.encoder is None:
                logits = model(torch.tensor([[*source, *ids[:-1]]]), None)[0][len(source) - 1 :]
            else:
                logits = model(torch.tensor([source]), None, torch.tensor([[config.start_id, *ids[:-1]]]))[0]
        expected = logits.log_softmax(-1)[range(len(ids)), ids].tolist()
        assert scores == pytest.approx(expected, abs=TOLERANCE)


def test_threads_share_a_model():
    config = Config(
        source_vocab=30,
        target_vocab=30,
        encoder=Stack(layers=2, width=16, heads=2, ff=16),
        decoder=Stack(layers=2, width=16, heads=2, ff=16),
    )
    description = describe(make_model(config, 0))
    core = Core(description.numbers, description.tensors)
    batches = [make_inputs(config, seed) for seed in range(40)]
    expected = [native_search(core, inputs, {"beam": 3, "keep": 2}) for inputs in batches]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda inputs: native_search(core, inputs, {"beam": 3, "keep": 2}), batches)) == expected


def test_what_the_engine_does_not_compute_is_refused():
    for name, layers in (("lm-hashed", "mixer"), ("masked", "generate text")):
        with pytest.raises(NativeError, match=layers):
            describe(family(name).model)


def test_wrong_sizes_are_refused_before_they_are_read():
    config = Config(
        source_vocab=9,
        target_vocab=9,
        encoder=Stack(layers=1, width=8, heads=2, ff=8),
        decoder=Stack(layers=1, width=8, heads=2, ff=8),
    )
    description = describe(make_model(config, 0))
    for index, tensor in enumerate(description.tensors):
        tensors = [*description.tensors]
        tensors[index] = tensor.ravel()[:-1]
        with pytest.raises(NativeError, match="size"):
            Core(description.numbers, tensors)
    rng = np.random.default_rng(0)
    for _ in range(300):
        numbers = list(description.numbers)
        for index in rng.integers(0, len(numbers), 2):
            numbers[index] = float(rng.choice([-1, 0, 1, 7, 1e6, 2**31, np.nan, np.inf]))
        try:
            core = Core(numbers, description.tensors)
            core.search([[4, EOS]], [3], beam=2)
        except NativeError:
            continue
    core = Core(description.numbers, description.tensors)
    with pytest.raises(NativeError, match="1 targets for 2 sources"):
        core.force([[4, EOS], [5, EOS]], [[4, EOS]])
    for source, limit, problem in (
        ([9], 3, "source is outside"),
        ([-1], 3, "source is outside"),
        ([], 3, "empty"),
        ([4], -1, "negative"),
        ([4], 2**31 - 1, "million"),
    ):
        with pytest.raises(NativeError, match=problem):
            core.search([source], [limit])
