"""log.jsonl: one JSON object per event. A resumed run cuts it back to its checkpoint and writes the same lines again.

Fields that come from the clock are named `seconds` or end in `_per_second`; all others are the same whenever it is run.
"""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

from regard.errors import UserError

LOG = "log.jsonl"
CLOCK_FIELDS = ("seconds", "tokens_per_second", "examples_per_second")
Event = dict[str, Any]


class Log:
    """The log of a run, open for writing at a position."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._error(error) from None
        self._file.truncate(min(position, path.stat().st_size))
        self.position = path.stat().st_size

    def write(self, event: Event) -> None:
        """Append an event; numbers that JSON does not know become null."""
        line = json.dumps({key: _plain(value) for key, value in event.items()}, ensure_ascii=False) + "\n"
        data = line.encode()
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._error(error) from None
        self.position += len(data)

    def sync(self) -> None:
        """Wait until the disk has it."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._error(error) from None

    def close(self) -> None:
        self._file.close()

    def _error(self, error: OSError) -> UserError:
        return UserError(f"{self.path}: cannot write: {error.strerror or error}; the last checkpoint is safe")


def read_log(path: Path) -> list[Event]:
    """The events of a run; a last line that was cut short is left out."""
    events = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        event = json.loads(line)
        if isinstance(event, dict):
            events.append(event)
    return events


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
