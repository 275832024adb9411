"""Build wheels for all platforms on one machine, with zig as cross compiler.

$ pip install ziglang scikit-build-core cmake ninja
$ python native/build_wheels.py OUT [PLATFORM...]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple

NATIVE = Path(__file__).resolve().parent


class Platform(NamedTuple):
    """What zig, the wheel and CMake call a platform."""

    zig: str
    tag: str
    system: str
    processor: str


# The version of glibc in a tag of Linux is the one that zig links.
PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", "Linux", "x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", "Linux", "aarch64"),
    "macos-arm64": Platform("aarch64-macos.11.0", "macosx_11_0_arm64", "Darwin", "arm64"),
    "windows-x86_64": Platform("x86_64-windows-gnu", "win_amd64", "Windows", "AMD64"),
}


def build(platform: Platform, directory: Path) -> Path:
    """Write the wheel for a platform -> its path."""
    import ziglang
    from scikit_build_core.build import build_wheel

    zig = Path(ziglang.__file__).parent / "zig"
    os.environ["CXX"] = f"{zig} c++ -target {platform.zig}"
    os.environ["RC"] = f"{zig} rc"
    os.environ["_PYTHON_HOST_PLATFORM"] = platform.tag
    settings = {
        "cmake.define.CMAKE_SYSTEM_NAME": platform.system,
        "cmake.define.CMAKE_SYSTEM_PROCESSOR": platform.processor,
        "cmake.define.CMAKE_SHARED_LINKER_FLAGS": "-s",
        "install.strip": "false",  # by the linker: the machine's own tool knows only its own format
    }
    return directory / build_wheel(str(directory), settings)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build wheels of regard-native with zig.")
    parser.add_argument("directory", type=Path, metavar="OUT", help="directory for the wheels")
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=f"{', '.join(PLATFORMS)} (default: all)")
    options = parser.parse_args()
    if unknown := sorted({*options.platforms} - {*PLATFORMS}):
        parser.error(f"no such platform: {', '.join(unknown)}; possible are {', '.join(PLATFORMS)}")
    directory = options.directory.resolve()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # with cmake and ninja
    os.chdir(NATIVE)
    for name in options.platforms or PLATFORMS:
        print(build(PLATFORMS[name], directory))


if __name__ == "__main__":
    main()
