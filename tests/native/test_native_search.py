"""The native engine gives the outputs and scores of the torch engine, with the same bits on every instruction set."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kit.models import family
from regard.config import Config, Stack
from regard.decode.ensemble import Scorer
from regard.decode.request import Options
from regard.decode.search import search

pytest.importorskip("regard_native")

from regard_native.core import Core, NativeError, available_kernels

from kit.native_models import (
    BLOCKED,
    EOS,
    TOLERANCE,
    configs,
    describe,
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
    for outputs, reference in zip(results[0], expected, strict=True):
        assert [tuple(output.ids) for output in outputs] == [output.ids for output in reference]
        for output, other in zip(outputs, reference, strict=True):
            assert output.token_scores == pytest.approx(other.token_scores, abs=TOLERANCE)
            if chosen["beam"] > 1:
                assert output.value == pytest.approx(other.value, abs=TOLERANCE)
            assert output.limited == other.limited


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
    for sources, limits in (([[9]], [3]), ([[-1]], [3]), ([[]], [3]), ([[4]], [-1]), ([[4]], [2**31 - 1])):
        with pytest.raises(NativeError, match="invalid"):
            core.search(sources, limits)
