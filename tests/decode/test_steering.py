"""Promise 6: any combination of prefix, required and forbidden phrases and length limits is satisfied."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kit.decoding import LETTERS, NAMES, language_model, names, run_of, seeds, sources, trained, words
from regard.decode.constraints import PhraseConstraint, SearchInput, Spelling, is_combining, make_phrases
from regard.decode.engine import generate
from regard.decode.forced import score
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import Options, Request
from regard.errors import UserError
from regard.run import Run

STRATEGIES: list[dict[str, object]] = [
    {},
    {"beam": 3, "nbest": 2},
    {"sample": True},
    {"beam": 4, "groups": 2},
    {"mbr": 3, "utility": "exact"},
]


ALPHABETS = {"nfd": "eéèaà가각나"}  # characters with combining parts: e with diacritics, and syllables


def contains(phrase: str, text: str, scheme: str) -> bool:
    if scheme == "nfd":  # with a bar before every character; a diacritic belongs to the character before it
        phrase, text = ("".join(c if is_combining(c) else f"|{c}" for c in x) + "|" for x in (phrase, text))
    return f" {phrase} " in f" {text} " if scheme == "space" else phrase in text


def case(rng: random.Random, scheme: str) -> tuple[Request, dict[str, object]]:
    letters = ALPHABETS.get(scheme, LETTERS)

    def phrase(longest: int) -> str:
        return (" " if scheme == "space" else "").join(rng.choices(letters, k=rng.randint(1, longest)))

    constraints = Request(
        sources(rng.randrange(10**6), 1)[0],
        prefix=phrase(3) if rng.random() < 0.5 else "",
        require=tuple(phrase(3) for _ in range(rng.randint(0, 2))),
        forbid=tuple(phrase(3) for _ in range(rng.randint(0, 2))),
    )
    chosen = {**rng.choice(STRATEGIES), "max_length": rng.choice([9, 12, 20])}
    if rng.random() < 0.3:
        chosen["min_length"] = rng.randint(1, 6)
    if rng.random() < 0.3:
        chosen["repetition_penalty"] = 1.5
    return constraints, chosen


def check(request: Request, chosen: dict[str, object], scheme: str, hypothesis: Hypothesis) -> None:
    text = hypothesis.text
    assert text.startswith(request.prefix)
    assert all(contains(phrase, text, scheme) for (phrase,) in request.require), (request, chosen, text)
    assert not any(contains(phrase, text, scheme) for phrase in request.forbid), (request, chosen, text)
    assert chosen.get("min_length", 0) <= len(hypothesis.ids) - 1 <= chosen["max_length"]


@pytest.mark.parametrize("scheme", ["char", "space", "bpe:290", "nfd"])
@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_random_constraints(name: str, scheme: str) -> None:
    """84 cases for each of three models and four vocabularies. Contradictions are flagged without a search."""
    rng = random.Random(f"{name} {scheme}")
    outcomes: Counter[str] = Counter()
    for _ in range(84):
        request, chosen = case(rng, scheme)
        run = run_of(name, rng.randrange(4), scheme, ALPHABETS.get(scheme, LETTERS))
        (row,) = generate(run, [request], Options.of(**chosen))
        reason = row[0].flags.get("unsatisfied", "")
        if any(word in reason for word in ("require", "prefix")):
            outcomes["contradiction"] += 1
            continue
        if reason:
            assert request.forbid and chosen.get("min_length")  # no allowed token before the minimum length
            outcomes["unsatisfied"] += 1
            continue
        for hypothesis in row:
            check(request, chosen, scheme, hypothesis)
        outcomes["met"] += 1
    assert outcomes["met"] >= 50 and outcomes["unsatisfied"] <= 2, outcomes


@pytest.mark.parametrize("name", NAMES)
def test_requiring_a_phrase_of_the_output_changes_nothing(name: str) -> None:
    run, texts = trained(name), sources(7, 12, 6)
    plain = [row[0] for row in generate(run, texts, Options(beam=4))]
    constraints = [
        Request(s, require=(h.text[len(h.text) // 2 :][:2],)) for s, h in zip(texts, plain, strict=True) if h.text
    ]
    steered = [row[0] for row in generate(run, constraints, Options(beam=4))]
    # Two narrow beam searches may differ, but the steered one is hardly ever worse.
    pairs = zip(steered, (h for h in plain if h.text), strict=True)
    assert sum(a.normalized >= b.normalized - 1e-5 for a, b in pairs) >= len(constraints) - 1


@settings(max_examples=30, deadline=None, derandomize=True)
@given(names, seeds, words, st.sampled_from(["ab", "bb", "ba,aa", "aba"]), st.sampled_from(["", "bbb", "aab"]))
def test_a_wide_beam_finds_the_best_output_under_constraints(
    name: str, seed: int, source: str, require: str, forbid: str
) -> None:
    wanted, unwanted = require.split(","), [forbid] if forbid else []
    run = run_of(name, seed, "char", "ab")
    texts = ["".join(letters) for length in range(6) for letters in product("ab", repeat=length)]
    texts = [t for t in texts if all(w in t for w in wanted) and not any(w in t for w in unwanted)]
    truth = max(s.score / len(s.tokens) for s in score(run, [(source, text) for text in texts]))
    options = Options(beam=100, max_length=5, require=tuple(wanted), forbid=tuple(unwanted))
    (found,) = next(generate(run, [source], options))
    assert found.text in texts
    assert found.normalized == pytest.approx(truth, abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("chosen", STRATEGIES)
def test_no_ngram_occurs_twice(chosen: dict[str, object], size: int) -> None:
    for name in NAMES:
        for row in generate(run_of(name, 3), sources(5, 6), Options.of(no_repeat_ngram=size, max_length=18, **chosen)):
            for h in row:
                grams = [h.ids[i : i + size] for i in range(len(h.ids) - size)]
                assert len(set(grams)) == len(grams)


@pytest.mark.parametrize("chosen", STRATEGIES)
def test_ngram_blocking_applies_to_required_phrases_and_prefixes(chosen: dict[str, object]) -> None:
    for name in NAMES:
        for phrase, size, possible in (("aba", 1, False), ("abab", 2, False), ("abca", 2, True)):
            options = Options.of(no_repeat_ngram=size, require=(phrase,), max_length=9, **chosen)
            for h in (h for row in generate(run_of(name, 3), sources(5, 4), options) for h in row):
                grams = [h.ids[i : i + size] for i in range(len(h.ids) - size)]
                assert len(set(grams)) == len(grams)
                assert ("unsatisfied" in h.flags) == (phrase not in h.text) and (possible or not h.text)
        options = Options.of(no_repeat_ngram=2, max_length=9, **chosen)
        (row,) = generate(run_of(name, 3), [Request("abc", prefix="fabab")], options)
        assert "prefix 'fabab': 'ab' occurs twice" in row[0].flags["unsatisfied"]


def every_output(run: Run, source: str, longest: int, options: Options) -> dict[str, list[tuple[float, float]]]:
    """The possible output texts of the letters a and b, each with its possible (value, score) pairs.

    By the definition: an output ends with its end token, or at the limit if it is a continuation, or when a stop string
    is complete, of which neither text nor score are kept.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    texts = ["".join(letters) for length in range(longest + 1) for letters in product("ab", repeat=length)]
    for text, scored in zip(texts, score(run, [(source, text) for text in texts]), strict=True):
        ends = [(at + len(stop), at) for stop in options.stop if (at := text.find(stop)) >= 0]
        end, kept = min(ends, default=(None, len(text)))
        if end is not None and end < len(text):
            continue  # continues after a stop string
        ended = end is None and (run.task.seq2seq or len(text) < longest)
        numbers = scored.token_scores if ended else scored.token_scores[:-1]
        grams = [text[i : i + options.no_repeat_ngram] for i in range(len(text) - options.no_repeat_ngram + 1)]
        required = all(x in text[:kept] for x in options.require)
        required = required and (not options.require_any or any(x in text[:kept] for x in options.require_any))
        allowed = required and not any(x in text for x in options.forbid) and text[:kept].startswith(options.prefix)
        if allowed and kept >= options.min_length and (not options.no_repeat_ngram or len(set(grams)) == len(grams)):
            value = sum(numbers) / max(1, len(numbers))
            found.setdefault(text[:kept], []).append((value, sum(numbers[: kept + ended])))
    return found


short = st.text("ab", min_size=1, max_size=3)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sampled_from([*NAMES, "language model"]), st.integers(0, 3), words,
    st.fixed_dictionaries({}, optional={
        "require": st.lists(short, max_size=2), "require_any": st.lists(short, min_size=1, max_size=3),
        "forbid": st.lists(short, max_size=2), "stop": st.lists(short, max_size=2), "prefix": short,
        "no_repeat_ngram": st.integers(1, 3), "min_length": st.integers(0, 3),
    }),
)  # fmt: skip
def test_a_beam_as_wide_as_everything_is_enumeration(name: str, seed: int, source: str, chosen: dict[str, Any]) -> None:
    run = language_model("rotary", seed, letters="ab") if name == "language model" else run_of(name, seed, "char", "ab")
    source = source.translate(str.maketrans("cdef", "abab")) if name == "language model" else source
    options = Options.of(beam=150, exact=True, max_length=5, **chosen)
    truth = every_output(run, source, 5, options)
    try:
        (found,) = next(generate(run, [source], options))
    except UserError as error:  # impossible, or cut off with a stop string
        assert not truth or "a part of one begins the other" in str(error)
        return
    if not truth:
        assert "unsatisfied" in found.flags
        return
    best = max(value for row in truth.values() for value, _ in row)
    value, total = max(truth[found.text])
    assert value == pytest.approx(best, abs=1e-5)
    assert found.score == pytest.approx(total, abs=1e-5) == sum(found.token_scores)
    assert ("stopped" in found.flags) == (found.ids[-1:] != (3,) and "max_length" not in found.flags)


@pytest.mark.parametrize("scheme", ["char", "space", "bpe:290"])
def test_one_of_several_alternatives_is_enough(scheme: str) -> None:
    def spelled(text: str) -> str:
        return " ".join(text) if scheme == "space" else text

    forms = tuple(map(spelled, ("fade", "face", "fad")))
    for name in NAMES:
        run = run_of(name, 2, scheme)
        for chosen in STRATEGIES:
            options = Options.of(max_length=14, **chosen)
            either = Request("cab", require=[forms, spelled("bb")])
            for h in next(generate(run, [either], options)):
                assert any(contains(form, h.text, scheme) for form in forms) and contains(spelled("bb"), h.text, scheme)
            same_wish = Options.of(max_length=14, require=[spelled("bb")], require_any=forms, **chosen)
            assert next(generate(run, ["cab"], same_wish)) == next(generate(run, [either], options))
        alone = [next(generate(run, [Request("cab", require=[f])], Options(beam=40, max_length=8)))[0] for f in forms]
        (any_of,) = next(generate(run, [Request("cab", require=[forms])], Options(beam=40, max_length=8)))
        assert any_of.normalized >= max(h.normalized for h in alone) - 1e-5


def test_redistribution_begins_a_phrase_and_completes_it() -> None:
    spelling = Spelling([(index,) for index in range(9)], [index > 3 for index in range(9)], 3)
    item = SearchInput(((4, 3),), 20, phrases=make_phrases([[(4, 5, 6)]], [], spelling))
    rule = PhraseConstraint([item], 3, 9, torch.device("cpu"), redistribute=True)
    here, alive = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    likes_end = torch.tensor([[1.0, 1, 1, 50, 1, 1, 1, 1, 9]]).log_softmax(-1)
    value = likes_end.clone()
    rule.apply(value, likes_end, 0, alive)
    assert value[0, 3] == -torch.inf and value.argmax() == 4  # the probability of the end has moved to the phrase
    assert value[0, 4].exp() == pytest.approx(float(likes_end[0, [3, 4]].exp().sum()), rel=1e-5)
    rule.advance(here, torch.tensor([4]))
    goes_on = torch.tensor([[1.0, 1, 1, 1, 1, 1, 1, 1, 50]]).log_softmax(-1)
    value = goes_on.clone()
    rule.apply(value, goes_on, 1, alive)
    assert (value > -torch.inf).nonzero().tolist() == [[0, 5]]


def test_a_repetition_penalty_reduces_repetition() -> None:
    for name in NAMES:
        shares = []
        for penalty in (1.0, 1.5, 1e9):
            rows = generate(run_of(name, 5), sources(6, 20), Options(repetition_penalty=penalty, max_length=15))
            ids = [row[0].ids[:-1] for row in rows]
            shares.append(sum(len(set(row)) for row in ids) / max(1, sum(map(len, ids))))
        assert shares[0] <= shares[1] + 0.05 and shares[1] <= shares[2] + 0.05 and shares[2] > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_length_ratios(name: str) -> None:
    texts = sources(8, 10)
    for text, (h, *_) in zip(
        texts, generate(run_of(name, 1), texts, Options(beam=2, min_ratio=0.5, max_ratio=1.5)), strict=True
    ):
        assert len(text) / 2 <= len(h.ids) - 1 <= 1.5 * len(text) + 1


@pytest.mark.parametrize("chosen", STRATEGIES[:3])
@pytest.mark.parametrize("name", NAMES)
def test_alternatives_are_the_best_tokens_at_a_position(name: str, chosen: dict[str, object]) -> None:
    run, source = run_of(name, 1), "fadebc"
    chosen = {**chosen, "nbest": 1}
    (plain,) = next(generate(run, [source], Options.of(max_length=10, min_length=4, **chosen)))
    row = next(
        generate(run, [source], Options.of(alternatives=4, alternatives_at=2, max_length=10, min_length=4, **chosen))
    )
    assert len(row) == 4 and len({h.ids[2] for h in row}) == 4
    assert {h.ids[:2] for h in row} == {plain.ids[:2]}
    at = [h.token_scores[2] for h in row]
    assert at == sorted(at, reverse=True)
    if chosen == {"nbest": 1}:  # greedy; a beam with a fixed beginning may find a better output
        assert plain.ids in [h.ids for h in row]


def test_alternatives_after_a_prefix_and_past_the_end() -> None:
    run = trained("rnn-luong")
    row = next(generate(run, ["cab"], Options(prefix="b", alternatives=3, beam=2)))
    assert len({h.text[1:2] for h in row}) == 3 and all(h.text.startswith("b") for h in row)
    row = next(generate(run, ["cab"], Options(alternatives=3, alternatives_at=50)))
    assert row[0].text == "baac" and all(h.text.startswith("baac") for h in row)
    assert [len(h.text) > 4 for h in row] == [False, True, True]
