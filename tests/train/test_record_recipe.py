from __future__ import annotations

from pathlib import Path

import pytest

from regard.errors import UserError
from regard.recipe import Recipe, load_recipe
from regard.run import saved_recipe
from regard.training.start import require_free, resumed_recipe, save_recipe

SAVED = {
    "preset": "transformer-tiny",
    "model": {"encoder": {"layers": 1}, "share_embeddings": False},
    "text": {"source_tokens": "char", "target_tokens": "space", "feature_separator": '"\\\t\x7f'},
    "data": {"train": 'a "b" \\ ü.tsv', "columns": ["source", "features", "target"]},
    "train": {"steps": 10, "workers": 2, "lr": 3e-4, "eps": 1e-9},
}


def resumed(given: dict[str, object]) -> Recipe:
    return resumed_recipe(load_recipe(given), load_recipe(SAVED), Path("run"))


def test_a_saved_recipe_reads_back_the_same(tmp_path: Path) -> None:
    recipe = load_recipe(SAVED)
    save_recipe(recipe, tmp_path)
    assert saved_recipe(tmp_path) == recipe


def test_what_is_not_given_or_left_to_choose_is_as_it_was() -> None:
    assert resumed({}) == load_recipe(SAVED)
    assert resumed({"preset": "auto", "text": {"source_tokens": "auto"}, "train": {"workers": 0}}) == load_recipe(SAVED)
    assert resumed(SAVED) == load_recipe(SAVED)


def test_a_given_budget_replaces_the_old_one() -> None:
    train = resumed({"train": {"minutes": 3}}).train
    assert (train.minutes, train.steps, train.epochs, train.lr) == (3, None, None, 3e-4)


def test_all_changed_keys_are_named() -> None:
    with pytest.raises(UserError) as error:
        resumed({"train": {"lr": 1e-3}, "model": {"encoder": {"layers": 2}}, "data": {"train": "other.tsv"}})
    for text in (
        "train.lr: now 0.001, then 0.0003",
        "model.encoder.layers: now 2, then 1",
        "data.train",
        "another --out",
    ):
        assert text in str(error.value)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    require_free(tmp_path / "new")
    (tmp_path / "training").mkdir()
    require_free(tmp_path)
    (tmp_path / "README.md").touch()
    with pytest.raises(UserError, match=r"has README\.md"):
        require_free(tmp_path)
    (tmp_path / "config.json").touch()
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(UserError, match="--resume"):
        require_free(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        require_free(tmp_path / "README.md")
