"""The phrase automaton equals plain string search."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from regard.decode.phrases import NEVER, Letters, Spelling, make_phrases

letters = st.integers(0, 2)
phrases = st.lists(st.lists(letters, min_size=1, max_size=4).map(tuple), max_size=3)
vocabularies = st.lists(st.lists(letters, max_size=3).map(tuple), min_size=1, max_size=6)


def spelling(tokens: list[Letters], usable: list[bool] | None = None, end: Letters = ()) -> Spelling:
    """The spelling of a vocabulary whose last token is the end token."""
    return Spelling([*tokens, end], [*(usable or [True] * len(tokens))[: len(tokens)], False], len(tokens))


def occurs(phrase: Letters, text: Letters) -> bool:
    return any(text[i : i + len(phrase)] == phrase for i in range(len(text) - len(phrase) + 1))


def letters_of(tokens: list[Letters], ids: list[int]) -> Letters:
    return tuple(letter for index in ids for letter in tokens[index])


@settings(max_examples=300, deadline=None)
@given(vocabularies, phrases, phrases, st.lists(st.integers(0, 5), max_size=8))
def test_automaton_equals_string_search(
    tokens: list[Letters], require: list[Letters], forbid: list[Letters], ids: list[int]
) -> None:
    ids = [index % len(tokens) for index in ids]
    automaton = make_phrases([[x] for x in require], forbid, spelling(tokens))
    text = letters_of(tokens, ids)
    needed = automaton.tokens_needed(ids)
    assert (needed is None) == any(occurs(phrase, text) for phrase in forbid)
    if needed is not None:
        assert (needed == 0) == all(occurs(phrase, text) for phrase in require)


@settings(max_examples=200, deadline=None)
@given(st.lists(letters, min_size=1, max_size=7).map(tuple), st.data())
def test_nested_phrases_are_found(text: Letters, data: st.DataObject) -> None:
    places = st.tuples(st.integers(0, len(text) - 1), st.integers(1, len(text))).map(lambda p: text[p[0] : p[0] + p[1]])
    inside = data.draw(st.lists(places, min_size=1, max_size=4))
    three = spelling([(letter,) for letter in range(3)])
    assert make_phrases([[x] for x in inside], [], three).tokens_needed(text) == 0
    for phrase in inside:
        assert make_phrases([], [*inside[1:], phrase], three).tokens_needed(text) is None
        assert make_phrases([[(*text, 0)]], [phrase], three).tokens_needed([]) == NEVER


@settings(max_examples=150, deadline=None)
@given(vocabularies, phrases, phrases, st.lists(st.booleans(), min_size=6, max_size=6))
def test_tokens_needed_is_the_shortest_path(
    tokens: list[Letters], require: list[Letters], forbid: list[Letters], usable: list[bool]
) -> None:
    automaton = make_phrases([[x] for x in require], forbid, spelling(tokens, usable))
    needed = automaton.tokens_needed([])
    assert needed is not None
    allowed = [index for index in range(len(tokens)) if usable[index]]
    for length in range(5):
        texts = (letters_of(tokens, list(ids)) for ids in product(allowed, repeat=length))
        possible = any(
            all(occurs(phrase, text) for phrase in require) and not any(occurs(phrase, text) for phrase in forbid)
            for text in texts
        )
        assert possible == (needed == length) or needed < length
        if possible:
            break


def test_some_token_always_reduces_the_tokens_needed_by_one() -> None:
    """So a search that reserves enough tokens can always satisfy the constraints."""
    tokens: list[Letters] = [(0,), (1,), (2,), (0, 1), (2, 2, 0)]
    automaton = make_phrases([[(0, 1, 2)], [(2, 0, 0)], [(1, 1)]], [(1, 2, 2)], spelling(tokens))
    seen = {(0, 0)}
    queue = deque([(0, 0)])
    while queue:
        met, state = queue.popleft()
        tokens_needed = int(automaton.need_MQ[met, state])
        after = []
        for index in np.flatnonzero(~automaton.ban_QV[state, :-1]):
            to = (met | int(automaton.met_QV[state, index]), int(automaton.next_QV[state, index]))
            after.append(int(automaton.need_MQ[to]))
            if to not in seen:
                seen.add(to)
                queue.append(to)
        assert tokens_needed == 0 or min(after) == tokens_needed - 1
    assert len(seen) > 20


def test_phrases_that_cannot_be_spelled_are_unsatisfiable() -> None:
    three = spelling([(0,), (1,), (2,)], [True, True, False])
    assert make_phrases([[(0, 2)]], [], three).tokens_needed([]) == NEVER
    assert make_phrases([[(0, 1)]], [(1,)], three).tokens_needed([]) == NEVER
    assert make_phrases([], [(1,)], three).tokens_needed([1]) is None


@settings(max_examples=200, deadline=None)
@given(
    vocabularies, phrases, phrases, st.lists(st.integers(0, 5), max_size=6), st.lists(letters, max_size=2).map(tuple)
)
def test_the_end_token_may_have_letters(
    tokens: list[Letters], require: list[Letters], forbid: list[Letters], ids: list[int], end: Letters
) -> None:
    ids = [index % len(tokens) for index in ids]
    automaton = make_phrases([[x] for x in require], forbid, spelling(tokens, end=end))
    text = letters_of(tokens, ids) + end
    may_end = all(occurs(phrase, text) for phrase in require) and not any(occurs(phrase, text) for phrase in forbid)
    assert (automaton.tokens_needed(ids) == 0) == may_end


@settings(max_examples=300, deadline=None)
@given(vocabularies, phrases, phrases, st.lists(st.integers(0, 5), max_size=8))
def test_the_first_stop_string_is_found(
    tokens: list[Letters], stop: list[Letters], forbid: list[Letters], ids: list[int]
) -> None:
    ids = [index % len(tokens) for index in ids]
    automaton = make_phrases([], forbid, spelling(tokens), stop)
    text = letters_of(tokens, ids)
    ends = [(start + len(s), start) for s in stop for start in range(len(text)) if text[start : start + len(s)] == s]
    lengths = [len(letters_of(tokens, ids[:n])) for n in range(len(ids) + 1)]
    if not ends:
        assert automaton.find_stop(ids) is None
        certain = automaton.tokens_certain(ids)
        held_back = max((n for s in stop for n in range(len(s)) if text[len(text) - n :] == s[:n]), default=0)
        assert certain == sum(length <= len(text) - held_back for length in lengths[1:])
        return
    end, start = min(ends)
    assert automaton.find_stop(ids) == (
        next(n for n, length in enumerate(lengths) if length >= end),
        sum(length < start for length in lengths[:-1]),
    )


@settings(max_examples=150, deadline=None)
@given(vocabularies, phrases, phrases, phrases, st.lists(st.booleans(), min_size=6, max_size=6))
def test_tokens_needed_with_alternatives_and_stop_strings(
    tokens: list[Letters], require: list[Letters], either: list[Letters], stop: list[Letters], usable: list[bool]
) -> None:
    automaton = make_phrases([[x] for x in require] + [either] * bool(either), [], spelling(tokens, usable), stop)
    needed = automaton.tokens_needed([])
    allowed = [index for index in range(len(tokens)) if usable[index]]
    for length in range(5):
        possible = False
        for ids in product(allowed, repeat=length):
            text = letters_of(tokens, list(ids))
            met = all(occurs(x, text) for x in require) and (not either or any(occurs(x, text) for x in either))
            stop_position = automaton.find_stop(ids)
            possible = possible or (met and (stop_position is None or stop_position[0] == length))
        assert possible == (needed == length) or needed < length
        if possible:
            break


def test_work_of_the_shortest_paths_is_linear_in_the_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search visits every state once, however long the path is."""
    work: list[int] = []

    def counted(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def call(*args: Any, **options: Any) -> np.ndarray:
            result = function(*args, **options)
            work.append(result.size)
            return result

        return call

    for name in ("full", "repeat", "unique"):  # every round of the search uses some of them
        monkeypatch.setattr(np, name, counted(getattr(np, name)))
    one = spelling([(0,), (1,)])

    def cost(size: int) -> int:
        work.clear()
        assert make_phrases([[(0,) * size]], [], one).tokens_needed([]) == size
        return sum(work)

    assert cost(800) < 2.5 * cost(400)
