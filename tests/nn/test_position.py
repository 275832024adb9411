"""Positions against their formulas, in plain Python."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.config import Stack
from regard.errors import UserError
from regard.nn.position import Bucket, Learned, Position, Rotary, alibi_slopes, make_position, sinusoid


@pytest.mark.parametrize("width", [2, 5, 16])
def test_sinusoid_is_the_formula(width: int) -> None:
    positions = [0, 1, 2, 9, 100, 5000]
    found = sinusoid(torch.tensor([positions]), width)[0]
    for t, position in enumerate(positions):
        for i in range(width):
            angle = position / 10000 ** ((i - i % 2) / width)
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert found[t, i].item() == pytest.approx(expected, abs=1e-6 * max(1, position))


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_alibi_slopes_of_a_power_of_two_are_a_geometric_series(heads: int) -> None:
    """The series starts at 2^(-8/n) and multiplies by itself."""
    assert alibi_slopes(heads).tolist() == pytest.approx([2 ** (-8 / heads * (h + 1)) for h in range(heads)])


@pytest.mark.parametrize("heads", [3, 5, 6, 12])
def test_alibi_slopes_in_between_take_every_second_of_the_finer_series(heads: int) -> None:
    slopes, below = alibi_slopes(heads).tolist(), 1 << (heads.bit_length() - 1)
    finer = alibi_slopes(2 * below).tolist()
    assert len(set(slopes)) == heads
    assert slopes[:below] == pytest.approx(finer[1::2])
    assert slopes[below:] == pytest.approx(finer[::2][: heads - below])


def test_alibi_bias_is_slope_times_distance() -> None:
    position = make_position(Stack(width=8, heads=4, position="alibi"), causal=True)
    q, k = torch.tensor([[3, 8]]), torch.tensor([[0, 3, 11]])
    bias = position.bias(q, k)
    assert bias is not None
    for h, slope in enumerate(alibi_slopes(4).tolist()):
        for t in range(2):
            for s in range(3):
                assert bias[0, h, t, s].item() == pytest.approx(-slope * abs(int(q[0, t] - k[0, s])))


def bucket_by_hand(offset: int, both_ways: bool, buckets: int = 32, far: int = 128) -> int:
    """Half of the buckets hold one distance each, the others grow logarithmically up to `far`, then all share the last.

    Exact numbers throughout: bucket b starts at the first distance d with (d/exact)^logs >= (far/exact)^(b-exact).
    """
    first = 0
    if both_ways:
        buckets //= 2
        first = buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(0, -offset)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    logs = buckets - exact
    best = exact
    for bucket in range(exact, buckets):
        if Fraction(distance, exact) ** logs >= Fraction(far, exact) ** (bucket - exact):
            best = bucket
    return first + best


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_by_hand(both_ways: bool) -> None:
    offsets = [*range(-140, 141), -1000, -5000, 1000, 5000]
    found = Bucket(2, both_ways).bucket(torch.tensor(offsets))
    assert found.tolist() == [bucket_by_hand(offset, both_ways) for offset in offsets]


def test_bucket_bias_reads_the_table() -> None:
    position = Bucket(3, both_ways=True)
    q, k = torch.tensor([[0, 5], [2, 3]]), torch.tensor([[0, 1, 40], [7, 2, 0]])
    bias = position.bias(q, k)
    assert bias.shape == (2, 3, 2, 3)
    for b in range(2):
        for t in range(2):
            for s in range(3):
                row = position.table.weight[bucket_by_hand(int(k[b, s] - q[b, t]), True)]
                assert torch.equal(bias[b, :, t, s], row)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(1, 8))
def test_rotated_products_depend_on_the_difference_alone(a: int, b: int, shift: int, half: int) -> None:
    torch.manual_seed(half)
    rotary, q, k = Rotary(2 * half), *torch.randn(2, 1, 1, 1, 2 * half).double()
    rotary.double()

    def product(i: int, j: int) -> float:
        return float((rotary.rotate(q, torch.tensor([[i]])) * rotary.rotate(k, torch.tensor([[j]]))).sum())

    assert product(a, b) == pytest.approx(product(a + shift, b + shift), abs=1e-4)
    assert float(rotary.rotate(q, torch.tensor([[a]])).norm()) == pytest.approx(float(q.norm()))


def test_rotary_turns_pairs_by_the_formula() -> None:
    x = torch.randn(1, 2, 3, 6)
    found, positions = Rotary(6).rotate(x, torch.tensor([[0, 4, 9]])), [0, 4, 9]
    assert torch.equal(found[:, :, 0], x[:, :, 0])
    for h in range(2):
        for t, position in enumerate(positions):
            for i in range(3):
                angle = position / 10000 ** (2 * i / 6)
                a, b = x[0, h, t, i].item(), x[0, h, t, i + 3].item()
                turned = complex(a, b) * complex(math.cos(angle), math.sin(angle))
                assert found[0, h, t, i].item() == pytest.approx(turned.real, abs=1e-5)
                assert found[0, h, t, i + 3].item() == pytest.approx(turned.imag, abs=1e-5)


def test_learned_positions_end_somewhere() -> None:
    learned = Learned(4, 3)
    assert torch.equal(learned.embed(torch.tensor([[2, 0]]))[0], learned.table.weight[[2, 0]])
    with pytest.raises(UserError, match=r"4 symbols.*3 learned positions"):
        learned.embed(torch.arange(4).unsqueeze(0))


@pytest.mark.parametrize("kind", ["none", "sinusoid", "learned", "rotary", "alibi", "bucket"])
def test_each_kind_acts_in_exactly_one_place(kind: str) -> None:
    position = make_position(Stack(width=8, heads=2, position=kind, max_length=9), causal=False)
    pos, x = torch.tensor([[1, 5, 2]]), torch.randn(1, 2, 3, 4)
    acts = {
        "embed": position.embed(pos) is not None,
        "rotate": not torch.equal(position.rotate(x, pos), x),
        "bias": position.bias(pos, pos) is not None,
    }
    where = {"sinusoid": "embed", "learned": "embed", "rotary": "rotate", "alibi": "bias", "bucket": "bias"}
    assert [place for place, does in acts.items() if does] == ([where[kind]] if kind != "none" else [])
    assert isinstance(position, Position)
