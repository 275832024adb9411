"""The HTML page of a trace: one file, content security policy, escaping, packed numbers, bundled script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kit.models import letters
from kit.node import WEB
from regard.inspect.inputs import Note
from regard.inspect.page import Packer, bundle, page_hashes, read_asset, render_page
from regard.inspect.trace import Trace, trace
from regard.run import Run
from regard.text.codec import Example

NASTY = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>",
    "&lt;b&gt;",
    "\u2028\u2029",
    "'\"`${alert(1)}",
    "[[script]][[data]][[style]]",
    "\ud800",
    "\x00\x1b[31m",
]


class Reader(HTMLParser):
    """Collects the elements of a page with their attributes, and the text of script elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += text


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


@pytest.fixture(scope="module")
def trace_result() -> Trace:
    run = letters()
    return trace(run, Example("abcab"), run.codec.encode_target(["bcd"])[0])


def with_tokens(trace_result: Trace, token: str) -> Trace:
    """The trace with one text in all fields that can contain untrusted text."""
    candidate = trace_result.steps[0].candidates[0]._replace(token=token)
    step = replace(trace_result.steps[0], token=token, candidates=(candidate,))
    return replace(
        trace_result,
        title=token,
        facts={token: token},
        texts={"source": token, "output": token},
        tokens={name: (token,) * len(tokens) for name, tokens in trace_result.tokens.items()},
        steps=(step,) * len(trace_result.steps),
        notes=(Note("method", token),),
    )


def structure(text: str) -> list[tuple[str, dict[str, str | None]]]:
    return read(text).elements


def test_page_is_one_file_without_links(trace_result: Trace) -> None:
    text = trace_result.to_html()
    names = [name for name, _ in structure(text)]
    assert names.count("script") == 2
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(names)
    for name, attributes in structure(text):
        assert not {"src", "href"} & set(attributes), name
    outside = re.findall(r"https?://[^\s\"'<]+", text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}


def test_policy_allows_only_the_script_and_style_of_the_page(trace_result: Trace) -> None:
    text = trace_result.to_html()
    (policy,) = [a["content"] for _, a in structure(text) if a.get("http-equiv") == "Content-Security-Policy"]
    script = re.findall(r"<script>(.*?)</script>", text, re.S)[0]
    style = re.findall(r"<style>(.*?)</style>", text, re.S)[0]
    for name, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy is not None and f"{name} 'sha256-{digest}'" in policy
    assert policy is not None and "unsafe" not in policy and policy.startswith("default-src 'none'")


def test_policy_of_a_page_with_a_model_allows_webassembly(trace_result: Trace) -> None:
    model = {"name": "</script><script>alert(1)</script>", "bytes": "AAAA"}
    text = render_page(trace_result.page_data(), model)
    (policy,) = [a["content"] for _, a in structure(text) if a.get("http-equiv") == "Content-Security-Policy"]
    script = re.findall(r"<script>(.*?)</script>", text, re.S)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None and f"script-src 'sha256-{digest}' 'wasm-unsafe-eval';" in policy
    assert "unsafe-eval'" not in trace_result.to_html() and "makeEngine" not in trace_result.to_html()
    elements = structure(text)
    assert [a.get("id") for name, a in elements if name == "script"] == ["data", "model", None]
    assert json.loads(read(text).scripts[1]) == model


def test_page_data_can_be_decoded(trace_result: Trace) -> None:
    block = json.loads(read(trace_result.to_html()).scripts[0])
    numbers = zlib.decompress(base64.b64decode(block["numbers"]))
    assert block["tokens"] == {name: list(tokens) for name, tokens in trace_result.tokens.items()}
    for entry, m in zip(block["maps"], trace_result.maps, strict=True):
        weights = unpack(entry["weights"], numbers)
        assert np.allclose(weights, m.weights_HTS, atol=1e-4), m.name
    picture = unpack(block["positions"][0]["values"], numbers)
    assert np.allclose(picture, trace_result.positions[0].values_RC, atol=1e-4)


def unpack(entry: dict[str, Any], numbers: bytes) -> np.ndarray:
    kind = {"u2": "<u2", "i2": "<i2"}[entry["type"]]
    count = int(np.prod(entry["shape"]))
    return np.frombuffer(numbers, kind, count, entry["at"]).reshape(entry["shape"]) * entry["scale"]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9))
def test_packed_numbers_are_close_to_the_originals(numbers: list[float]) -> None:
    packer = Packer()
    packer.weights(np.array([0.5], dtype=np.float32))  # shifts the offset of the next array
    x = np.array([*numbers, np.inf], dtype=np.float32)
    entry = packer.signed(x)
    numbers_back = unpack(entry, zlib.decompress(base64.b64decode(packer.pack())))
    assert np.allclose(numbers_back[:-1], x[:-1], atol=np.abs(x[:-1]).max() / 32767)
    assert numbers_back[-1] == -32768 * entry["scale"]


@pytest.mark.parametrize("token", NASTY)
def test_untrusted_text_is_never_markup(trace_result: Trace, token: str) -> None:
    plain, nasty = trace_result.to_html(), with_tokens(trace_result, token).to_html()
    assert structure(nasty) == structure(plain)
    assert read(nasty).scripts[1] == read(plain).scripts[1]
    assert json.loads(read(nasty).scripts[0])["title"] == token
    nasty.encode("utf-8")


def test_notebook_frame_is_sandboxed(trace_result: Trace) -> None:
    text = trace_result._repr_html_()
    ((name, attributes),) = structure(text)
    assert name == "iframe" and attributes["sandbox"] == "allow-scripts"
    assert attributes["srcdoc"] == trace_result.to_html()
    assert html.unescape(text).count("<iframe") == 1


def test_page_of_a_large_model_is_below_three_megabytes(make_letters: Callable[..., Run]) -> None:
    run = make_letters(layers=6, heads=8, width=64)
    text = trace(run, Example("abcde" * 6), run.codec.encode_target(["bcdab" * 6])[0]).to_html()
    assert len(text.encode()) < 3_000_000


def test_packed_weights_of_long_texts_sum_to_one(make_letters: Callable[..., Run]) -> None:
    run = make_letters()
    trace_result = trace(run, Example("abcde" * 60), run.codec.encode_target(["bcdab" * 60])[0])
    block = trace_result.page_data()
    numbers = zlib.decompress(base64.b64decode(block["numbers"]))
    for entry, m in zip(block["maps"], trace_result.maps, strict=True):
        assert m.weights_HTS.shape[1:] == (300, 300)
        assert np.allclose(unpack(entry["weights"], numbers).sum(-1), 1.0, atol=3e-3), m.name


def test_page_data_has_no_entries_for_missing_attention_kinds(make_letters: Callable[..., Run]) -> None:
    run = make_letters("rnn-luong")
    block = trace(run, Example("ab"), []).page_data()
    assert block["positions"] == [] and [m["kind"] for m in block["maps"]] == ["cross"]
    assert len(block["steps"]) == 1  # only the end token


def test_script_is_bundled_from_modules(tmp_path: Path) -> None:
    script = bundle("page/start.js")
    assert not re.search(r"^(import|export)\b", script, re.M) and "</script" not in script
    assert script.index("let data = null") < script.index("function h(") < script.index("storedData().then")
    assert script.count("let data = null") == 1  # once for any number of importing modules
    if node := shutil.which("node"):
        path = tmp_path / "bundle.js"
        path.write_text(script, encoding="utf-8")
        subprocess.run([node, "--check", path], check=True)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"a.js": 'import { b } from "./b.js";\n', "b.js": "const b = 1;\n"}, "imports b, which b.js does not export"),
        ({"a.js": 'import { b } from "./b.js";\nlet c;\n', "b.js": "export let b;\nlet c;\n"}, "both declare c"),
        (
            {"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\nexport const b = 1;\n'},
            "a.js -> b.js -> a.js",
        ),
        ({"a.js": "export default 1;\n"}, "cannot be bundled: export default"),
        ({"a.js": 'import * as b from "./b.js";\n'}, "cannot be bundled: import"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_bundled_are_refused(modules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bundle("a.js", modules.__getitem__)


def test_every_module_is_part_of_a_page() -> None:
    names: set[str] = set()

    def read_and_note(name: str) -> str:
        names.add(name)
        return read_asset(name)

    for entry in ("page/start.js", "page/live.js", "page/proof.js"):
        bundle(entry, read_and_note)
    assert names == {
        str(file.relative_to(WEB)) for folder in ("page", "shared") for file in (WEB / folder).glob("*.js")
    }


def test_modules_have_at_most_600_lines() -> None:
    for file in WEB.glob("*/*.js"):
        assert len(file.read_text("utf-8").split("\n")) <= 600, file.name


def test_page_hashes_are_those_of_the_page(trace_result: Trace) -> None:
    text = trace_result.to_html()
    assert all(digest in text for digest in page_hashes().values())
