"""A corpus returns the rows that were written to it, one by one and in batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.config import Config, Stack
from regard.data import store as module
from regard.data.encode import ExampleEncoder, Limits
from regard.data.reader import LineCounter, Located, Source
from regard.data.store import Corpus, CorpusWriter
from regard.errors import UserError
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

EXAMPLES = [Example("abc" * (n % 7 + 1) + "é" * (n % 3), " ".join("xyz"[: n % 3 + 1]), "N;V") for n in range(100)]
CODEC = Codec(
    Tokenizer.train("char", ["abc"]), Tokenizer.train("space", ["x y z"]), ("N", "V"), ("source", "features", "target")
)


def write(path: Path, codec: Codec = CODEC, limit: int = 512, counter: LineCounter | None = None) -> CorpusWriter:
    counter = counter or LineCounter()
    writer = CorpusWriter(path, ExampleEncoder(codec, Limits(limit)))
    counter.read += len(EXAMPLES)
    located = (Located(number, example) for number, example in enumerate(EXAMPLES, 1))
    writer.add(located, counter, Source(("pairs.tsv",)).location)
    writer.finish()
    return writer


@pytest.mark.parametrize("max_mapped_bytes", [0, 1 << 20])  # read in parts, or memory-mapped
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_rows_equal_the_ids_of_the_codec(max_mapped_bytes: int, chunk: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_MAPPED_BYTES", max_mapped_bytes)
    monkeypatch.setattr(module, "MAX_CHUNK", chunk)
    monkeypatch.setattr(module, "MAX_OFFSETS", chunk)
    monkeypatch.setattr(module, "MAX_GAP", 2)
    writer = write(tmp_path / "c")
    corpus = Corpus(tmp_path / "c")
    sources = CODEC.encode_source(EXAMPLES)
    targets = CODEC.encode_target([e.target or "" for e in EXAMPLES])
    assert [corpus.source(i).tolist() for i in range(len(corpus))] == sources
    assert [corpus.target(i).tolist() for i in range(len(corpus))] == targets
    rows = np.random.default_rng(1).permutation(len(corpus))[:70]
    for lengths, side in ((corpus.source_lengths, sources), (corpus.target_lengths, targets)):
        assert lengths[rows].tolist() == [len(side[row]) for row in rows]
        assert np.concatenate(list(lengths.chunks())).tolist() == list(map(len, side))
        assert lengths.longest == max(map(len, side)) and len(lengths[rows[:0]]) == 0
    assert corpus.tokens == sum(map(len, sources)) + sum(map(len, targets))
    assert corpus.mean_length == pytest.approx(
        np.mean([max(map(len, pair)) for pair in zip(sources, targets, strict=True)])
    )
    assert writer.examples == EXAMPLES
    assert json.loads((tmp_path / "c" / "meta.json").read_text())["unknown"] == {
        "source": sum(row.count(1) for row in sources),
        "target": 0,
    }
    assert corpus.source(0).dtype == np.uint16


def test_large_vocabularies_are_stored_as_32_bit_ids(tmp_path: Path) -> None:
    codec = Codec(CODEC.source, CODEC.target, [f"f{n}" for n in range(70_000)] + ["N", "V"])
    write(tmp_path / "c", codec)
    corpus = Corpus(tmp_path / "c")
    assert corpus.source(5).dtype == np.uint32
    assert corpus.source(5).tolist() == codec.encode_source([EXAMPLES[5]])[0]
    assert corpus.target(5).dtype == np.uint16


def test_too_long_examples_are_skipped_and_counted_with_their_line_numbers(tmp_path: Path) -> None:
    counter = LineCounter()
    writer = write(tmp_path / "c", limit=12, counter=counter)
    fits = [n for n, e in enumerate(EXAMPLES) if len(e.source) + 2 <= 12]  # two features
    assert 0 < len(fits) < len(EXAMPLES)
    assert writer.examples == [EXAMPLES[n] for n in fits]
    assert counter.kept == len(Corpus(tmp_path / "c")) == len(fits)
    assert counter.skipped == {"too long": len(EXAMPLES) - len(fits)}
    first = next(n for n in range(100) if n not in fits)
    assert counter.locations["too long"][0] == f"pairs.tsv:{first + 1}"
    with pytest.raises(UserError, match=rf"pairs.tsv:{first + 1}: too long: .*max_length is 12"):
        write(tmp_path / "d", limit=12, counter=LineCounter(strict=True))


def test_batch_contains_the_requested_rows(tmp_path: Path) -> None:
    write(tmp_path / "c")
    corpus = Corpus(tmp_path / "c")
    stack = Stack(layers=1, width=8, heads=1, ff=8)
    config = Config(source_vocab=CODEC.source_vocab, target_vocab=CODEC.target_vocab, encoder=stack, decoder=stack)
    rows = np.array([3, 50, 4])
    batch = corpus.batch(rows, config)
    for at, row in enumerate(rows):
        keep = slice(None) if batch.source_keep_BS is None else batch.source_keep_BS[at]
        assert batch.source_BS[at][keep].tolist() == corpus.source(row).tolist()
        keep = slice(None) if batch.keep_BT is None else batch.keep_BT[at]
        assert batch.label_BT[at][keep].tolist() == corpus.target(row).tolist()
    assert batch.source_BS.dtype == torch.int64
    assert batch.tokens == corpus.target_lengths[rows].sum()


def test_a_damaged_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"meta\.json: no such file"):
        Corpus(tmp_path)
    for number, damage in enumerate(
        [
            lambda path: (path / "source.bin").write_bytes(b"\0\0\0"),
            lambda path: (path / "target.offsets").write_bytes(b""),
            lambda path: (path / "target.offsets").unlink(),
            lambda path: (path / "meta.json").write_text("{"),
            lambda path: (path / "meta.json").write_text(json.dumps({"format": 99})),
        ]
    ):
        path = tmp_path / str(number)
        write(path)
        damage(path)
        with pytest.raises(UserError, match=str(path)):
            Corpus(path)
