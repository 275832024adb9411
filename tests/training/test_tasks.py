"""Every task trains from a file, learns, and resumes to the result of an uninterrupted run."""

from __future__ import annotations

import json
import math
import random
import signal
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_resume import CallAfter, result, send

from regard.config import to_toml
from regard.errors import UserError
from regard.recipe import load_recipe
from regard.run import Run
from regard.training.fit import TrainingReport, fit
from regard.training.log import read_log
from regard.training.report import Reporter
from regard.training.trainer import Stopped

TINY = {"layers": 1, "width": 32, "heads": 2, "ff": 64, "dropout": 0.0, "attention_dropout": 0.0, "ff_dropout": 0.0}
WORDS = ("sun", "moon", "star", "cloud", "rain")


def text_file(path: Path, words: int = 2500, seed: int = 1) -> Path:
    """Predictable text: words in a fixed order, in lines of varying length."""
    draw = random.Random(seed)
    pieces = [WORDS[index % len(WORDS)] + ("\n" if draw.random() < 0.2 else " ") for index in range(words)]
    path.write_text("".join(pieces), encoding="utf-8")
    return path


def labelled_file(path: Path, count: int = 300) -> Path:
    draw = random.Random(2)
    rows = []
    for _ in range(count):
        label = draw.choice(["land und", "sea"])
        letters = [*draw.choices("xyz", k=draw.randint(2, 6)), label[0]]
        draw.shuffle(letters)
        rows.append(f"{''.join(letters)}\t{label}\n")
    path.write_text("".join(rows))
    return path


def image_file(path: Path, count: int = 300, **arrays: Any) -> Path:
    """Images with one bright corner; the label is the number of the corner."""
    draw = np.random.default_rng(3)
    labels = draw.integers(4, size=count)
    images = draw.integers(0, 60, (count, 4, 4)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * (label // 2) :, 2 * (label % 2) :][:2, :2] += 150
    np.savez(path, **({"images": images, "labels": labels} | arrays))
    return path


FILES = {"lm": text_file, "masked": text_file, "span": text_file, "classify": labelled_file, "image": image_file}


def tables(task: str, folder: Path, model: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    path = folder / f"{task}.{'npz' if task == 'image' else 'txt'}"
    if not path.exists():
        FILES[task](path)
    train = {"steps": 150, "validate_every": 50, "log_every": 50, "workers": 1, "warmup": 10, "lr": 5e-3, **settings}
    if task in ("lm", "masked", "span"):
        train = {"context": 32, "batch_examples": 16} | train
    tokens = {} if task == "image" else {"source_tokens": "char", "target_tokens": "char"}
    return {
        "task": task,
        "model": {"encoder": TINY, "decoder": TINY, **(model or {})},
        "text": tokens,
        "data": {"train": str(path)},
        "train": train,
    }


def train(order: dict[str, Any], run: Path) -> TrainingReport:
    return fit(load_recipe(order), run, reporter=Reporter())


def entropy(path: Path) -> float:
    """Entropy per character, computed from the character frequencies."""
    counts = Counter(path.read_text())
    return -sum(n * math.log(n / counts.total()) for n in counts.values()) / counts.total()


@pytest.mark.parametrize(("task", "share"), [("lm", 0.35), ("masked", 0.6), ("span", 0.6)])
def test_loss_on_text_falls_below_the_entropy_of_characters(task: str, share: float, tmp_path: Path) -> None:
    bucketed = TINY | {"position": "bucket"}  # bucketed positions distinguish neighbours easily
    model = {"encoder": bucketed, "decoder": bucketed} if task == "masked" else {}
    best = train(tables(task, tmp_path, model), tmp_path / "run").progress.best
    assert best is not None and best.value < share * entropy(tmp_path / f"{task}.txt")
    if task == "lm":
        assert best.scores["perplexity"] == pytest.approx(math.exp(best.value))
        assert best.scores["bits_per_char"] == pytest.approx(best.value / math.log(2), rel=0.01)  # a token is a letter
    run = Run.load(tmp_path / "run")
    assert run.config.frame == run.codec.frame
    assert (run.config.decoder is None, run.config.encoder is None) == (task == "masked", task == "lm")
    assert (run.codec.ids.mask is not None) == (task == "masked")


@pytest.mark.parametrize("task", ["classify", "image"])
def test_classifiers_learn_their_labels(task: str, tmp_path: Path) -> None:
    report = train(tables(task, tmp_path), tmp_path / "run")
    assert report.metric == "accuracy" and report.value is not None and report.value > 95
    run = Run.load(tmp_path / "run")
    assert run.labels == (("land und", "sea") if task == "classify" else ("0", "1", "2", "3"))
    assert run.config.classes == len(run.labels)
    assert (run.pixels is not None) == (task == "image")


@pytest.mark.parametrize(("task", "model"), [("masked", {"pooler": True}), ("image", {})])
def test_two_processes_log_the_values_of_one(task: str, model: dict[str, Any], tmp_path: Path) -> None:
    """Also with a pooler, which gets no gradient in masked language modelling."""
    settings = {"steps": 3, "validate_every": 2, "log_every": 1, "batch_examples": 5, "accumulate": 2}
    for workers in (1, 2):
        train(tables(task, tmp_path, model, workers=workers, **settings), tmp_path / str(workers))
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in "12")
    for a, b in zip(one[1:], two[1:], strict=True):
        for key in a.keys() - {"event", "reason", "seconds", "tokens_per_second", "examples_per_second"}:
            assert a[key] == pytest.approx(b[key], rel=2e-3), key


MEMORY = {"memory": 24, "position": "relative"}


@pytest.mark.parametrize(
    ("task", "stack"), [("lm", {}), ("lm", MEMORY), ("masked", {}), ("span", {}), ("classify", {}), ("image", {})]
)
def test_resume_after_a_signal_gives_the_result_of_an_uninterrupted_run(
    task: str, stack: dict[str, Any], tmp_path: Path
) -> None:
    """With dropout and a moving average, interrupted in the middle of an epoch."""
    shape = TINY | stack | {"dropout": 0.2}
    settings = {"steps": 12, "validate_every": 5, "log_every": 3, "ema": 0.9, "accumulate": 2}
    order = load_recipe(tables(task, tmp_path, {"encoder": shape, "decoder": shape}, **settings))
    fit(order, tmp_path / "uninterrupted", reporter=Reporter())
    with pytest.raises(Stopped):
        fit(order, tmp_path / "run", reporter=CallAfter(7, lambda: send(signal.SIGTERM)))
    files = {path.name for path in (tmp_path / "run/training/step-00000008").iterdir()}
    assert ("carried.safetensors" in files) == bool(stack)
    fit(order, tmp_path / "run", resume=True, reporter=Reporter())
    assert result(tmp_path / "run") == result(tmp_path / "uninterrupted")


def test_memory_learns_dependencies_longer_than_a_segment(tmp_path: Path) -> None:
    """A capital letter repeats the letter nine places before it, which is outside a segment of eight."""
    draw = random.Random(4)
    (tmp_path / "lm.txt").write_text(
        "".join(f"{letter}12345678{letter.upper()}\n" for letter in draw.choices("abcd", k=4000))
    )
    losses = []
    for memory in (0, 12):
        shape = TINY | {"memory": memory, "position": "relative"}
        order = tables("lm", tmp_path, {"encoder": shape, "decoder": shape}, context=8, steps=200)
        losses.append(train(order, tmp_path / f"run{memory}").value or 9)
    minimum = math.log(4) / 11  # with memory, only one letter of each line is random
    assert losses[0] > 2 * minimum and losses[1] < 1.4 * minimum


def test_segment_memory_requires_a_single_process(tmp_path: Path) -> None:
    shape = TINY | MEMORY
    with pytest.raises(UserError, match="one process"):
        train(tables("lm", tmp_path, {"encoder": shape, "decoder": shape}, workers=2), tmp_path / "run")


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("lm", {"preset": "transformer-tiny"}, "a decoder without an encoder"),
        ("pairs", {"preset": "gpt-tiny"}, "an encoder and a decoder"),
        ("masked", {"preset": "gpt-tiny"}, "an encoder without a decoder"),
        ("lm", {"text": {"source_tokens": "space"}}, "space drops line ends"),
        ("lm", {"text": {"source_tokens": "char", "target_tokens": "byte"}}, "cannot be byte and char"),
        ("lm", {"train": {"metric": "bleu"}}, "lm has loss, not bleu"),
        ("lm", {"data": {"source": "a", "target": "b"}}, "takes one file"),
        ("lm", {"data": {}}, r"plain text with data\.train"),
        ("image", {"data": {}}, r"with data\.train=FILE\.npz"),
        ("lm", {"preset": "gpt-tiny", "model": {"decoder": {"max_length": 8}}}, "do not fit into the 8 positions"),
        ("image", {"model": {"patches": {"height": 9, "size": 3}}}, "cannot be cut evenly"),
    ],
)
def test_errors_are_reported_before_files_are_written(
    task: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    order = tables("classify" if task == "pairs" else task, tmp_path) | {"task": task} | changes
    with pytest.raises(UserError, match=message):
        train(order, tmp_path / "run")
    assert not (tmp_path / "run/config.json").exists()


def test_tasks_have_own_defaults_and_resume_keeps_the_saved_settings(tmp_path: Path) -> None:
    assert load_recipe({}).train.label_smoothing == 0.1
    recipe = load_recipe({"task": "lm"})
    assert (recipe.train.label_smoothing, recipe.train.context, recipe.train.metric) == (0.0, 256, "loss")
    assert load_recipe({"task": "image"}).train.metric == "accuracy"
    assert load_recipe({"task": "lm", "train": {"label_smoothing": 0.3}}).train.label_smoothing == 0.3
    train(tables("lm", tmp_path, steps=2, label_smoothing=0.3), tmp_path / "run")
    report = fit(load_recipe({"task": "lm", "train": {"steps": 3}}), tmp_path / "run", resume=True, reporter=Reporter())
    assert report.progress.step == 3
    assert "label_smoothing = 0.3" in (tmp_path / "run/recipe.toml").read_text()


def test_text_shorter_than_the_context_can_be_trained(tmp_path: Path) -> None:
    (tmp_path / "lm.txt").write_text("a short text\n")
    report = train(tables("lm", tmp_path, context=512, steps=2), tmp_path / "run")
    assert report.value is not None and math.isfinite(report.value)


def test_position_table_covers_the_longest_text(tmp_path: Path) -> None:
    path = labelled_file(tmp_path / "classify.txt")
    path.write_text(path.read_text() + "x" * 40 + "l\tsea\n")
    order = tables("classify", tmp_path, steps=2)
    train(order, tmp_path / "run")
    short = TINY | {"max_length": 20}
    with pytest.raises(UserError, match=r"data\.max_length: rows of 43 tokens do not fit into the 20 positions"):
        train(order | {"model": {"encoder": short}}, tmp_path / "other")
    preset = load_recipe(order | {"preset": "bert-tiny", "model": {"encoder": TINY}, "data": {"train": str(path)}})
    path.write_text(path.read_text() + "x" * 510 + "l\tsea\n")
    fit(preset, tmp_path / "long", reporter=Reporter())
    encoder = Run.load(tmp_path / "long").config.encoder
    assert encoder is not None and encoder.max_length == 513


def test_runs_saved_without_a_task_can_be_resumed(tmp_path: Path) -> None:
    """Recipe and prepared data of old versions have no task, and there are no manifests."""
    path = labelled_file(tmp_path / "classify.txt")
    order = tables("classify", tmp_path, steps=2) | {"task": "pairs", "data": {"train": str(path)}}
    train(order, tmp_path / "run")
    record = tmp_path / "run/training/data/prepared.json"
    old = json.loads(record.read_text())
    del old["task"], old["labels"]
    record.write_text(json.dumps(old | {"format": 1}))
    (record.parent / "manifest.json").unlink()
    recipe = tmp_path / "run/recipe.toml"
    settings = tomllib.loads(recipe.read_text())
    del settings["task"]
    settings["train"] = {k: v for k, v in settings["train"].items() if not k.startswith(("mask", "span", "lora"))}
    recipe.write_text(to_toml(settings))
    (tmp_path / "run/manifest.json").unlink()
    assert (
        fit(load_recipe({"train": {"steps": 3}}), tmp_path / "run", resume=True, reporter=Reporter()).progress.step == 3
    )
