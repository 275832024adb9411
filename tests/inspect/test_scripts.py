"""The page's JavaScript modules in Node.js."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kit.models import family, letters, picture
from kit.node import JS_TESTS, needs_node, run_node
from regard.data.images import LabelledImages
from regard.inspect.heads import measure_heads
from regard.inspect.trace import Trace, trace, trace_image
from regard.run import Run
from regard.text.codec import Example, direction

pytestmark = needs_node

TESTS = sorted(file for file in JS_TESTS.glob("*.test.js") if file.name != "tokenizer.test.js")
DESCRIBE = """
import { readFileSync } from "node:fs";
import { inflateSync } from "node:zlib";
const [folder, file] = process.argv.slice(-2);
const { setConstants } = await import(`${folder}/shared/constants.js`);
const { attachNumbers } = await import(`${folder}/page/core.js`);
const { describeHeads } = await import(`${folder}/page/words.js`);
const trace = JSON.parse(readFileSync(file));
setConstants(trace.constants);
const bytes = inflateSync(Buffer.from(trace.numbers, "base64"));
attachNumbers(trace, bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
console.log(JSON.stringify(Object.fromEntries(describeHeads(trace))));
"""


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.name)
def test_javascript_unit_tests_pass(file: Path) -> None:
    run_node("--test", file)


DIRECTIONS = """
import { readFileSync } from "node:fs";
const [folder, file] = process.argv.slice(-2);
const { setConstants } = await import(`${folder}/shared/constants.js`);
setConstants(JSON.parse(process.env.PAGE_CONSTANTS));
const { direction } = await import(`${folder}/shared/direction.js`);
console.log(JSON.stringify(JSON.parse(readFileSync(file)).map(direction)));
"""


def test_direction_equals_that_of_python(tmp_path: Path) -> None:
    """Every character, alone and before a character of the other direction, and random strings."""
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    random = Random(28)
    texts = characters + [char + "\u05d0" for char in characters]
    texts += ["".join(random.choices(characters, k=random.randint(0, 12))) for _ in range(20_000)]
    texts += ["".join(random.choices("12 .,!?-#\u0301\u064b\u05d0\u0627aé漢", k=6)) for _ in range(2_000)]
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(texts), encoding="utf-8")
    directions = json.loads(run_node(path, program=DIRECTIONS))
    differences = [text for text, ours in zip(texts, directions, strict=True) if ours != direction(text)]
    assert not differences, differences[:8]
    assert {"ltr", "rtl"} == set(directions)


def describe_heads(result: Trace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The page's description of every head."""
    path = folder / "trace.json"
    path.write_text(json.dumps(result.page_data()), encoding="utf-8")
    out: dict[str, list[dict[str, Any]]] = json.loads(run_node(path, program=DESCRIBE))
    return out


def sharpened(run: Run) -> Run:
    with torch.no_grad():
        for name, x in run.model.named_parameters():
            if "query" in name or "key" in name or "patch" in name:
                x.mul_(4.0)
    return run


@pytest.mark.parametrize("kind", ["pairs", "image"])
def test_page_describes_heads_like_the_heads_command(kind: str, tmp_path: Path) -> None:
    """Words and shares are equal for an input that is long enough to show a pattern."""
    if kind == "pairs":
        run = sharpened(letters())
        example = Example("abcabba dcab dcabcabba", "bcdabcabdab cabbadcab")
        result = trace(run, example, run.codec.encode_target([example.target or ""])[0])
        heads = measure_heads(run, [example], ablation=False)
    else:
        run = sharpened(family("image"))
        result = trace_image(run, picture())
        heads = measure_heads(run, LabelledImages(picture()[None], ["one"]), ablation=False)
    page = describe_heads(result, tmp_path)
    assert len(heads) == sum(len(list_) for list_ in page.values())
    for head in heads:
        ours = page[head.name][head.index]
        assert ours["what"] == head.what, head
        assert ours["share"] == pytest.approx(head.share, abs=2e-3)
        assert [name for name, _ in ours["parts"]] == [name for name, _ in head.parts]
    assert kind == "image" or len({head.what for head in heads}) >= 2
