"""Several processes give the weights of one process and read the same examples, with every strategy."""

from __future__ import annotations

import os
import signal
import traceback
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kit.backwards import TINY, MakeRecipe
from kit.ranks import run_ranks
from regard.batch import Batch, collate
from regard.config import Config
from regard.loss import Objective
from regard.model import Model
from regard.parallel.ranks import ProcessGroup, form_group
from regard.presets import preset
from regard.recipe import Train
from regard.run import WEIGHTS
from regard.training.data_parallel import local, shard, whole_weights
from regard.training.fit import fit
from regard.training.log import LOG, read_log
from regard.training.report import Reporter
from regard.training.step import Stepper
from regard.training.trainer import Stopped
from regard.weight_files import weights_of

STACK = {"layers": 2, "width": 16, "heads": 2, "ff": 32, "dropout": 0.0, "kv_heads": "none"}
FAMILIES = {
    "pairs": ("transformer-tiny", {}),
    "tied": ("transformer-tiny", {"share_embeddings": True, "tie_output": True}),
    "lm": ("gpt-tiny", {}),
    "rnn": ("rnn-luong", {}),
    "reversible": ("gpt-tiny", {"decoder": STACK | {"residual": "reversible"}, "tie_output": False}),
}
ROWS = [([5, 6, 3], [7, 3]), ([4, 3], [4, 5, 6, 3]), ([9, 9, 9, 3], [3]), ([8, 3], [10, 3]), ([7, 7, 3], [5, 4, 3])]
STEPS = 3


def config(family: str) -> Config:
    name, changes = FAMILIES[family]
    return preset(name, 12, changes={"encoder": STACK, "decoder": STACK, **changes})


def share(rows: list[Any], config: Config, rank: int, size: int) -> list[tuple[Batch, float]]:
    """Batches of a rank, divided like in the data loader; of three ranks, the last has no row in the second batch."""
    shares = []
    for batch in (rows[:3], rows[3:]):
        own_rows = batch[rank::size]
        total = sum(len(target) for _, target in rows)
        shares.append((collate(*zip(*(own_rows or batch[:1]), strict=True), config, total), float(bool(own_rows))))
    return shares


def train(rank: int, size: int, family: str, settings: dict[str, Any], group: ProcessGroup) -> dict[str, Tensor]:
    """Take some steps -> changes of the weights and of their moving average, and the sums of the last step."""
    torch.manual_seed(1 + rank)  # rank 0 broadcasts its weights
    # With a small eps, Adam would turn the rounding errors of zero gradients into full steps.
    stepper = Stepper(Model(config(family)), Train(lr=1e-2, ema=0.5, eps=1e-3, **settings), group)
    start = {name: x.clone() for name, x in whole_weights(weights_of(stepper.model)).items()}
    for step in range(1, STEPS + 1):
        nll, smoothed, norm = stepper.backward(step, share(ROWS, config(family), rank, size))
        assert stepper.update(step, 1e-2, norm)
    sums = [sum(values) for values in zip(*group.gather([nll, smoothed]), strict=True)]
    with stepper.evaluated(stepper.weights) as model:
        average_change = torch.cat([(x - start[name]).flatten() for name, x in weights_of(model).items()])
    end = whole_weights(weights_of(stepper.model))
    change = torch.cat([(x - start[name]).flatten() for name, x in end.items()])
    return {"weights": change, "average": average_change, "sums": torch.tensor([*sums, norm])}


def mixed_gradients(rank: int, size: int, group: ProcessGroup) -> dict[str, Tensor]:
    """Gradients of a step in mixed precision, as on GPUs: weights in bfloat16, sums in fp32."""
    torch.manual_seed(1)
    objective = Objective(Model(config("pairs")))
    if size > 1:
        shard(objective, group, bf16=True, offload=False)
    for batch, weight in share(ROWS, config("pairs"), rank, size):
        (objective(batch).smoothed * weight / batch.total).backward()
    gradients = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
    assert all(local(x).dtype == torch.float32 for x in gradients.values())
    return {"mixed": torch.cat([x.flatten() for x in whole_weights(gradients).values()])}


def run_rank(rank: int, size: int, store: str, out: str, cases: list[tuple[str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    results = []
    with form_group(rank, size, torch.device("cpu"), store) as group:
        for family, settings in cases:
            try:
                weights = train(rank, size, family, settings, group) if settings else mixed_gradients(rank, size, group)
            except Exception:
                weights = {"error": torch.tensor(list(traceback.format_exc().encode()), dtype=torch.uint8)}
            results.append(weights)
    torch.save(results, out)


CASES = [
    (family, {"strategy": strategy, "precision": precision})
    for family, strategy, precision in product(FAMILIES, ("ddp", "fsdp"), ("fp32", "bf16"))
    if (family, precision) not in (("tied", "bf16"), ("reversible", "bf16"))
]
CASES += [
    (family, {"strategy": strategy, "recompute": True})
    for family, strategy in product(("pairs", "lm"), ("ddp", "fsdp"))
]
MIXED: tuple[str, dict[str, Any]] = ("pairs", {})


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_weights_of_several_processes_equal_those_of_one(tmp_path: Path, size: int) -> None:
    """Equal up to the rounding of reordered sums; the ranks are bit-identical."""
    cases = [*CASES, MIXED]
    expected = [train(0, 1, family, {**settings, "recompute": False}, ProcessGroup()) for family, settings in CASES]
    expected.append(mixed_gradients(0, 1, ProcessGroup()))
    results = run_ranks(size, run_rank, tmp_path, cases)
    for case, single, *ranks in zip(cases, expected, *results, strict=True):
        for rank in ranks:
            assert "error" not in rank, bytes(rank["error"].tolist()).decode()
        tolerance = 2e-5 if case[1].get("precision") == "fp32" or "recompute" in case[1] else 3e-2
        for name, x in single.items():
            assert all(torch.equal(ranks[0][name], rank[name]) for rank in ranks), (case, name)
            assert (ranks[0][name] - x).norm() / x.norm() < tolerance, (case, name)


class StopAfter(Reporter):
    """Stops training after a step."""

    def __init__(self, last: int) -> None:
        self._last = last

    def tick(self, step: int, done: float, seconds: float) -> None:
        if step == self._last:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resume_with_another_number_of_processes_continues_at_the_same_example(
    recipe: MakeRecipe, tmp_path: Path, strategy: str
) -> None:
    """Three processes, then two, one, and two again give the result of one process, without dropout."""
    no_dropout = {"encoder": TINY | {"dropout": 0.0}, "decoder": TINY | {"dropout": 0.0}}
    settings = {"steps": 20, "ema": 0.5, "average": 2, "strategy": strategy, "eps": 1e-3}
    single = tmp_path / "single"
    run = tmp_path / "run"
    fit(recipe(no_dropout, workers=1, **settings), single, reporter=Reporter())
    for workers, last in ((3, 5), (2, 9), (1, 13)):
        with pytest.raises(Stopped):
            fit(recipe(no_dropout, workers=workers, **settings), run, resume=True, reporter=StopAfter(last))
    report = fit(recipe(no_dropout, workers=2, **settings), run, resume=True, reporter=Reporter())
    assert report.progress.step == 20
    logs = [[event for event in read_log(path / LOG) if event["event"] == "train"] for path in (single, run)]
    for one, other in zip(*logs, strict=True):
        for key in ("step", "epoch", "examples", "tokens"):
            assert one[key] == other[key]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    for name, x in load_file(single / WEIGHTS).items():
        torch.testing.assert_close(load_file(run / WEIGHTS)[name], x, rtol=1e-3, atol=1e-4)
