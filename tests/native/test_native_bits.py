"""Results of the native engine have the same bits everywhere, and its memory does not grow."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.config import Config, Stack

pytest.importorskip("regard_native")

from regard_native.core import Core, available_kernels

from kit.native_build import CAN_BUILD, COMPILER, build
from kit.native_models import describe, make_model

SEARCHES: tuple[dict[str, Any], ...] = ({}, {"beam": 5}, {"beam": 4, "keep": 4, "length_penalty": 0.6}, {"samples": 2})
COUNT = 20  # sources
LONGEST = 12  # output tokens
SHAPES = [
    # width, heads, ff, vocabulary
    (12, 2, 10, 5), (30, 3, 50, 17), (48, 4, 100, 333), (100, 5, 130, 1000), (192, 4, 300, 64), (64, 1, 257, 5000),
]  # fmt: skip


def make_core(config: Config, seed: int, int8: bool = False, kernels: str | None = None) -> Core:
    description = describe(make_model(config, seed))
    return Core(description.numbers, description.tensors, int8, kernels)


def config_of(width: int, heads: int, ff: int, vocab: int, **stack: Any) -> Config:
    both = Stack(layers=2, width=width, heads=heads, ff=ff, position="sinusoid", **stack)
    return Config(source_vocab=vocab, target_vocab=vocab, encoder=both, decoder=both)


def search(core: Core, sources: list[list[int]], chosen: dict[str, Any]) -> Any:
    options = dict(chosen)
    samples = options.pop("samples", 0)
    if samples:
        rows = [np.random.default_rng(source).random((samples, LONGEST + 1)) for source in sources]
        options["noise"] = np.asarray(rows, np.float32)
    return core.search(sources, [min(LONGEST, 2 * len(source)) for source in sources], **options)


def make_sources(vocab: int, count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[*(draw.randrange(4, vocab) for _ in range(draw.randint(1, 40))), 3] for _ in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("stack", [{}, {"mixer": "lstm", "score": "general"}], ids=["attention", "recurrent"])
def test_whole_searches_have_the_same_bits(shape: tuple[int, ...], int8: bool, stack: dict[str, Any]) -> None:
    """With every instruction set, in batches of any size and order, with one thread and several."""
    config = config_of(*shape, **stack)
    cores = [make_core(config, 1, int8, name) for name in available_kernels()]
    sources = make_sources(shape[-1], COUNT, 1)
    for chosen in SEARCHES:
        expected = search(cores[0], sources, chosen)
        order = random.Random(2).sample(range(COUNT), COUNT)
        for core in cores[1:]:
            assert search(core, [sources[i] for i in order], chosen) == [expected[i] for i in order]
        assert [search(cores[0], [source], chosen)[0] for source in sources[:5]] == expected[:5]
        parts = [sources[start : start + 7] for start in range(0, COUNT, 7)]
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(search, [cores[0]] * len(parts), parts, [chosen] * len(parts)))
        assert [row for rows in results for row in rows] == expected
    pairs = [(source, row[0].ids) for source, row in zip(sources, search(cores[0], sources, {"beam": 3}), strict=True)]
    forced = [core.score(*map(list, zip(*pairs, strict=True))) for core in cores]
    assert all(scores == forced[0] for scores in forced)
    assert forced[0][:5] == [cores[-1].score([source], [target])[0] for source, target in pairs[:5]]


def resident() -> int:
    """Bytes in memory, without those that the C library keeps for later."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_calls_and_is_freed_with_the_model() -> None:
    config = config_of(32, 4, 64, 400)
    core = make_core(config, 1)
    draw = random.Random(3)
    calls = [make_sources(400, draw.choice((1, 2, 9)), seed) for seed in range(1000)]
    for sources in calls[:100]:
        search(core, sources[:9], {"beam": draw.choice((1, 4))})
    search(core, make_sources(400, 9, 5), {"beam": 4})
    before = resident()
    for sources in calls:
        core.search(sources, [draw.choice((1, 4, 12))] * len(sources), beam=draw.choice((1, 3)))
    assert resident() - before < 2 * 2**20
    del core
    gc.collect()
    model = make_model(config_of(512, 8, 2048, 3000), 1)
    description = describe(model)
    large = sum(x.nbytes for x in description.tensors)
    before = resident()
    for _ in range(5):
        core = Core(description.numbers, description.tensors)
        search(core, [[4, 5, 6, 3]], {})
        del core
        gc.collect()
    assert resident() - before < large / 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_of_a_huge_request_is_returned() -> None:
    core = make_core(config_of(512, 8, 64, 50), 1)
    core.search([[4, 3]], [4])
    before = resident()
    for _ in range(2):
        core.search([[4, 3]], [200], minimums=[200], beam=32)
    assert resident() - before > 8 * 2**20
    with pytest.raises(KeyboardInterrupt):  # after the tables of positions are made
        core.search([[4, 3]], [50_000], check=lambda: signal.raise_signal(signal.SIGINT))
    assert resident() - before > 80 * 2**20
    for _ in range(2):
        core.search([[4, 3]], [4])
    assert resident() - before < 8 * 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("int8", [False, True])
def test_weights_are_in_memory_once(int8: bool) -> None:
    description = describe(make_model(config_of(512, 8, 2048, 3000), 1))
    size = sum(x.nbytes for x in description.tensors)
    before = resident()
    core = Core(description.numbers, description.tensors, int8)
    gc.collect()
    embedding = 3000 * 512 * 4
    assert resident() - before < size / (4 if int8 else 1) + 2 * embedding + 4 * 2**20
    del core


@pytest.mark.skipif(sys.platform != "linux", reason="needs the C library of Linux")
@pytest.mark.parametrize("int8", [False, True])
def test_the_rounding_of_the_process_does_not_change_bits(int8: bool) -> None:
    core = make_core(config_of(48, 4, 100, 333), 1, int8)
    sources = make_sources(333, 5, 1)
    expected = search(core, sources, {"beam": 3})
    library = ctypes.CDLL("libm.so.6")
    try:
        library.fesetround(0x800 if platform.machine() == "x86_64" else 0x400000)  # upward
        rounded = search(core, sources, {"beam": 3})
    finally:
        library.fesetround(0)
    assert rounded == expected


def test_interrupts_end_a_search() -> None:
    core = make_core(config_of(192, 4, 300, 3000), 1)
    for delay in (0.02, 0.05):
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            core.search([[4, 3]] * 8, [5000] * 8, minimums=[5000] * 8, beam=3)
        timer.join()


def test_threads_wait_without_using_the_processor() -> None:
    core = make_core(config_of(48, 4, 64, 50), 1)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda seed: search(core, make_sources(50, 3, seed), {"beam": 3}), range(6)))
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.2


RACE = """
import sys, json
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from regard_native.core import Core

data = np.load(sys.argv[1])
tensors = [data[f"arr_{i}"] for i in range(1, len(data.files))]
for int8 in (False, True):
    core = Core(data["arr_0"].tolist(), tensors, int8)
    batches = [[[4 + (7 * i + j * n) % 40 for j in range(1 + (i + n) % 20)] + [3] for n in range(5)] for i in range(24)]
    work = lambda batch: core.search(batch, [20] * len(batch), beam=3, keep=2)
    expected = [work(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, batches)) == expected
print("same bits")
"""


@pytest.mark.slow
@pytest.mark.skipif(not CAN_BUILD, reason="needs g++ and the sources")
def test_threads_that_share_a_model_have_no_data_races(tmp_path: Path) -> None:
    runtime = subprocess.run(
        [str(COMPILER), "-print-file-name=libtsan.so"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("needs the thread sanitizer")
    description = describe(make_model(config_of(48, 4, 64, 50), 1))
    np.savez(tmp_path / "model.npz", np.asarray(description.numbers, np.float64), *description.tensors)
    library = build(tmp_path, "-O1", "-g", "-fsanitize=thread")
    variables = {"LD_PRELOAD": runtime, "REGARD_NATIVE_LIBRARY": str(library), "TSAN_OPTIONS": "exitcode=66"}
    result = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path / "model.npz")],
        env={**os.environ, **variables}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0 and "same bits" in result.stdout, result.stderr[-5000:]
    assert "WARNING: ThreadSanitizer" not in result.stderr, result.stderr[-5000:]
