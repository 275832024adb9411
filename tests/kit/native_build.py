"""Builds of the native engine for tests: in double precision, with sanitizers."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import regard_native

SOURCES = Path(regard_native.__file__).parents[1] / "src"
COMPILER = shutil.which("g++")
CAN_BUILD = COMPILER is not None and SOURCES.is_dir()
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-Wno-psabi", "-fPIC")
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni"
KERNELS = {"portable": "", "avx2": "-mavx2", "avx512": AVX512}
if platform.machine() == "aarch64":
    KERNELS = {"portable": "", "dotprod": "-mcpu=generic+dotprod"}


def build(directory: Path, *flags: str) -> Path:
    """Compile the engine into a directory -> the directory, for REGARD_NATIVE_LIBRARY."""
    jobs = {path.stem: (path, ()) for path in SOURCES.glob("*.cpp") if path.stem != "kernels"}
    for name, extensions in KERNELS.items():
        macros = (f"-DRN_KERNELS={name.upper()}_KERNELS", f'-DRN_NAME="{name}"')
        jobs[f"kernels-{name}"] = (SOURCES / "kernels.cpp", (*macros, *extensions.split()))
    objects = []
    for name, (path, own) in jobs.items():
        objects.append(directory / f"{name}.o")
        subprocess.run([str(COMPILER), *FLAGS, *flags, *own, "-c", path, "-o", objects[-1]], check=True)
    subprocess.run([str(COMPILER), "-shared", *flags, *objects, "-o", directory / "libregard.so"], check=True)
    return directory
