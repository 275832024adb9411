"""The web page of a real server in a real browser, used by clicks and keys. Skipped without a browser."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import pytest

import regard
from kit import chromium
from kit.models import family, tiny
from kit.server import Client, serving
from regard.run import Run
from regard.serve.bodies import parse_body
from regard.serve.responses import ASSETS, policy
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (apt-get install chromium)")
KEY = "k" * 20
MARKUP = ["<img/src=x/onerror=window.hit=1>", "<script>window.hit=1</script>", "</button><b>bold</b>"]
HEBREW = ["שלום", "עולם", "ספר"]
POINTED = ["אָזַל", "סֵפֶר", "בָּנָה"]  # with combining marks
FEATURES = ("FUT", "PL", "V")
SETTLED = "document.getElementById('single').dataset.state === 'idle'"


def untrained(kind: str, words: list[str], features: tuple[str, ...] = ()) -> Run:
    """A run with random weights and a tokenizer trained on `words`."""
    tokenizer = Tokenizer.train(kind, words)
    codec = Codec(
        tokenizer, tokenizer, features, ("source", "features", "target") if features else ("source", "target")
    )
    model = tiny(vocab=codec.target_vocab)
    return Run(model.config, codec, model, Path("run"))


@pytest.fixture(scope="module")
def runs(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("web")
    new_runs = {
        "lm": family("lm"), "cls": family("classes"), "markup": untrained("space", MARKUP),
        "hebrew": untrained("char", HEBREW), "inflection": untrained("char", POINTED, FEATURES),
    }  # fmt: skip
    for name, run in new_runs.items():
        run.save(path / name)
    return {"toy": toy / "run"} | {name: path / name for name in new_runs}


@pytest.fixture(scope="module")
def client(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    with serving(runs, keys=str(keys)) as client:
        yield client


def open_link(browser: chromium.Chromium, client: Client, **state: str) -> None:
    """Open the page with a state in its address; the API key is the password of HTTP basic authentication."""
    browser.open(client.url.replace("//", f"//user:{KEY}@") + f"/#{urlencode(state)}")
    browser.until(SETTLED)


def address(page: chromium.Chromium) -> dict[str, list[str]]:
    """The state in the address."""
    fragment: str = page.run("location.hash.slice(1)")
    return parse_qs(fragment, keep_blank_values=True)


@pytest.fixture
def page(browser: chromium.Chromium, client: Client) -> Iterator[chromium.Chromium]:
    """The page with the first run selected and no input."""
    open_link(browser, client, source="")
    yield browser
    problems = [
        event["params"]
        for event in browser.events
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
    ]
    assert [x for x in problems if x.get("entry", {}).get("source") != "network"] == []  # 4xx responses are expected
    assert browser.run("window.hit") is None


def choose_run(page: chromium.Chromium, name: str) -> None:
    """Select a run with arrow keys."""
    page.run("document.getElementById('run').focus()")
    steps = page.run(
        f"document.querySelector('#run [value={name}]').index - document.getElementById('run').selectedIndex"
    )
    for _ in range(abs(steps)):
        page.key("ArrowDown" if steps > 0 else "ArrowUp")
    assert page.run("document.getElementById('run').value") == name


def write(page: chromium.Chromium, selector: str, text: str) -> None:
    page.click(selector)
    page.write(text)
    page.until(SETTLED)


def texts(page: chromium.Chromium, selector: str) -> list[str]:
    contents: list[str] = page.run(f"Array.from(document.querySelectorAll({json.dumps(selector)}), n => n.textContent)")
    return contents


def output(page: chromium.Chromium) -> str:
    return texts(page, "output")[0]


def until_output(page: chromium.Chromium, text: str) -> None:
    page.until(f"{SETTLED} && document.querySelector('output').textContent === {json.dumps(text)}")


def expected_hypotheses(runs: dict[str, Path], source: str, **options: Any) -> list[Any]:
    settings = {"beam": 5} if "alternatives" in options else {"beam": 5, "nbest": 5}
    return regard.load(runs["toy"]).generate(
        [regard.Request(source, **options.pop("request", {}))], **settings, **options
    )[0]


def test_output_appears_while_typing(page: chromium.Chromium, runs: dict[str, Path]) -> None:
    page.run(
        "window.added = []; new MutationObserver(all => all.forEach(item => item.addedNodes.forEach(n => added.push("
        "n.textContent)))).observe(document.querySelector('output'), {childList: true}); 0"
    )
    write(page, "#source", "fadec")
    expected = expected_hypotheses(runs, "fadec", alignment=True)
    until_output(page, expected[0].text)
    assert page.run("added.length") >= 5  # token by token
    assert texts(page, "#nbest .whole") == [h.text for h in expected]
    shares = [float(text.strip("<%")) for text in texts(page, "#nbest .whole + span")]
    assert shares == pytest.approx([100 * math.exp(h.score / len(h.tokens)) for h in expected], abs=0.5)
    assert shares == sorted(shares, reverse=True) and len(set(shares)) > 1
    assert page.run("document.querySelector('output').closest('section').contains(document.getElementById('nbest'))")
    assert texts(page, ".tokens bdi") == [*expected[0].tokens[:-1], "end"]
    visible_links = [
        (s, t) for t, row in enumerate(expected[0].alignment.soft) for s, weight in enumerate(row) if weight >= 0.05
    ]
    assert page.run("document.querySelectorAll('.links path').length") == len(visible_links)
    page.click("#nbest button", 2)
    assert output(page) == expected[2].text
    page.click("#source")
    page.write("a")
    until_output(page, expected_hypotheses(runs, "fadeca")[0].text)


def test_page_begins_with_an_example_of_the_run(page: chromium.Chromium, client: Client, runs: dict[str, Path]) -> None:
    example = regard.load(runs["toy"]).statistics.examples[0].source
    open_link(page, client)
    assert page.run("document.getElementById('source').value") == example
    until_output(page, expected_hypotheses(runs, example)[0].text)
    choose_run(page, "lm")  # has none
    page.until(f"{SETTLED} && document.getElementById('source').value === ''")
    choose_run(page, "toy")
    page.until(f"{SETTLED} && document.getElementById('source').value === {json.dumps(example)}")
    open_link(page, client)
    page.write("cab")  # replaces the example
    until_output(page, expected_hypotheses(runs, "cab")[0].text)
    choose_run(page, "cls")
    assert page.run("document.getElementById('source').value") == "cab"


def test_new_input_aborts_the_previous_request(page: chromium.Chromium, runs: dict[str, Path]) -> None:
    page.run(  # the first request is never answered
        "const real = fetch; window.signals = []; window.fetch = (url, more) => signals.push(more.signal) > 1"
        " ? real(url, more) : new Promise((_, fail) => more.signal.addEventListener('abort', () => fail("
        "more.signal.reason))); 0"
    )
    page.click("#source")
    page.write("c")
    page.until("signals.length === 1")
    page.write("ab")
    until_output(page, expected_hypotheses(runs, "cab")[0].text)
    assert page.run("signals[0].aborted")


def test_output_continues_after_a_replaced_token(page: chromium.Chromium, runs: dict[str, Path]) -> None:
    write(page, "#source", "cab")
    prefix = " ".join(expected_hypotheses(runs, "cab")[0].tokens[:1])
    page.click(".token", 1)
    page.until("document.querySelectorAll('.alternative').length > 1")
    expected = expected_hypotheses(runs, "cab", alternatives=8, request={"prefix": prefix})
    assert texts(page, ".alternative .whole") == [h.text for h in expected]
    assert texts(page, ".alternative .strong") == [h.tokens[1].replace("<eos>", "end") for h in expected]
    page.click(".alternative", 2)
    new_prefix = " ".join(expected[2].tokens[:2])
    page.until(f"document.getElementById('prefix').value === {json.dumps(new_prefix)}")
    expected = expected_hypotheses(runs, "cab", request={"prefix": new_prefix})
    until_output(page, expected[0].text)
    assert texts(page, "#nbest .whole") == [h.text for h in expected]


def test_output_respects_required_and_forbidden_phrases(page: chromium.Chromium, runs: dict[str, Path]) -> None:
    write(page, "#source", "cab")
    unconstrained = output(page)
    assert "B" in unconstrained and "EH" not in unconstrained
    page.click("#steering summary")
    labels = ["Begins with", "Contains", "Must not contain", "Beam", "Temperature", "Seed", "Maximum length"]
    assert texts(page, "#steering .field > :first-child") == labels
    for field, phrase, request in (
        ("#forbid", "B", {"forbid": ["B"]}),
        ("#require", "EH", {"forbid": ["B"], "require": ["EH"]}),
    ):
        page.click(field)
        page.write(phrase)
        page.key("Enter")
        until_output(page, expected_hypotheses(runs, "cab", request=request)[0].text)
    page.click(".chip")  # a click removes the phrase
    page.click(".chip")
    until_output(page, unconstrained)


def test_error_message_is_shown(page: chromium.Chromium) -> None:
    write(page, "#source", "cab")
    assert not page.run("document.getElementById('steering').open")
    page.click("#steering summary")
    page.click("#prefix")
    page.write("Q")
    page.until("!document.getElementById('problem').hidden")
    assert "'Q' is not in the target vocabulary" in texts(page, "#problem")[0]


def test_page_is_usable_with_the_keyboard_only(page: chromium.Chromium, runs: dict[str, Path]) -> None:
    page.write("cab")  # the page opens with the focus in the input
    page.until(SETTLED)
    for _ in range(30):
        page.key("Tab")
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
        if page.run("document.activeElement.className") == "token":
            break
    page.key("ArrowRight")
    page.key("Enter")
    page.until("document.activeElement.className === 'alternative'")
    page.key("Tab")
    page.key("Enter")
    page.until("document.getElementById('prefix').value !== '' && document.activeElement.className === 'token'")
    expected = expected_hypotheses(runs, "cab", request={"prefix": page.run("document.getElementById('prefix').value")})
    until_output(page, expected[0].text)


def test_attention_is_shown_in_a_sandboxed_frame(page: chromium.Chromium) -> None:
    page.events.clear()
    page.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
    write(page, "#source", "cab")
    page.click("#attention summary")
    page.until("document.querySelector('iframe') !== null")
    assert page.run("document.querySelector('iframe').sandbox.value") == "allow-scripts"

    def frame_sessions() -> list[str]:
        page.run("0")
        events = [event["params"] for event in page.events if event.get("method") == "Target.attachedToTarget"]
        return [event["sessionId"] for event in events if event["targetInfo"]["type"] == "iframe"]

    _wait(lambda: frame_sessions() != [])
    ready = "document.documentElement?.dataset.ready === 'yes'"
    with page.inside(frame_sessions()[-1]):
        page.until(ready)
        assert "cab" in page.run("document.body.innerText")
        style = page.run("getComputedStyle(document.querySelector('main')).maxWidth")
        assert style == "1180px"  # its own style applies
        page.run("document.getElementById('tab-heads').click()")
    page.click("#source")
    page.write("adc")
    page.until(f"{SETTLED} && JSON.parse(document.querySelector('iframe').dataset.key).source.length === 6")
    with page.inside(frame_sessions()[-1]):
        page.until(f"{ready} && document.body.innerText.includes('cabadc')")
        assert page.run("document.getElementById('tab-heads').getAttribute('aria-selected')") == "true"
    page.call("Target.setAutoAttach", autoAttach=False, waitForDebuggerOnStart=False, flatten=True)


def test_page_supports_classifiers_and_language_models(page: chromium.Chromium, runs: dict[str, Path]) -> None:
    write(page, "#source", "abc")
    assert page.run("document.getElementById('nbest').offsetHeight > 0")
    choose_run(page, "cls")
    page.until(f"{SETTLED} && document.querySelectorAll('#labels th').length > 1")
    assert page.run("document.getElementById('nbest').offsetHeight === 0")
    expected = regard.load(runs["cls"]).classify(["abc"])[0]
    assert texts(page, "#labels .text") == [expected.label]
    assert texts(page, "#labels th") == list(expected.as_dict()["probabilities"])
    choose_run(page, "lm")
    model = regard.load(runs["lm"])
    for seed in (1, 2):
        expected = model.generate(["abc"], sample=True, temperature=0.8, seed=seed, max_length=40)[0][0]
        until_output(page, expected.text)
        page.click("#again")


def test_lines_of_a_file_are_answered_and_downloaded(
    page: chromium.Chromium, runs: dict[str, Path], tmp_path: Path
) -> None:
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.run(  # the first request is answered with 429
        "const real = fetch; let refused = 0; window.fetch = (url, more) => url.pathname.endsWith('generate') &&"
        " !refused++ ? Promise.resolve(new Response('{}', {status: 429, headers: {'Retry-After': '1'}}))"
        " : real(url, more); 0"
    )
    page.click("#tab-batch")
    lines = ["cab", "fade\tkept", "", "x" * 100_001, *(["bad"] * 400)]
    (tmp_path / "words.tsv").write_text("\r\n".join(lines) + "\r\n", newline="")
    file_input = page.call("DOM.querySelector", nodeId=page.call("DOM.getDocument")["root"]["nodeId"], selector="#file")
    page.call("DOM.setFileInputFiles", files=[str(tmp_path / "words.tsv")], nodeId=file_input["nodeId"])
    page.until("document.body.innerText.includes('404 lines')")
    page.run("document.getElementById('batch-beam').value = 1; 0")
    page.click("#start")
    page.until("document.body.innerText.includes('busy')")
    page.until("document.getElementById('start').hidden && document.getElementById('stop').hidden")
    assert "404 of 404 lines · 1 error" in page.run("document.body.innerText")
    page.click("#download")
    file = tmp_path / "words.toy.tsv"
    _wait(file.exists)
    rows = file.read_text("utf-8").split("\n")[:-1]
    assert [row[: len(line)] for row, line in zip(rows, lines, strict=True)] == lines
    hypotheses = regard.load(runs["toy"]).generate(["cab", "fade", "", "bad"])
    expected = [f"{h[0].text}\t{h[0].score:.4f}\t{','.join(h[0].flags)}\t" for h in hypotheses]
    assert rows[:3] == [f"{line}\t{answer}" for line, answer in zip(lines[:3], expected[:3], strict=True)]
    assert set(rows[4:]) == {f"bad\t{expected[3]}"}
    assert re.fullmatch(r"x+\t\t\t\t.*100000 characters.*", rows[3]), rows[3][-100:]


def test_batch_continues_after_a_failed_request(page: chromium.Chromium) -> None:
    page.click("#tab-batch")
    page.click("#lines")
    page.call("Input.insertText", text="cab\n" * 250)
    page.run(
        "const real = fetch; let calls = 0; window.fetch = (url, more) => ++calls === 2"
        " ? Promise.reject(new TypeError('down')) : real(url, more); 0"
    )
    page.click("#start")
    page.until("!document.getElementById('problem').hidden")
    assert "10 lines of 250 are done" in texts(page, "#problem")[0]
    assert texts(page, "#start") == ["Continue"]
    page.run(
        "window.seen = []; new MutationObserver(() => seen.push(document.querySelector('progress').value)).observe("
        "document.querySelector('progress'), {attributes: true}); 0"
    )
    page.click("#start")
    page.until("document.body.innerText.includes('250 of 250 lines')")
    seen = page.run("seen")
    assert len(seen) > 4 and seen == sorted(seen) and seen[-1] == 1, "progress within the lines"
    page.click("#lines")
    page.key("a")  # editing the lines discards the answers
    assert not page.run("document.querySelectorAll('#batch tr').length")
    page.click("#start")
    page.until("document.body.innerText.includes('250 of 250 lines')")


def test_markup_is_escaped_and_hebrew_runs_from_right_to_left(page: chromium.Chromium) -> None:
    choose_run(page, "markup")
    write(page, "#source", MARKUP[0])
    assert any(token in output(page) for token in MARKUP)
    page.click(".token")
    page.until("document.querySelectorAll('.alternative').length > 1")
    page.click("#steering summary")
    page.click("#forbid")
    page.write(MARKUP[1])
    page.key("Enter")
    page.until(f"{SETTLED} && !document.querySelector('output').textContent.includes('script')")
    page.click("#attention summary")
    page.until("document.querySelector('iframe') !== null")
    page.click("#tab-batch")
    page.click("#lines")
    page.write(MARKUP[0])
    page.click("#start")
    page.until("document.querySelectorAll('#batch tbody tr').length === 1")
    assert page.run("document.querySelectorAll('img, b b, #single script, #batch script').length") == 0
    page.click("#tab-single")
    choose_run(page, "hebrew")
    page.run("document.getElementById('source').select(); 0")
    page.write(HEBREW[0])
    page.until(f"{SETTLED} && getComputedStyle(document.querySelector('output')).direction === 'rtl'")
    assert page.run("getComputedStyle(document.getElementById('source')).direction") == "rtl"
    places = page.run("Array.from(document.querySelector('.words').children, n => n.getBoundingClientRect().left)")
    assert len(places) > 3 and places == sorted(places, reverse=True)


def test_tokens_of_a_right_to_left_text_run_from_right_to_left(page: chromium.Chromium, client: Client) -> None:
    """Names of features come before the source tokens, but do not change the direction of the row."""
    open_link(page, client, run="inflection", source=POINTED[0], features="V;PL", prefix=POINTED[0][:2])
    rows = "Array.from(document.querySelectorAll('.words, .tokens'), row => row.dir)"
    page.until(f"{rows}.join() === 'rtl,rtl,rtl'")
    assert texts(page, ".words:first-child .word")[:3] == ["V", "PL", POINTED[0][0]]
    page.until("document.querySelectorAll('.links path').length > 0")
    source, output = page.run(
        "Array.from(document.querySelectorAll('.words'), row => Array.from(row.children, node => {"
        " const box = node.getBoundingClientRect(); return box.left + box.width / 2; }))"
    )
    assert source == sorted(source, reverse=True) and output == sorted(output, reverse=True)
    ends = page.run(
        "Array.from(document.querySelectorAll('.links path'), path => [path.getPointAtLength(0), path.getPointAtLength("
        "1e6)].map(point => point.x + document.querySelector('.links').getBoundingClientRect().left))"
    )
    for above, below in ends:
        assert min(abs(above - x) for x in source) < 1 and min(abs(below - x) for x in output) < 1
    page.run("document.querySelector('.token').focus()")
    page.key("ArrowLeft")
    assert page.run("document.activeElement === document.querySelectorAll('.token')[1]")
    sizes = "Array.from(document.querySelectorAll('.mark'), node => parseFloat(getComputedStyle(node).fontSize))"
    assert min(page.run(sizes)) >= 24, "combining marks are legible"


def test_features_of_the_run_are_offered(page: chromium.Chromium, client: Client) -> None:
    assert not page.run("document.getElementById('features')?.offsetHeight")
    open_link(page, client, run="inflection", source=POINTED[0])
    assert "features" in texts(page, "#problem")[0]
    page.click("#features")
    options = "Array.from(document.querySelectorAll('#features-names option'), option => option.value)"
    assert page.run(options) == list(FEATURES)
    page.write("V;p")
    assert page.run(options) == ["V;PL"]
    page.write("L")
    page.until(f"{SETTLED} && document.getElementById('problem').hidden")
    assert output(page) != ""


def test_input_grows_with_its_text_and_empties_the_output(page: chromium.Chromium, client: Client) -> None:
    height = page.run("document.getElementById('source').offsetHeight")
    page.click("#source")
    page.call("Input.insertText", text="cab\n" * 8)
    assert page.run("document.getElementById('source').offsetHeight") > height
    page.until(f"{SETTLED} && document.querySelector('output').textContent !== ''")
    page.run("document.getElementById('source').select()")
    page.key("Backspace")
    until_output(page, "")
    assert page.run("document.getElementById('source').offsetHeight") == height
    visible = "Array.from(document.querySelectorAll('#nbest, .links'), node => node.offsetHeight)"
    assert page.run(visible) == [0, 0]


def test_link_reproduces_emptied_fields(page: chromium.Chromium, client: Client) -> None:
    """Their defaults are not empty: an example, and a length that suits a language model."""
    open_link(page, client, run="lm", source="cab", seed="7")
    for field in ("source", "max_length"):
        page.run(f"document.getElementById('{field}').select()")
        page.key("Backspace")
    page.until("location.hash.includes('max_length=')")
    state = {name: values[0] for name, values in address(page).items()}
    assert state == {"run": "lm", "seed": "7", "max_length": "", "source": ""}
    open_link(page, client, **state)
    assert page.run("document.getElementById('max_length').value") == ""
    open_link(page, client)
    assert page.run("document.getElementById('source').value") != "", "the example"
    page.run("document.getElementById('source').select()")
    page.key("Backspace")
    page.until("new URLSearchParams(location.hash.slice(1)).get('source') === ''")
    open_link(page, client, **{name: values[0] for name, values in address(page).items()})
    assert page.run("document.getElementById('source').value") == ""


def test_link_reproduces_run_input_and_options(
    page: chromium.Chromium, client: Client, runs: dict[str, Path], tmp_path: Path
) -> None:
    write(page, "#source", "cab")
    page.click("#steering summary")
    page.click("#forbid")
    page.write("B")
    page.key("Enter")
    page.run("document.getElementById('beam').select()")
    page.write("3")
    state = {"run": ["toy"], "beam": ["3"], "forbid": ["B"], "source": ["cab"]}
    page.until("location.hash.includes('beam=3')")
    assert address(page) == state
    expected = regard.load(runs["toy"]).generate([regard.Request("cab", forbid=["B"])], beam=3, nbest=3)[0]
    until_output(page, expected[0].text)
    link = page.run("location.hash.slice(1)")
    open_link(page, client, **{name: values[0] for name, values in state.items()})
    until_output(page, expected[0].text)
    assert texts(page, "#nbest .whole") == [h.text for h in expected]
    sent = [event["params"]["request"] for event in page.events if event.get("method") == "Network.requestWillBeSent"]
    assert sent and not any("cab" in request["url"] for request in sent), "the fragment is not sent"
    page.run("location.hash = '#run=lm&source=ab&seed=2'")
    model = regard.load(runs["lm"])
    until_output(page, model.generate(["ab"], sample=True, temperature=0.8, seed=2, max_length=40)[0][0].text)
    page.run(f"location.hash = {json.dumps(link)}")
    until_output(page, expected[0].text)
    choose_run(page, "hebrew")  # which keeps the beam, but no phrases
    page.until("location.hash.includes('run=hebrew')")
    assert address(page) == {"run": ["hebrew"], "beam": ["3"], "source": ["cab"]}


def test_link_to_lines_opens_them(page: chromium.Chromium, client: Client) -> None:
    open_link(page, client, run="lm", mode="batch", lines="ab\ncab", beam="2")
    assert page.run("document.getElementById('lines').value") == "ab\ncab"
    assert page.run("document.getElementById('batch-beam').value") == "2"
    page.until("location.hash.includes('lines=')")
    assert address(page) == {"run": ["lm"], "mode": ["batch"], "beam": ["2"], "lines": ["ab\ncab"]}


def test_unusable_parts_of_a_link_are_named_or_ignored(page: chromium.Chromium, client: Client) -> None:
    open_link(page, client, run=MARKUP[1], source="cab", beam="1e9", mode="constructor", seed="x")
    assert output(page) != ""
    values = [page.run(f"document.getElementById('{name}').value") for name in ("run", "beam", "seed")]
    assert values == ["toy", "5", "1"]
    page.until("!document.getElementById('unlinked').hidden")
    assert MARKUP[1] in texts(page, "#unlinked")[0]
    page.run("document.getElementById('source').value = ''")
    page.click("#source")
    page.call("Input.insertText", text="a" + "\U0001f600" * 2000)  # character 4,000 is half of a pair
    page.until("!location.hash.includes('source=')")
    assert "not part of a link: the input" in texts(page, "#unlinked")[0]


def test_page_fits_the_width_of_a_phone(page: chromium.Chromium, client: Client) -> None:
    page.resize(360, 780)
    fits = "document.documentElement.scrollWidth <= 360"
    page.click("#source")
    page.call("Input.insertText", text="cab" * 8)
    page.until(SETTLED)
    page.click(".token", 12)
    page.until("document.querySelectorAll('.alternative').length > 1")
    assert page.run(fits)
    page.click("#steering summary")
    page.click("#attention summary")
    page.until("document.querySelector('iframe') !== null")
    assert page.run(fits)
    page.click("#tab-batch")
    page.click("#lines")
    page.call("Input.insertText", text="abcdef" * 9)
    page.click("#start")
    page.until("document.querySelectorAll('#batch tbody tr').length === 1")
    assert page.run(fits)
    page.open(client.url + "/docs", dark=True)
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.run(fits)
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 25)"


def test_api_page_lists_every_operation_with_a_working_example(page: chromium.Chromium, client: Client) -> None:
    page.open(client.url + "/docs")
    bearer = {"Authorization": f"Bearer {KEY}"}
    paths = json.loads(client.get("/openapi.json", **bearer).body)["paths"]
    operations = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert texts(page, "summary code") == [part for operation in operations for part in operation]
    bodies = {route.path: route.body for route in client.server.routes}
    examples = dict(zip(operations, texts(page, "pre"), strict=True))
    for (method, path), example in examples.items():
        assert example.startswith(f"curl {client.url}{path}")
        if method == "POST":
            data = re.search(r"-d '(.*)'", example)
            assert data is not None
            body = json.loads(data[1])
            assert parse_body(bodies[path], data[1].encode())
            if "run" in body or "model" in body:
                assert client.post(path, body, **bearer).status == 200


def test_page_requires_a_key_and_loads_only_its_own_files(client: Client) -> None:
    reply_without_key = client.get("/")
    assert reply_without_key.status == 401 and reply_without_key.headers["WWW-Authenticate"].startswith("Basic ")
    for path in ASSETS:
        reply = client.get(path, Authorization=f"Bearer {KEY}")
        assert reply.status == 200 and reply.headers["Content-Security-Policy"] == policy()
        assert b"https://" not in reply.body and b"innerHTML" not in reply.body
    assert "unsafe" not in policy() and "*" not in policy()


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + chromium.MAX_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
