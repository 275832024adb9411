"""Preparation of the data of a recipe: tokenizers and ids in a directory, which is created atomically."""

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
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from regard import files
from regard.batch import Pixels
from regard.config import parse
from regard.data.encode import shards_of
from regard.data.images import Images, make_images
from regard.data.in_memory import InMemory
from regard.data.pairs import VALID_EXAMPLES, lay_out, make_pairs, read_examples
from regard.data.plain_text import TEXT, Stream, make_text
from regard.data.reader import MEMORY, STDIN, open_raw
from regard.data.store import Corpus
from regard.data.tables import VALIDATION, Corpora, format_of, splits_of
from regard.errors import UserError, plural
from regard.recipe import Column, Data, Recipe
from regard.tasks import TASKS, Reads
from regard.text.codec import Codec, Example, TextConfig
from regard.text.learn import BaseText, requests
from regard.text.tokenizer import Tokenizer

FORMAT = 2  # of the record; data of format 1, by earlier versions, has no manifest
NOTHING: Mapping[str, InMemory] = MappingProxyType({})
RECORD = "prepared.json"
DAMAGED = "restore it from a copy, or begin a new run with the best weights of this one: train.start_from=RUN"
MAX_NAMED_FILES = 5  # in a message
POLL_SECONDS = 0.5  # while another process prepares the same data
ROLES = ("training", "validation")
NOUNS: dict[Reads, str] = {"pairs": "pairs", "labelled": "texts with labels", "text": "plain text", "images": "images"}
Kind = TypeVar("Kind", bound=Corpus | Stream | Images)
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Prepared(Generic[Kind]):
    """Prepared data. The type of `train` and `valid` depends on the kind of data that the task reads."""

    codec: Codec  # for images, one without text tokens
    train: Kind
    valid: Kind
    notes: list[str]  # the decisions and the line counts, to be printed
    files: dict[str, DataFile] = field(default_factory=dict)  # by role; empty in data of versions before 0.7
    labels: tuple[str, ...] = ()
    valid_examples: list[Example] = field(default_factory=list)  # of a corpus `valid`, in its order
    pixels: Pixels | None = None  # for images
    columns: tuple[Column, ...] | None = None  # of all tables of pairs; None if they differ


class DataFile(NamedTuple):
    """The state of a file when data was prepared from it."""

    name: str  # without its directory
    bytes: int
    sha256: str | None
    mtime_ns: int | None = None  # time of the last write; not recorded before version 0.15


class _Kind(NamedTuple):
    """The functions for a kind of data; `write` returns its record. `files` is the advice in the error for no files."""

    write: Callable[[Recipe, Corpora, Corpora | None, Path, BaseText | None, int], dict[str, Any]]
    open: Callable[[Path], Corpus | Stream | Images]
    files: str


_TABLE = "a table with data.train=FILE.tsv, or data.source=FILE and data.target=FILE"
KINDS: dict[Reads, _Kind] = {
    "pairs": _Kind(make_pairs, Corpus, _TABLE),
    "labelled": _Kind(make_pairs, Corpus, _TABLE),
    "text": _Kind(make_text, Stream.open, "plain text with data.train=FILE.txt"),
    "images": _Kind(make_images, Images, "images and labels with data.train=FILE.npz"),
}


def prepare(
    recipe: Recipe,
    directory: str | Path,
    base: BaseText | None = None,
    memory: Mapping[str, InMemory] = NOTHING,
    processes: int = 1,
    say: Say | None = None,
) -> Prepared[Any]:
    """Prepare the data of a recipe in `directory`, or open it if it was prepared from the same files and settings.

    `base` holds the tokenizers of the run to start from, `memory` the data that the recipe names `<memory>` (train,
    valid). `say` receives messages about waiting for another process.
    """
    path = Path(directory)
    train, valid = sources(recipe)
    if TASKS[recipe.task].reads == "pairs":
        requests(recipe.text)
    record = _read_record(path)
    if record is not None:
        now = fingerprint(recipe, train, valid)
        if now == record["made_from"] and None not in now.values() and not find_damage(path):
            shutil.rmtree(shards_of(path), ignore_errors=True)  # a process was killed before it removed them
            return open_prepared(path)

    def make(path: Path) -> None:
        """Write the data; use the shards of a killed process and remove its other files."""
        temporary = path.with_name(path.name + ".tmp")  # a fixed name, because the remains of a kill may be large
        files.replace_directory(path, lambda to: _write(recipe, train, valid, to, base, memory, processes), temporary)
        shutil.rmtree(shards_of(path), ignore_errors=True)

    now = fingerprint(recipe, train, valid) if recipe.data.cache is not None else {}
    notes = []
    if recipe.data.cache is None or None in now.values():  # data from stdin or memory is not cached
        make(path)
    else:
        entry = Path(recipe.data.cache) / _cache_key(now, base)
        if _take_from_cache(entry, now, path, make, say or (lambda _: None)):
            notes.append(f"data: prepared before, in {entry}")
    prepared = open_prepared(path)
    return replace(prepared, notes=[*notes, *prepared.notes])


def _cache_key(made_from: dict[str, str | None], base: BaseText | None) -> str:
    """A hash of everything that prepared data depends on."""
    parts: list[Any] = [FORMAT, sorted(made_from.items())]
    if base is not None:
        tokenizers = [tokenizer.to_json() for tokenizer in (base.codec.source, base.codec.target)]
        parts += [base.codec.config.model_dump(mode="json"), tokenizers, base.labels]
    return blake2b(json.dumps(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _take_from_cache(
    entry: Path, made_from: dict[str, str | None], path: Path, make: Callable[[Path], None], say: Say
) -> bool:
    """Share an entry of the cache with a run -> whether it existed; otherwise it is made under a lock.

    On a file system without locks, the run prepares its own data. An entry is made again if it does not match its key,
    because a file has changed in between, or its manifest: no data is lost, and other runs need not repeat the error.
    """
    files.make_directory(entry.parent, f"data.cache: {entry.parent}")
    files.require_no_links(entry.parent, (entry.name + end for end in ("", ".lock", ".shards", ".tmp", ".tmp.old")))
    for remains in entry.parent.glob(f"{'[0-9a-f]' * len(entry.name)}.tmp"):  # of killed trainings on other data
        with suppress(UserError), files.hold_lock(remains.with_suffix(".lock"), str(remains)) as locked:
            if locked:
                shutil.rmtree(remains, ignore_errors=True)
    waiting = False
    while True:
        try:
            with files.hold_lock(entry.with_suffix(".lock"), str(entry)) as locked:
                exists = (_read_record(entry) or {}).get("made_from") == made_from
                if exists:
                    shutil.rmtree(shards_of(entry), ignore_errors=True)  # as in `prepare`
                    _share(entry, path)
                    if not (damage := find_damage(path)):  # of the run's own data, which no other user can change
                        return True
                    say(f"warning: {entry}: is damaged, and prepared again: {damage[0]}")
                make(entry if locked else path)
                if locked:
                    _share(entry, path)
                return False
        except files.LockHeld:
            if not waiting:
                say(f"data: waiting for another training, which uses {entry}")
            waiting = True
            time.sleep(POLL_SECONDS)


def _share(entry: Path, path: Path) -> None:
    """Copy an entry into a run, with hard links to files that only this user can write."""

    def link(source: str, target: str) -> None:
        state = os.stat(source)
        own = hasattr(os, "geteuid") and state.st_uid == os.geteuid()
        if own and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            with suppress(OSError):
                os.link(source, target)
                return
        shutil.copyfile(source, target)

    copy = partial(shutil.copytree, entry, copy_function=link, dirs_exist_ok=True)
    files.replace_directory(path, copy, path.with_name(path.name + ".tmp"))


def _write(
    recipe: Recipe,
    train: Corpora,
    valid: Corpora | None,
    path: Path,
    base: BaseText | None,
    memory: Mapping[str, InMemory],
    processes: int,
) -> None:
    train = _spool(train, path, memory.get("train"))
    valid = valid and _spool(valid, path, memory.get("valid"))
    before = _stamps(train, valid)
    record: dict[str, Any] = {"format": FORMAT, "task": recipe.task}
    train, valid, notes = lay_out(recipe, train, valid)
    record |= KINDS[TASKS[recipe.task].reads].write(recipe, train, valid, path, base, processes)
    record["notes"] = [*notes, *record["notes"]]
    if recipe.task == "pairs" and len({part.columns for part in train.parts}) == 1:
        record["columns"] = train.columns
    if _stamps(train, valid) != before:
        raise UserError(f"{train.name}: changed while it was read; start again when it is complete")
    record["made_from"] = made_from = fingerprint(recipe, train, valid)
    record["files"] = {
        role: DataFile(Path(name).name, before[file][0], made_from[role], before[file][1])._asdict()
        for role, name, file in _files(train, valid)
    }
    digests = [[made_from[role] for role in record["files"] if role.startswith(kind)] for kind in ROLES]
    if digests[0] == digests[1]:
        effect = "its scores do not show the quality on new data"
        record["notes"].append(f"warning: the validation data is the training data, so {effect}")
    (path / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    for copy in path.glob("spool-*"):
        copy.unlink()
    files.update_manifest(path, _file_names(path))


def _file_names(path: Path) -> list[str]:
    """The names of the files of prepared data except its manifest; a hidden file is not one of them."""
    entries = (entry for entry in path.rglob("[!.]*") if entry.name != files.MANIFEST)
    return sorted(entry.relative_to(path).as_posix() for entry in entries if not entry.is_dir())


def find_damage(directory: str | Path) -> list[str]:
    """Differences of prepared data from its manifest, by size and SHA-256; none in data of format 1."""
    path = Path(directory)
    try:
        damage = files.changed_files(path, verify=True)
        names = files.read_manifest(path).files
    except UserError as error:
        return [str(error)]
    if names or (_read_record(path) or {}).get("format") == FORMAT:
        damage += [f"{path / name}: is not in {files.MANIFEST}" for name in _file_names(path) if name not in names]
    return damage


def open_prepared(directory: str | Path) -> Prepared[Any]:
    """Open prepared data (used by other ranks and on resume)."""
    path = Path(directory)
    record = _read_record(path)
    if record is None:
        raise UserError(f"{path}: no prepared data here")
    where = str(path / RECORD)
    try:
        kind = KINDS[TASKS[record.get("task", "pairs")].reads]
        text = record.get("text")
        pixels = record.get("pixels")
        valid = kind.open(path / "valid")
        valid_examples = read_examples(path) if isinstance(valid, Corpus) else []
        if isinstance(valid, Corpus) and len(valid) != len(valid_examples):
            raise ValueError(f"{VALID_EXAMPLES} does not fit")
        return Prepared(
            codec=Codec.load(path, parse(TextConfig, text, where)) if text else Codec(Tokenizer.train("char", [])),
            train=kind.open(path / "train"),
            valid=valid,
            notes=record["notes"],
            files={role: DataFile(**file) for role, file in record.get("files", {}).items()},
            labels=tuple(record.get("labels", ())),
            valid_examples=valid_examples,
            pixels=parse(Pixels, pixels, where) if pixels else None,
            columns=tuple(record["columns"]) if "columns" in record else None,
        )
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:  # in data of format 1
        raise UserError(f"{path}: not readable as prepared data: {error!r}; {DAMAGED}") from None


def is_prepared(directory: Path) -> bool:
    """Whether a directory holds prepared data."""
    return _read_record(directory) is not None


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = files.read_json(path / RECORD)
        valid = record["format"] in (1, FORMAT) and isinstance(record["made_from"], dict)
    except (UserError, LookupError, TypeError):
        return None
    return record if valid else None


def sources(recipe: Recipe) -> tuple[Corpora, Corpora | None]:
    """The training files and the validation files of a recipe."""
    data = recipe.data
    columns = data.columns
    names = data.column_names
    if TASKS[recipe.task].reads == "text":
        columns = ("source",)
        names = names or TEXT
    if "features" in data.columns and (data.source or data.valid_source):
        raise UserError(
            "data.columns: features are a column of a table (data.train=FILE.tsv); parallel files have none"
        )
    if data.train is not None:
        train = Corpora.of_tables(data.train, columns, names, "train")
    elif data.source is not None and data.target is not None:
        train = Corpora.of_parallel(data.source, data.target, ("data.source", "data.target"))
    else:
        raise UserError(f"no training data: give {KINDS[TASKS[recipe.task].reads].files}")
    valid = None
    if data.valid is not None:
        valid = Corpora.of_tables(data.valid, columns, names, *VALIDATION)
    elif data.valid_source is not None and data.valid_target is not None:
        valid = Corpora.of_parallel(data.valid_source, data.valid_target, ("data.valid_source", "data.valid_target"))
    elif data.train is not None and set(VALIDATION) & set(splits_of(data.train[0])):
        valid = Corpora.of_tables(data.train[:1], columns, names, *VALIDATION)
    _require_task(recipe, train, valid)
    return train, valid


def _require_task(recipe: Recipe, train: Corpora, valid: Corpora | None) -> None:
    """Refuse settings and files that the task does not support."""
    task = TASKS[recipe.task]
    reads = task.reads
    for name in task.unsupported_data:
        if getattr(recipe.data, name) != Data.model_fields[name].default:
            raise UserError(f"data.{name}: not for task {recipe.task}, which reads {NOUNS[reads]}")
    for corpora in (train, valid):
        if reads == "images" and corpora and len(corpora.paths) > 1:
            raise UserError(f"task {recipe.task} takes one file of images, not {len(corpora.paths)}")


def fingerprint(recipe: Recipe, train: Corpora, valid: Corpora | None) -> dict[str, str | None]:
    """The settings and file hashes that prepared data depends on; a missing file, stdin, pipe or memory has None."""
    values: dict[str, str | None] = {f"text.{key}": str(value) for key, value in recipe.text.model_dump().items()}
    if recipe.task != "pairs":
        values["task"] = recipe.task
    if recipe.train.start_from is not None:
        values["train.start_from"] = recipe.train.start_from
    # Without named columns, the content of the files decides.
    named = "columns" in recipe.data.model_fields_set
    values["data.columns"] = ",".join(recipe.data.columns) if named else "recognised"
    formats = [format_of(path) for _, _, path in _files(train, valid)]
    if "csv" in formats:  # the same bytes are another table than in a TSV
        values["data.formats"] = ",".join(formats)
    values["data.max_length"] = str(recipe.data.max_length)
    if len(train.sizes) > 1:
        values["data.corpora"] = ",".join(map(str, train.sizes))
    # strict, because it rejects data
    for name in ("column_names", "header", "min_length", "max_ratio", "deduplicate", "strict"):
        if (value := getattr(recipe.data, name)) != Data.model_fields[name].default:
            values[f"data.{name}"] = str(value)
    return values | {role: _digest(path) for role, _, path in _files(train, valid)}


def _files(train: Corpora, valid: Corpora | None) -> Iterator[tuple[str, str, str]]:
    """Yield the role, the name and the path of every file."""
    for kind, corpora in zip(ROLES, (train, valid), strict=True):
        if corpora is not None:
            for index, (name, path) in enumerate(zip(corpora.file_names, corpora.paths, strict=True), start=1):
                yield f"{kind} file {index}", name, path


def _digest(path: str, like: str | None = None) -> str | None:
    """The hash of a file: SHA-256, or the kind of `like`, which is BLAKE2b in records of versions before 0.7."""
    if not _regular(path):
        return None
    kind: Any = "sha256" if like is None or len(like) == 64 else partial(blake2b, digest_size=16)
    with open_raw(path) as file:
        return file_digest(file, kind).hexdigest()  # type: ignore[arg-type]


def _regular(path: str) -> bool:
    return path != STDIN and os.path.isfile(path)


def require_same(directory: str | Path, memory: Mapping[str, InMemory]) -> None:
    """Check that prepared data is as it was written, and was made from the same data in memory."""
    if damage := find_damage(directory):
        raise UserError("\n  ".join([*damage[:MAX_NAMED_FILES], f"the training cannot be resumed: {DAMAGED}"]))
    before = (_read_record(Path(directory)) or {}).get("made_from", {})
    for role, data in memory.items():
        then = before.get(f"{ROLES[role == 'valid']} file 1")
        with files.scratch_directory() as temporary:
            now = _digest(data.write(temporary / role).paths[0], then)
        if then not in (None, now):
            raise UserError(f"cannot resume: {data.name} changed since the run began; start a new run")


def changed_files(directory: str | Path, recipe: Recipe) -> Iterator[str]:
    """Describe each file that has changed since data was prepared from it; unreadable files are ignored."""
    record = _read_record(Path(directory)) or {}
    try:
        train, valid = sources(recipe)
    except UserError:  # data that this version rejects
        return
    for kind, corpora in zip(ROLES, (train, valid), strict=True):
        count = sum(role.startswith(f"{kind} file ") for role in record.get("made_from", {}))
        if corpora and count and len(corpora.paths) != count:  # a pattern now matches other files
            yield f"{corpora.name}: has {plural(len(corpora.paths), 'file')} now, and had {count:,} when the run began"
            return
    for role, name, path in _files(train, valid):
        then = record.get("made_from", {}).get(role)
        known = record.get("files", {}).get(role, {})
        now = None
        with suppress(UserError):  # the stamp saves hashing large files
            now = then if _stamp(path) == (known.get("bytes"), known.get("mtime_ns")) else _digest(path, then)
        if now is None or then in (None, now):
            continue
        before = f"{known['bytes']:,} bytes, " if known else ""
        kind = "SHA-256" if len(then) == 64 else "BLAKE2b"
        yield (
            f"{name}: has changed since the run began: then {before}{kind} {then[:12]}..., "
            f"now {os.stat(path).st_size:,} bytes, {kind} {now[:12]}..."
        )


def _spool(corpora: Corpora, directory: Path, memory: InMemory | None = None) -> Corpora:
    """Copy stdin, pipes and data in memory into `directory`, so that they can be read repeatedly."""
    if corpora.paths == (MEMORY,):
        if memory is None:
            raise UserError(
                "the data of this recipe was in memory when it was trained; give it again: data.train=FILE, or data= "
                "of regard.train"
            )
        return replace(corpora, parts=(memory.write(directory / f"spool-{len(list(directory.iterdir()))}"),))
    parts = []
    for part in corpora.parts:
        paths = list(part.paths)
        for index, path in enumerate(paths):
            if path == STDIN or (os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode)):
                paths[index] = str(directory / f"spool-{len(list(directory.iterdir()))}")
                with open_raw(path) as once, open(paths[index], "wb") as copy:
                    shutil.copyfileobj(once, copy, 1 << 20)
        parts.append(part._replace(paths=tuple(paths), names=part.file_names))
    return replace(corpora, parts=tuple(parts))


def _stamps(*files: Corpora | None) -> dict[str, tuple[int, int]]:
    """The size and the time of the last write of every file, to detect changes."""
    return {path: stamp for corpora in files if corpora for path in corpora.paths if (stamp := _stamp(path))}


def _stamp(path: str) -> tuple[int, int] | None:
    state = os.stat(path) if _regular(path) else None
    return state and (state.st_size, state.st_mtime_ns)
