"""Preparing pairs, and texts with labels: vocabularies (and a list of labels), and two corpora."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from regard.data.corpus import CorpusWriter, ExampleEncoder, Rows
from regard.data.reader import LineCounter, Source
from regard.errors import UserError
from regard.recipe import Recipe
from regard.tasks import TASKS
from regard.text.codec import Base, Codec, Example, UnknownTokens, split_features
from regard.text.learn import TokenizerChoice, choose, one_request, requests, share
from regard.text.tokenizer import Tokenizer

NO_LABEL = "label that training does not have"
VALID_EXAMPLES = "valid.jsonl"


def read_examples(path: Path) -> list[Example]:
    """The validation examples that `make_pairs` wrote into `path`."""
    return [Example(*json.loads(row)) for row in (path / VALID_EXAMPLES).read_bytes().split(b"\n")[:-1]]


def make_pairs(recipe: Recipe, train: Source, valid: Source | None, path: Path, base: Base | None) -> dict[str, Any]:
    """Write tokenizers and corpora into `path`; return the record of it."""
    strict, labelled = recipe.data.strict, recipe.task == "classify"
    valid_account = LineCounter(strict)
    given = list(valid.read(valid_account)) if valid else []
    if valid:
        valid.require(valid_account)
    splitter = None if valid else Splitter(recipe.train.seed)
    scan = Scan(train, recipe.text.feature_separator, strict, splitter, labelled)
    codec, notes = _codec(recipe, train, scan, splitter, base)
    codec.save(path)
    encoder = pairs_encoder(codec)
    labels: tuple[str, ...] = ()
    if labelled:
        labels = _labels(scan.labels, train, base)
        notes.append(f"labels: {_few(labels)}")
        encoder = labels_encoder(codec, labels)
        known = set(labels)
        for located in given:
            if located.example.target not in known and valid:
                valid_account.skip(NO_LABEL, valid.place(located.number), repr(located.example.target))
        given = [located for located in given if located.example.target in known]

    account = LineCounter(strict)
    same = splitter is not None and not scan.held_out  # nothing to split: look at the training examples themselves
    held_account = valid_account if valid else LineCounter() if same else account
    limit = recipe.data.max_length
    train_writer = CorpusWriter(path / "train", encoder, train, account, limit)
    valid_writer = CorpusWriter(path / "valid", encoder, valid or train, held_account, limit, keep=True)
    with train_writer, valid_writer:
        for located in given:
            valid_writer.add(located)
        for index, located in enumerate(train.read(account)):
            if splitter is not None and splitter.held_out(located.example.source):
                valid_writer.add(located)
            else:
                train_writer.add(located)
                if same and index < MOST:
                    valid_writer.add(located)
    for what, writer, source, counted in (
        ("training", train_writer, train, account),
        ("validation", valid_writer, valid or train, held_account),
    ):
        if not writer.count:
            raise UserError(
                f"{source.name}: no {what} example is left, all are too long: {counted.summary()}\n"
                f"  raise data.max_length (now {limit})"
                if not counted.skipped[NO_LABEL]
                else f"{source.name}: no {what} example is left: {counted.summary()}"
            )

    examples = valid_writer.examples or []
    rows = "".join(json.dumps(example) + "\n" for example in examples)
    (path / VALID_EXAMPLES).write_bytes(rows.encode())
    notes.append(f"training: {train_writer.count:,} examples from {train.name}, {account.summary()}")
    notes.extend(filter(None, [train.hint(account)]))
    if valid:
        notes.append(f"validation: {valid_writer.count:,} examples from {valid.name}, {valid_account.summary()}")
    elif same:
        notes.append("validation: on training examples, since all have the same source and nothing can be split off")
    else:
        notes.append(f"validation: {valid_writer.count:,} examples split off; no source is on both sides")
    notes.extend(_unknowns(codec, train_writer, examples, labelled))
    accounts = {"train": account.to_json(), "valid": valid_account.to_json() if valid else None}
    return {"text": codec.config.model_dump(), "labels": labels, "notes": notes, "accounts": accounts}


def pairs_encoder(codec: Codec) -> ExampleEncoder:
    """Sources and targets, each with an end."""

    def encode(examples: Sequence[Example]) -> tuple[Rows, Rows]:
        return codec.encode_source(examples), codec.encode_target([example.target or "" for example in examples])

    return ExampleEncoder(encode, (codec.source_vocab, codec.target_vocab), (codec.ids.unk, codec.ids.unk))


def labels_encoder(codec: Codec, labels: Sequence[str]) -> ExampleEncoder:
    """Texts with their marks, and the number of the label."""
    numbers = {label: number for number, label in enumerate(labels)}

    def encode(examples: Sequence[Example]) -> tuple[Rows, Rows]:
        return codec.encode_source(examples), [[numbers[example.target or ""]] for example in examples]

    return ExampleEncoder(encode, (codec.source_vocab, len(labels)), (codec.ids.unk, None))


def _labels(found: set[str], train: Source, base: Base | None) -> tuple[str, ...]:
    if base is not None and found <= set(base.labels):
        return base.labels
    if len(found) < 2:
        raise UserError(f"{train.name}: every text has the same label, {min(found)!r}; there is nothing to learn")
    return tuple(sorted(found))


def _few(names: Sequence[str]) -> str:
    return f"{len(names):,}: " + ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _codec(
    recipe: Recipe, train: Source, scan: Scan, splitter: Splitter | None, base: Base | None
) -> tuple[Codec, list[str]]:
    """Choose the schemes and learn the vocabularies, or take those of the run to start from."""
    text = recipe.text
    if base is not None:
        return base.codec, [f"tokens: those of {recipe.train.start_from}, {base.codec.source_vocab:,} tokens"]
    lines = scan.account.kept - scan.held_out
    sample = {"source": [e.source for e in scan.sample], "target": [e.target or "" for e in scan.sample]}
    sample["shared"] = sample["source"] + sample["target"]
    made: dict[str, Tokenizer] = {}
    notes = []
    labelled = recipe.task == "classify"
    asked = {"source": one_request(text, "a vocabulary")} if labelled else requests(text)
    for side, request in asked.items():
        choice = choose(sample[side], lines) if request == "auto" else TokenizerChoice(request, "as asked for")
        texts = _texts(train, splitter, side, share(choice.scheme, sample[side], lines), lines)
        made[side] = Tokenizer.train(choice.scheme, texts, text.min_count)
        notes.append(f"{side} tokens: {choice}; {made[side].size:,} tokens")
    source = made.get("shared") or made["source"]
    target = source if labelled else made.get("shared") or made["target"]
    if scan.features:
        notes.append(f"features, separated by {text.feature_separator!r}: {_few(scan.features)}")
    frame = TASKS[recipe.task].frame
    return Codec(source, target, scan.features, train.columns, text.feature_separator, frame), notes


def _texts(train: Source, splitter: Splitter | None, side: str, share: int, lines: int) -> Iterator[str]:
    """The texts of one side (or both) that are not held out: about `share` of `lines`, drawn from all over."""
    random = Random(0)
    for _, example in train.read(LineCounter()):
        if splitter is not None and splitter.held_out(example.source):
            continue
        if share >= lines or random.random() * lines < share:
            if side != "target":
                yield example.source
            if side != "source":
                yield example.target or ""


def _unknowns(codec: Codec, train: CorpusWriter, examples: list[Example], labelled: bool) -> Iterator[str]:
    """Say what the vocabularies lack."""
    for side in ("source", "target"):
        if train.unknown[side]:
            share = 100 * train.unknown[side] / train.symbols[side]
            count = f"{train.unknown[side]:,} {side} tokens ({share:.2g} %)"
            yield f"training: {count} are unknown, being rarer than text.min_count"
    source, target = UnknownTokens(), UnknownTokens()
    codec.note_unknown(examples, codec.encode_source(examples), source)
    if not labelled:
        texts = [example.target or "" for example in examples]
        target.add(codec.target, texts, codec.target.encode(texts))
    for side, unknown in (("source", source), ("target", target)):
        if unknown:
            yield f"validation, {side}: {unknown.summary()}"


SAMPLE = 10_000  # examples looked at, drawn from all; taking every nth would fall for patterns in the file
CUT = 1_000  # characters looked at of each
LABELS = 10_000
FEATURES = 50_000  # distinct ones; more are no features


class Scan:
    """What one pass over the training data tells."""

    def __init__(
        self, source: Source, separator: str, strict: bool, splitter: Splitter | None, labelled: bool = False
    ) -> None:
        self.account = LineCounter(strict)
        self.sample: list[Example] = []
        self.held_out = 0
        self.labels: set[str] = set()  # the different targets, where those are labels
        features: set[str] = set()
        fields: set[str] = set()
        random = Random(0)
        for index, (number, example) in enumerate(source.read(self.account)):
            if index < SAMPLE:
                self.sample.append(_short(example))
            elif (chance := int(random.random() * (index + 1))) < SAMPLE:  # every example is as likely as any other
                self.sample[chance] = _short(example)
            if splitter is not None:
                splitter.see(example.source)
            if labelled:
                self.labels.add(example.target or "")
                if len(self.labels) > LABELS:
                    raise UserError(
                        f"{source.place(number)}: more than {LABELS:,} different labels so far; are the columns in "
                        f"this order: {','.join(source.columns)}?"
                    )
            if example.features and example.features not in fields:
                names = split_features(example.features, separator)
                features.update(names)
                if len(features) > FEATURES:
                    raise UserError(
                        f"{source.place(number)}: more than {FEATURES:,} different features so far; "
                        f"are the columns in this order: {','.join(source.columns)}?"
                    )
                if len(fields) < FEATURES:
                    fields.add(example.features)
        source.require(self.account)
        self.features = tuple(sorted(features))
        if splitter is not None:
            self.held_out = splitter.choose()


def _short(example: Example) -> Example:
    return Example(example.source[:CUT], (example.target or "")[:CUT])


SHARE = 0.05
LEAST, MOST = 50, 2_000  # examples
LARGEST_SHARE = 0.2  # of a small file no larger part is taken, even if that makes fewer than LEAST


def wanted(examples: int) -> int:
    """How many of `examples` to hold out."""
    return max(1, round(min(max(SHARE * examples, min(LEAST, LARGEST_SHARE * examples)), MOST)))


class Splitter:
    """Finds the sources to hold out while they stream by; memory holds only the candidates."""

    def __init__(self, seed: int) -> None:
        self._key = str(seed).encode()
        self._counts: dict[bytes, int] = {}  # hash of a source -> its examples
        self._bound = b"\xff" * 8  # hashes above are no candidates
        self._examples = 0
        self._chosen: frozenset[bytes] = frozenset()

    def _hash(self, source: str) -> bytes:
        return blake2b(source.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).digest()

    def see(self, source: str) -> None:
        """Take note of an example's source."""
        self._examples += 1
        digest = self._hash(source)
        if digest > self._bound:
            return
        self._counts[digest] = self._counts.get(digest, 0) + 1
        if len(self._counts) >= 4 * MOST:  # keep the smallest; what goes now could not come back
            smallest = sorted(self._counts)[: 2 * MOST]
            self._bound = smallest[-1]
            self._counts = {digest: self._counts[digest] for digest in smallest}

    def choose(self) -> int:
        """Decide, after the last example; return how many are held out (0: all have one source, nothing to split)."""
        if len(self._counts) < 2:
            return 0
        want = wanted(self._examples)
        chosen: list[bytes] = []
        total = 0
        for digest in sorted(self._counts):
            count = self._counts[digest]
            if total + count <= want:
                chosen.append(digest)
                total += count
        if not chosen:  # every source has more examples than wanted: take the rarest
            chosen = [min(self._counts, key=lambda digest: (self._counts[digest], digest))]
            total = self._counts[chosen[0]]
        self._chosen = frozenset(chosen)
        return total

    def held_out(self, source: str) -> bool:
        """Whether examples with this source belong to validation."""
        return self._hash(source) in self._chosen
