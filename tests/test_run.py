"""Runs on disk: a loaded run equals the saved one, and damaged runs are refused."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.families import BOTH
from regard.errors import UserError
from regard.model import Model
from regard.presets import preset
from regard.run import Run, average, read_config
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer
from regard.weight_files import load_weights, save_weights, weights_of

TINY = {"width": 8, "layers": 1, "heads": 2, "ff": 8}


def codec(letters: str = "abc", shared: bool = False) -> Codec:
    source = Tokenizer.train("char", [letters])
    target = source if shared else Tokenizer.train("space", [" ".join(letters.upper())])
    return Codec(source, target, () if shared else ("N", "PL"))


def make(name: str = "transformer-tiny", seed: int = 0, text: Codec | None = None) -> Run:
    text = text or codec(shared=name == "transformer-base")
    torch.manual_seed(seed)
    changes = {"encoder": TINY, "decoder": TINY}
    config = preset(name, source_vocab=text.source_vocab, target_vocab=text.target_vocab, changes=changes)
    return Run(config, text, Model(config).eval(), Path("nowhere"))


def save_run(path: Path, **options: Any) -> Run:
    run = make(**options)
    run.save(path)
    return run


def change(path: Path, **keys: Any) -> None:
    data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(data | keys), encoding="utf-8")


@pytest.mark.parametrize("name", BOTH)  # models with one stack: tests/nn/test_one_stack.py
def test_loaded_run_equals_the_saved_one(tmp_path: Path, name: str) -> None:
    run = save_run(tmp_path / "deep" / "run", name=name)
    loaded = Run.load(tmp_path / "deep" / "run")
    assert loaded.config == run.config
    assert loaded.codec.config == run.codec.config
    assert loaded.path == tmp_path / "deep" / "run"
    assert not loaded.model.training
    ours = weights_of(run.model)
    theirs = weights_of(loaded.model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    examples = [Example("abca", features="N;PL"), Example("c")]
    assert loaded.codec.encode_source(examples) == run.codec.encode_source(examples)
    source = torch.tensor([[4, 5, 6, 3]])
    target = torch.tensor([[2, 4, 5]])
    assert torch.equal(loaded.model(source, None, target), run.model(source, None, target))
    shared = run.config.share_embeddings
    assert loaded.codec.shared == shared
    assert (loaded.model.source_embedding is loaded.model.target_embedding) == shared
    files = {path.name for path in (tmp_path / "deep" / "run").iterdir()}
    tokenizers = {"tokenizer.json"} if shared else {"source.tokenizer.json", "target.tokenizer.json"}
    assert files == {"config.json", "model.safetensors", "manifest.json"} | tokenizers


def test_saving_twice_gives_equal_files(tmp_path: Path) -> None:
    run = save_run(tmp_path / "a")
    Run.load(tmp_path / "a").save(tmp_path / "b")
    run.save(tmp_path / "a")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_shared_embedding_is_saved_once(tmp_path: Path) -> None:
    run = save_run(tmp_path, name="transformer-base")
    tables = [
        name for name, x in load_file(tmp_path / "model.safetensors").items() if len(x) == run.config.source_vocab
    ]
    assert tables == ["source_embedding.weight"]


def edit(path: Path, drop: str | None = None, **tensors: torch.Tensor) -> None:
    weights = load_file(path / "model.safetensors")
    if drop:
        del weights[drop]
    save_file(weights | tensors, path / "model.safetensors")


def test_all_mismatched_weights_are_named(tmp_path: Path) -> None:
    save_run(tmp_path)
    edit(
        tmp_path,
        drop="encoder.norm.bias",
        **{"encoder.extra": torch.zeros(2), "decoder.norm.weight": torch.zeros(9)},
    )
    with pytest.raises(UserError) as error:
        Run.load(tmp_path)
    text = str(error.value)
    assert f"{tmp_path / 'model.safetensors'}: weights do not fit config.json" in text
    assert "missing: encoder.norm.bias" in text
    assert "not known: encoder.extra [2]" in text
    assert "decoder.norm.weight: shape [9] where config.json says [8]" in text


@pytest.mark.parametrize(
    ("stack", "whole"),
    [
        ({"width": 1_000_000}, {}),
        ({"ff": 1_000_000, "layers": 40}, {}),
        ({"position": "learned", "max_length": 2**31 - 1}, {}),
        ({}, {"source_vocab": 2**31 - 1, "target_vocab": 2**31 - 1}),
    ],
)
def test_config_larger_than_its_weights_is_refused(
    tmp_path: Path, stack: dict[str, Any], whole: dict[str, Any]
) -> None:
    """A run from an untrusted source must not allocate memory for weights that it does not contain."""
    model = save_run(tmp_path).config.model_dump(mode="json")
    change(tmp_path, model=model | whole | {side: model[side] | stack for side in ("encoder", "decoder")})
    with pytest.raises(UserError, match=r"weights do not fit config\.json\n  \S*(: shape|missing:)"):
        Run.load(tmp_path)


def test_failed_load_does_not_change_the_model(tmp_path: Path) -> None:
    run = save_run(tmp_path)
    edit(tmp_path, **{"decoder.norm.weight": torch.zeros(9), "decoder.norm.bias": torch.full((8,), 5.0)})
    before = {name: x.clone() for name, x in weights_of(run.model).items()}
    with pytest.raises(UserError):
        load_weights(run.model, tmp_path / "model.safetensors")
    assert all(torch.equal(x, before[name]) for name, x in weights_of(run.model).items())


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_truncated_weights_are_refused(tmp_path: Path, cut: int) -> None:
    save_run(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"model\.safetensors: not a readable safetensors file"):
        Run.load(tmp_path)


def test_garbage_weights_are_refused(tmp_path: Path) -> None:
    save_run(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 1000)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        Run.load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none: no such run directory"):
        Run.load(tmp_path / "none")
    with pytest.raises(UserError, match=r"not a run directory: it has no config\.json"):
        Run.load(tmp_path)
    save_run(tmp_path / "first")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    (tmp_path / "frits").mkdir()
    (tmp_path / "frits/config.json").write_text('{"model_type": "bert"}')  # a config of another library
    with pytest.raises(UserError, match=r"no such run directory; did you mean .*/first\?$"):
        Run.load(tmp_path / "frist")
    with pytest.raises(UserError, match=r"no such run directory$"):
        Run.load(tmp_path / "second")
    with pytest.raises(UserError, match=r"it has no config\.json; there are runs in it: .*/first$"):
        Run.load(tmp_path)
    save_run(tmp_path)
    (tmp_path / "target.tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"target\.tokenizer\.json"):
        Run.load(tmp_path)
    save_run(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: no such file; the run has no weights yet"):
        Run.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not readable as JSON"), ("[1]", "format None"), ("{}", "format None")]
)
def test_broken_config_is_refused(tmp_path: Path, content: str, message: str) -> None:
    save_run(tmp_path)
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_config(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)


def test_run_of_version_0_4_loads(tmp_path: Path) -> None:
    run = save_run(tmp_path)
    model = run.config.model_dump(mode="json") | {"output": "symbols"}
    change(tmp_path, model=model)
    data = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del data["task"]
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    (tmp_path / "manifest.json").unlink()  # version 0.4 did not write one
    loaded = Run.load(tmp_path)
    assert loaded.config == run.config and loaded.task.name == "pairs"


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_other_format_numbers_are_refused(tmp_path: Path, number: object) -> None:
    save_run(tmp_path)
    change(tmp_path, format=number)
    with pytest.raises(UserError, match="format"):
        read_config(tmp_path)


def test_config_mistakes_name_their_key(tmp_path: Path) -> None:
    run = save_run(tmp_path)
    model = run.config.model_dump(mode="json")
    change(tmp_path, model=model | {"encoder": model["encoder"] | {"layer": 2}}, colour="blue")
    with pytest.raises(UserError) as error:
        read_config(tmp_path)
    assert "model.encoder.layer: no such key; did you mean 'layers'?" in str(error.value)
    assert "colour: no such key" in str(error.value)


def test_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    """Another tokenizer under the same name would give ids that the model does not have."""
    save_run(tmp_path)
    Tokenizer.train("char", ["abcdefgh"]).save(tmp_path / "source.tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer|vocab"):
        Run.load(tmp_path)


def test_weights_survive_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights({"a": torch.ones(3)}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"w\.safetensors: cannot write"):
            save_weights({"a": torch.ones(30_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(load_file(path)["a"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_unwritable_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="file"):
        make().save(tmp_path / "file")
    with pytest.raises(UserError, match="cannot make this directory"):
        make().save(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="cannot write"):
        save_weights({"a": torch.ones(1)}, tmp_path / "none" / "w.safetensors")
    (tmp_path / "run" / "source.tokenizer.json").mkdir(parents=True)
    with pytest.raises(UserError, match=r"source\.tokenizer\.json"):
        make().save(tmp_path / "run")


def test_weights_and_config_have_equal_permissions(tmp_path: Path) -> None:
    save_run(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_views_are_saved_with_their_values(tmp_path: Path) -> None:
    x = torch.arange(6.0).view(2, 3)
    save_weights({"a": x.T, "b": x[0]}, tmp_path / "w")
    loaded = load_file(tmp_path / "w")
    assert torch.equal(loaded["a"], x.T)
    assert torch.equal(loaded["b"], x[0])


def test_average_is_the_mean(tmp_path: Path) -> None:
    runs = [save_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    merged = average([tmp_path / str(seed) for seed in range(3)], tmp_path / "mean")
    loaded = weights_of(Run.load(tmp_path / "mean").model)
    for name, x in loaded.items():
        expected = torch.stack([weights_of(run.model)[name].double() for run in runs]).mean(0)
        assert torch.equal(x, expected.float())
        assert torch.equal(x, weights_of(merged.model)[name])


def test_average_of_one_run_equals_that_run(tmp_path: Path) -> None:
    run = save_run(tmp_path / "a")
    average([tmp_path / "a"], tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert run.config == read_config(tmp_path / "b").model


def test_interrupted_average_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(tmp_path / "a")
    (tmp_path / "a" / "alignment.json").write_text('{"heads": [[0, 1]]}')

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("regard.weight_files.save_weights", interrupt)
        average([tmp_path / "a"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert average([tmp_path / "a"], tmp_path / "out").path == tmp_path / "out"
    assert (tmp_path / "out" / "alignment.json").read_text() == '{"heads": [[0, 1]]}'
    with pytest.raises(UserError, match="out: exists already"):
        average([tmp_path / "a"], tmp_path / "out")


def test_average_refuses_runs_that_differ(tmp_path: Path) -> None:
    save_run(tmp_path / "a")
    save_run(tmp_path / "b", name="transformer-small")
    save_run(tmp_path / "c", text=codec("xyz"))  # the same sizes, but other letters
    with pytest.raises(UserError, match="at least one"):
        average([], tmp_path / "out")
    for other in "bc":
        with pytest.raises(UserError, match="not the same model and vocabulary"):
            average([tmp_path / "a", tmp_path / other], tmp_path / "out")
    assert not (tmp_path / "out").exists()
