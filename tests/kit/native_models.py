"""Random models, inputs and options for the native engine, and its answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from regard_native.core import Core
from regard_native.pack import Description

from regard.config import Config, Stack
from regard.decode.constraints import SearchInput
from regard.model import Model
from regard.run import weights_of

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

    def stack(crosses: bool = False) -> Stack:
        if recurrent:
            return Stack(**shared)
        some = st.sets(st.integers(0, heads - 1), min_size=1).map(lambda kept: tuple(sorted(kept)))
        pruned = st.none() | st.tuples(*[some] * layers)
        return Stack(**shared, kept_heads=draw(pruned), kept_cross_heads=draw(pruned) if crosses else None)

    return Config(
        source_vocab=vocab,
        target_vocab=vocab,
        encoder=None if alone else stack(),
        decoder=stack(crosses=not alone),
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
