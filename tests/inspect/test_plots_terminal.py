"""Terminal drawings: aligned cells in any script, control characters, shades and colours."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len

from regard.inspect.plots import LTR_MARK, SHADES, colour, draw_in_colour, draw_in_shades, shade, visible

PIECES = st.lists(st.text(max_size=5), min_size=1, max_size=9)


def eye(rows, columns):
    return [[1.0 if r == c else 0.0 for c in range(columns)] for r in range(rows)]


def test_diagonal_is_drawn_with_two_blocks_per_cell():
    assert draw_in_shades(list("ab"), ["AH", "B"], eye(2, 2)) == ["   a  b", "AH ██", "B     ██"]


@given(PIECES, PIECES, st.integers(10, 60))
def test_every_cell_is_aligned_with_its_label(source, target, width):
    lines = draw_in_shades(source, target, [[1.0] * len(source)] * len(target), width)
    assert all("\n" not in line and cell_len(line) <= max(width, 13 + 13 + 2) for line in lines)
    bands = [band.split("\n") for band in "\n".join(lines).split("\n\n")]
    assert all(len(band) == len(target) + 1 for band in bands)
    blocks = sum(len(band[1].split("█ ")) if "█" in band[1] else 0 for band in bands)
    assert blocks == len(source)
    for band in bands:  # all rows of a band end in the same column, where its last cell does
        assert len({cell_len(line) for line in band[1:]}) == 1
        assert cell_len(band[0]) <= cell_len(band[1])


def test_wide_combining_and_right_to_left_characters():
    lines = draw_in_shades(["日", "e", "\u0301"], ["に"], [[0.0, 0.0, 1.0]])
    assert lines == ["   日 e  ◌\u0301", "に       ██"]
    assert draw_in_shades(["ש"], ["s"], [[1.0]])[0] == f"  {LTR_MARK}ש{LTR_MARK}"


def test_right_to_left_columns_start_at_the_right():
    assert draw_in_shades(list("ab"), ["x"], [[1.0, 0.0]], right_to_left=True) == ["  b  a", "x    ██"]
    lines = draw_in_shades(list("abcd"), ["x"], [[1.0, 0.0, 0.0, 1.0]], 8, right_to_left=True)
    assert [line.split() for line in lines] == [["b", "a"], ["x", "██"], [], ["d", "c"], ["x", "██"]]


@pytest.mark.parametrize(
    ("piece", "text"), [(" ", "␣"), ("\t", "␉"), ("", "∅"), ("\u200b", "·"), ("\x1b[1m", "␛[1m"), ("\u2028", "�")]
)
def test_control_characters_are_replaced(piece, text):
    assert visible(piece) == text


def test_long_tokens_are_truncated():
    assert cell_len(visible("漢" * 40)) <= 12 and visible("漢" * 40).endswith("…")


def test_shades_and_colours_increase_with_the_weight():
    shades = [SHADES.index(shade(i / 100)) for i in range(-10, 111)]
    assert shades == sorted(shades) and set(shades) == {0, 1, 2, 3, 4}
    assert colour(2.0) == colour(1.0) != colour(0.5) != colour(0.0)


def test_coloured_and_plain_drawings_have_the_same_labels():
    source, target, weights = list("thought"), ["TH", "AO", "T"], eye(3, 7)
    coloured = draw_in_colour(source, target, weights).plain.split("\n")
    plain = draw_in_shades(source, target, weights)
    assert [line.split("  ")[0] for line in coloured] == [line.split("  ")[0].rstrip("█ ") for line in plain]


def test_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="rows and columns"):
        draw_in_shades(["a"], ["b"], [[1.0, 2.0]])
