"""Training with head gates: closed heads are pruned, runs resume, and a cost of zero changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.decode.torch_engine import generate
from regard.errors import UserError
from regard.inspect.prune import gate_heads, restore_unpruned
from regard.model import Model
from regard.nn.adapters import head_gates
from regard.presets import preset
from regard.recipe import load_recipe
from regard.run import Run
from regard.training.checkpoint import TRAINING, Checkpoints
from regard.training.directory import UNCUT
from regard.training.fit import fit
from regard.training.report import Reporter
from regard.training.trainer import Stopped, Trainer
from regard.weight_files import weights_of

SMALL = {"layers": 1, "width": 16, "heads": 4, "ff": 16, "dropout": 0.1}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{a}{b}{a}\t{b} {a}\n" for a in "abcd" for b in "abcd"), encoding="utf-8")
    return path


def recipe(pairs: Path, **train: Any) -> Any:
    settings = {"workers": 1, "lr": 0.01, "warmup": 1, "batch_examples": 8, "validate_every": 10, "device": "cpu"}
    return load_recipe(
        {
            "preset": "transformer-tiny",
            "model": {"encoder": SMALL, "decoder": SMALL},
            "data": {"train": str(pairs), "valid": str(pairs)},
            "train": settings | train,
        }
    )


def heads(run: Run) -> int:
    return sum(attention.heads for attention in run.model.attentions().values())


def test_l0_cost_prunes_heads_without_changing_the_output(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fit(recipe(pairs, steps=40, l0=30.0, ema=0.5), out, reporter=Reporter())
    run = Run.load(out)
    assert heads(run) < 12 and not head_gates(run.model)
    assert run.config.encoder is not None and run.config.encoder.kept_heads is not None
    small = run.model.size
    with torch.no_grad():
        output = run.model(torch.tensor([[4, 5, 3]]), None, torch.tensor([[2, 5]]))
    assert len(list(generate(run, ["aba"]))) == 1
    restore_unpruned(out, out / TRAINING / UNCUT)  # the unpruned model has the same output
    unpruned = Run.load(out)
    assert heads(unpruned) == 12 and unpruned.model.size > small
    with torch.no_grad():
        unpruned_output = unpruned.model(torch.tensor([[4, 5, 3]]), None, torch.tensor([[2, 5]]))
    assert torch.allclose(output, unpruned_output, atol=1e-5)


def test_l0_cost_of_zero_gives_identical_weights(pairs: Path, tmp_path: Path) -> None:
    fit(recipe(pairs, steps=6), tmp_path / "plain", reporter=Reporter())
    fit(recipe(pairs, steps=6, l0=0.0), tmp_path / "zero", reporter=Reporter())
    plain, zero = (Run.load(tmp_path / name) for name in ("plain", "zero"))
    assert plain.config == zero.config
    for name, x in weights_of(plain.model).items():
        assert torch.equal(x, weights_of(zero.model)[name])


def test_resume_with_gates_gives_identical_weights(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = recipe(pairs, steps=20, l0=10.0, ema=0.9, validate_every=7)
    fit(order, tmp_path / "uninterrupted", reporter=Reporter())
    step = Trainer._step

    def stop_at_step_9(self: Trainer) -> int:
        number = step(self)
        return 15 if self.progress.step == 9 else number

    with monkeypatch.context() as context:
        context.setattr(Trainer, "_step", stop_at_step_9)
        with pytest.raises(Stopped):
            fit(order, tmp_path / "parts", reporter=Reporter())
    fit(order, tmp_path / "parts", resume=True, reporter=Reporter())
    uninterrupted, parts = (Run.load(tmp_path / name) for name in ("uninterrupted", "parts"))
    assert uninterrupted.config == parts.config and heads(uninterrupted) == heads(parts)
    for name, x in weights_of(uninterrupted.model).items():
        assert torch.equal(x, weights_of(parts.model)[name])


def test_pruned_run_resumes_with_all_heads(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fit(recipe(pairs, steps=40, l0=30.0), out, reporter=Reporter())
    head_count = heads(Run.load(out))
    fit(recipe(pairs, steps=40, l0=30.0), out, resume=True, reporter=Reporter())  # the run is finished already
    assert heads(Run.load(out)) == head_count
    fit(recipe(pairs, steps=50, l0=30.0), out, resume=True, reporter=Reporter())
    longer = Run.load(out)
    assert head_count < 12 and heads(longer) < 12 and Checkpoints(out).progress().step == 50  # type: ignore[union-attr]


def test_gates_are_refused_for_heads_that_cannot_be_pruned() -> None:
    for name in ("rnn-luong", "reformer-tiny"):
        with pytest.raises(UserError, match=r"train\.l0"):
            gate_heads(Model(preset(name, 12, changes={})))
