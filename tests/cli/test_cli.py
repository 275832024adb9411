"""The command line for scripts: streams, output formats, exit codes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

import regard
from kit.toy import call, small
from regard.cli.app import VERBS

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def start(*args, **options):
    """Start the command line in a process that is killed after 30 seconds at the latest."""
    with subprocess.Popen([sys.executable, "-m", "regard", *map(str, args)], env=ENVIRONMENT, **options) as process:
        watch = threading.Timer(30, process.kill)
        watch.start()
        try:
            yield process
        finally:
            watch.cancel()
            process.kill()


@pytest.fixture(scope="session")
def spell_word(toy):
    """A function that spells a word with the library."""
    run = regard.load(toy / "run")
    return lambda word: run.generate([word])[0][0].text


# Help and user errors


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_an_example(verb):
    result = call(verb, "--help")
    assert result.code == 0 and result.err == ""
    assert f"regard {verb}" in result.out and "Example:" in result.out


def test_no_arguments_print_the_help_and_version_prints_the_version():
    assert call().out == call("--help").out
    assert call("--version").out.startswith("regard ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "train"),
        (["generate", "run", "--beem", 3], "--beam"),
        (["generate"], "RUN"),
        (["train"], "--out RUN is missing"),
        (["train", "g2q", "--out", "x"], "did you mean 'g2p'?"),
        (["train", "--out", "x", "--set", "dropuot=1"], "did you mean 'dropout'?"),
        (["train", "--out", "x", "--set", "dropout"], "key=value"),
        (["train", "--out", "x", "--data", "a", "--source", "b"], "not both"),
        (["train", "--out", "x", "--columns", "source,taget"], "target"),
        (["train", "--out", "x", "--data", "nowhere.tsv"], "nowhere.tsv: no such file"),
        (["train", "--out", "x", "--data", "nowhere.tsv", "--minutes", 0], "greater than 0"),
        (["generate", "nowhere"], "nowhere: no such run directory"),
        (["evaluate", "nowhere", "x.tsv"], "no such run"),
        (["info", "transformer-bse"], "did you mean 'transformer-base'?"),
        (["info", "transformer-base", "--set", "heads=7"], "not divisible"),
    ],
)
def test_user_errors_exit_with_2_and_one_message(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*args)
    assert result.code == 2 and result.out == ""
    assert message in result.err and result.err.startswith("error: ") and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam", 0], "beam"),
        (["--nbest", 3], "beam at least as wide"),
        (["--temperature", "nan"], "temperature"),
        (["--metric", "blue"], "--metric"),
        (["--weights", "1,x"], "weights"),
        (["--top-k", 3], "top_k needs sample"),
        (["--alignment-heads", "1"], "--alignment-heads"),
        (["--alignment-heads", "0.1"], "counted from 1"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_invalid_options_are_named_in_the_error(toy, options, message):
    result = call("generate", toy / "run", *options, stdin="abc\n")
    assert result.code == 2 and message in result.err and result.out == ""


def test_internal_errors_exit_with_1_and_mention_debug(monkeypatch, toy):
    import regard.cli.info

    def fail(*_):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(regard.cli.info, "describe", fail)
    result = call("info", toy / "run")
    assert result.code == 1 and "ZeroDivisionError: oh" in result.err and "REGARD_DEBUG=1" in result.err
    assert "Traceback" in call("--debug", "info", toy / "run").err


# Generate


@pytest.mark.parametrize("verb", ["generate", "score"])
def test_generate_and_score_import_no_unneeded_modules(toy, verb):
    """Importing them, or a garbage collection over all modules, would take longer than the answer."""
    code = f"""
import atexit, gc, sys
from regard.cli.app import main
sys.argv = ["regard", "{verb}", {str(toy / "run")!r}, "-"]
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 10_000, *sys.modules, file=sys.stderr))
main()
"""
    text = "abc\tx\n" if verb == "score" else "abc\n"
    result = subprocess.run([sys.executable, "-c", code], input=text, text=True, capture_output=True, check=True)
    enabled, frozen, *modules = result.stderr.splitlines()[-1].split()
    assert (enabled, frozen) == ("True", "True") and "regard.run" in modules
    unneeded = {"torch._dynamo", "torch._inductor", "sympy", "sacrebleu", "lxml", "rich", "matplotlib"}
    if find_spec("regard_native"):
        unneeded.add("torch")
    assert not unneeded & set(modules)


def test_two_workers_give_the_output_of_one(toy):
    for verb, options in (("generate", ["--json", "--batch-tokens", 64]), ("evaluate", ["--beam", 2])):
        one, two = (call(verb, toy / "run", toy / "test.tsv", *options, "--workers", n) for n in (1, 2))
        assert one.code == two.code == 0 and one.lines == two.lines and one.err == two.err


def test_every_input_line_gives_one_output_line(toy, spell_word):
    lines = ["abc", "", "feed", "   ", "xyz", "a\u2028b", "abc"]
    result = call("generate", toy / "run", stdin="\n".join(lines) + "\n")
    assert result.code == 0 and len(result.lines) == len(lines)
    assert result.lines[0] == result.lines[6] == spell_word("abc") and result.lines[2] == spell_word("feed")
    assert result.lines[1] == result.lines[3] == ""
    assert "unknown" in result.err


def test_outputs_do_not_depend_on_the_order_or_the_batch(toy):
    words = [line.split("\t")[0] for line in (toy / "test.tsv").read_text().splitlines()]
    together = call("generate", toy / "run", "--batch-tokens", 64, stdin="\n".join(words)).lines
    backwards = call("generate", toy / "run", stdin="\n".join(words[::-1])).lines
    assert together == backwards[::-1]
    assert together[3] == call("generate", toy / "run", "-", stdin=words[3]).lines[0]


def test_invalid_lines_of_a_file_give_empty_outputs_and_are_named(toy, spell_word, tmp_path):
    file = tmp_path / "words.txt"
    file.write_bytes(b"abc\r\n\xff\xfe\nfeed\tx\ty\nbad\tB AH D\n")
    result = call("generate", toy / "run", file)
    assert result.lines == [spell_word("abc"), "", "", spell_word("bad")]
    assert f"{file}:2" in result.err and f"{file}:3" in result.err and "target column" in result.err


def test_json_hypotheses_have_token_scores_that_sum_to_the_score(toy):
    result = call("generate", toy / "run", "--beam", 4, "--nbest", 3, "--json", stdin="abc\nfed\n")
    answers = [json.loads(line) for line in result.lines]
    assert [answer["source"] for answer in answers] == ["abc", "fed"]
    for answer in answers:
        assert len(answer["hypotheses"]) == 3
        for hypothesis in answer["hypotheses"]:
            assert {"text", "score", "tokens", "token_scores"} <= hypothesis.keys()
            assert sum(hypothesis["token_scores"]) == pytest.approx(hypothesis["score"])
            assert len(hypothesis["tokens"]) == len(hypothesis["token_scores"])
    best = answers[0]["hypotheses"][0]
    again = json.loads(call("score", toy / "run", "--json", stdin=f"abc\t{best['text']}\n").out)
    assert again["score"] == pytest.approx(best["score"], abs=1e-4)


def test_nbest_prints_line_number_score_and_text(toy):
    result = call("generate", toy / "run", "--beam", 4, "--nbest", 2, stdin="abc\nfed\n")
    rows = [line.split("\t") for line in result.lines]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
    assert len({row[2] for row in rows[:2]}) == 2 and float(rows[0][1]) <= 0


def test_alignment_prints_one_link_per_output_token(toy, spell_word):
    text, links = call("generate", toy / "run", "--alignment", stdin="abc\n").lines[0].split("\t")
    assert text == spell_word("abc")
    assert [link.split("-")[1] for link in links.split(" ")] == [str(i) for i in range(len(text.split()))]


def test_outputs_begin_with_the_prefix_column(toy):
    result = call("generate", toy / "run", "--prefix-column", "--beam", 2, stdin="abc\tF\nabc\tK EH\n")
    assert [line.startswith(start) for line, start in zip(result.lines, ("F ", "K EH"), strict=True)] == [True, True]


def test_unusable_lines_are_counted_and_named(toy, spell_word):
    result = call("generate", toy / "run", "--prefix-column", stdin=f"abc\tZZ\nabc\t\n{'a' * 3000}\t\nabc\tK\n")
    assert result.code == 0 and result.lines[0] == result.lines[2] == "" and result.lines[1] == spell_word("abc")
    assert result.lines[3].startswith("K") and result.err.startswith("2 of 4 lines; skipped ")
    assert "1 with a constraint that cannot be met (stdin:1: prefix 'ZZ'" in result.err
    assert "1 too long (stdin:3: the source has 3000 tokens" in result.err
    result = call("generate", toy / "run", "--prefix", "ZZ", stdin="abc\n")  # an option for all lines: an error
    assert result.code == 2 and "prefix 'ZZ'" in result.err


def test_outputs_that_repeat_tokens_are_reported(toy, tmp_path):
    """A model of zeros repeats the first token until the minimum length."""
    run = regard.load(toy / "run")
    for parameter in run.model.parameters():
        parameter.data.zero_()
    run.save(tmp_path / "untrained")
    result = call("generate", tmp_path / "untrained", "--min-length", 12, stdin="abc\nba\n")
    assert result.code == 0
    assert "2 of 2 outputs repeat tokens" in result.err
    assert "repeat tokens" not in call("generate", toy / "run", stdin="abc\nba\n").err


def test_mbr_candidates_are_sorted_by_utility(toy):
    answer = json.loads(call("generate", toy / "run", "--mbr", 6, "--temperature", 3, "--json", stdin="abc\n").out)
    candidates = answer["candidates"]
    assert len(answer["hypotheses"]) == 1 and len(candidates) > 1
    assert {key: answer["hypotheses"][0][key] for key in ("text", "utility", "score")} == candidates[0]
    assert [c["utility"] for c in candidates] == sorted((c["utility"] for c in candidates), reverse=True)
    assert "candidates" not in json.loads(call("generate", toy / "run", "--json", stdin="abc\n").out)


def test_lines_of_a_pipe_are_answered_immediately(toy, spell_word):
    with start("generate", toy / "run", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for word in ("abc", "feed"):
            process.stdin.write(f"{word}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline().decode() == spell_word(word) + "\n"  # while stdin is still open
        process.stdin.close()
        assert process.wait(20) == 0


def test_a_closed_output_pipe_ends_generate_silently(toy, spell_word, tmp_path):
    file = tmp_path / "many.txt"
    file.write_text("abc\n" * 30_000)
    with start(
        "generate", toy / "run", file, "--window", 64, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline().decode() == spell_word("abc") + "\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 0


def test_an_interrupt_exits_with_130_without_a_traceback(toy):
    with start(
        "generate", toy / "run", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b"abc\n")
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert b"Traceback" not in process.stderr.read()


# Score, evaluate, average


def test_score_prints_one_score_or_nan_per_line(toy):
    result = call("score", toy / "run", stdin="abc\tAH B K\nbroken\nabc\tF F F\n\n")
    values = [float(line) for line in result.lines]
    assert len(values) == 4 and values[0] > values[2] and math.isnan(values[1]) and math.isnan(values[3])
    assert "stdin:2" in result.err
    strict = call("score", toy / "run", "--strict", stdin="broken\n")
    assert strict.code == 2 and "stdin:1" in strict.err


def test_score_reports_unknown_tokens_and_long_lines(toy):
    lines = f"abc\tAH B K\n{'a' * 100_000}\tAH\nabß\tAH ZZ ZZ\nabc\tAH B K\n"
    result = call("score", toy / "run", stdin=lines)
    assert result.code == 0 and result.lines[1] == "nan" and result.lines[0] == result.lines[3]
    assert "3 of 4 lines; skipped 1 too long (stdin:2: the source has 100000 tokens" in result.err
    assert (
        "source: 1 unknown token in 1 line: 'ß'" in result.err
        and "target: 1 unknown token, 2 times in 1 line" in result.err
    )
    rows = [json.loads(line) for line in call("score", toy / "run", "--json", "--max-source", 2, stdin=lines).lines]
    assert [row["line"] for row in rows] == [1, 2, 3, 4] and all(row["score"] is None for row in rows)
    strict = call("score", toy / "run", "--strict", stdin=lines)
    assert strict.code == 2 and "stdin:2: too long: the source has" in strict.err


def test_weights_change_the_scores_of_an_ensemble(toy, tmp_path):
    run = regard.load(toy / "run")
    for parameter in run.model.parameters():
        parameter.data *= 0.9
    run.save(tmp_path / "other")
    order = ["score", toy / "run", "--ensemble", tmp_path / "other"]
    first_only, equal, second_only = (
        [float(line) for line in call(*order, *weights, stdin="abc\tAH B K\n").lines]
        for weights in (["--weights", "1,1e-9"], [], ["--weights", "1e-9,1"])
    )
    assert first_only == pytest.approx([float(call("score", toy / "run", stdin="abc\tAH B K\n").out)], abs=1e-5)
    assert len({first_only[0], equal[0], second_only[0]}) == 3
    assert "weights: 1 given for 2 runs" in call(*order, "--weights", "1", stdin="abc\tAH\n").err


def test_evaluate_reports_metrics_with_intervals_and_skipped_lines(toy, tmp_path):
    dirty = tmp_path / "dirty.tsv"
    dirty.write_text((toy / "test.tsv").read_text() + "one column\n")
    result = call("evaluate", toy / "run", dirty, "--json", "--bootstrap", 50)
    report = json.loads(result.out)
    assert report["examples"] == 40 and report["skipped"] == {"wrong column count": 1} and "unknown" not in report
    assert set(report["metrics"]) == {"wer", "per", "accuracy", "perplexity"}
    wer = report["metrics"]["wer"]
    assert 0 <= wer["low"] <= wer["score"] <= wer["high"] <= 100
    plain = call("evaluate", toy / "run", toy / "test.tsv", "--metric", "bleu", "--bootstrap", 0)
    assert plain.lines[1].startswith("bleu\t") and "tok:13a" in plain.out
    assert "sequence error rate" not in plain.out
    words = call("evaluate", toy / "run", toy / "test.tsv", "--metric", "wer,word_edits,per", "--bootstrap", 0).lines
    assert words[2].split("\t")[1] == words[3].split("\t")[1]
    assert any(line.startswith("wer: sequence error rate") for line in words)
    assert any(line.startswith("word_edits: edits per word") for line in words)


def test_evaluate_reports_long_lines_and_unknown_tokens(toy, tmp_path):
    dirty = tmp_path / "dirty.tsv"
    dirty.write_text(f"{'a' * 100_000}\tAH\n" + (toy / "test.tsv").read_text() + "ß\tAH ZZ\n")
    result = call("evaluate", toy / "run", dirty, "--json", "--bootstrap", 0)
    report = json.loads(result.out)
    assert report["examples"] == 41 and report["skipped"] == {"too long": 1}
    assert report["unknown"] == {"source": 1, "target": 1}
    assert (
        "dirty.tsv:1: the source has 100000" in result.err and "target: 1 unknown token in 1 line: 'ZZ'" in result.err
    )
    strict = call("evaluate", toy / "run", dirty, "--strict")
    assert strict.code == 2 and "dirty.tsv:1: too long" in strict.err
    for options, message in (
        (["--length-penalty", 0.5], "give --beam too"),
        (["--memory", 3], "an encoder-decoder for pairs"),
    ):
        result = call("evaluate", toy / "run", toy / "test.tsv", *options)
        assert result.code == 2 and message in result.err


def test_metrics_may_be_separate_options_or_comma_separated(toy):
    evaluate = ["evaluate", toy / "run", toy / "test.tsv", "--bootstrap", 0, "--json"]
    several = call(*evaluate, "--metric", "wer", "--metric", "chrf")
    assert call(*evaluate, "--metric", "wer,chrf").out == several.out
    assert list(json.loads(several.out)["metrics"]) == ["wer", "chrf"]


def test_evaluate_of_parallel_files_equals_columns(toy, tmp_path):
    rows = [line.split("\t") for line in (toy / "test.tsv").read_text().splitlines()]
    for name, column in (("test.en", 0), ("test.ph", 1)):
        (tmp_path / name).write_text("".join(row[column] + "\n" for row in rows))
    options = ["--metric", "wer", "--bootstrap", 0, "--confusions", 0]
    two = call("evaluate", toy / "run", tmp_path / "test.en", "--target", tmp_path / "test.ph", *options)
    assert two.code == 0 and two.out == call("evaluate", toy / "run", toy / "test.tsv", *options).out


def test_a_precision_that_may_change_outputs_prints_a_note(toy, monkeypatch):
    note = "precision: {}: faster, but outputs and scores may differ from those in fp32\n"
    monkeypatch.setattr("regard.device.bf16_problem", lambda *_, **__: None)
    assert call("generate", toy / "run", stdin="abc\n").err == ""
    assert call("generate", toy / "run", "--precision", "bf16", stdin="abc\n").err == note.format("bf16")
    result = call(
        "evaluate", toy / "run", toy / "test.tsv", "--precision", "bf16", "--against", toy / "run", "--metric", "wer"
    )
    assert result.err == note.format("bf16")
    pytest.importorskip("ctranslate2")
    engine = ["--engine", "ctranslate2"]
    assert call("generate", toy / "run", *engine, stdin="abc\n").err == ""
    assert call("generate", toy / "run", *engine, "--precision", "int8", stdin="abc\n").err == note.format("int8")


def test_the_average_of_equal_runs_has_the_same_outputs(toy, tmp_path):
    assert call("average", tmp_path / "mean", toy / "run", toy / "run").code == 0
    words = "abc\nfeed\ndeaf\n"
    assert call("generate", tmp_path / "mean", stdin=words).out == call("generate", toy / "run", stdin=words).out
    again = call("average", tmp_path / "mean", toy / "run")
    assert again.code == 2 and "exists already" in again.err


# Train


def test_set_overrides_options_and_options_override_the_recipe(toy, tmp_path):
    recipe = tmp_path / "my.toml"
    recipe.write_text('preset = "transformer-tiny"\n[train]\nepochs = 7\nseed = 3\nlr = 0.5\n')
    result = call(
        "train", recipe, "--data", toy / "pairs.tsv", "--out", tmp_path / "run", "--steps", 2, "--seed", 4,
        "--workers", 1, *small("train.seed=5"),
    )  # fmt: skip
    assert result.code == 0 and result.out == ""
    saved = (tmp_path / "run" / "recipe.toml").read_text()
    assert "seed = 5" in saved and "steps = 2" in saved and "epochs" not in saved and "lr = 0.01" in saved
    again = call("train", recipe, "--data", toy / "pairs.tsv", "--out", tmp_path / "run")
    assert again.code == 2


def test_features_are_trained_and_unknown_features_are_reported(tmp_path):
    table = tmp_path / "forms.tsv"
    table.write_text(
        "".join(
            f"{w}{i}\tN;{n}\t{w}{i}{'s' if n == 'PL' else ''}\n" for i in range(9) for w in "ab" for n in ("SG", "PL")
        )
    )
    result = call(
        "train", "--data", table, "--columns", "source,features,target", "--steps", 3, "--workers", 1,
        "--source-tokens", "char", "--target-tokens", "char", "--out", tmp_path / "run", *small(),
    )  # fmt: skip
    assert result.code == 0, result.err
    result = call("generate", tmp_path / "run", stdin="a1\tN;PL\na1\nb2\tN;DU\n")
    assert result.code == 0 and len(result.lines) == 3
    assert "stdin:2" in result.err and "DU" in result.err


def test_sigterm_saves_the_run_and_resume_continues_it(toy, tmp_path):
    args = ["train", "--data", toy / "pairs.tsv", "--out", tmp_path / "run", "--workers", 1, "--steps", 100_000]
    with start(*args, *small(), stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "step 20 " in line:
                break
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 143 and time.monotonic() - began < 60
    args[-1] = 1
    result = call(*args, "--resume", *small())
    assert result.code == 0, result.err


# Info


def test_info_reports_parameters_time_and_memory(toy):
    report = json.loads(call("info", toy / "run", "--json").out)
    parts = report["parameters"]
    assert parts.pop("total") == sum(parts.values())
    assert report["time"]["training_per_million_tokens"] > 0
    assert report["flops_per_token"] > 0 and report["memory"].keys() >= {"training", "decoding"}


def test_info_shows_the_parameters_of_the_attention_projections():
    sets = [part for setting in ("width=8192", "heads=64", "bias=none", "layers=1") for part in ("--set", setting)]
    result = call("info", "transformer-base", *sets)
    assert result.code == 0, result.err
    assert "query + key + value\t201,326,592\t201.3M" in result.out


def test_tables_have_frames_on_a_terminal_only(monkeypatch):
    plain = call("info", "transformer-tiny")
    assert plain.lines[-5].startswith("total\t") and "share" not in plain.out
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats any stream as a terminal
    framed = call("info", "transformer-tiny")
    assert "╭" in framed.out and "share" in framed.out and "\t" not in framed.out
