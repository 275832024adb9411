"""Memory of data preparation and loading: what a corpus of N pairs takes while it is prepared, ordered and read.

    python bench/data.py --pairs 10000000

Writes a table of made-up sentences (about 60 bytes a side), prepares it as `regard train` does, orders an epoch and
reads batches, each in a process of its own. The table shows the peak of resident memory beyond that after the imports.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
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


def prepare_all(path: Path) -> None:
    from regard.data.prepare import prepare

    prepare(recipe(path), path.parent / "prepared")


def read_some(path: Path) -> None:
    from regard.data.order import batches
    from regard.data.prepare import open_prepared
    from regard.presets import preset

    prepared = open_prepared(path.parent / "prepared")
    corpus, config = prepared.train, preset("transformer-small", vocab=8000)
    for epoch in range(2):
        cut = batches(corpus.source_lengths, corpus.target_lengths, 1, epoch, 4096)
        for rows in cut[:5000]:
            corpus.batch(rows, config)


PARTS = {"prepare": prepare_all, "order and read": read_some}


def measure(part: str, path: Path) -> None:
    import regard.data.prepare
    import regard.presets  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    PARTS[part](path)
    seconds = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{part:16} {grown / 1024:8,.0f} MB more than the {before / 1024:,.0f} after imports   {seconds:8,.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        measure(arguments.part, arguments.path)
        return
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "pairs.tsv"
        write(path, arguments.pairs)
        print(f"{arguments.pairs:,} pairs, {path.stat().st_size / 1e6:,.0f} MB of text", flush=True)
        for part in PARTS:
            command = [sys.executable, __file__, "--part", part, "--path", str(path)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
