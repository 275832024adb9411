"""Pairs, and texts with labels: a table or parallel files become tokenizers and two corpora."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from regard.data.encode import RATIO, SHORT, BlockEncoder, ExampleEncoder, Limits
from regard.data.reader import CHUNK, LineCounter, read_lines
from regard.data.store import SIDES, CorpusWriter
from regard.data.tables import MAX_VALID, Corpora, Splitter, expand, named_columns
from regard.errors import UserError, plural
from regard.recipe import Recipe
from regard.tasks import TASKS
from regard.text.codec import Codec, Example, UnknownTokens, split_features
from regard.text.learn import BaseText, Sample, draw_sample, learn_tokenizer, one_request, requests
from regard.text.tokenizer import Tokenizer

NO_LABEL = "label that training does not have"
VALID_EXAMPLES = "valid.jsonl"
LABELS = 10_000  # distinct ones; more are no labels
FEATURES = 50_000  # likewise

MANY_BLOCKS = 64  # that a sample of the text is drawn from, at least
LOOKED_AT = 1_000  # lines, to find a column of features


def find_features(recipe: Recipe) -> tuple[str, ...] | None:
    """The columns of a table of three where the recipe does not name them and one column looks like features."""
    path = expand(recipe.data.train[0])[0] if recipe.data.train else None
    named = "columns" in recipe.data.model_fields_set or TASKS[recipe.task].reads != "pairs"
    if named or path is None or not os.path.isfile(path) or named_columns(path):
        return None
    rows = [line.text.split("\t") for line in islice(read_lines(path), LOOKED_AT) if line.text.strip()]
    if not rows or any(len(row) != 3 for row in rows):
        return None
    for index, columns in ((1, ("source", "features", "target")), (2, ("source", "target", "features"))):
        cells = [row[index].split(recipe.text.feature_separator) for row in rows]
        several = sum(len(cell) > 1 for cell in cells)
        kinds = {feature for cell in cells for feature in cell}
        # features are few and come again; words do not
        if several >= len(rows) / 2 and len(kinds) <= len(rows) / 4:
            return columns
    return None


def make_pairs(
    recipe: Recipe, train: Corpora, valid: Corpora | None, path: Path, base: BaseText | None, processes: int = 1
) -> dict[str, Any]:
    """Write tokenizers and corpora into `path`, with up to so many processes; return the record of it."""
    strict, labelled = recipe.data.strict, TASKS[recipe.task].labels
    if recipe.data.deduplicate:
        train = train.without_duplicates()
    valid_counter = LineCounter(strict)
    valid_rows = list(valid.read(valid_counter)) if valid else []
    if valid:
        valid.require(valid_counter)
    splitter = None if valid else Splitter()
    scan = Scan(train, recipe.text.feature_separator, strict, splitter, labelled)
    codec, notes = _make_codec(recipe, train, scan, splitter, base)
    codec.save(path)
    labels: tuple[str, ...] = ()
    if labelled:
        labels = base.labels if base and scan.labels <= set(base.labels) else tuple(sorted(scan.labels))
        if len(labels) < 2:
            raise UserError(f"{train.name}: every text has the same label, {labels[0]!r}; there is nothing to learn")
        notes.append(f"labels: {few(labels)}")
        known = set(labels)
        for located in valid_rows:
            if located.example.target not in known and valid:
                valid_counter.skip(NO_LABEL, valid.location(located.number), repr(located.example.target))
        valid_rows = [located for located in valid_rows if located.example.target in known]

    counter = LineCounter(strict, scan.counter.skipped)
    unsplit = splitter is not None and not scan.held_out  # all have one source: validate on training examples
    held_counter = valid_counter if valid else LineCounter() if unsplit else counter
    limits = Limits.of(recipe.data)
    encoder = ExampleEncoder(codec, limits, labels)
    train_writer = CorpusWriter(path / "train", encoder)
    # Validation data of the user's own is not filtered; but what is too long for training is so for validation.
    valid_encoder = ExampleEncoder(codec, Limits(limits.max_length), labels) if valid else encoder
    valid_writer = CorpusWriter(path / "valid", valid_encoder)
    for shard in BlockEncoder(train, encoder, splitter, strict).encode_all(path, processes):
        counter.add(shard.counts)
        train_writer.write(shard.train)
        valid_writer.write(shard.valid)
        valid_writer.examples.extend(shard.examples)
    if unsplit:
        valid_rows = list(islice(train.read(LineCounter()), MAX_VALID))
    valid_writer.add(valid_rows, held_counter, (valid or train).location)
    train_writer.finish([sum(train_writer.parts[part] for part in corpus) for corpus in train.corpora()])
    valid_writer.finish()
    _require_examples("training", train_writer, train, counter, limits)
    _require_examples("validation", valid_writer, valid or train, held_counter, limits)

    examples = valid_writer.examples
    (path / VALID_EXAMPLES).write_bytes("".join(json.dumps(example) + "\n" for example in examples).encode())
    notes.append(f"training: {plural(train_writer.count, 'example')} from {train.name}, {counter.summary()}")
    notes.extend(filter(None, [train.hint(counter)]))
    if valid:
        notes.append(
            f"validation: {plural(valid_writer.count, 'example')} from {valid.name}, {valid_counter.summary()}"
        )
    elif unsplit:
        notes.append("validation: on training examples, since all have the same source and nothing can be split off")
    else:
        notes.append(f"validation: {plural(valid_writer.count, 'example')} split off; no source is on both sides")
    notes.extend(_unknown_notes(codec, train_writer, examples, labelled))
    counts = {"train": counter.to_json(), "valid": valid_counter.to_json() if valid else None}
    return {"text": codec.config.model_dump(), "labels": labels, "notes": notes, "accounts": counts}


def read_examples(path: Path) -> list[Example]:
    """The validation examples that `make_pairs` wrote into `path`."""
    return [Example(*json.loads(row)) for row in (path / VALID_EXAMPLES).read_bytes().split(b"\n")[:-1]]


def few(names: Sequence[str], most: int = 5) -> str:
    """How many names there are, and the first of them."""
    return f"{len(names):,}: " + ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _make_codec(
    recipe: Recipe, train: Corpora, scan: Scan, splitter: Splitter | None, base: BaseText | None
) -> tuple[Codec, list[str]]:
    """Learn the vocabularies from what is not held out, or take those of the run to start from."""
    if base is not None:
        return base.codec, [base.note(recipe.train.start_from)]
    text, task = recipe.text, TASKS[recipe.task]
    lines = scan.counter.kept - scan.held_out
    sample = {"source": scan.sample.column(0), "target": scan.sample.column(1)}
    sample["shared"] = sample["source"] + sample["target"]

    def texts(side: str, wanted: int) -> Iterator[str]:
        every = _blocks_per_sample(train, lines, wanted)
        blocks = islice(train.blocks(), 0, None, every)
        rows = chain.from_iterable(train.read_block(block, LineCounter()) for block in blocks)
        kept = (e for _, e in rows if not (splitter and splitter.held_out(e.source)))
        for example in draw_sample(kept, wanted, lines // every):
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


def _blocks_per_sample(train: Corpora, lines: int, wanted: int) -> int:
    """Of how many blocks one is enough to draw `wanted` lines from: to read all lines takes most of the time.

    It is 1 if the blocks that are left would be too few to stand for all.
    """
    every = max(1, lines // max(1, wanted))
    return every if train.text_size // CHUNK >= MANY_BLOCKS * every else 1


def _require_examples(what: str, writer: CorpusWriter, source: Corpora, counter: LineCounter, limits: Limits) -> None:
    if writer.count:
        return
    if counter.skipped[NO_LABEL] or counter.skipped.keys() & {SHORT, RATIO}:
        raise UserError(f"{source.name}: no {what} example is left: {counter.summary()}")
    raise UserError(
        f"{source.name}: no {what} example is left, all are too long: {counter.summary()}\n"
        f"  raise data.max_length (now {limits.max_length})"
    )


def _unknown_notes(codec: Codec, train: CorpusWriter, examples: list[Example], labelled: bool) -> Iterator[str]:
    """Say what the vocabularies lack."""
    for side in SIDES:
        if train.unknown[side]:
            share = 100 * train.unknown[side] / train.tokens[side]
            count = plural(train.unknown[side], f"unknown {side} token")
            yield f"training: {count} ({share:.2g} %), rarer than text.min_count"
    source, target = UnknownTokens(), UnknownTokens()
    codec.note_unknown(examples, source)
    if not labelled:
        texts = [example.target or "" for example in examples]
        target.add(codec.target, texts, codec.target.encode(texts))
    for side, unknown in zip(SIDES, (source, target), strict=True):
        if unknown:
            yield f"validation, {side}: {unknown.summary()}"


class Scan:
    """What one pass over the training data tells."""

    def __init__(
        self, source: Corpora, separator: str, strict: bool, splitter: Splitter | None, labelled: bool = False
    ) -> None:
        self.counter = LineCounter(strict)
        self.sample = Sample()  # of sources and targets
        self.held_out = 0
        self.labels: set[str] = set()  # the different targets, where those are labels
        features: set[str] = set()
        cells: set[str] = set()  # columns of features that were split already
        for number, example in source.read(self.counter):
            self.sample.add(example.source, example.target or "")
            if splitter is not None:
                splitter.see(example.source)
            if labelled:
                self.labels.add(example.target or "")
                _require_few(self.labels, LABELS, "labels", source, number)
            if example.features and example.features not in cells:
                features.update(split_features(example.features, separator))
                _require_few(features, FEATURES, "features", source, number)
                if len(cells) < FEATURES:
                    cells.add(example.features)
        source.require(self.counter)
        self.features = tuple(sorted(features))
        if splitter is not None:
            self.held_out = splitter.choose()


def _require_few(names: set[str], most: int, what: str, source: Corpora, number: int) -> None:
    if len(names) > most:
        raise UserError(
            f"{source.location(number)}: more than {most:,} different {what} so far; are the columns in this order: "
            f"{','.join(source.columns)}?"
        )
