"""The native engine gives the outputs and scores of the torch engine, with the same bits on every instruction set."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kit.models import family
from regard.config import Config, Stack
from regard.decode.constraints import SearchInput
from regard.decode.ensemble import Scorer
from regard.decode.request import Options
from regard.decode.search import search
from regard.model import Model
from regard.run import weights_of

pytest.importorskip("regard_native")

from regard_native.core import Core, NativeError, available_kernels
from regard_native.pack import Description

BLOCKED = (0, 1, 2)
EOS = 3
TOLERANCE = 1e-4


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Small models with every layer, position and score that the engine supports."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    alone = draw(st.booleans())  # without an encoder
    recurrent = not alone and draw(st.booleans())
    heads = draw(st.integers(1, 4))
    width = heads * one_of(4, 6, 16, 20)  # even, for recurrent layers
    layers = draw(st.integers(1, 3))
    vocab = one_of(7, 20, 150)
    score = one_of("scaled_dot", "scaled_dot", "general", "additive", "concat", "cosine", "location")
    cross_window = one_of(None, 3)
    shared: dict[str, Any] = {
        "layers": layers,
        "width": width,
        "score": score,
        "cross_window": cross_window,
        "cross_center": one_of("step", "predicted") if cross_window else "step",
        "max_length": 64,
    }
    positions = ["none", "sinusoid", "sinusoid_halves", "learned", "rotary", "alibi", "bucket"]
    if recurrent:
        mixer = one_of("gru", "lstm")
        shared |= {"mixer": mixer, "position": "none", "input_feeding": draw(st.booleans())}
        shared |= {"attend_first": draw(st.booleans())}
    else:
        shared |= {
            "heads": heads,
            "kv_heads": None if score == "concat" else one_of(None, 1, heads),
            "value_width": one_of(None, 5),
            "ff": one_of(16, 30),
            "activation": one_of("relu", "gelu", "gelu_tanh", "silu", "tanh"),
            "gated": draw(st.booleans()),
            "norm": one_of("layer", "rms"),
            "norm_at": one_of("pre", "post"),
            "bias": one_of("all", "ff", "none"),
            "embed_norm": draw(st.booleans()),
            "position": one_of(*positions, *(["relative"] if alone else [])),
            "window": one_of(None, 3),
        }
        if shared["position"] == "relative":
            shared |= {"reach": one_of(None, 3), "memory": one_of(0, 4)}

    def stack() -> Stack:
        if recurrent:
            return Stack(**shared)
        some = st.sets(st.integers(0, heads - 1), min_size=1).map(lambda kept: tuple(sorted(kept)))
        return Stack(**shared, kept_heads=draw(st.none() | st.tuples(*[some] * layers)))

    return Config(
        source_vocab=vocab,
        target_vocab=vocab,
        encoder=None if alone else stack(),
        decoder=stack(),
        tie_output=draw(st.booleans()),
        scale_embeddings=draw(st.booleans()),
        output_bias=draw(st.booleans()),
    )


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a search, named as in `Options`."""
    beam = draw(st.integers(1, 4))
    chosen: dict[str, Any] = {
        "beam": beam,
        "length_penalty": draw(st.sampled_from([0.0, 0.6, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "no_repeat_ngram": draw(st.integers(0, 2)),
    }
    if beam > 1:
        return chosen | {"nbest": draw(st.integers(1, beam)), "exact": draw(st.booleans())}
    if draw(st.booleans()):
        chosen |= {
            "sample": True,
            "temperature": draw(st.sampled_from([0.7, 1.5])),
            "top_k": draw(st.sampled_from([0, 3])),
            "top_p": draw(st.sampled_from([1.0, 0.8])),
            "min_p": draw(st.sampled_from([0.0, 0.05])),
        }
    return chosen


def make_model(config: Config, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_inputs(config: Config, seed: int) -> list[SearchInput]:
    rng = np.random.default_rng(seed)
    inputs = []
    for _ in range(rng.integers(1, 8)):
        source = rng.integers(4, config.source_vocab, rng.integers(1, 25)).tolist()
        limit = int(rng.integers(1, 15))
        inputs.append(
            SearchInput(
                (source if config.encoder is None else [*source, EOS],),
                limit=limit,
                minimum=min(limit, int(rng.integers(0, 3))),
                prefix=tuple(rng.integers(4, config.target_vocab, rng.integers(0, 2)).tolist()),
                open_end=config.encoder is None,
            )
        )
    return inputs


def describe(model: Model) -> Description:
    return Description(model.config.model_dump(mode="json"), {name: x.numpy() for name, x in weights_of(model).items()})


def native_search(core: Core, inputs: list[SearchInput], chosen: dict[str, Any]) -> list[Any]:
    names = {"nbest": "keep", "no_repeat_ngram": "no_repeat"}
    arguments = {names.get(name, name): value for name, value in chosen.items() if name != "sample"}
    if "sample" in chosen:
        noise = np.zeros((len(inputs), max(item.limit for item in inputs) + 1), np.float32)
        for row, item in zip(noise, inputs, strict=True):
            row[: item.limit + 1] = np.random.default_rng((1, item.key, 0)).random(item.limit + 1)
        arguments["noise"] = np.minimum(noise, np.float32(1 - 2**-24))
    return core.search(
        [item.sources[0] for item in inputs],
        [item.limit for item in inputs],
        minimums=[item.minimum for item in inputs],
        prefixes=[item.prefix for item in inputs],
        open_end=inputs[0].open_end,
        blocked=BLOCKED,
        **arguments,
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
