"""Random models, inputs and options for the native engine, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, strategies as st

import regard
from regard.api import LoadedRun
from regard.config import Config, Stack
from regard.decode.phrases import Phrases, PhraseTexts, Spelling, make_phrases
from regard.decode.search_inputs import SearchInput
from regard.model import Model
from regard.weight_files import weights_of

pytest.importorskip("regard_native")
from regard_native.core import Core
from regard_native.pack import Description

BLOCKED = (0, 1, 2)
EOS = 3
TOLERANCE = 1e-4
PRECISE = 5e-6


@st.composite
def configs(draw: st.DrawFn, alone: bool | None = None, vocab: int | None = None) -> Config:
    """Small models with every layer, position and score that the engine supports."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    alone = draw(st.booleans()) if alone is None else alone  # without an encoder
    recurrent = not alone and draw(st.booleans())
    heads = draw(st.integers(1, 4))
    width = heads * one_of(*(each for each in (4, 6, 16, 20) if each * heads >= 12))  # even, for recurrent layers
    layers = draw(st.integers(1, 3))
    vocab = vocab or one_of(7, 20, 150)
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
        source_vocab=vocab if alone else one_of(9, vocab),
        target_vocab=vocab,
        encoder=None if alone else stack(),
        decoder=stack(crosses=not alone),
        tie_output=draw(st.booleans()),
        scale_embeddings=draw(st.booleans()),
        output_bias=draw(st.booleans()),
    )


@st.composite
def ensembles(draw: st.DrawFn) -> list[Config]:
    """Models of different architectures that share a target vocabulary."""
    first = draw(configs())
    alone = first.encoder is None
    return [first, *draw(st.lists(configs(alone, first.target_vocab), min_size=1, max_size=2))]


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
            "nbest": draw(st.integers(1, 3)),
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


def make_inputs(models: Config | Sequence[Config], seed: int) -> list[SearchInput]:
    """Random inputs of one model or an ensemble, each with rules of its own."""
    configs = [models] if isinstance(models, Config) else list(models)
    vocab = configs[0].target_vocab
    rng = np.random.default_rng(seed)
    with_phrases = rng.random() < 0.6
    inputs = []
    for key in range(rng.integers(1, 8)):
        sources = tuple(_source(config, rng) for config in configs)
        limit = int(rng.integers(1, 15))
        prefix = tuple(rng.integers(4, vocab, rng.integers(0, 2)).tolist())
        phrases = _phrases(vocab, rng) if with_phrases and rng.random() < 0.8 else None
        inputs.append(
            SearchInput(
                sources,
                limit=limit,
                minimum=min(limit, int(rng.integers(0, 3))),
                prefix=prefix,
                not_after_prefix=tuple(rng.integers(4, vocab, rng.integers(0, 3)).tolist()) if prefix else (),
                texts=PhraseTexts(stop=("stop",) if phrases is not None and phrases.stop_QV.any() else ()),
                phrases=phrases,
                stages=0 if phrases is None else min(phrases.tokens_needed(()) or 0, 5),
                key=key,
                seed=int(rng.integers(0, 5)) if rng.random() < 0.5 else None,
                open_end=configs[0].encoder is None or bool(rng.integers(0, 2)),
            )
        )
    return inputs


def _source(config: Config, rng: np.random.Generator) -> list[int]:
    source: list[int] = rng.integers(4, config.source_vocab, rng.integers(1, 25)).tolist()
    return source if config.encoder is None else [*source, EOS]


def _phrases(vocab: int, rng: np.random.Generator) -> Phrases:
    """The automaton of random phrases, over tokens of up to three of three letters."""

    def words(least: int, most: int, longest: int) -> list[tuple[int, ...]]:
        return [tuple(rng.integers(0, 3, rng.integers(1, longest)).tolist()) for _ in range(rng.integers(least, most))]

    letters = [() if token < 4 else tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist()) for token in range(vocab)]
    spelling = Spelling(letters, [token > EOS for token in range(vocab)], EOS)
    require = [words(1, 3, 7) for _ in range(rng.integers(0, 3))]
    return make_phrases(require, words(0, 2, 5), spelling, words(0, 2, 6))


def describe(model: Model) -> Description:
    return Description(model.config.model_dump(mode="json"), {name: x.numpy() for name, x in weights_of(model).items()})


@contextmanager
def double_precision() -> Iterator[None]:
    """Positions and searches of torch in double precision; a search converts logits to single precision."""
    in_single = torch.Tensor.float
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else in_single(x))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@contextmanager
def accepting_amplified_errors(models: Sequence[Model], compute: Callable[[], Sequence[float]]) -> Iterator[None]:
    """Ignore a failed comparison if the numbers of torch are imprecise: some random models amplify rounding errors."""
    single = np.asarray(compute())
    try:
        yield
    except AssertionError:
        with double_precision():
            for model in models:
                model.double()
            double = np.asarray(compute())
            for model in models:
                model.float()
        assume(single.shape == double.shape and np.abs(single - double).max(initial=0.0) < PRECISE)
        raise


def native_search(
    cores: Core | Sequence[Core], inputs: list[SearchInput], chosen: dict[str, Any], weights: Sequence[float] = ()
) -> list[Any]:
    members = [cores] if isinstance(cores, Core) else cores
    return members[0].search(**arguments_of(members, inputs, chosen), weights=weights)


def arguments_of(cores: Sequence[Core], inputs: list[SearchInput], chosen: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Core.search`."""
    names = {"nbest": "keep", "no_repeat_ngram": "no_repeat"}
    arguments = {names.get(name, name): value for name, value in chosen.items() if name != "sample"}
    if chosen.get("sample"):
        arguments["noise"] = make_noise(inputs, arguments.pop("keep", 1))
    return {
        "sources": [item.sources[0] for item in inputs],
        "limits": [item.limit for item in inputs],
        "others": [(core, [item.sources[i] for item in inputs]) for i, core in enumerate(cores) if i],
        "minimums": [item.minimum for item in inputs],
        "prefixes": [item.prefix for item in inputs],
        "after_prefix": [item.not_after_prefix for item in inputs],
        "open_end": [item.open_end for item in inputs],
        "phrases": [item.phrases for item in inputs],
        "stages": [item.stages for item in inputs],
        "blocked": BLOCKED,
        **arguments,
    }


def make_noise(inputs: list[SearchInput], samples: int) -> np.ndarray:
    """The random numbers with which the torch engine samples."""
    noise = np.zeros((len(inputs), samples, max(item.limit for item in inputs) + 1), np.float32)
    for rows, item in zip(noise, inputs, strict=True):
        for sample, row in enumerate(rows):
            seed = 1 if item.seed is None else item.seed
            row[: item.limit + 1] = np.random.default_rng((seed, item.key, sample)).random(item.limit + 1)
    return np.minimum(noise, np.float32(1 - 2**-24))


def load_with_torch(path: Path) -> LoadedRun:
    """A run that torch answers, because its model is in memory."""
    run = regard.load(path)
    run.load_model()
    return run
