"""Shared fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import regard.parallel.ranks
from kit.backwards import TINY, MakeRecipe, write_pairs
from regard.parallel.children import Child, Template
from regard.recipe import Recipe, load_recipe


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use one thread in this process and its children, and draw no curves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("regard.training.summary.draw_curve", lambda run, metric: None)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The child processes that the test starts as ranks."""
    children: list[Child] = []
    start_template = regard.parallel.ranks.start_template

    def start(modules: Sequence[str]) -> Template:
        template = start_template(modules)
        start_child = template.start

        def record(*arguments: Any) -> Child:
            children.append(start_child(*arguments))
            return children[-1]

        monkeypatch.setattr(template, "start", record)
        return template

    monkeypatch.setattr(regard.parallel.ranks, "start_template", start)
    return children


@pytest.fixture
def recipe(tmp_path: Path) -> MakeRecipe:
    """Factory of recipes for a small dataset; keyword arguments override training settings."""
    train = write_pairs(tmp_path / "train.tsv", 120)
    valid = write_pairs(tmp_path / "valid.tsv", 20, seed=2)

    def make(model: dict[str, Any] | None = None, **settings: Any) -> Recipe:
        defaults = {"steps": 12, "batch_examples": 10, "validate_every": 4, "log_every": 3, "workers": 1, "warmup": 5}
        return load_recipe(
            {
                "preset": "transformer-tiny",
                "model": {"encoder": TINY, "decoder": TINY, **(model or {})},
                "text": {"source_tokens": "char", "target_tokens": "space"},
                "data": {"train": str(train), "valid": str(valid)},
                "train": defaults | settings,
            }
        )

    return make
