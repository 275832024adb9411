"""The live page in headless Chromium: outputs equal to `regard generate`, speed and size.

    python bench/page.py runs/dut dut_dev.tsv

For each precision of the weights, the script prints the size of the file, the seconds until the page is ready, the
number of outputs equal to torch, the error rates of both, the milliseconds per input, and the milliseconds from a key
press to every view. The last line has all figures as JSON. The file has the columns of the run's training data; a
language model continues the first words of each line. The script needs a Chromium.
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
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import Options, Request
from regard.decode.torch_engine import TorchEngine
from regard.inspect.live import PRECISIONS, page_input, write_live_page
from regard.inspect.page import bundle
from regard.run import Run
from regard.text.codec import Example

MAX_OUTPUT = 40  # tokens of a continuation
TYPED_TOKENS = 30  # length of the typed input
BATCH = 100  # inputs per call of the browser
GENERATE = """(() => {
  const seconds = [], answers = [];
  for (const [input, options] of %s) {
    const began = performance.now();
    const hypotheses = JSON.parse(askModel("generate", JSON.stringify([input, options]))).hypotheses;
    answers.push(hypotheses[0] || {text: "", score: 0});
    seconds.push(performance.now() - began);
  }
  return [answers.map((x) => [x.text, x.score]), seconds];
})()"""
# Milliseconds from a key press until a view is painted, for the last letters of a text; null if it does not change.
TYPE = """(async () => {
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
IS_IDLE = "document.querySelector('.bar-top').getAttribute('aria-busy') === 'false'"
TABS = "Array.from(document.querySelectorAll('[role=tab]'), (tab) => tab.id.slice(4))"


def read_inputs(run: Run, path: str, count: int) -> list[Example]:
    if run.task.seq2seq:
        source = Source((path,), columns=run.codec.columns)
        return [located.example for located in source.read(LineCounter())][:count]
    lines = [line for line in Path(path).read_text("utf-8").split("\n") if len(line) > 10]
    return [Example(line[:12]) for line in lines[:: max(1, len(lines) // count)]][:count]


def error_rate(outputs: list[str], examples: list[Example]) -> float:
    """The percentage of wrong outputs."""
    return 100 * sum(a != b.target for a, b in zip(outputs, examples, strict=True)) / len(examples)


def generate(browser: chromium.Chromium, inputs: list[Any]) -> tuple[list[list[Any]], float]:
    """The best output of every input with its score, and the median time in milliseconds."""
    answers: list[list[Any]] = []
    times: list[float] = []
    for start in range(0, len(inputs), BATCH):
        batch_answers, batch_times = browser.run(GENERATE % json.dumps(inputs[start : start + BATCH]))
        answers += batch_answers
        times += batch_times
    return answers, round(median(times), 1)


def key_to_view(browser: chromium.Chromium, field: str, text: str) -> dict[str, Any]:
    """The median and maximum milliseconds from a key press until each view is painted."""
    milliseconds = {}
    for tab in browser.run(TABS):
        browser.run(f"document.getElementById('tab-{tab}').click()")
        browser.until(IS_IDLE)
        browser.run(TYPE % (json.dumps(field), json.dumps(text)))  # warm-up: the browser compiles hot code
        browser.until(IS_IDLE)
        times = browser.run(TYPE % (json.dumps(field), json.dumps(text)))
        browser.until(IS_IDLE)
        milliseconds[tab] = None if times is None else [round(median(times), 1), round(max(times), 1)]
    return milliseconds


def measure(browser: chromium.Chromium, run: Run, examples: list[Example], options: argparse.Namespace) -> list[Any]:
    """Print the measurements of each precision."""
    decoding = Options() if run.task.seq2seq else Options(max_length=MAX_OUTPUT)
    requests = [Request(e.source, e.features) for e in examples]
    expected: list[Hypothesis] = [h[0] for h in TorchEngine(run, decoding)(requests)]
    limit = {} if run.task.seq2seq else {"maxLength": MAX_OUTPUT}
    inputs = [[page_input(e), limit] for e in examples]
    text = max(examples, key=lambda e: -abs(len(run.codec.encode_source([e])[0]) - TYPED_TOKENS)).source
    results = []
    for precision in options.precision:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            report = write_live_page(run, path, precision, examples[0])
            ready = browser.open(path)
            view_times = key_to_view(browser, options.field, text)
            browser.open(path)
            browser.run(bundle("page/proof.js") + "; true")
            model, data = (f"document.getElementById('{name}').textContent" for name in ("model", "data"))
            browser.run(f"loadModel({model}, {data}, true)")
            answers, greedy_ms = generate(browser, inputs)
            _, beam_ms = generate(browser, [[x, {**limit, "strategy": "beam", "beam": 5}] for x, _ in inputs[:50]])
        texts = [answer for answer, _ in answers]
        pairs = list(zip(answers, expected, strict=True))
        figures = {
            "precision": precision, "bytes": report.details["bytes"], "ready_s": round(ready, 2),
            "same_outputs": sum(a == b.text for a, b in zip(texts, expected, strict=True)), "inputs": len(examples),
            "score_difference": max((abs(s - h.score) for (t, s), h in pairs if t == h.text), default=None),
            "greedy_ms": greedy_ms, "beam_5_ms": beam_ms,
            "typed": text, "key_to_view_ms": view_times,
        }  # fmt: skip
        if run.task.seq2seq:
            figures |= {
                "wer": error_rate(texts, examples),
                "wer_torch": error_rate([h.text for h in expected], examples),
            }
        print(" ".join(f"{name}={value}" for name, value in figures.items() if name != "key_to_view_ms"))
        for tab, times in view_times.items():
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
