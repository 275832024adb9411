"""A worker pool gives the outputs of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decode_kit import run_of, sources

from regard.decode.generate import TorchEngine
from regard.decode.options import Options
from regard.decode.request import Request
from regard.decode.workers import WorkerPool
from regard.errors import UserError
from regard.run import Run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("pool") / "run"
    run = run_of("transformer-tiny", 3)
    Run(run.config, run.codec, run.model, path).save(path)
    return Run.load(path)


def test_two_processes_give_the_very_same_in_order(saved: Run) -> None:
    decoder = TorchEngine(saved, Options(beam=3, nbest=2, max_length=8, batch_tokens=60, alignment=True))
    inputs = [*sources(1, 30), "", "a" * 3000, *sources(2, 10)]
    alone = decoder(inputs)
    with WorkerPool(decoder, 2) as pool:
        for _ in range(2):
            together = pool(inputs)
            assert [[h.as_dict() for h in row] for row in together] == [[h.as_dict() for h in row] for row in alone]
        assert pool([]) == []
        good, bad = pool([Request("a"), Request("b", prefix="z")])
        assert good[0].ids == decoder(["a"])[0][0].ids and "prefix 'z'" in bad[0].flags["unsatisfied"]


def test_an_error_in_a_worker_is_raised(saved: Run, tmp_path: Path) -> None:
    broken = run_of("transformer-tiny", 3).model.state_dict()
    model = type(saved.model)(saved.config)
    model.load_state_dict({name: torch.full_like(x, float("nan")) for name, x in broken.items()})
    Run(saved.config, saved.codec, model.eval(), tmp_path / "run").save(tmp_path / "run")
    decoder = TorchEngine(Run.load(tmp_path / "run"), Options(batch_tokens=20))
    with WorkerPool(decoder, 2) as pool, pytest.raises(UserError, match="not numbers"):
        pool(sources(1, 30))
