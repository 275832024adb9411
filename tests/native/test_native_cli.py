"""The command line of regard-native: outputs equal those of regard, and mistakes are one message."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from kit.models import family
from kit.native_models import load_with_torch
from kit.toy import call

pytest.importorskip("regard_native")

TORCH = ("--engine", "torch")
PROGRAM = "import sys; from regard_native.cli import main; sys.argv[0] = 'regard-native'; sys.exit(main())"
COMMAND = [sys.executable, "-c", PROGRAM]


def native(*args: object, stdin: bytes = b"", **settings: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *map(str, args)], input=stdin, capture_output=True, timeout=60, **settings)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--beam", 4, "--nbest", 2, "--alignment"),
        ("--sample", "--nbest", 2, "--temperature", 1.5, "--max-length", 4),
        ("--prefix", "AH", "--alignment", "--alignment-heads", "1.2"),
    ],
)  # fmt: skip
def test_lines_equal_those_of_regard(toy, options):
    lines = b"abc\n\nca\xffb\nx?\r\nfedcba\tF\n" + b"ab" * 3000 + b"\nlast"
    ours = native("generate", toy / "run", *options, stdin=lines)
    theirs = call("generate", toy / "run", *TORCH, *options, stdin=lines)
    assert (ours.stdout.decode(), ours.returncode) == (theirs.out, 0)
    assert b"stdin:3: invalid UTF-8" in ours.stderr and b"stdin:6: the source has 6000 tokens" in ours.stderr


def test_scores_equal_those_of_regard(toy, tmp_path):
    family("lm").save(tmp_path)
    for run, lines in ((toy / "run", b"abc\tAH B\nab\n\nx\t?\n"), (tmp_path, b"abc\nab\tc\n\n\xff\n")):
        ours, theirs = (native("score", run, stdin=lines).stdout.decode(), call("score", run, *TORCH, stdin=lines).out)
        for number, other in zip(ours.split("\n"), theirs.split("\n"), strict=True):
            assert number == other or float(number) == pytest.approx(float(other), abs=1e-4)
        assert theirs.startswith("-")
        rows = [json.loads(line) for line in native("score", run, "--json", stdin=lines).stdout.splitlines()]
        others = [json.loads(line) for line in call("score", run, *TORCH, "--json", stdin=lines).lines]
        assert [list(row) for row in rows] == [list(row) for row in others]
        assert [row["line"] for row in rows] == [row["line"] for row in others]


def test_command_needs_no_torch(toy):
    program = "import sys; from regard_native.cli import main; assert main() == 0 and 'torch' not in sys.modules"
    words = "abc\ncab\n"
    result = subprocess.run(
        [sys.executable, "-c", program, "generate", str(toy / "run"), "--beam", "3", "--json"],
        input=words, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ours = [json.loads(line) for line in result.stdout.splitlines()]
    expected = load_with_torch(toy / "run").generate(words.split(), beam=3)
    assert [row["hypotheses"][0]["text"] for row in ours] == [row[0].text for row in expected]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "VERB"),
        (("frobnicate",), "generate"),
        (("generate",), "RUN"),
        (("generate", "nowhere"), "no such run directory"),
        (("generate", "."), "no config.json"),
        (("generate", "RUN", "missing.txt"), "no such file"),
        (("generate", "RUN", "."), "is a directory"),
        (("generate", "RUN", "-", "more"), "more"),
        (("generate", "RUN", "--beam-size", "3"), "did you mean '--beam'"),
        (("generate", "RUN", "--mbr", "3"), "use regard"),
        (("generate", "RUN", "--beam", "x"), "--beam"),
        (("generate", "RUN", "--beam", "0"), "--beam: must be"),
        (("generate", "RUN", "--precision", "fp8"), "fp32 and int8"),
        (("generate", "RUN", "--top-tokens", "3"), "--json"),
        (("generate", "RUN", "--alignment", "--alignment-heads", "1"), "LAYER.HEAD"),
        (("generate", "RUN", "--alignment", "--alignment-heads", "9.1"), "no layer 9"),
        (("score", "RUN", "--beam", "3"), "--beam"),
    ],
)
def test_mistakes_are_one_message(toy, tmp_path, args, words):
    result = native(*(toy / "run" if word == "RUN" else word for word in args), stdin=b"abc\n", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, b"")
    message = result.stderr.decode()
    assert message.startswith("error: ") and words in message and "Traceback" not in message


def test_a_broken_run_or_another_model_is_refused(toy, tmp_path):
    family("classes").save(tmp_path / "classes")
    for name in ("model.safetensors", "config.json", "source.tokenizer.json"):
        damaged = tmp_path / name
        damaged.mkdir()
        for path in (toy / "run").iterdir():
            if path.is_file():
                data = path.read_bytes()
                (damaged / path.name).write_bytes(data[: len(data) // 2] if path.name == name else data)
    for path in tmp_path.iterdir():
        result = native("generate", path, stdin=b"abc\n")
        assert result.returncode == 2 and result.stderr.count(b"\n") == 1, result.stderr


def test_every_line_is_answered_at_once_and_signals_end_quietly(toy):
    with subprocess.Popen(
        [*COMMAND, "generate", str(toy / "run")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        for _ in range(2):
            process.stdin.write(b"abc\n")
            process.stdin.flush()
            assert process.stdout.readline().startswith(b"AH")
        process.send_signal(signal.SIGINT)
        assert (process.wait(), process.stderr.read()) == (-signal.SIGINT, b"")


def test_a_closed_pipe_ends_quietly(toy, tmp_path):
    (tmp_path / "words").write_text("abc\n" * 20_000)
    read, write = os.pipe()
    with subprocess.Popen(
        [*COMMAND, "generate", str(toy / "run"), str(tmp_path / "words")], stdout=write, stderr=subprocess.PIPE
    ) as process:
        os.close(write)
        os.close(read)
        assert process.stderr and (process.stderr.read(), process.wait()) == (b"", 0)
