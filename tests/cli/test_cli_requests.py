"""`regard generate` with JSON requests, stop strings, streaming and the hints at a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys

import pytest

import regard
from kit.toy import call, small
from regard.cli.lines import InputLines, announce_data
from regard.data.reader import Source


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """A language model trained for a few steps."""
    path = tmp_path_factory.mktemp("lm")
    (path / "book.txt").write_text("the cat sat on the mat\nand the dog sat on the log\n\n" * 30)
    order = ["--task", "lm", "--data", path / "book.txt", "--out", path / "run", "--source-tokens", "char"]
    assert call("train", *order, "--steps", 30, "--workers", 1, *small()).code == 0
    return path / "run"


def answers(result):
    return [json.loads(line) for line in result.lines]


REQUESTS = [
    {"id": 7, "source": "abc"},
    {"source": "abc", "prefix": "K EH", "note": {"who": ["me"]}},
    {"source": "fed", "require": [["AH AH", "B B"]], "max_length": 9},
    {"source": "fed", "forbid": ["EH"], "min_length": 4, "prefix": None},
    {"source": "abc", "stop": ["K"], "id": "x"},
]


def test_json_requests_are_answered_as_by_the_library(toy, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS))
    result = call("generate", toy / "run", file, "--beam", 3)
    run = regard.load(toy / "run")
    keys = regard.Request.model_fields
    requests = [regard.Request(**{k: v for k, v in r.items() if k in keys and v is not None}) for r in REQUESTS]
    expected = run.generate(requests, beam=3)
    assert result.code == 0 and result.err == ""
    for request, row, answer in zip(REQUESTS, expected, answers(result), strict=True):
        others = {key: value for key, value in request.items() if key not in keys}
        assert list(answer) == [*others, "source", "hypotheses"]
        assert {key: answer[key] for key in others} == others and answer["source"] == request["source"]
        assert [h["text"] for h in answer["hypotheses"]] == [h.text for h in row]
        assert answer["hypotheses"][0].get("flags", {}) == row[0].flags
    assert call("generate", toy / "run", "--jsonl", "--beam", 3, stdin=file.read_text()).out == result.out
    assert "K" not in answers(result)[4]["hypotheses"][0]["text"] and expected[1][0].text.startswith("K EH")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("abc", "not JSON: Expecting value, at column 1"),
        ("", "not JSON: a blank line"),
        ('{"source": "abc"', "not JSON: Expecting ',' delimiter, at column 17"),
        ("[1]", 'not a JSON object, such as {"source": "abc"}'),
        ('{"source": "abc", "x": NaN}', "not JSON: NaN"),
        ('{"source": "abc", "source": "b"}', "source: occurs twice"),
        ('{"source": "\\ud800"}', "half of a surrogate pair"),
        ('{"source": "abc", "x": ' + "9" * 5000 + "}", "not readable as JSON"),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "not readable as JSON"),
        ('{"id": 3}', "source: is required"),
        ('{"source": "abc", "prefxi": "K"}', "prefxi: no such key; did you mean 'prefix'?"),
        ('{"source": "abc", "num_beams": 4, "beam": 4}', "beam: is an option for all requests"),
        ('{"source": "abc", "max_length": 2.5}', "max_length: input should be a valid integer"),
        ('{"source": "abc", "features": "V"}', "features: not for this run"),
        ('{"source": "abc", "error": "x"}', "error: is a key of the answer"),
    ],
)
def test_an_invalid_request_is_answered_with_an_error_in_its_place(toy, tmp_path, line, message):
    file = tmp_path / "requests.ndjson"
    file.write_text(f'{{"source": "abc", "id": 1}}\n{line}\n{{"source": "fed", "id": 3}}\n')
    result = call("generate", toy / "run", file)
    first, bad, last = answers(result)
    assert result.code == 0 and (first["id"], last["id"]) == (1, 3)
    assert "error" not in first and first["hypotheses"][0]["text"] and last["hypotheses"][0]["text"]
    assert bad["error"].startswith(f"{file}:2: ") and message in bad["error"]
    assert bad["hypotheses"][0]["text"] == "" and bad["source"] in ("", "abc")
    assert f"2 of 3 lines; skipped 1 not a valid request ({file}:2: " in result.err and message in result.err


def test_invalid_lines_of_a_table_have_an_error_in_json(toy):
    result = call("generate", toy / "run", "--json", stdin=b"abc\n\xff\na\tb\tc\n")
    assert [answer.get("error") for answer in answers(result)] == [
        None, "stdin:2: invalid UTF-8", "stdin:3: wrong column count",
    ]  # fmt: skip


def test_options_that_conflict_with_requests_or_streaming_are_refused(toy):
    line = '{"source": "abc"}\n'
    for options, message in (
        (["--jsonl", "--prefix-column"], "--prefix-column: lines of JSON have no columns"),
        (["--top-tokens", 3], "--top-tokens: plain output does not show them; give --json too"),
        (["--stream", "--beam", 3], "decide only at the end; use greedy search or sample"),
        (["--stream", "--workers", 2], "--stream: one process decodes one line after the other"),
    ):
        result = call("generate", toy / "run", *options, stdin=line)
        assert result.code == 2 and message in result.err and result.out == ""


def test_requests_to_a_run_with_features_need_features(tmp_path):
    data = tmp_path / "forms.tsv"
    data.write_text("".join(f"{s}\tN;{n}\t{s}{n.lower()}\n" for s in ("ab", "cd", "abc", "dd") for n in ("SG", "PL")))
    order = ["--data", data, "--columns", "source,features,target", "--out", tmp_path / "run", "--valid", data]
    assert call("train", *order, "--steps", 2, "--workers", 1, *small()).code == 0
    lines = '{"source": "ab", "features": "N;SG"}\n{"source": "ab"}\n'
    good, bad = answers(call("generate", tmp_path / "run", "--jsonl", stdin=lines))
    plain = json.loads(call("generate", tmp_path / "run", "--json", stdin="ab\tN;SG\n").out)
    assert good == plain and "stdin:2: features: is required" in bad["error"]


def test_requests_to_a_classifier_accept_only_a_source(tmp_path):
    data = tmp_path / "topics.tsv"
    data.write_text("".join(f"{'ab' * n}\t{'long' if n > 3 else 'short'}\n" for n in range(1, 9)))
    order = ["--task", "classify", "--data", data, "--valid", data, "--out", tmp_path / "run"]
    assert call("train", *order, "--steps", 2, "--workers", 1, *small()).code == 0
    result = call(
        "generate", tmp_path / "run", "--jsonl", stdin='{"source": "ab", "id": 1}\n{"source": "a", "stop": []}\n'
    )
    first, second = answers(result)
    assert first["id"] == 1 and first["label"] in ("long", "short") and "error" not in first
    assert second["label"] is None and "stop: not for this run; a request has source here" in second["error"]


def test_an_invalid_line_is_not_an_empty_prompt(lm):
    for options in ([], ["--stream"]):
        bad, empty = call("generate", lm, "--max-length", 5, "--min-length", 5, *options, stdin=b"\xff\n\n").lines
        assert bad == "" and empty


# Stop strings and streaming


def test_a_continuation_ends_before_a_stop_string(lm):
    prompts = "the \nand the d\n\n"
    whole = answers(call("generate", lm, "--json", "--max-length", 30, stdin=prompts))
    stopped = answers(call("generate", lm, "--json", "--max-length", 30, "--stop", "at", "--stop", "t ", stdin=prompts))
    stopped_count = 0
    for before, after in zip(whole, stopped, strict=True):
        (before,), (after,) = before["hypotheses"], after["hypotheses"]
        ends = [(at + 2, at) for stop in ("at", "t ") if (at := before["text"].find(stop)) >= 0]
        assert after["text"] == (before["text"][: min(ends)[1]] if ends else before["text"])
        assert ("stopped" in after.get("flags", {})) == bool(ends)
        assert sum(after["token_scores"]) == pytest.approx(after["score"])
        stopped_count += bool(ends)
    assert stopped_count
    plain = call("generate", lm, "--max-length", 30, "--stop", "at", "--stop", "t ", stdin=prompts).lines
    assert plain == [answer["hypotheses"][0]["text"] for answer in stopped]


@pytest.mark.parametrize(
    "options", [[], ["--stop", "t "], ["--sample", "--top-tokens", 2], ["--require", "dog"], ["--max-length", 3]]
)
def test_streaming_prints_the_output_of_generate(lm, options):
    prompts = "the \n\nand the d\n"
    plain = [option for option in options if option not in ("--top-tokens", 2)]
    assert call("generate", lm, "--stream", *plain, stdin=prompts) == call("generate", lm, *plain, stdin=prompts)
    events = answers(call("generate", lm, "--stream", "--json", *options, stdin=prompts))
    whole = answers(call("generate", lm, "--json", *options, stdin=prompts))
    final = [event for event in events if "hypotheses" in event]
    for number, (ours, theirs) in enumerate(zip(final, whole, strict=True), 1):
        pieces = [event for event in events if event.get("line") == number]
        (ours,), (theirs,) = ours["hypotheses"], theirs["hypotheses"]
        assert (ours["text"], ours["tokens"], ours.get("flags")) == (
            theirs["text"],
            theirs["tokens"],
            theirs.get("flags"),
        )
        assert "".join(piece["text"] for piece in pieces) == ours["text"]
        assert [piece["token"] for piece in pieces] == ours["tokens"]
        assert sum(piece["score"] for piece in pieces) == pytest.approx(ours["score"], abs=1e-5)
        assert all(("top_tokens" in piece) == ("--top-tokens" in options) for piece in pieces)


def test_streaming_keeps_empty_lines_alignments_and_messages(toy):
    lines = "abc\n\nfed\nß\na\tb\tc\n"
    for options in ([], ["--alignment"], ["--prefix", "K"]):
        assert call("generate", toy / "run", "--stream", *options, stdin=lines) == call(
            "generate", toy / "run", *options, stdin=lines
        )


PAIR = "a source and a target per line, separated by a tab"


@pytest.mark.parametrize(
    ("verb", "options", "content"),
    [
        ("generate", (), "a source per line"),
        ("score", (), PAIR),
        ("evaluate", ("--bootstrap", "0"), PAIR),
        ("heads", ("--no-store", "--no-ablation"), PAIR),
    ],
)
def test_verbs_announce_standard_input_only_at_a_terminal(toy, verb, options, content):
    lines = "abc\nfed\n" if verb == "generate" else "abc\tAH B K\nfed\tF EH D\n"
    controller, terminal = pty.openpty()
    try:
        os.write(controller, f"{lines}\x04".encode())
        order = [sys.executable, "-m", "regard", verb, str(toy / "run"), *options]
        result = subprocess.run(order, stdin=terminal, capture_output=True, text=True, timeout=60, check=True)
    finally:
        os.close(controller)
        os.close(terminal)
    piped = call(verb, toy / "run", *options, stdin=lines)
    assert piped.code == 0 and result.stdout == piped.out
    hint = f"reading standard input: {content}; Ctrl-D ends it (or name a file after the run)\n"
    assert result.stderr == hint + piped.err


class Terminal(io.StringIO):
    """A standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("source", "reads", "content"),
    [
        (Source(("-",)), "pairs", PAIR),
        (Source(("-", "targets.txt")), "pairs", "a source per line"),
        (Source(("-",), ("source",)), "pairs", "a source per line"),
        (
            Source(("-",), ("source", "features", "target")),
            "pairs",
            "a source, features and a target per line, separated by tabs",
        ),
        (
            Source(("-",), prefix_column=True),
            "pairs",
            "a source, a target and a prefix per line, separated by tabs",
        ),
        (Source(("-",)), "labelled", "a text and a label per line, separated by a tab"),
        (Source(("-",)), "text", "plain text"),
        (Source(("-",)), "images", "images (.npz)"),
        (Source(("pairs.tsv",)), "pairs", None),
        (Source(("pairs.tsv", "-")), "pairs", None),
    ],
)
def test_the_announcement_describes_the_input_of_the_task(source, reads, content, monkeypatch, capsys):
    for stdin, announced in ((Terminal(), content is not None), (io.StringIO(), False), (None, False)):
        monkeypatch.setattr(sys, "stdin", stdin)
        announce_data(source, reads)
        message = capsys.readouterr().err
        assert message.startswith(f"reading standard input: {content}; Ctrl-D ends it") if announced else message == ""


def test_the_announcement_describes_the_input_of_generate(lm, toy, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal())
    prompts = {"prompts": True}
    for run, options, content in (
        (toy / "run", {}, "a source per line"),
        (toy / "run", {"jsonl": True}, "a JSON object per line"),
        (toy / "run", {"prefix_column": True}, "a source and a prefix per line, separated by a tab"),
        (lm, prompts, "a text per line"),
        (lm, {**prompts, "prefix_column": True}, "a text and a prefix per line, separated by a tab"),
    ):
        lines = InputLines("-", regard.load(run).codec, **options)
        monkeypatch.setattr("regard.cli.lines.read_lines", lambda path: iter(()))
        assert list(lines.batches(1)) == []
        assert capsys.readouterr().err.startswith(f"reading standard input: {content}; Ctrl-D ends it")
