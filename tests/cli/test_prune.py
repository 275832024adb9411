"""Pruning of attention heads: pruned equals ablated, and the tuned smaller run is saved."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "inspect"))
from kit.models import family, letters, picture, tiny
from regard.config import Config
from regard.data.images import LabelledImages
from regard.decode.alignment import load_heads, save_heads
from regard.errors import UserError
from regard.inspect.inputs import pair_batches, task_batches
from regard.inspect.prune import (
    PruneAmount,
    count_heads,
    greedy_order,
    group_heads,
    mean_loss,
    prune_heads,
    rank_heads,
    removable_heads,
)
from regard.model import Model
from regard.nn.hooks import patch, without
from regard.run import Run
from regard.text.codec import Example
from regard.training.pruning import Tuning, fair_rates, prune, quality_curve, save_pruned, split_data, tune

SOURCE = torch.tensor([[4, 5, 6, 7, 3], [8, 9, 3, 0, 0]])
KEEP = SOURCE != 0
INPUT = torch.tensor([[2, 4, 5, 6], [2, 7, 8, 9]])
EXAMPLES = [Example(text, text[::-1]) for text in ("abc", "bcd", "cab", "dab", "abba", "cd", "ad", "bad", "dcba", "ca")]
PAIRS = [([4, 5, 6, 3], [5, 6, 3]), ([7, 3], [4, 4, 4, 3])]
REMOVED = {"encoder.blocks.0.attention": [0, 3], "decoder.blocks.1.attention": [1], "decoder.blocks.0.cross": [0, 1, 2]}


@torch.no_grad()
def prune_checked(model: Model, removed: dict[str, list[int]]) -> Model:
    """Prune, and check that the smaller model equals the larger one with these heads ablated."""
    with patch(model, {f"{name}.mixed": without(*heads) for name, heads in removed.items()}):
        expected = model(SOURCE, KEEP, INPUT)
    small = prune_heads(model, removed)
    assert torch.allclose(small(SOURCE, KEEP, INPUT), expected, atol=1e-5)
    state = small.encode(SOURCE, KEEP)  # decoding with a cache, too
    for t, tokens_N in enumerate(INPUT.unbind(1)):
        logits_NV, state = small.step(tokens_N, state)
        assert torch.allclose(logits_NV, expected[:, t], atol=1e-5)
    assert sum(p.numel() for p in small.parameters()) < model.size
    return small


@pytest.mark.parametrize("score", ["scaled_dot", "dot", "general", "additive", "concat", "cosine", "location"])
def test_pruned_equals_ablated_for_every_score(score: str) -> None:
    prune_checked(tiny(score=score), REMOVED)


@pytest.mark.parametrize("position", ["sinusoid", "learned", "rotary", "alibi", "bucket", "none"])
def test_pruned_equals_ablated_for_every_position(position: str) -> None:
    prune_checked(tiny(position=position), REMOVED)


@pytest.mark.parametrize(
    "stack",
    [
        {"kv_heads": 2},
        {"kv_heads": 1},
        {"kv_heads": 2, "score": "additive"},
        {"bias": "none"},
        {"head_width": 6},
        {"head_width": 6, "value_width": 3, "kv_heads": 2},
        {"cross_window": 2, "cross_center": "predicted"},
        {"window": 1},
        {"norm_at": "post", "gated": True, "norm": "rms"},
    ],
)
def test_pruned_equals_ablated_for_every_stack(stack: dict[str, Any]) -> None:
    prune_checked(tiny(**stack), REMOVED)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from([1, 2, 4]))
def test_pruned_equals_ablated_for_any_heads_pruned_twice(data: st.DataObject, kv_heads: int) -> None:
    model = tiny(kv_heads=kv_heads, position="alibi")
    for _ in range(2):
        removed = {}
        for name, attention in model.attentions().items():
            heads = data.draw(st.sets(st.integers(0, attention.heads - 1), max_size=attention.heads - 1))
            if heads:
                removed[name] = sorted(heads)
        if removed:
            model = prune_checked(model, removed)


def test_the_config_lists_the_remaining_heads(tmp_path: Path) -> None:
    run = letters()
    small = prune_heads(run.model, REMOVED)
    assert small.config.encoder is not None and small.config.decoder is not None
    assert small.config.encoder.kept_heads == ((1, 2), (0, 1, 2, 3))
    assert small.config.decoder.kept_heads == ((0, 1, 2, 3), (0, 2, 3))
    assert small.config.decoder.kept_cross_heads == ((3,), (0, 1, 2, 3))
    assert small.config.encoder.kept_cross_heads is None
    again = prune_heads(small, {"encoder.blocks.0.attention": [0]})
    assert again.attentions()["encoder.blocks.0.attention"].head_numbers == (2,)
    Run(small.config, run.codec, small, tmp_path).save(tmp_path / "small")
    loaded = Run.load(tmp_path / "small")
    assert isinstance(loaded.config, Config) and loaded.config == small.config
    with torch.no_grad():
        assert torch.equal(loaded.model(SOURCE % 9, KEEP, INPUT % 9), small(SOURCE % 9, KEEP, INPUT % 9))


def test_the_last_head_of_an_attention_cannot_be_pruned() -> None:
    model = tiny()
    with pytest.raises(UserError, match="all of its heads would be removed"):
        prune_heads(model, {"encoder.blocks.0.attention": [0, 1, 2, 3]})
    heads = [("encoder.blocks.0.attention", head) for head in (2, 0, 1, 3)] + [("decoder.blocks.0.cross", 1)]
    assert removable_heads(model, heads) == [*heads[:3], heads[4]]


def test_amounts_are_parsed_and_converted_to_counts() -> None:
    assert PruneAmount.parse("0.4", None) == PruneAmount(fraction=0.4) == PruneAmount.parse("40%", None)
    assert PruneAmount.parse("12", None) == PruneAmount(count=12)
    assert PruneAmount.parse(None, 0.1) == PruneAmount(threshold=0.1)
    for heads, threshold in (
        (None, None),
        ("2", 0.5),
        ("x", None),
        ("0", None),
        ("1.5", None),
        ("-1", None),
        ("150%", None),
    ):
        with pytest.raises(UserError):
            PruneAmount.parse(heads, threshold)
    order = {("a", 0): 0.1, ("a", 1): 0.2, ("b", 0): 0.3, ("b", 1): 0.4}
    assert PruneAmount(fraction=0.5).of(order) == PruneAmount(count=2).of(order) == 2
    assert PruneAmount(threshold=0.15).of(order) == 1
    with pytest.raises(UserError, match="at most 2"):
        PruneAmount(count=3).of(order)
    with pytest.raises(UserError, match="every head is above it"):
        PruneAmount(threshold=0.05).of(order)


@pytest.mark.parametrize("by", ["gradient", "ablation"])
def test_greedy_order_ranks_the_heads_again_after_each_removal(by: Any) -> None:
    model = tiny()
    batches = pair_batches(PAIRS, model.config)
    order = rank_heads(model, batches, by)
    assert list(order.values()) == sorted(order.values())
    greedy = greedy_order(model, batches, 3, by, lambda message: None)
    assert greedy[0] == next(iter(order))
    assert greedy[1] == next(iter(rank_heads(model, batches, by, group_heads(greedy[:1]))))
    assert len(set(greedy)) == 3


def test_the_curve_goes_from_all_heads_to_one_per_attention() -> None:
    model = tiny()
    batches = pair_batches(PAIRS, model.config)
    order = removable_heads(model, list(rank_heads(model, batches, "gradient")))
    curve = quality_curve(model, batches, order)
    assert curve[0][0] == 0 and curve[-1][0] == len(order) == 24 - 6
    small = prune_heads(model, group_heads(order))
    assert all(attention.heads == 1 for attention in small.attentions().values())
    assert curve[-1][1] == pytest.approx(mean_loss(small, batches), abs=1e-5)


def test_tuning_lowers_the_loss_and_ends_in_eval_mode() -> None:
    model = tiny(dropout=0.0)
    losses = tune(model, itertools.cycle(pair_batches(PAIRS, model.config)), 30, lr=5e-3)
    assert len(losses) == 30 and losses[-1] < losses[0] - 0.3
    assert not model.training


def test_a_teacher_brings_the_outputs_closer_to_its_own() -> None:
    teacher = tiny(dropout=0.0)
    weights = {name: p.clone() for name, p in teacher.named_parameters()}
    batch = pair_batches(PAIRS, teacher.config)[0]

    @torch.no_grad()
    def distance(with_teacher: bool) -> float:
        model = prune_heads(teacher, REMOVED)
        tune(model, itertools.repeat(batch), 30, teacher=teacher if with_teacher else None, lr=5e-3)
        logits, expected = (m(batch.source_BS, batch.source_keep_BS, batch.input_BT) for m in (model, teacher))
        return float((logits.log_softmax(-1) - expected.log_softmax(-1)).abs().mean())

    assert distance(True) < 0.7 * distance(False)
    assert all(torch.equal(weights[name], p) for name, p in teacher.named_parameters())


def test_tuning_restores_the_best_weights() -> None:
    model = tiny(dropout=0.0)
    seen: list[tuple[float, dict[str, torch.Tensor]]] = []
    verdicts = iter([5.0, 3.0, 1.0, 4.0, *[9.0] * 6])

    def judge() -> float:
        assert not model.training
        seen.append((next(verdicts), {name: p.clone() for name, p in model.named_parameters()}))
        return seen[-1][0]

    tune(model, itertools.cycle(pair_batches(PAIRS, model.config)), 20, judge=judge, lr=5e-3)
    assert len(seen) == 10
    assert all(torch.equal(seen[2][1][name], p) for name, p in model.named_parameters())
    assert any(not torch.equal(seen[3][1][name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["lm", "lm-grouped", "lm-distances", "masked", "classes", "image"])
def test_every_family_is_pruned_tuned_saved_and_reloaded(kind: str, tmp_path: Path) -> None:
    run = family(kind)
    data: Any = {
        "image": LabelledImages(np.stack([picture(i) for i in range(12)]), ["one", "two", "three"] * 4),
        "classes": [Example("abc"[: 1 + i % 3] + "d" * i, ("one", "two")[i % 2]) for i in range(12)],
    }.get(kind, "abcab dcba " * 60)
    learn, held_out = split_data(data, every=4)
    smaller, report = prune(run, learn, held_out, PruneAmount(count=3), tuning=Tuning(2), judge_on=8)
    assert report.before.heads == 8 and report.after.heads == 5 and report.after.parameters < report.before.parameters
    assert report.curve[0][1] == pytest.approx(report.before.loss, abs=1e-4)
    assert list(report.before.metrics) == (["accuracy"] if kind in ("image", "classes") else ["perplexity"])
    save_pruned(smaller, report, tmp_path / "small", run.path)
    loaded = Run.load(tmp_path / "small")
    assert loaded.config == smaller.config and loaded.labels == run.labels and loaded.pixels == run.pixels
    batches = task_batches(loaded, held_out)
    assert mean_loss(loaded.model, batches) == pytest.approx(report.after.loss, abs=1e-5)
    silenced = {name: [0, 2] for name in run.model.attentions()}
    assert mean_loss(prune_heads(run.model, silenced), batches) == pytest.approx(
        mean_loss(run.model, batches, silenced), abs=1e-5
    )


def test_heads_of_hashed_attention_cannot_be_removed() -> None:
    with pytest.raises(UserError, match="cannot be removed"):
        prune(family("lm-hashed"), "abcab " * 40, "abcab " * 40, PruneAmount(count=3))


def test_greedy_pruning_and_tuning_of_a_run(tmp_path: Path) -> None:
    run = letters()
    run.path = tmp_path / "run"
    run.save(run.path)
    save_heads(run.path, [(0, 0), (0, 1), (0, 2), (0, 3)])
    messages: list[str] = []
    smaller, report = prune(
        run, EXAMPLES, EXAMPLES[:4], PruneAmount(fraction=0.4), greedy=True, tuning=Tuning(3), notify=messages.append
    )
    assert report.before.heads == 24 and report.after.heads == report.pruned.heads == 14
    assert report.after.parameters < report.before.parameters
    assert sum(map(len, report.removed.values())) == 10
    assert report.curve[0][1] == pytest.approx(report.before.loss, abs=1e-4)
    assert report.curve[-1][1] == pytest.approx(report.pruned.loss, abs=1e-4)
    assert report.after.loss != report.pruned.loss and "tuning for 3 steps" in messages
    save_pruned(smaller, report, tmp_path / "small", run.path)
    loaded = Run.load(tmp_path / "small")
    assert loaded.config == smaller.config
    remaining = loaded.model.attentions()["decoder.blocks.0.cross"].head_numbers
    assert load_heads(tmp_path / "small") == tuple((0, index) for index in range(len(remaining)))


def test_rates_are_medians_of_alternating_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is twice as fast; every fifth call is ten times slower."""
    now = 0.0
    calls = []

    def work(name: str, seconds: float) -> Any:
        def run() -> None:
            nonlocal now
            calls.append(name)
            now += seconds * (10 if len(calls) % 5 == 0 else 1)

        return run

    monkeypatch.setattr("regard.training.pruning.time.process_time", lambda: now)
    rates = fair_rates([work("before", 2.0), work("after", 1.0)], 8, torch.device("cpu"))
    assert rates == pytest.approx([4.0, 8.0])
    turns = [calls[i : i + 2] for i in range(2, len(calls), 2)]
    assert all(sorted(turn) == ["after", "before"] for turn in turns)
    assert [turn[0] for turn in turns[:4]] == ["before", "after", "before", "after"]


def test_one_shot_without_tuning_reports_the_same_state_twice() -> None:
    _, report = prune(letters(), EXAMPLES, EXAMPLES[:2], PruneAmount(count=4))
    assert report.after == report.pruned and report.after.heads == 20
    assert report.before.sentences_per_second > 0 < report.after.sentences_per_second
    assert report.curve[-1][0] == 18


def test_pruning_by_gates_trains_a_copy_and_needs_tuning_without_greedy() -> None:
    run = letters()
    weights = {name: p.clone() for name, p in run.model.named_parameters()}
    smaller, report = prune(run, EXAMPLES, EXAMPLES[:2], PruneAmount(count=6), by="gates", tuning=Tuning(4))
    assert report.after.heads == count_heads(smaller.model) == 18 and report.tuned_steps == 4
    assert all(torch.equal(weights[name], p) for name, p in run.model.named_parameters()), "only a copy may be trained"
    for wrong in ({"tuning": Tuning(0)}, {"tuning": Tuning(4), "greedy": True}):
        with pytest.raises(UserError, match="--by gates"):
            prune(run, EXAMPLES, EXAMPLES[:2], PruneAmount(count=6), by="gates", **wrong)  # type: ignore[arg-type]


def test_a_model_with_one_head_cannot_be_pruned() -> None:
    with pytest.raises(UserError, match="only one head"):
        prune(letters("rnn-luong"), EXAMPLES, EXAMPLES, PruneAmount(count=1))


def test_split_data_puts_no_source_in_both_parts() -> None:
    doubled = [*EXAMPLES, *EXAMPLES]
    halves: Any = split_data(doubled, every=3)
    learn, held_out = halves
    assert len(learn) + len(held_out) == len(doubled)
    assert not {e.source for e in learn} & {e.source for e in held_out}
