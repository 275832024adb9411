"""The page with a stored trace in a real browser. Skipped without a browser."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit import chromium
from kit.models import FAMILIES, family, letters, picture
from kit.page import PAYLOADS, complaints
from regard.inspect.circuits import rollout
from regard.inspect.inputs import Note
from regard.inspect.trace import Trace, trace, trace_image
from regard.run import Run
from regard.text.codec import Example

VIEWS = ["overview", "alignment", "heads", "model", "output", "lens", "attribution", "position", "walk"]


def make_trace(run: Run, source: str = "abcab", output: str = "bcd", **options: Any) -> Trace:
    return trace(run, Example(source), run.codec.encode_target([output])[0], **options)


def show(
    browser: chromium.Chromium, result: Trace, folder: Path, dark: bool = False, view: str | None = "alignment"
) -> float:
    """Open the page of a trace and one of its views -> seconds until the page was ready."""
    path = folder / "page.html"
    path.write_text(result.to_html(), encoding="utf-8")
    seconds = browser.open(path, dark)
    if view is not None:
        browser.click(f"#tab-{view}")
    return seconds


def test_every_view_opens(browser: chromium.Chromium, run: Run, tmp_path: Path) -> None:
    for dark in (False, True):
        seconds = show(browser, make_trace(run), tmp_path, dark, view=None)
        assert browser.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert seconds < 5
        tabs = browser.run("Array.from(document.querySelectorAll('[role=tab]'), t => t.id.slice(4))")
        expected = (
            VIEWS
            if run.config.encoder and not run.config.encoder.recurrent
            else ["overview", "alignment", "heads", "output", "attribution"]
        )
        assert set(expected) <= set(tabs)
        for name in tabs:
            browser.click(f"#tab-{name}")
            assert browser.run(f"document.getElementById('tab-{name}').getAttribute('aria-selected')") == "true"
            assert browser.run("document.getElementById('panel').textContent.trim().length") > 10
            assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert complaints(browser) == []


@pytest.mark.parametrize("kind", FAMILIES)
def test_views_without_content_are_absent(browser: chromium.Chromium, kind: str, tmp_path: Path) -> None:
    run = family(kind)
    result = trace(run, Example("abcab")) if kind != "image" else trace_image(run, picture())
    missing = {"alignment"} | ({"image"} if kind != "image" else set())
    prediction_views = {"output", "lens", "attribution"}
    missing |= {"lm-hashed": {"walk"}, "lm-distances": {"position"}, "vectors": prediction_views}.get(kind, set())
    for dark in (False, True):
        show(browser, result, tmp_path, dark, view=None)
        tabs = browser.run("Array.from(document.querySelectorAll('[role=tab]'), t => t.id.slice(4))")
        assert tabs == [name for name in ["overview", "image", *VIEWS[1:]] if name not in missing]
        for name in tabs:
            browser.click(f"#tab-{name}")
            assert browser.run("document.getElementById('panel').textContent.trim().length") > 10
            assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert complaints(browser) == []


@pytest.mark.parametrize("kind", ["pairs", *FAMILIES])
def test_overview_shows_the_importance_of_heads(browser: chromium.Chromium, kind: str, tmp_path: Path) -> None:
    run = letters() if kind == "pairs" else family(kind)
    result = (
        make_trace(run)
        if kind == "pairs"
        else trace_image(run, picture())
        if kind == "image"
        else trace(run, Example("abcab"))
    )
    show(browser, result, tmp_path, view="overview")
    bars = "Array.from(document.querySelectorAll('.spot .gauge i'), n => parseFloat(n.style.width) || 0)"
    changes = [change for m in result.maps for change in result.importance.get(m.name, ())]
    largest = max(changes, default=0.0)
    widths = browser.run(bars)
    if kind == "vectors":
        assert not changes and not any(widths)
        assert "predicts nothing" in browser.run("document.querySelector('#panel > p').textContent")
    else:
        assert (
            widths == pytest.approx([100 * max(0.0, change / largest) for change in changes], abs=0.1)
            and max(widths) > 99
        )
        titles = browser.run("Array.from(document.querySelectorAll('.spot:has(.gauge)'), n => n.title)")
        assert all(("gains" in title) == (change < 0) for title, change in zip(titles, changes, strict=True))
    assert complaints(browser) == []


def test_attribution_view_shows_the_patches_of_an_image(browser: chromium.Chromium, tmp_path: Path) -> None:
    result = trace_image(family("image"), picture())
    assert result.attribution is not None
    show(browser, result, tmp_path, view="attribution")
    browser.run("document.querySelector('.figure').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):  # the second row and column of 4 x 4 patches
        browser.key(key)
    message = browser.run("document.querySelector('.read').textContent")
    value = result.attribution.values_TS[0, 1 + 4 + 1]
    assert message.startswith("patch 2·2") and ("against" in message) == (value < 0)
    assert float(message.split()[-1].replace("−", "-")) == pytest.approx(value, abs=0.02)
    assert complaints(browser) == []


def test_rollout_equals_that_of_the_library(browser: chromium.Chromium, tmp_path: Path) -> None:
    result = trace(family("lm"), Example("abcab"))
    show(browser, result, tmp_path, view="heads")
    browser.click(".choice button", 1)  # layer 2
    browser.click(".choice button", 7)  # rollout, after the mean and four heads
    browser.run("document.querySelector('.figure').focus()")
    expected = rollout(result)[1]
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        browser.key(key)
    message = browser.run("document.querySelector('.read').textContent")
    assert float(message.split()[-1]) == pytest.approx(expected[3, 1], abs=6e-3)
    assert complaints(browser) == []


def test_image_view_shows_the_attention_of_patches(browser: chromium.Chromium, tmp_path: Path) -> None:
    result = trace_image(family("image"), picture())
    show(browser, result, tmp_path, view="image")
    message = "document.querySelector('.read').textContent"
    weights_HTS = result.maps[-1].weights_HTS
    assert browser.run(message).startswith("The class token")
    browser.hover(".photo", dx=-150, dy=-150)  # the first patch
    browser.until(f"{message}.includes('patch 1·1')")
    assert float(browser.run(message).split()[-1]) == pytest.approx(weights_HTS.mean(0)[0, 1], abs=2e-3)
    browser.click(".choice button", 9)  # from a patch: the one in the middle
    browser.until(f"{message}.startsWith('Patch 3·3')")
    browser.click(".thumb", 2)
    browser.run("document.querySelector('.photo').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert float(browser.run(message).split()[-1]) == pytest.approx(weights_HTS[2, 11, 12], abs=2e-3)
    browser.key("Enter")
    browser.until(f"{message}.startsWith('Patch 3·4')")
    numbers = browser.run("Array.from(document.querySelectorAll('.far td'), n => Number(n.textContent))")
    expected = [x for m in result.maps for x in result.distances[m.name].tolist()]
    assert numbers == pytest.approx(expected, abs=0.06)
    browser.click("#tab-output")
    browser.click("#panel .quiet")  # the walk ends with the classes
    assert "three" in browser.run("document.querySelector('.walk > li:last-child').textContent")
    assert complaints(browser) == []


def test_hovering_tints_words_and_clicks_select_them(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    result = make_trace(transformer_run)
    show(browser, result, tmp_path)
    browser.click("#tab-heads")
    browser.hover(".columns > div:first-child .word", 1)
    tint_count = "document.querySelectorAll('.columns > div:nth-child(2) .word[style*=background]').length"
    browser.until(f"{tint_count} === {len(result.tokens['source'])}")
    message = browser.run("document.querySelector('.read').textContent")
    assert "attends to" in message and message.startswith(result.tokens["output"][1])
    browser.click(".columns > div:first-child .word", 2)
    assert browser.run("document.querySelectorAll('.word[aria-pressed=true]').length") == 1
    browser.hover("h1")
    browser.until(f"{tint_count} > 0")

    browser.click("#tab-model")
    assert browser.run("document.querySelectorAll('.thumb').length") == 6 * 4
    browser.click(".thumb", 5)  # encoder, layer 2, head 2
    pressed = "Array.from(document.querySelectorAll('.choice button[aria-pressed=true]'), b => b.textContent)"
    assert browser.run(pressed) == ["Encoder self", "2", "2"]
    browser.click(".choice button", 1)  # decoder self-attention
    assert browser.run(pressed) == ["Decoder self", "2", "2"]


def test_matrix_reads_out_the_weight_at_the_cursor(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    result = make_trace(transformer_run)
    weights = next(iter(result.alignment.values()))
    show(browser, result, tmp_path)
    browser.run("document.querySelector('.figure').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowRight"):
        browser.key(key)
    message = browser.run("document.querySelector('.read').textContent")
    assert message.endswith(f"{weights[1, 2]:.2f}") or message.endswith(f"{weights[1, 2]:.3f}")
    browser.key("Enter")
    assert browser.run("document.querySelector('#tab-output').getAttribute('aria-selected')") == "true"
    assert browser.run("document.querySelector('.steps tr.on td').textContent") == "2"


def test_output_step_opens_the_walk_with_the_numbers_of_the_model(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    result = make_trace(transformer_run)
    show(browser, result, tmp_path)
    browser.click("#tab-output")
    browser.click(".steps tr[tabindex]", 2)
    browser.click("#panel .quiet")
    assert browser.run("document.querySelector('#tab-walk').getAttribute('aria-selected')") == "true"
    titles = browser.run("Array.from(document.querySelectorAll('.walk > li > h2'), n => n.textContent)")
    cards = next(walk for walk in result.walks if walk.name == "decoder").layers[-1]
    assert titles == [card.title for card in cards]
    texts = browser.run(
        "Array.from(document.querySelectorAll('.walk > li:last-child .numbers tr:first-child .n'), n => n.textContent)"
    )
    numbers = cards[-1].vectors[0].first[2]
    assert [float(text.replace("−", "-")) for text in texts] == pytest.approx(numbers.tolist(), abs=0.02)
    browser.click(".controls .choice:first-of-type button", 0)  # the encoder
    assert browser.run("document.querySelectorAll('.walk > li').length") == len(result.walks[0].layers[-1])
    assert complaints(browser) == []


def test_tabs_and_controls_are_reached_by_keyboard(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    show(browser, make_trace(transformer_run), tmp_path)
    browser.run("document.getElementById('tab-alignment').focus()")
    for name in [*VIEWS[2:], *VIEWS[:2]]:
        browser.key("ArrowRight")
        assert browser.run("document.activeElement.id") == f"tab-{name}"
    browser.key("End")
    browser.key("Home")
    browser.key("ArrowRight")
    assert browser.run("document.querySelectorAll('[role=tab][tabindex=\"0\"]').length") == 1
    unnamed = browser.run(
        "Array.from(document.querySelectorAll('button, select, [role=application]')).filter("
        "n => !(n.textContent.trim() || n.getAttribute('aria-label') || n.closest('label'))).length"
    )
    assert unnamed == 0
    browser.key("ArrowRight")
    browser.run("document.querySelectorAll('.choice')[1].querySelector('button').focus()")
    browser.key("Enter")
    assert browser.run("document.activeElement.closest('.choice') !== null"), "a redrawn control keeps the focus"


def test_button_changes_the_theme(browser: chromium.Chromium, transformer_run: Run, tmp_path: Path) -> None:
    show(browser, make_trace(transformer_run), tmp_path)
    before = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.click("header .quiet")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != before


def nasty(result: Trace, payloads: list[str]) -> Trace:
    """A trace with the payloads as tokens, candidates, title, facts, notes and texts."""
    supply = itertools.cycle(payloads)
    take = lambda: next(supply)  # noqa: E731
    steps = tuple(
        dataclasses.replace(step, token=take(), candidates=tuple(c._replace(token=take()) for c in step.candidates))
        for step in result.steps
    )
    lens = tuple(
        dataclasses.replace(row, steps=tuple(tuple(c._replace(token=take()) for c in step) for step in row.steps))
        for row in result.lens
    )
    return dataclasses.replace(
        result,
        title=take(),
        facts={take(): take(), take(): take()},
        notes=(Note("method", take()), Note("limit", take())),
        texts={"source": take(), "output": take()},
        tokens={name: tuple(take() for _ in tokens) for name, tokens in result.tokens.items()},
        steps=steps,
        lens=lens,
    )


def test_five_hundred_html_payloads_remain_text(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    assert len(PAYLOADS) >= 500
    result = make_trace(transformer_run, "abcab" * 17, "bcdab" * 17)
    for start in (0, 250):
        payloads = PAYLOADS[start:] + PAYLOADS[:start]
        show(browser, nasty(result, payloads), tmp_path)
        count = browser.run("Array.from(document.querySelectorAll('.links bdi'), n => n.textContent).length")
        assert count == 2 * 86
        for name in [view for view in VIEWS if view != "attribution"]:  # absent for a long output
            browser.click(f"#tab-{name}")
            browser.hover("#panel", 0)
            bad = browser.run(
                "(() => { let on = 0; for (const n of document.querySelectorAll('*')) for (const a of n.attributes)"
                " if (/^on/i.test(a.name) || /javascript:/i.test(a.name === 'title' ? '' : a.value)"
                " && a.name !== 'aria-label') on++;"
                " return [document.scripts.length, on, document.querySelectorAll("
                "'img,iframe,object,embed,video,math,form,input,base,#panel style,#panel meta').length,"
                " typeof window.hit]; })()"
            )
            assert bad == [2, 0, 0, "undefined"], name
        assert complaints(browser) == []


def test_views_of_three_hundred_tokens_open_within_three_seconds(
    browser: chromium.Chromium, make_letters: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_letters(layers=2, heads=4, width=16)
    result = make_trace(run, "abcab" * 61, "bcdab" * 61)
    show(browser, result, tmp_path)
    assert browser.run("document.querySelectorAll('.note').length") == 2
    for name in [view for view in VIEWS if view != "attribution"]:
        milliseconds = browser.run(
            f"(() => {{ const t = performance.now(); document.getElementById('tab-{name}').click();"
            " return performance.now() - t; })()"
        )
        assert milliseconds < 3000, (name, milliseconds)
    browser.click("#tab-heads")
    browser.hover(".columns > div:first-child .word", 3)
    assert browser.run("document.querySelectorAll('.links path').length") > 0
    browser.click("#tab-output")
    browser.click(".steps tr[tabindex]", 250)
    details = "document.querySelector('.details').getBoundingClientRect()"
    assert browser.run(f"{details}.top > 0 && {details}.bottom <= window.innerHeight")
    assert complaints(browser) == []


def test_right_to_left_words_start_at_the_right(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    result = make_trace(transformer_run)
    hebrew = ("V", "PST", "שָׁ", "ל", "\u05b8", "<eos>")  # features stand before the word
    directions = {"source": "rtl", "output": "rtl", "input": "rtl"}
    show(
        browser,
        dataclasses.replace(result, tokens={**result.tokens, "source": hebrew}, directions=directions),
        tmp_path,
    )
    lefts = "Array.from({}, n => n.getBoundingClientRect().left)"
    places = browser.run(lefts.format("document.querySelector('.words').children"))
    assert len(places) == 6 and places == sorted(places, reverse=True)
    texts = browser.run("Array.from(document.querySelectorAll('.words')[0].children, n => n.textContent)")
    assert texts == [*hebrew[:4], "◌\u05b8", "<eos>"]
    message = "document.querySelector('.read').textContent"
    _, y = browser.spot(".figure")
    left = browser.run("document.querySelector('.figure').getBoundingClientRect().left")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + 4, y=y)  # at the labels: the first column
    assert "<eos>" in browser.run(message)
    browser.run("document.querySelector('.figure').focus()")
    for _ in range(7):
        browser.key("ArrowRight")
    assert "attends to  V" in browser.run(message)
    browser.key("ArrowLeft")
    assert "attends to  PST" in browser.run(message)
    browser.click("#tab-lens")
    places = browser.run(lefts.format("document.querySelectorAll('.lens thead th')"))
    assert len(places) == 5 and places == sorted(places, reverse=True)
    assert complaints(browser) == []


def test_printed_page_is_light_and_has_every_view(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    result = make_trace(transformer_run)
    show(browser, result, tmp_path, dark=True)
    theme = "document.documentElement.dataset.theme"
    browser.run(
        "window.addEventListener('beforeprint', () => { window.seen = ["
        f"{theme}, Array.from(document.querySelectorAll('.sheets > section > h1'), n => n.textContent),"
        " document.querySelectorAll('.walk > li').length, getComputedStyle(document.body).backgroundColor,"
        " Array.from(document.querySelectorAll('.sheets .scroll')).every(n => n.scrollWidth <= n.clientWidth + 2)]; })"
    )
    titles = browser.run("Array.from(document.querySelectorAll('[role=tab]'), n => n.textContent)")
    pdf = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 10_000
    cards = next(walk for walk in result.walks if walk.name == "decoder").layers[0]
    assert browser.run("window.seen") == ["light", titles, len(cards), "rgb(250, 249, 246)", True]
    assert browser.run(theme) == "dark" and browser.run("document.querySelector('.sheets')") is None
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(250, 249, 246)"
    browser.call("Emulation.setEmulatedMedia", media="")
    assert complaints(browser) == []


def test_walk_of_a_pruned_model_shows_every_remaining_head(
    browser: chromium.Chromium, make_letters: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_letters(kept_heads=((1,), (1,)), kept_cross_heads=((0, 3), (0, 3)))
    result = make_trace(run)
    show(browser, result, tmp_path)
    browser.click("#tab-walk")
    buttons = "Array.from(document.querySelectorAll('[aria-label=head] button'), n => n.textContent)"
    assert browser.run(buttons) == ["1", "2", "4"]
    browser.click("[aria-label=head] button", 2)
    cards = "Array.from(document.querySelectorAll('.walk > li'))"
    notes = browser.run(f"{cards}.filter(n => n.querySelector('.note')).map(n => n.querySelector('h2').textContent)")
    layer = next(walk for walk in result.walks if walk.name == "decoder").layers[0]
    assert notes == [card.title for card in layer if card.scores and card.scores.map.endswith("attention")]
    highlights = browser.run(f"{cards}.flatMap(n => Array.from(n.querySelectorAll('tr.on th'), x => x.textContent))")
    assert [text for text in highlights if text.startswith("z") and text[1:].isdigit()] == ["z2", "z4"]
    card = next(card for card in layer if card.title == "Cross-attention: weighted sum")
    number = browser.run(
        f"{cards}.find(n => n.querySelector('h2').textContent === {card.title!r}).querySelector('tr.on td').textContent"
    )
    assert float(number.replace("−", "-")) == pytest.approx(card.vectors[0].first[1, 1, 0], abs=0.02)
    browser.click("#tab-heads")
    assert complaints(browser) == []


def test_long_texts_have_at_most_four_tab_stops(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    show(browser, make_trace(transformer_run, "abcab" * 12, "bcdab" * 12), tmp_path)
    stops = (
        "Array.from(document.querySelectorAll('#panel button, #panel select, #panel [tabindex]')).filter("
        "n => n.tabIndex >= 0 && !n.closest('.choice, .save, .toggle')).length"
    )
    for name, limit in {"overview": 1, "alignment": 4, "heads": 3, "model": 3, "output": 2, "lens": 1}.items():
        browser.click(f"#tab-{name}")
        assert 1 <= browser.run(stops) <= limit, name
    browser.run("document.querySelector('.lens .cell').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        browser.key(key)
    assert browser.run("document.querySelector('.read').textContent").startswith("layer 2, token 3:")
    assert browser.run(stops) == 1
    browser.key("End")
    assert browser.run("document.querySelector('.read').textContent").startswith("layer 2, token 61:")


def test_lens_counts_tokens_where_the_output_differs(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    result = make_trace(transformer_run)
    count = sum(step.token != last[0].token for step, last in zip(result.steps, result.lens[-1].steps, strict=True))
    assert count
    show(browser, result, tmp_path)
    browser.click("#tab-lens")
    assert f"At {count} of 4 tokens the output" in browser.run("document.querySelector('#panel p').textContent")


def test_axis_labels_are_plural(browser: chromium.Chromium, make_letters: Callable[..., Run], tmp_path: Path) -> None:
    show(browser, make_trace(make_letters(position="rotary")), tmp_path)
    browser.click("#tab-position")
    assert "positions down, pairs of dimensions across" in browser.run("document.querySelector('#panel').textContent")


def test_page_works_in_the_frame_of_a_notebook(
    browser: chromium.Chromium, transformer_run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    ready = "<script>document.documentElement.dataset.ready = 'yes'</script>"
    frame = make_trace(transformer_run)._repr_html_()
    path.write_text(f"<!doctype html><body>{frame}{ready}", encoding="utf-8")
    browser.open(path)
    browser.until("document.querySelector('iframe') !== null")
    browser.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
    event = browser.wait_for("Target.attachedToTarget")
    script = (
        "new Promise(r => { const f = () => document.documentElement?.dataset.ready"
        " ? r(document.querySelectorAll('.word').length) : setTimeout(f, 20); f(); })"
    )
    with browser.inside(event["sessionId"]):
        assert browser.run(script) == 0
        browser.run("document.getElementById('tab-alignment').click()")
        assert browser.run(script) == 6 + 4
        assert browser.run("document.querySelectorAll('.save').length") == 0, "a frame may not download"
    assert complaints(browser) == []
