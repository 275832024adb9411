"""Pairs and labelled texts: a table or parallel files become tokenizers and two corpora."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from regard.data.encode import RATIO, TOO_SHORT, BlockEncoder, ExampleEncoder, Limits
from regard.data.reader import READ_BYTES, LineCounter, Located, read_lines
from regard.data.store import SIDES, CorpusWriter
from regard.data.tables import MAX_VALID, Corpora, Splitter, expand, format_of
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
INSPECTED_LINES = 1_000  # to recognise a column of features


def find_columns(recipe: Recipe) -> tuple[Column, ...] | None:
    """The columns of a TSV with three columns, one of which resembles features; None if the recipe names columns."""
    path = expand(recipe.data.train[0])[0] if recipe.data.train else None
    named = "columns" in recipe.data.model_fields_set or TASKS[recipe.task].reads != "pairs"
    if named or path is None or not os.path.isfile(path) or format_of(path) != "text":
        return None
    rows = [line.text.split("\t") for line in islice(read_lines(path), INSPECTED_LINES) if line.text.strip()]
    if not rows or any(len(row) != 3 for row in rows):
        return None
    orders: dict[int, tuple[Column, ...]] = {1: ("source", "features", "target"), 2: ("source", "target", "features")}
    for index, columns in orders.items():
        cells = [row[index].split(recipe.text.feature_separator) for row in rows]
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
    codec.note_unknown(examples, source)
    if not labelled:
        texts = [example.target or "" for example in examples]
        target.add(codec.target, texts, codec.target.encode(texts))
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
