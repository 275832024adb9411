"""Prepared data: a recipe's files as tokenizers and ids in a directory that training opens and resuming finds again.

Everything is done once: schemes are chosen, vocabularies learned, validation data split off, text tokenised. The
directory appears complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
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
Data = TypeVar("Data", bound=Corpus | Stream | Images)


@dataclass(frozen=True, kw_only=True)
class Prepared(Generic[Data]):
    """What training starts from; what `train` and `valid` are follows from the files that the task reads."""

    codec: Codec  # for images one without text tokens
    train: Data
    valid: Data
    notes: list[str]  # the choices made, for people
    labels: tuple[str, ...] = ()
    valid_examples: list[Example] = field(default_factory=list)  # the examples of a corpus `valid`, in its order
    pixels: Pixels | None = None  # for images


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
    resume: bool = False,
    base: BaseText | None = None,
    memory: Mapping[str, InMemory] = NOTHING,
) -> Prepared[Any]:
    """Make the data of a recipe ready in `directory`, or find it there.

    What is there is used if it was made from the same text with the same settings. If not, it is made anew, or, with
    `resume`, it is an error; files that are gone or cannot be read twice are then taken to be the same. With a `base`,
    text becomes ids as it does there. `memory` is the data that the recipe says was in memory: `train`, `valid`.
    """
    path = Path(directory)
    train, valid = sources(recipe)
    if TASKS[recipe.task].reads == "pairs":
        requests(recipe.text)
    record = _read_record(path)
    if record is not None:
        now, before = fingerprint(recipe, train, valid), record["made_from"]
        changed = sorted(key for key in {*now, *before} if now.get(key) != before.get(key))
        if resume:  # earlier versions split by the seed; what they split stays as it is
            changed = [key for key in changed if now.get(key, "") is not None and key != "train.seed"]
        if not changed:
            return open_prepared(path)
        if resume:
            raise UserError(f"cannot resume: {', '.join(changed)} changed since the run began; start a new run")
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
    record["made_from"] = fingerprint(recipe, train, valid)
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
        labels=tuple(record.get("labels", ())),
        valid_examples=read_examples(path) if (path / VALID_EXAMPLES).exists() else [],
        pixels=parse(Pixels, pixels, where) if pixels else None,
    )


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
        train = Source((data.train,), data.columns)
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
    for role, source in (("training", train), ("validation", valid)):
        for index, path in enumerate(source.paths if source else ()):
            values[f"{role} file {index + 1}"] = _digest(path)
    return values


def _digest(path: str) -> str | None:
    if not _regular(path):
        return None
    with open_raw(path) as file:
        return file_digest(file, partial(blake2b, digest_size=16)).hexdigest()  # type: ignore[arg-type]


def _regular(path: str) -> bool:
    return path != STDIN and os.path.isfile(path)


def require_same(directory: str | Path, memory: Mapping[str, InMemory]) -> None:
    """Require that prepared data was made from the same data in memory."""
    before = (_read_record(Path(directory)) or {}).get("made_from", {})
    for role, data in memory.items():
        with TemporaryDirectory() as temporary:
            now = _digest(data.write(Path(temporary) / role).paths[0])
        if now != before.get("training file 1" if role == "train" else "validation file 1", now):
            raise UserError(f"cannot resume: {data.name} changed since the run began; start a new run")


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
