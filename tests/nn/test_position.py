"""Position encodings equal their formulas, computed in plain Python."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

from regard.config import AxialConfig, RotaryConfig, Stack
from regard.errors import UserError
from regard.nn.position import Axial, Bucket, Learned, Position, Rotary, alibi_slopes, make_position, sinusoid

METHODS = dict.fromkeys(("sinusoid", "sinusoid_halves", "learned", "axial"), "embed")
METHODS |= {"rotary": "rotate", "alibi": "bias", "bucket": "bias"}


@pytest.mark.parametrize("width", [2, 5, 16])
def test_sinusoid_equals_its_formula(width: int) -> None:
    positions = [0, 1, 2, 9, 100, 5000]
    embedding = sinusoid(torch.tensor([positions]), width)[0]
    for t, position in enumerate(positions):
        for i in range(width):
            angle = position / 10000 ** ((i - i % 2) / width)
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert embedding[t, i].item() == pytest.approx(expected, abs=1e-6 * max(1, position))


@pytest.mark.parametrize("width", [2, 5, 16])
def test_sinusoid_halves_reorders_the_sinusoid(width: int) -> None:
    """All sines, then all cosines."""
    positions = torch.tensor([[0, 1, 7, 300]])
    order = [*range(0, width, 2), *range(1, width, 2)]
    assert torch.equal(sinusoid(positions, width, halves=True), sinusoid(positions, width)[..., order])


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_alibi_slopes_of_a_power_of_two_are_a_geometric_series(heads: int) -> None:
    """The series starts at 2^(-8/n), which is also its ratio."""
    assert alibi_slopes(heads).tolist() == pytest.approx([2 ** (-8 / heads * (h + 1)) for h in range(heads)])


@pytest.mark.parametrize("heads", [3, 5, 6, 12])
def test_alibi_slopes_of_other_head_counts_add_slopes_of_the_next_series(heads: int) -> None:
    slopes = alibi_slopes(heads).tolist()
    below = 1 << (heads.bit_length() - 1)
    finer = alibi_slopes(2 * below).tolist()
    assert len(set(slopes)) == heads
    assert slopes[:below] == pytest.approx(finer[1::2])
    assert slopes[below:] == pytest.approx(finer[::2][: heads - below])


def test_alibi_bias_is_slope_times_distance() -> None:
    position = make_position(Stack(width=8, heads=4, position="alibi"), causal=True)
    q = torch.tensor([[3, 8]])
    k = torch.tensor([[0, 3, 11]])
    bias = position.bias(q, k)
    assert bias is not None
    for h, slope in enumerate(alibi_slopes(4).tolist()):
        for t in range(2):
            for s in range(3):
                assert bias[0, h, t, s].item() == pytest.approx(-slope * abs(int(q[0, t] - k[0, s])))


def bucket_by_hand(offset: int, both_ways: bool, buckets: int = 32, far: int = 128) -> int:
    """Half of the buckets hold one distance each; the others grow logarithmically up to `far`, the last is open-ended.

    Computed in exact arithmetic: bucket b starts at the first distance d with (d/exact)^logs >= (far/exact)^(b-exact).
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
def test_buckets_equal_exact_arithmetic(both_ways: bool) -> None:
    offsets = [*range(-140, 141), -1000, -5000, 1000, 5000]
    buckets = Bucket(2, both_ways).bucket(torch.tensor(offsets))
    assert buckets.tolist() == [bucket_by_hand(offset, both_ways) for offset in offsets]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("both_ways", "far"), [(True, 128), (False, 256)])
def test_buckets_do_not_depend_on_the_default_dtype(both_ways: bool, far: int, dtype: torch.dtype) -> None:
    position = Bucket(2, both_ways, far=far)
    offsets = torch.arange(-1000, 1000)
    expected = position.bucket(offsets)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(position.bucket(offsets), expected)
    finally:
        torch.set_default_dtype(before)


def test_bucket_bias_is_looked_up_in_the_table() -> None:
    position = Bucket(3, both_ways=True)
    q = torch.tensor([[0, 5], [2, 3]])
    k = torch.tensor([[0, 1, 40], [7, 2, 0]])
    bias = position.bias(q, k)
    assert bias.shape == (2, 3, 2, 3)
    for b in range(2):
        for t in range(2):
            for s in range(3):
                row = position.table.weight[bucket_by_hand(int(k[b, s] - q[b, t]), True)]
                assert torch.equal(bias[b, :, t, s], row)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(1, 8))
def test_rotated_products_depend_only_on_the_difference(a: int, b: int, shift: int, half: int) -> None:
    torch.manual_seed(half)
    rotary, q, k = Rotary(2 * half), *torch.randn(2, 1, 1, 1, 2 * half).double()
    rotary.double()

    def product(i: int, j: int) -> float:
        return float((rotary.rotate(q, torch.tensor([[i]])) * rotary.rotate(k, torch.tensor([[j]]))).sum())

    assert product(a, b) == pytest.approx(product(a + shift, b + shift), abs=1e-4)
    assert float(rotary.rotate(q, torch.tensor([[a]])).norm()) == pytest.approx(float(q.norm()))


def test_rotary_with_cached_angles_equals_rotary() -> None:
    rotary = Rotary(8)
    x_BHTE = torch.randn(2, 3, 4, 8)
    positions = torch.arange(4).unsqueeze(0)
    other_positions = torch.tensor([[3, 0, 7, 7], [1, 2, 3, 4]])
    cached = rotary.at(positions)
    for pos_BT in (positions, positions.clone(), other_positions):
        assert torch.equal(cached.rotate(x_BHTE, pos_BT), rotary.rotate(x_BHTE, pos_BT))


def test_rotary_equals_its_formula() -> None:
    x = torch.randn(1, 2, 3, 6)
    rotated = Rotary(6).rotate(x, torch.tensor([[0, 4, 9]]))
    positions = [0, 4, 9]
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])
    for h in range(2):
        for t, position in enumerate(positions):
            for i in range(3):
                angle = position / 10000 ** (2 * i / 6)
                a = x[0, h, t, i].item()
                b = x[0, h, t, i + 3].item()
                product = complex(a, b) * complex(math.cos(angle), math.sin(angle))
                assert rotated[0, h, t, i].item() == pytest.approx(product.real, abs=1e-5)
                assert rotated[0, h, t, i + 3].item() == pytest.approx(product.imag, abs=1e-5)


@pytest.mark.parametrize(("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 8192), (32.0, 0.5, 8.0, 100)])
def test_rotary_scaling_depends_on_the_wavelength(factor: float, low: float, high: float, original: int) -> None:
    """Short wavelengths are unchanged, long ones are stretched, and the rest is interpolated."""
    config = RotaryConfig(base=500000.0, factor=factor, low=low, high=high, original=original)
    rates = Rotary(64, config).rates(torch.device("cpu")).tolist()
    kinds = set()
    for i in range(32):
        rate = 500000.0 ** (-2 * i / 64)
        wavelength = 2 * math.pi / rate
        if wavelength < original / high:
            expected = rate
            kind = "unchanged"
        elif wavelength > original / low:
            expected = rate / factor
            kind = "stretched"
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected = (1 - smooth) * rate / factor + smooth * rate
            kind = "interpolated"
        assert rates[i] == pytest.approx(expected, rel=1e-4)
        kinds.add(kind)
    assert kinds == {"unchanged", "stretched", "interpolated"}
    assert Rotary(64, RotaryConfig(base=500000.0)).rates(torch.device("cpu")).tolist() == pytest.approx(
        [500000.0 ** (-2 * i / 64) for i in range(32)], rel=1e-4
    )


def test_axial_positions_concatenate_row_and_column() -> None:
    axial = Axial(7, AxialConfig(rows=3, columns=4, row_width=2))
    positions = [11, 0, 5, 4, 3]
    embedding = axial.embed(torch.tensor([positions]))[0]
    assert embedding.shape == (5, 7)
    for t, position in enumerate(positions):
        row, column = divmod(position, 4)
        assert embedding[t].tolist() == [*axial.rows.weight[row].tolist(), *axial.columns.weight[column].tolist()]
    with pytest.raises(UserError, match=r"13 tokens.*12 learned positions"):
        axial.embed(torch.arange(13).unsqueeze(0))


def test_learned_positions_beyond_the_table_are_refused() -> None:
    learned = Learned(4, 3)
    assert torch.equal(learned.embed(torch.tensor([[2, 0]]))[0], learned.table.weight[[2, 0]])
    with pytest.raises(UserError, match=r"4 tokens.*3 learned positions"):
        learned.embed(torch.arange(4).unsqueeze(0))


@pytest.mark.parametrize("kind", [*METHODS, "none", "relative"])
def test_each_position_kind_acts_through_exactly_one_method(kind: str) -> None:
    """`relative` acts inside attention because it needs the queries."""
    axial = {"rows": 3, "columns": 3, "row_width": 3} if kind == "axial" else None
    position = make_position(Stack(width=8, heads=2, position=kind, max_length=9, axial=axial), causal=False)
    pos = torch.tensor([[1, 5, 2]])
    x = torch.randn(1, 2, 3, 4)
    effects = {
        "embed": position.embed(pos) is not None,
        "rotate": not torch.equal(position.rotate(x, pos), x),
        "bias": position.bias(pos, pos) is not None,
    }
    assert [method for method, effect in effects.items() if effect] == ([METHODS[kind]] if kind in METHODS else [])
    assert isinstance(position, Position)
