"""Training that starts from another run: all weights, some parts, new layers, adapters; and resumed recipes."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_resume import CallAfter, result, send
from test_tasks import labelled_file, tables, train

from kit.backwards import TINY, MakeRecipe
from regard.errors import UserError
from regard.nn.adapters import add_adapters
from regard.recipe import Recipe, load_recipe
from regard.run import Run, saved_recipe
from regard.training.directory import resume_run, resumed_recipe, save_recipe
from regard.training.fit import fit
from regard.training.report import Reporter
from regard.training.trainer import Stopped
from regard.weight_files import weights_of


class CollectingReporter(Reporter):
    def __init__(self) -> None:
        self.text = ""

    def say(self, text: str) -> None:
        self.text += text + "\n"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small base runs: masked language modelling, causal LM and image classification."""
    path = tmp_path_factory.mktemp("bases")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.training.summary.draw_curve", lambda run, metric: None)
        for task in ("masked", "lm", "image"):
            train(tables(task, path, steps=20), path / task)
    return path


def fine_tuning(task: str, base: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    order = tables(task, folder, steps=3, start_from=str(base), **settings)
    return order | {"model": {}, "text": {}}


def messages_of(order: dict[str, Any], run: Path) -> str:
    reporter = CollectingReporter()
    fit(load_recipe(order), run, reporter=reporter)
    return reporter.text


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def test_training_starts_with_all_weights_and_tokens_of_the_base(bases: Path, tmp_path: Path) -> None:
    messages = messages_of(fine_tuning("lm", bases / "lm", tmp_path, lr=1e-9), tmp_path / "run")
    assert "tokens: those of" in messages and "weights: those of" in messages and "new weights:" not in messages
    ours, theirs = weights(tmp_path / "run"), weights(bases / "lm")
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], x, atol=1e-6) for name, x in theirs.items())
    assert Run.load(tmp_path / "run").codec == Run.load(bases / "lm").codec


def test_new_classifier_head_is_initialised_and_reported(bases: Path, tmp_path: Path) -> None:
    messages = messages_of(fine_tuning("classify", bases / "masked", tmp_path, lr=1e-9), tmp_path / "run")
    assert "new weights: output.bias, output.weight" in messages and "unused weights: transform." in messages
    ours, theirs = weights(tmp_path / "run"), weights(bases / "masked")
    assert ours["output.weight"].shape == (2, 32)
    assert all(
        torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours.keys() - {"output.weight", "output.bias"}
    )
    other = tmp_path / "other"
    other.mkdir()
    path = labelled_file(other / "classify.txt")
    path.write_text(path.read_text().replace("\tsea\n", "\tlake\n"))
    renamed = messages_of(fine_tuning("classify", tmp_path / "run", other, lr=1e-9), other / "run")
    assert "new weights: output.bias, output.weight" in renamed  # as many labels, but with other names
    unchanged = messages_of(fine_tuning("classify", tmp_path / "run", tmp_path, lr=1e-9), tmp_path / "again")
    assert "new weights:" not in unchanged  # equal labels keep the head


def test_only_selected_parts_and_new_layers_are_trained(bases: Path, tmp_path: Path) -> None:
    parts = ["encoder.blocks.0.feed_forward", "encoder.embed_norm"]
    messages = messages_of(fine_tuning("classify", bases / "masked", tmp_path, parts=parts), tmp_path / "run")
    ours, theirs = weights(tmp_path / "run"), weights(bases / "masked")
    changes = {name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs.get(name))}
    prefixes = tuple(f"{part}." for part in (*parts, "output"))
    assert changes - {"output.bias"} == {name for name in theirs if name.startswith(prefixes[:-1])}
    count = sum(ours[name].numel() for name in ours if name.startswith(prefixes))
    assert f"trained: {count:,} parameters" in messages
    states = load_file(next((tmp_path / "run/training").glob("step-*")) / "optimizer.safetensors")
    assert {name.rpartition(":")[0] for name in states} == {n for n in ours if n.startswith(prefixes)}


def test_adapters_are_saved_and_merged_into_the_weights(bases: Path, tmp_path: Path) -> None:
    order = fine_tuning("lm", bases / "lm", tmp_path, lora=4, lr=0.02)
    messages = messages_of(order, tmp_path / "run")
    base, adapted = Run.load(bases / "lm"), Run.load(bases / "lm")
    layers = add_adapters(adapted.model, 4, 8.0, ("attention", "cross", "feed_forward"))
    adapters = load_file(tmp_path / "run/adapters.safetensors")
    assert set(adapters) == {f"{layer}.lora_{part}" for layer in layers for part in ("up", "down")}
    assert f"trained: {sum(x.numel() for x in adapters.values()):,} parameters" in messages and "rank 4" in messages
    adapted.model.load_state_dict(adapters, strict=False)
    tokens = torch.arange(30).view(2, 15) % base.config.target_vocab
    nothing = tokens[:, :0]
    with torch.no_grad():
        expected, merged, old = (
            run.model.eval()(nothing, None, tokens) for run in (adapted, Run.load(tmp_path / "run"), base)
        )
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    assert (merged - old).abs().max() > 1e-3
    ours = weights(tmp_path / "run")
    assert ours.keys() == weights_of(base.model).keys()
    assert torch.equal(ours["target_embedding.weight"], weights(bases / "lm")["target_embedding.weight"])


def test_adapters_resume_bit_for_bit_without_the_base(bases: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(bases / "masked", tmp_path / "base")
    order = fine_tuning("classify", tmp_path / "base", tmp_path, lora=2, ema=0.9, average=2)
    order["train"] |= {"steps": 8, "validate_every": 3}
    recipe = load_recipe(order)
    fit(recipe, tmp_path / "uninterrupted", reporter=Reporter())
    with pytest.raises(Stopped):
        fit(recipe, tmp_path / "run", reporter=CallAfter(4, lambda: send(signal.SIGTERM)))
    shutil.rmtree(tmp_path / "base")
    fit(recipe, tmp_path / "run", resume=True, reporter=Reporter())
    assert result(tmp_path / "run") == result(tmp_path / "uninterrupted")


def test_base_tokenizers_that_do_not_fit_the_text_are_refused(tmp_path: Path) -> None:
    pairs = labelled_file(tmp_path / "pairs.tsv")
    order = tables("span", tmp_path, steps=2) | {"task": "pairs", "data": {"train": str(pairs)}}
    train(order, tmp_path / "two")
    with pytest.raises(UserError, match="this run has two"):
        train(fine_tuning("span", tmp_path / "two", tmp_path), tmp_path / "run")
    train(order | {"text": {"source_tokens": "space", "shared": True}}, tmp_path / "spaces")
    with pytest.raises(UserError, match="would lose line ends"):
        train(fine_tuning("span", tmp_path / "spaces", tmp_path), tmp_path / "run")


def test_sentinel_tokens_are_added_to_the_vocabulary(bases: Path, tmp_path: Path) -> None:
    train(tables("span", tmp_path, steps=2), tmp_path / "spans")
    messages = messages_of(fine_tuning("span", tmp_path / "spans", tmp_path), tmp_path / "more")
    assert "new rows" not in messages  # the base has sentinel tokens already
    pairs = labelled_file(tmp_path / "pairs.tsv")
    order = tables("span", tmp_path, steps=2) | {
        "task": "pairs",
        "data": {"train": str(pairs)},
        "text": {"shared": True},
    }
    order |= {"preset": "t5-tiny"}
    train(order, tmp_path / "pairs")
    messages = messages_of(fine_tuning("span", tmp_path / "pairs", tmp_path), tmp_path / "run")
    assert "weights with new rows: source_embedding.weight" in messages
    theirs, ours = (weights(tmp_path / name)["source_embedding.weight"] for name in ("pairs", "run"))
    assert len(ours) == len(theirs) + 100


@pytest.mark.parametrize(
    ("task", "base", "changes", "message"),
    [
        ("lm", "lm", {"preset": "gpt-tiny"}, "brings its own model"),
        ("lm", "lm", {"model": {"decoder": {"ff": 48}}}, r"feed_forward.up.weight: \[64, 32\] there, \[48, 32\] here"),
        ("masked", "lm", {}, "an encoder without a decoder"),
        ("classify", "lm", {}, "an encoder without a decoder"),
        ("classify", "image", {}, "reads images"),
        ("lm", "none", {}, "no such run"),
    ],
)
def test_incompatible_base_runs_are_refused(
    task: str, base: str, changes: dict[str, Any], message: str, bases: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        fit(load_recipe(fine_tuning(task, bases / base, tmp_path) | changes), tmp_path / "run", reporter=Reporter())
    assert not (tmp_path / "run/config.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": ["decoder.blocks.7"]}, r"no part 'decoder.blocks.7'; did you mean 'decoder.blocks.0'"),
        ({"parts": "decoder, decodr"}, "did you mean 'decoder'"),
        ({"lora": 2, "lora_on": ["atention"]}, "no layer is inside a part named atention"),
    ],
)
def test_unknown_parts_are_refused(settings: dict[str, Any], message: str, bases: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        fit(load_recipe(fine_tuning("lm", bases / "lm", tmp_path, **settings)), tmp_path / "run", reporter=Reporter())


@pytest.mark.parametrize("settings", [{"parts": ["decoder"]}, {"lora": 2}])
def test_parts_and_adapters_need_a_run_to_start_from(settings: dict[str, Any], tmp_path: Path) -> None:
    """Untrained weights would stay random."""
    with pytest.raises(UserError, match=rf"train\.{next(iter(settings))}: .*start_from=RUN"):
        train(tables("lm", tmp_path, steps=2, **settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_lora_rank_above_the_layer_size_is_refused(bases: Path, tmp_path: Path) -> None:
    """The check runs before tensors of this rank are allocated."""
    order = fine_tuning("lm", bases / "lm", tmp_path, lora=100_000_000)
    with pytest.raises(UserError, match=r"train\.lora: a rank of at most 32 fits decoder\.blocks\.0\.attention"):
        fit(load_recipe(order), tmp_path / "run", reporter=Reporter())


@pytest.mark.parametrize("text", [{"source_tokens": "byte"}, {"target_tokens": "bpe:50"}, {"min_count": 3}])
def test_tokenizer_settings_that_differ_from_the_base_are_refused(
    text: dict[str, Any], bases: Path, tmp_path: Path
) -> None:
    order = fine_tuning("lm", bases / "lm", tmp_path) | {"text": text}
    key, value = next(iter(text.items()))
    with pytest.raises(
        UserError, match=rf"brings its own tokenizers; leave out the settings that differ\n  text\.{key}: {value} here"
    ):
        fit(load_recipe(order), tmp_path / "run", reporter=Reporter())
    own = Run.load(bases / "lm").codec.config.source_tokens
    order["text"] = {"source_tokens": own, "target_tokens": "auto", "min_count": 1}
    assert "tokens: those of" in messages_of(order, tmp_path / "run")


def test_embeddings_are_shared_only_with_a_shared_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}\t{word.upper()}\n" for word in ("ab", "ba", "aab", "bb") * 9))
    small = {"layers": 1, "width": 16, "heads": 2, "ff": 32}
    order = {
        "preset": "transformer-base",  # this preset shares embeddings
        "model": {"encoder": small, "decoder": small},
        "text": {"source_tokens": "char", "target_tokens": "char"},
        "data": {"train": str(tmp_path / "pairs.tsv")},
        "train": {"steps": 1, "workers": 1},
    }
    train(order, tmp_path / "two")
    two = Run.load(tmp_path / "two").config
    assert two.source_vocab == two.target_vocab and not two.share_embeddings
    train(order | {"text": {"shared": True}}, tmp_path / "one")
    assert Run.load(tmp_path / "one").config.share_embeddings
    with pytest.raises(UserError, match=r"share_embeddings needs one vocabulary for both sides.*text\.shared=true"):
        train(order | {"model": order["model"] | {"share_embeddings": True}}, tmp_path / "explicit")


SAVED = {
    "preset": "transformer-tiny",
    "model": {"encoder": {"layers": 1}, "share_embeddings": False},
    "text": {"source_tokens": "char", "target_tokens": "space", "feature_separator": '"\\\t\x7f'},
    "data": {"train": 'a "b" \\ ü.tsv', "columns": ["source", "features", "target"]},
    "train": {"steps": 10, "workers": 2, "lr": 3e-4, "eps": 1e-9},
}


def resume_saved(tables: dict[str, object]) -> Recipe:
    return resumed_recipe(load_recipe(tables), load_recipe(SAVED), Path("run"))


def test_saved_recipe_loads_unchanged(tmp_path: Path) -> None:
    recipe = load_recipe(SAVED)
    save_recipe(recipe, tmp_path)
    assert saved_recipe(tmp_path) == recipe


def test_missing_and_automatic_settings_keep_the_saved_values() -> None:
    assert resume_saved({}) == load_recipe(SAVED)
    automatic = {"preset": "auto", "text": {"source_tokens": "auto"}, "train": {"workers": 0}}
    assert resume_saved(automatic) == load_recipe(SAVED)
    assert resume_saved(SAVED) == load_recipe(SAVED)


@pytest.mark.parametrize(
    ("saved_workers", "workers", "launched", "expected"), [(2, 0, 3, 3), (1, 0, 2, 2), (3, 2, 1, 2), (2, 0, 1, 2)]
)
def test_run_resumes_with_another_number_of_processes(
    saved_workers: int, workers: int, launched: int, expected: int, bases: Path, tmp_path: Path
) -> None:
    shutil.copytree(bases / "lm", tmp_path / "run")
    saved = saved_recipe(tmp_path / "run")
    save_recipe(saved.with_train(workers=saved_workers), tmp_path / "run")
    reporter = CollectingReporter()
    settings = {"steps": 99, "workers": workers}
    resume_run(load_recipe({"train": settings}), tmp_path / "run", torch.device("cpu"), reporter, launched)
    train = saved_recipe(tmp_path / "run").train
    assert (train.steps, train.workers) == (99, expected)
    message = f"processes: {expected}, {saved_workers} before; the examples of a step stay the same"
    assert (message in reporter.text) == (expected != saved_workers)


def test_new_budget_replaces_the_saved_budget() -> None:
    train = resume_saved({"train": {"minutes": 3}}).train
    assert (train.minutes, train.steps, train.epochs, train.lr) == (3, None, None, 3e-4)


def test_error_names_all_changed_settings() -> None:
    with pytest.raises(UserError) as error:
        resume_saved({"train": {"lr": 1e-3}, "model": {"encoder": {"layers": 2}}, "data": {"train": "other.tsv"}})
    for text in (
        "train.lr: now 0.001, then 0.0003",
        "model.encoder.layers: now 2, then 1",
        "data.train",
        "another directory",
    ):
        assert text in str(error.value)


def listing(directory: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in sorted(directory.rglob("*"))
    }


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        ["config.json", "model.safetensors"],
        ["README.md"],
        ["recipe.toml", "source.tokenizer.json"],  # without prepared data, training may not have written them
        ["training/data/mine.tsv"],
        ["training/step-00000001/x", "training/weights-1.safetensors"],
        ["curve.svg", "alignment.json"],
    ],
)
def test_existing_files_are_not_overwritten(files: list[str], resume: bool, recipe: MakeRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('{"mine": 1}')
    before = listing(out)
    with pytest.raises(
        UserError, match=f"has {files[0].removesuffix('/mine.tsv').removesuffix('/x')}.*another directory"
    ):
        fit(recipe(), out, resume=resume, reporter=Reporter())
    assert listing(out) == before


@pytest.mark.parametrize("resume", [False, True])
def test_converted_run_is_not_overwritten(resume: bool, bases: Path, recipe: MakeRecipe, tmp_path: Path) -> None:
    Run.load(bases / "lm").save(tmp_path / "run")
    before = listing(tmp_path / "run")
    with pytest.raises(UserError, match=r"would overwrite; it is a run, but.*start_from=.*run"):
        fit(recipe(), tmp_path / "run", resume=resume, reporter=Reporter())
    assert listing(tmp_path / "run") == before


def test_run_without_prepared_data_is_not_resumed(bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "lm", tmp_path / "run", ignore=lambda *_: ["training"])
    before = listing(tmp_path / "run")
    with pytest.raises(UserError, match=r"cannot be resumed.*training/data.*start_from"):
        fit(load_recipe({"train": {"steps": 30}}), tmp_path / "run", resume=True, reporter=Reporter())
    assert listing(tmp_path / "run") == before


def test_unrelated_files_are_kept(recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "run/training").mkdir(parents=True)
    for name in ("notes.txt", "training/notes.txt"):
        (tmp_path / "run" / name).write_text("mine")
    fit(recipe(steps=1), tmp_path / "run", reporter=Reporter())
    assert (tmp_path / "run/notes.txt").read_text() == (tmp_path / "run/training/notes.txt").read_text() == "mine"
    with pytest.raises(UserError, match="is a file"):
        fit(recipe(), tmp_path / "run/notes.txt", reporter=Reporter())


class Killed(BaseException):
    """Simulated kill: not an Exception, so that no error handler runs."""


def test_run_stopped_during_setup_starts_again_with_resume(
    bases: Path, recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --resume the error explains how to continue; with it, the result is that of a new run."""
    order, run = recipe(steps=2), tmp_path / "run"
    fit(order, tmp_path / "whole", reporter=Reporter())

    def kill(**fields: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("regard.training.directory.RunConfig", kill)  # config.json is written last
        with pytest.raises(Killed):
            fit(order, run, reporter=Reporter())
    (run / "training/fresh.json").write_text('["of a base run"]')
    (run / "tokenizer.json").write_text("of a shared vocabulary")
    before = listing(run)
    assert "recipe.toml" in before and "config.json" not in before
    with pytest.raises(UserError, match=r"stopped here before its first step; repeat it with resume=True"):
        fit(order, run, reporter=Reporter())
    assert listing(run) == before
    fit(order, run, resume=True, reporter=Reporter())
    assert result(run) == result(tmp_path / "whole")


def test_empty_output_path_is_refused(recipe: MakeRecipe) -> None:
    with pytest.raises(UserError, match="out: is empty"):
        fit(recipe(), "", reporter=Reporter())


@pytest.mark.parametrize("kind", ["features", "header", "jsonl"])
def test_the_recipe_of_a_run_reads_the_same_data_again(tmp_path: Path, kind: str) -> None:
    """Recognised columns are stored in the recipe."""
    rows = [(f"{'abc'[i % 3]}{i}", f"V;{'AB'[i % 2]}", f"x{i}") for i in range(60)]
    if kind == "jsonl":
        data = tmp_path / "t.jsonl"
        data.write_text("".join(json.dumps({"tgt": t, "tags": f, "src": s}) + "\n" for s, f, t in rows))
    else:
        data = tmp_path / "t.tsv"
        lines = ["\t".join(row) for row in rows] if kind == "features" else ["target\tsource", *(r[0] for r in rows)]
        if kind == "header":
            lines[1:] = [f"{target}\t{source}" for source, _, target in rows]
        data.write_text("\n".join(lines) + "\n")
    small = {"model": {"encoder": TINY, "decoder": TINY}, "train": {"steps": 1, "workers": 1}}
    fit(load_recipe({"preset": "transformer-tiny", "data": {"train": str(data)}, **small}), tmp_path / "one")
    fit(saved_recipe(tmp_path / "one"), tmp_path / "two")
    one, two = (tmp_path / name / "training" / "data" for name in ("one", "two"))
    for name in ("train/source.bin", "train/target.bin", "valid.jsonl", "source.tokenizer.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert Run.load(tmp_path / "two").codec.columns == Run.load(tmp_path / "one").codec.columns
    assert ("features" in Run.load(tmp_path / "one").codec.columns) == (kind != "header")
