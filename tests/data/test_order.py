"""Order of examples: complete, within the token budget, little padding, determined by seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from regard.data import order as module
from regard.data.order import Batches, Indices, draw, proportions
from regard.errors import UserError


def lengths(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    source = random.integers(2, 40, count).astype(np.int32)
    return source, np.clip(source + random.integers(-3, 4, count), 2, None).astype(np.int32)


pairs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=200)


@given(
    pairs,
    st.integers(0, 2**40),
    st.integers(0, 9),
    st.integers(1, 300),
    st.none() | st.integers(1, 20),
    st.integers(1, 50),
)
@settings(deadline=None)
def test_every_example_occurs_once_and_every_batch_is_within_budget(
    rows, seed, epoch, tokens, examples, window
) -> None:
    source = np.array([row[0] for row in rows], np.int32)
    target = np.array([row[1] for row in rows], np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW", window)
        patch.setattr(module, "BLOCK", 3)
        batches = list(Batches(source, target, seed, epoch, tokens, examples))
    assert sorted(int(index) for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        assert len(batch) <= (examples or len(rows))
        assert len(batch) == 1 or len(batch) * max(source[batch].max(), target[batch].max()) <= tokens


def test_order_is_a_function_of_seed_and_epoch() -> None:
    source, target = lengths(3000)

    def make_batches(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in Batches(source, target, seed, epoch, 512)]

    reference = make_batches(1, 7)
    assert make_batches(1, 7) == reference  # independent of other epochs
    assert make_batches(1, 8) != reference
    assert make_batches(2, 7) != reference
    # The batches themselves differ, not only their order.
    assert sorted(map(sorted, make_batches(1, 8))) != sorted(map(sorted, reference))


def test_batches_are_full_with_little_padding() -> None:
    source, target = lengths(20_000)
    batches = Batches(source, target, 1, 0, 2048)
    padded = sum(len(b) * (int(source[b].max()) + int(target[b].max())) for b in batches)
    assert 1 - (source.sum() + target.sum()) / padded < 0.05
    assert len(batches) < 1.1 * np.maximum(source, target).sum() / 2048


def test_short_and_long_batches_are_mixed() -> None:
    source, target = lengths(20_000)
    means = np.array([source[batch].mean() for batch in Batches(source, target, 1, 0, 1024)])
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.2


def test_few_examples_give_one_batch() -> None:
    source, target = lengths(30)
    assert len(Batches(source, target, 1, 0, 10**6)) == 1
    assert len(Batches(source[:0], target[:0], 1, 0, 10)) == 0


# More examples than one window


class CountingLengths:
    """Lengths that record the largest number of rows read at once."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self.most = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, rows: Indices) -> np.ndarray:
        self.most = max(self.most, len(rows))
        return self._lengths[rows]


@pytest.mark.parametrize("shares", [None, [0.3, 0.7]])
def test_at_most_one_window_of_lengths_is_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch, shares: list[float] | None
) -> None:
    monkeypatch.setattr(module, "WINDOW", 1000)
    source, target = map(CountingLengths, lengths(4321))

    def make_batches() -> Batches:
        return Batches(source, target, 3, 2, 512, sizes=[1321, 3000], shares=shares)

    expected = [batch.tolist() for batch in make_batches()]
    assert [batch.tolist() for batch in make_batches()[:]] == expected
    assert source.most == target.most <= 1000
    jumps = make_batches()
    random = np.random.default_rng(1)
    assert len(jumps) == len(expected)
    for number in [-1, 0, *random.integers(len(expected), size=50).tolist()]:  # random access
        assert jumps[number].tolist() == expected[number]
    with pytest.raises(IndexError):
        jumps[len(expected)]
    rows = [row for batch in expected for row in batch]
    if shares is None:
        assert sorted(rows) == list(range(4321))
    else:
        assert sum(row < 1321 for row in rows) == round(0.3 * 4321) and len(rows) == 4321


def test_windows_are_sampled_from_the_whole_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 6400)
    first = np.concatenate(Batches(*lengths(64_000), 1, 0, 512)[:100])
    assert len(first) > 2000
    counts = np.bincount(first // 6400, minlength=10)
    assert counts.min() > 0.3 * counts.mean()


# Several corpora


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
    st.integers(0, 5),
    st.integers(1, 3),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_draw_keeps_the_proportions_in_every_epoch(
    sizes: list[int], weights: list[float], seed: int, parts: int, block: int
) -> None:
    shares = proportions(sizes, weights[: len(sizes)], None)
    assert shares is not None
    ends = np.cumsum(sizes)
    corpus_of = np.repeat(np.arange(len(sizes)), sizes)
    totals = np.zeros(sum(sizes), int)
    for epoch in range(4):
        rows = np.concatenate([draw(sizes, shares, seed, epoch, (n, parts), block) for n in range(parts)])
        assert sorted(draw(sizes, shares, seed, epoch, block=block)) == sorted(rows)
        assert len(rows) == ends[-1]
        counts = np.bincount(corpus_of[rows], minlength=len(sizes))
        assert np.allclose(counts, np.array(shares) * ends[-1], atol=1)
        totals += np.bincount(rows, minlength=len(totals))
        for end, size in zip(ends, sizes, strict=True):  # counts differ by at most one
            assert np.ptp(totals[end - size : end]) <= 1


def test_temperature_scales_proportions_by_a_power_of_the_size() -> None:
    sizes = [1000, 10, 100]
    assert proportions(sizes, None, None) is None
    assert np.allclose(proportions(sizes, None, 1.0) or 0, np.array(sizes) / sum(sizes))
    assert np.allclose(proportions(sizes, None, 2.0) or 0, np.sqrt(sizes) / np.sqrt(sizes).sum())
    assert np.allclose(proportions(sizes, None, 1e9) or 0, 1 / 3)
    with pytest.raises(UserError, match=r"data\.weights: corpus 2 has no training example"):
        proportions([3, 0], [1, 1], None)
    assert proportions([3, 0], None, 5.0) == [1, 0]
    assert sorted(draw([3, 0], [1, 0], 1, 0)) == [0, 1, 2]


def test_batches_contain_exactly_the_drawn_examples() -> None:
    sizes = [30, 300]
    lengths = np.arange(330) % 17 + 1
    rows_drawn = draw(sizes, [0.5, 0.5], 1, 0)
    batches = Batches(lengths, lengths, 1, 0, 100, sizes=sizes, shares=[0.5, 0.5])
    assert sorted(np.concatenate(batches[:])) == sorted(rows_drawn)
    assert all(len(rows) * lengths[rows].max() <= 100 for rows in batches)
