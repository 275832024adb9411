"""Processes that torchrun starts: a killed one is started again, a signal to the launcher saves once."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from backwards import MakeRecipe
from test_resume import result

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

run = Path(sys.argv[2])
if os.environ["RANK"] == sys.argv[3] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=kill_later, args=(run,), daemon=True).start()
fit(load_recipe(json.loads(sys.argv[1])), run, reporter=Lines())
"""


def launch(order: Recipe, run: Path, killed: int, *options: str) -> subprocess.Popen[str]:
    """Start processes, of which one is killed a moment after the first checkpoint."""
    script = run.parent / "script.py"
    script.write_text(SCRIPT)
    options = options or ("--standalone", "--nproc-per-node=2")
    launcher = ["-m", "torch.distributed.run", *options, "--max-restarts=2"]
    given = json.dumps(order.model_dump(mode="json", exclude_unset=True))
    command: list[Any] = [sys.executable, *launcher, script, given, run, str(killed)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "killed"), [("ddp", 0), ("ddp", 1), ("fsdp", 0), ("fsdp", 1)])
def test_a_killed_process_is_replaced_and_the_run_ends_as_if_nothing_had_happened(
    recipe: MakeRecipe, tmp_path: Path, strategy: str, killed: int
) -> None:
    order = recipe(steps=400, validate_every=20, workers=2, strategy=strategy, ema=0.9, metric="wer")
    fit(order, tmp_path / "alone", reporter=Reporter())
    process = launch(order, tmp_path / "run", killed)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages
    assert "killed" in messages
    for what in ("tensors", "log"):
        assert result(tmp_path / "run")[what] == result(tmp_path / "alone")[what]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_to_the_launcher_saves_once(recipe: MakeRecipe, tmp_path: Path, strategy: str) -> None:
    order = recipe(steps=1_000_000, validate_every=1_000, workers=2, strategy=strategy)
    process = launch(order, tmp_path / "run", killed=-1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (tmp_path / "run/log.jsonl").is_file():
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate(timeout=60)
    assert messages.count("SIGTERM: saved at step") == 1, messages
    (saved,) = (tmp_path / "run/training").glob("step-*")
    more = load_recipe({"train": {"steps": int(saved.name[5:]) + 5}})
    assert fit(more, tmp_path / "run", resume=True, reporter=Reporter()).progress.finished == "steps"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_launchers_on_two_machines_train_as_one(recipe: MakeRecipe, tmp_path: Path, strategy: str) -> None:
    """Each starts a process; they meet at an address, as they do on machines with a file system in common."""
    order = recipe(steps=40, validate_every=20, workers=2, strategy=strategy, ema=0.9, metric="wer")
    fit(order, tmp_path / "alone", reporter=Reporter())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=1")
    launchers = [launch(order, tmp_path / "run", -1, *options) for _ in range(2)]
    for process in launchers:
        _, messages = process.communicate(timeout=120)
        assert process.returncode == 0, messages
    for what in ("tensors", "log"):
        assert result(tmp_path / "run")[what] == result(tmp_path / "alone")[what]
