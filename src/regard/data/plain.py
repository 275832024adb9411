"""Preparing plain text: one vocabulary, and two long rows of ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from regard.data.account import Account
from regard.data.source import Source
from regard.data.stream import StreamWriter, TextScan, divide, read_pieces, scan_text, split_at
from regard.data.vocabulary import FRAMES, Base, one_request, share
from regard.errors import UserError
from regard.settings import Recipe
from regard.text.auto import Choice, choose
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer


def make_text(recipe: Recipe, train: Source, valid: Source | None, path: Path, base: Base | None) -> dict[str, Any]:
    """Write a tokenizer and two streams into `path`; return the record of it."""
    strict = recipe.data.strict
    account, valid_account = Account(strict), Account(strict)
    scan = scan_text(train, account)
    at = scan.characters if valid else split_at(scan.characters)
    if not at or scan.characters < 2:
        raise UserError(f"{train.name}: {scan.characters} characters are too little text to learn from")
    codec, notes = _codec(recipe, train, scan, at, base)
    codec.save(path)
    train_writer = StreamWriter(path / "train", codec.source)
    valid_writer = StreamWriter(path / "valid", codec.source)
    with train_writer, valid_writer:
        for piece, held_out in divide(read_pieces(train, Account()), at):
            (valid_writer if held_out else train_writer).add(piece)
        for piece in read_pieces(valid, valid_account) if valid else ():
            valid_writer.add(piece)
    notes.append(f"training: {_size(train_writer)} from {train.name}, {account.summary()}")
    if valid:
        if not valid_writer.characters:
            raise UserError(f"{valid.name}: there is no text in it")
        notes.append(f"validation: {_size(valid_writer)} from {valid.name}, {valid_account.summary()}")
    else:
        part = 100 * valid_writer.characters / scan.characters
        notes.append(f"validation: {_size(valid_writer)}, the last {part:.3g} % of the text")
    for what, writer in (("training", train_writer), ("validation", valid_writer)):
        if writer.unknown:
            notes.append(
                f"{what}: {writer.unknown:,} symbols ({100 * writer.unknown / writer.symbols:.2g} %) are unknown"
            )
    accounts = {"train": account.to_json(), "valid": valid_account.to_json() if valid else None}
    return {"text": codec.config.model_dump(), "labels": (), "notes": notes, "accounts": accounts}


def _size(writer: StreamWriter) -> str:
    return f"{writer.symbols:,} symbols ({writer.characters:,} characters)"


def _codec(recipe: Recipe, train: Source, scan: TextScan, at: int, base: Base | None) -> tuple[Codec, list[str]]:
    text = recipe.text
    if base is not None:
        if recipe.task == "span" and not base.codec.shared:
            raise UserError(
                f"{recipe.train.start_from}: task span needs one vocabulary for both sides; this run has two"
            )
        if base.codec.source.scheme == "space":
            raise UserError(
                f"{recipe.train.start_from}: its tokens are separated by spaces, so line ends would be lost"
            )
        return base.codec, [f"tokens: those of {recipe.train.start_from}, {base.codec.source_vocab:,} symbols"]
    request = one_request(text, "one text")
    if request == "space":
        raise UserError(
            "text.source_tokens: space drops line ends and doubled spaces, which plain text needs; "
            "word cuts at spaces and keeps them"
        )
    choice = Choice(request, "as asked for")
    if request == "auto":
        choice = choose(scan.sample, scan.pieces)
        if choice.scheme == "space":
            choice = Choice("word", choice.reason)
    texts = _texts(train, at, share(choice.scheme, scan.sample, scan.pieces), scan.pieces)
    tokenizer = Tokenizer.train(choice.scheme, texts, text.min_count, mask=recipe.task == "masked")
    return Codec(tokenizer, frame=FRAMES[recipe.task]), [f"tokens: {choice}; {tokenizer.size:,} symbols"]


def _texts(train: Source, at: int, share: int, pieces: int) -> Iterator[str]:
    """The text to learn symbols from: what is not held out, about `share` of so many pieces, drawn from all over."""
    random = Random(0)
    for piece, held_out in divide(read_pieces(train, Account()), at):
        if held_out:
            return
        if share >= pieces or random.random() * pieces < share:
            yield piece
