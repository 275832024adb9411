"""Quality and speed of runs before and after pruning and tuning, as a table.

    python bench/prune.py train.tsv dev.tsv RUN... --tune 3000

All runs read the same data. The best tuned weights are selected on a held-out part of the training data. The figures
are measured on the development data, which the script does not use otherwise; it may have selected the runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from regard.data.reader import LineCounter, Source
from regard.decode.request import Options
from regard.evaluate.evaluator import default_metrics, evaluate
from regard.inspect.inputs import read_task_data
from regard.inspect.prune import PruneAmount
from regard.run import Run
from regard.text.codec import Example
from regard.training.pruning import Tuning, prune, split_data


def read(run: Run, path: str) -> list[Example]:
    data = read_task_data(run, Source((path,), run.codec.columns), LineCounter())
    if not isinstance(data, list):
        raise SystemExit("the runs must be trained on pairs")
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="TSV for measuring heads and for tuning")
    parser.add_argument("dev", help="TSV for the reported figures")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--heads", default="0.4")
    parser.add_argument("--tune", type=int, default=3000)
    parser.add_argument("--by", default="ablation", choices=["gradient", "ablation"])
    settings = parser.parse_args()
    torch.set_num_threads(1)
    print("| run | heads | metric | before | pruned and tuned | change | speed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    changes = []
    for path in settings.runs:
        run = Run.load(Path(path))
        tuning_data, selection_data = split_data(read(run, settings.train))
        dev = read(run, settings.dev)
        metric = default_metrics(run, [example.target or "" for example in dev])[0]
        amount = PruneAmount.parse(settings.heads, None)
        smaller, report = prune(
            run, tuning_data, selection_data, amount, greedy=True, by=settings.by, tuning=Tuning(settings.tune)
        )
        before, after = (
            evaluate(each, dev, Options(), [metric], samples=0).metrics[metric].score for each in (run, smaller)
        )
        speed = report.after.sentences_per_second / report.before.sentences_per_second
        changes.append(after - before)
        heads = f"{report.before.heads} -> {report.after.heads}"
        numbers = f"{before:.2f} | {after:.2f} | {after - before:+.2f} | {speed:.2f} x"
        print(f"| {Path(path).name} | {heads} | {metric} | {numbers} |", flush=True)
    print(f"\nmean change {sum(changes) / len(changes):+.2f}, from {min(changes):+.2f} to {max(changes):+.2f}")


if __name__ == "__main__":
    main()
