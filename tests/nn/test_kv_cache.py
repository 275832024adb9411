"""A KV cache that grows in place is a value: earlier caches never change."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from regard.nn.cache import KV, KVCache


def draw(rows: int, length: int) -> KV:
    return KV(torch.randn(rows, 2, length, 3), torch.randn(rows, 2, length, 5))


@given(st.data(), st.booleans())
def test_caches_that_share_a_buffer_equal_copies(data: st.DataObject, inference: bool) -> None:
    """Any earlier cache extended, reordered and shortened, against plain tensors."""
    with torch.inference_mode(inference), torch.no_grad():
        made = [draw(3, 2)]
        copies = [tuple(x.clone() for x in made[0])]
        for _ in range(data.draw(st.integers(1, 12))):
            at = data.draw(st.integers(0, len(made) - 1))
            kv = made[at]
            copy = copies[at]
            kind = data.draw(st.sampled_from(["extend", "extend", "extend", "select", "last"]))
            if kind == "extend":
                new = draw(len(kv.k_BGSE), data.draw(st.integers(1, 12)))
                made.append(kv.extend(new))
                copies.append(tuple(torch.cat(pair, 2) for pair in zip(copy, new, strict=True)))
            elif kind == "select":
                rows = torch.tensor(data.draw(st.lists(st.integers(0, len(kv.k_BGSE) - 1), min_size=1, max_size=4)))
                made.append(kv.select(rows))
                copies.append(tuple(x[rows] for x in copy))
            else:
                made.append(kv.last(3))
                copies.append(tuple(x[:, :, -3:] for x in copy))
    for kv, copy in zip(made, copies, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(kv, copy, strict=True))


def test_extending_writes_only_the_new_tokens() -> None:
    with torch.no_grad():
        cache = draw(2, 1).extend(draw(2, 1))
        assert isinstance(cache, KVCache)
        place = cache.k_BGSE.data_ptr()
        for _ in range(10):
            cache = cache.extend(draw(2, 1))
        assert cache.length == 12 and cache.k_BGSE.data_ptr() == place
        assert cache.select(torch.tensor([1, 0])).k_BGSE.data_ptr() != place


def test_a_shortened_cache_grows_in_place_too() -> None:
    """100 steps with a limit of 40 tokens copy the cache only a few times."""
    with torch.no_grad():
        cache = draw(2, 40).extend(draw(2, 1))
        starts = set()
        for _ in range(100):
            cache = cache.last(40).extend(draw(2, 1))
            assert isinstance(cache, KVCache) and cache.length == 41
            starts.add(cache.buffer.k_BSGE.data_ptr())
        assert len(starts) <= 6


@given(st.data())
def test_gathering_is_indexing(data: st.DataObject) -> None:
    with torch.no_grad():
        kv = draw(3, 4)
        for made in (kv, kv.extend(draw(3, 2)), kv.extend(draw(3, 3)).last(5)):
            rows = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
            places = torch.tensor([[data.draw(st.integers(0, made.length - 1)) for _ in range(2)] for _ in rows])
            gathered = made.gather(rows, places, 7)
            assert gathered.free == 7 and all(
                torch.equal(x[i, :, s], y[row, :, place])
                for x, y in zip(gathered, made, strict=True)
                for i, (row, pair) in enumerate(zip(rows, places, strict=True))
                for s, place in enumerate(pair)
            )


def test_a_gradient_passes_through_extended_keys() -> None:
    first, second = (KV(torch.randn(1, 1, 2, 3, requires_grad=True), torch.randn(1, 1, 2, 3)) for _ in range(2))
    with torch.no_grad():
        before = draw(1, 1)._replace(k_BGSE=torch.randn(1, 1, 1, 3), v_BGSE=torch.randn(1, 1, 1, 3))
        grown = KV(before.k_BGSE[:, :1], before.v_BGSE[:, :1]).extend(KV(first.k_BGSE[:, :1], first.v_BGSE[:, :1]))
    grown.extend(first).extend(second).k_BGSE.sum().backward()
    assert torch.equal(first.k_BGSE.grad, torch.ones(1, 1, 2, 3))


def test_an_inference_mode_cache_can_be_extended_outside_of_it() -> None:
    with torch.inference_mode():
        cache = draw(2, 1).extend(draw(2, 1))
    with torch.no_grad():
        assert cache.extend(draw(2, 1)).length == 3
