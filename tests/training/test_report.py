"""Reporters, the log, the model card and the learning curve."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from kit.backwards import MakeRecipe
from regard.data.prepare import DataFile
from regard.data.statistics import STATISTICS, Statistics
from regard.errors import UserError
from regard.files import write_json
from regard.text.codec import Example
from regard.training.checkpoint import Best, Progress
from regard.training.log import Log, read_log
from regard.training.report import (
    Lines,
    Live,
    Reporter,
    format_duration,
    make_reporter,
)
from regard.training.summary import draw_curve, write_model_card

EVENTS = [
    {"event": "train", "step": 50, "epoch": 0.5, "loss": 2.5, "lr": 1e-3, "tokens_per_second": 12345.6, "seconds": 9.0},
    {"event": "valid", "step": 50, "epoch": 0.5, "loss": 2.25, "wer": 81.234, "best": True, "seconds": 10.0},
    {"event": "skip", "step": 51, "loss": None, "norm": None},
    {"event": "average", "checkpoints": 3, "loss": 2.0, "wer": 80.0, "best": False, "seconds": 10.0},
    {"event": "end", "step": 99, "reason": "patience", "skipped": 1, "wer": 81.234, "seconds": 75.0},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def output(reporter: Reporter, stream: io.StringIO) -> str:
    reporter.say("choice [not markup] of /a/path")
    for step in (1, 50):
        reporter.tick(step, step / 100, float(step))
    for event in EVENTS:
        reporter.event(event)
    reporter.close()
    return stream.getvalue()


def test_line_reporter_prints_steps_and_events() -> None:
    stream = io.StringIO()
    text = output(Lines(stream), stream)
    assert "choice [not markup] of /a/path\n" in text
    assert "step 50 · epoch 0.50 · loss 2.5000 · lr 1.00e-03 · 12,346 tokens/s · 50 s left\n" in text
    assert "validation: loss 2.2500, wer 81.23 · best so far" in text
    assert "step 51 · skipped" in text
    assert "mean of the last 3 checkpoints: loss 2.0000, wer 80.00 · not better, not used" in text
    assert "finished at step 99 after 1 min 15 s: no improvement (patience)" in text


def test_live_reporter_shows_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    reporter = make_reporter(stream)
    assert isinstance(reporter, Live)
    reporter.loss(2.5, 5000)
    text = output(reporter, stream)
    assert "choice [not markup] of /a/path" in text
    assert "loss 2.500" in text and "5,000 tokens/s" in text and "1 min 39 s left" in text  # at the first step
    assert "validation: loss 2.2500, wer 81.23" in text
    assert isinstance(make_reporter(io.StringIO()), Lines)
    assert isinstance(make_reporter(sys.__stderr__), Lines | Live)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_live_reporter_does_not_break_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("regard.training.report.REFRESH_SECONDS", 0.0)
    stream = Terminal()
    reporter = Live(stream)
    message = "tokens: characters, for " + "a long-winded reason and " * 6 + "runs/" + "x" * 90
    reporter.say(message)
    reporter.event(EVENTS[1])
    for step in (12_345, 12_346):
        reporter.loss(12.3456, 98_765)
        reporter.tick(step, 0.01, step / 1.0)
    reporter.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", stream.getvalue())]
    assert not [line for line in lines if len(line) > width and " " in line.strip()]
    assert [word for line in lines for word in line.split()][: len(message.split())] == message.split()
    status_lines = [line for line in lines if "12,346" in line]
    fields = {
        "step 12,346",
        "loss 12.346",
        "98,765 tokens/s",
        "1,222,254 s left",
        "339 h 30 min left",
        "best wer 81.23",
    }
    assert status_lines and set(status_lines[0].lstrip("━ ").split(" · ")) <= fields
    assert "loss 12.346" in status_lines[0] and "98,765 tokens/s" in status_lines[0]
    assert width < 200 or ("best wer 81.23" in status_lines[0] and "━" in status_lines[0])


def test_line_reporter_prints_progress_without_log_events() -> None:
    stream = io.StringIO()
    reporter = Lines(stream)
    for step in range(1, 81):  # one second each
        reporter.loss(4.0, 100)
        reporter.tick(step, step / 100, float(step))
    assert stream.getvalue().splitlines() == [
        "step 2 · loss 4.000 · 100 tokens/s · 1 min 38 s left",
        "step 32 · loss 4.000 · 100 tokens/s · 1 min 08 s left",
        "step 62 · loss 4.000 · 100 tokens/s · 38 s left",
    ]


def test_speed_excludes_validation() -> None:
    stream = io.StringIO()
    reporter = Lines(stream)
    for step, seconds in ((1, 1.0), (2, 2.0), (3, 100.0), (4, 101.0), (5, 140.0)):  # a pause, then an event, before 3
        reporter.loss(4.0, 100)
        if step == 3:
            reporter.event(EVENTS[1])
        reporter.tick(step, step / 100, seconds)
    assert "step 3 · loss 4.000 · 100 tokens/s" in stream.getvalue()


def test_durations_are_formatted() -> None:
    assert [format_duration(x) for x in (0.4, 59, 60, 3599.6, 7260)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "1 h 00 min",
        "2 h 01 min",
    ]


def test_reopened_log_is_truncated_to_its_position(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path)
    log.write({"event": "train", "step": 1})
    position = log.position
    log.write({"event": "train", "step": 2, "loss": float("nan"), "norm": float("inf")})
    log.sync()
    log.close()
    assert read_log(path)[1] == {"event": "train", "step": 2, "loss": None, "norm": None}
    reopened = Log(path, position)
    reopened.write({"event": "é", "step": 3})
    reopened.close()
    assert [event["step"] for event in read_log(path)] == [1, 3]
    assert path.stat().st_size == reopened.position


def test_incomplete_last_line_of_the_log_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    assert read_log(path) == [{"step": 1}]


def test_unwritable_log_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log\.jsonl: cannot write"):
        Log(tmp_path / "missing" / "log.jsonl")
    log = Log(tmp_path / "log.jsonl")
    log.close()
    with Path("/dev/full").open("ab", buffering=0) as log._file, pytest.raises(UserError, match="No space left"):
        log.write({"event": "x"})


def test_error_names_a_log_that_cannot_be_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "log.jsonl")  # a FIFO cannot be truncated; without the patch it is refused
    monkeypatch.setattr("regard.training.log.open_file", Path.open)
    reader = os.open(tmp_path / "log.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(UserError, match=r"log\.jsonl: cannot write: Invalid argument"):
        Log(tmp_path / "log.jsonl")
    os.close(reader)


@pytest.mark.parametrize(
    ("kind", "number"),
    [(Lines, errno.EPIPE), (Lines, errno.EIO), (Lines, errno.ENOSPC), (Live, errno.EIO), (Live, errno.ENOSPC)],
)
def test_reporters_ignore_errors_of_their_output(
    kind: type[Reporter], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed terminal, a pipe whose reader has ended, a full disk."""
    monkeypatch.setenv("TERM", "xterm-256color")

    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(number, "gone")

    stream = Gone()
    assert output(kind(stream), stream) == ""


def test_line_reporter_ignores_a_closed_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        for _ in range(3):
            Lines(stream).say("progress")  # leaving the block flushes the buffer, which must not fail


def test_model_card_describes_the_run(recipe: MakeRecipe, tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    statistics = Statistics(examples=(Example("`a` <b>\r\n# c", "x *y*", "N;PL"),))
    write_json(run / STATISTICS, statistics.model_dump(mode="json"))
    best = Best(step=40, value=31.5, scores={"loss": 0.5, "bleu": 31.5}, averaged=3)
    progress = Progress(step=50, epoch=2, seconds=61, best=best, finished="steps", skipped=1)
    order = recipe(metric="bleu", validate_beam=4)
    write_model_card(
        run,
        order,
        progress,
        parameters=1234567,
        examples=(120, 20),
        files={"training file 1": DataFile("train.tsv", 1234, "ab12")},
        notes=["source tokens: char: short", f"from {order.data.train[0]} + {order.data.valid[0]}"],
        signatures={"bleu": "nrefs:1|v:2"},
    )
    card = (run / "README.md").read_text()
    for text in (
        "# my run",
        "\n\n    `a` <b> # c → N;PL → x *y*\n\n",  # indented: no markup
        "1,234,567 parameters",
        "| bleu | 31.5 | BLEU, `nrefs:1|v:2` |",
        "| perplexity | 1.649 |",
        "the mean of 3 checkpoints, chosen by the highest bleu; outputs by beam search (4)",
        "120 examples to train on, 20 to validate",
        "training file 1: `train.tsv`, 1,234 bytes, SHA-256 `ab12`",
        "from train.tsv + valid.tsv",
        "source tokens: char: short",
        "regard generate 'my run' input.txt",
        "skipped steps: 1",
    ):
        assert text in card
    assert str(tmp_path) not in card


HOSTILE = (
    "<img src=x onerror=alert(1)>", "<!--", "&lt;", "[a](http:evil)", "![a](b)", "*a*", "**b", "_c_", "__d__", "`e`",
    "```", "\\", "~~f~~", "http://evil.example", "www.evil.example", "a@b.example", "$x$", "# h #",
    "\n---\nlabels: x\n---\n", "\u2028", "a_b.tsv", "- item", "1. item", "\ud800",
)  # fmt: skip


def test_texts_of_users_are_text_in_the_model_card(recipe: MakeRecipe, tmp_path: Path) -> None:
    """Names of runs and files, labels and notes, read by a parser of Markdown."""
    run = tmp_path / "".join(HOSTILE).replace("/", "")[:200].replace("\ud800", "")
    run.mkdir()
    order = recipe().with_data(train=(str(tmp_path / HOSTILE[0]), "`f`"), valid=None)
    order = order.model_copy(update={"preset": "`p`*"})
    for files in ({}, {"training file 1": DataFile("".join(HOSTILE), 1, "ab")}):
        notes = [f"labels: {''.join(HOSTILE)}", *(f"label: {text}" for text in HOSTILE)]
        write_model_card(run, order, Progress(), parameters=1, examples=(1, 1), files=files, notes=notes, signatures={})
        card = (run / "README.md").read_text()
        assert card.startswith("# ")  # no front matter
        tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).enable("strikethrough").parse(card)
        inline = [child for token in tokens for child in token.children or ()]
        allowed = {"text", "softbreak", "code_inline", "text_special"}
        assert {child.type for child in inline} <= allowed, [child for child in inline if child.type not in allowed]
        blocks = {token.type for token in tokens} - {"inline"}
        lists = {"bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close"}
        simple = {f"{name}_{end}" for name in ("heading", "paragraph") for end in ("open", "close")}
        assert blocks == simple | lists | {"fence"}
        texts = ["".join(child.content for child in token.children or ()) for token in tokens if token.type == "inline"]
        assert texts[0] == " ".join(run.name.split())
        for note in notes:
            assert " ".join(note.replace("\ud800", "?").split()) in texts
        assert [token.content.count("regard") for token in tokens if token.type == "fence"] == [3, 2]
        assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1", "h2", "h2", "h2", "h2"]
        for link in ("http://evil", "www.evil", "a@b"):  # GitHub turns bare addresses into links
            assert not any(link in line for line in card.splitlines() if line.startswith("- label"))


def test_model_card_reports_missing_scores(recipe: MakeRecipe, tmp_path: Path) -> None:
    write_model_card(tmp_path, recipe(), Progress(), parameters=1, examples=(1, 1), files={}, notes=[], signatures={})
    card = (tmp_path / "README.md").read_text()
    assert "None: the loss was not a finite number in any validation." in card
    assert "An example" not in card
    assert "- files: `train.tsv`, `valid.tsv`" in card  # runs of old versions have no record of their files


def test_curve_is_an_svg_file(tmp_path: Path) -> None:
    events = [{"event": "start"}]
    for step in range(10, 60, 10):
        events.append({"event": "train", "step": step, "loss": 5 / step})
        events.append({"event": "valid", "step": step, "loss": 6 / step, "wer": 900 / step, "best": step < 40})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    path = draw_curve(tmp_path, "wer")
    assert path is not None
    assert xml.parse(path).getroot().tag.endswith("svg")
    assert path.stat().st_size > 5000


def test_no_curve_is_drawn_without_events(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n')
    assert draw_curve(tmp_path, "loss") is None
