"""Time of recording every attention map of a sentence, compared with a plain forward pass; time and size of its page.

    python bench/recording.py

A random model of 6 + 6 layers with 8 heads reads and writes 30 tokens. Plain and recorded passes take turns; the
figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from regard.inspect.trace import trace
from regard.model import Model
from regard.nn.hooks import record
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    tokenizer = Tokenizer.train("char", [LETTERS])
    model = Model(preset("transformer-base", tokenizer.size)).eval()
    run = Run(model.config, Codec(tokenizer), model, Path("base"))
    text = (LETTERS * (1 + settings.tokens // len(LETTERS)))[: settings.tokens - 1]
    source = torch.tensor(run.codec.encode_source([Example(text)]))
    target = run.codec.encode_target([text[::-1]])[0]
    shifted = torch.tensor([[run.config.start_id, *target[:-1]]])

    def plain() -> object:
        return model(source, None, shifted)

    def recorded() -> object:
        with record(model, "*.weights"):
            return model(source, None, shifted)

    plain()
    recorded()
    times = [(seconds(plain), seconds(recorded)) for _ in range(settings.rounds)]
    plain_time, recorded_time = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"plain pass      {1000 * plain_time:8.1f} ms")
    print(f"all maps        {1000 * recorded_time:8.1f} ms   {recorded_time / plain_time:.2f} times")
    began = time.perf_counter()
    result = trace(run, Example(text), target)
    page_began = time.perf_counter()
    page = result.to_html()
    print(f"trace           {1000 * (page_began - began):8.1f} ms")
    print(f"page            {1000 * (time.perf_counter() - page_began):8.1f} ms   {len(page.encode()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
