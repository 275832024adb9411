"""The manifest of a directory: size and SHA-256 of the files that are read from it, so that a changed one is named."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from regard.config import Value, parse
from regard.errors import UserError
from regard.files import read_json, write_json

MANIFEST = "manifest.json"
HASHED = 16 * 2**20  # bytes of a file that is hashed at every check: 10 to 40 ms; larger ones when asked to
LARGEST_TEXT = 64 * 2**20  # bytes of a file that is read as a whole: twice the largest tokenizers that there are
TEXT = (".json", ".toml", ".txt", ".model", ".spm")  # files that are read as a whole

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]


class Entry(Value):
    """What a file was when it was saved."""

    size: Annotated[int, Field(ge=0, strict=True)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Value):
    """What manifest.json holds."""

    format: Literal[1] = 1
    files: dict[Name, Entry] = Field(default_factory=dict, max_length=1000)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a directory; an empty one if it has none, as directories of earlier versions do."""
    path = directory / MANIFEST
    if not path.exists():
        return Manifest()
    require_own_files(directory, [MANIFEST])
    data = read_json(path)
    return parse(Manifest, data if isinstance(data, dict) else {"files": data}, str(path))


def update_manifest(directory: Path, names: Iterable[str]) -> None:
    """Write the entries of files as they are now; those of other files stay, unless the file is gone."""
    files = {name: _measure(directory / name) for name in names if (directory / name).is_file()}
    _write(directory, {n: e for n, e in _entries(directory).items() if (directory / n).is_file()} | files)


def accept_files(directory: Path, names: Iterable[str]) -> None:
    """Write the entries of files, and of all that have one, as they are now."""
    update_manifest(directory, {*names, *_entries(directory)})


@contextmanager
def rewriting(directory: Path, *names: str) -> Iterator[None]:
    """Record files that are written inside.

    Their entries are removed before: killed between, a file is one without an entry, not one that has changed.
    """
    before = _entries(directory)
    if before.keys() & set(names):
        _write(directory, {name: entry for name, entry in before.items() if name not in names})
    yield
    update_manifest(directory, names)


def _entries(directory: Path) -> dict[str, Entry]:
    """The entries to be written again; of a broken manifest none."""
    with suppress(UserError):
        return dict(read_manifest(directory).files)
    return {}


def _write(directory: Path, files: dict[str, Entry]) -> None:
    write_json(directory / MANIFEST, Manifest(files=dict(sorted(files.items()))).model_dump(mode="json"))


def _measure(path: Path) -> Entry:
    try:
        with path.open("rb") as file:
            return Entry(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=file.tell())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def changed_files(directory: Path, names: Collection[str] | None = None, verify: bool = False) -> list[str]:
    """What is not as the manifest says, a line for each file; of files that are not there only with `verify`.

    Files above `HASHED` are compared by size, or with `verify` in full. `names` limits it to some files.
    """
    wrong = []
    for name, entry in read_manifest(directory).files.items():
        path = directory / name
        if names is not None and name not in names:
            continue
        if not path.is_file():
            if verify:
                wrong.append(f"{path}: is missing")
            continue
        require_own_files(directory, [name])
        size = path.stat().st_size
        if size != entry.size:
            wrong.append(f"{path}: has changed: {size:,} bytes, saved were {entry.size:,}")
        elif (verify or size <= HASHED) and _measure(path) != entry:
            wrong.append(f"{path}: has changed: as long as the one saved, but with another SHA-256")
    return wrong


def require_unchanged(directory: Path, advice: str, names: Collection[str] | None = None, verify: bool = False) -> None:
    """Refuse files that are not those of the manifest; all come in one error, with `advice`."""
    if wrong := changed_files(directory, names, verify):
        raise UserError("\n  ".join([*wrong, advice]))


def require_own_files(directory: Path, names: Iterable[str]) -> None:
    """Refuse files that lie elsewhere, are no plain files, or are too long to be read as a whole."""
    home = directory.resolve()
    # A download cache consists of links into its blobs; no other link may lead out of a directory.
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for name in names:
        path = directory / name
        try:
            target = path.resolve(strict=True)
            size = target.stat().st_size
        except FileNotFoundError:
            if path.is_symlink():
                raise UserError(f"{path}: is a link to a file that is not there") from None
            continue
        except (OSError, RuntimeError) as error:  # a circle of links, a directory that may not be read
            raise UserError(f"{path}: cannot be read: {error}") from None
        if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
            raise UserError(f"{path}: leads out of its directory; only a directory's own files are read")
        if not (target.is_file() or target.is_dir()):
            raise UserError(f"{path}: is not a plain file")
        if size > LARGEST_TEXT and path.suffix in TEXT:
            most = LARGEST_TEXT // 2**20
            raise UserError(f"{path}: has {size / 2**20:,.0f} MB, where {most} are allowed; this cannot be right")
