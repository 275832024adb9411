"""The live page in a real browser: requests and answers, task by task."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kit import chromium
from kit.models import family, letters
from kit.page import OUTPUT, TABS, TOKENS, complaints, decoded, enter, open_page, settle, sharpened, shown
from regard.data.statistics import Statistics
from regard.inspect.live import live_page
from regard.inspect.trace import trace, trace_image
from regard.run import Run
from regard.text.codec import Example


@pytest.fixture(scope="module")
def pairs() -> Run:
    return sharpened(letters())


def test_typed_text_gives_the_outputs_of_generate(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "alignment")
    for source in ("dabba", "cab ab", "bdca"):
        enter(browser, source)
        expected = decoded(pairs, source, beam=5, nbest=5)
        browser.until(f"{TOKENS}.startsWith({json.dumps(shown(expected[0].text))})")
        texts = "Array.from(document.querySelectorAll('.hypothesis bdi'), n => n.textContent)"
        browser.until(f"{texts}.length === 5")
        assert browser.run(texts) == [h.text if h.text.strip() else shown(h.text) or "∅" for h in expected]
        shares = browser.run(
            "Array.from(document.querySelectorAll('.hypothesis small'), n => parseFloat(n.textContent))"
        )
        assert shares == pytest.approx([100 * math.exp(h.score / len(h.tokens)) for h in expected], abs=0.5)
        assert shares == sorted(shares, reverse=True)
        assert browser.run(f"{OUTPUT}.querySelector('.score').textContent").startswith("log-probability −")
        columns = "Array.from(document.querySelector('.words').children, n => n.textContent).join('')"
        browser.until(f"{columns} === {json.dumps(shown(source) + '<eos>')}")
    assert complaints(browser) == []


def test_page_begins_with_its_first_example_or_empty(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    field = "document.querySelector('.field').value"
    for examples in ((Example("dab"), Example("cab")), ()):
        page, _ = live_page(replace(pairs, statistics=Statistics(examples=examples)), "fp32", samples=1)
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        browser.open(tmp_path / "page.html")
        settle(browser)
        assert browser.run(field) == (examples[0].source if examples else "")
        expected = decoded(pairs, "dab", beam=5)[0].text if examples else ""
        assert browser.run(TOKENS).rstrip("■") == shown(expected)
    enter(browser, "cab")
    browser.until(f"{TOKENS}.startsWith({json.dumps(shown(decoded(pairs, 'cab', beam=5)[0].text))})")
    assert complaints(browser) == []


def test_views_update_after_every_key(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    """The views update without a pause in typing; bench/page.py measures the time."""
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


def test_redrawing_reuses_the_canvases(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "model")
    browser.run("document.querySelectorAll('#panel canvas').forEach((node, i) => { node.number = i; })")
    pictures = "Array.from(document.querySelectorAll('#panel canvas'), node => node.toDataURL()).join()"
    before = browser.run(pictures)
    enter(browser, "dabcab")
    settle(browser)
    assert browser.run("Array.from(document.querySelectorAll('#panel canvas'), node => node.number)") == list(range(24))
    after = browser.run(pictures)
    assert after != before
    open_page(browser, pairs, tmp_path, "model", source="dabcab")  # a new page has the same pictures
    assert browser.run(pictures) == after
    assert complaints(browser) == []


def test_selected_alternative_is_forced(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path)
    best = decoded(pairs, "abcab", beam=5)[0]
    browser.until(f"{TOKENS}.startsWith({json.dumps(shown(best.text))})")
    browser.click(".token", 1)
    browser.until("document.querySelectorAll('.alternative').length > 3")
    result = trace(pairs, Example("abcab"), list(best.ids))
    alternatives = browser.run("Array.from(document.querySelectorAll('.alternative bdi'), n => n.textContent)")
    candidates = [c.token for c in result.steps[1].candidates if c.token not in ("<sos>", "<pad>", "⁇")]
    assert alternatives[: len(candidates)] == [shown(token) for token in candidates]
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


def test_forced_prefix_and_forbidden_tokens_are_obeyed(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
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
    browser.until(f"{TOKENS}.startsWith({json.dumps(shown(expected))})")  # the prefix also applies to other inputs
    browser.run("document.querySelector('[aria-label=\"forbidden tokens\"]').focus()")
    browser.write("ab")
    browser.key("Enter")
    browser.until(f"!/[ab]/.test({TOKENS})")
    browser.write("x")
    browser.key("Enter")
    assert "not in the vocabulary: x" in browser.run("document.querySelector('.wishes').textContent")
    assert complaints(browser) == []


def test_other_hypotheses_can_be_selected(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path, "output")
    browser.until("document.querySelectorAll('.hypothesis').length === 5")
    second = decoded(pairs, "abcab", beam=5, nbest=5)[1]
    browser.click(".hypothesis", 1)
    browser.until("document.querySelectorAll('.hypothesis')[1].getAttribute('aria-pressed') === 'true'")
    tokens = "Array.from(document.querySelectorAll('.steps tr[tabindex] td:nth-child(2)'), n => n.textContent)"
    assert browser.run(tokens) == [shown(token) for token in second.tokens]
    browser.until("location.hash.includes('hypothesis=2')")


def test_samples_depend_on_seed_and_temperature(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
    open_page(browser, pairs, tmp_path)
    browser.click(".wishes summary")
    browser.click("[aria-label=search] button", 2)
    texts = "Array.from(document.querySelectorAll('.hypothesis bdi'), n => n.textContent).join('|')"
    settle(browser)  # the address may change before the output of this request
    first = browser.run(texts)
    browser.until("location.hash.includes('search=sample')")
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


def test_status_shows_unknown_tokens_and_problems(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
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
    answer = f"{OUTPUT}.textContent + document.querySelector('.nbest').textContent"
    assert browser.run(answer) == ""
    for name in browser.run(TABS):
        browser.click(f"#tab-{name}")  # the views of the last input remain
    enter(browser, "ab")
    browser.until(f"{status} === '' && {answer} !== ''")
    browser.run(
        "(() => { const f = document.querySelector('.field'); f.value = 'ab'.repeat(9000);"
        " f.dispatchEvent(new Event('input')); })()"
    )
    browser.until(f"{status}.includes('more than')")
    assert browser.run(answer) == ""
    enter(browser, "ab")
    browser.until(f"{status} === ''")
    assert complaints(browser) == []


SCORE = f"Number({OUTPUT}.querySelector('.score').textContent.replace('−', '-').split(' ')[1])"


SILENCE = "Array.from(document.querySelectorAll('#panel .toggle')).find(n => /this head/.test(n.textContent))"


def test_silenced_head_changes_the_output_immediately(browser: chromium.Chromium, pairs: Run, tmp_path: Path) -> None:
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
    assert browser.run("document.querySelectorAll('[aria-label=head]').length") == 1, "controls are not duplicated"
    browser.click("[aria-label=head] button", 2)
    pressed = "document.querySelector('[aria-label=head] [aria-pressed=true]').textContent"
    assert browser.run(pressed) == "2"
    browser.resize(390)
    browser.until(f"new Set({lefts}).size === 1")
    browser.click(".tools .quiet")
    browser.until("document.querySelectorAll('.compared').length === 0")
    assert complaints(browser) == []


def test_language_model_output_can_be_extended(browser: chromium.Chromium, tmp_path: Path) -> None:
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


def test_class_probabilities_are_shown_as_bars(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = sharpened(family("classes"), 2.0)
    open_page(browser, run, tmp_path, "heads")
    enter(browser, "dab ba")
    expected = trace(run, Example("dab ba")).steps[0].candidates
    names = "Array.from(document.querySelectorAll('.class-name'), n => n.textContent)"
    browser.until(f"{names}.join() === {json.dumps(','.join(c.token for c in expected))}")
    settle(browser)
    shares = browser.run("Array.from(document.querySelectorAll('.class-row .bar'), n => parseFloat(n.style.width))")
    assert shares == pytest.approx([100 * c.probability for c in expected], abs=0.1)
    browser.click("[aria-label=head] button", 1)
    browser.run(f"{SILENCE}.click()")
    assert browser.run("document.querySelectorAll('.was').length") == 3
    enter(browser, " ")
    browser.until(f"{OUTPUT}.textContent === ''")
    assert complaints(browser) == []


def test_masked_model_shows_a_prediction_per_token(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = sharpened(family("masked"), 2.0)
    open_page(browser, run, tmp_path)
    enter(browser, "dab")
    steps = trace(run, Example("dab")).steps[1:-1]
    predicted = "Array.from(document.querySelectorAll('.masked bdi'), n => n.textContent)"
    browser.until(f"{predicted}.join() === {json.dumps(','.join(shown(s.candidates[0].token) for s in steps))}")
    assert complaints(browser) == []


DROP = """(async () => {
  const c = document.createElement('canvas'); c.width = c.height = 40;
  c.getContext('2d').fillStyle = '#fff'; c.getContext('2d').fillRect(0, 0, %s);
  const blob = await new Promise(r => c.toBlob(r)), all = new DataTransfer();
  all.items.add(new File([blob], %s, {type: 'image/png'}));
  document.querySelectorAll('.pad')[%s].dispatchEvent(new DragEvent('drop', {dataTransfer: all}));
})()"""


def test_two_images_are_compared(browser: chromium.Chromium, tmp_path: Path) -> None:
    open_page(browser, sharpened(family("image"), 2.0), tmp_path, "image")
    texts = "Array.from(document.querySelectorAll('.output'), n => n.textContent)"
    (stored,) = browser.run(texts)
    assert "%" in stored, "the stored image is classified as well"
    browser.click(".tools .quiet")  # compare
    browser.until("document.querySelectorAll('.pad').length === 2")
    assert browser.run(texts) == [stored, stored]
    browser.run(DROP % ("20, 40", "'left.png'", 1))
    browser.until("document.querySelectorAll('.which')[1]?.textContent === 'left.png'")
    settle(browser)
    first, second = browser.run(texts)
    assert first == stored != second
    pictures = "Array.from(document.querySelectorAll('.pad canvas'), n => n.toDataURL())"
    assert len(set(browser.run(pictures))) == 2
    for name in browser.run(TABS):
        browser.click(f"#tab-{name}")
        assert browser.run("document.querySelectorAll('.compared > div').length") == 2, name
    browser.run(DROP % ("40, 20", "'top.png'", 0))
    browser.until(f"{texts}[0] !== {json.dumps(stored)}")
    assert browser.run(texts)[1] == second
    browser.click(".tools .quiet")
    browser.until("document.querySelectorAll('.compared').length === 0")
    assert complaints(browser) == []


def test_drawn_and_dropped_images_are_classified(browser: chromium.Chromium, tmp_path: Path) -> None:
    run = sharpened(family("image"), 2.0)
    open_page(browser, run, tmp_path, "image")
    x, y = browser.spot(".pad canvas")
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=x - 60, y=y - 60, button="left", clickCount=1)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 60, y=y + 40, button="left", buttons=1)
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + 60, y=y + 40, button="left", clickCount=1)
    settle(browser)
    pixels = browser.run(
        "Array.from(document.querySelector('.pad canvas').getContext('2d').getImageData(0, 0, 8, 8).data)"
        ".filter((_, i) => i % 4 === 0)"
    )
    image = (np.array(pixels, np.float32).reshape(1, 8, 8) / 255 * 16).astype(np.float32)
    expected = trace_image(run, image).steps[0].candidates
    shares = browser.run("Array.from(document.querySelectorAll('.class-row .bar'), n => parseFloat(n.style.width))")
    assert shares == pytest.approx([100 * c.probability for c in expected], abs=0.5)
    browser.run(DROP % ("20, 40", "'<img src=x onerror=window.hit=1>.png'", 0))
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
