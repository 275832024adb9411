"""Suggestions for unknown names, plural nouns in messages, and out-of-memory errors."""

from __future__ import annotations

import ast
import errno
import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import typer

from kit.models import letters
from kit.toy import call
from regard.cli.app import VERBS, app, load_verb
from regard.config import Config, Stack
from regard.decode.request import Options
from regard.device import choose_device
from regard.errors import UserError, is_out_of_memory, plural
from regard.metrics import METRICS
from regard.recipe import Data, Metric, Recipe, Text, Train, assign, load_recipe, read_recipe, setting_names
from regard.suggest import closest, nearest, synonyms
from regard.tasks import BOTH, TASKS
from regard.text.tokenizer import LEARNED, SIMPLE, parse_scheme

ROOT = Path(__file__).parent.parent
FIELDS = {name for value in (Config, Stack, Data, Recipe, Text, Train, Options) for name in value.model_fields}


def test_every_synonym_refers_to_an_existing_name():
    options = {option for verb in VERBS for parameter in load_verb(verb).params for option in parameter.opts}
    options |= {option for parameter in typer.main.get_command(app).params for option in parameter.opts}
    known = FIELDS | set(VERBS) | set(TASKS) | {option.removeprefix("--").replace("-", "_") for option in options}
    values = {*METRICS, *(name for task in TASKS.values() for name in task.evaluation), *SIMPLE, *LEARNED, "cuda"}
    assert set(synonyms()) - known - values == set()


def test_settings_are_not_synonyms_of_other_settings():
    """A valid name is never replaced by another."""
    for name in [*setting_names(), *Options.model_fields]:
        assert nearest(name, FIELDS) == name


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("learning_rate", "lr"),
        ("hidden_size", "width"),
        ("d_model", "width"),
        ("embed_dim", "width"),
        ("num_layers", "layers"),
        ("n_layer", "layers"),
        ("num_heads", "heads"),
        ("ffn_dim", "ff"),
        ("intermediate_size", "ff"),
        ("batch_size", "batch_examples"),
        ("warmup_steps", "warmup"),
        ("num_epochs", "epochs"),
        ("max_steps", "steps"),
        ("lr_scheduler", "schedule"),
        ("grad_clip", "clip"),
        ("max_len", "max_length"),
        ("vocab_size", "source_tokens"),
        ("learningRate", "lr"),
        ("dropuot", "dropout"),
        ("hidden_units", "width"),
        ("gradient_checkpointing", "recompute"),
        ("lr_warmup_steps", "warmup"),
        ("max_train_steps", "steps"),
        ("num_train_steps", "steps"),
        ("eval_batch_size", "batch_tokens"),
        ("num_gpus", "workers"),
        ("num_encoder_layers", "encoder.layers"),
        ("num_decoder_layers", "decoder.layers"),
        ("dec_layers", "decoder.layers"),
        ("encoder_embed_dim", "encoder.width"),
        ("encoder_ffn_dim", "encoder.ff"),
        ("encoder_attention_heads", "encoder.heads"),
    ],
)
def test_names_from_other_toolkits_suggest_settings(word, key):
    with pytest.raises(UserError, match=f"did you mean '{key}'"):
        assign({}, f"{word}=1")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[train]\nlearning_rate = 0.1", "train.learning_rate: no such key; did you mean 'lr'?"),
        ("[text]\ntokenizer = 'char'", "text.tokenizer: no such key; did you mean 'source_tokens'?"),
        ("[data]\ntrain_file = 'x'", "data.train_file: no such key; did you mean 'train'?"),
        ("learning_rate = 0.1", "learning_rate: no such key; did you mean 'train.lr'?"),
        ("batch_tokens = 8", "batch_tokens: no such key; did you mean 'train.batch_tokens'?"),
    ],
)
def test_unknown_recipe_keys_have_suggestions(text, hint, tmp_path):
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(UserError, match=re.escape(hint)):
        load_recipe(read_recipe(tmp_path / "my.toml"))


def test_unknown_model_keys_suggest_keys_of_the_stacks():
    from regard.presets import preset

    with pytest.raises(UserError, match=r"did you mean 'encoder\.width' and 'decoder\.width'"):
        preset("transformer-tiny", changes={"hidden_size": 64})
    with pytest.raises(UserError, match="the model has no such key; did you mean 'width'"):
        assign({}, "model.hidden_size=64")


@pytest.mark.parametrize("stack", BOTH)
@pytest.mark.parametrize("key", Stack.model_fields)
def test_keys_with_a_stack_prefix_suggest_the_key_of_that_stack(stack, key):
    from regard.presets import preset

    for word in (f"{stack}_{key}", f"{stack[:3]}_{key}"):
        with pytest.raises(UserError, match=f"did you mean '{stack}.{key}'"):
            preset("transformer-tiny", changes={word: 1})
        with pytest.raises(UserError, match=f"the model has no such key; did you mean '{stack}.{key}'"):
            assign({}, f"model.{word}=1")


@pytest.mark.parametrize(
    ("word", "suggestions"),
    [
        ("ppl", ["perplexity", "perplexity", "pseudo_perplexity", "loss"]),
        ("acc", ["accuracy", None, "accuracy", "accuracy"]),
        ("exact_match", ["accuracy", None, "accuracy", "accuracy"]),
        ("bpc", [None, "bits_per_char", None, None]),
    ],
)
def test_only_available_metrics_are_suggested(word, suggestions):
    name_lists = [METRICS, TASKS["lm"].evaluation, TASKS["masked"].evaluation, get_args(Metric)]
    assert [nearest(word, names) for names in name_lists] == suggestions


@pytest.mark.parametrize(
    ("word", "kind"), [("sentencepiece:8000", "unigram"), ("wordpiece:8000", "bpe"), ("whitespace", "space")]
)
def test_names_from_other_toolkits_suggest_tokenization_schemes(word, kind):
    with pytest.raises(UserError, match=f"{word}' is not a tokenization scheme; did you mean '{kind}'"):
        parse_scheme(word)


def test_gpu_suggests_cuda():
    for word in ("gpu", "gpu:0", "GPU"):
        with pytest.raises(UserError, match="did you mean 'cuda'"):
            choose_device(word)
        with pytest.raises(UserError, match="did you mean 'cuda'"):
            load_recipe({"train": {"device": word}})
    assert "--gpu; did you mean '--device'?" in call("generate", "run", "--gpu").err


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("beam_size", "beam"),
        ("num_beams", "beam"),
        ("max_new_tokens", "max_length"),
        ("no_repeat_ngram_size", "no_repeat_ngram"),
        ("repeat_penalty", "repetition_penalty"),
        ("num_return_sequences", "nbest"),
        ("do_sample", "sample"),
        ("batch_size", "batch_tokens"),
        ("eval_batch_size", "batch_tokens"),
        ("target_prefix", "prefix"),
        ("length_normalization", "length_penalty"),
    ],
)
def test_names_from_other_toolkits_suggest_decoding_options(word, key):
    with pytest.raises(UserError, match=f"{word}: no such key; did you mean '{key}'"):
        Options.of(**{word: 1})
    option, suggestion = (f"--{name.replace('_', '-')}" for name in (word, key))
    assert f"no such option: {option}; did you mean '{suggestion}'?" in call("generate", "run", option, 1).err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("predict", "run"), "no verb 'predict'; did you mean 'generate'?"),
        (("evalute", "run"), "no verb 'evalute'; did you mean 'evaluate'?"),
        (("train", "--learning-rate", 1), "no such option: --learning-rate; did you mean --set lr=VALUE?"),
        (("train", "--dec-layers", 2), "no such option: --dec-layers; did you mean --set decoder.layers=VALUE?"),
        (("train", "--lr", 1), "no such option: --lr; did you mean --set lr=VALUE?"),
        (("train", "--batch-size=8"), "no such option: --batch-size; did you mean --set batch_examples=VALUE?"),
        (("train", "--train", "x"), "no such option: --train; did you mean '--data'?"),
        (("train", "--output-dir", "x"), "no such option: --output-dir; did you mean '--out'?"),
        (("train", "--zzz"), "no such option: --zzz\n"),
        (
            ("train", "--task", "translation", "--data", "x", "--out", "y"),
            "'translation' is not known; did you mean 'pairs'?",
        ),
        (("-v",), "no such option: -v; did you mean '--version'?"),
        ((".",), "no verb '.'; a verb comes first"),
    ],
)
def test_unknown_verbs_and_options_have_suggestions(words, hint):
    result = call(*words)
    assert result.code == 2 and hint in result.err, result.err


def test_synonyms_are_preferred_to_similar_names():
    assert closest("max_len", ["max_length", "max_lens"]) == "; did you mean 'max_length'?"
    assert closest("nothing_like_it", ["lr"]) == ""


def test_plural_nouns_follow_their_count():
    assert [plural(n, "batch") for n in (0, 1, 2, 3000)] == ["0 batches", "1 batch", "2 batches", "3,000 batches"]
    words = ["line", "process", "hypothesis", "patch", "prefix", "epoch", "entry"]
    plurals = ["lines", "processes", "hypotheses", "patches", "prefixes", "epochs", "entries"]
    assert [plural(2, w)[2:] for w in words] == plurals and [plural(1, w)[2:] for w in words] == words
    assert [plural(n, "minute", "g") for n in (0.5, 1.0, 2.0)] == ["0.5 minutes", "1 minute", "2 minutes"]


def test_documented_extras_exist_and_are_installed_from_a_clone():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")]
    assert not [file for file in (*files, *ROOT.glob("src/**/*.py")) if "regard[" in file.read_text(encoding="utf-8")]
    extras_in_use = {
        extra for file in files for extra in re.findall(r"'\.\[([a-z0-9,]+)\]'", file.read_text(encoding="utf-8"))
    }
    for file in ROOT.glob("src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("missing_extra", "install"):
                extras_in_use |= {node.args[-1].value} if isinstance(node.args[-1], ast.Constant) else set()
    assert extras_in_use == set(extras)


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(1 << 60), lambda: np.empty(1 << 55), lambda: bytearray(1 << 62)]
)
def test_running_out_of_memory_is_recognised(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as error:
        allocate()
    assert is_out_of_memory(error.value)


def test_running_out_of_memory_on_an_accelerator_is_recognised():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GB)"))
    assert is_out_of_memory(RuntimeError("can't start new thread")) and is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert is_out_of_memory(ImportError("libtorch_cpu.so: failed to map segment from shared object"))
    assert is_out_of_memory(OSError("libgomp.so: cannot map zero-fill pages"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory", "file"))
    for other in (
        RuntimeError("shapes do not fit"),
        ValueError("out of memory"),
        UserError("not enough memory"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "out of memory"),
        ImportError("x.so: failed to map segment from shared object: Operation not permitted"),
        ImportError("x.so: cannot allocate memory in static TLS block"),
    ):
        assert not is_out_of_memory(other), other


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "RUN", "--engine", "torch"),
        ("train", "--data", "RUN/data.tsv"),
        ("serve", "RUN", "--engine", "torch"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_too_little_memory_for_the_libraries_is_not_a_fault(arguments, tmp_path):
    letters().save(tmp_path)
    (tmp_path / "data.tsv").write_text("abc\tbca\n" * 20)
    limit = 300 * 2**20
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from regard.cli.app import main; main()",
            *(x.replace("RUN", str(tmp_path)) for x in arguments),
        ],
        input="abc\n",
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert result.returncode == 2 and "error: not enough memory: " in result.stderr, result.stderr
    assert "ulimit -v" in result.stderr and "fault" not in result.stderr


def test_running_out_of_memory_is_a_user_error(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nGPU 0 has ...")

    monkeypatch.setattr("regard.cli.options.Run.load", fail)
    result = call("generate", "runs/none", stdin="a\n")
    assert result.code == 2 and "fault" not in result.err and "GPU 0" not in result.err
    assert "error: not enough memory: CUDA out of memory" in result.err and "--batch-tokens" in result.err


def test_long_names_are_neither_compared_nor_repeated(monkeypatch):
    monkeypatch.setattr("regard.suggest._candidates", None)
    long = "preset" * 20_000
    assert nearest(long, ["preset"]) is None and closest(long, ["preset"]) == ""
    for use in (
        lambda: call("info", "transformer-base", "--set", f"{long}=1"),
        lambda: call(long),
        lambda: Options.of(**{long: 1}),
        lambda: choose_device(long),
        lambda: parse_scheme(long, "tokens"),
        lambda: assign({}, f"{long}=1"),
    ):
        try:
            message = str(use())
        except UserError as error:
            message = str(error)
        assert "preset" in message and len(message) < 3000
