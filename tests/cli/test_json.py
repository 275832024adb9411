"""The `--json` output of every verb for every task: one strict JSON value per line."""

from __future__ import annotations

import importlib
import importlib.util
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit.models import family, letters, picture
from kit.toy import CliResult, call, strict_json
from regard.cli import output
from regard.cli.app import VERBS
from regard.metrics import METRICS
from regard.run import Run
from regard.tasks import TASKS

PAIRS = "".join(f"{source}\t{source[::-1]}\n" for source in ("abc", "bcd", "cab", "dab", "ab", "cd", "abcd", "bad") * 3)
TEXT = "abc dab\ncab ab\nbad\n" * 12
# task -> kind of its run
KINDS = {"pairs": None, "span": None, "lm": "lm", "masked": "masked", "classify": "classes", "image": "image"}
# task -> input lines, where they differ from the default
SOURCES = {"masked": "a<mask>c\nno\n", "image": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("json")
    (path / "pairs.tsv").write_text(PAIRS)
    (path / "text.txt").write_text(TEXT)
    (path / "labels.tsv").write_text("".join(f"{'ab' * n}\t{('one', 'two')[n % 2]}\n" for n in range(1, 15)))
    images = np.concatenate([picture(n) for n in range(15)])
    np.savez(path / "images.npz", images=images, labels=np.array(["one", "two", "three"] * 5))
    for task, kind in KINDS.items():
        (span_run() if task == "span" else letters() if kind is None else family(kind)).save(path / task)
    return path


def span_run() -> Run:
    """An untrained span corruption run, whose vocabulary includes the sentinels."""
    from regard.data.objectives import SENTINELS
    from regard.model import Model
    from regard.presets import preset
    from regard.text.codec import Codec
    from regard.text.tokenizer import Tokenizer

    codec = Codec(Tokenizer.train("char", [TEXT]))
    little = {"layers": 1, "width": 16, "heads": 2, "ff": 32}
    torch.manual_seed(0)
    config = preset("t5-tiny", codec.source_vocab + SENTINELS, changes={"encoder": little, "decoder": little})
    return Run(config, codec, Model(config).eval(), Path("span"), task_name="span")


def data(folder: Path, task: str) -> Path:
    return (
        folder
        / {"pairs": "pairs.tsv", "text": "text.txt", "labelled": "labels.tsv", "images": "images.npz"}[
            TASKS[task].reads
        ]
    )


def json_rows(result: CliResult) -> list[Any]:
    assert result.code == 0, result.err
    assert result.lines
    return [strict_json(line) for line in result.lines]


def test_every_task_and_verb_with_json_is_tested() -> None:
    assert KINDS.keys() == TASKS.keys()
    modules = {verb: importlib.import_module(f"regard.cli.{verb}") for verb in VERBS}
    verbs = {verb for verb, module in modules.items() if "json" in signature(module.command).parameters}
    assert verbs == {"generate", "score", "evaluate", "heads", "prune", "info", "convert"}


@pytest.mark.parametrize("task", TASKS)
def test_generate_prints_json(task: str, folder: Path) -> None:
    sources = SOURCES.get(task, "abc\n\nßa\n")
    order = [folder / "images.npz"] if sources is None else ["--workers", 1] if task in ("pairs", "span", "lm") else []
    rows = json_rows(call("generate", folder / task, *order, "--json", stdin=sources or ""))
    if TASKS[task].labels:
        assert all(row.keys() >= {"label", "probabilities"} for row in rows)
    else:
        keys = {"text", "score", "tokens", "token_scores"}
        assert all(h.keys() >= keys for row in rows for h in row["hypotheses"])
    if task in ("pairs", "lm"):
        several = ["--beam", 3, "--nbest", 2, "--top-tokens", 2, "--max-length", 4]
        more = json_rows(call("generate", folder / task, *several, "--json", stdin="abc\n"))
        assert len(more[0]["hypotheses"]) == 2
        stream = json_rows(call("generate", folder / task, "--stream", "--max-length", 3, "--json", stdin="abc\n"))
        assert len(stream) > 1
    if task == "pairs":
        json_rows(call("generate", folder / task, "--mbr", 3, "--alignment", "--json", stdin="abc\n"))


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if "decoder" in task.stacks])
def test_score_prints_json(task: str, folder: Path) -> None:
    rows = json_rows(call("score", folder / task, "--max-source", 5, "--json", stdin="abc\tcba\nßa\tq\nabcabc\tabc\n"))
    assert [row["score"] is None for row in rows] == [False, False, True]


@pytest.mark.parametrize("task", TASKS)
def test_evaluate_prints_json_for_every_metric(task: str, folder: Path) -> None:
    names = TASKS[task].evaluation or tuple(METRICS)
    metrics = [part for name in names for part in ("--metric", name)]
    against = ["--against", folder / task, "--bootstrap", 5]
    (row,) = json_rows(call("evaluate", folder / task, data(folder, task), *metrics, *against, "--json"))
    assert list(row["metrics"]) == list(row["against"]) == list(names)
    (default,) = json_rows(call("evaluate", folder / task, data(folder, task), "--bootstrap", 0, "--json"))
    assert default["metrics"].keys() <= set(names)


@pytest.mark.parametrize("task", TASKS)
def test_heads_and_info_print_json(task: str, folder: Path) -> None:
    file = folder / "pairs.tsv" if task == "span" else data(folder, task)
    assert all("layer" in row for row in json_rows(call("heads", folder / task, file, "--json")))
    assert json_rows(call("info", folder / task, "--json"))[0]["parameters"]["total"] > 0


@pytest.mark.parametrize("task", TASKS)
def test_prune_prints_json(task: str, folder: Path, tmp_path: Path) -> None:
    file = folder / "pairs.tsv" if task == "span" else data(folder, task)
    order = ["--data", file, "--heads", 1, "--json"]
    (row,) = json_rows(call("prune", folder / task, tmp_path / "small", *order))
    assert row["after"]["heads"] == row["before"]["heads"] - 1


def test_info_lists_presets_and_recipes_as_json() -> None:
    assert {"preset", "recipe"} <= {key for row in json_rows(call("info", "--json")) for key in row}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("task", ["lm", "masked", "classify", "image"])
def test_convert_prints_json(task: str, folder: Path, tmp_path: Path) -> None:
    (row,) = json_rows(call("convert", folder / task, tmp_path / "hf", "--to", "hf", "--samples", 1, "--json"))
    assert row["proof"]["difference"] < 1e-3


def test_infinity_and_nan_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    output.out_json({"a": [1.5, float("inf"), {"b": float("nan")}], "c": (float("-inf"),)})
    assert strict_json(capsys.readouterr().out) == {"a": [1.5, None, {"b": None}], "c": [None]}
