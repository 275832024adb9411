"""The account of a file's lines: every line read is either kept or skipped for a reason that is named."""

from __future__ import annotations

from collections import Counter
from typing import Any

from regard.errors import UserError

BLANK = "blank line"
COLUMNS = "wrong column count"
EMPTY = "empty side"
ENCODING = "invalid UTF-8"
LONG = "too long"
UNMET = "with a wish that cannot be met"
NAMED = 5  # places kept per reason


class Account:
    """How many lines were read, kept and skipped, and where. `read == kept + sum(skipped.values())`, always."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.read = 0
        self.skipped: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}  # reason -> the first few file:line
        self.found: Counter[int] = Counter()  # column counts that were wrong

    @property
    def kept(self) -> int:
        return self.read - self.skipped.total()

    def skip(self, reason: str, place: str, detail: str = "", *, tell: bool = False) -> None:
        """Count a line (already counted as read) as skipped; in strict mode it is the end.

        The detail is named there, and with `tell` in the summary too, where it is not the same for all such lines.
        """
        if self.strict:
            raise UserError(
                f"{place}: {reason}{detail and ': ' + detail}\n  without --strict such lines are skipped and counted"
            )
        self.skipped[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < NAMED:
            places.append(f"{place}: {detail}" if tell else place)

    def summary(self) -> str:
        """Say in a sentence what became of the lines."""
        text = f"{self.kept:,} of {self.read:,} lines"
        if not self.skipped:
            return text
        reasons = [f"{count:,} {reason} ({self._where(reason)})" for reason, count in self.skipped.most_common()]
        return f"{text}; skipped {', '.join(reasons)}"

    def _where(self, reason: str) -> str:
        places = self.places[reason]
        return ", ".join(places[:3]) + (", ..." if self.skipped[reason] > min(3, len(places)) else "")

    def to_json(self) -> dict[str, Any]:
        """The account as plain values."""
        return {"read": self.read, "kept": self.kept, "skipped": dict(self.skipped), "places": self.places}
