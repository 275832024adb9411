"""The C interface: the example program on a packed run gives the outputs of Python, and refuses damaged files."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit.models import family, letters

regard_native = pytest.importorskip("regard_native")

NATIVE = Path(regard_native.__file__).parents[1]
LIBRARY = Path(os.environ.get("REGARD_NATIVE_LIBRARY", Path(regard_native.__file__).parent))
COMPILER = shutil.which("cc")
HEADER_BYTES = 88
REFUSED = (0, 2, 3, 4, *range(11, 20))  # numbers of the header that are checked: version, kind, schemes, counts

pytestmark = pytest.mark.skipif(
    COMPILER is None or not (NATIVE / "examples").is_dir() or sys.platform != "linux", reason="needs a C compiler"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("c") / "generate"
    strict = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{NATIVE / 'include'}")
    library = (f"-L{LIBRARY}", "-lregard", f"-Wl,-rpath,{LIBRARY}")
    subprocess.run([str(COMPILER), *strict, NATIVE / "examples" / "generate.c", *library, "-o", path], check=True)
    return path


def pack(run: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "regard_native", "pack"]
    return subprocess.run([*command, run, out, *options], capture_output=True, text=True)


def answer(program: Path, file: Path, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, file], input=text, capture_output=True, encoding="utf-8")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["trained", "transformer-tiny", "rnn-bahdanau"])
def test_program_gives_the_outputs_of_python(name, precision, program, toy, tmp_path):
    run = toy / "run"
    if name != "trained":
        run = tmp_path / "run"
        letters(name).save(run)
    words = ["abc", "cabba", "dab", "ab?é", "⁇", "f", "bcdabcdabc" * 3]
    result = pack(run, tmp_path / "packed", "--precision", precision)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not (tmp_path / "packed.unfinished").exists()
    outputs = answer(program, tmp_path / "packed", "\n".join(words)).stdout.splitlines()
    expected = regard_native.load(run, precision=precision).generate(words, beam=5)
    for line, (hypothesis,) in zip(outputs, expected, strict=True):
        text, score = line.split("\t")
        assert text == hypothesis.text
        assert float(score) == pytest.approx(hypothesis.score, abs=2e-6)


def test_program_refuses_damaged_files(program, tmp_path):
    letters("rnn-bahdanau").save(tmp_path / "run")
    path = tmp_path / "packed"
    assert pack(tmp_path / "run", path).returncode == 0
    original = path.read_bytes()
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    damaged = [b"", original[:5], original[:60], original[:-1], original + b"x", b"x" + original[1:]]
    damaged += [original[: rng.randrange(len(original))] for _ in range(20)]
    for field in REFUSED:
        at = 8 + 4 * field
        damaged += [original[:at] + value + original[at + 4 :] for value in (b"\xff\xff\xff\x7f", b"\xff" * 4)]
    for data in damaged:
        path.write_bytes(data)
        result = answer(program, path, "abc\n")
        assert (result.returncode, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("generate: ")
    for _ in range(100):  # other bytes may also give another model
        data = bytearray(original)
        data[rng.randrange(HEADER_BYTES, len(data))] = rng.randrange(256)
        path.write_bytes(data)
        result = answer(program, path, "abc\n")
        assert result.returncode in (0, 2), result


def test_program_refuses_a_language_model(program, tmp_path):
    family("lm").save(tmp_path / "run")
    assert pack(tmp_path / "run", tmp_path / "packed").returncode == 0
    result = answer(program, tmp_path / "packed", "abc\n")
    assert result.returncode == 2 and "does not read language models" in result.stderr


def test_run_with_features_is_not_packed(tmp_path):
    letters().save(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["text"]["columns"] = ["source", "features", "target"]
    path.write_text(json.dumps(config))
    result = pack(tmp_path / "run", tmp_path / "packed")
    assert result.returncode == 2 and "its inputs have features" in result.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"run"}
