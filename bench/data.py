"""Large corpora: time and memory of preparing N pairs, of opening what is prepared, and of ordering and reading it.

    python bench/data.py --pairs 20000000

Writes tables of made-up sentences (about 60 bytes a side) with an eighth, a half and all of the pairs, and for each of
them prepares it as `regard train` does, opens it again, as a run does that finds its data prepared, orders epochs and
reads batches, each in a process of its own. The table shows the peak of resident memory beyond that after the imports,
a bound on that of the largest process that it started (Linux counts what the parent had then), the time, the CPU time
of all, and pairs per second.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WORDS = 50_000


def write(path: Path, pairs: int) -> None:
    draw = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(WORDS)]
    ranks = [WORDS ** (draw.random() ** 2) for _ in range(1 << 16)]  # few words are frequent
    with path.open("w", encoding="utf-8") as file:
        for _ in range(pairs):
            length = draw.randint(3, 17)
            text = [words[int(rank) - 1] for rank in draw.choices(ranks, k=2 * length)]
            file.write(" ".join(text[:length]) + "\t" + " ".join(text[length:]) + "\n")


def recipe(path: Path):
    from regard.recipe import load_recipe

    return load_recipe(
        {"data": {"train": str(path)}, "text": {"source_tokens": "bpe:8000", "target_tokens": "bpe:8000"}}
    )


def prepare_all(path: Path, processes: int) -> None:
    from regard.data.prepare import prepare

    prepare(recipe(path), path.parent / "prepared", processes=processes)


def read_some(path: Path, processes: int) -> None:
    from regard.data.order import batches
    from regard.data.prepare import open_prepared
    from regard.presets import preset

    prepared = open_prepared(path.parent / "prepared")
    corpus, config = prepared.train, preset("transformer-small", vocab=8000)
    for epoch in range(2):
        cut = batches(corpus.source_lengths, corpus.target_lengths, 1, epoch, 4096)
        for rows in cut[:5000]:
            corpus.batch(rows, config)


# Once prepared, the same call compares the hashes of the files and opens the corpus: the time until training can start.
PARTS: dict[str, Callable[[Path, int], None]] = {
    "prepare": prepare_all,
    "find again": prepare_all,
    "order, read": read_some,
}


def measure(part: str, path: Path, pairs: int, processes: int) -> None:
    import regard.data.prepare
    import regard.presets  # noqa: F401

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
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that tokenise (default: one per core)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        measure(arguments.part, arguments.path, arguments.pairs, arguments.processes)
        return
    print(f"{'pairs':>12}  {'':11}  {'memory':>12}  {'of others':>12}  {'time':>10}  {'CPU':>10}  {'pairs/s':>11}")
    for pairs in (arguments.pairs // 8, arguments.pairs // 2, arguments.pairs):
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / "pairs.tsv"
            write(path, pairs)
            for part in PARTS:
                command = [sys.executable, __file__, "--part", part, "--path", str(path), "--pairs", str(pairs)]
                subprocess.run([*command, "--processes", str(arguments.processes)], check=True)


if __name__ == "__main__":
    main()
