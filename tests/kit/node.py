"""Running the page's JavaScript modules in Node.js, with the constants that Python sends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import regard
from regard.inspect.page import shared_constants
from regard.inspect.trace import PAGE_CONSTANTS

NODE = shutil.which("node")
WEB = Path(regard.__file__).parent / "web"
JS_TESTS = Path(__file__).parent.parent / "inspect" / "js"
needs_node = pytest.mark.skipif(NODE is None, reason="no Node.js on this machine")


def run_node(*arguments: str | Path, program: str | None = None) -> str:
    """Run Node.js -> its output. The source of a module, `program`, gets the page's directory as its first argument."""
    if program is not None:
        arguments = ("--input-type=module", "-", WEB, *arguments)
    result = subprocess.run(
        [str(NODE), *arguments],
        input=program,
        env=os.environ | {"PAGE_CONSTANTS": json.dumps(shared_constants() | PAGE_CONSTANTS)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
