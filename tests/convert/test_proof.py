"""The proof detects every config setting that affects the outputs, and every difference in outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel

import regard.convert.family as family
from kit.hf import MODELS, make, quiet
from regard.config import Config
from regard.convert.hf import effective_fields, from_hf, open_model, their_tensors, to_hf
from regard.convert.proof import (
    TOLERANCE,
    Proof,
    compare_greedy,
    draw_samples,
    fill_weights,
    largest_difference,
    load_theirs,
    our_outputs,
    their_outputs,
)
from regard.convert.read import write_generation
from regard.errors import UserError
from regard.model import Model, allocate, on_meta
from regard.presets import merge
from regard.run import Run
from regard.weight_files import weights_of

transformers = pytest.importorskip("transformers")

FAMILIES = ("marian", "bert-masked", "bert-classes", "gpt2", "t5-1.1", "llama-3", "reformer", "vit")
# Values for fields whose type does not list any.
OTHERS: dict[str, list[Any]] = {"kept_heads": [[[0], [0]]], "kept_cross_heads": [[[0], [0]]]}


def leaves(value: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Every field of a config and its tables: path, value, annotation."""
    for name, info in type(value).model_fields.items():
        inner = getattr(value, name)
        if isinstance(inner, BaseModel):
            yield from leaves(inner, (*path, name))
        else:
            yield (*path, name), inner, info.annotation


def literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in literals(part)]


def other_values(name: str, value: Any, annotation: Any, length: int) -> list[Any]:
    if choices := literals(annotation):
        return choices
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, 2 * value, value // 2]
    if isinstance(value, float):
        return [value * 10, value * 1.1, value / 2]
    return OTHERS.get(name, [1, 3, length - 2])  # the value is None


def variants(config: Config, length: int) -> Iterator[tuple[str, Config]]:
    """Valid variants of the config with one field changed to an effective value."""
    fields = effective_fields(config)
    for path, value, annotation in leaves(config):
        for other in other_values(path[-1], value, annotation, length):
            changes: Any = other
            for name in reversed(path):
                changes = {name: changes}
            try:
                changed = Config.model_validate(merge(config.model_dump(), changes))
            except UserError:
                continue
            if changed != config and effective_fields(changed) != fields:
                yield f"{'.'.join(path)}={other}", changed


def without_effect(setting: str, config: Config) -> bool:
    """Whether a field belongs to a missing stack, or affects only greedy outputs or hashing."""
    unused = ["encoder.cross", "encoder.kept_cross", "start=", "ids."]
    if len(config.stacks) == 1:
        unused += ["decoder.cross", "decoder.kept_cross"]
        unused.append("source_vocab" if config.encoder is None else "target_vocab")
    if config.top.mixer == "lsh":  # hashes are random; tests/nn/test_lsh.py covers them
        unused.append("decoder.lsh")
    if config.top.axial is not None:  # rows and columns set the limit
        unused.append("decoder.max_length")
    return setting.startswith(tuple(unused))


def shapes(config: Config) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in weights_of(on_meta(config)).items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_proof_detects_a_change_of_any_field(name, tmp_path, monkeypatch):
    monkeypatch.setattr("regard.convert.proof.LONG_TOKENS", 128)  # for speed
    model_class = type(make(name, tmp_path))
    source = open_model(tmp_path, quiet)
    config = source.config
    batches = draw_samples(config, 3)
    probe = allocate(on_meta(config)).eval()
    fill_weights(probe, lambda: our_outputs(probe, batches[-1:]))
    tensors = their_tensors(source.family, source.architecture, source.table, probe)
    theirs = load_theirs(model_class, tmp_path, tensors)
    expected = their_outputs(theirs, config, batches)
    assert largest_difference(our_outputs(probe, batches), expected) < TOLERANCE / 2
    longest = max(batch["input_ids"].shape[1] for batch in batches) if "input_ids" in batches[0] else 4
    unnoticed = []
    comparisons = 0
    original_shapes = shapes(config)
    for setting, changed in variants(config, longest):
        if shapes(changed) != original_shapes or without_effect(setting, config):
            continue  # with other shapes, loading the weights fails
        if changed.patches != config.patches:
            with pytest.raises(UserError, match="does not accept inputs"):
                their_outputs(theirs, changed, draw_samples(changed, 1))
            continue
        difference = largest_difference(outputs_with(probe, changed, batches), expected)
        comparisons += 1
        if difference <= TOLERANCE:
            unnoticed.append(f"{setting}: {difference:.2g}")
    assert not unnoticed and comparisons > 5


def outputs_with(probe: Model, config: Config, batches: Any) -> list[torch.Tensor]:
    """The outputs of a model with another config and the weights of the probe."""
    model = allocate(on_meta(config)).eval()
    with torch.no_grad():
        for name, x in weights_of(model).items():
            x.copy_(weights_of(probe)[name])
    return our_outputs(model, batches)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bert-vectors", {"encoder": {"norm_eps": 1e-11}}),
        ("gpt2", {"decoder": {"norm_eps": 1e-4}}),
        ("gpt2", {"decoder": {"window": 28}}),
        ("llama-2", {"decoder": {"window": 510}}),
        ("t5", {"decoder": {"cross_window": 510}}),
    ],
)
def test_a_misread_setting_stops_the_conversion(name, changes, tmp_path, monkeypatch):
    make(name, tmp_path / "hf")
    parse = family.parse
    monkeypatch.setattr(family, "parse", lambda kind, data, where: parse(kind, merge(data, changes), where))
    with pytest.raises(UserError, match="not the same"):
        from_hf(tmp_path / "hf", tmp_path / "run", 2, quiet)
    assert not (tmp_path / "run").exists()


def test_a_wrong_start_token_is_detected_behind_constant_outputs(tmp_path, monkeypatch):
    model = make("marian", tmp_path / "hf")
    model.final_logits_bias.zero_()[0, 7] = 100.0  # every greedy output repeats this token
    model.save_pretrained(tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "right", 2, quiet)
    parse = family.parse
    monkeypatch.setattr(family, "parse", lambda kind, data, where: parse(kind, merge(data, {"start": "eos"}), where))
    with pytest.raises(UserError, match="not the same"):
        from_hf(tmp_path / "hf", tmp_path / "run", 2, quiet)


UNUSUAL = {
    "t5": {"num_decoder_layers": 4},  # more than encoder layers
    "reformer": {"chunk_size_feed_forward": 7, "chunk_size_lm_head": 5},
    "bert-masked": {"chunk_size_feed_forward": 7},
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_models_that_transformers_runs_only_in_part_are_proven(name, tmp_path, monkeypatch):
    """Their cache fails with fewer encoder than decoder layers, and chunks must divide the length of an input."""
    make(name, tmp_path / "first")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "first", **UNUSUAL[name])
    monkeypatch.setitem(MODELS, name, lambda t: getattr(t, config.architectures[0])(config))
    make(name, tmp_path / "hf")
    report = from_hf(tmp_path / "hf", tmp_path / "run", 2, quiet)
    assert report.proof is not None and report.proof.holds
    assert (report.proof.outputs == 2) == (name != "bert-masked")


def test_refusals_name_the_path_of_the_user(tmp_path, monkeypatch):
    make("t5", tmp_path / "hf")
    model_class = transformers.T5ForConditionalGeneration
    for broken in ("generate", "from_pretrained"):
        with monkeypatch.context() as patch:
            patch.setattr(model_class, broken, lambda *_, **__: [][0])
            with pytest.raises(UserError, match="transformers cannot") as raised:
                from_hf(tmp_path / "hf", tmp_path / "run", 2, quiet)
            assert ".tmp" not in str(raised.value)
    from_hf(tmp_path / "hf", tmp_path / "run", 2, quiet)
    monkeypatch.setattr(model_class, "from_pretrained", lambda *_, **__: [][0])
    with pytest.raises(UserError, match=f"{tmp_path / 'out'}: cannot be proven: transformers cannot load it"):
        to_hf(Run.load(tmp_path / "run"), tmp_path / "out", 2, quiet)


@pytest.fixture
def converted(tmp_path: Path):
    """A converted run, its directory, and the model of transformers."""
    model = make("marian", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "run", 2, quiet)
    return Run.load(tmp_path / "run"), tmp_path / "hf", model


@pytest.mark.parametrize("field", ["start", "eos"])
def test_different_greedy_outputs_stop_the_conversion(field, converted):
    run, _, model = converted
    samples = draw_samples(run.config, 6)[0]
    token = int(model.generate(samples["input_ids"][:1], max_new_tokens=5)[0, 3])
    changes = {"start": "eos"} if field == "start" else {"ids": {"eos": token}}
    config = Config.model_validate(merge(run.config.model_dump(), changes))
    variant = replace(run, config=config, weights=Model(config).eval())
    variant.model.load_state_dict(run.model.state_dict())
    assert compare_greedy(run, model, samples, write_generation(run)) == 6
    with pytest.raises(UserError, match="greedy search gives"):
        compare_greedy(variant, model, samples, write_generation(run))


def test_tokens_suppressed_only_by_transformers_stop_the_conversion(converted):
    run, _, model = converted
    samples = draw_samples(run.config, 6)[0]
    model.generation_config.suppress_tokens = list(range(2, 30))
    with pytest.raises(UserError, match="greedy search gives"):
        compare_greedy(run, model, samples, write_generation(run))


def test_errors_of_transformers_name_transformers(converted, monkeypatch):
    run, _, model = converted

    def fail(*args: Any, **options: Any) -> None:
        raise KeyError("some  setting")

    samples = draw_samples(run.config, 2)[0]
    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(
        UserError, match="run: cannot be proven: transformers cannot generate: KeyError: 'some setting'"
    ):
        compare_greedy(run, model, samples, {})
    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(UserError, match="does not accept inputs that our model accepts: KeyError"):
        their_outputs(model, run.config, [samples])


def test_the_long_sample_has_the_maximum_length_of_the_model(tmp_path):
    def lengths(name: str) -> list[int]:
        make(name, tmp_path / name)
        return [batch["input_ids"].shape[1] for batch in draw_samples(open_model(tmp_path / name, quiet).config, 2)]

    assert lengths("gpt2") == [24, 30] and lengths("t5") == [24, 512]
    assert lengths("reformer") == [16]  # the length of a chunk


def test_nan_and_different_lengths_fail_the_proof():
    nan = [torch.tensor([1.0, float("nan")])]
    assert not Proof(1, largest_difference(nan, [torch.ones(2)]), TOLERANCE, "").holds
    assert Proof(1, largest_difference([torch.ones(2)], [torch.ones(2)]), TOLERANCE, "").holds
    assert not Proof(1, largest_difference([torch.ones(2)], [torch.ones(3)]), TOLERANCE, "").holds


def test_without_transformers_the_export_is_verified_by_importing_it(converted, tmp_path, monkeypatch):
    run, *_ = converted
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    report = to_hf(run, tmp_path / "out", 2, quiet)
    assert report.proof is None and report.details["read_again"] < TOLERANCE
    assert "not proven" in report.summary and "regard has read the written directory again" in report.summary
    exact = their_tensors

    def wrong(*args: Any) -> dict[str, torch.Tensor]:
        tensors = exact(*args)
        name = next(name for name in tensors if name.endswith("fc1.weight"))
        return tensors | {name: tensors[name] * 1.01}

    monkeypatch.setattr("regard.convert.hf.their_tensors", wrong)
    with pytest.raises(UserError, match="not the same"):
        to_hf(run, tmp_path / "new", 2, quiet)
    assert not (tmp_path / "new").exists()
