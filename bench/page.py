"""The live page in headless Chromium: outputs equal to `regard generate`, speed and size.

    python bench/page.py runs/dut dut_dev.tsv

For each precision of the weights: size of the file, seconds until it is ready, outputs that are those of torch, errors
of both, milliseconds per input, and from a key press to every view. The last line is all of it as JSON. Columns of the
file are those of the run; a language model continues the first words of each line. Needs a Chromium.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the browser driver
from kit import chromium
from regard.data.reader import LineCounter, Source
from regard.decode.engine import TorchEngine
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import Options, Request
from regard.inspect.live import PRECISIONS, page_input, write_live_page
from regard.inspect.page import bundle
from regard.run import Run
from regard.text.codec import Example

MAX_OUTPUT = 40  # tokens of a continuation
TYPED_LENGTH = 30  # tokens of the typed input
BATCH = 100  # inputs per call of the browser
ASK = """(() => {
  const seconds = [], answers = [];
  for (const [input, options] of %s) {
    const began = performance.now();
    const found = JSON.parse(askModel("generate", JSON.stringify([input, options]))).hypotheses;
    answers.push(found[0] || {text: "", score: 0});
    seconds.push(performance.now() - began);
  }
  return [answers.map((x) => [x.text, x.score]), seconds];
})()"""
# Milliseconds from key press to paint of each view, for the last letters of a text; null if a view does not change.
TYPED = """(async () => {
  const field = document.querySelector(%s), text = %s, times = [];
  for (let i = Math.max(1, text.length - 8); i <= text.length; i++) {
    const changed = new Promise((done) => {
      const watch = new MutationObserver(() => { watch.disconnect(); requestAnimationFrame(() => setTimeout(done)); });
      watch.observe(document.getElementById("panel"), {childList: true, subtree: true});
      setTimeout(() => { watch.disconnect(); done(true); }, 20000);
    });
    const began = performance.now();
    field.value = text.slice(0, i);
    field.dispatchEvent(new Event("input", {bubbles: true}));
    if (await changed) return null;
    times.push(performance.now() - began);
  }
  return times;
})()"""
SETTLED = "document.querySelector('.bar-top').getAttribute('aria-busy') === 'false'"
TABS = "Array.from(document.querySelectorAll('[role=tab]'), (tab) => tab.id.slice(4))"


def read_inputs(run: Run, path: str, count: int) -> list[Example]:
    if run.task.seq2seq:
        source = Source((path,), columns=run.codec.columns)
        return [located.example for located in source.read(LineCounter())][:count]
    lines = [line for line in Path(path).read_text("utf-8").split("\n") if len(line) > 10]
    return [Example(line[:12]) for line in lines[:: max(1, len(lines) // count)]][:count]


def wrong(outputs: list[str], examples: list[Example]) -> float:
    return 100 * sum(a != b.target for a, b in zip(outputs, examples, strict=True)) / len(examples)


def ask(browser: chromium.Chromium, asked: list[Any]) -> tuple[list[list[Any]], float]:
    """The best output of every input with its score, and the median time in milliseconds."""
    answers, times = [], []
    for start in range(0, len(asked), BATCH):
        some, seconds = browser.run(ASK % json.dumps(asked[start : start + BATCH]))
        answers += some
        times += seconds
    return answers, round(median(times), 1)


def typed(browser: chromium.Chromium, field: str, text: str) -> dict[str, Any]:
    """The median and maximum milliseconds from a key press to each view."""
    found = {}
    for tab in browser.run(TABS):
        browser.run(f"document.getElementById('tab-{tab}').click()")
        browser.until(SETTLED)
        browser.run(TYPED % (json.dumps(field), json.dumps(text)))  # warm-up: the browser compiles hot code
        browser.until(SETTLED)
        times = browser.run(TYPED % (json.dumps(field), json.dumps(text)))
        browser.until(SETTLED)
        found[tab] = None if times is None else [round(median(times), 1), round(max(times), 1)]
    return found


def measure(browser: chromium.Chromium, run: Run, examples: list[Example], options: argparse.Namespace) -> list[Any]:
    """Print the measurements of each precision."""
    decoding = Options() if run.task.seq2seq else Options(max_length=MAX_OUTPUT)
    requests = [Request(e.source, e.features) for e in examples]
    ours: list[Hypothesis] = [h[0] for h in TorchEngine(run, decoding)(requests)]
    limit = {} if run.task.seq2seq else {"maxLength": MAX_OUTPUT}
    asked = [[page_input(e), limit] for e in examples]
    text = max(examples, key=lambda e: -abs(len(run.codec.encode_source([e])[0]) - TYPED_LENGTH)).source
    results = []
    for precision in options.precision:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            report = write_live_page(run, path, precision, examples[0])
            ready = browser.open(path)
            keys = typed(browser, options.field, text)
            browser.open(path)
            browser.run(bundle("proof.js") + "; true")
            model, stored = (f"document.getElementById('{name}').textContent" for name in ("model", "data"))
            browser.run(f"loadModel({model}, {stored}, true)")
            answers, greedy = ask(browser, asked)
            _, beamed = ask(browser, [[item, {**limit, "strategy": "beam", "beam": 5}] for item, _ in asked[:50]])
        texts, pairs = [answer for answer, _ in answers], list(zip(answers, ours, strict=True))
        figures = {
            "precision": precision, "bytes": report.details["bytes"], "ready_s": round(ready, 2),
            "same_outputs": sum(a == b.text for a, b in zip(texts, ours, strict=True)), "inputs": len(examples),
            "score_difference": max((abs(s - h.score) for (t, s), h in pairs if t == h.text), default=None),
            "greedy_ms": greedy, "beam_5_ms": beamed,
            "typed": text, "key_to_view_ms": keys,
        }  # fmt: skip
        if run.task.seq2seq:
            figures |= {"wer": wrong(texts, examples), "wer_torch": wrong([h.text for h in ours], examples)}
        print(" ".join(f"{name}={value}" for name, value in figures.items() if name != "key_to_view_ms"))
        for tab, times in keys.items():
            print(
                f"  key press to {tab}: "
                + ("unchanged" if times is None else "median {} ms, largest {} ms".format(*times))
            )
        sys.stdout.flush()
        results.append(figures)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("file")
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--field", default="textarea.field", help="the selector of the input field")
    options = parser.parse_args()
    run = Run.load(options.run)
    examples = read_inputs(run, options.file, options.inputs)
    program = chromium.find()
    assert program is not None, "no Chromium on this machine"
    browser = chromium.Chromium(program)
    try:
        print(json.dumps({"run": options.run, "results": measure(browser, run, examples, options)}))
    finally:
        browser.close()


if __name__ == "__main__":
    main()
