"""regard-native reads a run without torch and gives the outputs of regard."""

from __future__ import annotations

import random
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kit.models import LITTLE, family, letters
from kit.native_models import load_with_torch
from regard.decode.alignment import save_heads
from regard.decode.request import Options as ReferenceOptions
from regard.errors import UserError
from regard.model import Model
from regard.presets import preset
from regard.run import Run as RegardRun
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

pytest.importorskip("regard_native")

import regard_native
from regard_native.core import load_library
from regard_native.options import ELSEWHERE

from kit.native_build import CAN_BUILD, COMPILER

TOLERANCE = 1e-4
SETTINGS: list[dict[str, Any]] = [
    {},
    {"beam": 4, "nbest": 3, "exact": True, "alignment": True, "top_tokens": 3},
    {"beam": 3, "nbest": 2, "length_penalty": 0.6, "min_length": 3, "max_length": 5},
    {"prefix": "AH", "top_tokens": 200, "repetition_penalty": 1.5, "max_ratio": 1.5},
    {"sample": True, "nbest": 3, "temperature": 1.3, "top_k": 9, "seed": 7, "alignment": True},
    {"sample": True, "top_p": 0.8, "min_p": 0.05, "unknown": True, "min_ratio": 2.0},
    {"no_repeat_ngram": 2, "max_source": 6, "max_length": 9, "min_length": 2},
]


def same(ours: list[list[regard_native.Hypothesis]], theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for row, reference in zip(ours, theirs, strict=True):
        for hypothesis, other in zip(row, reference, strict=True):
            for name in ("text", "tokens", "ids", "flags"):
                assert getattr(hypothesis, name) == getattr(other, name)
            close(hypothesis.as_dict(), other.as_dict())


def close(ours: Any, theirs: Any) -> None:
    """Equal JSON, numbers within the tolerance."""
    if isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=2 * TOLERANCE)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            close(ours[key], value)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            close(mine, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("settings", SETTINGS)
def test_outputs_of_a_trained_run_equal_those_of_regard(toy, settings):
    words = [line.partition("\t")[0] for line in (toy / "test.tsv").read_text().splitlines()]
    words += ["", "  ", "ab?c", "abcdefabcdef" * 3, "é"]
    expected = load_with_torch(toy / "run").generate(words, **settings)
    same(regard_native.load(toy / "run").generate(words, **settings), expected)


@pytest.mark.parametrize("name", ["transformer-tiny", "rnn-bahdanau", "rnn-luong"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_outputs_of_untrained_runs_equal_those_of_regard(name, settings, tmp_path):
    letters(name).save(tmp_path)
    settings = {**settings, "max_length": 9}
    if "prefix" in settings:
        settings = {**settings, "prefix": "ab"}
    texts = ["abc", "cabba", "dab", "ab?", "", "bcdabcdabc" * 3]
    same(
        regard_native.load(tmp_path).generate(texts, **settings), load_with_torch(tmp_path).generate(texts, **settings)
    )


def test_random_numbers_of_samples_are_drawn_for_a_few_inputs_at_a_time(tmp_path, monkeypatch):
    letters().save(tmp_path)
    run = regard_native.load(tmp_path)
    words = ["abc", "dab", "cabba", "b"] * 5
    settings = {"sample": True, "nbest": 3, "max_length": 9}
    expected = run.generate(words, **settings)
    sizes = []
    draw = regard_native.run._noise
    monkeypatch.setattr(regard_native.run, "MAX_NOISE", 100)
    monkeypatch.setattr(regard_native.run, "_noise", lambda *args: sizes.append(draw(*args).size) or draw(*args))
    same(run.generate(words, **settings), expected)
    assert len(sizes) > 1 and max(sizes) <= 100


def test_alignment_heads_are_those_of_the_options_then_of_the_run(tmp_path):
    letters().save(tmp_path)
    for settings in ({"alignment_heads": [(1, 2), (0, 0)]}, {}):
        settings = {"alignment": True, "max_length": 9, **settings}
        expected = load_with_torch(tmp_path).generate(["abc", "dab"], **settings)
        same(regard_native.load(tmp_path).generate(["abc", "dab"], **settings), expected)
        save_heads(tmp_path, [(0, 1)])


def test_language_model_continues_a_prompt_as_regard_does(tmp_path):
    for kind in ("lm", "lm-grouped"):
        run = family(kind)
        run.save(tmp_path / kind)
        prompts = ["abc", "", "ab ba"]
        for settings in (
            {"beam": 2, "nbest": 2, "max_length": 12},
            {"sample": True, "nbest": 3, "top_tokens": 2},
            {"prefix": "ab", "beam": 2, "max_ratio": 3.0, "min_length": 4},
        ):
            expected = load_with_torch(tmp_path / kind).generate(prompts, **settings)
            same(regard_native.load(tmp_path / kind).generate(prompts, **settings), expected)


def test_features_are_read_as_in_regard(tmp_path):
    tokenizer = Tokenizer.train("nfd", ["abc é", "bcd"])
    codec = Codec(tokenizer, tokenizer, ("N", "PL"), ("source", "features", "target"))
    config = preset("transformer-tiny", codec.source_vocab, changes={"encoder": LITTLE, "decoder": LITTLE})
    RegardRun(config, codec, Model(config).eval(), tmp_path).save(tmp_path)
    run, reference = regard_native.load(tmp_path), load_with_torch(tmp_path)
    inputs = [("abc", "N;PL"), ("é", "x"), ("abc", ""), ("", "N")]
    examples = [Example(text, features=features) for text, features in inputs]
    for settings in ({"alignment": True, "top_tokens": 2}, {"prefix": "e", "beam": 3, "nbest": 3}):
        settings = {**settings, "max_length": 9}
        same(run.generate(inputs, **settings), reference.generate(examples, **settings))
    same(run.generate(["abc"]), reference.generate(["abc"]))
    pairs = [("abc", "bcd", "N"), ("é", "é?", "N;y")]
    for ours, theirs in zip(run.score(pairs), reference.score([Example(s, t, f) for s, t, f in pairs]), strict=True):
        close(ours.as_dict(), theirs.as_dict())


def test_scores_equal_those_of_regard(toy, tmp_path):
    pairs = [("abc", "AH B K"), ("abc", "AH B"), ("", ""), ("", "AH"), ("a?", "AH x"), ("abcdef" * 20, "K")]
    family("lm").save(tmp_path)
    continuations = [("ab", "c"), ("", "abc ab"), ("a" * 600, "b"), ("a", "b" * 2000)]
    for path, examples in ((toy / "run", pairs), (tmp_path, continuations)):
        expected = load_with_torch(path).score(examples, max_source=100)
        for ours, theirs in zip(regard_native.load(path).score(examples, max_source=100), expected, strict=True):
            close(ours.as_dict(), theirs.as_dict())


def test_every_position_of_a_language_model_can_be_scored(tmp_path):
    run = family("lm")
    run.save(tmp_path)
    positions = run.config.top.max_positions
    for length in (positions - 1, positions, positions + 1):
        pair = ("ab", "c" * (length - 2))
        [ours], [theirs] = regard_native.load(tmp_path).score([pair]), load_with_torch(tmp_path).score([pair])
        close(ours.as_dict(), theirs.as_dict())


def test_options_are_those_of_regard():
    ours = {each.name: each for each in fields(regard_native.Options)}
    assert {*ours, *ELSEWHERE} == set(ReferenceOptions.model_fields)
    for name, each in ours.items():
        field = ReferenceOptions.model_fields[name]
        assert each.default == field.default
        assert field.description.startswith(each.metadata["help"].removesuffix("needs --json.").removesuffix("."))


@pytest.mark.parametrize(
    "settings",
    [
        {"beam": 0}, {"beam": True}, {"beam": "x"}, {"beam": 2.0}, {"nbest": 2}, {"beam": 2, "nbest": 3},
        {"top_p": 1.5}, {"sample": True, "beam": 2}, {"temperature": 0.5}, {"exact": True}, {"prefix": 3},
        {"sample": True, "temperature": 0}, {"length_penalty": float("nan")}, {"min_length": 9, "max_length": 3},
        {"min_ratio": 2.0, "max_ratio": 1.0}, {"alignment_heads": [(0, 0)]}, {"beam_size": 3}, {"max_length": 0},
        {"alignment": True, "alignment_heads": [(7, 0)]}, {"alignment": True, "alignment_heads": [(0,)]},
        {"prefix": "AH ?"}, {"prefix": "AH AH AH", "no_repeat_ngram": 1}, {"prefix": "AH AH AH", "max_length": 2},
    ],
)  # fmt: skip
def test_options_that_regard_refuses_are_refused(toy, settings):
    with pytest.raises(UserError):
        load_with_torch(toy / "run").generate(["abc"], **settings)
    with pytest.raises(regard_native.NativeError, match=list(settings)[-1].replace("beam_size", "did you mean 'beam'")):
        regard_native.load(toy / "run").generate(["abc"], **settings)


def test_mistakes_are_one_sentence(tmp_path, toy):
    with pytest.raises(regard_native.NativeError, match="no such run directory"):
        regard_native.load(tmp_path / "nothing")
    with pytest.raises(regard_native.NativeError, match="it has no config"):
        regard_native.load(tmp_path)
    run = regard_native.load(toy / "run")
    with pytest.raises(regard_native.NativeError, match="nbest"):
        run.generate(["a"], beam=2, nbest=3)
    assert "empty" in run.generate([" "])[0][0].flags


def test_mutated_runs_are_refused_or_answer(tmp_path, toy):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    shutil.copytree(toy / "run", tmp_path / "run", ignore=shutil.ignore_patterns("training"))
    for name in ("config.json", "model.safetensors", "source.tokenizer.json"):
        path: Path = tmp_path / "run" / name
        original = path.read_bytes()
        for _ in range(60):
            data = bytearray(original)
            limit = min(len(data), 4000)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(limit)
                data[at : at + rng.randint(0, 2)] = bytes(
                    rng.choice(b'0129{}[]",:-e \xff') for _ in range(rng.randint(0, 2))
                )
            path.write_bytes(data)
            try:
                regard_native.load(tmp_path / "run").generate(["abc"], beam=2, max_length=10)
            except regard_native.NativeError:
                continue
        path.write_bytes(original)


@pytest.mark.skipif(not CAN_BUILD, reason="needs g++")
def test_library_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(regard_native.NativeError, match="does not load; install regard-native again"):
        load_library(tmp_path)
    code = 'extern "C" const char* rn_version() { return "0.0.1"; }'
    output = str(tmp_path / "libregard.so")
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-x", "c++", "-", "-o", output], input=code, text=True, check=True
    )
    with pytest.raises(regard_native.NativeError, match=r"has version 0\.0\.1, but the Python package has"):
        load_library(tmp_path)
