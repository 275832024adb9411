"""Handwritten digits: accuracy of the recipe `digits` on the 1,797 images of scikit-learn, and attention distances.

    python bench/images.py

A fifth of the images, drawn with a fixed seed, is held out and evaluated once, at the end. Training and validation
use the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def run(*command: object) -> str:
    process = subprocess.run([sys.executable, "-m", "regard", *map(str, command)], capture_output=True, text=True)
    if process.returncode:
        sys.exit(process.stderr)
    return process.stdout


def main() -> None:
    digits = load_digits()
    images = digits.images.astype(np.float32)
    labels = digits.target
    order = np.random.default_rng(1).permutation(len(images))
    test_size = len(order) // 5
    with tempfile.TemporaryDirectory() as work:
        train = Path(work) / "train.npz"
        test = Path(work) / "test.npz"
        out = Path(work) / "run"
        np.savez(test, images=images[order[:test_size]], labels=labels[order[:test_size]])
        np.savez(train, images=images[order[test_size:]], labels=labels[order[test_size:]])
        began = time.perf_counter()
        run("train", "digits", "--data", train, "--out", out)
        seconds = time.perf_counter() - began
        result = json.loads(run("evaluate", out, test, "--json"))
        accuracy = result["metrics"]["accuracy"]
        print(f"trained in {seconds:.0f} s, start-up included; {result['examples']} held-out images")
        print(f"accuracy {accuracy['score']:.2f} (95% interval {accuracy['low']:.2f} to {accuracy['high']:.2f})")
        print(run("heads", out, test))


if __name__ == "__main__":
    main()
