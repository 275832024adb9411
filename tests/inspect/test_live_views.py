"""The views of the live page in a real browser: content, links, saved figures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kit import chromium
from kit.models import family, letters, tiny
from kit.page import TABS, TOKENS, complaints, decoded, enter, open_page, settle, sharpened, shown
from regard.inspect.trace import trace
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def pairs() -> Run:
    return sharpened(letters())


PANEL = (
    "[document.getElementById('panel').textContent,"
    " ...Array.from(document.querySelectorAll('#panel canvas'), node => node.toDataURL())].join('|')"
)


@pytest.mark.parametrize("kind", ["pairs", "rnn-luong", "lm", "classes", "masked"])
def test_views_of_a_typed_text_equal_those_of_a_page_opened_with_it(
    browser: chromium.Chromium, kind: str, tmp_path: Path
) -> None:
    run = sharpened(letters() if kind == "pairs" else letters(kind) if kind.startswith("rnn") else family(kind), 2.0)
    open_page(browser, run, tmp_path, source="dab")
    names = browser.run(TABS)
    panels = {}
    for name in names:
        browser.click(f"#tab-{name}")
        panels[name] = browser.run(PANEL)
    open_page(browser, run, tmp_path, source="abcab")
    for name in names:
        enter(browser, "abcab")
        settle(browser)
        browser.click(f"#tab-{name}")
        assert browser.run(PANEL) != panels[name] or name == "position"
        enter(browser, "dab")
        settle(browser)
        assert browser.run(PANEL) == panels[name], name
    assert len(names) >= 5 and complaints(browser) == []


@pytest.mark.parametrize("kind", ["pairs", "lm", "classes", "masked", "image"])
def test_every_view_has_an_introduction(browser: chromium.Chromium, kind: str, tmp_path: Path) -> None:
    open_page(browser, letters() if kind == "pairs" else family(kind), tmp_path)
    names = browser.run(TABS)
    for name in names:
        browser.click(f"#tab-{name}")
        first = browser.run("document.querySelector('#panel > p.dim:first-child')?.textContent ?? ''")
        assert len(first) > 40 and first.endswith("."), (name, first)
    if kind == "pairs":
        browser.click(".tools .quiet")  # compare
        browser.click("#tab-alignment")
        assert browser.run("document.querySelectorAll('#panel p.dim').length") == 1, "for both inputs"


def test_tabs_of_a_phone_scroll_in_one_row(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    browser.resize(390)
    open_page(browser, pairs, tmp_path)
    assert browser.run("new Set(Array.from(document.querySelectorAll('[role=tab]'), tab => tab.offsetTop)).size") == 1
    browser.run("document.getElementById('tab-overview').focus()")
    for _ in range(len(browser.run(TABS)) - 1):
        browser.key("ArrowRight")
    assert browser.run("document.activeElement.getAttribute('aria-selected')") == "true"
    left, right = browser.run("(box => [box.left, box.right])(document.activeElement.getBoundingClientRect())")
    assert left >= 0 and right <= 390, "the chosen tab is visible"
    assert browser.run("document.documentElement.scrollWidth") <= 390


def test_address_restores_the_view_and_the_request(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
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
    browser.run("document.querySelector('.field').select()")
    browser.key("Backspace")
    browser.until("/source=(&|$)/.test(location.hash)")
    browser.open(path.as_uri() + browser.run("location.hash"))
    settle(browser)
    assert browser.run("document.querySelector('.field').value") == "", "an emptied input does not become the example"
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


def test_invalid_addresses_are_ignored(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
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


def test_figures_are_saved_as_svg_and_png(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, dark=True)
    browser.run(CATCH)
    counts = {"overview": 1, "alignment": 2, "heads": 2, "model": 3, "attribution": 2, "position": 1}
    for name, minimum in counts.items():
        browser.click(f"#tab-{name}")
        groups = browser.run("document.querySelectorAll('#panel .save').length")
        assert groups >= minimum, name
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


def test_saved_figures_are_downloaded(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
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


def test_several_heads_can_be_selected(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
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
    browser.click("#panel .toggle")  # back to a single head
    assert browser.run(legend) == []
    assert complaints(browser) == []


def subwords() -> Run:
    """A run with subword tokens."""
    words = ["the cat sat", "a cart", "the art of it", "sat at the cart"]
    tokenizer = Tokenizer.train("bpe:280", words)
    codec = Codec(tokenizer, tokenizer)
    model = tiny(vocab=codec.target_vocab)
    return sharpened(Run(model.config, codec, model, Path("runs/pieces")))


def test_subword_pieces_are_grouped_into_words(browser: chromium.Chromium, tmp_path: Path) -> None:
    run, text = subwords(), "the tact artist"
    result = trace(run, Example(text), run.codec.encode_target(["sat at"])[0])
    path = tmp_path / "page.html"
    path.write_text(result.to_html(), encoding="utf-8")
    browser.open(path)
    browser.click("#tab-heads")
    browser.click("[aria-label=attention] button", 0)
    starts = [i for i, token in enumerate(result.tokens["source"]) if i == 0 or token[0] == " " or token == "<eos>"]
    assert 1 < len(starts) < len(result.tokens["source"])
    words = "Array.from(document.querySelectorAll('.columns > div:first-child .word'), n => n.textContent)"
    assert len(browser.run(words)) == len(result.tokens["source"])
    browser.run("Array.from(document.querySelectorAll('.toggle')).find(n => n.textContent === 'words').click()")
    assert browser.run(words) == ["the", "␣tact", "␣artist", "<eos>"]
    browser.run("document.querySelector('.figure').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        browser.key(key)
    weights = [m for m in result.maps if m.kind == "encoder"][-1].weights_HTS.mean(0)
    ends = [*starts[1:], len(result.tokens["source"])]
    expected = weights[starts[1] : ends[1], starts[1] : ends[1]].sum(1).mean()
    assert float(browser.run("document.querySelector('.read').textContent").split()[-1]) == pytest.approx(
        expected, abs=6e-3
    )
    browser.click("#tab-alignment")
    assert browser.run("document.querySelectorAll('.words')[0].children.length") == 4
    assert complaints(browser) == []


def test_whole_vectors_are_shown_as_pictures(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
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


def test_attribution_view_shows_attribution_and_attention(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = sharpened(letters(position="alibi", activation="gelu"), 2.0)
    texts = ("".join(letters_) for letters_ in itertools.product("abcd", repeat=3))
    source = next(text for text in texts if 3 <= len(decoded(run, text, beam=5)[0].ids) < 30)
    open_page(browser, run, tmp_path, "attribution", source=source)
    assert "neither is an explanation" in browser.run("document.querySelector('#panel p').textContent")
    best = decoded(run, source, beam=5)[0]
    result = trace(run, Example(source), list(best.ids)).attribution
    assert result is not None
    browser.run("document.querySelector('.figure').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        browser.key(key)
    message = browser.run("document.querySelector('.read').textContent")
    assert float(message.split()[-1].replace("−", "-")) == pytest.approx(result.values_TS[1, 1], abs=0.02)
    assert ("speaks for" in message) == (result.values_TS[1, 1] >= 0)
    assert browser.run("document.querySelectorAll('.read')[1].textContent").count("attends to") == 1
    enter(browser, "dab")
    browser.until("document.querySelectorAll('.figure')[0].getAttribute('aria-label').includes('Attribution')")
    assert complaints(browser) == []


def test_overview_links_to_the_other_views(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path)
    assert browser.run(TABS)[0] == "overview"
    heads = 6 * 4
    assert browser.run("document.querySelectorAll('.spot .gauge').length") == heads
    wide = "Array.from(document.querySelectorAll('.gauge i')).filter(n => parseFloat(n.style.width) > 0).length"
    browser.until(f"{wide} > {heads // 4}")  # importance is computed while the page is idle
    browser.until(
        "Array.from(document.querySelectorAll('.spot .gauge')).every(n => /loses|gains/.test(n.parentNode.title))"
    )
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
