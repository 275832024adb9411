"""The disk under prepared data: what it was made from, files to be read twice, a directory put in place whole."""

from __future__ import annotations

import os
import shutil
import stat
from hashlib import blake2b
from pathlib import Path

from regard.data.reader import STDIN, Source, open_raw
from regard.recipe import Recipe


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
