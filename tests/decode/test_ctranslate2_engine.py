"""The CTranslate2 engine gives the outputs, scores and flags of the torch engine; no option is ignored."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.ct2 import ids_of, random_run, tokenizer, words
from kit.families import build, shrunk
from kit.toy import call
from regard.data.statistics import OutputLimits, Statistics
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import ENGINES, Options, Request
from regard.decode.torch_engine import TorchEngine
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Codec, Example

pytest.importorskip("ctranslate2")
from regard.decode.ctranslate2 import CTranslate2Engine

STACKS: dict[str, dict[str, Any]] = {
    "rotary": {"position": "rotary", "norm_at": "pre"},
    "sinusoid": {"position": "sinusoid"},
    "grouped-query": {"position": "learned", "norm_at": "pre", "kv_heads": 2},
    "buckets": {"position": "bucket", "norm": "rms", "gated": True, "norm_at": "pre", "score": "dot", "head_width": 3},
    "no-position": {"position": "none", "kv_heads": 1},
}


@pytest.fixture(scope="module")
def run() -> Run:
    return random_run(STACKS["rotary"], end=3.0)


def assert_same(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    """Assert that outputs, scores and flags are equal."""
    assert ids_of(ours) == ids_of(theirs)
    for a, b in zip((h for row in ours for h in row), (h for row in theirs for h in row), strict=True):
        assert (a.text, a.tokens) == (b.text, b.tokens) and a.flags.keys() == b.flags.keys()
        assert b.token_scores == pytest.approx(a.token_scores, abs=1e-4)
        assert (b.score, b.normalized) == pytest.approx((a.score, a.normalized), abs=1e-3)
        assert sum(b.token_scores) == pytest.approx(b.score)


def decode_with_both(run: Run, inputs: list[Any], **options: Any) -> list[list[Hypothesis]]:
    """Decode with both engines, assert that the outputs are equal, and return them."""
    settings = Options.of(**options)
    ours = TorchEngine(run, settings)(inputs)
    theirs = CTranslate2Engine(run, settings)(inputs)
    assert_same(ours, theirs)
    return theirs


def test_flags_have_the_limits_of_the_run(run: Run) -> None:
    inputs = words(20)
    for limits, flagged in ((OutputLimits(max_ratio=0), True), (OutputLimits(max_ratio=1e6, min_ratio=0), False)):
        limited = dataclasses.replace(run, statistics=Statistics(limits=limits))
        rows = decode_with_both(limited, inputs, min_length=11, max_length=12)
        assert all(("length_ratio" in row[0].flags) == flagged for row in rows)


@pytest.mark.parametrize("name", STACKS)
def test_greedy_outputs_are_equal(name):
    rows = []
    for seed in range(4):
        rows += decode_with_both(random_run(STACKS[name], end=2.0, seed=seed), ["", *words(20), " ", "zz", "ab" * 30])
    assert [i for i, row in enumerate(rows) if "empty" in row[0].flags] == [
        x + 24 * n for n in range(4) for x in (0, 21)
    ]
    truncations = sum("max_length" in row[0].flags for row in rows)
    assert 5 < truncations < 70 and len({row[0].ids for row in rows}) > 20


@pytest.mark.parametrize("beam", [2, 5])
@pytest.mark.parametrize("penalty", [0.6, 1.0])
@pytest.mark.parametrize(("name", "seed"), [("rotary", 2), ("sinusoid", 0)])
def test_beam_outputs_are_mostly_equal(name, seed, beam, penalty):
    """The two beam searches have different stopping criteria, so some outputs of random models differ."""
    run = random_run(STACKS[name], end=4.0, seed=seed)
    texts = words(40)
    options = Options(beam=beam, nbest=beam, length_penalty=penalty)
    pairs = list(zip(TorchEngine(run, options)(texts), CTranslate2Engine(run, options)(texts), strict=True))
    ended = [(a, b) for a, b in pairs if not any("max_length" in h.flags for h in (*a, *b))]
    alike = [(a[:1], b[:1]) for a, b in ended if a[0].ids == b[0].ids]
    assert len(ended) > 30 and len(alike) > 0.7 * len(ended)
    assert_same([a for a, _ in alike], [b for _, b in alike])
    for ours, theirs in pairs:
        assert len(theirs) <= beam and all(len(h.ids) <= 3 * 12 + 51 for h in theirs)
        assert len(set(ids_of([theirs])[0])) == len(theirs)
        assert [h.normalized for h in theirs] == sorted((h.normalized for h in theirs), reverse=True)
        assert ours[0].normalized > theirs[0].normalized - 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 5},
        {"max_length": 1},
        {"min_length": 7},
        {"min_ratio": 1.0, "max_ratio": 1.0},
        {"max_ratio": 0.4, "min_length": 1},
        {"no_repeat_ngram": 2},
        {"no_repeat_ngram": 1},
        {"prefix": "ab"},
        {"prefix": "ab", "max_length": 2},
        {"prefix": "a", "min_length": 6, "max_length": 8},
        {"max_source": 6},
        {"batch_tokens": 1},
        {"batch_tokens": 40, "max_length": 20},
    ],
    ids=str,
)
def test_steering_options_have_the_same_effect(options, run):
    decode_with_both(run, words(30), **options)


def test_requests_may_have_different_prefixes(run):
    inputs = [Request(word, prefix=word[:count]) for count, word in enumerate(words(12, longest=4))]
    rows = decode_with_both(run, [*inputs, Request("abc", prefix="zz"), Request("abc", prefix="a" * 200)])
    assert "unsatisfied" in rows[-1][0].flags and "unsatisfied" in rows[-2][0].flags


def test_the_token_after_a_prefix_does_not_change_its_last_character():
    codec = Codec(tokenizer(), tokenizer("nfd", "aäeéo\u0308"))
    run = random_run(STACKS["rotary"], codec=codec, end=0.0)
    joining = [i for i in range(4, codec.target.size) if codec.target.pieces([i])[0] in "\u0301\u0308"]
    with torch.no_grad():
        run.model.output.bias[joining] += 2.0
    assert {row[0].text[0] for row in CTranslate2Engine(run, Options(max_length=3))(words(20))} & {"\u0301", "\u0308"}
    rows = decode_with_both(run, words(20), prefix="aea", max_length=7)
    assert all(row[0].text.startswith("aea") for row in rows)


def test_special_tokens_are_never_produced():
    run = random_run(STACKS["rotary"], spare=2, end=3.0, special=4.0)
    with torch.no_grad():
        run.model.output.bias[-2:] = 4.0
    rows = decode_with_both(run, words(30))
    assert {i for row in rows for i in row[0].ids} <= {3, *range(4, run.codec.target.size)}
    rows_with_unknown = decode_with_both(run, words(30), unknown=True)
    assert any(1 in row[0].ids for row in rows_with_unknown)


def test_text_that_looks_like_a_special_token_is_ordinary_text():
    codec = Codec(tokenizer("space", ["< eos >", "< pad >", "a", "<", "eos", "pad", ">"]), tokenizer())
    run = random_run(STACKS["rotary"], codec=codec, end=3.0)
    rows = decode_with_both(run, ["a < eos > a", "a a", "< pad >", "<eos>", "< feature N >"])
    assert rows[0][0].ids != rows[1][0].ids


def test_features_change_the_outputs():
    codec = Codec(tokenizer(), tokenizer(), features=("N", "PL", "a"), columns=("source", "features", "target"))
    run = random_run(STACKS["rotary"], codec=codec, end=-1.0)
    rows = decode_with_both(run, [Example("abc", None, names) for names in ("N", "PL", "N;PL", "a", "unheard", None)])
    assert len({row[0].ids for row in rows}) > 2


def test_outputs_do_not_depend_on_the_batch(run):
    texts = words(60)
    single = {text: CTranslate2Engine(run, Options(beam=3))([text])[0] for text in texts[:10]}
    shuffled = random.Random(1).sample(texts, len(texts))
    engine = CTranslate2Engine(run, Options(beam=3, batch_tokens=200), workers=2)
    for text, row in zip(shuffled, engine(shuffled), strict=True):
        if text in single:
            assert_same([single[text]], [row])
    assert engine([]) == []


def test_learned_positions_limit_the_output():
    run = random_run({"position": "learned", "max_length": 10}, end=-5.0)
    rows = decode_with_both(run, ["abcdefgha", "abcdefghab", "a"])
    assert "too_long" in rows[1][0].flags and len(rows[0][0].ids) == 10


def test_sinusoid_positions_are_limited_by_the_exported_table(monkeypatch):
    run = random_run(STACKS["sinusoid"], end=-5.0)
    monkeypatch.setattr("regard.convert.to_ctranslate2.POSITIONS", 20)
    monkeypatch.setattr("regard.decode.ctranslate2.POSITIONS", 20)
    rows = CTranslate2Engine(run, Options(max_length=100))(["a" * 19, "a" * 20])
    assert len(rows[0][0].ids) == 20 and "too_long" in rows[1][0].flags


def test_scores_are_computed_only_on_request(run):
    texts = ["", *words(20)]
    for settings in ({"beam": 3, "nbest": 3}, {"prefix": "ab"}, {"min_length": 4}, {"no_repeat_ngram": 1}, {}):
        options = Options.of(**settings)
        tokens, totals, none = (
            CTranslate2Engine(run, options, scores=kind)(texts) for kind in ("tokens", "totals", "none")
        )
        assert ids_of(tokens) == ids_of(totals) == ids_of(none)
        assert all(math.isnan(row[0].score) and not row[0].token_scores for row in none[1:])
        for a, b in zip((h for row in tokens for h in row), (h for row in totals for h in row), strict=True):
            assert (b.score, b.normalized) == pytest.approx((a.score, a.normalized), abs=1e-4)
            assert not b.token_scores or b.token_scores == a.token_scores
    assert not any(row[0].token_scores for row in totals if "max_length" not in row[0].flags)


def test_int8_scores_are_close(run):
    texts = words(40)
    ours = TorchEngine(run)(texts)
    theirs = CTranslate2Engine(run, Options(precision="int8"))(texts)
    alike = [(a[0], b[0]) for a, b in zip(ours, theirs, strict=True) if a[0].ids == b[0].ids]
    assert len(alike) > 10
    assert all(b.score == pytest.approx(a.score, abs=0.1 * len(a.ids)) for a, b in alike)
    assert any(a.score != b.score for a, b in alike)


def test_sampling_follows_seed_temperature_and_truncation(run):
    texts = words(8)

    def draw(**options: Any) -> list[list[tuple[int, ...]]]:
        return ids_of(CTranslate2Engine(run, Options.of(sample=True, max_length=6, **options))(texts))

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert [row[:1] for row in draw(temperature=0.001)] == ids_of(TorchEngine(run, Options(max_length=6))(texts))
    assert draw(top_k=1) == draw(top_p=1e-6) == ids_of(TorchEngine(run, Options(max_length=6))(texts))
    assert draw(top_k=10**6, seed=7) == draw(seed=7)
    samples = CTranslate2Engine(run, Options(sample=True, nbest=300, max_length=1))(["abc"])[0]
    assert len(samples) == 300 and len({h.ids for h in samples}) > 3
    assert all(3 in h.ids and not {0, 1, 2} & set(h.ids) for h in samples)
    with pytest.raises(UserError, match="workers"):
        CTranslate2Engine(run, Options(sample=True), workers=2)


def test_repetition_penalty_reduces_repetition(run):
    def repeats(rows: list[list[Hypothesis]]) -> int:
        return sum(len(row[0].ids) - len(set(row[0].ids)) for row in rows)

    plain, penalised = (
        CTranslate2Engine(run, Options(repetition_penalty=p, max_length=10))(words(20)) for p in (1.0, 3.0)
    )
    assert repeats(penalised) < repeats(plain) / 2


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "mbr": {"mbr": 4},
    "utility": {"mbr": 4, "utility": "bleu"},
    "weights": {"weights": (1.0,)},
    "coverage_penalty": {"beam": 2, "coverage_penalty": 0.1},
    "groups": {"beam": 2, "groups": 2},
    "diversity": {"beam": 2, "groups": 2, "diversity": 1.0},
    "exact": {"beam": 2, "exact": True},
    "min_p": {"sample": True, "min_p": 0.1},
    "require": {"require": ("a",)},
    "require_any": {"require_any": ("a", "b")},
    "forbid": {"forbid": ("a",)},
    "stop": {"stop": ("a",)},
    "top_tokens": {"top_tokens": 2},
    "alternatives": {"alternatives": 2},
    "alternatives_at": {"alternatives": 2, "alternatives_at": 1},
    "alignment": {"alignment": True},
    "alignment_heads": {"alignment": True, "alignment_heads": ((0, 0),)},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_options_are_refused(name, run):
    with pytest.raises(UserError, match=r"the engine ctranslate2 cannot do this.*use the engine (native or )?torch"):
        CTranslate2Engine(run, Options.of(**UNSUPPORTED[name]))


def test_every_option_is_supported_or_refused(run):
    supported = ENGINES["ctranslate2"].options
    assert UNSUPPORTED.keys() | supported == set(Options.model_fields) and not UNSUPPORTED.keys() & supported
    with pytest.raises(UserError, match=r"precision: bf16: goes with the engine torch.*allowed: fp32, int8"):
        CTranslate2Engine(run, Options(precision="bf16"))
    with pytest.raises(UserError, match="forbid"):
        CTranslate2Engine(run)([Request("abc", forbid=("a",))])
    with pytest.raises(UserError, match="stop"):
        CTranslate2Engine(run)([Request("abc", stop=("a",))])
    with pytest.raises(UserError, match="seed: the engine ctranslate2"):
        CTranslate2Engine(run, Options(sample=True))([Request("abc", seed=3)])
    with pytest.raises(UserError, match=r"int8: goes with the engine native or ctranslate2.*allowed: fp32, bf16"):
        TorchEngine(run, Options(precision="int8"))


@pytest.mark.parametrize("preset", ["rnn-luong", "gpt-tiny", "transformer-xl"])
def test_other_models_are_refused(preset):
    config = shrunk(preset)
    with pytest.raises(UserError, match="CTranslate2 does not support these settings"):
        CTranslate2Engine(Run(config, Codec(tokenizer(text="abcdefg")), build(config), Path("other")))


def test_temporary_files_are_removed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = CTranslate2Engine(run)
    assert not list(tmp_path.iterdir()) and engine(["abc"])[0][0].ids


def test_unusable_temporary_directory_is_reported(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(UserError, match="TMPDIR"):
        CTranslate2Engine(run)


def test_command_line_gives_the_output_of_the_torch_engine(toy):
    lines = (toy / "test.tsv").read_text() + "\n" + "a\tb\tc\td\n" + "a" * 70 + "\n"
    command = ["generate", toy / "run", "-", "--max-source", 60]
    for options in (["--beam", 2, "--nbest", 2], ["--json"], ["--beam", 3], []):
        ours, theirs = (
            call(*command, *options, *engine, stdin=lines)
            for engine in (["--engine", "torch"], ["--engine", "ctranslate2"])
        )
        assert theirs.code == 0 and ours.err == theirs.err and len(ours.lines) == len(theirs.lines)
        best: dict[str, bool] = {}  # per input: whether the best outputs are equal
        for a, b in zip(ours.lines, theirs.lines, strict=True):
            if "--json" in options:
                (own,) = json.loads(a)["hypotheses"]
                (their,) = json.loads(b)["hypotheses"]
                assert own["text"] == their["text"]
                assert their["token_scores"] == pytest.approx(own["token_scores"], abs=1e-4)
            elif "--nbest" in options:
                number, score, text = a.split("\t")
                other_number, other_score, other_text = b.split("\t")
                assert number == other_number and (
                    text != other_text or float(other_score) == pytest.approx(float(score), abs=2e-4)
                )
                best.setdefault(number, text == other_text)
            elif options:
                best[str(len(best))] = a == b
            else:
                assert a == b
        assert sum(best.values()) >= 0.8 * len(best)
    small = call(
        *command, "--engine", "ctranslate2", "--precision", "int8", "--workers", 2, "--threads", 1, stdin=lines
    )
    assert small.code == 0 and len(small.lines) == len(ours.lines) == lines.count("\n")
    for arguments, message in (
        (["--engine", "ctranslate"], "did you mean 'ctranslate2'?"),
        (["--engine", "ctranslate2", "--precision", "bf16"], "allowed: fp32, int8"),
        (["--engine", "ctranslate2", "--ensemble", toy / "run"], "ensemble: the engine"),
        (["--engine", "ctranslate2", "--device", "cuda"], "no CUDA GPU"),
        (["--engine", "ctranslate2", "--sample", "--workers", 2], "workers"),
        (["--precision", "int8", "--engine", "torch"], "ctranslate2, not with torch"),
    ):
        result = call(*command, *arguments, stdin="a\n")
        assert result.code == 2 and message in result.err and not result.out, arguments


def test_missing_package_is_reported_with_its_extra(toy, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    result = call("generate", toy / "run", "--engine", "ctranslate2", stdin="a\n")
    assert result.code == 2 and "-e '.[ctranslate2]'" in result.err
