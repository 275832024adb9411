from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path

from backwards import MakeRecipe

from regard.training.checkpoint import Best, Progress
from regard.training.model_card import write_model_card
from regard.training.report import draw_curve


def test_the_card_tells_what_why_and_how(recipe: MakeRecipe, tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    best = Best(step=40, value=31.5, scores={"loss": 0.5, "bleu": 31.5}, averaged=3)
    progress = Progress(step=50, epoch=2, seconds=61, best=best, finished="steps", skipped=1)
    order = recipe(metric="bleu", validate_beam=4)
    write_model_card(
        run,
        order,
        progress,
        parameters=1234567,
        examples=(120, 20),
        notes=["source tokens: char: short"],
        signatures={"bleu": "nrefs:1|v:2"},
    )
    card = (run / "README.md").read_text()
    for text in (
        "# my run",
        "1,234,567 parameters",
        "| bleu | 31.5 | BLEU, `nrefs:1|v:2` |",
        "| perplexity | 1.649 |",
        "the mean of 3 checkpoints, chosen by the highest bleu; outputs by beam search (4)",
        "120 examples to train on, 20 to validate",
        f"`{order.data.train}`",
        "source tokens: char: short",
        f"regard generate '{run}' input.txt",
        "skipped steps: 1",
    ):
        assert text in card


def test_a_run_without_a_score_says_so(recipe: MakeRecipe, tmp_path: Path) -> None:
    write_model_card(tmp_path, recipe(), Progress(), parameters=1, examples=(1, 1), notes=[], signatures={})
    assert "no validation gave a number" in (tmp_path / "README.md").read_text()


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    events = [{"event": "start"}]
    for step in range(10, 60, 10):
        events.append({"event": "train", "step": step, "loss": 5 / step})
        events.append({"event": "valid", "step": step, "loss": 6 / step, "wer": 900 / step, "best": step < 40})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    path = draw_curve(tmp_path, "wer")
    assert path is not None
    assert xml.parse(path).getroot().tag.endswith("svg")
    assert path.stat().st_size > 5000


def test_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n')
    assert draw_curve(tmp_path, "loss") is None
