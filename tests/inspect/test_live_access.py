"""Access to the live page in a real browser: keyboard, phone, print, right to left, hostile text."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from kit import chromium
from kit.models import letters, tiny
from kit.page import OUTPUT, PAYLOADS, TABS, TOKENS, complaints, decoded, enter, open_page, settle, sharpened
from regard.inspect.live import first_trace
from regard.inspect.page import render_page
from regard.model import Model
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def pairs() -> Run:
    return sharpened(letters())


CONTENT = ".links .word, .figure, .steps tr, .lens .cell, .thumb, .spot, .walk *, .strip"


def test_content_is_reached_by_at_most_twelve_tab_presses(
    browser: chromium.Chromium, pairs: Run, tmp_path: Path
) -> None:
    open_page(browser, pairs, tmp_path)
    for name in browser.run(TABS):
        browser.click(f"#tab-{name}")
        browser.run("document.querySelector('.field').focus()")  # start at the input
        inside = f"document.activeElement.matches({CONTENT!r}) || document.activeElement.closest('.save')"
        presses = 0
        while not browser.run(inside):
            browser.key("Tab")
            presses += 1
            if name == "walk" and browser.run("document.activeElement.closest('[aria-label=numbers]')"):
                break  # the cards that follow are text
            assert presses <= 12, (name, browser.run("document.activeElement.outerHTML.slice(0, 90)"))
        assert presses >= 3
    unnamed = browser.run(
        "Array.from(document.querySelectorAll('button, select, input, textarea, [role=application], [role=button]'))"
        ".filter(n => !(n.textContent.trim() || n.getAttribute('aria-label') || n.closest('label')"
        ' || document.querySelector(`label[for="${n.id}"]`))).length'
    )
    assert unnamed == 0


def hebrew() -> Run:
    """An inflection run with leading features and right-to-left text."""
    words = ["שלום", "ספר", "מלך", "ילד", "כתב"]
    tokenizer = Tokenizer.train("char", words)
    codec = Codec(tokenizer, tokenizer, features=("V", "PST", "PL"), columns=("source", "features", "target"))
    torch.manual_seed(2)
    small = {"layers": 2, "width": 16, "heads": 4, "ff": 32}
    config = preset(
        "transformer-tiny",
        source_vocab=codec.source_vocab,
        target_vocab=codec.target_vocab,
        changes={"encoder": small, "decoder": small},
    )
    return sharpened(Run(config, codec, Model(config).eval(), Path("runs/hebrew")))


def test_right_to_left_text_with_features_is_laid_out_and_answered(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = hebrew()
    open_page(browser, run, tmp_path, "alignment", source="ספר", features="V;PST")
    browser.run("(() => { const f = document.querySelector('.field'); f.focus(); f.select(); })()")
    browser.call("Input.insertText", text="מלך")
    expected = decoded(run, "מלך", "V;PST", beam=5)[0]
    browser.until(f"{TOKENS}.startsWith({json.dumps(expected.text)})")
    places = "Array.from({}, n => n.getBoundingClientRect().left)"
    columns = browser.run(places.format("document.querySelector('.words').children"))
    assert len(columns) == 6 and columns == sorted(columns, reverse=True)
    output_places = browser.run(places.format(f"{OUTPUT}.querySelectorAll('.token:not(.special)')"))
    assert output_places == sorted(output_places, reverse=True)
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


@pytest.mark.slow  # seven seconds; test_browser.py has the same payloads in the page of a run
def test_five_hundred_html_payloads_remain_text(browser: chromium.Chromium, tmp_path: Path) -> None:
    """As input, vocabulary tokens, features, run name, and address."""
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
        " if (i % 25 === 0) await new Promise(r => setTimeout(r, 60)); } })"
    )
    for start in range(0, len(PAYLOADS), 100):
        browser.run(f"{feed}({json.dumps(PAYLOADS[start : start + 100])})")
        settle(browser)
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
def test_page_fits_the_width_of_a_phone(browser: chromium.Chromium, pairs: Run, tmp_path: Path, dark: bool) -> None:
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


def test_printed_page_has_the_output_and_no_controls(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
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


def test_stored_trace_is_shown_if_the_model_cannot_run(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    data = first_trace(pairs, Example("abcab")).page_data()
    path.write_text(render_page(data, {"task": "pairs"}), encoding="utf-8")
    browser.open(path)
    assert "This browser cannot run the model" in browser.run("document.querySelector('.note').textContent")
    browser.click("#tab-heads")
    assert browser.run("document.querySelectorAll('.word').length") > 0
