"""Prepared data: a recipe's files as tokenizers and ids in a directory that training opens and resuming finds again.

Everything is done once: schemes are chosen, vocabularies learned, validation data split off, text tokenised. The
directory appears complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from regard.batch import Pixels
from regard.config import parse
from regard.data.corpus import Corpus
from regard.data.images import Images, make_images
from regard.data.memory import InMemory
from regard.data.pairs import VALID_EXAMPLES, make_pairs, read_examples
from regard.data.plain import Stream, make_text
from regard.data.reader import MEMORY, STDIN, Source, open_raw
from regard.errors import UserError
from regard.files import replace_directory
from regard.recipe import Recipe
from regard.tasks import TASKS, Reads
from regard.text.codec import Codec, Example, TextConfig
from regard.text.learn import BaseText, requests
from regard.text.tokenizer import Tokenizer

FORMAT = 1
NOTHING: Mapping[str, InMemory] = MappingProxyType({})
RECORD = "prepared.json"
ROLES = ("training", "validation")
Data = TypeVar("Data", bound=Corpus | Stream | Images)


@dataclass(frozen=True, kw_only=True)
class Prepared(Generic[Data]):
    """What training starts from; what `train` and `valid` are follows from the files that the task reads."""

    codec: Codec  # for images one without text tokens
    train: Data
    valid: Data
    notes: list[str]  # the choices made, for people
    files: dict[str, DataFile] = field(default_factory=dict)  # by their role; versions before 0.7 did not record them
    labels: tuple[str, ...] = ()
    valid_examples: list[Example] = field(default_factory=list)  # the examples of a corpus `valid`, in its order
    pixels: Pixels | None = None  # for images


class DataFile(NamedTuple):
    """A file that data was prepared from, as it was then."""

    name: str  # without its directory
    bytes: int
    sha256: str | None


class _Kind(NamedTuple):
    """How one kind of data is written, with its record as the result, and opened; and how to ask for its files."""

    write: Callable[[Recipe, Source, Source | None, Path, BaseText | None], dict[str, Any]]
    open: Callable[[Path], Corpus | Stream | Images]
    files: str


_TABLE = "a table with --data FILE.tsv, or --source FILE and --target FILE"
KINDS: dict[Reads, _Kind] = {
    "pairs": _Kind(make_pairs, Corpus, _TABLE),
    "labelled": _Kind(make_pairs, Corpus, _TABLE),
    "text": _Kind(make_text, Stream.open, "plain text with --data FILE.txt"),
    "images": _Kind(make_images, Images, "images and labels with --data FILE.npz"),
}


def prepare(
    recipe: Recipe,
    directory: str | Path,
    base: BaseText | None = None,
    memory: Mapping[str, InMemory] = NOTHING,
) -> Prepared[Any]:
    """Make the data of a recipe ready in `directory`, or find it there.

    What is there is used if it was made from the same text with the same settings. With a `base`, text becomes ids as
    it does there. `memory` is the data that the recipe says was in memory: `train`, `valid`.
    """
    path = Path(directory)
    train, valid = sources(recipe)
    if TASKS[recipe.task].reads == "pairs":
        requests(recipe.text)
    record = _read_record(path)
    if record is not None:
        now = fingerprint(recipe, train, valid)
        if now == record["made_from"] and None not in now.values():
            return open_prepared(path)
    # With a fixed name, what a killed process has left is removed by the next one; it may be large.
    temporary = path.with_name(path.name + ".tmp")
    replace_directory(path, lambda to: _write(recipe, train, valid, to, base, memory), temporary)
    return open_prepared(path)


def _write(
    recipe: Recipe,
    train: Source,
    valid: Source | None,
    path: Path,
    base: BaseText | None,
    memory: Mapping[str, InMemory],
) -> None:
    train, valid = _spool(train, path, memory.get("train")), valid and _spool(valid, path, memory.get("valid"))
    before = _stamps(train, valid)
    record: dict[str, Any] = {"format": FORMAT, "task": recipe.task}
    record |= KINDS[TASKS[recipe.task].reads].write(recipe, train, valid, path, base)
    if _stamps(train, valid) != before:
        raise UserError(f"{train.name}: changed while it was read; start again when it is complete")
    record["made_from"] = made_from = fingerprint(recipe, train, valid)
    record["files"] = {
        role: DataFile(Path(name).name, os.stat(file).st_size, made_from[role])._asdict()
        for role, name, file in _files(train, valid)
    }
    digests = [[made_from[role] for role in record["files"] if role.startswith(kind)] for kind in ROLES]
    if digests[0] == digests[1]:
        record["notes"].append(
            "warning: the validation data is the training data, so its scores do not tell how new data would fare"
        )
    (path / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    for copy in path.glob("spool-*"):
        copy.unlink()


def open_prepared(directory: str | Path) -> Prepared[Any]:
    """Open what `prepare` made; processes that did not make it use this."""
    path = Path(directory)
    record = _read_record(path)
    if record is None:
        raise UserError(f"{path}: no prepared data here")
    where, kind = f"{path / RECORD}", KINDS[TASKS[record.get("task", "pairs")].reads]
    text, pixels = record.get("text"), record.get("pixels")
    return Prepared(
        codec=Codec.load(path, parse(TextConfig, text, where)) if text else Codec(Tokenizer.train("char", [])),
        train=kind.open(path / "train"),
        valid=kind.open(path / "valid"),
        notes=record["notes"],
        files={role: DataFile(**file) for role, file in record.get("files", {}).items()},
        labels=tuple(record.get("labels", ())),
        valid_examples=read_examples(path) if (path / VALID_EXAMPLES).exists() else [],
        pixels=parse(Pixels, pixels, where) if pixels else None,
    )


def is_prepared(directory: Path) -> bool:
    """Whether `prepare` made this directory."""
    return _read_record(directory) is not None


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if record.get("format") == FORMAT else None


def sources(recipe: Recipe) -> tuple[Source, Source | None]:
    """The training files of a recipe, and the validation files if it names any."""
    data = recipe.data
    if "features" in data.columns and (data.source or data.valid_source):
        raise UserError("data.columns: features are a column of a table (--data FILE.tsv); parallel files have none")
    if data.train is not None:
        train = Source((data.train,), data.columns, packed=data.train == MEMORY)
    elif data.source is not None and data.target is not None:
        train = Source((data.source, data.target))
    else:
        raise UserError(f"no training data: give {KINDS[TASKS[recipe.task].reads].files}")
    if data.valid is not None:
        return train, Source((data.valid,), data.columns)
    if data.valid_source is not None and data.valid_target is not None:
        return train, Source((data.valid_source, data.valid_target))
    return train, None


def fingerprint(recipe: Recipe, train: Source, valid: Source | None) -> dict[str, str | None]:
    """What prepared data depends on, by name; None for a file that is gone or can be read only once."""
    values: dict[str, str | None] = {f"text.{key}": str(value) for key, value in recipe.text.model_dump().items()}
    if recipe.task != "pairs":
        values["task"] = recipe.task
    if recipe.train.start_from is not None:
        values["train.start_from"] = recipe.train.start_from
    values["data.columns"] = ",".join(train.columns)
    values["data.max_length"] = str(recipe.data.max_length)
    return values | {role: _digest(path) for role, _, path in _files(train, valid)}


def _files(train: Source, valid: Source | None) -> Iterator[tuple[str, str, str]]:
    """The role, the name and the path of every file."""
    for kind, source in zip(ROLES, (train, valid), strict=True):
        for index, path in enumerate(source.paths if source else (), start=1):
            yield f"{kind} file {index}", "" if source is None else source.file_names[index - 1], path


def _digest(path: str, like: str | None = None) -> str | None:
    """The SHA-256 of a file; if `like` is what versions before 0.7 recorded, the hash that they used."""
    if not _regular(path):
        return None
    kind: Any = "sha256" if like is None or len(like) == 64 else partial(blake2b, digest_size=16)
    with open_raw(path) as file:
        return file_digest(file, kind).hexdigest()  # type: ignore[arg-type]


def _regular(path: str) -> bool:
    return path != STDIN and os.path.isfile(path)


def require_same(directory: str | Path, memory: Mapping[str, InMemory]) -> None:
    """Require that prepared data was made from the same data in memory."""
    before = (_read_record(Path(directory)) or {}).get("made_from", {})
    for role, data in memory.items():
        then = before.get(f"{ROLES[role == 'valid']} file 1")
        with TemporaryDirectory() as temporary:
            now = _digest(data.write(Path(temporary) / role).paths[0], then)
        if then not in (None, now):
            raise UserError(f"cannot resume: {data.name} changed since the run began; start a new run")


def changed_files(directory: str | Path, recipe: Recipe) -> Iterator[str]:
    """What has become of files since data was prepared from them; those that cannot be read now are left out."""
    record = _read_record(Path(directory)) or {}
    for role, name, path in _files(*sources(recipe)):
        then, now = record.get("made_from", {}).get(role), None
        with suppress(UserError):
            now = _digest(path, then)
        if now is None or then in (None, now):
            continue
        size = record.get("files", {}).get(role, {}).get("bytes")
        before, kind = "" if size is None else f"{size:,} bytes, ", "SHA-256" if len(then) == 64 else "BLAKE2b"
        yield (
            f"{name}: has changed since the run began: then {before}{kind} {then[:12]}..., "
            f"now {os.stat(path).st_size:,} bytes, {kind} {now[:12]}..."
        )


def _spool(source: Source, directory: Path, memory: InMemory | None = None) -> Source:
    """Copy what can be read only once (stdin, a pipe, memory) into `directory`, so that it can be read again."""
    if source.paths == (MEMORY,):
        if memory is None:
            raise UserError(
                "the data of this recipe was in memory when it was trained; give it again: --data FILE, or data= of "
                "regard.train"
            )
        return memory.write(directory / f"spool-{len(list(directory.iterdir()))}")
    paths = list(source.paths)
    for index, path in enumerate(source.paths):
        if path == STDIN or (os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode)):
            paths[index] = str(directory / f"spool-{len(list(directory.iterdir()))}")
            with open_raw(path) as once, open(paths[index], "wb") as copy:
                shutil.copyfileobj(once, copy, 1 << 20)
    return source._replace(paths=tuple(paths), names=source.file_names)


def _stamps(*sources: Source | None) -> list[tuple[int, int]]:
    """Sizes and times of the files, by which a change is noticed."""
    states = [os.stat(path) for source in sources if source for path in source.paths if _regular(path)]
    return [(state.st_size, state.st_mtime_ns) for state in states]
