"""Wheels that zig builds for other platforms. Those of aarch64 give the bits of this machine, under qemu."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

regard_native = pytest.importorskip("regard_native")

from kit.native_models import arguments_of, configs, describe, make_inputs, make_model, options  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "native" / "build_wheels.py"
TOOLS = all(find_spec(name) for name in ("ziglang", "scikit_build_core", "cmake", "ninja"))
EMULATOR = shutil.which("qemu-aarch64")
# Outputs of all kernels in both precisions, a line for each case.
PROGRAM = """
import hashlib, pickle, sys
from regard_native.core import Core, available_kernels
for number, (numbers, tensors, arguments) in enumerate(pickle.load(open(sys.argv[1], "rb"))):
    for int8 in (False, True):
        for kernels in available_kernels():
            outputs = repr(Core(numbers, tensors, int8=int8, kernels=kernels).search(**arguments))
            print(number, int8, kernels, hashlib.sha256(outputs.encode()).hexdigest())
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TOOLS, reason="needs ziglang, scikit-build-core, cmake and ninja"),
]


def built(directory: Path, platform: str) -> Path:
    subprocess.run([sys.executable, SCRIPT, directory, platform], check=True)
    (wheel,) = directory.iterdir()
    return wheel


@pytest.mark.parametrize(
    ("platform", "tag", "library"),
    [
        ("linux-x86_64", "manylinux_2_17_x86_64", "libregard.so"),
        ("linux-aarch64", "manylinux_2_17_aarch64", "libregard.so"),
        ("macos-arm64", "macosx_11_0_arm64", "libregard.dylib"),
        ("windows-x86_64", "win_amd64", "libregard.dll"),
    ],
)
def test_wheel_of_a_platform(platform, tag, library, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    wheel = built(tmp_path / "first", platform)
    assert wheel.name == f"regard_native-{regard_native.__version__}-py3-none-{tag}.whl"
    assert wheel.read_bytes() == built(tmp_path / "second", platform).read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        code = archive.read(f"regard_native/{library}")
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {Path(name).name for name in names if name.startswith("regard_native/")} == {
        library, "regard_native.h", *(path.name for path in (ROOT / "native" / "regard_native").glob("*.py"))
    }  # fmt: skip
    if "linux" in platform:
        assert max(int(minor) for minor in re.findall(rb"GLIBC_2\.([0-9]+)", code)) <= 17


def backend(call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the build backend in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import build_backend; build_backend.{call}"],
        cwd=SCRIPT.parent, env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip


def test_source_distribution_has_what_the_build_needs(tmp_path):
    results = []
    for name in ("first", "second"):
        assert backend(f"build_sdist({str(tmp_path / name)!r})", SOURCE_DATE_EPOCH="1700000000").returncode == 0
        (archive,) = (tmp_path / name).iterdir()
        results.append(archive.read_bytes())
    assert results[0] == results[1]
    with tarfile.open(archive) as tar:
        names = {member.name.partition("/")[2] for member in tar if member.isfile()}
        assert tar.extractfile(f"{archive.name[:-7]}/LICENSE").read() == (ROOT / "LICENSE").read_bytes()
    files = ["CMakeLists.txt", "LICENSE", "README.md", "build_backend.py", "pyproject.toml", "PKG-INFO"]
    for pattern in ("src/*.cpp", "src/*.h", "include/*.h", "examples/*.c", "regard_native/*.py"):
        files += [path.relative_to(SCRIPT.parent).as_posix() for path in SCRIPT.parent.glob(pattern)]
    assert names == set(files)


def test_without_a_compiler_the_build_stops_with_one_sentence(tmp_path):
    result = backend("get_requires_for_build_wheel()", PATH=str(tmp_path))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1 and "needs a C++17 compiler (gcc or clang)" in result.stderr
    assert backend("get_requires_for_build_wheel()", CXX="clang++").returncode == 0


def write_cases(path: Path) -> None:
    """Random models and searches."""
    cases = []

    @settings(max_examples=60, database=None)
    @given(config=configs(), chosen=options(), seed=st.integers(0, 1000))
    def add(config, chosen, seed):
        description = describe(make_model(config, seed))
        arguments = arguments_of([None], make_inputs(config, seed), chosen)
        arguments["phrases"] = [item and SimpleNamespace(**vars(item)) for item in arguments["phrases"]]
        cases.append((description.numbers, description.tensors, arguments))

    add()
    path.write_bytes(pickle.dumps(cases))


def aarch64_python(directory: Path) -> list[str]:
    """Fetch Debian's Python for aarch64 -> the command that runs it here."""
    lists, archives, root = (directory / name for name in ("lists", "archives", "root"))
    for path in (lists, archives):
        (path / "partial").mkdir(parents=True)
    (directory / "status").touch()
    places = {"Dir::State::lists": lists, "Dir::State::status": directory / "status", "Dir::Cache": directory}
    places |= {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::Cache::archives": archives}
    apt = ["apt-get", "-q", *(word for name, value in places.items() for word in ("-o", f"{name}={value}"))]
    install = ["install", "-y", "--no-install-recommends", "--download-only", "python3", "libstdc++6"]
    for command in (["update"], install):
        if subprocess.run([*apt, *command], check=False).returncode:
            pytest.skip("Debian's packages for aarch64 are not available")
    for package in archives.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, root], check=True)
    return [str(EMULATOR), "-L", str(root), str(root / "usr" / "bin" / "python3")]


def outputs(command: list[str], cases: Path) -> dict[tuple[str, ...], set[str]]:
    """The digests of all outputs, of every case in every precision."""
    text = subprocess.run([*command, "-c", PROGRAM, cases], capture_output=True, text=True, check=True).stdout
    digests: dict[tuple[str, ...], set[str]] = {}
    for number, int8, _, digest in map(str.split, text.splitlines()):
        digests.setdefault((number, int8), set()).add(digest)
    return digests


@pytest.mark.skipif(EMULATOR is None or shutil.which("apt-get") is None, reason="needs qemu-user and apt-get")
def test_aarch64_gives_the_same_bits(tmp_path):
    python = aarch64_python(tmp_path)
    site = tmp_path / "site"
    version = subprocess.run([*python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True)
    platforms = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--target", site, "--only-binary", ":all:",
            "--python-version", version.stdout.decode().strip(), *(f"--platform={name}" for name in platforms),
            "-c", ROOT / "constraints.txt", built(tmp_path / "wheel", "linux-aarch64"),
        ],
        check=True,
    )  # fmt: skip
    cases = tmp_path / "cases"
    write_cases(cases)
    emulated = ["env", "-u", "REGARD_NATIVE_LIBRARY", f"PYTHONPATH={site}", *python]
    kernels = "from regard_native.core import available_kernels as k; print(*k())"
    assert subprocess.check_output([*emulated, "-c", kernels], text=True).split() == ["dotprod", "portable"]
    ours = outputs([sys.executable], cases)
    assert all(len(digests) == 1 for digests in ours.values())
    assert outputs(emulated, cases) == ours
