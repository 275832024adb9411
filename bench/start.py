"""Time to the first answer of the command line for one word, in multiples of `import torch`.

    python bench/start.py RUN

The commands take turns. Users notice the ratio of seconds; CPU time and the number of imported modules depend less on
other load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

PROGRAM = "import sys; from regard.cli.app import main; sys.argv[0] = 'regard'; main()"
COUNT = "import atexit, sys; atexit.register(lambda: print(len(sys.modules), file=sys.stderr)); "
# Python may write bytecode, so modules are compiled only once, as in an installed package.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Command(NamedTuple):
    """A Python program with its arguments and input."""

    code: str
    arguments: tuple[str, ...] = ()
    text: str = ""

    def run(self, before: str = "") -> str:
        """Run the program and return its stderr."""
        line = [sys.executable, "-c", before + self.code, *self.arguments]
        result = subprocess.run(line, input=self.text, text=True, check=True, capture_output=True, env=ENVIRONMENT)
        return result.stderr

    def seconds(self) -> tuple[float, float]:
        """Run the program and measure wall-clock and CPU seconds."""
        before = os.times()
        began = time.perf_counter()
        self.run()
        elapsed = time.perf_counter() - began
        after = os.times()
        return elapsed, sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run that was trained on pairs of texts")
    parser.add_argument("--source", default="word")
    parser.add_argument("--target", default="w")
    parser.add_argument("--rounds", type=int, default=9)
    settings = parser.parse_args()
    pair = f"{settings.source}\t{settings.target}\n"
    commands = {
        "import torch": Command("import torch"),
        "generate": Command(PROGRAM, ("generate", settings.run), settings.source + "\n"),
        "score": Command(PROGRAM, ("score", settings.run, "-"), pair),
        "evaluate": Command(PROGRAM, ("evaluate", settings.run, "-"), pair),
        "info": Command(PROGRAM, ("info", settings.run)),
        "--help": Command(PROGRAM, ("--help",)),
    }
    modules = {name: command.run(COUNT).split()[-1] for name, command in commands.items()}  # also fills the disk cache
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(settings.rounds):
        for name, command in commands.items():
            times[name].append(command.seconds())
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    print(f"{'':13}{'modules':>8}{'seconds':>9}{'ratio':>7}{'cpu':>7}{'ratio':>7}")
    base = medians["import torch"]
    for name, (wall, cpu) in medians.items():
        print(f"{name:13}{modules[name]:>8}{wall:9.2f}{wall / base[0]:7.2f}{cpu:7.2f}{cpu / base[1]:7.2f}")


if __name__ == "__main__":
    main()
