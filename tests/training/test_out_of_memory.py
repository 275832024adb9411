"""Batches that exceed memory are split without changing the gradient; examples that do not fit are reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.backwards import MakeRecipe
from kit.ranks import run_ranks
from regard.batch import Batch, collate
from regard.config import Config
from regard.data.objectives import lm_batch
from regard.errors import UserError
from regard.loss import Loss, Objective
from regard.model import Model
from regard.parallel.ranks import ProcessGroup, form_group, is_lost_connection
from regard.presets import preset
from regard.recipe import Train
from regard.training.fit import fit
from regard.training.log import read_log
from regard.training.report import Lines, Reporter, describe_event
from regard.training.step import Stepper
from regard.training.validation import mean_scores

TINY = {"layers": 1, "width": 16, "heads": 2, "ff": 32, "dropout": 0.0}
ROWS = [([4 + i % 5] * (1 + 2 * i) + [3], [5 + i % 4] * (1 + i % 5) + [3]) for i in range(9)]
TOTAL = sum(len(target) for _, target in ROWS)
Shares = list[tuple[Batch, float]]


def config(name: str = "transformer-tiny", **values: Any) -> Config:
    return preset(name, 12, changes={"encoder": TINY, "decoder": {**TINY, **values}})


def shares(rows: list[Any] = ROWS) -> Shares:
    return [(collate([source for source, _ in rows], [target for _, target in rows], config(), TOTAL), 1.0)]


def stepper(shape: Config | None = None, group: ProcessGroup | None = None) -> Stepper:
    torch.manual_seed(1)
    return Stepper(Model(shape or config()), Train(label_smoothing=0.1), group or ProcessGroup())


def raise_out_of_memory(*_: object) -> None:
    torch.empty(1 << 60)  # torch cannot allocate this on any CPU


def limit_memory(ours: Stepper, too_large: Callable[[Batch], bool], in_backward: bool = False) -> None:
    """Make some batches run out of memory: in the forward pass, or when part of the gradient is computed."""
    original, model = ours.objective.forward, ours.model
    failing = False

    def forward(batch: Batch) -> Loss:
        nonlocal failing
        failing = too_large(batch)
        if failing and not in_backward:
            raise_out_of_memory()
        return original(batch)

    ours.objective.forward = forward  # type: ignore[method-assign]

    def fail(_: object) -> None:
        nonlocal failing
        if failing:
            failing = False
            raise_out_of_memory()

    if in_backward:
        assert model.encoder is not None
        for parameter in model.encoder.parameters():  # the decoder already has its gradient
            parameter.register_post_accumulate_grad_hook(fail)


def gradient(ours: Stepper) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in ours.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("limit", [200, 60, 26])
def test_split_batch_has_the_gradient_of_the_whole_batch(limit: int, in_backward: bool) -> None:
    whole, split = stepper(), stepper()
    expected = whole.backward(1, shares())
    assert whole.memory_failures.count == 0 and whole.memory_failures.pieces == 1
    limit_memory(split, lambda batch: batch.size > limit, in_backward)
    assert split.backward(1, shares()) == pytest.approx(expected, rel=1e-5)
    assert split.memory_failures.count > 0 and split.memory_failures.pieces > 1 and not split.memory_failures.examples
    torch.testing.assert_close(gradient(split), gradient(whole), rtol=1e-4, atol=1e-7)
    split.backward(2, shares())  # the limit is remembered from step 1
    assert split.memory_failures.count == 0 and split.memory_failures.pieces > 1
    torch.testing.assert_close(gradient(split), gradient(whole), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("in_backward", [False, True])
def test_example_that_does_not_fit_is_skipped_and_counted(in_backward: bool) -> None:
    ours, reference = stepper(), stepper()
    longest = max(len(source) for source, _ in ROWS[:8])
    limit_memory(ours, lambda batch: batch.source_BS.shape[1] > longest, in_backward)
    rows = [*ROWS[:3], ROWS[8], *ROWS[3:8]]
    batches = [*shares(rows[:2]), *shares(rows[2:])]
    nll, smoothed, norm = ours.backward(1, batches)
    assert ours.memory_failures.examples == [(1, 1)]
    assert ours.memory_failures.tokens == len(ROWS[8][1])
    assert [nll, smoothed, norm] == pytest.approx(reference.backward(1, shares(ROWS[:8])), rel=1e-5)
    torch.testing.assert_close(gradient(ours), gradient(reference), rtol=1e-4, atol=1e-7)


def test_sums_are_zero_if_no_example_fits() -> None:
    ours = stepper()
    limit_memory(ours, lambda batch: True)
    assert ours.backward(1, shares()) == [0.0, 0.0, 0.0]
    assert len(ours.memory_failures.examples) == len(ROWS) and ours.memory_failures.tokens == TOTAL


def test_other_runtime_errors_are_raised() -> None:
    ours = stepper()

    def forward(batch: Batch) -> Loss:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    ours.objective.forward = forward  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes"):
        ours.backward(1, shares())


def test_optimizer_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = stepper()
    norm = ours.backward(1, shares())[2]
    monkeypatch.setattr(ours.optimizer, "step", raise_out_of_memory)
    with pytest.raises(UserError, match=r"not enough memory for the optimizer.*parameters"):
        ours.update(1, 1e-3, norm)


def test_segment_memory_is_split_with_the_batch() -> None:
    shape = config("xl-tiny", memory=4)
    text = torch.randint(4, 12, (6, 11), generator=torch.Generator().manual_seed(1))
    segments: Shares = [(lm_batch(text[:, :6], 60), 1.0), (lm_batch(text[:, 5:], 60), 1.0)]
    whole, split = stepper(shape), stepper(shape)
    limit_memory(split, lambda batch: len(batch.label_BT) > 2)
    for step in (1, 2):
        assert split.backward(step, segments) == pytest.approx(whole.backward(step, segments), rel=1e-5)
        torch.testing.assert_close(gradient(split), gradient(whole), rtol=1e-4, atol=1e-7)
        for ours, theirs in zip(
            split.objective.segment_memory or (), whole.objective.segment_memory or (), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["transformer-tiny", "xl-tiny"])
def test_validation_of_split_batches_gives_the_same_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = config(name, **({"memory": 4} if name == "xl-tiny" else {}))
    model = stepper(shape).model.eval()
    text = torch.randint(4, 12, (6, 11), generator=torch.Generator().manual_seed(1))
    batches = [lm_batch(text[:, :6]), lm_batch(text[:, 5:])] if name == "xl-tiny" else [shares()[0][0]]
    expected = mean_scores(model, batches, ProcessGroup())
    original = Objective.forward
    max_rows = 2

    def forward(self: Objective, batch: Batch) -> Loss:
        if len(batch.label_BT) > max_rows:
            raise_out_of_memory()
        return original(self, batch)

    monkeypatch.setattr(Objective, "forward", forward)
    assert mean_scores(model, batches, ProcessGroup()) == pytest.approx(expected, rel=1e-5)
    max_rows = 0
    with pytest.raises(UserError, match="not enough memory to validate"):
        mean_scores(model, batches, ProcessGroup())


def run_rank(rank: int, size: int, store: str, out: str) -> None:
    """Run out of memory in rank 1, and save the message of each rank."""
    torch.set_num_threads(1)
    message = ""
    with form_group(rank, size, torch.device("cpu"), store) as group:
        torch.manual_seed(1)
        ours = Stepper(Model(config()), Train(batch_tokens=77), group)
        if rank == 1:
            limit_memory(ours, lambda batch: True)
        try:
            ours.backward(1, shares(ROWS[rank::2]))
            group.gather([0.0])
        except UserError as error:
            message = str(error)
        except RuntimeError as error:
            message = f"lost {is_lost_connection(error)}"
    torch.save(torch.tensor(list(message.encode()), dtype=torch.uint8), out)


def test_several_processes_do_not_split_a_batch(tmp_path: Path) -> None:
    """Other ranks wait in a collective, so this is an error; it names the setting to lower and the single process."""
    first, second = (bytes(message.tolist()).decode() for message in run_ranks(2, run_rank, tmp_path))
    assert first == "lost True"
    assert "not enough memory for a batch" in second and "train.batch_tokens (now 77" in second
    assert "resume=True and train.workers=1" in second


# A run


def limit_run(monkeypatch: pytest.MonkeyPatch, too_large: Callable[[Batch], bool]) -> None:
    original = Objective.forward

    def forward(self: Objective, batch: Batch) -> Loss:
        if self.training and too_large(batch):
            raise_out_of_memory()
        return original(self, batch)

    monkeypatch.setattr(Objective, "forward", forward)


def test_run_skips_the_example_that_does_not_fit_and_names_its_line(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.tsv"
    lines = file.read_text().splitlines()
    lines[40:40] = ["not a pair", "abcdefg" * 5 + "\t" + "a " * 30]
    file.write_text("".join(line + "\n" for line in lines))
    limit_run(monkeypatch, lambda batch: batch.source_BS.shape[1] > 30 or len(batch.label_BT) > 5)
    report = fit(recipe(epochs=1, steps=None), tmp_path / "run", reporter=Lines())
    events = read_log(tmp_path / "run" / "log.jsonl")
    failures = [event for event in events if event["event"] == "memory"]
    (skipped,) = [event for event in failures if event["skipped"]]
    assert skipped["skipped"] == [f"{file}:42 (36 and 31 tokens)"]
    assert report.progress.unfit == events[-1]["unfit"] == 1
    assert report.progress.memory_failures == events[-1]["memory_failures"] >= len(failures) >= 1
    messages = capsys.readouterr().err
    assert f"a batch of one does not fit: {file}:42" in messages
    assert "memory ran out" in next(line for line in messages.splitlines() if line.startswith("finished"))
    assert all(event["loss"] > 0.5 for event in events if event["event"] == "train")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_run_of_two_processes_stops_and_resumes_with_one(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    order = recipe(steps=3, workers=2, strategy=strategy)
    limit_run(monkeypatch, lambda batch: len(batch.label_BT) > 2)
    with pytest.raises(UserError, match=r"not enough memory for a batch.*\n.*train\.batch_examples \(now 10"):
        fit(order, tmp_path / "run", reporter=Reporter())
    report = fit(recipe(steps=3, workers=1, strategy=strategy), tmp_path / "run", resume=True, reporter=Reporter())
    assert report.progress.step == 3 and report.progress.memory_failures > 0


def test_run_stops_after_three_steps_without_a_fitting_example(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_run(monkeypatch, lambda batch: True)
    with pytest.raises(
        UserError,
        match=r"(?s)not enough memory: in 3 steps.*step 3.*no single example fits.*train.tsv:\d+ .*data.max_length",
    ):
        fit(recipe(steps=9), tmp_path / "run", reporter=Reporter())


def test_memory_events_are_described() -> None:
    event = {"event": "memory", "step": 7, "pieces": 4, "skipped": []}
    assert describe_event(event) == "step 7 · memory ran out: the batch was split into 4 parts"
    description = describe_event({**event, "skipped": [f"f.tsv:{n}" for n in range(9)]})
    assert description.endswith("a batch of one does not fit: f.tsv:0; f.tsv:1; f.tsv:2; f.tsv:3; f.tsv:4; ...")
