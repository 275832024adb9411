"""regard-native reads a run without torch and gives the outputs of regard."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import regard
from kit.models import family
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

regard_native = pytest.importorskip("regard_native")

from regard_native.text import Codec as NativeCodec  # noqa: E402

TEXTS = ["abc", "cabba ab", "ab ba", "d", "x?", " a", "ａé 中"]
TOLERANCE = 1e-4


def same(ours: list[list[regard_native.Hypothesis]], theirs: list[list[object]]) -> None:
    for row, reference in zip(ours, theirs, strict=True):
        assert [h.text for h in row] == [h.text for h in reference]
        assert [h.tokens for h in row] == [h.tokens for h in reference]
        for hypothesis, other in zip(row, reference, strict=True):
            assert hypothesis.score == pytest.approx(other.score, abs=TOLERANCE)
            assert hypothesis.token_scores == pytest.approx(other.token_scores, abs=TOLERANCE)


@pytest.mark.parametrize("settings", [{}, {"beam": 4, "nbest": 3}, {"beam": 3, "nbest": 2, "length_penalty": 0.6}])
def test_outputs_of_a_trained_run_equal_those_of_regard(toy, settings):
    words = [line.partition("\t")[0] for line in (toy / "test.tsv").read_text().splitlines()]
    expected = regard.load(toy / "run").generate(words, **settings)
    same(regard_native.load(toy / "run").generate(words, **settings), expected)


def test_language_model_continues_a_prompt_as_regard_does(tmp_path):
    for kind in ("lm", "lm-grouped"):
        run = family(kind)
        run.save(tmp_path / kind)
        prompts = ["abc", "", "ab ba"]
        expected = regard.load(tmp_path / kind).generate(prompts, beam=2, nbest=2, max_length=12)
        same(regard_native.load(tmp_path / kind).generate(prompts, beam=2, nbest=2, max_length=12), expected)


@pytest.mark.parametrize("scheme", ["char", "nfd", "space", "word", "byte", "bpe:300", "unigram:300"])
@given(texts=st.lists(st.text(max_size=30), max_size=4))
def test_ids_and_texts_equal_those_of_regard(scheme, texts, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / f"codec-{scheme.replace(':', '-')}"
    if not directory.exists():
        directory.mkdir()
        source, target = Tokenizer.train(scheme, ["abc cab é", "aé 中 ab"]), Tokenizer.train("char", ["abc"])
        Codec(source, target, ("N", "PL"), ("source", "features", "target")).save(directory)
    config = {
        "source_tokens": scheme, "target_tokens": "char", "shared": False, "features": ("N", "PL"), "frame": "end",
        "columns": ("source", "features", "target"), "feature_separator": ";", "ids": None,
    }  # fmt: skip
    native = NativeCodec(directory, config)
    source, target = (Tokenizer.load(directory / f"{side}.tokenizer.json") for side in ("source", "target"))
    codec = Codec(source, target, ("N", "PL"), ("source", "features", "target"))
    for text in texts:
        ids = codec.encode_source([Example(text, features="N;x; PL")])[0]
        assert native.encode_source(text, "N;x; PL") == ids
        own = source.encode([text])[0]
        assert native.source.decode(own) == source.decode(own)
        assert [native.source.piece(index) for index in own] == source.pieces(own)


def test_command_needs_no_torch(toy):
    program = "import sys; from regard_native.cli import main; assert main() == 0 and 'torch' not in sys.modules"
    words = "abc\ncab\n"
    result = subprocess.run(
        [sys.executable, "-c", program, "generate", str(toy / "run"), "--beam", "3", "--json"],
        input=words, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ours = [json.loads(line) for line in result.stdout.splitlines()]
    expected = regard.load(toy / "run").generate(words.split(), beam=3)
    assert [row["hypotheses"][0]["text"] for row in ours] == [row[0].text for row in expected]


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
