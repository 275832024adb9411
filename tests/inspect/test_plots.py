"""Pictures of attention by Matplotlib."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from regard.errors import UserError
from regard.inspect import plots as picture
from regard.inspect.trace import Trace, trace
from regard.run import Run
from regard.text.codec import Example

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.image")


@pytest.fixture
def trace_result(make_letters: Callable[..., Run]) -> Trace:
    run = make_letters()
    return trace(run, Example("abcab"), run.codec.encode_target(["bcd"])[0])


def test_pictures_are_reproducible_png_svg_and_pdf_files(trace_result: Trace, tmp_path: Path) -> None:
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        path = tmp_path / f"map{suffix}"
        picture.save(picture.draw_matrix(trace_result.matrix()), path)
        first = path.read_bytes()
        assert first.startswith(start) and len(first) > 1000
        picture.save(picture.draw_matrix(trace_result.matrix()), path)
        assert path.read_bytes() == first, "the same picture gives the same file"
    with pytest.raises(UserError, match=r"ends in \.png, \.svg or \.pdf"):
        picture.save(picture.draw_matrix(trace_result.matrix()), tmp_path / "map.bmp")


def test_tokens_are_labels_and_never_formulas(trace_result: Trace, tmp_path: Path) -> None:
    source = ("$\\frac{1}$", "a_b^{", "שלום", "\u0301", " ", "日本語のとても長いトークンですよ")
    odd = dataclasses.replace(trace_result, tokens={**trace_result.tokens, "source": source})
    figure = picture.draw_matrix(odd.matrix())
    picture.save(figure, tmp_path / "odd.svg")
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert labels[0] == "$\\frac{1}$" and labels[4] == "␣" and len(labels) == 6
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["b", "c", "d", "<eos>"]


def test_right_to_left_keys_start_at_the_right(trace_result: Trace) -> None:
    odd = dataclasses.replace(trace_result, directions={**trace_result.directions, "source": "rtl"})
    for figure in (picture.draw_matrix(odd.matrix()), picture.draw_all_heads(odd, "cross")):
        left, right = figure.axes[0].get_xlim()
        assert left > right
    left, right = picture.draw_matrix(trace_result.matrix()).axes[0].get_xlim()
    assert left < right


@pytest.mark.parametrize("point", ["\u05b8", "\u05bc", "\u064e", "\u0650\u0651", "\u0301"])
def test_vowel_points_are_drawn_on_a_dotted_circle(point: str, tmp_path: Path) -> None:
    """A label with a point is about as wide as the circle."""

    def width(label: str) -> int:
        figure = picture.new_figure(2, 2)
        figure.text(0.5, 0.5, label, fontsize=40)
        picture.save(figure, tmp_path / "label.png")
        has_ink = matplotlib.image.imread(tmp_path / "label.png")[..., 0].min(0) < 0.5
        return int(np.ptp(np.flatnonzero(has_ink)))

    assert width(picture._picture_label(point)) <= 1.2 * width("◌")


def test_single_heads_means_and_grids_are_drawn(trace_result: Trace, tmp_path: Path) -> None:
    whole = picture.draw_all_heads(trace_result, "cross")
    assert len(whole.axes) == 8
    one = picture.draw_matrix(trace_result.matrix("encoder", 1, 2))
    weights = one.axes[0].images[0].get_array()
    assert np.allclose(weights, trace_result.find("encoder", 1).weights_HTS[2])
    mean = picture.draw_matrix(trace_result.matrix("encoder", 1)).axes[0].images[0].get_array()
    assert np.allclose(mean, trace_result.find("encoder", 1).weights_HTS.mean(0))
    with pytest.raises(UserError, match="no head 9 in layer 2; it has 1, 2, 3, 4"):
        picture.draw_matrix(trace_result.matrix("encoder", 1, 8))
    with pytest.raises(UserError, match="no image attention"):
        picture.draw_all_heads(trace_result, "image")
    grid = np.array([[0.1, np.nan], [0.3, 0.2]])
    picture.save(picture.draw_heads({"encoder": grid, "cross": grid}, "importance"), tmp_path / "grid.png")
    picture.save(picture.draw_lines({"loss": ([0, 1], [0.1, 0.2])}, "heads", "loss"), tmp_path / "lines.png")


def test_figures_of_long_texts_have_a_maximum_size(make_letters: Callable[..., Run]) -> None:
    run = make_letters()
    long = trace(run, Example("abcab" * 40), run.codec.encode_target(["bcd" * 40])[0])
    figure = picture.draw_matrix(long.matrix())
    assert max(figure.get_size_inches()) <= picture.MAX_SIDE + 1
    assert len(figure.axes[0].get_xticklabels()) <= 60


def test_drawing_does_not_change_global_settings(trace_result: Trace, tmp_path: Path) -> None:
    names = ("font.family", "svg.hashsalt", "figure.dpi")
    before = [matplotlib.rcParams[name] for name in names]
    picture.save(picture.draw_matrix(trace_result.matrix()), tmp_path / "map.svg")
    assert [matplotlib.rcParams[name] for name in names] == before


def test_missing_matplotlib_is_a_user_error(trace_result: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"-e '\.\[plot\]'"):
        picture.draw_matrix(trace_result.matrix())
