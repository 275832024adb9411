"""Any combination of prefix, required and forbidden phrases and length limits is satisfied."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kit.decoding import LETTERS, NAMES, language_model, names, run_of, seeds, sources, trained, words
from regard.decode.constraints import PhraseConstraint, Prefix
from regard.decode.hypothesis import Hypothesis
from regard.decode.phrases import Spelling, is_combining, make_phrases
from regard.decode.request import Options, Request
from regard.decode.search_inputs import SearchInput
from regard.decode.torch_engine import generate, score
from regard.errors import UserError
from regard.run import Run

STRATEGIES: list[dict[str, object]] = [
    {},
    {"beam": 3, "nbest": 2},
    {"sample": True},
    {"beam": 4, "groups": 2},
    {"mbr": 3, "utility": "exact"},
]


ALPHABETS = {"nfd": "eéèaà가각나"}  # letters with diacritics and Hangul syllables


def contains(phrase: str, text: str, scheme: str) -> bool:
    if scheme == "nfd":  # mark character boundaries; a diacritic belongs to the preceding letter
        phrase, text = ("".join(c if is_combining(c) else f"|{c}" for c in x) + "|" for x in (phrase, text))
    return f" {phrase} " in f" {text} " if scheme == "space" else phrase in text


def random_case(rng: random.Random, scheme: str) -> tuple[Request, dict[str, object]]:
    letters = ALPHABETS.get(scheme, LETTERS)

    def phrase(longest: int) -> str:
        return (" " if scheme == "space" else "").join(rng.choices(letters, k=rng.randint(1, longest)))

    constraints = Request(
        sources(rng.randrange(10**6), 1)[0],
        prefix=phrase(3) if rng.random() < 0.5 else "",
        require=tuple(phrase(3) for _ in range(rng.randint(0, 2))),
        forbid=tuple(phrase(3) for _ in range(rng.randint(0, 2))),
    )
    options = {**rng.choice(STRATEGIES), "max_length": rng.choice([9, 12, 20])}
    if rng.random() < 0.3:
        options["min_length"] = rng.randint(1, 6)
    if rng.random() < 0.3:
        options["repetition_penalty"] = 1.5
    return constraints, options


def check(request: Request, options: dict[str, object], scheme: str, hypothesis: Hypothesis) -> None:
    text = hypothesis.text
    assert text.startswith(request.prefix)
    assert all(contains(phrase, text, scheme) for (phrase,) in request.require), (request, options, text)
    assert not any(contains(phrase, text, scheme) for phrase in request.forbid), (request, options, text)
    assert options.get("min_length", 0) <= len(hypothesis.ids) - 1 <= options["max_length"]


@pytest.mark.parametrize("scheme", ["char", "space", "bpe:290", "nfd"])
@pytest.mark.parametrize("name", NAMES)
def test_random_constraints_are_satisfied(name: str, scheme: str) -> None:
    """About a thousand cases: 84 for each of three models and four vocabularies."""
    rng = random.Random(f"{name} {scheme}")
    outcomes: Counter[str] = Counter()
    for _ in range(84):
        request, options = random_case(rng, scheme)
        run = run_of(name, rng.randrange(4), scheme, ALPHABETS.get(scheme, LETTERS))
        (row,) = generate(run, [request], Options.of(**options))
        reason = row[0].flags.get("unsatisfied", "")
        if any(word in reason for word in ("require", "prefix")):
            outcomes["contradiction"] += 1
            continue
        if reason:
            assert request.forbid and options.get("min_length")  # no allowed token before the minimum length
            outcomes["unsatisfied"] += 1
            continue
        for hypothesis in row:
            check(request, options, scheme, hypothesis)
        outcomes["met"] += 1
    assert outcomes["met"] >= 50 and outcomes["unsatisfied"] <= 2, outcomes


@pytest.mark.parametrize("name", NAMES)
def test_requiring_a_phrase_of_the_output_does_not_lower_its_score(name: str) -> None:
    run = trained(name)
    texts = sources(7, 12, 6)
    plain = [row[0] for row in generate(run, texts, Options(beam=4))]
    constraints = [
        Request(s, require=(h.text[len(h.text) // 2 :][:2],)) for s, h in zip(texts, plain, strict=True) if h.text
    ]
    steered = [row[0] for row in generate(run, constraints, Options(beam=4))]
    # Narrow beam searches may differ, but the constrained one is rarely worse.
    pairs = zip(steered, (h for h in plain if h.text), strict=True)
    assert sum(a.normalized >= b.normalized - 1e-5 for a, b in pairs) >= len(constraints) - 1


@settings(max_examples=30, deadline=None, derandomize=True)
@given(names, seeds, words, st.sampled_from(["ab", "bb", "ba,aa", "aba"]), st.sampled_from(["", "bbb", "aab"]))
def test_wide_beam_finds_the_best_output_under_constraints(
    name: str, seed: int, source: str, require: str, forbid: str
) -> None:
    required = require.split(",")
    forbidden = [forbid] if forbid else []
    run = run_of(name, seed, "char", "ab")
    texts = ["".join(letters) for length in range(6) for letters in product("ab", repeat=length)]
    texts = [t for t in texts if all(w in t for w in required) and not any(w in t for w in forbidden)]
    best_value = max(s.score / len(s.tokens) for s in score(run, [(source, text) for text in texts]))
    options = Options(beam=100, max_length=5, require=tuple(required), forbid=tuple(forbidden))
    (hypothesis,) = next(generate(run, [source], options))
    assert hypothesis.text in texts
    assert hypothesis.normalized == pytest.approx(best_value, abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocked_ngrams_do_not_occur_twice(strategy: dict[str, object], size: int) -> None:
    for name in NAMES:
        for row in generate(
            run_of(name, 3), sources(5, 6), Options.of(no_repeat_ngram=size, max_length=18, **strategy)
        ):
            for h in row:
                grams = [h.ids[i : i + size] for i in range(len(h.ids) - size)]
                assert len(set(grams)) == len(grams)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ngram_blocking_applies_to_required_phrases_and_prefixes(strategy: dict[str, object]) -> None:
    for name in NAMES:
        for phrase, size, possible in (("aba", 1, False), ("abab", 2, False), ("abca", 2, True)):
            options = Options.of(no_repeat_ngram=size, require=(phrase,), max_length=9, **strategy)
            for h in (h for row in generate(run_of(name, 3), sources(5, 4), options) for h in row):
                grams = [h.ids[i : i + size] for i in range(len(h.ids) - size)]
                assert len(set(grams)) == len(grams)
                assert ("unsatisfied" in h.flags) == (phrase not in h.text) and (possible or not h.text)
        options = Options.of(no_repeat_ngram=2, max_length=9, **strategy)
        (row,) = generate(run_of(name, 3), [Request("abc", prefix="fabab")], options)
        assert "prefix 'fabab': 'ab' occurs twice" in row[0].flags["unsatisfied"]


def every_output(run: Run, source: str, longest: int, options: Options) -> dict[str, list[tuple[float, float]]]:
    """All possible outputs over the letters a and b: output text -> its possible (value, score) pairs.

    An output ends with the end token, at the length limit (continuations only), or when a stop string is complete. Text
    and score exclude the stop string.
    """
    outputs: dict[str, list[tuple[float, float]]] = {}
    texts = ["".join(letters) for length in range(longest + 1) for letters in product("ab", repeat=length)]
    for text, scored in zip(texts, score(run, [(source, text) for text in texts]), strict=True):
        ends = [(at + len(stop), at) for stop in options.stop if (at := text.find(stop)) >= 0]
        end, length = min(ends, default=(None, len(text)))
        if end is not None and end < len(text):
            continue  # the search would have stopped earlier
        ended = end is None and (run.task.seq2seq or len(text) < longest)
        numbers = scored.token_scores if ended else scored.token_scores[:-1]
        grams = [text[i : i + options.no_repeat_ngram] for i in range(len(text) - options.no_repeat_ngram + 1)]
        required = all(x in text[:length] for x in options.require)
        required = required and (not options.require_any or any(x in text[:length] for x in options.require_any))
        allowed = required and not any(x in text for x in options.forbid) and text[:length].startswith(options.prefix)
        if allowed and length >= options.min_length and (not options.no_repeat_ngram or len(set(grams)) == len(grams)):
            value = sum(numbers) / max(1, len(numbers))
            outputs.setdefault(text[:length], []).append((value, sum(numbers[: length + ended])))
    return outputs


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
def test_full_width_beam_equals_enumeration(name: str, seed: int, source: str, constraints: dict[str, Any]) -> None:
    run = language_model("rotary", seed, letters="ab") if name == "language model" else run_of(name, seed, "char", "ab")
    source = source.translate(str.maketrans("cdef", "abab")) if name == "language model" else source
    options = Options.of(beam=150, exact=True, max_length=5, **constraints)
    expected = every_output(run, source, 5, options)
    try:
        (hypothesis,) = next(generate(run, [source], options))
    except UserError as error:  # the constraints contradict each other or a stop string
        assert not expected or "a part of one begins the other" in str(error)
        return
    if not expected:
        assert "unsatisfied" in hypothesis.flags
        return
    best = max(value for row in expected.values() for value, _ in row)
    value, total = max(expected[hypothesis.text])
    assert value == pytest.approx(best, abs=1e-5)
    assert hypothesis.score == pytest.approx(total, abs=1e-5) == sum(hypothesis.token_scores)
    assert ("stopped" in hypothesis.flags) == (hypothesis.ids[-1:] != (3,) and "max_length" not in hypothesis.flags)


@pytest.mark.parametrize("scheme", ["char", "space", "bpe:290"])
def test_one_of_several_alternatives_satisfies_a_requirement(scheme: str) -> None:
    def spell(text: str) -> str:
        return " ".join(text) if scheme == "space" else text

    forms = tuple(map(spell, ("fade", "face", "fad")))
    for name in NAMES:
        run = run_of(name, 2, scheme)
        for strategy in STRATEGIES:
            options = Options.of(max_length=14, **strategy)
            either = Request("cab", require=[forms, spell("bb")])
            for h in next(generate(run, [either], options)):
                assert any(contains(form, h.text, scheme) for form in forms) and contains(spell("bb"), h.text, scheme)
            as_options = Options.of(max_length=14, require=[spell("bb")], require_any=forms, **strategy)
            assert next(generate(run, ["cab"], as_options)) == next(generate(run, [either], options))
        single = [next(generate(run, [Request("cab", require=[f])], Options(beam=40, max_length=8)))[0] for f in forms]
        (any_of,) = next(generate(run, [Request("cab", require=[forms])], Options(beam=40, max_length=8)))
        assert any_of.normalized >= max(h.normalized for h in single) - 1e-5


def test_redistribution_starts_and_completes_a_phrase() -> None:
    spelling = Spelling([(index,) for index in range(9)], [index > 3 for index in range(9)], 3)
    item = SearchInput(((4, 3),), 20, phrases=make_phrases([[(4, 5, 6)]], [], spelling))
    rule = PhraseConstraint([item], 3, 9, torch.device("cpu"), redistribute=True)
    here, alive = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    prefers_end = torch.tensor([[1.0, 1, 1, 50, 1, 1, 1, 1, 9]]).log_softmax(-1)
    value = prefers_end.clone()
    rule.apply(value, prefers_end, 0, alive)
    assert value[0, 3] == -torch.inf and value.argmax() == 4  # the end's probability moves to the phrase
    assert value[0, 4].exp() == pytest.approx(float(prefers_end[0, [3, 4]].exp().sum()), rel=1e-5)
    rule.advance(here, torch.tensor([4]))
    prefers_other = torch.tensor([[1.0, 1, 1, 1, 1, 1, 1, 1, 50]]).log_softmax(-1)
    value = prefers_other.clone()
    rule.apply(value, prefers_other, 1, alive)
    assert (value > -torch.inf).nonzero().tolist() == [[0, 5]]


def test_repetition_penalty_reduces_repetition() -> None:
    for name in NAMES:
        shares = []
        for penalty in (1.0, 1.5, 1e9):
            rows = generate(run_of(name, 5), sources(6, 20), Options(repetition_penalty=penalty, max_length=15))
            ids = [row[0].ids[:-1] for row in rows]
            shares.append(sum(len(set(row)) for row in ids) / max(1, sum(map(len, ids))))
        assert shares[0] <= shares[1] + 0.05 and shares[1] <= shares[2] + 0.05 and shares[2] > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_length_ratios_limit_the_output_length(name: str) -> None:
    texts = sources(8, 10)
    for text, (h, *_) in zip(
        texts, generate(run_of(name, 1), texts, Options(beam=2, min_ratio=0.5, max_ratio=1.5)), strict=True
    ):
        assert len(text) / 2 <= len(h.ids) - 1 <= 1.5 * len(text) + 1


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
@pytest.mark.parametrize("name", NAMES)
def test_alternatives_are_the_best_tokens_at_a_position(name: str, strategy: dict[str, object]) -> None:
    run = run_of(name, 1)
    source = "fadebc"
    strategy = {**strategy, "nbest": 1}
    (plain,) = next(generate(run, [source], Options.of(max_length=10, min_length=4, **strategy)))
    row = next(
        generate(run, [source], Options.of(alternatives=4, alternatives_at=2, max_length=10, min_length=4, **strategy))
    )
    assert len(row) == 4 and len({h.ids[2] for h in row}) == 4
    assert {h.ids[:2] for h in row} == {plain.ids[:2]}
    at = [h.token_scores[2] for h in row]
    assert at == sorted(at, reverse=True)
    if strategy == {"nbest": 1}:  # greedy only: a beam with a fixed prefix may find a better output
        assert plain.ids in [h.ids for h in row]


def test_alternatives_after_a_prefix_and_beyond_the_end() -> None:
    run = trained("rnn-luong")
    row = next(generate(run, ["cab"], Options(prefix="b", alternatives=3, beam=2)))
    assert len({h.text[1:2] for h in row}) == 3 and all(h.text.startswith("b") for h in row)
    row = next(generate(run, ["cab"], Options(alternatives=3, alternatives_at=50)))
    assert row[0].text == "baac" and all(h.text.startswith("baac") for h in row)
    assert [len(h.text) > 4 for h in row] == [False, True, True]


def test_tokens_that_may_not_follow_a_prefix_are_those_of_the_input() -> None:
    items = [SearchInput(((4, 3),), 9, prefix=(4,), not_after_prefix=tokens) for tokens in ((5, 6), (), (7,))]
    value = torch.zeros(6, 9)
    Prefix(items, torch.device("cpu")).apply(value, value.clone(), 1, torch.arange(3))
    assert [row.isinf().nonzero().flatten().tolist() for row in value] == [[5, 6], [5, 6], [], [], [7], [7]]
