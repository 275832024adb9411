"""Shell completion, called as bash calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Literal, get_args, get_origin

import pytest

from kit.toy import call
from regard.cli.app import VERBS, load_verb
from regard.cli.completion import READS_RUNS, VALUES, VerbCompletion
from regard.presets import PRESETS
from regard.recipe import Strategy, recipe_names

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

    def suggestions(line: str, loads: bool = False) -> list[str]:
        variables = {
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
            "_REGARD_COMPLETE": "complete_bash",
        }
        command = [sys.executable, "-c", CODE]
        process = subprocess.run(
            command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, check=True
        )
        assert loads or not {"torch", "numpy", "sacrebleu", "tokenizers"} & set(process.stderr.split())
        return process.stdout.split()

    return suggestions


def test_verbs_are_completed(complete):
    assert complete("regard ") == list(VERBS)
    assert complete("regard in") == ["inspect", "info"]
    assert "--version" in complete("regard --")


def test_recipes_presets_and_keys_are_completed(complete):
    assert complete("regard train ") == recipe_names()
    assert complete("regard train --preset rnn") == ["rnn-bahdanau", "rnn-luong"]
    assert complete("regard train --set wid") == ["width="]
    assert complete("regard train --data pa") == []  # the shell completes files
    assert complete("regard info ") == [*PRESETS, *recipe_names(), "runs/one", "runs/two", "three"]


def test_run_directories_are_completed(complete):
    assert complete("regard generate ") == ["runs/one", "runs/two", "three"]
    assert complete("regard average new ru") == ["runs/one", "runs/two"]
    assert complete("regard evaluate ./runs/o") == ["./runs/one"]
    assert complete("regard evaluate runs/one --against t") == ["three"]
    assert complete("regard generate runs/one words") == []
    assert set(READS_RUNS) == set(VERBS) - {"demo", "train"}


def test_options_are_completed(complete):
    """Their names require loading the module of the verb."""
    assert complete("regard generate runs/one --be", loads=True) == ["--beam"]
    assert complete("regard generate runs/one --beam 5 --be", loads=True) == []


def suggest(verb: str, *words: str) -> list[str]:
    """Suggestions for the last, incomplete word, computed in this process."""
    stand_in = VerbCompletion(verb, load_verb)
    with stand_in.make_context(verb, list(words[:-1]), resilient_parsing=True) as context:
        return [item.value for item in stand_in.shell_complete(context, words[-1])]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_suggested_once_unless_repeatable(verb):
    options = [parameter for parameter in load_verb(verb).params if parameter.param_type_name == "option"]
    names = [name for option in options for name in (*option.opts, *option.secondary_opts)]
    assert sorted(suggest(verb, "-")) == sorted([*names, "-h", "--help"])
    assert suggest(verb, "--") == [name for name in [*names, "--help"] if name.startswith("--")]
    for option in options:
        value = [] if option.is_flag else ["1"]
        assert (option.opts[0] in suggest(verb, option.opts[0], *value, "--")) == option.multiple


def test_earlier_errors_on_the_line_do_not_prevent_completion():
    assert suggest("generate", "run", "--zzz", "--beam", "many", "--nb") == ["--nbest"]


def test_values_of_options_are_completed(complete):
    assert complete("regard info --strategy ") == list(get_args(Strategy))
    assert complete("regard serve runs/one --engine c") == ["ctranslate2"]
    assert complete("regard train --set schedule=co") == ["schedule=cosine", "schedule=constant"]
    assert complete("regard train --set encoder.norm_at=p") == ["encoder.norm_at=pre", "encoder.norm_at=post"]


@pytest.mark.parametrize("verb", VERBS)
def test_suggested_values_of_an_option_are_those_of_its_field(verb):
    options = {parameter.name for parameter in load_verb(verb).params}
    fields = {name: field for value in VALUES.get(verb, ()) for name, field in value.model_fields.items()}
    literals = {name for name in fields if get_origin(fields[name].annotation) is Literal}
    for name in literals & options:
        assert suggest(verb, f"--{name.replace('_', '-')}", "") == list(get_args(fields[name].annotation))
    assert (literals | {"columns"}) & options or verb not in VALUES


def test_the_help_mentions_install_completion():
    assert "--install-completion" in call("--help").out
