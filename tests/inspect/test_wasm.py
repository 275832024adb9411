"""The WebAssembly bytes in the live page are those of their source."""

from __future__ import annotations

import importlib.metadata
import runpy
from pathlib import Path

import pytest

from kit.node import WEB

SCRIPT = Path(__file__).parents[2] / "native" / "page_product.py"


def test_weights_leave_space_for_the_stack() -> None:
    stack_bytes = runpy.run_path(str(SCRIPT))["STACK_BYTES"]
    assert f"const STACK = {stack_bytes // 4};" in (WEB / "page" / "weights.js").read_text("utf-8")


def test_product_equals_its_compiled_source() -> None:
    script = runpy.run_path(str(SCRIPT))
    try:
        version = importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version != script["COMPILER"]:
        pytest.skip(f"needs ziglang {script['COMPILER']}")
    assert script["PRODUCT"] == WEB / "page" / "product.js"
    assert script["PRODUCT"].read_text("utf-8") == script["compile_product"]()
