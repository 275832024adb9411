"""Preparing pairs, and texts with labels: vocabularies (and a list of labels), and two corpora."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from regard.data.account import Account
from regard.data.corpus import CorpusWriter, Encoder, Rows
from regard.data.scan import Scan
from regard.data.source import Source
from regard.data.split import MOST, Splitter
from regard.data.vocabulary import FRAMES, Base, one_request, requests, share
from regard.errors import UserError
from regard.settings import Recipe
from regard.text.auto import Choice, choose
from regard.text.codec import Codec
from regard.text.example import Example
from regard.text.tokenizer import Tokenizer
from regard.text.unknown import Unknown

NO_LABEL = "label that training does not have"


def make_pairs(recipe: Recipe, train: Source, valid: Source | None, path: Path, base: Base | None) -> dict[str, Any]:
    """Write tokenizers and corpora into `path`; return the record of it."""
    strict, labelled = recipe.data.strict, recipe.task == "classify"
    valid_account = Account(strict)
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

    account = Account(strict)
    same = splitter is not None and not scan.held_out  # nothing to split: look at the training examples themselves
    held_account = valid_account if valid else Account() if same else account
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
    (path / "valid.jsonl").write_bytes(rows.encode())
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


def pairs_encoder(codec: Codec) -> Encoder:
    """Sources and targets, each with an end."""

    def encode(examples: Sequence[Example]) -> tuple[Rows, Rows]:
        return codec.encode_source(examples), codec.encode_target([example.target or "" for example in examples])

    return Encoder(encode, (codec.source_vocab, codec.target_vocab), (codec.ids.unk, codec.ids.unk))


def labels_encoder(codec: Codec, labels: Sequence[str]) -> Encoder:
    """Texts with their marks, and the number of the label."""
    numbers = {label: number for number, label in enumerate(labels)}

    def encode(examples: Sequence[Example]) -> tuple[Rows, Rows]:
        return codec.encode_source(examples), [[numbers[example.target or ""]] for example in examples]

    return Encoder(encode, (codec.source_vocab, len(labels)), (codec.ids.unk, None))


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
        return base.codec, [f"tokens: those of {recipe.train.start_from}, {base.codec.source_vocab:,} symbols"]
    lines = scan.account.kept - scan.held_out
    sample = {"source": [e.source for e in scan.sample], "target": [e.target or "" for e in scan.sample]}
    sample["shared"] = sample["source"] + sample["target"]
    made: dict[str, Tokenizer] = {}
    notes = []
    labelled = recipe.task == "classify"
    asked = {"source": one_request(text, "a vocabulary")} if labelled else requests(text)
    for side, request in asked.items():
        choice = choose(sample[side], lines) if request == "auto" else Choice(request, "as asked for")
        texts = _texts(train, splitter, side, share(choice.scheme, sample[side], lines), lines)
        made[side] = Tokenizer.train(choice.scheme, texts, text.min_count)
        notes.append(f"{side} tokens: {choice}; {made[side].size:,} symbols")
    source = made.get("shared") or made["source"]
    target = source if labelled else made.get("shared") or made["target"]
    if scan.features:
        notes.append(f"features, separated by {text.feature_separator!r}: {_few(scan.features)}")
    frame = FRAMES[recipe.task]
    return Codec(source, target, scan.features, train.columns, text.feature_separator, frame), notes


def _texts(train: Source, splitter: Splitter | None, side: str, share: int, lines: int) -> Iterator[str]:
    """The texts of one side (or both) that are not held out: about `share` of `lines`, drawn from all over."""
    random = Random(0)
    for _, example in train.read(Account()):
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
            count = f"{train.unknown[side]:,} {side} symbols ({share:.2g} %)"
            yield f"training: {count} are unknown, being rarer than text.min_count"
    source, target = Unknown(), Unknown()
    codec.note_unknown(examples, codec.encode_source(examples), source)
    if not labelled:
        texts = [example.target or "" for example in examples]
        target.add(codec.target, texts, codec.target.encode(texts))
    for side, unknown in (("source", source), ("target", target)):
        if unknown:
            yield f"validation, {side}: {unknown.summary()}"
