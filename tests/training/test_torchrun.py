"""Processes that torchrun starts: a killed one is started again, a signal saves once, two hosts train as one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_resume import result

from kit.backwards import MakeRecipe
from regard.recipe import Recipe, load_recipe
from regard.training.fit import fit
from regard.training.report import Reporter

SCRIPT = """
import json, os, random, signal, sys, threading, time
from pathlib import Path
from regard.training.fit import fit
from regard.recipe import load_recipe
from regard.training.report import Lines

def kill_later(run):
    while not list(run.glob("training/step-*")):
        time.sleep(0.01)
    time.sleep(random.random())
    print("killed", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

run, mark = Path(sys.argv[2]), Path(sys.argv[2] + ".killed")
if os.environ["RANK"] == sys.argv[3] and not mark.exists():
    mark.touch()
    threading.Thread(target=kill_later, args=(run,), daemon=True).start()
fit(load_recipe(json.loads(sys.argv[1])), run, reporter=Lines())
"""
ONE_HOST = ("--standalone", "--nproc-per-node=2")
TWO_HOSTS = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=1")
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # of each attempt, as docs/scaling.md tells
STEPS = {"steps": 400, "validate_every": 20, "workers": 2, "ema": 0.9, "metric": "wer"}


def launch(
    order: Recipe, run: Path, killed: int, *options: str, host: str = "", **environment: str
) -> subprocess.Popen[str]:
    """Start a launcher, here or on a host; a moment after the first checkpoint the process of one rank is killed."""
    script = run.parent / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", *options, "--max-restarts=2"]
    given = json.dumps(order.model_dump(mode="json", exclude_unset=True))
    command: list[Any] = [sys.executable, *launcher, script, given, run, str(killed)]
    return subprocess.Popen(
        [*(("ip", "netns", "exec", host) if host else ()), *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def require_same_as_alone(launchers: list[subprocess.Popen[str]], order: Recipe, run: Path, killed: int) -> None:
    """Wait for launchers, and compare their run with one that was not interrupted."""
    try:
        talk = [process.communicate(timeout=240)[1] for process in launchers]
    finally:
        for process in launchers:
            process.kill()
    assert [process.returncode for process in launchers] == [0] * len(launchers), talk
    assert any("killed" in messages for messages in talk) == (killed >= 0)
    alone = run.parent / "alone"
    fit(order, alone, reporter=Reporter())
    for what in ("tensors", "log"):
        assert result(run)[what] == result(alone)[what]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "killed"), [("ddp", 0), ("ddp", 1), ("fsdp", 0), ("fsdp", 1)])
def test_a_killed_process_is_replaced_and_the_run_ends_as_if_nothing_had_happened(
    recipe: MakeRecipe, tmp_path: Path, strategy: str, killed: int
) -> None:
    order = recipe(**STEPS, strategy=strategy)
    launcher = launch(order, tmp_path / "run", killed, *ONE_HOST)
    require_same_as_alone([launcher], order, tmp_path / "run", killed)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_to_the_launcher_saves_once(recipe: MakeRecipe, tmp_path: Path, strategy: str) -> None:
    order = recipe(steps=1_000_000, validate_every=1_000, workers=2, strategy=strategy)
    process = launch(order, tmp_path / "run", -1, *ONE_HOST)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (tmp_path / "run/log.jsonl").is_file():
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate(timeout=60)
    assert messages.count("SIGTERM: saved at step") == 1, messages
    assert process.returncode == 1  # torchrun's own way; `regard train --workers` ends with 143
    (saved,) = (tmp_path / "run/training").glob("step-*")
    more = load_recipe({"train": {"steps": int(saved.name[5:]) + 5}})
    assert fit(more, tmp_path / "run", resume=True, reporter=Reporter()).progress.finished == "steps"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "killed"), [("ddp", -1), ("ddp", 0), ("ddp", 1), ("fsdp", 0), ("fsdp", 1)])
def test_two_launchers_train_as_one(recipe: MakeRecipe, tmp_path: Path, strategy: str, killed: int) -> None:
    order = recipe(**STEPS, strategy=strategy)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
    options = (*TWO_HOSTS, endpoint)
    launchers = [launch(order, tmp_path / "run", killed, *options, **OWN_STORE) for _ in range(2)]
    require_same_as_alone(launchers, order, tmp_path / "run", killed)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two hosts (network namespaces) with a network between them -> their addresses by name."""
    addresses = {"regard-a": "192.0.2.1", "regard-b": "192.0.2.2"}  # of a range that is kept for documentation
    first, second = addresses
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", first], capture_output=True).returncode:
        pytest.skip("network namespaces need iproute2 and the right to make them")
    try:
        subprocess.run(["ip", "netns", "add", second], check=True)
        link = f"link add regard type veth peer name regard netns {second}"
        subprocess.run(["ip", "-n", first, *link.split()], check=True)
        for name, address in addresses.items():
            for change in (f"addr add {address}/24 dev regard", "link set regard up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *change.split()], check=True)
        yield addresses
    finally:
        for name in addresses:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "killed"), [("ddp", -1), ("ddp", 1), ("fsdp", 0)])
def test_two_hosts_train_as_one(
    recipe: MakeRecipe, tmp_path: Path, hosts: dict[str, str], strategy: str, killed: int
) -> None:
    order = recipe(**STEPS, strategy=strategy)
    environment = {**OWN_STORE, "GLOO_SOCKET_IFNAME": "regard"}  # the interface that leads to the other
    endpoint = next(iter(hosts.values()))
    launchers = [
        launch(
            order, tmp_path / "run", killed, *TWO_HOSTS, f"--rdzv-endpoint={endpoint}:29500",
            f"--local-addr={address}", f"--rdzv-conf=is_host={address == endpoint}", host=name, **environment,
        )
        for name, address in hosts.items()
    ]  # fmt: skip
    require_same_as_alone(launchers, order, tmp_path / "run", killed)
