"""The data loader: every epoch covers all data, in an order that depends only on (seed, epoch)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kit.backwards import MakeRecipe
from regard.config import Config, Stack
from regard.data.objectives import CausalLM, SpanCorruption, TokenMasking, Windows
from regard.data.plain_text import Stream
from regard.data.prepare import Prepared, prepare
from regard.errors import UserError
from regard.presets import preset
from regard.recipe import Recipe, Train
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer
from regard.training.loader import DataLoader, make_loader, text_loader


@pytest.fixture
def loader_of(recipe: MakeRecipe, tmp_path: Path):  # type: ignore[no-untyped-def]
    prepared = prepare(recipe(), tmp_path / "data")
    config = preset("transformer-tiny", 50)

    def make(**settings: int) -> DataLoader:
        return make_loader(recipe(**settings), prepared, config)

    return make


def test_every_epoch_contains_each_example_once_for_any_number_of_ranks(loader_of) -> None:  # type: ignore[no-untyped-def]
    def rows(size: int, accumulate: int) -> list[tuple[int, ...]]:
        examples = []
        loader = loader_of(accumulate=accumulate, batch_examples=7)
        for rank in range(size):
            batch = 0
            while batch < len(loader.batches(0)):
                step = loader.step(0, batch, rank, size)
                batch += step.batches
                for share, weight in step.shares:
                    mask = share.source_keep_BS
                    for i, row in enumerate(share.source_BS if weight else ()):
                        examples.append(tuple((row if mask is None else row[mask[i]]).tolist()))
        return sorted(examples)

    single = rows(1, 1)
    assert len(single) == 120
    assert rows(3, 2) == single


def test_every_share_contains_the_global_token_count(loader_of) -> None:  # type: ignore[no-untyped-def]
    loader = loader_of(accumulate=4)
    steps = [loader.step(1, 2, rank, 3) for rank in range(3)]
    real = sum(share.tokens for step in steps for share, weight in step.shares if weight)
    assert {share.total for step in steps for share, _ in step.shares} == {real}
    rows = sum(len(share.source_BS) for step in steps for share, weight in step.shares if weight)
    assert {(p.tokens, p.examples, p.batches) for p in steps} == {(real, rows, 4)}
    assert len({p.all_tokens for p in steps}) == 1 and steps[0].all_tokens > real


def test_rank_without_examples_gets_a_batch_of_weight_zero(loader_of) -> None:  # type: ignore[no-untyped-def]
    loader = loader_of(batch_examples=2)
    steps = [loader.step(0, 0, rank, 3) for rank in range(3)]
    assert [weight for step in steps for _, weight in step.shares] == [1.0, 1.0, 0.0]
    assert all(share.source_BS.shape[0] == 1 for step in steps for share, _ in step.shares)


def test_last_step_of_an_epoch_contains_the_remaining_batches(loader_of) -> None:  # type: ignore[no-untyped-def]
    loader = loader_of(accumulate=5, batch_examples=10)
    count = len(loader.batches(0))
    assert 10 < count <= 15
    assert [loader.step(0, batch).batches for batch in (0, 5, 10)] == [5, 5, count - 10]


TOKENIZER = Tokenizer.train("char", ["".join(map(chr, range(97, 123)))], mask=True)
CODEC = Codec(TOKENIZER)
IDS = np.arange(5, 305, dtype=np.uint32) % 26 + 5
STREAM = Stream(IDS, len(IDS))
STACK = Stack(layers=1, width=8, heads=2)
ENCODER = Config(source_vocab=31, target_vocab=31, encoder=STACK, frame="both", ids=TOKENIZER.ids)
MEMORY = Config(source_vocab=31, target_vocab=31, decoder=STACK.model_copy(update={"memory": 16, "position": "rotary"}))
BOTH = Config(source_vocab=131, target_vocab=131, encoder=STACK, decoder=STACK)


def make(kind: str, **settings: Any) -> DataLoader:
    train = Train(**({"context": 16, "batch_examples": 4} | settings))
    recipe = Recipe(task="lm" if kind == "lanes" else kind, train=train)
    config = {"masked": ENCODER, "lanes": MEMORY}.get(kind, BOTH)
    return text_loader(recipe, Prepared(codec=CODEC, train=STREAM, valid=STREAM, notes=[]), config)


def epoch(loader: DataLoader, number: int, rank: int = 0, size: int = 1) -> list[Any]:
    steps = []
    batch = 0
    while batch < len(loader.batches(number)):
        step = loader.step(number, batch, rank, size)
        batch += step.batches
        steps.append(step)
    return steps


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["lm", "lanes", "masked", "span"])
def test_step_depends_only_on_seed_epoch_and_batch(kind: str) -> None:
    loader = make(kind)
    batches = [loader.step(number, 1).shares[0][0] for number in (0, 1, 0, 2)]
    other = make(kind)
    assert same(batches[0], batches[2]) and same(batches[3], other.step(2, 1).shares[0][0])
    assert not same(batches[0], batches[1])
    assert not same(batches[0], make(kind, seed=5).step(0, 1).shares[0][0])
    assert [loader.step(1, batch).begins_epoch for batch in (0, 1)] == [True, False]


@pytest.mark.parametrize("kind", ["lm", "masked", "span"])
def test_shares_of_all_ranks_equal_the_batches_of_one_rank(kind: str) -> None:
    def rows(size: int) -> tuple[Counter[Any], list[Any]]:
        loader = make(kind, accumulate=2, batch_examples=5)
        steps = [epoch(loader, 3, rank, size) for rank in range(size)]
        counts: Counter[Any] = Counter()
        for step in (step for steps in steps for step in steps):
            for batch, weight in step.shares:
                assert batch.total == step.tokens
                for row in range(len(batch.label_BT) if weight else 0):
                    mask = batch.keep_BT[row] if batch.keep_BT is not None else slice(None)
                    counts[(*batch.source_BS[row].unique().tolist(), *batch.label_BT[row][mask].tolist())] += 1
        return counts, [(p.batches, p.examples, p.tokens, p.all_tokens) for p in steps[0]]

    single = rows(1)
    shared = rows(3)
    assert single[1] == shared[1]
    assert single[0].total() == sum(numbers[1] for numbers in single[1])
    if kind == "lm":
        assert single[0] == shared[0]


def test_every_epoch_reads_the_text_once_from_a_different_offset() -> None:
    offsets = set()
    for number in range(6):
        labels = torch.cat([p.shares[0][0].label_BT for p in epoch(make("lm"), number)])
        starts = sorted(np.concatenate(make("lm").batches(number)).tolist())
        assert len(labels) == len(starts) == len(set(starts))
        assert set(np.diff(starts)) == {16}
        assert starts[0] < 16 and starts[-1] + 17 <= 300 < starts[-1] + 17 + 16
        offsets.add(starts[0])
    assert len(offsets) > 3


def test_lanes_continue_at_the_end_of_the_previous_window() -> None:
    steps = epoch(make("lanes"), 1)
    text = torch.cat([step.shares[0][0].input_BT for step in steps], dim=1)
    assert text.shape[0] == 4
    for row in text.numpy():
        assert (np.diff(row) % 26 == 1).all()  # consecutive letters
    labels = torch.cat([step.shares[0][0].label_BT for step in steps], dim=1)
    assert torch.equal(labels[:, :-1], text[:, 1:])


@given(st.integers(2, 400), st.integers(1, 40), st.integers(1, 12), st.integers(0, 50))
def test_lanes_stay_within_the_text(tokens: int, context: int, rows: int, offset: int) -> None:
    stream = Stream(np.arange(tokens, dtype=np.uint32), tokens)
    windows = CausalLM(stream, CODEC, BOTH, Train(context=context)).windows
    lanes = windows.lanes(rows, offset)
    assert lanes and len({len(starts) for starts in lanes}) == 1
    for starts in lanes:
        assert starts.min() >= 0 and starts.max() + windows.length <= tokens
        assert stream.windows(starts, windows.length).shape == (len(starts), windows.length)


@given(st.integers(1, 100), st.integers(1, 40), st.integers(0, 100))
def test_windows_stay_within_the_text(tokens: int, length: int, offset: int) -> None:
    windows = Windows(Stream(np.arange(tokens, dtype=np.uint32), 0), length, length)
    starts = windows.starts(offset)
    assert len(starts) and starts.min() >= 0 and starts.max() + windows.length <= tokens


def test_batch_tokens_limit_the_examples_of_a_batch() -> None:
    assert make("lm", batch_examples=None, batch_tokens=100).step(0, 0).examples == 100 // 16


def test_unsuitable_tokenizers_and_contexts_are_refused() -> None:
    with pytest.raises(UserError, match="no mask token"):
        TokenMasking(STREAM, CODEC, BOTH, Train())
    with pytest.raises(UserError, match="no room for text"):
        TokenMasking(STREAM, CODEC, ENCODER, Train(context=2))
    with pytest.raises(UserError, match="no sentinel tokens"):
        SpanCorruption(STREAM, CODEC, ENCODER, Train())
    with pytest.raises(UserError, match="at least two tokens"):
        SpanCorruption(STREAM, CODEC, BOTH, Train(context=1))
