"""The page that is the model, in headless Chromium: the same outputs as `regard generate`, its speed and its size.

    python bench/page.py runs/dut dut_dev.tsv --inputs 500

Columns of the file are those of the run; a language model continues the first words of each line. Needs a Chromium.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the browser's driver
import chromium
from regard.data.reader import LineCounter, Source
from regard.decode.generate import TorchEngine
from regard.decode.hypothesis import Hypothesis
from regard.decode.options import Options
from regard.decode.request import Request
from regard.inspect.live import PRECISIONS, page_input, write_live_page
from regard.inspect.page import bundle
from regard.run import Run
from regard.text.codec import Example

LONGEST = 40  # tokens of a continuation
ASK = """(() => {
  const seconds = [], answers = [];
  for (const [input, options] of %s) {
    const began = performance.now();
    const found = JSON.parse(askModel("generate", JSON.stringify([input, options]))).hypotheses;
    answers.push(found[0] || {text: "", score: 0});
    seconds.push(performance.now() - began);
  }
  seconds.sort((a, b) => a - b);
  return [answers.map((x) => [x.text, x.score]), seconds[Math.floor(seconds.length / 2)]];
})()"""
# From the input event of a key press to the next frame after the views have changed.
TYPED = """(async () => {
  const field = document.querySelector("%s"), text = %s, times = [];
  for (let i = Math.max(1, text.length - 8); i <= text.length; i++) {
    const panel = document.getElementById("panel");
    const changed = new Promise((done) => {
      const watch = new MutationObserver(() => { watch.disconnect(); requestAnimationFrame(done); });
      watch.observe(panel, {childList: true, subtree: true});
    });
    const began = performance.now();
    field.value = text.slice(0, i);
    field.dispatchEvent(new Event("input", {bubbles: true}));
    await changed;
    times.push(performance.now() - began);
  }
  times.sort((a, b) => a - b);
  return [times[Math.floor(times.length / 2)], times[times.length - 1]];
})()"""


def read_inputs(run: Run, path: str, count: int) -> list[Example]:
    if run.task.seq2seq:
        source = Source((path,), columns=run.codec.columns)
        return [located.example for located in source.read(LineCounter())][:count]
    lines = [line for line in Path(path).read_text("utf-8").split("\n") if len(line) > 10]
    return [Example(line[:12]) for line in lines[:: max(1, len(lines) // count)]][:count]


def wrong(outputs: list[str], examples: list[Example]) -> float:
    return 100 * sum(a != b.target for a, b in zip(outputs, examples, strict=True)) / len(examples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("file")
    parser.add_argument("--inputs", type=int, default=500)
    parser.add_argument("--field", default="textarea.field", help="the selector of the input field")
    options = parser.parse_args()
    run = Run.load(options.run)
    examples = read_inputs(run, options.file, options.inputs)
    decoding = Options() if run.task.seq2seq else Options(max_length=LONGEST)
    ours: list[Hypothesis] = [
        h[0] for h in TorchEngine(run, decoding)([Request(e.source, e.features) for e in examples])
    ]
    program = chromium.find()
    assert program is not None, "no Chromium on this machine"
    browser = chromium.Chromium(program)
    try:
        for precision in PRECISIONS:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "page.html"
                report = write_live_page(run, path, precision, examples[0])
                ready = browser.open(path)
                browser.run(bundle("proof.js") + "; true")
                browser.run("loadModel(document.getElementById('model').textContent,"
                            " document.getElementById('data').textContent, true)")  # fmt: skip
                limit = {} if run.task.seq2seq else {"maxLength": LONGEST}
                asked = [[page_input(e), limit] for e in examples]
                answers, greedy = browser.run(ASK % json.dumps(asked))
                beam = [[item, {**limit, "strategy": "beam", "beam": 5}] for item, _ in asked[:50]]
                _, beamed = browser.run(ASK % json.dumps(beam))
                longest = max(examples, key=lambda e: -abs(len(run.codec.encode_source([e])[0]) - 30)).source
                keys = browser.run(TYPED % (options.field, json.dumps(longest)))
            texts, pairs = [text for text, _ in answers], list(zip(answers, ours, strict=True))
            figures = {
                "precision": precision, "bytes": report.details["bytes"], "ready_s": round(ready, 2),
                "same_outputs": sum(a == b.text for a, b in zip(texts, ours, strict=True)), "inputs": len(examples),
                "score_difference": max(abs(s - h.score) for (t, s), h in pairs if t == h.text),
                "greedy_ms": round(greedy, 1), "beam_5_ms": round(beamed, 1),
                "key_press_ms": [round(x, 1) for x in keys],
            }  # fmt: skip
            if run.task.seq2seq:
                figures |= {"wer": wrong(texts, examples), "wer_torch": wrong([h.text for h in ours], examples)}
            print(json.dumps(figures), flush=True)
    finally:
        browser.close()


if __name__ == "__main__":
    main()
