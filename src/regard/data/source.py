"""A source of examples: a TSV with named columns, or two parallel files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from regard.data.account import BLANK, COLUMNS, EMPTY, Account
from regard.data.lines import Line, read_lines, shown
from regard.errors import UserError
from regard.settings import Column
from regard.text.example import Example

MANY = 10  # columns; more are not told apart


class Located(NamedTuple):
    """An example and its line."""

    number: int
    example: Example


class Source(NamedTuple):
    """Where examples come from: one TSV and its columns, or a file of sources and a file of targets."""

    paths: tuple[str, ...]
    columns: tuple[Column, ...] = ("source", "target")
    names: tuple[str, ...] = ()  # what to call the files, where not by their paths

    def place(self, number: int, file: int = 0) -> str:
        """Name a line."""
        return f"{self._names()[file]}:{number}"

    @property
    def name(self) -> str:
        return " + ".join(self._names())

    def _names(self) -> tuple[str, ...]:
        return self.names or tuple(map(shown, self.paths))

    def read(self, account: Account) -> Iterator[Located]:
        """Yield the good examples in order; every line is entered into `account`."""
        return self._table(account) if len(self.paths) == 1 else self._parallel(account)

    def _table(self, account: Account) -> Iterator[Located]:
        width = len(self.columns)
        at = {name: index for index, name in enumerate(self.columns)}
        source_at, target_at, features_at = at["source"], at.get("target"), at.get("features")
        for number, text, problem in read_lines(self.paths[0]):
            account.read += 1
            if problem:
                account.skip(problem, self.place(number))
                continue
            cells = text.split("\t")
            source = cells[source_at] if source_at < len(cells) else ""
            target = cells[target_at] if target_at is not None and target_at < len(cells) else None
            if not text.strip():
                account.skip(BLANK, self.place(number))
            elif len(cells) != width:
                account.found[min(len(cells), MANY)] += 1
                account.skip(COLUMNS, self.place(number), f"{len(cells)} instead of {width} ({','.join(self.columns)})")
            elif not source.strip() or (target is not None and not target.strip()):
                account.skip(EMPTY, self.place(number), "target" if source.strip() else "source")
            else:
                features = cells[features_at] if features_at is not None else None
                yield Located(number, Example(source, target, features))

    def _parallel(self, account: Account) -> Iterator[Located]:
        left, right = (read_lines(path) for path in self.paths)
        counts = [0, 0]
        for source, target in zip_longest(left, right):
            if source is None or target is None:
                counts[source is None] = account.read + 1 + sum(1 for _ in (right if source is None else left))
                counts[source is not None] = account.read
                first, second = self._names()
                raise UserError(
                    f"{first} has {counts[0]:,} lines but {second} has {counts[1]:,}; "
                    "parallel files need one line for one line"
                )
            account.read += 1
            number = source.number
            if source.problem or target.problem:
                problem = source.problem or target.problem
                account.skip(str(problem), self.place(number, int(not source.problem)))
            elif _blank(source) or _blank(target):
                reason = BLANK if _blank(source) and _blank(target) else EMPTY
                account.skip(reason, self.place(number, int(not _blank(source))))
            else:
                yield Located(number, Example(source.text, target.text))

    def require(self, account: Account) -> None:
        """Raise if not a single example came out of the file, with the likely cause."""
        if account.kept:
            return
        if not account.read:
            raise UserError(f"{self.name}: the file is empty")
        hint = self.hint(account)
        raise UserError(f"{self.name}: no usable example: {account.summary()}{hint and chr(10) + '  ' + hint}")

    def hint(self, account: Account) -> str:
        """What is probably wrong when most lines have an unexpected number of columns; else nothing."""
        (found, count), *_ = account.found.most_common(1) or [(0, 0)]
        if count * 2 < account.read or not found:
            return ""
        if found == 1:
            return "most lines have one column: is the separator a tab?"
        names = {2: "source,target", 3: "source,features,target"}.get(found)
        advice = f"; name them, for example --columns {names}" if names else ""
        return f"most lines have {'at least ' * (found == MANY)}{found} columns, not {len(self.columns)}{advice}"


def _blank(line: Line) -> bool:
    return not line.text.strip()
