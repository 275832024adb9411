"""A KV cache grows in place, but earlier caches that share its buffer never change."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from regard.nn.cache import KV, KVCache


def random_kv(rows: int, length: int) -> KV:
    return KV(torch.randn(rows, 2, length, 3), torch.randn(rows, 2, length, 5))


@given(st.data(), st.booleans())
def test_caches_with_a_shared_buffer_equal_separate_copies(data: st.DataObject, inference: bool) -> None:
    """Extend, reorder or shorten any earlier cache, and do the same with copies of its tensors."""
    with torch.inference_mode(inference), torch.no_grad():
        caches = [random_kv(3, 2)]
        copies = [tuple(x.clone() for x in caches[0])]
        for _ in range(data.draw(st.integers(1, 12))):
            at = data.draw(st.integers(0, len(caches) - 1))
            kv = caches[at]
            copy = copies[at]
            kind = data.draw(st.sampled_from(["extend", "extend", "extend", "select", "last"]))
            if kind == "extend":
                new = random_kv(len(kv.k_BGSE), data.draw(st.integers(1, 12)))
                caches.append(kv.extend(new))
                copies.append(tuple(torch.cat(pair, 2) for pair in zip(copy, new, strict=True)))
            elif kind == "select":
                rows = torch.tensor(data.draw(st.lists(st.integers(0, len(kv.k_BGSE) - 1), min_size=1, max_size=4)))
                caches.append(kv.select(rows))
                copies.append(tuple(x[rows] for x in copy))
            else:
                caches.append(kv.last(3))
                copies.append(tuple(x[:, :, -3:] for x in copy))
    for kv, copy in zip(caches, copies, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(kv, copy, strict=True))


def test_extending_writes_only_the_new_tokens() -> None:
    with torch.no_grad():
        cache = random_kv(2, 1).extend(random_kv(2, 1))
        assert isinstance(cache, KVCache)
        address = cache.k_BGSE.data_ptr()
        for _ in range(10):
            cache = cache.extend(random_kv(2, 1))
        assert cache.length == 12 and cache.k_BGSE.data_ptr() == address
        assert cache.select(torch.tensor([1, 0])).k_BGSE.data_ptr() != address


def test_shortened_cache_grows_in_place() -> None:
    """100 steps with a limit of 40 tokens copy the cache at most a few times."""
    with torch.no_grad():
        cache = random_kv(2, 40).extend(random_kv(2, 1))
        addresses = set()
        for _ in range(100):
            cache = cache.last(40).extend(random_kv(2, 1))
            assert isinstance(cache, KVCache) and cache.length == 41
            addresses.add(cache.buffer.k_BSGE.data_ptr())
        assert len(addresses) <= 6


@given(st.data())
def test_gather_equals_indexing(data: st.DataObject) -> None:
    with torch.no_grad():
        kv = random_kv(3, 4)
        for cache in (kv, kv.extend(random_kv(3, 2)), kv.extend(random_kv(3, 3)).last(5)):
            rows = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
            positions = torch.tensor([[data.draw(st.integers(0, cache.length - 1)) for _ in range(2)] for _ in rows])
            gathered = cache.gather(rows, positions, 7)
            assert gathered.free == 7 and all(
                torch.equal(x[i, :, s], y[row, :, position])
                for x, y in zip(gathered, cache, strict=True)
                for i, (row, pair) in enumerate(zip(rows, positions, strict=True))
                for s, position in enumerate(pair)
            )


def test_gradients_pass_through_extended_keys() -> None:
    first, second = (KV(torch.randn(1, 1, 2, 3, requires_grad=True), torch.randn(1, 1, 2, 3)) for _ in range(2))
    with torch.no_grad():
        before = random_kv(1, 1)._replace(k_BGSE=torch.randn(1, 1, 1, 3), v_BGSE=torch.randn(1, 1, 1, 3))
        cache = KV(before.k_BGSE[:, :1], before.v_BGSE[:, :1]).extend(KV(first.k_BGSE[:, :1], first.v_BGSE[:, :1]))
    cache.extend(first).extend(second).k_BGSE.sum().backward()
    assert torch.equal(first.k_BGSE.grad, torch.ones(1, 1, 2, 3))


def test_cache_from_inference_mode_can_be_extended_outside_it() -> None:
    with torch.inference_mode():
        cache = random_kv(2, 1).extend(random_kv(2, 1))
    with torch.no_grad():
        assert cache.extend(random_kv(2, 1)).length == 3
