"""Prepared data: a recipe's files as tokenizers and ids in a directory that training opens and resuming finds again.

Everything is done once: schemes are chosen, vocabularies learned, validation data split off, text tokenised. The
directory appears complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from regard.batch import Pixels
from regard.config import parse
from regard.data.encode import shards_of
from regard.data.images import Images, make_images
from regard.data.in_memory import InMemory
from regard.data.pairs import VALID_EXAMPLES, make_pairs, read_examples
from regard.data.plain_text import TEXT, Stream, make_text
from regard.data.reader import MEMORY, STDIN, Source, open_raw
from regard.data.store import Corpus
from regard.data.tables import Corpora
from regard.errors import UserError, plural
from regard.files import LockHeld, hold_lock, replace_directory
from regard.recipe import Data, Recipe
from regard.tasks import TASKS, Reads
from regard.text.codec import Codec, Example, TextConfig
from regard.text.learn import BaseText, requests
from regard.text.tokenizer import Tokenizer

FORMAT = 1
NOTHING: Mapping[str, InMemory] = MappingProxyType({})
RECORD = "prepared.json"
WAITING = 0.5  # seconds between two looks whether another process has made an entry of the cache
ROLES = ("training", "validation")
NOUNS: dict[Reads, str] = {"pairs": "pairs", "labelled": "texts with labels", "text": "plain text", "images": "images"}
Kind = TypeVar("Kind", bound=Corpus | Stream | Images)
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Prepared(Generic[Kind]):
    """What training starts from; what `train` and `valid` are follows from the files that the task reads."""

    codec: Codec  # for images one without text tokens
    train: Kind
    valid: Kind
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
    mtime_ns: int | None = None  # when it was last written; versions before 0.15 did not record it


class _Kind(NamedTuple):
    """How one kind of data is written, with its record as the result, and opened; and how to ask for its files."""

    write: Callable[[Recipe, Corpora, Corpora | None, Path, BaseText | None, int], dict[str, Any]]
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
    processes: int = 1,
    say: Say | None = None,
) -> Prepared[Any]:
    """Make the data of a recipe ready in `directory`, or find it there.

    What is there is used if it was made from the same text with the same settings. With a `base`, text becomes ids as
    it does there. `memory` is the data that the recipe says was in memory: `train`, `valid`. Up to so many `processes`
    tokenise, if they pay; they change nothing else. `say` gets a message if another process has to be waited for.
    """
    path = Path(directory)
    train, valid = sources(recipe)
    if TASKS[recipe.task].reads == "pairs":
        requests(recipe.text)
    record = _read_record(path)
    if record is not None:
        now = fingerprint(recipe, train, valid)
        if now == record["made_from"] and None not in now.values():
            shutil.rmtree(shards_of(path), ignore_errors=True)  # left by a process that was killed when all was done
            return open_prepared(path)
    make = partial(_make, recipe=recipe, train=train, valid=valid, base=base, memory=memory, processes=processes)
    now = fingerprint(recipe, train, valid) if recipe.data.cache is not None else {}
    if recipe.data.cache is None or None in now.values():  # stdin or memory, which can be read only once
        make(path)
        return open_prepared(path)
    entry = Path(recipe.data.cache) / _cache_key(now, base)
    found = _take_from_cache(entry, now, path, make, say)
    prepared = open_prepared(path)
    return replace(prepared, notes=[f"data: prepared before, in {entry}", *prepared.notes]) if found else prepared


def _make(path: Path, **arguments: Any) -> None:
    """Write prepared data; what a killed process has left of it is used or removed."""
    temporary = path.with_name(path.name + ".tmp")  # a fixed name, for what is left there may be large
    replace_directory(path, lambda to: _write(path=to, **arguments), temporary)
    shutil.rmtree(shards_of(path), ignore_errors=True)


# The cache


def _cache_key(made_from: dict[str, str | None], base: BaseText | None) -> str:
    """A hash of all that prepared data depends on."""
    parts: list[Any] = [FORMAT, sorted(made_from.items())]
    if base is not None:
        tokenizers = [tokenizer.to_json() for tokenizer in (base.codec.source, base.codec.target)]
        parts += [base.codec.config.model_dump(mode="json"), tokenizers, base.labels]
    return blake2b(json.dumps(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _take_from_cache(
    entry: Path, made_from: dict[str, str | None], path: Path, make: Callable[[Path], None], say: Say | None
) -> bool:
    """Share an entry of the cache with a run, and make it first if it is not there -> whether it was.

    One process makes it, others wait. On a file system without locks the run prepares its own data. An entry that was
    made while a file changed is not what its key says, and is made again.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache: {entry.parent}: cannot make this directory: {error.strerror or error}") from None
    while True:
        try:
            with hold_lock(entry.with_suffix(".lock"), str(entry)) as locked:
                found = (_read_record(entry) or {}).get("made_from") == made_from
                if found:
                    shutil.rmtree(shards_of(entry), ignore_errors=True)  # as in `prepare`
                else:
                    make(entry if locked else path)
                if found or locked:
                    _share(entry, path)
                return found
        except LockHeld:
            if say is not None:
                say(f"data: waiting for another training, which uses {entry}")
                say = None
            time.sleep(WAITING)


def _share(entry: Path, path: Path) -> None:
    """Give a run the data of an entry, as hard links where that is possible; no file of it is ever changed."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    def write(temporary: Path) -> None:
        shutil.copytree(entry, temporary, copy_function=link, dirs_exist_ok=True)

    replace_directory(path, write, path.with_name(path.name + ".tmp"))


def _write(
    recipe: Recipe,
    train: Corpora,
    valid: Corpora | None,
    path: Path,
    base: BaseText | None,
    memory: Mapping[str, InMemory],
    processes: int,
) -> None:
    train, valid = _spool(train, path, memory.get("train")), valid and _spool(valid, path, memory.get("valid"))
    before = _stamps(train, valid)
    record: dict[str, Any] = {"format": FORMAT, "task": recipe.task}
    record |= KINDS[TASKS[recipe.task].reads].write(recipe, train, valid, path, base, processes)
    if _stamps(train, valid) != before:
        raise UserError(f"{train.name}: changed while it was read; start again when it is complete")
    record["made_from"] = made_from = fingerprint(recipe, train, valid)
    record["files"] = {
        role: DataFile(Path(name).name, before[file][0], made_from[role], before[file][1])._asdict()
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


def sources(recipe: Recipe) -> tuple[Corpora, Corpora | None]:
    """The training files of a recipe, and the validation files if it names any."""
    data = recipe.data
    columns, names = data.columns, data.column_names
    if TASKS[recipe.task].reads == "text":
        columns, names = ("source",), names or TEXT
    if "features" in data.columns and (data.source or data.valid_source):
        raise UserError("data.columns: features are a column of a table (--data FILE.tsv); parallel files have none")
    if data.train is not None:
        train = Corpora.of_tables(data.train, columns, names)
    elif data.source is not None and data.target is not None:
        train = Corpora.of_parallel(data.source, data.target, ("data.source", "data.target"))
    else:
        raise UserError(f"no training data: give {KINDS[TASKS[recipe.task].reads].files}")
    valid = None
    if data.valid is not None:
        valid = Corpora.of_tables(data.valid, columns, names)
    elif data.valid_source is not None and data.valid_target is not None:
        what = ("data.valid_source", "data.valid_target")
        valid = Corpora.of_parallel(data.valid_source, data.valid_target, what)
    _require_task(recipe, [train, *filter(None, [valid])])
    return train, valid


def _require_task(recipe: Recipe, files: list[Corpora]) -> None:
    """Refuse settings and files that the data of a task cannot have."""
    data, reads = recipe.data, TASKS[recipe.task].reads
    refused = {
        "weights": data.weights is not None and reads == "images",
        "temperature": data.temperature is not None and reads == "images",
        "min_length": data.min_length > 1 and reads in ("text", "images"),
        "max_ratio": data.max_ratio is not None and reads != "pairs",
        "deduplicate": data.deduplicate and reads in ("text", "images"),
    }
    for name, wrong in refused.items():
        if wrong:
            raise UserError(f"data.{name}: not for task {recipe.task}, which reads {NOUNS[reads]}")
    for corpora in files:
        if reads == "images" and len(corpora.paths) > 1:
            raise UserError(f"task {recipe.task} takes one file of images, not {len(corpora.paths)}")


def fingerprint(recipe: Recipe, train: Corpora, valid: Corpora | None) -> dict[str, str | None]:
    """What prepared data depends on, by name; None for a file that is gone or can be read only once."""
    values: dict[str, str | None] = {f"text.{key}": str(value) for key, value in recipe.text.model_dump().items()}
    if recipe.task != "pairs":
        values["task"] = recipe.task
    if recipe.train.start_from is not None:
        values["train.start_from"] = recipe.train.start_from
    values["data.columns"] = ",".join(recipe.data.columns)
    values["data.max_length"] = str(recipe.data.max_length)
    if len(train.sizes) > 1:
        values["data.corpora"] = ",".join(map(str, train.sizes))
    for name in ("column_names", "min_length", "max_ratio", "deduplicate", "strict"):  # strict refuses other data
        if (value := getattr(recipe.data, name)) != Data.model_fields[name].default:
            values[f"data.{name}"] = str(value)
    return values | {role: _digest(path) for role, _, path in _files(train, valid)}


def _files(train: Corpora, valid: Corpora | None) -> Iterator[tuple[str, str, str]]:
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
    try:
        train, valid = sources(recipe)
    except UserError:  # data that this version would refuse
        return
    for kind, corpora in zip(ROLES, (train, valid), strict=True):
        count = sum(role.startswith(f"{kind} file ") for role in record.get("made_from", {}))
        if corpora and count and len(corpora.paths) != count:  # a pattern that matches others now
            yield f"{corpora.name}: has {plural(len(corpora.paths), 'file')} now, and had {count:,} when the run began"
            return
    for role, name, path in _files(train, valid):
        then, now = record.get("made_from", {}).get(role), None
        known = record.get("files", {}).get(role, {})
        with suppress(UserError):  # large files take long to hash
            now = then if _stamp(path) == (known.get("bytes"), known.get("mtime_ns")) else _digest(path, then)
        if now is None or then in (None, now):
            continue
        before, kind = f"{known['bytes']:,} bytes, " if known else "", "SHA-256" if len(then) == 64 else "BLAKE2b"
        yield (
            f"{name}: has changed since the run began: then {before}{kind} {then[:12]}..., "
            f"now {os.stat(path).st_size:,} bytes, {kind} {now[:12]}..."
        )


def _spool(corpora: Corpora, directory: Path, memory: InMemory | None = None) -> Corpora:
    """Copy what can be read only once (stdin, a pipe, memory) into `directory`, so that it can be read again."""
    if corpora.paths == (MEMORY,):
        if memory is None:
            raise UserError(
                "the data of this recipe was in memory when it was trained; give it again: --data FILE, or data= of "
                "regard.train"
            )
        return replace(corpora, parts=(memory.write(directory / f"spool-{len(list(directory.iterdir()))}"),))
    return replace(corpora, parts=tuple(_spool_part(part, directory) for part in corpora.parts))


def _spool_part(source: Source, directory: Path) -> Source:
    paths = list(source.paths)
    for index, path in enumerate(source.paths):
        if path == STDIN or (os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode)):
            paths[index] = str(directory / f"spool-{len(list(directory.iterdir()))}")
            with open_raw(path) as once, open(paths[index], "wb") as copy:
                shutil.copyfileobj(once, copy, 1 << 20)
    return source._replace(paths=tuple(paths), names=source.file_names)


def _stamps(*files: Corpora | None) -> dict[str, tuple[int, int]]:
    """The size and the time of every file, by which a change is noticed."""
    return {path: stamp for corpora in files if corpora for path in corpora.paths if (stamp := _stamp(path))}


def _stamp(path: str) -> tuple[int, int] | None:
    state = os.stat(path) if _regular(path) else None
    return state and (state.st_size, state.st_mtime_ns)
