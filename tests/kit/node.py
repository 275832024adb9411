"""Running the page's JavaScript modules in Node.js, with the constants that Python sends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import regard
from regard.inspect.trace import PAGE_CONSTANTS

NODE = shutil.which("node")
WEB = Path(regard.__file__).parent / "web"
JS_TESTS = Path(__file__).parent.parent / "inspect" / "js"
needs_node = pytest.mark.skipif(NODE is None, reason="no Node.js on this machine")


def run_node(*arguments: str | Path, program: str | None = None) -> str:
    """The output of Node.js; `program` is the source of a module, which gets the folder of the page's modules first."""
    if program is not None:
        arguments = ("--input-type=module", "-", WEB, *arguments)
    done = subprocess.run(
        [str(NODE), *arguments],
        input=program,
        env=os.environ | {"PAGE_CONSTANTS": json.dumps(PAGE_CONSTANTS)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
