"""Settings of the test session, and the trained run that many tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from kit.chromium import browser, running_browser
from kit.preloaded import forked_children
from kit.shared import shared_copy
from kit.toy import call, small, spell, toy_words

__all__ = ["browser", "running_browser"]  # fixtures: one browser for all tests of a process

# No deadlines: an example may be slow on a busy machine.
settings.register_profile("regard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("regard")
torch.set_num_threads(1)  # on small tensors, a second thread costs more than it saves
# Background jobs and nohup ignore these signals, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _preloaded() -> Iterator[None]:
    with forked_children():
        yield


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pairs.tsv, test.tsv and `run`, which is trained on pairs.tsv."""
    return shared_copy(tmp_path_factory, "toy", make_toy)


def make_toy(path: Path) -> None:
    words = toy_words(300)
    for name, part in (("pairs", words[:260]), ("test", words[260:])):
        (path / f"{name}.tsv").write_text("".join(f"{word}\t{spell(word)}\n" for word in part))
    result = call(
        "train", "--data", path / "pairs.tsv", "--valid", path / "test.tsv", "--out", path / "run",
        "--steps", 200, "--workers", 1, *small("validate_every=200", "batch_examples=64"),
    )  # fmt: skip
    assert result.code == 0, result.err
