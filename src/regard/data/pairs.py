"""Pairs and labelled texts: a table or parallel files become tokenizers and two corpora."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, zip_longest
from os.path import isfile
from pathlib import Path
from typing import Any

from regard.data.encode import RATIO, TOO_SHORT, BlockEncoder, ExampleEncoder, Limits
from regard.data.reader import READ_BYTES, LineCounter, Located, Source, read_lines
from regard.data.store import SIDES, CorpusWriter
from regard.data.tables import (
    MAX_VALID,
    QUOTE,
    Corpora,
    CsvSource,
    JsonlSource,
    Splitter,
    expand,
    no_column,
    open_table,
)
from regard.errors import UserError, plural
from regard.files import open_file
from regard.recipe import Column, Recipe
from regard.tasks import TASKS
from regard.text.codec import Codec, Example, UnknownTokens, split_features
from regard.text.learn import BaseText, Sample, draw_sample, learn_tokenizer, one_request, requests
from regard.text.tokenizer import Tokenizer

UNKNOWN_LABEL = "label that training does not have"
VALID_EXAMPLES = "valid.jsonl"
MAX_LABELS = 10_000  # a column with more distinct texts does not hold labels
MAX_FEATURES = 50_000  # a column with more distinct features does not hold features
MIN_SAMPLE_BLOCKS = 64  # a sample of the text is drawn from at least this many blocks
INSPECTED_LINES = 1_000  # to recognise the layout of a table
MIN_INSPECTED = 20
# Usual names of columns in files.
NAMES: dict[Column, str] = {
    "source": "source src input text sentence word grapheme graphemes orthography spelling lemma",
    "features": "features tags msd",
    "target": "target tgt trg output label pronunciation phoneme phonemes ipa transcription translation form",
}
MEANINGS = {name: column for column, names in NAMES.items() for name in names.split()}
LANGUAGE = re.compile("[a-z]{2,3}([-_][A-Za-z]+)?")
WORD = re.compile(r"[^\W\d][\w-]*")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
DIALECTS = [separator + escape for escape in ("", "\\") for separator in SEPARATORS]
Say = Callable[[str], object]


def lay_out(recipe: Recipe, train: Corpora, valid: Corpora | None) -> tuple[Corpora, Corpora | None, list[str]]:
    """The files with their layout, and notes about it. Validation files have the columns of the training files."""
    notes: list[str] = []
    reads = TASKS[recipe.task].reads
    if reads == "images":
        return train, valid, notes
    named = reads == "text" or bool(recipe.data.model_fields_set & {"columns", "column_names"})
    read = partial(laid_out, separator=recipe.text.feature_separator, header=recipe.data.header, say=notes.append)
    parts = [read(part, part.columns if named else None) for part in train.parts]
    if valid:
        valid = replace(valid, parts=tuple(read(p, p.columns if named else parts[0].columns) for p in valid.parts))
    if recipe.data.header is None and any(part.header for part in (*parts, *(valid.parts if valid else ()))):
        notes.append("data.header = false reads the first line as an example")
    return replace(train, parts=tuple(parts)), valid, notes


def read_table(
    path: str, columns: tuple[Column, ...], names: Sequence[str] | None = None, prefix: bool = False, say: Say = str
) -> Source:
    """The table in a file or a data set of one file, with its layout; `prefix`: it has a column of prefixes."""
    files = expand(path, "test")
    if len(files) > 1:
        raise UserError(f"{path}: has {len(files)} files; name one of them, such as {files[0]}")
    return laid_out(open_table(files[0], columns, names)._replace(prefix_column=prefix), columns, say=say)


def laid_out(
    source: Source, columns: tuple[Column, ...] | None, separator: str = "", header: bool | None = None, say: Say = str
) -> Source:
    """The table with the names, separators and quotes that its first lines show; `say` reports them.

    Without `columns`, names or a column of features (texts divided by `separator`) decide on the columns, too. With
    `header`, the first line names the columns; None: if it has their names, or is unlike all other lines.
    """
    text = type(source) is Source and len(source.columns) + source.prefix_column == 1  # a text per line
    if text or source.packed or len(source.paths) > 1 or not isfile(source.paths[0]):
        return source
    named = source.keys != source.columns
    if columns is not None:
        source = source._replace(columns=columns, keys=source.keys if named else columns)
    rows: list[list[str]] = []
    layout = ""
    if isinstance(source, JsonlSource):
        names = source.column_names()
    else:
        lines = [line.text for line in islice(read_lines(source.paths[0]), INSPECTED_LINES)]
        source, rows, layout = _split(source, lines)
        names = [cell.strip() for cell in rows[0]] if rows and lines[0].strip() else []
    keys = _usual_names(names)
    if columns is None and {"source", "target"} <= keys.keys():
        columns = tuple(keys)
    wanted = columns or source.columns
    by_name = set(wanted) <= keys.keys() and len(set(wanted)) == len(wanted) and not source.prefix_column
    if isinstance(source, JsonlSource):
        if named or not by_name or set(source.keys) <= set(names):
            return source
    else:
        if header is None:
            header = not set(source.keys).isdisjoint(names) if named else _is_header(names, rows[1:])
        if not header:
            wanted = columns or _columns_with_features(rows, separator) or source.columns
            if layout or wanted != source.columns:
                say(f"{source.name}: {layout}columns {', '.join(wanted)}")
            return source._replace(columns=wanted, keys=())
        if named and (missing := set(source.keys) - set(names)):
            raise no_column(source, missing.pop(), names)
        source = source._replace(header=tuple(names))
        layout += "the first line is not an example but names the columns: "
    if not named:
        source = source._replace(columns=wanted, keys=tuple(keys[each] for each in wanted) if by_name else ())
    say(f"{source.name}: {layout}{', '.join(f'{c} is {k}' for c, k in zip(source.columns, source.keys, strict=False))}")
    return source


def _split(source: Source, lines: Sequence[str]) -> tuple[Source, list[list[str]], str]:
    """The first lines as rows, the table with the dialect of a CSV, and words about separators and quotes."""
    if not isinstance(source, CsvSource):
        rows = [line.split("\t") for line in lines if line.strip()]
        for column, cells in enumerate(zip_longest(*rows, fillvalue=""), start=1):
            quoted = sum(len(cell) > 1 and cell[0] == cell[-1] == QUOTE for cell in cells)
            if quoted >= max(MIN_INSPECTED, 0.9 * len(rows)):
                advice = "to read them as quotes of CSV, rename the file to .csv (tabs may remain)"
                return source, rows, f"the quotes around column {column} are part of the text; {advice}; "
        return source, rows, ""
    tables = {}
    for dialect in DIALECTS:
        records = source._replace(dialect=dialect).records(lines, complete=len(lines) < INSPECTED_LINES)
        rows = [cells for _, cells, *_ in records]
        tables[dialect] = -sum(not 1 < len(cells) == len(rows[0]) for cells in rows), rows
    dialect, (_, rows) = max(tables.items(), key=lambda item: item[1][0])
    escape = " with backslashes" * (len(dialect) > 1)
    quotes = f"cells in quotes{escape}" if any(QUOTE in line for line in lines) else "no quotes"
    return source._replace(dialect=dialect), rows, f"{SEPARATORS[dialect[0]]} between columns, {quotes}; "


def _usual_names(names: Sequence[str]) -> dict[Column, str]:
    """The names of columns whose meaning is known, in their order; of two languages, the first is the source."""
    known = [(column, name) for name in names if (column := MEANINGS.get(name.lower()))]
    if len(known) > len(dict(known)):  # ambiguous
        known = [(column, name) for column, name in known if column == name]
    languages = [name for name in names if LANGUAGE.fullmatch(name)]
    pair: tuple[Column, Column] = ("source", "target")
    return dict(known or (zip(pair, languages, strict=True) if len(languages) == 2 else ()))


def _is_header(names: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
    """Whether a first line has usual names for both sides, or words in columns whose other cells have several words."""
    usual = [MEANINGS.get(name.lower()) for name in names]
    if len(names) < 2 or {"source", "target"} <= set(usual):
        return len(names) > 1
    columns = list(zip_longest(*others, fillvalue=""))
    return (len(columns), len(others) >= MIN_INSPECTED) == (len(names), True) and all(
        meaning or (WORD.fullmatch(name) and all(" " in cell.strip() for cell in cells))
        for name, meaning, cells in zip(names, usual, columns, strict=True)
    )


def _columns_with_features(rows: Sequence[Sequence[str]], separator: str) -> tuple[Column, ...] | None:
    """The columns of a table with three columns, one of which resembles features."""
    if not rows or any(len(row) != 3 for row in rows):
        return None
    orders: dict[int, tuple[Column, ...]] = {1: ("source", "features", "target"), 2: ("source", "target", "features")}
    for index, columns in orders.items():
        cells = [row[index].split(separator) for row in rows]
        lists = sum(len(cell) > 1 for cell in cells)
        features = {feature for cell in cells for feature in cell}
        # unlike words, features are few and repeat
        if lists >= len(rows) / 2 and len(features) <= len(rows) / 4:
            return columns
    return None


def make_pairs(
    recipe: Recipe, train: Corpora, valid: Corpora | None, path: Path, base: BaseText | None, processes: int = 1
) -> dict[str, Any]:
    """Write tokenizers and corpora into `path`, in at most `processes` processes -> the record of the data."""
    strict = recipe.data.strict
    labelled = TASKS[recipe.task].labels
    if recipe.data.deduplicate:
        train = train.without_duplicates()
    valid_counter = LineCounter(strict)
    valid_examples = list(valid.read(valid_counter)) if valid else []
    if valid:
        valid.require(valid_counter)
    splitter = None if valid else Splitter()
    scan = Scan(train, recipe.text.feature_separator, strict, splitter, labelled)
    codec, notes = _make_codec(recipe, train, scan, splitter, base)
    codec.save(path)
    labels: tuple[str, ...] = ()
    if labelled:
        labels = _choose_labels(scan, base, train)
        notes.append(f"labels: {few(labels)}")
        valid_examples = _drop_unknown_labels(valid_examples, labels, valid, valid_counter)

    limits = Limits(recipe.data.max_length, recipe.data.min_length, recipe.data.max_ratio)
    encoder = ExampleEncoder(codec, limits, labels)
    # The user's own validation data is not filtered, except for examples that are too long for training.
    valid_encoder = ExampleEncoder(codec, Limits(limits.max_length), labels) if valid else encoder
    train_writer = CorpusWriter(path / "train", encoder)
    valid_writer = CorpusWriter(path / "valid", valid_encoder)
    counter = LineCounter(strict, scan.counter.skipped)
    for block in BlockEncoder(train, encoder, splitter, strict).encode_all(path, processes):
        counter.add(block.counts)
        train_writer.write(block.train)
        valid_writer.write(block.valid)
        valid_writer.examples.extend(block.examples)
    if valid:
        valid_writer.add(valid_examples, valid_counter, valid.location)
    elif scan.held_out:
        valid_counter = counter
    else:  # all examples have the same source
        valid_writer.add(islice(train.read(LineCounter()), MAX_VALID), valid_counter, train.location)
    train_writer.finish([sum(train_writer.parts[part] for part in corpus) for corpus in train.corpora()])
    valid_writer.finish()
    _require_examples("training", train_writer, train, counter, limits)
    _require_examples("validation", valid_writer, valid or train, valid_counter, limits)
    rows = "".join(json.dumps(example) + "\n" for example in valid_writer.examples)
    (path / VALID_EXAMPLES).write_bytes(rows.encode())

    notes.append(f"training: {plural(train_writer.count, 'example')} from {train.name}, {counter.summary()}")
    notes.extend(filter(None, [train.hint(counter)]))
    notes.append(_validation_note(valid_writer.count, valid, valid_counter, scan.held_out))
    notes.extend(_unknown_notes(codec, train_writer, valid_writer.examples, labelled))
    counts = {"train": counter.to_json(), "valid": valid_counter.to_json() if valid else None}
    return {"text": codec.config.model_dump(), "labels": labels, "notes": notes, "accounts": counts}


def _choose_labels(scan: Scan, base: BaseText | None, train: Corpora) -> tuple[str, ...]:
    """The labels of the base run if they include all labels of the data, otherwise the sorted labels of the data."""
    labels = base.labels if base and scan.labels <= set(base.labels) else tuple(sorted(scan.labels))
    if len(labels) < 2:
        raise UserError(f"{train.name}: every text has the same label, {labels[0]!r}; there is nothing to learn")
    return labels


def _drop_unknown_labels(
    examples: list[Located], labels: Sequence[str], valid: Corpora | None, counter: LineCounter
) -> list[Located]:
    known = set(labels)
    for number, example in examples:
        if example.target not in known and valid:
            counter.skip(UNKNOWN_LABEL, valid.location(number), repr(example.target))
    return [located for located in examples if located.example.target in known]


def _validation_note(count: int, valid: Corpora | None, counter: LineCounter, held_out: int) -> str:
    if valid:
        return f"validation: {plural(count, 'example')} from {valid.name}, {counter.summary()}"
    if held_out:
        return f"validation: {plural(count, 'example')} split off; no source is on both sides"
    return "validation: on training examples, because all have the same source and cannot be split"


def read_examples(path: Path) -> list[Example]:
    """The validation examples that `make_pairs` has written into `path`."""
    with open_file(path / VALID_EXAMPLES) as file:
        return [Example(*json.loads(row)) for row in file.read().split(b"\n")[:-1]]


def few(names: Sequence[str], limit: int = 5) -> str:
    """The number of names, and the first names."""
    return f"{len(names):,}: " + ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _make_codec(
    recipe: Recipe, train: Corpora, scan: Scan, splitter: Splitter | None, base: BaseText | None
) -> tuple[Codec, list[str]]:
    """Learn vocabularies from the training examples, or use those of the base run."""
    if base is not None:
        return base.codec, [base.note(recipe.train.start_from)]
    text = recipe.text
    task = TASKS[recipe.task]
    lines = scan.counter.kept - scan.held_out
    sample = {"source": scan.sample.column(0), "target": scan.sample.column(1)}
    sample["shared"] = sample["source"] + sample["target"]

    def texts(side: str, count: int) -> Iterator[str]:
        every = _sampling_interval(train, lines, count)
        blocks = islice(train.blocks(), 0, None, every)
        rows = chain.from_iterable(train.read_block(block, LineCounter()) for block in blocks)
        examples = (e for _, e in rows if not (splitter and splitter.held_out(e.source)))
        for example in draw_sample(examples, count, lines // every):
            if side != "target":
                yield example.source
            if side != "source":
                yield example.target or ""

    tokenizers: dict[str, Tokenizer] = {}
    notes = []
    schemes = {"source": one_request(text, "a vocabulary")} if task.labels else requests(text)
    for side, scheme in schemes.items():
        tokenizers[side], note = learn_tokenizer(
            scheme, sample[side], lines, partial(texts, side), min_count=text.min_count
        )
        notes.append(f"{side} {note}")
    if scan.features:
        notes.append(f"features, separated by {text.feature_separator!r}: {few(scan.features)}")
    source = tokenizers.get("shared") or tokenizers["source"]
    target = tokenizers.get("target")
    return Codec(source, target, scan.features, train.columns, text.feature_separator, task.frame), notes


def _sampling_interval(train: Corpora, lines: int, count: int) -> int:
    """The interval of the blocks to draw `count` of all lines from; 1 (every block) if there are few blocks."""
    every = max(1, lines // max(1, count))
    return every if train.text_size // READ_BYTES >= MIN_SAMPLE_BLOCKS * every else 1


def _require_examples(split: str, writer: CorpusWriter, source: Corpora, counter: LineCounter, limits: Limits) -> None:
    if writer.count:
        return
    if counter.skipped[UNKNOWN_LABEL] or counter.skipped.keys() & {TOO_SHORT, RATIO}:
        raise UserError(f"{source.name}: no {split} example is left: {counter.summary()}")
    raise UserError(
        f"{source.name}: no {split} example is left, all are too long: {counter.summary()}\n"
        f"  raise data.max_length (now {limits.max_length})"
    )


def _unknown_notes(codec: Codec, train: CorpusWriter, examples: list[Example], labelled: bool) -> Iterator[str]:
    for side in SIDES:
        if train.unknown[side]:
            share = 100 * train.unknown[side] / train.tokens[side]
            count = plural(train.unknown[side], f"unknown {side} token")
            yield f"training: {count} ({share:.2g} %), rarer than text.min_count"
    source = UnknownTokens()
    target = UnknownTokens()
    codec.note_unknown(examples, source, None if labelled else target)
    for side, unknown in zip(SIDES, (source, target), strict=True):
        if unknown:
            yield f"validation, {side}: {unknown.summary()}"


class Scan:
    """The first pass over the training data: it collects line counts, a sample, labels, features and the split."""

    def __init__(
        self, source: Corpora, separator: str, strict: bool, splitter: Splitter | None, labelled: bool = False
    ) -> None:
        self.counter = LineCounter(strict)
        self.sample = Sample()  # of sources and targets
        self.held_out = 0  # examples
        self.labels: set[str] = set()  # of labelled texts
        features: set[str] = set()
        seen_cells: set[str] = set()  # of the features column
        for number, example in source.read(self.counter):
            self.sample.add(example.source, example.target or "")
            if splitter is not None:
                splitter.see(example.source)
            if labelled:
                self.labels.add(example.target or "")
                _require_few(self.labels, MAX_LABELS, "labels", source, number)
            if example.features and example.features not in seen_cells:
                features.update(split_features(example.features, separator))
                _require_few(features, MAX_FEATURES, "features", source, number)
                if len(seen_cells) < MAX_FEATURES:
                    seen_cells.add(example.features)
        source.require(self.counter)
        self.features = tuple(sorted(features))
        if splitter is not None:
            self.held_out = splitter.choose()


def _require_few(names: set[str], limit: int, noun: str, source: Corpora, number: int) -> None:
    if len(names) > limit:
        raise UserError(
            f"{source.location(number)}: more than {limit:,} different {noun} so far; are the columns in this order: "
            f"{','.join(source.columns)}?"
        )
