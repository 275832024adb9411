"""Shell completion, asked as bash asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from regard.cli.app import VERBS
from regard.cli.completion import READS_RUNS
from regard.presets import PRESETS
from regard.recipe import recipe_names
from toykit import call

CODE = """
import sys
from regard.cli.app import run
try:
    run()
finally:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.fixture
def complete(tmp_path):
    for name in ("runs/one", "runs/two", "three"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "runs" / "none").mkdir()

    def ask(line: str) -> list[str]:
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_REGARD_COMPLETE": "complete_bash"}
        command = [sys.executable, "-c", CODE]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | asked, capture_output=True, text=True, check=True)
        assert not {"torch", "numpy", "sacrebleu", "tokenizers"} & set(done.stderr.split())
        return done.stdout.split()

    return ask


def test_verbs(complete):
    assert complete("regard ") == list(VERBS)
    assert complete("regard in") == ["inspect", "info"]
    assert "--version" in complete("regard --")


def test_names(complete):
    assert complete("regard train ") == recipe_names()
    assert complete("regard train --preset rnn") == ["rnn-bahdanau", "rnn-luong"]
    assert complete("regard train --set wid") == ["width="]
    assert complete("regard train --data pa") == []  # the shell knows files
    assert complete("regard info ") == [*PRESETS, *recipe_names(), "runs/one", "runs/two", "three"]


def test_runs(complete):
    assert complete("regard generate ") == ["runs/one", "runs/two", "three"]
    assert complete("regard average new ru") == ["runs/one", "runs/two"]
    assert complete("regard evaluate ./runs/o") == ["./runs/one"]
    assert complete("regard evaluate runs/one --against t") == ["three"]
    assert complete("regard generate runs/one words") == []
    assert set(READS_RUNS) == set(VERBS) - {"demo", "train"}


def test_it_can_be_installed():
    assert "--install-completion" in call("--help").out
