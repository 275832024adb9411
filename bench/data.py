"""Large corpora: time and memory of preparing, opening, ordering and reading N pairs.

    python bench/data.py --pairs 20000000
    python bench/data.py --pairs 2000000 --task lm

The script writes two tables of artificial sentences (about 60 bytes per side): one with an eighth of the pairs, one
with all. For each table, separate processes

- prepare the data as `regard train` does with a cache,
- prepare it again, as a second run with the same cache does,
- train another run until its first step is done,
- order epochs and read batches.

The output has the peak of resident memory above the memory after the imports, the peak of the largest child process (an
upper bound: Linux includes the memory of the parent at the fork), wall-clock time, CPU time of all processes, and pairs
per second. With `--task lm`, each pair is two lines of plain text; ordering and reading is left out.
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
DRAW_LINES = 10_000  # lines per random draw


def write(path: Path, pairs: int) -> None:
    """Write pairs, separated by a tab or (for plain text) by a line end."""
    separator = "\t" if path.suffix == ".tsv" else "\n"
    draw = np.random.default_rng(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choice(list(letters), draw.integers(2, 10))) for _ in range(WORDS)]
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, pairs, DRAW_LINES):
            lengths = draw.integers(3, 18, 2 * min(DRAW_LINES, pairs - first))
            ranks = (WORDS ** (draw.random(lengths.sum()) ** 2)).astype(int) - 1  # a few words are frequent
            random_words = map(words.__getitem__, ranks.tolist())
            sides = [" ".join(islice(random_words, length)) for length in lengths.tolist()]
            file.writelines(
                f"{source}{separator}{target}\n" for source, target in zip(sides[::2], sides[1::2], strict=True)
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


def prepare_data(path: Path, processes: int, name: str = "prepared") -> None:
    from regard.data.prepare import prepare

    prepare(recipe(path), path.parent / name, processes=processes)


def prepare_again(path: Path, processes: int) -> None:
    prepare_data(path, processes, "again")


def read_batches(path: Path, processes: int) -> None:
    from regard.data.order import Batches
    from regard.data.prepare import open_prepared
    from regard.presets import preset

    prepared = open_prepared(path.parent / "prepared")
    corpus = prepared.train
    config = preset("transformer-small", vocab=8000)
    for epoch in range(2):
        batches = Batches(corpus.source_lengths, corpus.target_lengths, 1, epoch, 4096)
        for rows in batches[:5000]:
            corpus.batch(rows, config)


def train_one_step(path: Path, processes: int) -> None:
    """Train until the first step is done, with one process per core."""
    from regard.training.fit import fit
    from regard.training.report import Reporter

    class Done(Exception):
        pass

    class FirstStep(Reporter):
        def tick(self, step: int, done: float, seconds: float) -> None:
            raise Done

    train = {"steps": 1000, "workers": processes}
    base = recipe(path).model_copy(update={"preset": "transformer-mini"})
    with suppress(Done):
        fit(
            base.model_copy(update={"train": base.train.model_copy(update=train)}),
            path.parent / "run",
            reporter=FirstStep(),
        )


# "second run" is the time until training can start if the data is in the cache, where it is found by file hashes.
PARTS: dict[str, Callable[[Path, int], None]] = {
    "prepare": prepare_data,
    "second run": prepare_again,
    "first step": train_one_step,
    "order, read": read_batches,
}


def measure(part: str, path: Path, pairs: int, processes: int) -> None:
    import regard.data.prepare
    import regard.presets
    import regard.training.fit  # noqa: F401

    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu_before = cpu_seconds()
    began = time.perf_counter()
    PARTS[part](path, processes)
    seconds = time.perf_counter() - began
    cpu = cpu_seconds() - cpu_before
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before) / 1024
    largest_child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(
        f"{pairs:>12,}  {part:11}  {growth:9,.0f} MB  {largest_child:9,.0f} MB  {seconds:8,.1f} s  {cpu:8,.1f} s"
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
    print(f"{'pairs':>12}  {'':11}  {'memory':>12}  {'of children':>12}  {'time':>10}  {'CPU':>10}  {'pairs/s':>11}")
    for pairs in (arguments.pairs // 8, arguments.pairs):
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / ("pairs.tsv" if arguments.task == "pairs" else "text.txt")
            write(path, pairs)
            for part in [part for part in PARTS if arguments.task == "pairs" or part != "order, read"]:
                command = [sys.executable, __file__, "--part", part, "--path", str(path), "--pairs", str(pairs)]
                subprocess.run([*command, "--processes", str(arguments.processes)], check=True)


if __name__ == "__main__":
    main()
