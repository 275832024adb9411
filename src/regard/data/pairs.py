"""Pairs, and texts with labels: a table or parallel files become tokenizers and two corpora."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from regard.data.corpus import SIDES, CorpusWriter
from regard.data.reader import LineCounter, Source, read_lines
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

VALID_SHARE = 0.05  # of the examples are held out for validation
MIN_VALID, MAX_VALID = 50, 2_000
CANDIDATES = 2 * MAX_VALID  # sources with the smallest hashes, from which those to hold out are chosen
KEY = b"1"  # of the hash; with it, the split is the one of earlier versions and their default seed
LOOKED_AT = 1_000  # lines, to find a column of features
LARGEST_SHARE = 0.2  # of a small file no larger part is taken, even if that makes fewer than MIN_VALID


def find_features(recipe: Recipe) -> tuple[str, ...] | None:
    """The columns of a table of three where the recipe does not name them and one column looks like features."""
    path = recipe.data.train
    named = "columns" in recipe.data.model_fields_set or TASKS[recipe.task].reads != "pairs"
    if named or path is None or not os.path.isfile(path):
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
    recipe: Recipe, train: Source, valid: Source | None, path: Path, base: BaseText | None
) -> dict[str, Any]:
    """Write tokenizers and corpora into `path`; return the record of it."""
    strict, labelled = recipe.data.strict, TASKS[recipe.task].labels
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

    counter = LineCounter(strict)
    unsplit = splitter is not None and not scan.held_out  # all have one source: validate on training examples
    held_counter = valid_counter if valid else LineCounter() if unsplit else counter
    limit = recipe.data.max_length
    train_writer = CorpusWriter(path / "train", codec, train, counter, limit, labels)
    valid_writer = CorpusWriter(path / "valid", codec, valid or train, held_counter, limit, labels, keep=True)
    for located in valid_rows:
        valid_writer.add(located)
    for index, located in enumerate(train.read(counter)):
        if splitter is not None and splitter.held_out(located.example.source):
            valid_writer.add(located)
        else:
            train_writer.add(located)
            if unsplit and index < MAX_VALID:
                valid_writer.add(located)
    train_writer.finish()
    valid_writer.finish()
    _require_examples("training", train_writer, train, counter, limit)
    _require_examples("validation", valid_writer, valid or train, held_counter, limit)

    examples = valid_writer.examples or []
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
    recipe: Recipe, train: Source, scan: Scan, splitter: Splitter | None, base: BaseText | None
) -> tuple[Codec, list[str]]:
    """Learn the vocabularies from what is not held out, or take those of the run to start from."""
    if base is not None:
        return base.codec, [base.note(recipe.train.start_from)]
    text, task = recipe.text, TASKS[recipe.task]
    lines = scan.counter.kept - scan.held_out
    sample = {"source": scan.sample.column(0), "target": scan.sample.column(1)}
    sample["shared"] = sample["source"] + sample["target"]

    def texts(side: str, wanted: int) -> Iterator[str]:
        kept = (e for _, e in train.read(LineCounter()) if not (splitter and splitter.held_out(e.source)))
        for example in draw_sample(kept, wanted, lines):
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


def _require_examples(what: str, writer: CorpusWriter, source: Source, counter: LineCounter, limit: int) -> None:
    if writer.count:
        return
    if counter.skipped[NO_LABEL]:
        raise UserError(f"{source.name}: no {what} example is left: {counter.summary()}")
    raise UserError(
        f"{source.name}: no {what} example is left, all are too long: {counter.summary()}\n"
        f"  raise data.max_length (now {limit})"
    )


def _unknown_notes(codec: Codec, train: CorpusWriter, examples: list[Example], labelled: bool) -> Iterator[str]:
    """Say what the vocabularies lack."""
    for side in SIDES:
        if train.unknown[side]:
            share = 100 * train.unknown[side] / train.tokens[side]
            count = f"{train.unknown[side]:,} {side} tokens ({share:.2g} %)"
            yield f"training: {count} are unknown, being rarer than text.min_count"
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
        self, source: Source, separator: str, strict: bool, splitter: Splitter | None, labelled: bool = False
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


def _require_few(names: set[str], most: int, what: str, source: Source, number: int) -> None:
    if len(names) > most:
        raise UserError(
            f"{source.location(number)}: more than {most:,} different {what} so far; are the columns in this order: "
            f"{','.join(source.columns)}?"
        )


def valid_count(examples: int) -> int:
    """How many of `examples` to hold out."""
    return max(1, round(min(max(VALID_SHARE * examples, min(MIN_VALID, LARGEST_SHARE * examples)), MAX_VALID)))


class Splitter:
    """Finds the sources to hold out while they stream by; memory holds only the candidates.

    The smallest hashes are held out: the choice follows from the contents alone, not from their order or a seed.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}  # hash of a source -> its examples
        self._bound = b"\xff" * 8  # hashes above are no candidates
        self._examples = 0
        self._chosen: frozenset[bytes] = frozenset()

    def _hash(self, source: str | bytes) -> bytes:
        content = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        return blake2b(content, digest_size=8, key=KEY).digest()

    def see(self, source: str | bytes) -> None:
        """Count an example's source, a text or the bytes of an image."""
        self._examples += 1
        digest = self._hash(source)
        if digest > self._bound:
            return
        self._counts[digest] = self._counts.get(digest, 0) + 1
        if len(self._counts) >= 2 * CANDIDATES:  # keep the smallest; what goes now could not come back
            smallest = sorted(self._counts)[:CANDIDATES]
            self._bound = smallest[-1]
            self._counts = {digest: self._counts[digest] for digest in smallest}

    def choose(self) -> int:
        """Decide, after the last example; return how many are held out (0: all have one source, nothing to split)."""
        if len(self._counts) < 2:
            return 0
        want = valid_count(self._examples)
        chosen: list[bytes] = []
        total = 0
        candidates = sorted(self._counts)[:CANDIDATES]  # which others are still there depends on the order
        for digest in candidates:
            count = self._counts[digest]
            if total + count <= want:
                chosen.append(digest)
                total += count
        if not chosen:  # every source has more examples than wanted: take the rarest
            chosen = [min(candidates, key=lambda digest: (self._counts[digest], digest))]
            total = self._counts[chosen[0]]
        self._chosen = frozenset(chosen)
        return total

    def held_out(self, source: str | bytes) -> bool:
        """Whether examples with this source belong to validation."""
        return self._hash(source) in self._chosen
