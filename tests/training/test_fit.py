"""From a recipe to a run directory."""

from __future__ import annotations

import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from regard.config import to_toml
from regard.errors import UserError
from regard.recipe import Recipe, load_recipe
from regard.run import WEIGHTS, Run
from regard.training.fit import fit
from regard.training.log import read_log
from regard.training.report import Reporter

TINY = {"layers": 1, "width": 16, "heads": 2, "ff": 32, "dropout": 0.0}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdef", k=draw.randint(1, 4))) for _ in range(200)]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{word}\t{' '.join(word.upper())}\n" for word in words) + "only one column\n")
    return path


def tables(pairs: Path, **settings: Any) -> dict[str, Any]:
    train = {"steps": 4, "batch_examples": 20, "validate_every": 2, "log_every": 1, "workers": 1, **settings}
    return {"model": {"encoder": TINY, "decoder": TINY}, "data": {"train": str(pairs)}, "train": train}


class CollectingReporter(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.closed = False

    def say(self, text: str) -> None:
        self.lines.append(text)

    def close(self) -> None:
        self.closed = True


def test_choices_are_reported_saved_and_used(pairs: Path, tmp_path: Path) -> None:
    reporter, run = CollectingReporter(), tmp_path / "run"
    order = load_recipe(
        {"data": {"train": str(pairs)}, "model": {"encoder": TINY, "decoder": TINY}, "train": {"epochs": 1}}
    )
    report = fit(order, run, reporter=reporter)
    messages = "\n".join(reporter.lines)
    for text in (
        "source tokens: char",
        "target tokens: space",
        "wrong column count",
        "preset: transformer-tiny",
        "processes: 1",
    ):
        assert text in messages
    assert reporter.closed
    saved = load_recipe(tomllib.loads((run / "recipe.toml").read_text()))
    assert (saved.preset, saved.text.source_tokens, saved.text.target_tokens) == ("transformer-tiny", "char", "space")
    assert (saved.train.workers, saved.train.device) == (1, "cpu")
    assert saved.data == order.data
    assert {p.name for p in run.iterdir()} == {
        "alignment.json",
        "config.json",
        "model.safetensors",
        "source.tokenizer.json",
        "target.tokenizer.json",
        "recipe.toml",
        "log.jsonl",
        "README.md",
        "manifest.json",
        "training",
    }
    loaded = Run.load(run)
    assert loaded.model.size == report.parameters
    events = read_log(run / "log.jsonl")
    assert events[0]["event"] == "start" and events[-1]["event"] == "end"
    assert report.metric == saved.train.metric == "wer"
    assert report.value == min(event["wer"] for event in events if event["event"] == "valid")


def test_a_model_learns_and_its_score_is_true(pairs: Path, tmp_path: Path) -> None:
    from regard.data.prepare import open_prepared
    from regard.decode.engine import generate

    stack = {**TINY, "width": 32, "position": "sinusoid"}  # turned positions need more than one layer to find places
    order = tables(pairs, steps=120, validate_every=20, metric="accuracy", lr=0.004, warmup=20)
    order["model"] = {"encoder": stack, "decoder": stack}
    report = fit(load_recipe(order), tmp_path / "run", reporter=Reporter())
    losses = [event["loss"] for event in read_log(tmp_path / "run/log.jsonl") if event["event"] == "valid"]
    assert losses[-1] < 0.6 * losses[0]
    assert report.value is not None and report.value > 10
    examples = open_prepared(tmp_path / "run/training/data").valid_examples
    run = Run.load(tmp_path / "run")
    right = [best.text == e.target for e, (best, *_) in zip(examples, generate(run, examples), strict=True)]
    assert report.value == pytest.approx(100 * sum(right) / len(right))


@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-4), ("bf16", 0.02)])
def test_two_processes_compute_what_one_does(pairs: Path, tmp_path: Path, precision: str, close: float) -> None:
    settings = {"steps": 6, "accumulate": 3, "batch_examples": 3, "metric": "per", "label_smoothing": 0.1}
    settings["precision"] = precision  # fp32 after all on a machine without the other
    for workers in (1, 2):  # batches of an odd number of rows, and of one
        fit(load_recipe(tables(pairs, workers=workers, **settings)), tmp_path / str(workers), reporter=Reporter())
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in "12")
    for a, b in zip(one[1:], two[1:], strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"event", "reason", "seconds", "tokens_per_second", "examples_per_second"}:
            assert a[key] == pytest.approx(b[key], rel=close), key


def test_an_existing_run_is_not_touched(pairs: Path, tmp_path: Path) -> None:
    order, run = load_recipe(tables(pairs)), tmp_path / "run"
    fit(order, run, reporter=Reporter())
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"--resume.*another --out"):
        fit(order, run, reporter=Reporter())
    with pytest.raises(UserError, match=r"train\.lr: now 0\.5, then 0\.0053"):
        fit(load_recipe(tables(pairs, lr=0.5)), run, resume=True, reporter=Reporter())
    reporter = CollectingReporter()
    assert fit(order, run, resume=True, reporter=reporter).progress.step == 4
    assert "finished" in reporter.lines[0]
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_larger_budget_goes_on(pairs: Path, tmp_path: Path) -> None:
    rate = {"schedule": "constant"}  # others know the budget from the start
    fit(load_recipe(tables(pairs, **rate)), tmp_path / "run", reporter=Reporter())
    report = fit(load_recipe({"train": {"steps": 6}}), tmp_path / "run", resume=True, reporter=Reporter())
    assert report.progress.step == 6
    assert "steps = 6" in (tmp_path / "run/recipe.toml").read_text()
    longer = fit(load_recipe(tables(pairs, steps=6, **rate)), tmp_path / "uninterrupted", reporter=Reporter())
    assert longer.progress.best is not None and report.progress.best is not None
    assert longer.progress.best.scores == report.progress.best.scores


def test_mistakes_are_reported_before_anything_is_written(pairs: Path, tmp_path: Path) -> None:
    def refused(order: dict[str, Any], match: str) -> None:
        with pytest.raises(UserError, match=match):
            fit(load_recipe(order), tmp_path / "run", reporter=Reporter())
        assert not (tmp_path / "run/config.json").exists()

    refused(tables(tmp_path / "missing.tsv"), "missing.tsv: no such file")
    refused({**tables(pairs), "preset": "transfomer-tiny"}, "did you mean 'transformer-tiny'")
    refused({**tables(pairs), "model": {"encoder": {"layer": 2}}}, "did you mean 'layers'")
    if not torch.cuda.is_available():
        refused(tables(pairs, device="cuda"), "no CUDA GPU")
    fit(load_recipe(tables(pairs)), tmp_path / "run", reporter=Reporter())  # and nothing of it is in the way


def test_an_impossible_directory(pairs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        fit(load_recipe(tables(pairs)), tmp_path / "file" / "run", reporter=Reporter())
    with pytest.raises(UserError, match="is a file"):
        fit(load_recipe(tables(pairs)), tmp_path / "file", reporter=Reporter())


def test_bf16_that_does_not_work_is_not_used(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.device.bf16_problem", lambda *_, **__: "the test crashed with SIGILL")
    reporter = CollectingReporter()
    fit(load_recipe(tables(pairs, precision="bf16")), tmp_path / "run", reporter=reporter)
    assert "precision: fp32 instead of bf16: the test crashed with SIGILL" in reporter.lines
    assert 'precision = "fp32"' in (tmp_path / "run/recipe.toml").read_text()
    again = fit(load_recipe(tables(pairs, precision="bf16")), tmp_path / "run", resume=True, reporter=Reporter())
    assert again.progress.step == 4  # the same order goes on with what was settled


def test_a_run_in_bf16_goes_on_in_fp32_on_a_machine_without(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str | None] = [None, "the test crashed with SIGILL"]
    monkeypatch.setattr("regard.device.bf16_problem", lambda *_, **__: problems.pop(0))
    order = {"precision": "bf16", "schedule": "constant"}
    fit(load_recipe(tables(pairs, **order)), tmp_path / "run", reporter=Reporter())
    assert 'precision = "bf16"' in (tmp_path / "run/recipe.toml").read_text()
    for budget, message in (
        (6, "fp32 instead of bf16: the test crashed with SIGILL"),
        (8, "fp32, as chosen when the run began"),
    ):
        reporter = CollectingReporter()
        more = load_recipe({"train": {"steps": budget, "precision": "bf16"}})
        assert fit(more, tmp_path / "run", resume=True, reporter=reporter).progress.step == budget
        assert f"precision: {message}" in reporter.lines
        assert 'precision = "fp32"' in (tmp_path / "run/recipe.toml").read_text()


TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "regard",
    "train",
]


def test_torchrun_and_workers_are_the_same(pairs: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tables(pairs, workers=0)))
    done = subprocess.run(
        [*TORCHRUN, recipe, "--out", tmp_path / "launched"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the model is in") == 1  # one process speaks for all
    fit(load_recipe(tables(pairs, workers=2)), tmp_path / "run", reporter=Reporter())
    launched, started = (load_file(tmp_path / name / WEIGHTS) for name in ("launched", "run"))
    assert launched.keys() == started.keys()
    assert all(torch.equal(x, started[name]) for name, x in launched.items())
    assert "workers = 2" in (tmp_path / "launched/recipe.toml").read_text()


@pytest.mark.slow
def test_a_mistake_under_torchrun_is_reported_once(pairs: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tables(pairs, workers=3)))
    done = subprocess.run([*TORCHRUN, recipe, "--out", tmp_path / "new"], capture_output=True, text=True, check=False)
    assert done.stderr.count("train.workers: 3 asked for, but 2 processes were started") == 1
    assert not (tmp_path / "new").exists()


def test_the_recipe_is_a_value(pairs: Path, tmp_path: Path) -> None:
    order = load_recipe(tables(pairs))
    before = order.model_dump()
    fit(order, tmp_path / "run", reporter=Reporter())
    assert order.model_dump() == before and isinstance(order, Recipe)
