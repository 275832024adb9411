"""The verbs inspect, heads and prune on the command line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit.models import family, letters, picture
from regard.cli import heads, inspect, prune
from regard.decode.alignment import load_heads
from regard.errors import UserError
from regard.inspect.trace import continuation
from regard.model import Model
from regard.run import Run
from regard.text.codec import Codec


@pytest.fixture
def run_path(tmp_path: Path) -> str:
    letters().save(tmp_path / "run")
    return str(tmp_path / "run")


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    path = tmp_path / "pairs.tsv"
    path.write_text(
        "abc\tcba\nbcd\tdcb\ncab\tbac\ndab\tbad\nab\tba\ncd\tdc\nabcd\tdcba\nbad\tdab\nac\tca\nda\tad\nbc\tcb\n"
    )
    return str(path)


def test_inspect_writes_a_page(run_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    inspect.command(run_path, "abc", output=str(out))
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    output = capsys.readouterr()
    assert output.out == "" and "abc → " in output.err and "page.html: written" in output.err


def test_page_has_a_default_file_name(run_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inspect.command(run_path, "abc", target="cab")
    text = (tmp_path / "attention.html").read_text(encoding="utf-8")
    assert '"output":["c","a","b","\\u003ceos\\u003e"]' in text


def test_attention_is_drawn_in_the_terminal_and_to_files(
    run_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    inspect.command(run_path, "-", target="cab", terminal=True, png="a.png", svg="a.svg")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["a", "b", "c", "<eos>"] and [line[0] for line in lines[1:4]] == ["c", "a", "b"]
    assert (tmp_path / "a.png").is_file() and (tmp_path / "a.svg").is_file()
    assert not (tmp_path / "attention.html").exists()
    inspect.command(run_path, "abc", target="cab", attention="encoder", layer=2, head=4, terminal=True, png="b.png")
    assert capsys.readouterr().out.splitlines()[1].startswith("a")
    inspect.command(run_path, "abc", target="cab", attention="decoder", terminal=True, png="c.png")
    assert capsys.readouterr().out.splitlines()[0].split() == ["<sos>", "c", "a", "b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "crss"}, "did you mean 'cross'"),
        ({"head": 2}, "needs --layer"),
        ({"layer": 9, "terminal": True}, "no cross attention in layer 9"),
        ({"layer": 1, "head": 9, "terminal": True}, "no head 9 in layer 1; it has 1, 2, 3, 4"),
    ],
)
def test_invalid_inspect_options_are_refused(options: dict[str, object], message: str, run_path: str) -> None:
    with pytest.raises(UserError, match=message):
        inspect.command(run_path, "abc", target="a", **options)  # type: ignore[arg-type]


def test_empty_text_is_refused(run_path: str) -> None:
    with pytest.raises(UserError, match="TEXT is empty"):
        inspect.command(run_path, " ")


def test_heads_are_listed_and_the_best_are_saved(run_path: str, pairs: str, capsys: pytest.CaptureFixture[str]) -> None:
    heads.command(run_path, pairs)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t") == list(heads.NAMES) and len(lines) == 25
    assert load_heads(Path(run_path))
    heads.command(run_path, pairs, no_ablation=True, json=True, no_store=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 24 and "ablation" not in rows[0]
    assert {row["kind"] for row in rows} == {"encoder", "decoder", "cross"}


def test_heads_with_links_draws_a_picture(run_path: str, pairs: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    links = tmp_path / "links"
    links.write_text("0-1 1-0\n" * 11)
    heads.command(run_path, pairs, links=str(links), picture=str(tmp_path / "heads.svg"), examples=4)
    assert (tmp_path / "heads.svg").is_file()
    assert load_heads(Path(run_path))


def test_prune_writes_a_smaller_run_and_a_report(
    run_path: str, pairs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, picture = str(tmp_path / "small"), str(tmp_path / "curve.svg")
    prune.command(run_path, out, data=pairs, heads="40%", tune=2, picture=picture)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["", "before", "pruned", "tuned"] and lines[1] == ["heads", "24", "14", "14"]
    assert Run.load(out).config.decoder is not None and Path(picture).is_file()
    report = json.loads((tmp_path / "small" / "prune.json").read_text())
    assert report["before"]["heads"] == 24 and len(report["curve"]) > 5
    inspect.command(out, "abc", target="ab", terminal=True)
    prune.command(out, str(tmp_path / "smaller"), data=pairs, valid=pairs, threshold=1e9, json=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["after"]["heads"] == 6


def test_invalid_prune_options_are_refused(
    run_path: str, pairs: str, tmp_path: Path, make_letters: Callable[..., Run]
) -> None:
    with pytest.raises(UserError, match="exists already"):
        prune.command(run_path, str(tmp_path), data=pairs, heads="2")
    with pytest.raises(UserError, match="did you mean 'gradient'"):
        prune.command(run_path, str(tmp_path / "new"), data=pairs, heads="2", by="gradent")
    with pytest.raises(UserError, match="how many heads to remove"):
        prune.command(run_path, str(tmp_path / "new"), data=pairs)
    few = tmp_path / "few.tsv"
    few.write_text("a\tb\n")
    with pytest.raises(UserError, match="too few"):
        prune.command(run_path, str(tmp_path / "new"), data=str(few), heads="2")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["lm", "masked", "classes", "vectors", "lm-hashed"])
def test_inspect_reads_a_text_with_single_stack_models(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    family(kind).save(tmp_path / "run")
    inspect.command("run", "abc", output="page.html", terminal=True)
    assert (tmp_path / "page.html").is_file()
    first = capsys.readouterr().out.splitlines()[0].split()
    assert first == {"lm": ["<eos>", "a", "b"], "lm-hashed": ["<eos>", "a", "b"]}.get(
        kind, ["<sos>", "a", "b", "c", "<eos>"]
    )


def test_inspect_continues_a_text_with_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, page = family("lm-grouped"), tmp_path / "page.html"
    run.save(tmp_path / "run")
    inspect.command(str(tmp_path / "run"), "abc", go_on=4, output=str(page))
    ids = continuation(run, "abc", 4)
    message = f"abc → {run.codec.decode_target(ids)}"
    assert message in capsys.readouterr().err
    with torch.no_grad():  # a single forward pass gives the same ids
        start = [run.config.start_id, *run.codec.target.encode(["abc"])[0]]
        assert run.model(torch.tensor([[*start, *ids[:-1]]]), None)[0, len(start) - 1 :].argmax(-1).tolist() == ids
    with pytest.raises(UserError, match="choose one"):
        inspect.command(str(tmp_path / "run"), "abc", target="b", go_on=4)


def test_inspect_reads_an_image_by_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    family("image").save(tmp_path / "run")
    images = np.concatenate([picture(0), picture(1)])
    np.savez("digits.npz", images=images, labels=np.array(["one", "two"]))
    inspect.command("run", "digits.npz", index=1, output="page.html")
    assert "label: two" in capsys.readouterr().err
    assert '"height":8' in (tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="has 2 images"):
        inspect.command("run", "digits.npz", index=2)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("masked", {"go_on": 3}, "only a language model"),
        ("masked", {"target": "abc"}, "no output to compare"),
        ("classes", {"target": "four"}, "label"),
        ("lm", {"attention": "cross", "png": "a.png"}, "no cross attention"),
    ],
)
def test_invalid_options_for_single_stack_models_are_refused(
    kind: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    family(kind).save(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        inspect.command(str(tmp_path / "run"), "abc", **options)


def test_unknown_tokens_are_reported_and_features_are_checked(
    run_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inspect.command(run_path, "aßc", target="cq", terminal=True)
    assert "not in the vocabulary: 'ß' (U+00DF), 'q'" in capsys.readouterr().err
    inspect.command(run_path, "abc", terminal=True)
    assert "vocabulary" not in capsys.readouterr().err
    with pytest.raises(UserError, match="--features: not for this run, which was trained without features"):
        inspect.command(run_path, "abc", features="N")
    run = letters()
    codec = Codec(run.codec.source, run.codec.source, ("N",), ("source", "features", "target"))
    config = run.config.model_copy(update={"source_vocab": codec.source_vocab, "target_vocab": codec.target_vocab})
    Run(config, codec, Model(config).eval(), run.path).save(tmp_path / "features")
    with pytest.raises(UserError, match="--features: is required"):
        inspect.command("features", "abc", terminal=True)
    inspect.command("features", "abc", features="N;PL", target="ab", terminal=True)
    assert "not in the vocabulary: 'PL'" in capsys.readouterr().err
