"""Inputs and head statistics of models other than encoder-decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit.models import FAMILIES, LANGUAGE, family, picture
from regard.cli import heads
from regard.config import PatchConfig
from regard.data.images import LabelledImages
from regard.data.reader import LineCounter, Source
from regard.errors import UserError
from regard.inspect.heads import measure_heads, patch_distances, sum_patch_attention
from regard.inspect.inputs import MASK_EVERY, WINDOW, TaskData, read_task_data, task_batches
from regard.inspect.prune import ablation_importance, gradient_importance, mean_loss
from regard.nn.hooks import patch
from regard.text.codec import Example

TEXT = "abcab dcba cabba " * 20
LABELLED = [Example("abc", "one"), Example("cab a", "two"), Example("d", "one")]
PICTURES = LabelledImages(np.stack([picture(i) for i in range(5)]), ["one", "two", "three", "one", "two"])


def task_data(kind: str) -> TaskData:
    return PICTURES if kind == "image" else LABELLED if kind == "classes" else TEXT


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "vectors"])
def test_every_head_is_measured(kind: str) -> None:
    run = family(kind)
    heads_ = measure_heads(run, task_data(kind))
    assert len(heads_) == 8
    for head in heads_:
        assert head.gradient >= 0 and head.ablation is not None and head.alignment is None
        assert 0 <= head.confidence <= 1 and head.entropy >= 0 and head.distance >= 0 and head.what
        assert (head.induction is not None) == kind.startswith("lm")
    assert not any(module._forward_hooks for module in run.model.modules())


@pytest.mark.parametrize("kind", LANGUAGE)
@torch.no_grad()
def test_text_is_split_into_consecutive_windows(kind: str) -> None:
    run = family(kind)
    batches = task_batches(run, TEXT, tokens=3 * WINDOW)
    labels = torch.cat([batch.label_BT.flatten() for batch in batches])
    ids = run.codec.target.encode([TEXT])[0]
    assert labels.tolist() == ids[: len(labels)] and len(ids) - len(labels) < WINDOW
    inputs = torch.cat([batch.input_BT.flatten() for batch in batches])
    assert inputs.tolist() == [run.config.start_id, *ids[: len(labels) - 1]]
    expected = torch.cat([run.model(batch.input_BT, None).log_softmax(-1).flatten(0, 1) for batch in batches])
    assert mean_loss(run.model, batches) == pytest.approx(-float(expected[range(len(labels)), labels].mean()), abs=1e-4)


def test_ordinary_tokens_are_masked_and_special_tokens_are_not() -> None:
    run = family("masked")
    (batch,) = task_batches(run, TEXT)
    assert batch.keep_BT is not None
    masked = torch.eq(batch.source_BS, run.config.ids.mask or 0)
    assert torch.equal(masked, batch.keep_BT) and batch.tokens == int(masked.sum())
    assert torch.equal(batch.source_BS[~masked], batch.label_BT[~masked])
    assert not masked[:, 0].any() and not masked[:, -1].any()
    assert batch.tokens == pytest.approx(batch.label_BT.numel() / MASK_EVERY, rel=0.1)


@pytest.mark.parametrize("kind", ["lm-hashed", "lm-distances", "masked", "image"])
def test_ablated_head_has_no_importance(kind: str) -> None:
    run = family(kind)
    batches = task_batches(run, task_data(kind))
    name = next(iter(ablation_importance(run.model, batches)))[0]
    with patch(run.model, {f"{name}.mixed": torch.zeros_like}):
        importance = gradient_importance(run.model, batches)
        assert all(importance[name, head] == 0 for head in range(4)) and max(importance.values()) > 0


def test_attention_distance_of_patches_is_computed_from_the_weights() -> None:
    run = family("image")
    distance_SS = patch_distances(PatchConfig(height=8, width=8, size=2))

    def row(x_BHTS: torch.Tensor) -> torch.Tensor:
        """Heads attend to the own patch, to the next patch in the row, to the class token, and evenly."""
        out = torch.full_like(x_BHTS, 1 / 17)
        out[:, :3] = 0.0
        out[:, 0] = torch.eye(17)
        right = [0, *(t + 1 if t % 4 else t - 3 for t in range(1, 17))]
        out[:, 1, range(17), right] = 1.0
        out[:, 2, :, 0] = 1.0
        return out

    with patch(run.model, {"encoder.blocks.1.attention.weights": row}):
        statistics = [h for h in measure_heads(run, PICTURES, ablation=False) if h.layer == 1]
        sums = sum_patch_attention(run.model, task_batches(run, PICTURES))["encoder.blocks.1.attention"]
    assert [h.what for h in statistics] == ["own patch", "same row", "class token", "everything evenly"]
    assert statistics[0].distance == statistics[2].distance == 0.0
    assert statistics[1].distance == pytest.approx((3 * 2 + 6) / 4)
    assert statistics[3].distance == pytest.approx(float(distance_SS.mean()), rel=1e-5)
    assert sums.queries == 16 * len(PICTURES.images_NCHW)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("lm", "", "the text is empty"),
        ("classes", [Example("abc", "on")], "did you mean 'one'"),
        ("image", LabelledImages(PICTURES.images_NCHW, []), "these have no labels"),
        ("image", LabelledImages(PICTURES.images_NCHW[:1], ["four"]), "label"),
    ],
)
def test_unusable_data_is_refused(kind: str, data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_batches(family(kind), data)


def test_links_need_a_source_and_an_output() -> None:
    with pytest.raises(UserError, match="links need a model"):
        measure_heads(family("lm"), TEXT, links=[[]])


def test_files_are_read_for_the_task_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT + "\n" + TEXT, encoding="utf-8")
    (tmp_path / "labels.tsv").write_text("abc\tone\ncab\ttwo\n", encoding="utf-8")
    np.savez(tmp_path / "images.npz", images=PICTURES.images_NCHW, labels=np.array(PICTURES.labels))

    def read(kind: str, name: str, most: int) -> TaskData:
        return read_task_data(family(kind), Source((str(tmp_path / name),)), LineCounter(), most)

    assert read("lm", "text.txt", 1) == TEXT + "\n" and read("masked", "text.txt", 9) == TEXT + "\n" + TEXT + "\n"
    assert read("classes", "labels.tsv", 1) == [Example("abc", "one")]
    data = read("image", "images.npz", 2)
    assert isinstance(data, LabelledImages) and len(data.images_NCHW) == 2 and data.labels == ["one", "two"]


def test_heads_command_prints_statistics_of_a_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family("lm").save(tmp_path / "run")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    heads.command(str(tmp_path / "run"), str(tmp_path / "text.txt"), no_ablation=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t") == [*heads.NAMES, "induction"] and len(lines) == 9
    assert not (tmp_path / "run" / "alignment.json").exists()
    heads.command(str(tmp_path / "run"), str(tmp_path / "text.txt"), no_ablation=True, json=True)
    assert "induction" in json.loads(capsys.readouterr().out.splitlines()[0])


def test_heads_command_prints_statistics_of_an_image_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family("image").save(tmp_path / "run")
    np.savez(tmp_path / "images.npz", images=PICTURES.images_NCHW, labels=np.array(PICTURES.labels))
    heads.command(str(tmp_path / "run"), str(tmp_path / "images.npz"), json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 8 and all(row["distance"] > 0 for row in rows)
