"""Large corpora: time and memory of preparing, opening, ordering and reading N pairs.

    python bench/data.py --pairs 20000000
    python bench/data.py --pairs 2000000 --task lm

Writes tables of artificial sentences (about 60 bytes per side), with an eighth of the pairs and with all pairs. For
each table, separate processes

- prepare it as `regard train` does with a cache,
- open the prepared data as a second run does,
- train another run until its first step is done,
- order epochs and read batches.

The printed table has the peak of resident memory above the memory after the imports, an upper bound on that of the
largest child process (Linux includes what the parent had at that time), the time, the CPU time of all processes, and
pairs per second. With `--task lm` each pair is two lines of plain text, and nothing is ordered and read.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

WORDS = 50_000
LINES = 10_000  # per random draw


def write(path: Path, pairs: int) -> None:
    """Sides separated by a tab, or as lines of a text."""
    between = "\t" if path.suffix == ".tsv" else "\n"
    draw = np.random.default_rng(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choice(list(letters), draw.integers(2, 10))) for _ in range(WORDS)]
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, pairs, LINES):
            lengths = draw.integers(3, 18, 2 * min(LINES, pairs - first))
            ranks = (WORDS ** (draw.random(lengths.sum()) ** 2)).astype(int) - 1  # a few words are frequent
            drawn = map(words.__getitem__, ranks.tolist())
            sides = [" ".join(islice(drawn, length)) for length in lengths.tolist()]
            file.writelines(
                f"{source}{between}{target}\n" for source, target in zip(sides[::2], sides[1::2], strict=True)
            )


def recipe(path: Path):
    from regard.recipe import load_recipe

    sides = ("source", "target") if path.suffix == ".tsv" else ("source",)
    return load_recipe(
        {
            "task": "pairs" if path.suffix == ".tsv" else "lm",
            "data": {"train": str(path), "cache": str(path.parent / "cache")},
            "text": {f"{side}_tokens": "bpe:8000" for side in sides},
        }
    )


def prepare_all(path: Path, processes: int, name: str = "prepared") -> None:
    from regard.data.prepare import prepare

    prepare(recipe(path), path.parent / name, processes=processes)


def prepare_again(path: Path, processes: int) -> None:
    prepare_all(path, processes, "again")


def read_some(path: Path, processes: int) -> None:
    from regard.data.order import Batches
    from regard.data.prepare import open_prepared
    from regard.presets import preset

    prepared = open_prepared(path.parent / "prepared")
    corpus, config = prepared.train, preset("transformer-small", vocab=8000)
    for epoch in range(2):
        cut = Batches(corpus.source_lengths, corpus.target_lengths, 1, epoch, 4096)
        for rows in cut[:5000]:
            corpus.batch(rows, config)


def take_a_step(path: Path, processes: int) -> None:
    """Train until the first step is done, with one process per core."""
    from regard.training.fit import fit
    from regard.training.report import Reporter

    class Done(Exception):
        pass

    class FirstStep(Reporter):
        def tick(self, step: int, done: float, seconds: float) -> None:
            raise Done

    train = {"steps": 1000, "workers": processes}
    order = recipe(path).model_copy(update={"preset": "transformer-mini"})
    with suppress(Done):
        fit(
            order.model_copy(update={"train": order.train.model_copy(update=train)}),
            path.parent / "run",
            reporter=FirstStep(),
        )


# A second run finds the data in the cache, by file hashes; this is the time until training can start.
PARTS: dict[str, Callable[[Path, int], None]] = {
    "prepare": prepare_all,
    "second run": prepare_again,
    "first step": take_a_step,
    "order, read": read_some,
}


def measure(part: str, path: Path, pairs: int, processes: int) -> None:
    import regard.data.prepare
    import regard.presets
    import regard.training.fit  # noqa: F401

    own, others = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    before = resource.getrusage(own).ru_maxrss
    began, cpu = time.perf_counter(), cpu_seconds()
    PARTS[part](path, processes)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    grown = (resource.getrusage(own).ru_maxrss - before) / 1024
    largest = resource.getrusage(others).ru_maxrss / 1024
    print(
        f"{pairs:>12,}  {part:11}  {grown:9,.0f} MB  {largest:9,.0f} MB  {seconds:8,.1f} s  {cpu:8,.1f} s"
        f"  {pairs / seconds:11,.0f}",
        flush=True,
    )


def cpu_seconds() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--task", choices=("pairs", "lm"), default="pairs")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="tokenising processes (default: one per core)"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        measure(arguments.part, arguments.path, arguments.pairs, arguments.processes)
        return
    print(f"{'pairs':>12}  {'':11}  {'memory':>12}  {'of others':>12}  {'time':>10}  {'CPU':>10}  {'pairs/s':>11}")
    for pairs in (arguments.pairs // 8, arguments.pairs):
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / ("pairs.tsv" if arguments.task == "pairs" else "text.txt")
            write(path, pairs)
            for part in [part for part in PARTS if arguments.task == "pairs" or part != "order, read"]:
                command = [sys.executable, __file__, "--part", part, "--path", str(path), "--pairs", str(pairs)]
                subprocess.run([*command, "--processes", str(arguments.processes)], check=True)


if __name__ == "__main__":
    main()
