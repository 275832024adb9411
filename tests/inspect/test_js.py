"""The unit tests of the page's JavaScript, by node's own test runner."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "js"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.test.js")), ids=lambda path: path.name)
def test_modules(path: Path) -> None:
    done = subprocess.run(["node", "--test", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
