"""Everything between a recipe's files and the first batch: choose, learn, split, tokenise, once and for all.

The result is a directory that training reads and resuming finds again; it appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from regard.config import parse
from regard.data.account import Account
from regard.data.corpus import Corpus, CorpusWriter
from regard.data.scan import Scan
from regard.data.source import Source
from regard.data.split import MOST, Splitter
from regard.data.store import fingerprint, replace, spool, stamp
from regard.errors import UserError
from regard.settings import Recipe, Text
from regard.text.auto import Choice, choose
from regard.text.codec import Codec, TextConfig
from regard.text.example import Example
from regard.text.scheme import LEARNED, parse_scheme
from regard.text.tokenizer import Tokenizer
from regard.text.unknown import Unknown

FORMAT = 1
LEARNED_LINES = 1_000_000  # bpe and unigram learn from about so many lines at most, drawn from all
LEARNED_TEXT = 50_000_000  # and from so many characters
# In a script without spaces every line is one long word to the learner, whose memory grows with the length of all
# different words: 400 MB for these.
UNBROKEN = 20  # characters between spaces that tell such a script
UNBROKEN_TEXT = {"bpe": 1_000_000, "unigram": 300_000}


class Prepared(NamedTuple):
    """What training starts from. `valid` and `valid_examples` hold the same examples in the same order."""

    codec: Codec
    train: Corpus
    valid: Corpus
    valid_examples: list[Example]
    notes: list[str]  # the choices made, for people


def prepare(recipe: Recipe, directory: str | Path, resume: bool = False) -> Prepared:
    """Make the data of a recipe ready in `directory`, or find it there.

    What is there is used if it was made from the same text with the same settings. If not, it is made anew, or, with
    `resume`, it is an error; files that are gone or cannot be read twice are then taken to be the same.
    """
    path = Path(directory)
    train, valid = sources(recipe)
    _requests(recipe.text)
    found = _read_record(path)
    if found is not None:
        now = fingerprint(recipe, train, valid)
        changed = sorted(key for key in {*now, *found["made_from"]} if now.get(key) != found["made_from"].get(key))
        if resume:
            changed = [key for key in changed if now.get(key, "") is not None]
        if not changed:
            return open_prepared(path)
        if resume:
            raise UserError(f"cannot resume: {', '.join(changed)} changed since the run began; start a new run")
    temporary = path.with_name(path.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        train, valid = spool(train, temporary), valid and spool(valid, temporary)
        before = stamp(train, valid)
        record = _make(recipe, train, valid, temporary)
        if stamp(train, valid) != before:
            raise UserError(f"{train.name}: changed while it was read; start again when it is complete")
        record["made_from"] = fingerprint(recipe, train, valid)
        (temporary / "prepared.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the prepared data: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return open_prepared(path)


def open_prepared(directory: str | Path) -> Prepared:
    """Open what `prepare` made; processes that did not make it use this."""
    path = Path(directory)
    record = _read_record(path)
    if record is None:
        raise UserError(f"{path}: no prepared data here")
    codec = Codec.load(path, parse(TextConfig, record["text"], f"{path}/prepared.json"))
    rows = (path / "valid.jsonl").read_bytes().split(b"\n")[:-1]
    examples = [Example(*json.loads(row)) for row in rows]
    return Prepared(codec, Corpus.open(path / "train"), Corpus.open(path / "valid"), examples, record["notes"])


def sources(recipe: Recipe) -> tuple[Source, Source | None]:
    """The training files of a recipe, and the validation files if it names any."""
    data = recipe.data
    if "features" in data.columns and (data.source or data.valid_source):
        raise UserError("data.columns: features are a column of a table (--data FILE.tsv); parallel files have none")
    if data.train is not None:
        train = Source((data.train,), data.columns)
    elif data.source is not None and data.target is not None:
        train = Source((data.source, data.target))
    else:
        raise UserError("no training data: give a table with --data FILE.tsv, or --source FILE and --target FILE")
    if data.valid is not None:
        return train, Source((data.valid,), data.columns)
    if data.valid_source is not None and data.valid_target is not None:
        return train, Source((data.valid_source, data.valid_target))
    return train, None


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((path / "prepared.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if record.get("format") == FORMAT else None


def _make(recipe: Recipe, train: Source, valid: Source | None, path: Path) -> dict[str, Any]:
    """Write tokenizers and corpora into `path`; return the record of it."""
    strict = recipe.data.strict
    valid_account = Account(strict)
    given = list(valid.read(valid_account)) if valid else []
    if valid:
        valid.require(valid_account)
    splitter = None if valid else Splitter(recipe.train.seed)
    scan = Scan(train, recipe.text.feature_separator, strict, splitter)
    codec, notes = _codec(recipe, train, scan, splitter)
    codec.save(path)

    account = Account(strict)
    same = splitter is not None and not scan.held_out  # nothing to split: look at the training examples themselves
    held_account = valid_account if valid else Account() if same else account
    limit = recipe.data.max_length
    train_writer = CorpusWriter(path / "train", codec, train, account, limit)
    valid_writer = CorpusWriter(path / "valid", codec, valid or train, held_account, limit, keep=True)
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
    notes.extend(_unknowns(codec, train_writer, examples))
    accounts = {"train": account.to_json(), "valid": valid_account.to_json() if valid else None}
    return {"format": FORMAT, "text": codec.config.model_dump(), "notes": notes, "accounts": accounts}


def _codec(recipe: Recipe, train: Source, scan: Scan, splitter: Splitter | None) -> tuple[Codec, list[str]]:
    """Choose the schemes and learn the vocabularies."""
    text = recipe.text
    lines = scan.account.kept - scan.held_out
    sample = {"source": [e.source for e in scan.sample], "target": [e.target or "" for e in scan.sample]}
    sample["shared"] = sample["source"] + sample["target"]
    made: dict[str, Tokenizer] = {}
    notes = []
    for side, request in _requests(text).items():
        choice = choose(sample[side], lines) if request == "auto" else Choice(request, "as asked for")
        texts = _texts(train, splitter, side, _share(choice.scheme, sample[side], lines), lines)
        made[side] = Tokenizer.train(choice.scheme, texts, text.min_count)
        notes.append(f"{side} tokens: {choice}; {made[side].size:,} symbols")
    source = made.get("shared") or made["source"]
    target = made.get("shared") or made["target"]
    if scan.features:
        few = ", ".join(scan.features[:5]) + (", ..." if len(scan.features) > 5 else "")
        notes.append(f"features: {len(scan.features):,} symbols, separated by {text.feature_separator!r}: {few}")
    return Codec(source, target, scan.features, train.columns, text.feature_separator), notes


def _requests(text: Text) -> dict[str, str]:
    """The schemes asked for, by side, or one for both."""
    asked = {"source": text.source_tokens, "target": text.target_tokens}
    for side, request in asked.items():
        parse_scheme(request, f"text.{side}_tokens")
    if not text.shared:
        return asked
    requests = sorted({request for request in asked.values() if request != "auto"}) or ["auto"]
    if len(requests) > 1:
        raise UserError(
            f"text.shared: one vocabulary cannot be {' and '.join(requests)}; ask for the same on both sides"
        )
    return {"shared": requests[0]}


def _share(scheme: str, sample: list[str], lines: int) -> int:
    """How many lines a scheme learns from."""
    kind = parse_scheme(scheme).kind
    if kind not in LEARNED:
        return lines
    characters = sum(map(len, sample))
    words = sum(len(text.split()) for text in sample)
    budget = LEARNED_TEXT if characters <= UNBROKEN * words else UNBROKEN_TEXT[kind]
    return min(lines, LEARNED_LINES, max(1, budget * len(sample) // max(1, characters)))


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


def _unknowns(codec: Codec, train: CorpusWriter, examples: list[Example]) -> Iterator[str]:
    """Say what the vocabularies lack."""
    for side in ("source", "target"):
        if train.unknown[side]:
            share = 100 * train.unknown[side] / train.symbols[side]
            count = f"{train.unknown[side]:,} {side} symbols ({share:.2g} %)"
            yield f"training: {count} are unknown, being rarer than text.min_count"
    source, target = Unknown(), Unknown()
    codec.note_unknown(examples, codec.encode_source(examples), source)
    texts = [example.target or "" for example in examples]
    target.add(codec.target, texts, codec.target.encode(texts))
    for side, unknown in (("source", source), ("target", target)):
        if unknown:
            yield f"validation, {side}: {unknown.summary()}"
