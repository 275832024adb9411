"""Handwritten digits: the recipe `digits` on the 1,797 images of scikit-learn, and the attention distance of its heads.

    python bench/images.py

A fifth of the images, drawn with a fixed seed, is held out and evaluated once, at the end. The recipe takes its
validation images from the rest.
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
    done = subprocess.run([sys.executable, "-m", "regard", *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def main() -> None:
    digits = load_digits()
    images, labels = digits.images.astype(np.float32), digits.target
    order = np.random.default_rng(1).permutation(len(images))
    held = len(order) // 5
    with tempfile.TemporaryDirectory() as work:
        train, test, out = Path(work) / "train.npz", Path(work) / "test.npz", Path(work) / "run"
        np.savez(test, images=images[order[:held]], labels=labels[order[:held]])
        np.savez(train, images=images[order[held:]], labels=labels[order[held:]])
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
