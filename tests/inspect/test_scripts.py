"""The page's JavaScript modules by themselves, in Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import regard.inspect
from kit.models import family, letters, picture
from regard.data.images import LabelledImages
from regard.inspect.heads import measure_heads
from regard.inspect.trace import Trace, trace, trace_image
from regard.run import Run
from regard.text.codec import Example

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no Node.js on this machine")

HERE, WEB = Path(__file__).parent, Path(regard.inspect.__file__).parent / "web"
TESTS = sorted(file for file in (HERE / "js").glob("*.test.js") if file.name != "tokenizer.test.js")
DESCRIBE = """
import { readFileSync } from "node:fs";
import { inflateSync } from "node:zlib";
const [folder, file] = process.argv.slice(-2);
const { attachNumbers } = await import(`${folder}/core.js`);
const { describeHeads } = await import(`${folder}/words.js`);
const trace = JSON.parse(readFileSync(file));
const bytes = inflateSync(Buffer.from(trace.numbers, "base64"));
attachNumbers(trace, bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
console.log(JSON.stringify(Object.fromEntries(describeHeads(trace))));
"""


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.name)
def test_in_node(file: Path) -> None:
    done = subprocess.run([str(NODE), "--test", file], capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def described(found: Trace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the page says of every head."""
    path = folder / "trace.json"
    path.write_text(json.dumps(found.page_data()), encoding="utf-8")
    command = [str(NODE), "--input-type=module", "-", str(WEB), str(path)]
    done = subprocess.run(command, input=DESCRIBE, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    out: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return out


def sharpened(run: Run) -> Run:
    with torch.no_grad():
        for name, x in run.model.named_parameters():
            if "query" in name or "key" in name or "patch" in name:
                x.mul_(4.0)
    return run


@pytest.mark.parametrize("kind", ["pairs", "image"])
def test_heads_are_described_as_by_regard_heads(kind: str, tmp_path: Path) -> None:
    """The same words and shares for one input that is long enough to show a pattern."""
    if kind == "pairs":
        run = sharpened(letters())
        example = Example("abcabba dcab dcabcabba", "bcdabcabdab cabbadcab")
        found = trace(run, example, run.codec.encode_target([example.target or ""])[0])
        heads = measure_heads(run, [example], ablation=False)
    else:
        run = sharpened(family("image"))
        found = trace_image(run, picture())
        heads = measure_heads(run, LabelledImages(picture()[None], ["one"]), ablation=False)
    page = described(found, tmp_path)
    assert len(heads) == sum(len(list_) for list_ in page.values())
    for head in heads:
        ours = page[head.name][head.index]
        assert ours["what"] == head.what, head
        assert ours["share"] == pytest.approx(head.share, abs=2e-3)
        assert [name for name, _ in ours["parts"]] == [name for name, _ in head.parts]
    assert kind == "image" or len({head.what for head in heads}) >= 2
