"""The script of the live page equals torch for every preset and every supported setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from test_live import RECURRENT, STACKS

from kit.models import WORDS, picture
from kit.page import opened, same_trace, sharpened
from regard.batch import Pixels
from regard.config import Activation, PositionKind, ScoreName
from regard.errors import UserError
from regard.inspect import live
from regard.inspect.live import require_supported, write_live_page
from regard.inspect.trace import Trace, trace, trace_image
from regard.model import Model
from regard.presets import PRESETS, preset
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

pytest.importorskip("py_mini_racer")


def stacks_of(name: str) -> list[dict[str, Any]]:
    return [stack for side in ("encoder", "decoder") if (stack := PRESETS[name].get(side))]


HASHED = [name for name in PRESETS if any(stack.get("mixer") == "lsh" for stack in stacks_of(name))]


def small(name: str) -> Run:
    """A small run of a preset; values that define the family are unchanged."""
    changes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        if stack := PRESETS[name].get(side):
            sizes: dict[str, Any] = {"layers": 2, "width": 16}
            if stack.get("mixer", "attention") not in ("gru", "lstm"):
                sizes |= {"heads": 4, "ff": 32, "max_length": 64}
                sizes |= {key: value for key, value in (("kv_heads", 2), ("head_width", 6)) if stack.get(key)}
            changes[side] = sizes
    tokenizer = Tokenizer.train("char", WORDS, mask=True)
    changes["ids"] = tokenizer.ids.model_dump()
    pixels = None
    if "patches" in PRESETS[name]:
        changes |= {"patches": {"channels": 1, "height": 8, "width": 8, "size": 2}, "classes": 3}
        changes["encoder"]["max_length"] = 17
        pixels = Pixels(mean=(4.0,), scale=(8.0,))
    torch.manual_seed(2)
    model = Model(preset(name, tokenizer.size, changes=changes)).eval()
    labels = ("one", "two", "three") if model.config.classes else ()
    codec = Codec(tokenizer, tokenizer, frame=model.config.frame)
    return sharpened(Run(model.config, codec, model, Path("runs/small"), labels, pixels), 2.0, biases=True)


def example(run: Run, text: str) -> tuple[Trace, dict[str, Any], list[int]]:
    """A trace, and the same input and ids for the page."""
    if run.task.reads == "images":
        return trace_image(run, picture()), {"pixels": picture().astype(float).ravel().tolist(), "name": "image"}, []
    ids = []
    if run.config.decoder is not None:
        ids = run.codec.encode_target(["bca"])[0] if run.task.seq2seq else run.codec.target.encode(["bca"])[0]
    return trace(run, Example(text), ids), {"source": text}, ids


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in HASHED])
def test_page_equals_torch_for_every_preset(name: str) -> None:
    run = small(name)
    first, _, _ = example(run, "abc")
    with opened(run, first) as page:
        same_trace(page, *example(run, "dab ba"))


@pytest.mark.parametrize("name", HASHED)
def test_hashed_attention_is_refused(name: str) -> None:
    model = Model(preset(name, 12, changes={"decoder": {"layers": 1}}))
    tokenizer = Tokenizer.train("char", WORDS)
    with pytest.raises(UserError, match="a page cannot compute LSH attention"):
        require_supported(Run(model.config, Codec(tokenizer, tokenizer), model, Path("runs/hashed")))


def test_compared_models_cover_every_value_of_a_setting() -> None:
    stacks = [*STACKS.values(), *(stack for _, stack in RECURRENT.values())]
    presets = [stack for name in PRESETS if name not in HASHED for stack in stacks_of(name)]

    def values(key: str) -> set[Any]:
        return {stack[key] for stack in (*stacks, *presets) if key in stack}

    assert set(get_args(ScoreName)) <= values("score") | {"scaled_dot"}
    assert set(get_args(PositionKind)) <= values("position")
    assert set(get_args(Activation)) <= values("activation") | {"relu"}
    assert values("norm") | {"layer"} == {"layer", "rms"} and values("norm_at") == {"pre", "post"}


def test_page_with_wrong_answers_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing file is left unchanged."""
    run = small("transformer-tiny")
    path = tmp_path / "page.html"
    path.write_text("before", encoding="utf-8")
    original = live.model_block

    def wrong_block(*arguments: Any, **options: Any) -> dict[str, Any]:
        block = original(*arguments, **options)
        block["config"]["decoder"]["norm_eps"] = 0.5
        return block

    monkeypatch.setattr(live, "model_block", wrong_block)
    with pytest.raises(UserError, match="not written: the page would answer"):
        write_live_page(run, path)
    assert path.read_text("utf-8") == "before" and [each.name for each in tmp_path.iterdir()] == ["page.html"]
