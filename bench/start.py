"""Time to the first answer: the command line on one word, beside `import torch` alone, interleaved.

The ratio of seconds is what a user waits; that of processor seconds and the number of modules depend less on what else
the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

PROGRAM = "import sys; from regard.cli.app import run; sys.argv[0] = 'regard'; code = run()"
COUNT = "; print('modules', len(sys.modules), file=sys.stderr)"


def timed(code: str, arguments: list[str], text: str) -> tuple[float, float]:
    """Seconds on the clock and of processor time of one process."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, *arguments], input=text, text=True, check=True, stdout=subprocess.DEVNULL
    )
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, cpu


def modules(code: str, arguments: list[str], text: str) -> int:
    """Modules imported by the time the command is done."""
    result = subprocess.run(
        [sys.executable, "-c", code + COUNT, *arguments], input=text, text=True, check=True, capture_output=True
    )
    return int(result.stderr.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run that reads pairs of texts")
    parser.add_argument("--word", default="word")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    word, pair = options.word + "\n", f"{options.word}\t{options.word}\n"
    contenders: dict[str, tuple[str, list[str], str]] = {
        "import torch": ("import sys, torch", [], ""),
        "regard generate": (PROGRAM, ["generate", options.run], word),
        "regard score": (PROGRAM, ["score", options.run, "-"], pair),
        "regard evaluate": (PROGRAM, ["evaluate", options.run, "-"], pair),
        "regard info": (PROGRAM, ["info", options.run], ""),
        "regard --help": (PROGRAM, ["--help"], ""),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for call in contenders.values():
        timed(*call)  # fill the disk cache
    for _ in range(options.rounds):
        for name, call in contenders.items():
            times[name].append(timed(*call))
    seconds = {name: statistics.median(wall for wall, _ in rows) for name, rows in times.items()}
    cpu = {name: statistics.median(used for _, used in rows) for name, rows in times.items()}
    print(f"{'':16} {'modules':>8} {'seconds':>8} {'ratio':>6} {'cpu':>6} {'ratio':>6}")
    for name, call in contenders.items():
        ratios = seconds[name] / seconds["import torch"], cpu[name] / cpu["import torch"]
        row = f"{modules(*call):8} {seconds[name]:8.2f} {ratios[0]:6.2f} {cpu[name]:6.2f} {ratios[1]:6.2f}"
        print(f"{name:16} {row}")


if __name__ == "__main__":
    main()
