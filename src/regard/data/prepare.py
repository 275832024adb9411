"""Everything between a recipe's files and the first batch: choose, learn, split, tokenise, once and for all.

The result is a directory that training reads and resuming finds again; it appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from regard.config import parse
from regard.data.corpus import Corpus
from regard.data.images import Images, Pixels, make_images
from regard.data.pairs import make_pairs
from regard.data.plain import Stream, make_text
from regard.data.reader import STDIN, Source, open_raw
from regard.errors import UserError
from regard.recipe import Recipe
from regard.tasks import TASKS
from regard.text.codec import Base, Codec, Example, TextConfig
from regard.text.learn import requests
from regard.text.tokenizer import Tokenizer

FORMAT = 1


class Prepared(NamedTuple):
    """What training on examples starts from. `valid` and `valid_examples` hold the same examples in the same order."""

    codec: Codec
    train: Corpus
    valid: Corpus
    valid_examples: list[Example]
    notes: list[str]  # the choices made, for people
    labels: tuple[str, ...] = ()


class PreparedText(NamedTuple):
    """What training on plain text starts from."""

    codec: Codec
    train: Stream
    valid: Stream
    notes: list[str]
    labels: tuple[str, ...] = ()


class PreparedImages(NamedTuple):
    """What training on images starts from. Its codec knows no token: there is no text."""

    codec: Codec
    train: Images
    valid: Images
    notes: list[str]
    labels: tuple[str, ...]
    pixels: Pixels


AnyPrepared = Prepared | PreparedText | PreparedImages


def prepare(recipe: Recipe, directory: str | Path, resume: bool = False, base: Base | None = None) -> AnyPrepared:
    """Make the data of a recipe ready in `directory`, or find it there.

    What is there is used if it was made from the same text with the same settings. If not, it is made anew, or, with
    `resume`, it is an error; files that are gone or cannot be read twice are then taken to be the same. With a `base`,
    text becomes ids as it does there.
    """
    path = Path(directory)
    train, valid = sources(recipe)
    if recipe.task == "pairs":
        requests(recipe.text)
    found = _read_record(path)
    if found is not None:
        now = fingerprint(recipe, train, valid)
        changed = sorted(key for key in {*now, *found["made_from"]} if now.get(key) != found["made_from"].get(key))
        if resume:
            changed = [key for key in changed if now.get(key, "") is not None]
        if not changed:
            return open_prepared(path)
        if resume:
            raise UserError(f"cannot resume: {', '.join(changed)} changed since the run began; start a new run")
    temporary = path.with_name(path.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        train, valid = spool(train, temporary), valid and spool(valid, temporary)
        before = stamp(train, valid)
        record = {"format": FORMAT, "task": recipe.task} | _make(recipe, train, valid, temporary, base)
        if stamp(train, valid) != before:
            raise UserError(f"{train.name}: changed while it was read; start again when it is complete")
        record["made_from"] = fingerprint(recipe, train, valid)
        (temporary / "prepared.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the prepared data: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return open_prepared(path)


def open_prepared(directory: str | Path) -> AnyPrepared:
    """Open what `prepare` made; processes that did not make it use this."""
    path = Path(directory)
    record = _read_record(path)
    if record is None:
        raise UserError(f"{path}: no prepared data here")
    where, notes, labels = f"{path}/prepared.json", record["notes"], tuple(record.get("labels", ()))
    task = record.get("task", "pairs")
    if task == "image":
        pixels = parse(Pixels, record["pixels"], where)
        images = Images(path / "train"), Images(path / "valid")
        return PreparedImages(Codec(Tokenizer.train("char", [])), *images, notes, labels, pixels)
    codec = Codec.load(path, parse(TextConfig, record["text"], where))
    if TASKS[task].plain_text:
        return PreparedText(codec, Stream.open(path / "train"), Stream.open(path / "valid"), notes)
    rows = (path / "valid.jsonl").read_bytes().split(b"\n")[:-1]
    examples = [Example(*json.loads(row)) for row in rows]
    return Prepared(codec, Corpus.open(path / "train"), Corpus.open(path / "valid"), examples, notes, labels)


def sources(recipe: Recipe) -> tuple[Source, Source | None]:
    """The training files of a recipe, and the validation files if it names any."""
    data = recipe.data
    if "features" in data.columns and (data.source or data.valid_source):
        raise UserError("data.columns: features are a column of a table (--data FILE.tsv); parallel files have none")
    if data.train is not None:
        train = Source((data.train,), data.columns)
    elif data.source is not None and data.target is not None:
        train = Source((data.source, data.target))
    elif TASKS[recipe.task].plain_text:
        raise UserError("no training data: give plain text with --data FILE.txt")
    elif recipe.task == "image":
        raise UserError("no training data: give images and labels with --data FILE.npz")
    else:
        raise UserError("no training data: give a table with --data FILE.tsv, or --source FILE and --target FILE")
    if data.valid is not None:
        return train, Source((data.valid,), data.columns)
    if data.valid_source is not None and data.valid_target is not None:
        return train, Source((data.valid_source, data.valid_target))
    return train, None


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((path / "prepared.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if record.get("format") == FORMAT else None


def _make(recipe: Recipe, train: Source, valid: Source | None, path: Path, base: Base | None) -> dict[str, Any]:
    """Write everything into `path`; return the record of it."""
    if recipe.task == "image":
        return make_images(recipe, train, valid, path)
    if TASKS[recipe.task].plain_text:
        return make_text(recipe, train, valid, path, base)
    return make_pairs(recipe, train, valid, path, base)


def fingerprint(recipe: Recipe, train: Source, valid: Source | None) -> dict[str, str | None]:
    """What prepared data depends on, by name; None for a file that is gone or can be read only once."""
    marks: dict[str, str | None] = {f"text.{key}": str(value) for key, value in recipe.text.model_dump().items()}
    if recipe.task != "pairs":
        marks["task"] = recipe.task
    if recipe.train.start_from is not None:
        marks["train.start_from"] = recipe.train.start_from
    marks["data.columns"] = ",".join(train.columns)
    marks["data.max_length"] = str(recipe.data.max_length)
    if valid is None:
        marks["train.seed"] = str(recipe.train.seed)
    for role, source in (("training", train), ("validation", valid)):
        for index, path in enumerate(source.paths if source else ()):
            marks[f"{role} file {index + 1}"] = _digest(path)
    return marks


def _digest(path: str) -> str | None:
    if not _regular(path):
        return None
    digest = blake2b(digest_size=16)
    with open_raw(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _regular(path: str) -> bool:
    return path != STDIN and os.path.isfile(path)


def spool(source: Source, directory: Path) -> Source:
    """Copy what can be read only once (stdin, a pipe) into `directory`, so that it can be read again."""
    paths = list(source.paths)
    for index, path in enumerate(source.paths):
        if path == STDIN or (os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode)):
            paths[index] = str(directory / f"spool-{len(list(directory.iterdir()))}")
            with open_raw(path) as once, open(paths[index], "wb") as copy:
                shutil.copyfileobj(once, copy, 1 << 20)
    return source._replace(paths=tuple(paths), names=source._names())


def stamp(*sources: Source | None) -> list[tuple[int, int]]:
    """Sizes and times by which a change is noticed."""
    found = [os.stat(path) for source in sources if source for path in source.paths if _regular(path)]
    return [(state.st_size, state.st_mtime_ns) for state in found]


def replace(temporary: Path, path: Path) -> None:
    """Put a finished directory in the place of `path`; whoever looks finds the old one or the new one, whole."""
    for spooled in temporary.glob("spool-*"):
        spooled.unlink()
    for place in (*temporary.rglob("*"), temporary):
        _sync(place)
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file or directory is safely on the disk; elsewhere than on POSIX there is no such call for both."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
