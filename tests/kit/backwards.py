"""A task that a test can train: spelling words backwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from regard.recipe import Recipe

TINY = {"layers": 1, "width": 16, "heads": 2, "ff": 32, "dropout": 0.2}
MakeRecipe = Callable[..., Recipe]


def write_pairs(path: Path, count: int, seed: int = 1) -> Path:
    """Write random words with their letters in reverse order, separated by a tab."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefg", k=draw.randint(1, 9))) for _ in range(count)]
    path.write_text("".join(f"{word}\t{' '.join(reversed(word))}\n" for word in words), encoding="utf-8")
    return path
