"""Stop strings: an output ends before the first stop string, which is also excluded from the score."""

from __future__ import annotations

from unicodedata import normalize

import pytest
from hypothesis import assume, given, settings, strategies as st

from kit.decoding import LETTERS, NAMES, language_model, run_of, sources
from regard.answers import Answerer
from regard.decode.phrases import is_combining
from regard.decode.request import Options, Request
from regard.decode.torch_engine import generate, score
from regard.errors import UserError
from regard.run import Run

SCHEMES = ("char", "space", "byte", "bpe:290", "nfd")


def some_run(name: str, scheme: str, seed: int) -> Run:
    letters = "eéèaà가각나" if scheme == "nfd" else LETTERS
    if name == "language model":
        return language_model("rotary", seed, scheme=scheme, letters=letters)
    return run_of(name, seed, scheme, letters)


def text_before(text: str, stop: list[str], scheme: str) -> str:
    """The text before the first complete stop string."""
    if scheme == "space":
        tokens = text.split(" ") if text else []
        ends = [
            (at + len(s), at)
            for s in (string.split(" ") for string in stop)
            for at in range(len(tokens))
            if tokens[at : at + len(s)] == s
        ]
        return " ".join(tokens[: min(ends)[1]]) if ends else text
    if scheme == "nfd":  # mark character boundaries; a diacritic belongs to the preceding letter
        bars = ["".join(c if is_combining(c) else f"|{c}" for c in normalize("NFD", x)) + "|" for x in (text, *stop)]
        return normalize("NFC", text_before(bars[0], bars[1:], "char").replace("|", ""))
    ends = [(at + len(string), at) for string in stop if (at := text.find(string)) >= 0]
    return text[: min(ends)[1]] if ends else text


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([*NAMES, "language model"]), st.sampled_from(SCHEMES), st.integers(0, 3),
    st.sampled_from([{}, {"sample": True}]), st.data(),
)  # fmt: skip
def test_greedy_and_sampled_outputs_end_before_the_first_stop_string(
    name: str, scheme: str, seed: int, strategy: dict[str, bool], data: st.DataObject
) -> None:
    run = some_run(name, scheme, seed)
    source = sources(seed, 1)[0]
    if name == "language model" and scheme in ("space", "nfd"):
        source = ""
    options = Options.of(max_length=14, **strategy)
    (whole,) = next(generate(run, [source], options))
    parts = whole.text.split(" ") if scheme == "space" else whole.text
    assume(parts)
    begin = data.draw(st.integers(0, len(parts) - 1))
    part = parts[begin : begin + data.draw(st.integers(1, 3))]
    stop = [" ".join(part) if scheme == "space" else part, data.draw(st.sampled_from("abc"))]
    assume(all(string.strip(" ") or scheme != "space" for string in stop))
    assume("\N{REPLACEMENT CHARACTER}" not in stop[0])  # stands for invalid UTF-8
    request = Request(source, stop=stop)
    (h,) = next(generate(run, [request], options))
    assert h.text == text_before(whole.text, stop, scheme)
    assert ("stopped" in h.flags) == (h.text != whole.text)
    assert sum(h.token_scores) == h.score == pytest.approx(sum(whole.token_scores[: len(h.ids)]), abs=1e-6)
    assert h.ids == whole.ids[: len(h.ids)] and len(h.tokens) == len(h.ids)
    if "stopped" in h.flags and "segmentation" not in h.flags:
        (forced,) = score(run, [(source, h.text)])
        assert forced.token_scores[: len(h.ids)] == pytest.approx(h.token_scores, abs=1e-5)
    pieces = Answerer([run], options).stream(request)
    piece_list = list(pieces)
    assert "".join(piece.text for piece in piece_list) == h.text
    assert tuple(piece.id for piece in piece_list) == h.ids and pieces.hypothesis == h


def test_other_constraints_apply_to_the_text_before_the_stop_string() -> None:
    run = run_of("transformer-tiny", 2)
    for strategy in ({}, {"beam": 4, "nbest": 3}, {"sample": True}):
        options = Options.of(
            max_length=16, stop=("f", "ee"), require=("ba", "cc"), min_length=6, prefix="d", **strategy
        )
        for h in (h for row in generate(run, sources(4, 6), options) for h in row):
            assert h.text.startswith("d") and "ba" in h.text and "cc" in h.text and len(h.ids) >= 6
            assert "f" not in h.text and "ee" not in h.text


@pytest.mark.parametrize("name", NAMES)
def test_alternatives_beyond_a_stop_string_are_taken_at_its_position(name: str) -> None:
    run = run_of(name, 1)
    lengths = {"max_length": 12, "min_length": 3}
    (whole,) = next(generate(run, ["fade"], Options.of(**lengths)))
    stop = whole.text[3:5]
    (h,) = next(generate(run, ["fade"], Options.of(stop=[stop], **lengths)))
    row = next(generate(run, ["fade"], Options.of(stop=[stop], alternatives=3, alternatives_at=11, **lengths)))
    assert len({other.ids[: len(h.ids) + 1] for other in row}) == len(row) > 1
    assert all(other.text.startswith(h.text) and stop not in other.text for other in row)


def test_beam_outputs_are_distinct_and_begin_with_the_best() -> None:
    """Hypotheses that end before different stop strings are one output, at the rank of the best of them."""
    for name in NAMES:
        run = run_of(name, 1)
        for stop in (("a", "b", "cd"), ("c", "d", "e")):
            rows, best = (
                generate(run, sources(6, 8), Options(beam=6, nbest=nbest, max_length=8, stop=stop)) for nbest in (6, 1)
            )
            for row, (first,) in zip(rows, best, strict=True):
                assert len({(h.ids, h.text) for h in row}) == len(row)
                assert (row[0].ids, row[0].text) == (first.ids, first.text)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"stop": ["ab"], "prefix": "cabd"}, "prefix 'cabd' contains a stop string ('ab')"),
        ({"stop": ["b"], "require": ["abc"]}, "require 'abc' and stop 'b': a part of one begins the other"),
        ({"stop": ["bcd"], "require": ["ab"]}, "require 'ab' and stop 'bcd'"),
        ({"stop": ["bcd"], "require_any": ["f", "c"]}, "require 'c' and stop 'bcd'"),
        ({"stop": ["a" * 2000]}, "at most 1000 letters"),
        ({"stop": "a"}, "stop: takes a list of texts, such as ['a'], not one text"),
    ],
)
def test_contradictions_with_a_stop_string_are_refused(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        list(generate(run_of("rnn-luong", 1), ["abc"], Options.of(**settings_)))
    assert message in str(error.value)
