"""User errors: reported early, in the terms of the command line, and without leaving files behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from kit.toy import call, small
from regard.errors import UserError
from regard.presets import PRESETS, unused_changes


def train(toy: Path, out: Path, *words: object):
    return call("train", "--data", toy / "pairs.tsv", "--out", out, "--steps", 2, "--workers", 1, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--preset", "transformer-tinny"), "did you mean 'transformer-tiny'?"),
        (("--set", "dropout=1.5"), "encoder.dropout: input should be less than 1, not 1.5"),
        (("--preset", "transformer-tiny", "--set", "encoder.layers=two"), "encoder.layers: input should be a valid"),
        (("--task", "classify", "--set", "layers=0"), "encoder.layers: "),
        (("--task", "lm", "--preset", "bert-tiny"), "needs a model with a decoder without an encoder"),
        (("--device", "gpu"), "device is auto, cpu, cuda"),
        pytest.param(
            ("--device", "cuda"),
            "error: device: torch finds no CUDA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (("--set", "lora=4"), "train.lora: "),
        (("--seed", 10**30), "train.seed: input should be less than or equal to"),
        (("--workers", 10**4000), "train.workers: input should be less than or equal to"),
        (("--set", "train.steps=" + "9" * 5000), "--set train.steps: an integer of more than 64 bits"),
        (("--set", "parts=" + "[" * 5000), "--set parts: an integer of more than 64 bits, or tables or lists nested"),
        (("--preset", "rnn-luong", "--set", "heads=3"), "model: encoder.heads, decoder.heads: not used by a recurrent"),
    ],
)
def test_an_invalid_model_is_reported_before_data_is_read(words, message, toy, tmp_path, monkeypatch):
    def read(*_: object, **__: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr("regard.training.fit.prepare", read)
    result = train(toy, tmp_path / "new" / "run", *words)
    assert result.code == 2 and message in result.err, result.err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_run_name_is_refused(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "out: is empty" in train(toy, "").err
    assert "out: is empty" in call("demo", "--out", "").err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_training_leaves_no_directory_behind(toy, tmp_path):
    (tmp_path / "bad.tsv").write_text("")
    existing = tmp_path / "existing"
    existing.mkdir()
    for out in (tmp_path / "new" / "run", existing):
        result = call("train", "--data", tmp_path / "bad.tsv", "--out", out)
        assert result.code == 2, result.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bad.tsv", "existing"]


def test_an_invalid_option_names_the_recipe_and_the_command_line(toy, tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text('preset = "transformer-tiny"')
    result = call("train", recipe, "--data", toy / "pairs.tsv", "--out", tmp_path / "run", "--steps", 0)
    assert f"error: {recipe} and the command line: not valid\n  train.steps: " in result.err


def test_changes_unused_by_recurrent_stacks_are_listed():
    rnn = PRESETS["rnn-luong"]
    used = {"layers": 3, "width": 8, "dropout": 0.1, "position": "none"}
    assert unused_changes(rnn, {"encoder": used, "decoder": used | {"score": "dot", "max_length": 9}}) == []
    assert unused_changes(rnn, {"encoder": {"score": "dot"}}) == [("encoder", "score")]
    assert unused_changes(rnn, {"encoder": {"score": "dot"}, "decoder": {"score": "dot"}}) == []  # one stack uses it
    assert unused_changes(rnn, {"encoder": {"ff": 8}, "decoder": {"ff": 8}}) == [("encoder", "ff"), ("decoder", "ff")]
    mixed = {"encoder": {"heads": 4}, "decoder": {"heads": 4, "mixer": "gru"}}
    assert unused_changes(PRESETS["transformer-tiny"], mixed) == []
    mixed["decoder"]["heads"] = 2
    assert unused_changes(PRESETS["transformer-tiny"], mixed) == [("decoder", "heads")]
    assert unused_changes(PRESETS["transformer-tiny"], {"encoder": {"heads": 4, "norm": "rms"}}) == []


def test_another_preset_ignores_unused_recipe_settings_but_refuses_unused_set(toy, tmp_path):
    """Settings of the recipe that another preset does not use are ignored; those of --set are errors."""
    words = ("train", "g2p", "--data", toy / "pairs.tsv", "--preset", "rnn-luong", "--steps", 2, "--workers", 1)
    result = call(*words, "--out", tmp_path / "run", "--set", "width=16", "--set", "layers=1")
    assert result.code == 0, result.err
    result = call(*words, "--out", tmp_path / "other", "--set", "ff=16")
    assert result.code == 2 and "encoder.ff, decoder.ff: not used" in result.err
    assert call("info", "g2p", "--set", "preset=rnn-luong").code == 0
    assert "decoder.ff: not used" in call("info", "rnn-luong", "--set", "ff=16").err


def test_a_key_that_is_set_only_on_resume_is_refused(toy, tmp_path):
    assert train(toy, tmp_path / "run", *small()).code == 0
    result = train(toy, tmp_path / "run", "--resume", "--set", "embed_norm=true")
    assert "model.encoder.embed_norm: now True, then as in the preset" in result.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("verb", [("generate", "RUN", "words"), ("info", "transformer-tiny"), ("--help",)])
def test_a_full_device_is_reported(verb, toy, tmp_path):
    (tmp_path / "words").write_text("abc\n" * 3)
    words = [{"RUN": str(toy / "run"), "words": str(tmp_path / "words")}.get(word, word) for word in verb]
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "regard", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (process.returncode, process.stderr) == (2, "error: cannot write the output: No space left on device\n")


def test_closed_standard_streams_are_reported(toy):
    for closed, message in (
        (0, "stdin: is closed; name a file to read"),
        (1, "cannot write the output: stdout is closed"),
    ):
        words = [sys.executable, "-m", "regard", "generate", str(toy / "run")]
        process = subprocess.run(
            words, input=None, stderr=subprocess.PIPE, text=True, check=False, preexec_fn=lambda fd=closed: os.close(fd)
        )
        assert process.returncode == 2 and message in process.stderr, process.stderr


INTERNAL_NAMES = (
    r"\b(Recipe|Stack|Config|Options|Train|Data|Text|Value|ValidationError|Traceback|[A-Z][a-z]+(Config|Error))\b"
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "train pairs.tsv --out new",
            "pairs.tsv: not a recipe (a TOML file); to train on this file, use --data pairs.tsv",
        ),
        ("train --data pairs.tsv --out new --set lr 3", "--set lr: write it as key=value"),
        ("train --data pairs.tsv --out new --preset transformer", "regard info describes them"),
        ("train flat.toml --data pairs.tsv --out new", "train must be a table of keys and values, not 5"),
        (
            "train --data spaces.tsv --out new",
            "spaces.tsv: no usable example: 0 of 1 line; skipped 1 wrong column count",
        ),
        ("train --source words.txt --out new", "data: source and target belong together"),
        ("info transformer-tiny --set model.encoder=5", "encoder must be a table of keys and values, not 5"),
        ("generate words.txt run", "words.txt: is a file, not a run directory; a run is named first, files after it"),
        ("generate run hello", "hello: no such file; a text itself goes to standard input: echo hello | regard ..."),
        ("generate run hello --out x", "hello: no such file; a text itself goes to standard input: echo hello | reg"),
        ("generate run words.txt --nbest 3", "nbest 3 needs a beam at least as wide, not 1, or sample"),
        (
            "evaluate run words.txt",
            "words.txt: no usable example: 0 of 2 lines; skipped 2 wrong column count (words.txt:1",
        ),
        ("evaluate run spaces.tsv", "most lines have one column: is the separator a tab?"),
        (
            "score run words.txt",
            "words.txt: no usable example: 0 of 2 lines; skipped 2 wrong column count (words.txt:1",
        ),
        ("heads run words.txt", "most lines have one column: is the separator a tab?"),
        ("prune run new --data words.txt --heads 1", "most lines have one column: is the separator a tab?"),
        ("run words.txt", "regard has no verb 'run'; a verb comes first"),
        (
            "info transformer-tiny --set encoder.hidden_size=8",
            "encoder.hidden_size: no such key; did you mean 'width'?",
        ),
    ],
)
def test_common_beginner_errors_get_a_helpful_message(line, message, toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("abc\nbad\n")
    (tmp_path / "spaces.tsv").write_text("abc AH B K\n")
    (tmp_path / "flat.toml").write_text("train = 5\n")
    for name in ("run", "pairs.tsv"):
        (tmp_path / name).symlink_to(toy / name)
    result = call(*line.split())
    assert result.code == 2 and message in result.err, result.err
    assert not re.search(INTERNAL_NAMES, result.err)
    assert not (tmp_path / "new").exists()


def test_the_library_names_settings_and_the_command_line_names_options(toy, tmp_path):
    (tmp_path / "three.tsv").write_text("a\tb\tc\n" * 5)
    cases = (
        (
            tmp_path / "three.tsv",
            tmp_path / "run",
            r"for example data\.columns=source,features,target",
            "--columns source,",
        ),
        (
            toy / "pairs.tsv",
            toy / "run",
            "continue it with resume=True, or choose another directory",
            "with --resume, or",
        ),
    )
    for data, out, message, option in cases:
        with pytest.raises(UserError, match=message) as error:
            regard.train(data=data, out=out)
        assert "--" not in str(error.value)
        assert option in call("train", "--data", data, "--out", out).err
    with pytest.raises(UserError, match=r"use data\.train=.*three\.tsv") as error:
        regard.train(tmp_path / "three.tsv", tmp_path / "run", data="x")
    assert "--" not in str(error.value)
    assert "give a table with --data FILE.tsv, or --source FILE and --target FILE" in call("train", "--out", "x").err
