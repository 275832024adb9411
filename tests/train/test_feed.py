from __future__ import annotations

from pathlib import Path

import pytest
from backwards import MakeRecipe

from regard.data.prepare import prepare
from regard.presets import preset
from regard.training.distributed import ProcessGroup
from regard.training.loader import CorpusLoader


@pytest.fixture
def feeds(recipe: MakeRecipe, tmp_path: Path):  # type: ignore[no-untyped-def]
    prepared = prepare(recipe(), tmp_path / "data")
    config = preset("transformer-tiny", 50)

    def make(size: int, **settings: int) -> list[CorpusLoader]:
        train = recipe(**settings).train
        return [CorpusLoader(prepared.train, config, train, ProcessGroup(rank, size)) for rank in range(size)]

    return make


def test_an_epoch_has_every_example_once_however_it_is_shared(feeds) -> None:  # type: ignore[no-untyped-def]
    def rows(size: int, accumulate: int) -> list[tuple[int, ...]]:
        found = []
        for feed in feeds(size, accumulate=accumulate, batch_examples=7):
            batch = 0
            while batch < feed.batches_in(0):
                portion = feed.portion(0, batch)
                batch += portion.batches
                for share, weight in portion.shares:
                    keep = share.source_keep_BS
                    for i, row in enumerate(share.source_BS if weight else ()):
                        found.append(tuple((row if keep is None else row[keep[i]]).tolist()))
        return sorted(found)

    alone = rows(1, 1)
    assert len(alone) == 120
    assert rows(3, 2) == alone


def test_the_total_is_known_to_everyone_before_anyone_has_computed(feeds) -> None:  # type: ignore[no-untyped-def]
    portions = [feed.portion(1, 2) for feed in feeds(3, accumulate=4)]
    real = sum(share.tokens for portion in portions for share, weight in portion.shares if weight)
    assert {share.total for portion in portions for share, _ in portion.shares} == {real}
    rows = sum(len(share.source_BS) for portion in portions for share, weight in portion.shares if weight)
    assert {(p.tokens, p.examples, p.batches) for p in portions} == {(real, rows, 4)}
    assert len({p.symbols for p in portions}) == 1 and portions[0].symbols > real


def test_who_gets_nothing_still_takes_part(feeds) -> None:  # type: ignore[no-untyped-def]
    portions = [feed.portion(0, 0) for feed in feeds(3, batch_examples=2)]
    assert [weight for portion in portions for _, weight in portion.shares] == [1.0, 1.0, 0.0]
    assert all(share.source_BS.shape[0] == 1 for portion in portions for share, _ in portion.shares)


def test_steps_of_an_epoch(feeds) -> None:  # type: ignore[no-untyped-def]
    (feed,) = feeds(1, accumulate=5, batch_examples=10)
    count = feed.batches_in(0)
    assert 10 < count <= 15
    assert feed.steps_in(0) == 3
    assert [feed.portion(0, batch).batches for batch in (0, 5, 10)] == [5, 5, count - 10]
