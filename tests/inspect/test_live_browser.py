"""The page that is the model, in a real browser: what people do with it. Skipped where there is none."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import chromium
from modelkit import family, letters, tiny
from pagekit import PAYLOADS, complaints
from regard.decode.generate import TorchEngine
from regard.decode.hypothesis import Hypothesis
from regard.decode.options import Options
from regard.decode.request import Request
from regard.inspect.live import WeightPacker, first_trace, model_block
from regard.inspect.page import render_page
from regard.inspect.trace import trace, trace_image
from regard.model import Model
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (apt-get install chromium)")

OUTPUT = "document.querySelectorAll('.output')[0]"
TOKENS = f"Array.from({OUTPUT}.querySelectorAll('.token'), n => n.textContent).join('')"
TABS = "Array.from(document.querySelectorAll('[role=tab]'), t => t.id.slice(4))"


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Chromium]:
    assert PROGRAM is not None
    found = chromium.Chromium(PROGRAM)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def full_size(browser: chromium.Chromium) -> None:
    browser.resize(1280)


def sharpened(run: Run, factor: float = 3.0) -> Run:
    """The run with larger weights, so that its choices and heads differ."""
    with torch.no_grad():
        for name, x in run.model.named_parameters():
            if x.ndim > 1 and "embedding" not in name:
                x.mul_(factor)
    return run


@pytest.fixture(scope="module")
def pairs() -> Run:
    return sharpened(letters())


def page_of(run: Run, source: str = "abcab", features: str | None = None) -> str:
    example = None if run.task.reads == "images" else Example(source, features=features)
    found = first_trace(run, example)
    return render_page(found.page_data(), model_block(run, WeightPacker("fp32"), [example] if example else []))


def open_page(
    browser: chromium.Chromium, run: Run, folder: Path, view: str | None = None, dark: bool = False, **options: Any
) -> Path:
    """Open the live page of a run and wait for its first answer."""
    path = folder / "page.html"
    path.write_text(page_of(run, **options), encoding="utf-8")
    browser.open(path, dark)
    settle(browser)
    if view:
        browser.click(f"#tab-{view}")
    return path


def settle(browser: chromium.Chromium) -> None:
    """Wait until everything that was asked has been computed."""
    browser.until("document.querySelector('.bar-top').getAttribute('aria-busy') === 'false'")


def enter(browser: chromium.Chromium, text: str, field: int = 0) -> None:
    """Replace the text of an input field by typing."""
    browser.run(f"(() => {{ const f = document.querySelectorAll('.field')[{field}]; f.focus(); f.select(); }})()")
    browser.write(text)


def decoded(run: Run, source: str, features: str | None = None, **options: Any) -> list[Hypothesis]:
    return TorchEngine(run, Options(**options))([Request(source, features)])[0]


def shown(text: str) -> str:
    """An output as the page writes it token by token."""
    return text.replace(" ", "␣")


def test_typing_computes_what_regard_generates(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "alignment")
    for source in ("dabba", "cab ab", "bdca"):
        enter(browser, source)
        expected = decoded(pairs, source, beam=5, nbest=5)
        browser.until(f"{TOKENS}.startsWith({json.dumps(shown(expected[0].text))})")
        texts = "Array.from(document.querySelectorAll('.hypothesis bdi'), n => n.textContent)"
        browser.until(f"{texts}.length === 5")
        assert browser.run(texts) == [h.text if h.text.strip() else shown(h.text) or "∅" for h in expected]
        assert browser.run(f"{OUTPUT}.querySelector('.score').textContent").startswith("log-probability −")
        columns = "Array.from(document.querySelector('.words').children, n => n.textContent).join('')"
        browser.until(f"{columns} === {json.dumps(shown(source) + '<eos>')}")
    assert complaints(browser) == []


def test_views_follow_every_key(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    """How soon is measured by bench/page.py; here, that they do without a pause in typing."""
    open_page(browser, pairs, tmp_path, "alignment", source="abcab" * 6)
    script = """
      (async () => { const field = document.querySelector('.field'), seen = [];
        for (const end of ['d', 'dc', 'dcb', 'dcba']) {
          field.value = 'abcab'.repeat(5) + end; field.dispatchEvent(new Event('input'));
          const count = () => document.querySelector('.words').children.length;
          while (count() !== 26 + end.length) await new Promise(requestAnimationFrame);
          seen.push(count());
        }
        return seen; })()
    """
    assert browser.run(script) == [27, 28, 29, 30]
    assert complaints(browser) == []


def test_an_alternative_is_chosen_and_forced(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path)
    best = decoded(pairs, "abcab", beam=5)[0]
    browser.until(f"{TOKENS}.startsWith({json.dumps(shown(best.text))})")
    browser.click(".token", 1)
    browser.until("document.querySelectorAll('.alternative').length > 3")
    found = trace(pairs, Example("abcab"), list(best.ids))
    offered = browser.run("Array.from(document.querySelectorAll('.alternative bdi'), n => n.textContent)")
    candidates = [c.token for c in found.steps[1].candidates if c.token not in ("<sos>", "<pad>", "⁇")]
    assert offered[: len(candidates)] == [shown(token) for token in candidates]
    assert browser.run("document.activeElement.className") == "alternative"
    browser.key("ArrowRight")
    other = browser.run("document.activeElement.querySelector('bdi').textContent")
    browser.key("Enter")
    browser.until("document.querySelectorAll('.token.forced').length === 2")
    assert browser.run("document.querySelectorAll('.token')[1].textContent") == other.replace("<eos>", "■")
    assert "2 tokens forced" in browser.run("document.querySelector('.wishes summary').textContent")
    browser.until("location.hash.includes('forced=')")
    browser.click(".wishes summary")
    browser.click(".chip-button", 1)
    browser.until("document.querySelectorAll('.token.forced').length === 1")
    assert "1 token forced" in browser.run(f"{OUTPUT}.textContent")
    browser.click(".chip-button", 0)
    browser.until("document.querySelectorAll('.token.forced').length === 0")
    browser.until(f"{TOKENS}.startsWith({json.dumps(shown(best.text))})")
    browser.click(".token", 0)
    browser.key("Escape")
    assert browser.run("document.querySelectorAll('.alternative').length") == 0
    assert browser.run("document.activeElement.classList.contains('token')")
    assert complaints(browser) == []


def test_a_beginning_is_typed_and_tokens_are_forbidden(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path)
    browser.click(".wishes summary")
    browser.run("document.querySelector('[aria-label=\"forced beginning\"]').focus()")
    browser.write("dd")
    browser.key("Enter")
    browser.until(f"{TOKENS}.startsWith('dd')")
    expected = decoded(pairs, "abcab", beam=5, prefix="dd")[0].text
    browser.until(f"{TOKENS}.startsWith({json.dumps(shown(expected))})")
    enter(browser, "dab")
    expected = decoded(pairs, "dab", beam=5, prefix="dd")[0].text
    browser.until(f"{TOKENS}.startsWith({json.dumps(shown(expected))})")  # what was typed holds for any input
    browser.run("document.querySelector('[aria-label=\"forbidden tokens\"]').focus()")
    browser.write("ab")
    browser.key("Enter")
    browser.until(f"!/[ab]/.test({TOKENS})")
    browser.write("x")
    browser.key("Enter")
    assert "not in the vocabulary: x" in browser.run("document.querySelector('.wishes').textContent")
    assert complaints(browser) == []


def test_another_hypothesis_is_looked_at(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "output")
    browser.until("document.querySelectorAll('.hypothesis').length === 5")
    second = decoded(pairs, "abcab", beam=5, nbest=5)[1]
    browser.click(".hypothesis", 1)
    browser.until("document.querySelectorAll('.hypothesis')[1].getAttribute('aria-pressed') === 'true'")
    tokens = "Array.from(document.querySelectorAll('.steps tr[tabindex] td:nth-child(2)'), n => n.textContent)"
    assert browser.run(tokens) == [shown(token) for token in second.tokens]
    browser.until("location.hash.includes('hypothesis=2')")


def test_sampling_by_temperature_and_seed(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path)
    browser.click(".wishes summary")
    browser.click("[aria-label=search] button", 2)
    texts = "Array.from(document.querySelectorAll('.hypothesis bdi'), n => n.textContent).join('|')"
    browser.until("location.hash.includes('search=sample')")
    first = browser.run(texts)
    browser.click("[aria-label=seed] ~ .quiet")
    browser.until(f"{texts} !== {json.dumps(first)}")
    assert "seed 2" in browser.run("document.querySelector('.wishes summary').textContent")
    browser.run(
        "(() => { const s = document.querySelector('[aria-label=seed]'); s.value = 1;"
        " s.dispatchEvent(new Event('input')); })()"
    )
    browser.until(f"{texts} === {json.dumps(first)}")
    browser.run(
        "(() => { const s = document.querySelector('[aria-label=temperature]'); s.value = 0.1;"
        " s.dispatchEvent(new Event('input')); })()"
    )
    browser.until(f"{texts} !== {json.dumps(first)}")
    assert "temperature 0.1" in browser.run("document.querySelector('.wishes summary').textContent")


def test_unknown_tokens_and_problems_are_told(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path)
    status = "document.querySelector('.bar-top .status').textContent"
    enter(browser, "axby")
    browser.until(f"{status} === 'Not in the vocabulary: x, y.'")
    browser.run("(() => { const f = document.querySelector('.field'); f.focus(); f.select(); })()")
    browser.key("Backspace")
    browser.run(
        "(() => { const f = document.querySelector('.field'); f.value = ''; f.dispatchEvent(new Event('input')); })()"
    )
    browser.until(f"{status} === 'Type something.'")
    assert browser.run("document.getElementById('panel').classList.contains('stale')")
    enter(browser, "ab")
    browser.until(f"{status} === ''")
    assert complaints(browser) == []


SCORE = f"Number({OUTPUT}.querySelector('.score').textContent.replace('−', '-').split(' ')[1])"


SILENCE = "Array.from(document.querySelectorAll('#panel .toggle')).find(n => /this head/.test(n.textContent))"


def test_a_silenced_head_changes_the_output_at_once(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "heads")
    before, score = browser.run(TOKENS), browser.run(SCORE)
    browser.click("[aria-label=head] button", 1)
    browser.run(f"{SILENCE}.click()")
    assert "1 head silenced" in browser.run("document.querySelector('.silenced').textContent")
    assert browser.run(SCORE) != score
    assert shown(browser.run("document.querySelector('.before bdi').textContent")) + "■" == before
    assert browser.run(f"{SILENCE}.getAttribute('aria-pressed')") == "true"
    browser.until("location.hash.includes('silenced=decoder.blocks.1.cross%2F0')")

    browser.run("document.querySelector('.figure').focus()")
    browser.key("s")
    assert browser.run("document.querySelector('.silenced').textContent") == "" and browser.run(SCORE) == score
    browser.key("s")
    assert "1 head silenced" in browser.run("document.querySelector('.silenced').textContent")

    browser.click("#tab-model")
    browser.run("document.querySelector('.thumb').focus()")
    browser.key("s")
    assert "2 heads silenced" in browser.run("document.querySelector('.silenced').textContent")
    assert browser.run("document.activeElement.classList.contains('muted')"), "the focus stays"
    assert "silenced" in browser.run("document.activeElement.getAttribute('aria-label')")
    browser.click("[aria-label='a click'] button", 1)
    browser.click(".thumb", 3)
    assert "3 heads silenced" in browser.run("document.querySelector('.silenced').textContent")
    browser.click("#tab-overview")
    assert browser.run("document.querySelectorAll('.spot.muted').length") == 3
    browser.click(".spot.muted", 0)
    assert browser.run("document.querySelectorAll('.spot.muted').length") == 2
    browser.click(".silenced .quiet")
    assert browser.run(SCORE) == score and browser.run(TOKENS) == before
    assert browser.run("document.querySelector('.before').textContent") == ""
    assert complaints(browser) == []


def test_two_inputs_are_compared(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "alignment")
    browser.click(".tools .quiet")  # compare
    assert browser.run("document.activeElement === document.querySelectorAll('.field')[1]")
    enter(browser, "dab", 1)
    rows = "Array.from(document.querySelectorAll('.compared .words:first-child'), n => n.textContent)"
    browser.until(f"JSON.stringify({rows}) === JSON.stringify(['abcab<eos>', 'dab<eos>'])")
    settle(browser)
    assert shown(decoded(pairs, "dab", beam=5)[0].text) in browser.run(
        "document.querySelectorAll('.output')[1].textContent"
    )
    lefts = "Array.from(document.querySelectorAll('.compared > div'), n => n.getBoundingClientRect().left)"
    first, second = browser.run(lefts)
    assert first + 100 < second
    for name in browser.run(TABS):
        browser.click(f"#tab-{name}")
        assert browser.run("document.querySelectorAll('.compared > div').length") == 2
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), name
    browser.click("#tab-heads")
    assert browser.run("document.querySelectorAll('[aria-label=head]').length") == 1, "controls stand once"
    browser.click("[aria-label=head] button", 2)
    pressed = "document.querySelector('[aria-label=head] [aria-pressed=true]').textContent"
    assert browser.run(pressed) == "2"
    browser.resize(390)
    browser.until(f"new Set({lefts}).size === 1")
    browser.click(".tools .quiet")
    browser.until("document.querySelectorAll('.compared').length === 0")
    assert complaints(browser) == []


def test_a_link_points_at_a_thing(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    path = open_page(browser, pairs, tmp_path, "heads")
    enter(browser, "dabba")
    settle(browser)
    browser.click("[aria-label=attention] button", 0)
    browser.click("[aria-label=layer] button", 0)
    browser.click("[aria-label=head] button", 3)
    browser.click(".columns > div:first-child .word", 2)
    browser.click(".token", 0)
    browser.until("document.querySelectorAll('.alternative').length > 1")
    browser.click(".alternative", 1)
    browser.until("document.querySelectorAll('.token.forced').length === 1")
    settle(browser)
    browser.until("location.hash.includes('forced=')")
    address, tokens = browser.run("location.hash"), browser.run(TOKENS)
    assert address.startswith("#heads?attention=encoder&layer=1&head=3&query=3&source=dabba&forced=")
    browser.open(path.as_uri() + address)
    settle(browser)
    assert browser.run(TOKENS) == tokens
    pressed = "Array.from(document.querySelectorAll('.choice button[aria-pressed=true]'), b => b.textContent)"
    assert browser.run(f"{pressed}.slice(1)") == ["Encoder self", "1", "3"]
    assert browser.run("document.querySelector('.columns [aria-pressed=true]').textContent") == "b"
    assert browser.run("document.querySelector('.field').value") == "dabba"
    browser.run("location.hash = '#output?step=2&source=cab&search=greedy'")
    browser.until("document.querySelector('.field').value === 'cab'")
    greedy = decoded(pairs, "cab", beam=1)[0].text
    browser.until(f"{TOKENS}.startsWith({json.dumps(shown(greedy))})")
    assert browser.run("document.querySelector('.steps tr.on td').textContent") == "2"
    assert complaints(browser) == []


NONSENSE = [
    "#nothing",
    "#heads?layer=999&head=999&attention=sideways&query=-4",
    "#walk?stack=x&block=0&row=99999&of=77&numbers=9",
    "#output?step=1e9",
    "#heads?head=rollout,mean&forced=1,2,x,999999999&forbidden=-1,&silenced=a/b,decoder.blocks.9.cross/0",
    "#alignment?beam=1e99&temperature=NaN&seed=Infinity&length=-3&hypothesis=88&search=__proto__",
    "#?source=",
    "#position?picture=7",
    "#model?compare=%00%ff",
    "#%%%",
    "#heads?" + "a=b&" * 5000,
]


def test_nonsense_in_an_address_does_no_harm(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    path = open_page(browser, pairs, tmp_path)
    for address in NONSENSE:
        browser.open(path.as_uri() + address)
        browser.until("document.getElementById('panel').textContent.length > 10")
        for name in ("heads", "output", "walk", "alignment"):
            browser.run(f"document.getElementById('tab-{name}').click()")
            assert browser.run("document.getElementById('panel').textContent.length") > 10, address
        assert complaints(browser) == [], address


CATCH = """
  window.saved = []; URL.createObjectURL = (blob) => { window.saved.push(blob); return 'about:blank#'; };
  HTMLAnchorElement.prototype.click = function () { window.names = [...(window.names || []), this.download]; };
"""


def test_figures_are_saved(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, dark=True)
    browser.run(CATCH)
    counts = {"overview": 1, "alignment": 2, "heads": 2, "model": 3, "attribution": 2, "position": 1}
    for name, least in counts.items():
        browser.click(f"#tab-{name}")
        groups = browser.run("document.querySelectorAll('#panel .save').length")
        assert groups >= least, name
        browser.run("document.querySelectorAll('#panel .save button').forEach(b => b.click())")
        browser.until(f"window.saved.length === {2 * groups}")
        texts = browser.run("Promise.all(window.saved.filter(b => b.type === 'image/svg+xml').map(b => b.text()))")
        assert len(texts) == groups
        for text in texts:
            root = ElementTree.fromstring(text)
            space = "{http://www.w3.org/2000/svg}"
            words = [node.text for node in root.iter(f"{space}text")]
            assert root.tag == f"{space}svg" and words, name
            assert "rgb(26,29,34)" not in text, "saved in light colours"
        if name in ("alignment", "heads"):
            assert {"a", "b", "c", "<eos>"} <= set(words)
        sizes = browser.run("window.saved.filter(b => b.type === 'image/png').map(b => b.size)")
        assert len(sizes) == groups and min(sizes) > 500
        browser.run("window.saved.length = 0")
    assert all(name.endswith((".svg", ".png")) for name in browser.run("window.names"))
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    assert complaints(browser) == []


def test_a_saved_figure_arrives(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "alignment")
    folder = tmp_path / "saved"
    folder.mkdir()
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.click(".save button", 0)
    browser.click(".save button", 3)
    names = ["letters-alignment-lines.svg", "letters-alignment-matrix.png"]
    for name in names:
        browser.until("true")
        for _ in range(100):
            if (folder / name).is_file() and (folder / name).stat().st_size:
                break
            browser.run("new Promise(r => setTimeout(r, 50))")
    ElementTree.parse(folder / names[0])
    assert (folder / names[1]).read_bytes().startswith(b"\x89PNG")


def test_several_heads_at_once(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "heads")
    browser.click("[aria-label=head] button", 1)
    x, y = browser.spot("[aria-label=head] button", 3)
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1, modifiers=8)
    legend = "Array.from(document.querySelectorAll('.hue'), n => n.textContent)"
    assert browser.run(legend) == ["head 1", "head 3"]
    strokes = "new Set(Array.from(document.querySelectorAll('.links path'), n => n.style.stroke)).size"
    assert browser.run(strokes) == 2
    browser.run("document.querySelector('.figure').focus()")
    browser.key("ArrowRight")
    message = browser.run("document.querySelector('.read').textContent")
    assert "(head 1)" in message and "(head 3)" in message
    assert "head=1%2C3" in browser.run("location.hash")
    browser.click("#panel .toggle")  # one again
    assert browser.run(legend) == []
    assert complaints(browser) == []


def subwords() -> Run:
    """A run over pieces of words."""
    words = ["the cat sat", "a cart", "the art of it", "sat at the cart"]
    tokenizer = Tokenizer.train("bpe:280", words)
    codec = Codec(tokenizer, tokenizer)
    model = tiny(vocab=codec.target_vocab)
    return sharpened(Run(model.config, codec, model, Path("runs/pieces")))


def test_pieces_are_grouped_to_words(browser: chromium.Chromium, tmp_path: Path) -> None:
    run, text = subwords(), "the tact artist"
    found = trace(run, Example(text), run.codec.encode_target(["sat at"])[0])
    path = tmp_path / "page.html"
    path.write_text(found.to_html(), encoding="utf-8")
    browser.open(path)
    browser.click("#tab-heads")
    browser.click("[aria-label=attention] button", 0)
    starts = [i for i, token in enumerate(found.tokens["source"]) if i == 0 or token[0] == " " or token == "<eos>"]
    assert 1 < len(starts) < len(found.tokens["source"])
    words = "Array.from(document.querySelectorAll('.columns > div:first-child .word'), n => n.textContent)"
    assert len(browser.run(words)) == len(found.tokens["source"])
    browser.run("Array.from(document.querySelectorAll('.toggle')).find(n => n.textContent === 'words').click()")
    assert browser.run(words) == ["the", "␣tact", "␣artist", "<eos>"]
    browser.run("document.querySelector('.figure').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        browser.key(key)
    weights = [m for m in found.maps if m.kind == "encoder"][-1].weights_HTS.mean(0)
    ends = [*starts[1:], len(found.tokens["source"])]
    expected = weights[starts[1] : ends[1], starts[1] : ends[1]].sum(1).mean()
    assert float(browser.run("document.querySelector('.read').textContent").split()[-1]) == pytest.approx(
        expected, abs=6e-3
    )
    browser.click("#tab-alignment")
    assert browser.run("document.querySelectorAll('.words')[0].children.length") == 4
    assert complaints(browser) == []


def test_whole_vectors_are_pictures(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "walk")
    assert browser.run("document.querySelectorAll('.pictures').length") == 0
    browser.click("[aria-label=numbers] button", 1)
    cards = browser.run("document.querySelectorAll('.walk > li').length")
    assert browser.run("document.querySelectorAll('.strip canvas').length") > cards
    browser.hover(".strip canvas", 0)
    assert "number" in browser.run("document.querySelector('.strip .dim').textContent")
    browser.click("[aria-label=numbers] button", 2)
    assert browser.run("document.querySelectorAll('.pictures .figure').length") > cards
    assert "numbers=2" in browser.run("location.hash")
    assert complaints(browser) == []


def test_attribution_stands_beside_attention(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = sharpened(letters(position="alibi", activation="gelu"), 2.0)
    texts = ("".join(letters_) for letters_ in itertools.product("abcd", repeat=3))
    source = next(text for text in texts if 3 <= len(decoded(run, text, beam=5)[0].ids) < 30)
    open_page(browser, run, tmp_path, "attribution", source=source)
    assert "neither is an explanation" in browser.run("document.querySelector('#panel p').textContent")
    best = decoded(run, source, beam=5)[0]
    found = trace(run, Example(source), list(best.ids)).attribution
    assert found is not None
    browser.run("document.querySelector('.figure').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        browser.key(key)
    message = browser.run("document.querySelector('.read').textContent")
    assert float(message.split()[-1].replace("−", "-")) == pytest.approx(found.values_TS[1, 1], abs=0.02)
    assert ("speaks for" in message) == (found.values_TS[1, 1] >= 0)
    assert browser.run("document.querySelectorAll('.read')[1].textContent").count("attends to") == 1
    enter(browser, "dab")
    browser.until("document.querySelectorAll('.figure')[0].getAttribute('aria-label').includes('Attribution')")
    assert complaints(browser) == []


def test_the_overview_leads_everywhere(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path)
    assert browser.run(TABS)[0] == "overview"
    heads = 6 * 4
    assert browser.run("document.querySelectorAll('.spot .gauge').length") == heads
    wide = "Array.from(document.querySelectorAll('.gauge i')).filter(n => parseFloat(n.style.width) > 0).length"
    browser.until(f"{wide} > {heads // 4}")  # importance, while nothing else happens
    browser.until("Array.from(document.querySelectorAll('.spot .gauge')).every(n => /loses|gains/.test(n.parentNode.title))")
    for label, view in (
        ("Prediction", "output"), ("Layer 1 of the encoder", "walk"), ("Self-attention of layer 2", "heads"),
        ("Logit lens", "lens"), ("Cross layer 1 head 3", "heads"),
    ):  # fmt: skip
        browser.click("#tab-overview")
        spots = "Array.from(document.querySelectorAll('.spot'))"
        browser.run(f"{spots}.find(n => n.getAttribute('aria-label').startsWith({label!r})).focus()")
        browser.key("Enter")
        assert browser.run(f"document.getElementById('tab-{view}').getAttribute('aria-selected')") == "true", label
    pressed = "Array.from(document.querySelectorAll('#panel .choice [aria-pressed=true]'), b => b.textContent)"
    assert browser.run(pressed) == ["Cross", "1", "3"]
    browser.click("#tab-overview")
    browser.run("document.querySelector('.spot').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        browser.key(key)
    assert browser.run("document.activeElement.classList.contains('spot')")
    assert browser.run("document.querySelectorAll('.spot[tabindex=\"0\"]').length") == 1
    assert complaints(browser) == []


CONTENT = ".links .word, .figure, .steps tr, .lens .cell, .thumb, .spot, .walk *, .strip"


def test_few_presses_of_tab_lead_to_the_content(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path)
    for name in browser.run(TABS):
        browser.click(f"#tab-{name}")
        browser.run("document.querySelector('.field').focus()")  # from the input on
        inside = f"document.activeElement.matches({CONTENT!r}) || document.activeElement.closest('.save')"
        presses = 0
        while not browser.run(inside):
            browser.key("Tab")
            presses += 1
            if name == "walk" and browser.run("document.activeElement.closest('[aria-label=numbers]')"):
                break  # its cards follow, which are text
            assert presses <= 12, (name, browser.run("document.activeElement.outerHTML.slice(0, 90)"))
        assert presses >= 3
    unnamed = browser.run(
        "Array.from(document.querySelectorAll('button, select, input, textarea, [role=application], [role=button]'))"
        ".filter(n => !(n.textContent.trim() || n.getAttribute('aria-label') || n.closest('label')"
        ' || document.querySelector(`label[for="${n.id}"]`))).length'
    )
    assert unnamed == 0


def test_a_language_model_goes_on(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = sharpened(family("lm"), 1.5)
    open_page(browser, run, tmp_path, "output")
    enter(browser, "cab")
    expected = decoded(run, "cab", beam=1, max_length=20)[0].text
    browser.until(f"{TOKENS}.replace(/■/g, '') === {json.dumps(shown(expected))}")
    count = browser.run(f"{OUTPUT}.querySelectorAll('.token').length")
    if browser.run(f"{OUTPUT}.querySelector('.quiet') !== null"):
        browser.click(".output .quiet")
        browser.until(f"{OUTPUT}.querySelectorAll('.token').length > {count}")
        browser.until("location.hash.includes('length=40')")
    browser.click(".wishes summary")
    browser.click("[aria-label=search] button", 2)
    browser.until("document.querySelector('[aria-label=temperature]') !== null")
    assert browser.run("document.querySelectorAll('.steps tr[tabindex]').length") >= 3
    assert complaints(browser) == []


def test_classes_are_bars(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = sharpened(family("classes"), 2.0)
    open_page(browser, run, tmp_path, "heads")
    enter(browser, "dab ba")
    expected = trace(run, Example("dab ba")).steps[0].candidates
    names = "Array.from(document.querySelectorAll('.class-name'), n => n.textContent)"
    browser.until(f"{names}.join() === {json.dumps(','.join(c.token for c in expected))}")
    shares = browser.run("Array.from(document.querySelectorAll('.class-row .bar'), n => parseFloat(n.style.width))")
    assert shares == pytest.approx([100 * c.probability for c in expected], abs=0.1)
    browser.click("[aria-label=head] button", 1)
    browser.run(f"{SILENCE}.click()")
    assert browser.run("document.querySelectorAll('.was').length") == 3
    assert complaints(browser) == []


def test_masked_tokens_are_predicted(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = sharpened(family("masked"), 2.0)
    open_page(browser, run, tmp_path)
    enter(browser, "dab")
    steps = trace(run, Example("dab")).steps[1:-1]
    predicted = "Array.from(document.querySelectorAll('.masked bdi'), n => n.textContent)"
    browser.until(f"{predicted}.join() === {json.dumps(','.join(shown(s.candidates[0].token) for s in steps))}")
    assert complaints(browser) == []


def test_an_image_is_drawn_or_dropped(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = sharpened(family("image"), 2.0)
    open_page(browser, run, tmp_path, "image")
    x, y = browser.spot(".pad canvas")
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=x - 60, y=y - 60, button="left", clickCount=1)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 60, y=y + 40, button="left", buttons=1)
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + 60, y=y + 40, button="left", clickCount=1)
    browser.until("document.querySelectorAll('.class-row').length === 3")
    pixels = browser.run(
        "Array.from(document.querySelector('.pad canvas').getContext('2d').getImageData(0, 0, 8, 8).data)"
        ".filter((_, i) => i % 4 === 0)"
    )
    image = (np.array(pixels, np.float32).reshape(1, 8, 8) / 255 * 16).astype(np.float32)
    expected = trace_image(run, image).steps[0].candidates
    shares = browser.run("Array.from(document.querySelectorAll('.class-row .bar'), n => parseFloat(n.style.width))")
    assert shares == pytest.approx([100 * c.probability for c in expected], abs=0.5)
    browser.run(
        "(async () => { const c = document.createElement('canvas'); c.width = c.height = 40;"
        " c.getContext('2d').fillStyle = '#fff'; c.getContext('2d').fillRect(0, 0, 20, 40);"
        " const blob = await new Promise(r => c.toBlob(r)); const all = new DataTransfer();"
        " all.items.add(new File([blob], '<img src=x onerror=window.hit=1>.png', {type: 'image/png'}));"
        " document.querySelector('.pad').dispatchEvent(new DragEvent('drop', {dataTransfer: all})); })()"
    )
    browser.until("document.querySelector('.pair').textContent.includes('<img')")
    assert browser.run("typeof window.hit") == "undefined"
    browser.run(
        "(() => { const all = new DataTransfer(); all.items.add(new File(['nothing'], 'a.txt'));"
        " document.querySelector('.pad').dispatchEvent(new DragEvent('drop', {dataTransfer: all})); })()"
    )
    browser.until("document.querySelector('.pad .status').textContent.includes('not an image')")
    browser.click(".pad .quiet", 1)  # invert
    browser.click(".pad .quiet", 0)  # clear
    for name in browser.run(TABS):
        browser.click(f"#tab-{name}")
    assert complaints(browser) == []


def hebrew() -> Run:
    """An inflection run: features in front, right to left."""
    words = ["שלום", "ספר", "מלך", "ילד", "כתב"]
    tokenizer = Tokenizer.train("char", words)
    codec = Codec(tokenizer, tokenizer, features=("V", "PST", "PL"), columns=("source", "features", "target"))
    torch.manual_seed(2)
    little = {"layers": 2, "width": 16, "heads": 4, "ff": 32}
    config = preset(
        "transformer-tiny",
        source_vocab=codec.source_vocab,
        target_vocab=codec.target_vocab,
        changes={"encoder": little, "decoder": little},
    )
    return sharpened(Run(config, codec, Model(config).eval(), Path("runs/hebrew")))


def test_right_to_left_with_features(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = hebrew()
    open_page(browser, run, tmp_path, "alignment", source="ספר", features="V;PST")
    browser.run("(() => { const f = document.querySelector('.field'); f.focus(); f.select(); })()")
    browser.call("Input.insertText", text="מלך")
    expected = decoded(run, "מלך", "V;PST", beam=5)[0]
    browser.until(f"{TOKENS}.startsWith({json.dumps(expected.text)})")
    places = "Array.from({}, n => n.getBoundingClientRect().left)"
    columns = browser.run(places.format("document.querySelector('.words').children"))
    assert len(columns) == 6 and columns == sorted(columns, reverse=True)
    written = browser.run(places.format(f"{OUTPUT}.querySelectorAll('.token:not(.special)')"))
    assert written == sorted(written, reverse=True)
    assert browser.run("getComputedStyle(document.querySelector('.field')).direction") == "rtl"
    enter(browser, "V;P", 1)
    options = browser.run("Array.from(document.querySelectorAll('datalist option'), n => n.value)")
    assert options == ["V;PST", "V;PL"]
    enter(browser, "V;XX", 1)
    browser.until("document.querySelector('.bar-top .status').textContent.includes('XX')")
    for name in browser.run(TABS):
        browser.click(f"#tab-{name}")
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), name
    assert complaints(browser) == []


CLEAN = """
  (() => { let on = 0;
    for (const n of document.querySelectorAll('*')) for (const a of n.attributes)
      if (/^on/i.test(a.name) || (/javascript:/i.test(a.value) && !['title', 'aria-label', 'value', 'placeholder'].includes(a.name))) on++;
    return [document.scripts.length, on, document.querySelectorAll('img,iframe,object,embed,video,math,form,base,main style,main meta').length, typeof window.hit]; })()
"""  # noqa: E501


def test_five_hundred_payloads_stay_text(browser: chromium.Chromium, tmp_path: Path) -> None:
    """As input, tokens of the vocabulary, features, name of the run, and in the address."""
    tokens = sorted({part for payload in PAYLOADS for part in payload.split()})
    tokenizer = Tokenizer.train("space", tokens)
    features = tuple(payload.replace(";", ",").strip() for payload in PAYLOADS[:20])
    codec = Codec(tokenizer, tokenizer, features=features, columns=("source", "features", "target"))
    model = tiny(vocab=max(codec.source_vocab, codec.target_vocab))
    run = sharpened(Run(model.config, codec, model, Path("runs/</script><img src=x onerror=window.hit=1>")))
    path = open_page(browser, run, tmp_path, "alignment", source=PAYLOADS[0], features=features[1])
    scripts = browser.run("document.scripts.length")
    assert scripts == 3
    feed = (
        "(async (texts) => { const [f, g] = document.querySelectorAll('.field');"
        " for (const [i, t] of texts.entries()) {"
        " f.value = t; g.value = t; f.dispatchEvent(new Event('input')); g.dispatchEvent(new Event('input'));"
        " if (i % 25 === 0) await new Promise(r => setTimeout(r, 60)); } await new Promise(r => setTimeout(r, 400)); })"
    )
    for start in range(0, len(PAYLOADS), 100):
        browser.run(f"{feed}({json.dumps(PAYLOADS[start : start + 100])})")
        assert browser.run(CLEAN) == [3, 0, 0, "undefined"]
    for name in browser.run(TABS):
        browser.click(f"#tab-{name}")
        browser.hover("#panel", 0)
        assert browser.run(CLEAN) == [3, 0, 0, "undefined"], name
    browser.click(".token", 0)
    browser.click(".wishes summary")
    assert browser.run(CLEAN) == [3, 0, 0, "undefined"]
    for payload in PAYLOADS[::50]:
        browser.open(path.as_uri() + "#" + quote(payload) + "?source=" + quote(payload) + "&compare=" + quote(payload))
        browser.until("document.getElementById('panel').textContent.length > 10")
        assert browser.run(CLEAN) == [3, 0, 0, "undefined"]
    assert complaints(browser) == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone(browser: chromium.Chromium, pairs: Run, tmp_path: Path, dark: bool) -> None:
    browser.resize(320, 640)
    open_page(browser, pairs, tmp_path, dark=dark, source="abcab" * 6)
    browser.click(".wishes summary")
    for comparing in (False, True):
        if comparing:
            browser.click(".tools .quiet")
        for name in browser.run(TABS):
            browser.click(f"#tab-{name}")
            assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), (name, comparing)
            assert browser.run("document.getElementById('panel').textContent.trim().length") > 10
    assert complaints(browser) == []


def test_paper_has_the_answer_and_no_controls(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, dark=True)
    enter(browser, "dab")
    browser.until("document.querySelector('.pair').textContent.includes('dab')")
    browser.run(
        "window.addEventListener('beforeprint', () => { window.seen = [document.documentElement.dataset.theme,"
        " Array.from(document.querySelectorAll('.sheets > section > h1'), n => n.textContent)]; })"
    )
    titles = browser.run("Array.from(document.querySelectorAll('[role=tab]'), n => n.textContent)")
    assert len(base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])) > 10_000
    assert browser.run("window.seen") == ["light", titles]
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    browser.call("Emulation.setEmulatedMedia", media="print")
    displays = (
        "['.bar-top', '.pair', '[role=tablist]', '.save'].map(s => getComputedStyle(document.querySelector(s)).display)"
    )
    assert browser.run(displays) == ["none", "grid", "none", "none"]
    browser.call("Emulation.setEmulatedMedia", media="")
    assert complaints(browser) == []


def test_a_model_that_cannot_be_run_leaves_the_stored_page(
    browser: chromium.Chromium, pairs: Run, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    data = first_trace(pairs, Example("abcab")).page_data()
    path.write_text(render_page(data, {"task": "pairs"}), encoding="utf-8")
    browser.open(path)
    assert "cannot be run in this browser" in browser.run("document.querySelector('.note').textContent")
    browser.click("#tab-heads")
    assert browser.run("document.querySelectorAll('.word').length") > 0
