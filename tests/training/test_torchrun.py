"""Training under torchrun: restart after a kill, one save on a signal, several launchers and hosts."""

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
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # a new store for each attempt, see docs/scaling.md
STEPS = {"steps": 400, "validate_every": 20, "workers": 2, "ema": 0.9, "metric": "wer"}


def launch(
    order: Recipe, run: Path, killed: int, *options: str, host: str = "", **environment: str
) -> subprocess.Popen[str]:
    """Start torchrun, optionally in a network namespace; rank `killed` is killed after the first checkpoint."""
    script = run.parent / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", *options, "--max-restarts=2"]
    tables = json.dumps(order.model_dump(mode="json", exclude_unset=True))
    command: list[Any] = [sys.executable, *launcher, script, tables, run, str(killed)]
    return subprocess.Popen(
        [*(("ip", "netns", "exec", host) if host else ()), *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def require_uninterrupted_result(launchers: list[subprocess.Popen[str]], order: Recipe, run: Path, killed: int) -> None:
    """Wait for the launchers, and compare their run with an uninterrupted run of local processes."""
    try:
        outputs = [process.communicate(timeout=240)[1] for process in launchers]
    finally:
        for process in launchers:
            process.kill()
    assert [process.returncode for process in launchers] == [0] * len(launchers), outputs
    assert any("killed" in messages for messages in outputs) == (killed >= 0)
    uninterrupted = run.parent / "uninterrupted"
    fit(order, uninterrupted, reporter=Reporter())
    for key in ("tensors", "log"):
        assert result(run)[key] == result(uninterrupted)[key]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "killed"), [("ddp", 0), ("ddp", 1), ("fsdp", 0), ("fsdp", 1)])
def test_restart_after_kill_gives_identical_weights_and_log(
    recipe: MakeRecipe, tmp_path: Path, strategy: str, killed: int
) -> None:
    order = recipe(**STEPS, strategy=strategy)
    launcher = launch(order, tmp_path / "run", killed, *ONE_HOST)
    require_uninterrupted_result([launcher], order, tmp_path / "run", killed)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_signal_to_the_launcher_saves_one_checkpoint(recipe: MakeRecipe, tmp_path: Path, strategy: str) -> None:
    order = recipe(steps=1_000_000, validate_every=1_000, workers=2, strategy=strategy)
    process = launch(order, tmp_path / "run", -1, *ONE_HOST)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (tmp_path / "run/log.jsonl").is_file():
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate(timeout=60)
    assert messages.count("SIGTERM: saved at step") == 1, messages
    assert process.returncode == 1  # torchrun's own exit status; that of `regard train --workers` is 143
    (checkpoint,) = (tmp_path / "run/training").glob("step-*")
    longer = load_recipe({"train": {"steps": int(checkpoint.name[5:]) + 5}})
    assert fit(longer, tmp_path / "run", resume=True, reporter=Reporter()).progress.finished == "steps"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "killed"), [("ddp", -1), ("ddp", 0), ("ddp", 1), ("fsdp", 0), ("fsdp", 1)])
def test_two_launchers_give_identical_weights_and_log(
    recipe: MakeRecipe, tmp_path: Path, strategy: str, killed: int
) -> None:
    order = recipe(**STEPS, strategy=strategy)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"--rdzv-endpoint=127.0.0.1:{listener.getsockname()[1]}"
    options = (*TWO_HOSTS, endpoint)
    launchers = [launch(order, tmp_path / "run", killed, *options, **OWN_STORE) for _ in range(2)]
    require_uninterrupted_result(launchers, order, tmp_path / "run", killed)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Connect two network namespaces (simulated hosts) -> their addresses by name."""
    addresses = {"regard-a": "192.0.2.1", "regard-b": "192.0.2.2"}  # reserved for documentation (RFC 5737)
    first, second = addresses
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", first], capture_output=True).returncode:
        pytest.skip("network namespaces need iproute2 and the permission to create them")
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
def test_two_hosts_give_identical_weights_and_log(
    recipe: MakeRecipe, tmp_path: Path, hosts: dict[str, str], strategy: str, killed: int
) -> None:
    order = recipe(**STEPS, strategy=strategy)
    environment = {**OWN_STORE, "GLOO_SOCKET_IFNAME": "regard"}  # the interface to the other host
    endpoint = next(iter(hosts.values()))
    launchers = [
        launch(
            order, tmp_path / "run", killed, *TWO_HOSTS, f"--rdzv-endpoint={endpoint}:29500",
            f"--local-addr={address}", f"--rdzv-conf=is_host={address == endpoint}", host=name, **environment,
        )
        for name, address in hosts.items()
    ]  # fmt: skip
    require_uninterrupted_result(launchers, order, tmp_path / "run", killed)
