"""Training without settings, compared with a recipe on the same data and for the same time.

    python bench/budget.py --minutes 5 --recipe g2p --data dut_train.tsv --valid dut_dev.tsv

Both take turns. All other arguments are options of `regard train` and are passed to both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def train(arguments: list[str], out: Path) -> dict[str, object]:
    """Train in a new process and return the last event of the log, which has the best score."""
    command = [sys.executable, "-m", "regard", "train", *arguments, "--out", str(out)]
    result = subprocess.run(command, text=True, stderr=subprocess.PIPE, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    print(*(line for line in result.stderr.splitlines() if line.startswith(("preset:", "plan:", "warning:"))), sep="\n")
    return json.loads((out / "log.jsonl").read_text().splitlines()[-1])


def evaluate(run: Path, arguments: list[str]) -> dict[str, float]:
    """Metrics on the validation file, if there is one; unlike the loss, they do not depend on the tokens of a run."""
    if "--valid" not in arguments:
        return {}
    valid = arguments[arguments.index("--valid") + 1]
    command = [sys.executable, "-m", "regard", "evaluate", str(run), valid, "--json"]
    result = subprocess.run(command, text=True, capture_output=True, check=True)
    return {name: round(metric["score"], 4) for name, metric in json.loads(result.stdout)["metrics"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="the recipe to compare with")
    parser.add_argument("--minutes", default="5")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of each")
    args, options = parser.parse_known_args()
    options += ["--minutes", args.minutes]
    contenders = {"no settings": options} | ({args.recipe: [args.recipe, *options]} if args.recipe else {})
    for seed in range(1, args.seeds + 1):
        for name, arguments in contenders.items():
            with tempfile.TemporaryDirectory() as temporary:
                end = train([*arguments, "--seed", str(seed)], Path(temporary) / "run")
                metrics = evaluate(Path(temporary) / "run", arguments)
            scores = {key: value for key, value in end.items() if key not in ("event", "reason", "skipped", "seconds")}
            print(f"{name}, seed {seed}: {scores}, evaluated: {metrics}", flush=True)


if __name__ == "__main__":
    main()
