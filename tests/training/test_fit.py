"""`fit` trains a recipe into a run directory."""

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
    reporter = CollectingReporter()
    run = tmp_path / "run"
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
        "statistics.json",
        "training",
    }
    loaded = Run.load(run)
    assert loaded.model.size == report.parameters
    events = read_log(run / "log.jsonl")
    assert events[0]["event"] == "start" and events[-1]["event"] == "end"
    assert report.metric == saved.train.metric == "wer"
    assert report.value == min(event["wer"] for event in events if event["event"] == "valid")


def test_model_learns_and_reported_accuracy_equals_that_of_its_outputs(pairs: Path, tmp_path: Path) -> None:
    from regard.data.prepare import open_prepared
    from regard.decode.torch_engine import generate

    stack = {**TINY, "width": 32, "position": "sinusoid"}  # rotary positions would need more than one layer
    order = tables(pairs, steps=120, validate_every=20, metric="accuracy", lr=0.004, warmup=20)
    order["model"] = {"encoder": stack, "decoder": stack}
    report = fit(load_recipe(order), tmp_path / "run", reporter=Reporter())
    losses = [event["loss"] for event in read_log(tmp_path / "run/log.jsonl") if event["event"] == "valid"]
    assert losses[-1] < 0.6 * losses[0]
    assert report.value is not None and report.value > 10
    examples = open_prepared(tmp_path / "run/training/data").valid_examples
    run = Run.load(tmp_path / "run")
    matches = [best.text == e.target for e, (best, *_) in zip(examples, generate(run, examples), strict=True)]
    assert report.value == pytest.approx(100 * sum(matches) / len(matches))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.02)])
def test_two_processes_log_the_values_of_one(pairs: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    settings = {"steps": 6, "accumulate": 3, "batch_examples": 3, "metric": "per", "label_smoothing": 0.1}
    settings["precision"] = precision  # falls back to fp32 on a machine without bf16
    for workers in (1, 2):  # includes batches of one row and of an odd number of rows
        fit(load_recipe(tables(pairs, workers=workers, **settings)), tmp_path / str(workers), reporter=Reporter())
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in "12")
    for a, b in zip(one[1:], two[1:], strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"event", "reason", "seconds", "tokens_per_second", "examples_per_second"}:
            assert a[key] == pytest.approx(b[key], rel=tolerance), key


def test_existing_run_is_not_modified(pairs: Path, tmp_path: Path) -> None:
    order = load_recipe(tables(pairs))
    run = tmp_path / "run"
    fit(order, run, reporter=Reporter())
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"resume=True.*another directory"):
        fit(order, run, reporter=Reporter())
    with pytest.raises(UserError, match=r"train\.lr: now 0\.5, then 0\.0053"):
        fit(load_recipe(tables(pairs, lr=0.5)), run, resume=True, reporter=Reporter())
    reporter = CollectingReporter()
    assert fit(order, run, resume=True, reporter=reporter).progress.step == 4
    assert "finished" in reporter.lines[0]
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_resume_with_a_larger_budget_gives_the_scores_of_an_uninterrupted_run(pairs: Path, tmp_path: Path) -> None:
    rate = {"schedule": "constant"}  # the rates of other schedules depend on the budget
    fit(load_recipe(tables(pairs, **rate)), tmp_path / "run", reporter=Reporter())
    report = fit(load_recipe({"train": {"steps": 6}}), tmp_path / "run", resume=True, reporter=Reporter())
    assert report.progress.step == 6
    assert "steps = 6" in (tmp_path / "run/recipe.toml").read_text()
    uninterrupted = fit(load_recipe(tables(pairs, steps=6, **rate)), tmp_path / "uninterrupted", reporter=Reporter())
    assert uninterrupted.progress.best is not None and report.progress.best is not None
    assert uninterrupted.progress.best.scores == report.progress.best.scores


def test_errors_are_reported_before_files_are_written(pairs: Path, tmp_path: Path) -> None:
    def expect_error(order: dict[str, Any], match: str) -> None:
        with pytest.raises(UserError, match=match):
            fit(load_recipe(order), tmp_path / "run", reporter=Reporter())
        assert not (tmp_path / "run/config.json").exists()

    expect_error(tables(tmp_path / "missing.tsv"), "missing.tsv: no such file")
    expect_error({**tables(pairs), "preset": "transfomer-tiny"}, "did you mean 'transformer-tiny'")
    expect_error({**tables(pairs), "model": {"encoder": {"layer": 2}}}, "did you mean 'layers'")
    if not torch.cuda.is_available():
        expect_error(tables(pairs, device="cuda"), "no CUDA GPU")
    fit(load_recipe(tables(pairs)), tmp_path / "run", reporter=Reporter())  # the failed attempts left no run behind


def test_output_path_that_is_or_contains_a_file_is_refused(pairs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        fit(load_recipe(tables(pairs)), tmp_path / "file" / "run", reporter=Reporter())
    with pytest.raises(UserError, match="is a file"):
        fit(load_recipe(tables(pairs)), tmp_path / "file", reporter=Reporter())


def test_broken_bf16_falls_back_to_fp32(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.device.bf16_problem", lambda *_, **__: "the test crashed with SIGILL")
    reporter = CollectingReporter()
    fit(load_recipe(tables(pairs, precision="bf16")), tmp_path / "run", reporter=reporter)
    assert "precision: fp32 instead of bf16: the test crashed with SIGILL" in reporter.lines
    assert 'precision = "fp32"' in (tmp_path / "run/recipe.toml").read_text()
    report = fit(load_recipe(tables(pairs, precision="bf16")), tmp_path / "run", resume=True, reporter=Reporter())
    assert report.progress.step == 4  # the same recipe resumes with the saved precision


def test_bf16_run_resumes_in_fp32_on_a_machine_without_bf16(
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
        longer = load_recipe({"train": {"steps": budget, "precision": "bf16"}})
        assert fit(longer, tmp_path / "run", resume=True, reporter=reporter).progress.step == budget
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


def test_torchrun_and_local_workers_give_identical_weights(pairs: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tables(pairs, workers=0)))
    process = subprocess.run(
        [*TORCHRUN, recipe, "--out", tmp_path / "launched"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("the model is in") == 1  # only rank 0 reports
    fit(load_recipe(tables(pairs, workers=2)), tmp_path / "run", reporter=Reporter())
    launched, started = (load_file(tmp_path / name / WEIGHTS) for name in ("launched", "run"))
    assert launched.keys() == started.keys()
    assert all(torch.equal(x, started[name]) for name, x in launched.items())
    assert "workers = 2" in (tmp_path / "launched/recipe.toml").read_text()


@pytest.mark.slow
def test_error_under_torchrun_is_reported_once(pairs: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tables(pairs, workers=3)))
    process = subprocess.run(
        [*TORCHRUN, recipe, "--out", tmp_path / "new"], capture_output=True, text=True, check=False
    )
    assert process.stderr.count("train.workers: is 3, but 2 processes were started") == 1
    assert not (tmp_path / "new").exists()


def test_fit_does_not_modify_the_recipe(pairs: Path, tmp_path: Path) -> None:
    order = load_recipe(tables(pairs))
    before = order.model_dump()
    fit(order, tmp_path / "run", reporter=Reporter())
    assert order.model_dump() == before and isinstance(order, Recipe)
