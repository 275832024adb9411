"""Damaged and hostile run directories are refused by the native engine, in bounded time and memory."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kit.families import BOTH, DECODERS, build, shrunk
from kit.fuzz import attack, in_child
from regard.config import Config, RotaryConfig, SpecialIds, Stack
from regard.run import Run
from regard.text.codec import Codec, TextConfig
from regard.text.tokenizer import Tokenizer

pytest.importorskip("regard_native")

from regard_native import NativeError, config as rules, load
from regard_native.core import Core, OutOfMemory, available_kernels

from kit.native_models import describe, make_model

LETTERS = ["abcab", "bca"]
KINDS = ("char", "word", "byte", "bpe:270", "unigram:270", "nfd", "space")
WORDS = ["abc", "cab b", ""]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A small run of every family that decodes, and one with features and two tokenizers."""
    directory = tmp_path_factory.mktemp("bases")
    for number, name in enumerate([*BOTH, *DECODERS]):
        codec = Codec(Tokenizer.train(KINDS[number % len(KINDS)], LETTERS))
        config = shrunk(name, codec.source_vocab)
        Run(config, codec, build(config), Path(name)).save(directory / name)
    sides = Codec(Tokenizer.train("char", LETTERS), Tokenizer.train("space", ["A B"]), ("N", "PL"))
    config = shrunk(BOTH[0], 9, {"source_vocab": sides.source_vocab, "target_vocab": sides.target_vocab})
    Run(config, sides, build(config), Path("two")).save(directory / "two")
    return sorted(directory.iterdir())


def use(path: Path, draw: Random) -> None:
    run = load(path, precision=draw.choice(["fp32", "int8"]), kernels=draw.choice(available_kernels()))
    inputs = [(word, "N;PL") if run.codec.takes_features else word for word in WORDS]
    run.generate(inputs, beam=draw.choice([1, 3]), max_length=6)


def check(bases: list[Path], directory: Path, count: int) -> None:
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print("SEED", seed)
    for base in bases:
        try:
            use(base, Random(0))  # first use in the parent, so that children do not repeat the set-up
        except NativeError:
            assert "reformer" in base.name
    faults, counts = attack(bases, directory, range(count), seed, use, NativeError)
    print(counts)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults)
    assert counts["refused"] > count / 3


def test_mutated_run_directories_are_refused_or_answer(bases: list[Path], tmp_path: Path) -> None:
    check(bases, tmp_path, 100)


@pytest.mark.slow
def test_many_mutated_run_directories_are_refused_or_answer(bases: list[Path], tmp_path: Path) -> None:
    check(bases, tmp_path, int(os.environ.get("CASES", 10_000)))


def test_rules_are_those_of_the_config() -> None:
    """Every key of a config is known, and its default is that of regard."""
    kinds = ((Stack, rules.STACK), (RotaryConfig, rules.ROTARY), (SpecialIds, rules.IDS), (TextConfig, rules.TEXT))
    for kind, table in ((Config, rules.MODEL), *kinds):
        assert table.keys() == kind.model_fields.keys()
        for name, field in kind.model_fields.items():
            rule = table[name]
            assert (rule.default is rules.REQUIRED) == field.is_required()
            if rule is not rules.UNUSED and not field.is_required() and rule.default != {}:
                assert rule.default == field.default
                assert rule.accepts(rule.default)


@pytest.fixture
def run(bases: list[Path], tmp_path: Path) -> Path:
    base = next(base for base in bases if base.name == "transformer-base")
    shutil.copytree(base, tmp_path / "run")
    return tmp_path / "run"


def edit(run: Path, *keys: str, to: Any) -> None:
    path = run / "config.json"
    data = json.loads(path.read_text())
    holder = data
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = to
    path.write_text(json.dumps(data))


HUGE = [
    (("model", "decoder", "layers"), 10**9), (("model", "decoder", "layers"), 1000),
    (("model", "encoder", "width"), 2**31), (("model", "encoder", "width"), 1_000_000),
    (("model", "encoder", "heads"), 10**9), (("model", "encoder", "head_width"), 1_000_000),
    (("model", "encoder", "ff"), 1_000_000), (("model", "target_vocab"), 2**31 - 1),
    (("model", "target_vocab"), 2**31), (("model", "source_vocab"), 2**31 - 1),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "value"), HUGE)
def test_sizes_beyond_the_weights_are_refused_before_memory_is_allocated(run: Path, keys: Any, value: int) -> None:
    edit(run, *keys, to=value)
    outcome = in_child(lambda: load(run), NativeError)
    assert outcome.kind == "refused" and outcome.megabytes < 50 and not outcome.fault, outcome


@pytest.mark.parametrize("options", [
    {"beam": 1000, "max_length": 10**6}, {"max_length": 10**9}, {"max_length": 10**12}, {"beam": 10**6},
    {"beam": 1000, "nbest": 1000, "max_length": 10**6}, {"beam": 2**32 + 1}, {"min_length": 10**9},
])  # fmt: skip
def test_searches_beyond_the_memory_are_refused_before_it_is_allocated(run: Path, options: Any) -> None:
    outcome = in_child(lambda: load(run).generate(["abc"] * 100, **options), NativeError)
    assert outcome.kind == "refused" and outcome.megabytes < 50 and not outcome.fault, outcome


def test_long_outputs_need_no_memory_for_all_sentences_at_once(run: Path) -> None:
    outcome = in_child(lambda: load(run).generate(["abc"] * 100, max_length=10**6, beam=2), NativeError)
    assert outcome.kind == "ok" and not outcome.fault, outcome


def test_learned_positions_are_never_read_beyond_their_table() -> None:
    stack = Stack(layers=1, width=16, heads=2, ff=16, position="learned", max_length=8)
    for encoder in (stack, None):
        description = describe(make_model(Config(source_vocab=9, target_vocab=9, encoder=encoder, decoder=stack), 0))
        core = Core(description.numbers, description.tensors)
        longest = 7 if encoder else 5
        core.search([[4, 5, 3]], [longest])
        with pytest.raises(NativeError, match="positions"):
            core.search([[4, 5, 3]], [longest + 1])
        assert len(core.score([[4, 5, 3]], [[4] * (8 if encoder else 6)])[0]) == (8 if encoder else 6)
        with pytest.raises(NativeError, match="positions"):
            core.score([[4, 5, 3]], [[4] * (9 if encoder else 7)])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_weights_that_are_not_finite_are_refused(run: Path, value: float, precision: str) -> None:
    weights = load_file(run / "model.safetensors")
    for name in (
        "target_embedding.weight",
        "decoder.blocks.0.feed_forward.up.bias",
        "encoder.blocks.0.attention.query.weight",
    ):
        name = name if name in weights else "source_embedding.weight"
        changed = {key: x.copy() for key, x in weights.items()}
        changed[name].flat[-1] = value
        save_file(changed, run / "model.safetensors")
        with pytest.raises(NativeError, match="not finite"):
            load(run, precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_activations_that_overflow_have_the_same_result_on_every_instruction_set(run: Path, precision: str) -> None:
    weights = load_file(run / "model.safetensors")
    names = [name for name in weights if name.endswith(("up.bias", "up.weight", "out.bias", "norm.weight"))]
    refusals = 0
    for name in names:
        weight = np.full_like(weights[name], 3e38)
        weight.flat[::3] *= -1
        save_file(weights | {name: weight}, run / "model.safetensors")
        results = []
        for kernels in available_kernels():
            try:
                results.append(load(run, precision=precision, kernels=kernels).generate(["abc"], beam=2)[0])
            except NativeError as error:
                assert "not numbers" in str(error)
                results.append([])
        assert all(result == results[0] for result in results)
        refusals += not results[0]
    assert refusals > len(names) / 3


def test_shapes_names_and_types_of_weights_must_fit(run: Path) -> None:
    weights = load_file(run / "model.safetensors")
    up = "encoder.blocks.0.feed_forward.up.weight"
    changes = [
        ({up: np.ascontiguousarray(weights[up].T)}, "size"),
        ({up: weights[up].astype(np.int32)}, "int32"),
        ({"encoder.blocks.9.extra": weights[up]}, "not known"),
        ({up: None}, "missing"),
    ]
    for change, message in changes:
        save_file({name: x for name, x in (weights | change).items() if x is not None}, run / "model.safetensors")
        with pytest.raises(NativeError, match=message):
            load(run)


@pytest.mark.parametrize("value", ["x", 0, True, 1.5])
def test_default_length_must_be_a_number_of_tokens(run: Path, value: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config["generation"]["max_length"] = value
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(NativeError, match=r"generation\.max_length: must be a number of tokens"):
        load(run)


def test_memory_error_is_both_kinds() -> None:
    assert issubclass(OutOfMemory, NativeError) and issubclass(OutOfMemory, MemoryError)
