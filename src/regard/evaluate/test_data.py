"""Test data: sources, references, prefixes and existing outputs, from the columns of a table or from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

from regard.data.reader import BAD_REQUEST, EMPTY, STDIN, Line, LineCounter, Source, read_lines, shown
from regard.data.tables import format_of
from regard.decode.request import Request, parse_request
from regard.errors import UserError, plural
from regard.files import json_object
from regard.run import Run
from regard.text.codec import Example, UnknownTokens


@dataclass(frozen=True)
class ParallelData:
    """Test examples in order."""

    inputs: list[Request]  # with an empty source if there are only references and outputs
    references: list[tuple[str, ...]]
    locations: list[str] = field(default_factory=list)  # file:line; none for data in memory
    outputs: dict[str, list[str]] = field(default_factory=dict)  # by file

    @property
    def examples(self) -> list[Example]:
        """The sources with their first references."""
        pairs = zip(self.inputs, self.references, strict=True)
        return [Example(item.source, several[0], item.features) for item, several in pairs]

    def part(self, indices: Sequence[int]) -> ParallelData:
        return ParallelData(
            [self.inputs[i] for i in indices],
            [self.references[i] for i in indices],
            [self.locations[i] for i in indices if self.locations],
            {name: [texts[i] for i in indices] for name, texts in self.outputs.items()},
        )


@dataclass(frozen=True)
class ParallelFiles:
    """A table with further files of one line per line of the table; or only files of references and outputs."""

    table: Source | None
    references: Sequence[str] = ()
    outputs: Sequence[str] = ()
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # lines in memory instead of a file, by name

    @property
    def name(self) -> str:
        """The name of the file whose lines are counted."""
        return shown(self.references[0]) if self.table is None else self.table.name

    def read(self, counter: LineCounter) -> ParallelData:
        """Read all examples; unusable lines of the table and lines without a reference are counted as skipped."""
        paths = [*(self.table.paths if self.table else ()), *self.references, *self.outputs]
        if paths.count(STDIN) > 1:
            raise UserError("stdin can be read once; name files for the other references and outputs")
        files = {}
        for path in (*self.references, *self.outputs):
            texts = self.texts.get(path)
            files[path] = list(read_lines(path)) if texts is None else list(starmap(Line, enumerate(texts, 1)))
        rows = self._rows(counter, len(files[self.references[0]]) if self.table is None else 0)
        for path, lines in files.items():
            if len(lines) != counter.read:
                raise UserError(
                    f"{self.name} has {plural(counter.read, 'line')} but {shown(path)} has "
                    f"{plural(len(lines), 'line')}; both need the same number of lines"
                )
        data = ParallelData([], [], outputs={path: [] for path in self.outputs})
        for index, number, request, targets in rows:
            location = self.table.location(number) if self.table else f"{self.name}:{number}"
            others = {path: files[path][index - 1] for path in self.references}
            problems = [(line.problem, f"{shown(path)}:{index}") for path, line in others.items() if line.problem]
            if problems:
                counter.skip(*problems[0])
                continue
            references = (*targets, *(line.text for line in others.values() if line.text.strip()))
            if not references:
                counter.skip(EMPTY, location, "reference")
                continue
            for path in self.outputs:
                line = files[path][index - 1]
                if line.problem:
                    raise UserError(f"{shown(path)}:{index}: {line.problem}; outputs must be readable")
                data.outputs[path].append(line.text)
            data.inputs.append(request)
            data.references.append(references)
            data.locations.append(location)
        if self.table is not None:
            self.table.require(counter)
        elif not counter.kept:
            raise UserError(f"{self.name}: no usable reference: {counter.summary()}")
        return data

    def _rows(self, counter: LineCounter, lines: int) -> list[tuple[int, int, Request, tuple[str, ...]]]:
        """Every usable row of the table, or `lines` rows without a table: row and line, from 1, request and targets."""
        if self.table is None:
            counter.read = lines
            return [(number, number, Request(""), ()) for number in range(1, lines + 1)]
        jsonl = format_of(self.table.paths[0]) == "jsonl" and not self.table.packed
        if jsonl and self.table.keys in ((), self.table.columns):
            return list(_requests(self.table, counter))
        rows = []
        names = [*self.table.columns, *["prefix"] * self.table.prefix_column]
        for number, cells in self.table.cells(counter):
            values = dict(zip(names, cells, strict=True))
            request = Request(values["source"], values.get("features"), values.get("prefix", ""))
            targets = [cell for name, cell in zip(names, cells, strict=True) if name == "target" and cell.strip()]
            rows.append((counter.read, number, request, tuple(targets)))
        return rows


def _requests(table: Source, counter: LineCounter) -> Iterator[tuple[int, int, Request, tuple[str, ...]]]:
    """Parse JSONL: the keys of an object are the fields of a request, and `target`, a text or a list of references."""
    fields = [name for name in Request.model_fields if name != "features" or "features" in table.columns]
    for line in read_lines(table.paths[0]):
        counter.read += 1
        location = table.location(line.number)
        if line.problem:
            counter.skip(line.problem, location)
            continue
        try:
            data = json_object(line.text)
            targets = _texts(data.pop("target", None))
            request = parse_request(data, fields)
        except UserError as error:
            counter.skip(BAD_REQUEST, location, str(error), tell=True)
            continue
        if request.source.strip():
            yield line.number, line.number, request, targets
        else:
            counter.skip(EMPTY, location, "source")


def _texts(target: Any) -> tuple[str, ...]:
    texts = target if isinstance(target, list) else [] if target is None else [target]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"target: takes a text or a list of texts, not {str(target)[:80]!r}")
    return tuple(text for text in texts if text.strip())


class UnknownParts:
    """Counts the tokens of sources and targets, or the labels, that are unknown to a run."""

    def __init__(self, run: Run, examples: Sequence[Example] = (), labels: Sequence[str] = ()) -> None:
        self.codec = run.codec
        self.labels = set(run.label_names) if run.task.labels else None
        self.source = UnknownTokens()
        self.target = UnknownTokens()
        self.note(examples, labels)

    def note(self, examples: Sequence[Example], labels: Sequence[str] = ()) -> None:
        self.codec.note_unknown(examples, self.source, self.target if self.labels is None else None)
        if self.labels is not None:
            for label in (*(example.target or "" for example in examples), *labels):
                if label not in self.labels:
                    self.target.count([label])

    def remarks(self) -> list[str]:
        """A remark for each side with unknown tokens or labels."""
        remarks = [f"source: {self.source.summary()}"] if self.source else []
        if self.target and self.labels is None:
            remarks.append(f"target: {self.target.summary()}")
        elif self.target:
            remarks.append(f"target: {self.target.summary(noun='label')}; the model cannot predict them")
        return remarks

    def to_json(self) -> dict[str, int]:
        """The number of unknown tokens or labels by side."""
        sides = {"source": self.source, "target": self.target}
        return {side: unknown.total for side, unknown in sides.items() if unknown}
