"""The command line called in this process, and a toy task: spelling words as phones."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from dataclasses import dataclass
from typing import Any

PHONES = {"a": "AH", "b": "B", "c": "K", "d": "D", "e": "EH", "f": "F"}
SMALL = ["width=32", "heads=2", "ff=64", "layers=1", "dropout=0", "lr=1e-2", "warmup=10", "log_every=20"]


@dataclass(frozen=True)
class CliResult:
    """Result of a call of the command line."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.split("\n")[:-1]


def call(*args: object, stdin: str | bytes = b"") -> CliResult:
    """Run the command line in this process."""
    from regard.cli.app import run

    data = stdin.encode() if isinstance(stdin, str) else stdin
    streams = [io.TextIOWrapper(io.BytesIO(data if i == 0 else b""), encoding="utf-8", newline="") for i in range(3)]
    saved = sys.argv, sys.stdin, sys.stdout, sys.stderr, os.environ.pop("REGARD_DEBUG", None)
    sys.argv = ["regard", *map(str, args)]
    sys.stdin, sys.stdout, sys.stderr = streams
    try:
        code = run()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv, sys.stdin, sys.stdout, sys.stderr, debug = saved
        if debug is not None:
            os.environ["REGARD_DEBUG"] = debug
    for stream in streams[1:]:
        stream.flush()
    return CliResult(code, *(stream.buffer.getvalue().decode() for stream in streams[1:]))


def spell(word: str) -> str:
    return " ".join(PHONES[letter] for letter in word)


def toy_words(count: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(draw.choice("abcdef") for _ in range(draw.randint(2, 4)))] = None
    return list(words)


def small(*changes: str) -> list[str]:
    """`--set` options for training that takes about a second."""
    return [part for setting in (*SMALL, *changes) for part in ("--set", setting)]


def strict_json(text: str) -> Any:
    """Parse JSON; refuse NaN and Infinity, which are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
