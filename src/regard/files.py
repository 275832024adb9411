"""Writing files so that a crash at any moment leaves the old file or the new one, never half of one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.errors import UserError


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, make sure it reached the disk, and put it in place of `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot write: {error.strerror or error}; what was there before is untouched") from error


def replace_directory(path: Path, write: Callable[[Path], None]) -> None:
    """The same for a directory that does not exist yet: complete, or absent."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        if path.exists():
            shutil.rmtree(path)
        os.rename(temporary, path)
        sync(path.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{path}: cannot write: {error.strerror or error}; what was there before is untouched") from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of `value`."""
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8") and None)


def read_json(path: Path) -> Any:
    """The JSON in `path`; a missing or broken file is the user's to mend."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None


def sync(path: Path) -> None:
    """Wait until the disk has it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
