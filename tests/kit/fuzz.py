"""Fuzzing of directories: files are mutated at random and opened in a child process with limited time and memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from regard.errors import UserError

MAX_SECONDS = 5  # processor time
MAX_MEGABYTES = 512  # memory beyond that of the parent
# Placeholders for JSON that json.dumps cannot write: deep nesting and a long number.
DEEP = "@deep"
DIGITS = "@digits"
NUMBERS = (-1, 0, 1, 7, 999, 10**6, 2**21 - 1, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, 1e308, -0.5, 1e-300)
WORDS = ("", "../../../../etc/passwd", "/etc/passwd", "../outside", "\0", "\ud800", "none", "x" * 100_000, DIGITS, DEEP)
OTHERS: tuple[Any, ...] = (None, True, [], {}, [[]], {"": {}}, [0] * 10_000, float("nan"), float("inf"))


class Outcome(NamedTuple):
    """Outcome of opening a directory. Kinds other than `ok` and `refused` are faults."""

    kind: str
    text: str
    seconds: float
    megabytes: float

    @property
    def fault(self) -> bool:
        return self.kind not in ("ok", "refused") or self.seconds > MAX_SECONDS or self.megabytes > MAX_MEGABYTES


def in_child(action: Callable[[], object], refusal: type[Exception] = UserError) -> Outcome:
    """Run an action, which may raise `refusal`, in a fork of this process, which has loaded all modules."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _child(action, writer, refusal)
        finally:
            os._exit(3)
    os.close(writer)
    _, status, usage = os.wait4(pid, 0)
    with os.fdopen(reader, "rb") as pipe:
        first, _, rest = pipe.read().partition(b"\n")
    seconds = usage.ru_utime + usage.ru_stime
    growth = (usage.ru_maxrss - int(first or 0)) / 1024
    if status or not rest:
        return Outcome("killed", f"status {status}", seconds, growth)
    kind, text = json.loads(rest)
    return Outcome(kind, text, seconds, growth)


def _child(action: Callable[[], object], writer: int, refusal: type[Exception]) -> None:
    """Write the memory of this process and the outcome of the action to a pipe, then exit."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(120)  # in case the action blocks; the other limit is processor time, which other load does not affect
    resource.setrlimit(resource.RLIMIT_CPU, (2 * MAX_SECONDS, 2 * MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.write(writer, f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n".encode())
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
        result = ("ok", "")
    except refusal as error:
        result = ("refused", str(error)[:2000])
    except BaseException:
        result = ("error", traceback.format_exc()[-3000:])
    os.write(writer, json.dumps(result).encode())
    os._exit(0)


def attack(
    bases: list[Path],
    place: Path,
    cases: Iterable[int],
    seed: int,
    use: Callable[[Path, Random], object],
    refusal: type[Exception] = UserError,
) -> tuple[list[str], dict[str, int]]:
    """Mutate a copy of a base for each case and use it in a child -> the faults and the number of outcomes per kind."""
    faults = []
    counts = {"ok": 0, "refused": 0}
    for case in cases:
        draw = Random(f"{seed} {case}")
        base = draw.choice(bases)
        copy = place / "copy"
        shutil.copytree(base, copy)
        changes = [mutate(copy, draw) for _ in range(draw.choice((1, 1, 1, 2)))]
        outcome = in_child(lambda copy=copy, draw=draw: use(copy, draw), refusal)  # type: ignore[misc]
        if outcome.fault:
            faults.append(f"case {case} of seed {seed}: {base.name}: {'; '.join(changes)}\n  {outcome}")
        counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
        shutil.rmtree(copy)
    return faults, counts


def mutate(directory: Path, draw: Random, pattern: str = "*") -> str:
    """Change one of the files that match `pattern` at random -> a description of the change."""
    files = [path for path in directory.rglob(pattern) if path.is_file() and not path.is_symlink()]
    path = draw.choice(sorted(path for path in files if path.stat().st_size < 2**30))
    ways: list[Callable[[Path, Random], str]] = [change_bytes, change_place]
    if path.suffix == ".json":
        ways += [change_json] * 6
    if path.suffix == ".safetensors":
        ways += [change_header] * 5
    way = draw.choice(ways)
    return f"{path.name}: {way.__name__}: {way(path, draw)}"


def change_bytes(path: Path, draw: Random) -> str:
    data = bytearray(path.read_bytes())
    way = draw.choice(["flip", "flips", "cut", "longer", "zeros", "ones", "noise", "twice", "empty"])
    start = draw.randrange(len(data)) if data else 0
    end = min(len(data), start + draw.choice((1, 8, 1000)))
    if way in ("flip", "flips"):
        for _ in range(min(len(data), 1 if way == "flip" else 50)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif way == "cut":
        del data[start:]
    elif way == "longer":
        data += draw.randbytes(draw.choice((1, 1000, 10**6)))
    elif way in ("zeros", "ones"):
        data[start:end] = bytes([0 if way == "zeros" else 255]) * (end - start)
    elif way == "noise":
        data[start:end] = draw.randbytes(end - start)
    elif way == "twice":
        data[start:start] = data[start:end]
    else:
        data.clear()
    path.write_bytes(data)
    return f"{way} at {start}"


def change_place(path: Path, draw: Random) -> str:
    """Replace a file by a link, a directory, a pipe, a sparse file, another file, or nothing."""
    outside = path.parent.parent / "outside"
    shutil.copy(path, outside)
    others = [other for other in path.parent.iterdir() if other.is_file()]
    path.unlink()
    way = draw.choice(["gone", "outside", "passwd", "zero", "loop", "dangling", "pipe", "directory", "sparse", "other"])
    links = {"outside": outside, "passwd": "/etc/passwd", "zero": "/dev/zero", "loop": path.name, "dangling": "nothing"}
    if way in links:
        path.symlink_to(links[way])
    elif way == "pipe":
        os.mkfifo(path)
    elif way == "directory":
        path.mkdir()
    elif way == "sparse":
        with path.open("wb") as file:
            file.truncate(20 * 2**30)
    elif way == "other" and (other := draw.choice(others)) != path:
        shutil.copy(other, path)
    return way


def hostile_value(draw: Random) -> Any:
    return draw.choice(draw.choice((NUMBERS, NUMBERS, WORDS, OTHERS)))


def change_value(data: Any, draw: Random) -> tuple[Any, str]:
    """Change one value somewhere in JSON data."""
    holder: Any = [data]
    key: Any = 0
    trail = ""
    while isinstance(value := holder[key], dict | list) and value and (not trail or draw.random() < 0.75):
        holder, key = value, draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        trail += f".{key!s:.30}"
    way = draw.choice(["put", "put", "put", "remove", "add", "swap"])
    new = hostile_value(draw)
    if way == "remove" and trail:
        del holder[key]
    elif way == "add" and isinstance(holder, dict):
        holder[draw.choice(("extra", "", "../x", "1", "padding", "vocab_size", "window", "__metadata__"))] = new
    elif way == "swap" and isinstance(holder, dict) and len(holder) > 1:
        other = draw.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
    else:
        way = "put"
        holder[key] = new
        if not trail:
            data = new
    return data, f"{way} {new!r:.40} at {trail or 'the top'}"


def to_text(data: Any, draw: Random) -> str:
    """JSON text with the placeholders for deep nesting and long numbers filled in."""
    depth = draw.choice((100, 900, 100_000))
    text = json.dumps(data)
    text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth).replace(f'"{DIGITS}"', "9" * 5000)
    return text


def change_json(path: Path, draw: Random) -> str:
    try:
        data, change = change_value(json.loads(path.read_text(encoding="utf-8")), draw)
    except (ValueError, RecursionError):  # an earlier change left invalid JSON
        return change_bytes(path, draw)
    path.write_text(to_text(data, draw), encoding="utf-8")
    return change


def change_header(path: Path, draw: Random) -> str:
    """Falsify the header of a safetensors file."""
    data = path.read_bytes()
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
    except (ValueError, struct.error, RecursionError):  # damaged by an earlier change
        return change_bytes(path, draw)
    names = [name for name in header if name != "__metadata__"]
    if not names or not isinstance(header, dict):
        return change_bytes(path, draw)
    way = draw.choice(["length", "value", "value", "shape", "dtype", "offsets", "many", "rename"])
    entry = header[draw.choice(names)]
    change = way
    if way == "length":
        length = draw.choice((0, 1, length - 1, length + 1, len(data), 10**8, 2**31, 2**63, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", length) + data[8:])
        return f"length {length}"
    if way == "value":
        header, change = change_value(header, draw)
    elif way == "shape":
        entry["shape"] = draw.choice(
            ([2**40], [2**31, 2**31], [0], [], [1] * 1000, [2**63, 2], list(reversed(entry["shape"])))
        )
    elif way == "dtype":
        entry["dtype"] = draw.choice(
            ("F64", "BF16", "F16", "I64", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64", "X")
        )
    elif way == "offsets":
        entry["data_offsets"] = draw.choice(([0, 2**40], [2**63, 2**64 - 1], [8, 4], [0, 0], [4, len(data)]))
    elif way == "many":
        pattern = draw.choice(
            ("x.{}", "encoder.blocks.{}.norm.weight", names[0] + ".{}", "model.layers.{}.position_ids")
        )
        header |= {pattern.format(n): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(100_000)}
    else:
        header["../" + names[0]] = header.pop(names[0])
    text = to_text(header, draw).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return change
