"""Compile the matrix product of the live page from the kernels of the engine.

    pip install ziglang==0.17.0
    python native/page_product.py

The script writes `regard/web/page/product.js`, which contains the WebAssembly module in base64. Run it after changes
of the fp32 product in `src/kernels.cpp`.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

COMPILER = "0.17.0"  # version of ziglang; another one writes other bytes
NATIVE = Path(__file__).parent
PRODUCT = NATIVE.parent / "src" / "regard" / "web" / "page" / "product.js"
COMPILE = ["c++", "-target", "wasm32-wasi", "-mcpu=generic+simd128", "-std=c++17", "-O3", "-ffp-contract=off"]
COMPILE += ["-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-Wall", "-Wextra"]
STACK_BYTES = 4096  # at the start of the memory; weights.js leaves this space
LINK = ["wasm-ld", "--no-entry", "--import-memory", "--gc-sections", "--strip-all"]
LINK += ["--stack-first", "-z", f"stack-size={STACK_BYTES}"]
MODULE = """\
// @ts-check
// Written by native/page_product.py: the product of `native/src/kernels.cpp` as a WebAssembly module, in base64.

export const PRODUCT =
{};
"""


def zig(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "ziglang", *map(str, arguments)], check=True)


def compile_product() -> str:
    """The text of `product.js`."""
    with tempfile.TemporaryDirectory() as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "product.wasm")
        zig(*COMPILE, "-c", NATIVE / "src" / "kernels.cpp", "-o", compiled)
        zig(*LINK, compiled, "-o", linked)
        lines = textwrap.wrap(base64.b64encode(linked.read_bytes()).decode("ascii"), 114)
    return MODULE.format(" +\n".join(f'  "{line}"' for line in lines))


if __name__ == "__main__":
    PRODUCT.write_text(compile_product(), "utf-8")
