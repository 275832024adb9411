"""The objective equals torch's cross-entropy, and the sum over any split of a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from kit.families import BOTH, DECODERS, ENCODERS, pixels, shrunk
from regard import loss
from regard.batch import Batch, collate
from regard.loss import Loss, Objective, output_loss
from regard.model import Model

VOCAB = 13
FAMILIES = [*BOTH, *DECODERS, *ENCODERS]
SOURCES = [[5, 6, 7, 3], [8, 3], [9, 10, 3]]
TARGETS = [[7, 7, 3], [4, 5, 6, 8, 3], [3]]


def build(name: str = "transformer-tiny") -> Model:
    torch.manual_seed(0)
    return Model(shrunk(name, VOCAB))


def batch(rows: slice = slice(None), name: str = "transformer-tiny") -> Batch:
    """A batch of a family: pairs, texts, texts with masked tokens, or images with a class."""
    config = shrunk(name, VOCAB)
    if name in DECODERS:
        whole = collate([[]] * 3, TARGETS, config)
    elif config.patches is not None:
        image = torch.zeros(3, 0, dtype=torch.int64)
        whole = Batch(pixels(), None, image, torch.tensor([[2], [0], [5]]), None, 3, 3)
    elif name in ENCODERS:
        texts = collate(SOURCES, SOURCES, config)
        is_masked = torch.tensor([[False, True, True, False], [True, False, False, False], [False, False, True, False]])
        whole = texts._replace(keep_BT=is_masked, tokens=4, total=4)
    else:
        whole = collate(SOURCES, TARGETS, config)
    parts = [x[rows] if isinstance(x, Tensor) else x for x in whole[:5]]
    return Batch(*parts, whole.tokens, whole.total)


def scores_of(model: Model, example: Batch) -> Tensor:
    """All logits at once, one row per label."""
    if model.config.decoder is None:
        return model(example.source_BS, example.source_keep_BS)
    if model.config.encoder is None:
        return model(example.input_BT, None)
    return model(example.source_BS, example.source_keep_BS, example.input_BT)


def expected_loss(x: Tensor, weight: Tensor, label: Tensor, smoothing: float, bias: Tensor | None = None) -> Loss:
    scores = F.linear(x, weight, bias)
    return Loss(
        F.cross_entropy(scores, label, reduction="sum", label_smoothing=smoothing),
        F.cross_entropy(scores, label, reduction="sum"),
        (scores.argmax(-1) == label).sum().to(scores.dtype),
    )


@given(
    st.integers(0, 60),
    st.integers(2, 40),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.sampled_from([1, 300, 1 << 20]),
    st.data(),
)
@settings(max_examples=50, deadline=None)
def test_value_and_gradients_equal_cross_entropy(
    count: int, vocab: int, smoothing: float, chunk: int, data: st.DataObject
) -> None:
    """For any chunk size, with large logits and a loss that is scaled before the backward pass."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = torch.randn(count, 5, generator=generator) * 3 + 1
    weight = torch.randn(vocab, 5, generator=generator) * 2
    label = torch.randint(vocab, (count,), generator=generator)
    bias = torch.randn(vocab, generator=generator) * 4
    inputs = (x, weight, bias) if data.draw(st.booleans()) else (x, weight)
    actual_inputs, expected_inputs = ([a.clone().requires_grad_() for a in inputs] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "CHUNK_ELEMENTS", chunk)
        actual = output_loss(*actual_inputs[:2], label, smoothing, *actual_inputs[2:])
    expected = expected_loss(*expected_inputs[:2], label, smoothing, *expected_inputs[2:])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-5)
    (actual.smoothed * 0.37).backward()
    (expected.smoothed * 0.37).backward()
    for a, b in zip(actual_inputs, expected_inputs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
    assert not actual.nll.requires_grad
    assert not actual.correct.requires_grad


def test_gradients_equal_cross_entropy_in_double_precision() -> None:
    x, weight = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (20, 7))
    label = torch.arange(20) % 7
    actual = torch.autograd.grad(output_loss(x, weight, label, 0.1).smoothed, (x, weight))
    expected = torch.autograd.grad(expected_loss(x, weight, label, 0.1).smoothed, (x, weight))
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    x = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    actual = output_loss(x, weight, torch.tensor([0, 0]), 0.1)
    actual.smoothed.backward()
    assert actual.smoothed.isfinite()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_objective_is_the_sum_over_real_labels(name: str, smoothing: float) -> None:
    """Compare with a loop over the positions of the full logits; padding affects neither the value nor the gradient."""
    model = build(name)
    whole = batch(name=name)
    actual = Objective(model, smoothing)(whole)
    actual.smoothed.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    scores = scores_of(model, whole)
    keep = whole.keep_BT
    total = torch.zeros(())
    nll = 0.0
    correct = 0
    for i, target in enumerate(whole.label_BT.tolist()):
        for t, label in enumerate(target):
            if keep is not None and not keep[i, t]:
                continue
            total = total + F.cross_entropy(scores[i, t], torch.tensor(label), label_smoothing=smoothing)
            nll -= scores[i, t].log_softmax(-1)[label].item()
            correct += int(scores[i, t].argmax() == label)
    total.backward()
    assert actual.smoothed.item() == pytest.approx(total.item(), rel=1e-5)
    assert actual.nll.item() == pytest.approx(nll, rel=1e-5)
    assert actual.correct.item() == correct
    assert gradients.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[n], p.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_a_batch_sum_to_the_whole(name: str) -> None:
    """Any split of a batch over steps or processes has the same sum and gradient as the whole batch."""
    objective = Objective(build(name), 0.1)

    def sums(*parts: slice) -> tuple[Tensor, list[Tensor]]:
        objective.zero_grad()
        values = []
        for part in parts:
            objective.segment_memory = None
            actual = objective(batch(part, name))
            actual.smoothed.backward()
            values.append(torch.stack([actual.smoothed.detach(), actual.nll, actual.correct]))
        return torch.stack(values).sum(0), [p.grad.clone() for p in objective.parameters() if p.grad is not None]

    whole = sums(slice(None))
    parts = sums(slice(0, 1), slice(1, 3))
    torch.testing.assert_close(whole[0], parts[0], atol=1e-4, rtol=1e-5)
    for a, b in zip(whole[1], parts[1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_equal_without_gradients(smoothing: float) -> None:
    objective = Objective(build(), smoothing)
    whole = batch()
    with torch.no_grad():
        without_gradients = objective(whole)
    for a, b in zip(without_gradients, objective(whole), strict=True):
        torch.testing.assert_close(a, b.detach(), atol=1e-4, rtol=1e-5)
    assert not without_gradients.smoothed.requires_grad


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_in_bf16_is_close_to_fp32(name: str) -> None:
    objective = Objective(build(name), 0.1)
    whole = batch(name=name)
    with torch.autocast("cpu", torch.bfloat16):
        bf16_loss = objective(whole)
    bf16_loss.smoothed.backward()
    assert bf16_loss.smoothed.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in objective.parameters() if p.grad is not None)
    objective.segment_memory = None
    assert bf16_loss.smoothed.item() == pytest.approx(objective(whole).smoothed.item(), rel=0.05)


def greedy(model: Model, example: Batch, length: int) -> Tensor:
    """Greedy outputs of the model, (B, length)."""
    state = model.encode(example.source_BS, example.source_keep_BS)
    tokens = example.input_BT[:, 0]
    outputs = []
    for _ in range(length):
        scores, state = model.step(tokens, state)
        tokens = scores.argmax(-1)
        outputs.append(tokens)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("name", BOTH)
def test_sampling_with_rate_one_reads_only_predictions(name: str) -> None:
    """The loss equals teacher forcing on the predictions, which is plain teacher forcing if they equal the target."""
    model = build(name)
    whole = batch()
    predictions = greedy(model, whole, whole.input_BT.shape[1])
    inputs = torch.cat((whole.input_BT[:, :1], predictions[:, :-1]), 1)
    for labels in (whole.label_BT, predictions):
        example = whole._replace(label_BT=labels, input_BT=torch.cat((whole.input_BT[:, :1], labels[:, :-1]), 1))
        actual = Objective(model, 0.1, scheduled_sampling=1.0).train()(example)
        forced = Objective(model, 0.1).train()(example._replace(input_BT=inputs))
        torch.testing.assert_close(actual.smoothed, forced.smoothed, atol=1e-4, rtol=1e-5)
    assert actual.correct == whole.tokens


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_sampling_is_off_outside_training(rate: float) -> None:
    model = build()
    whole = batch()
    actual, forced = (Objective(model, 0.1, scheduled_sampling=r).eval()(whole) for r in (rate, 0.0))
    assert torch.equal(actual.smoothed, forced.smoothed)


def test_sampling_with_rate_one_half_trains_every_parameter() -> None:
    model = build("rnn-luong")
    whole = batch()
    objective = Objective(model, 0.1, scheduled_sampling=0.5).train()
    torch.manual_seed(0)
    values = {round(objective(whole).smoothed.item(), 3) for _ in range(12)}
    assert len(values) > 2  # each draw mixes labels and predictions differently
    objective(whole).smoothed.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_language_model_continues_from_its_segment_memory() -> None:
    """With segment memory, the segments sum to the loss of the whole text; without it, to that of separate texts."""
    model = build("transformer-xl").eval()
    text = torch.randint(4, VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros(2, 0, dtype=torch.int64)

    def losses(objective: Objective, *lengths: int) -> Tensor:
        pairs = zip(text[:, :-1].split(lengths, 1), text[:, 1:].split(lengths, 1), strict=True)
        return torch.stack([objective(Batch(nothing, None, a, b, None, 0, 0)).nll for a, b in pairs])

    whole = losses(Objective(model), 12).sum()
    objective = Objective(model)
    torch.testing.assert_close(losses(objective, 4, 4, 4).sum(), whole, atol=1e-4, rtol=1e-5)
    assert objective.segment_memory is not None and objective.segment_memory[0].shape[1] == 12
    first = losses(Objective(model), 4, 4, 4)[0]
    assert losses(objective, 4, 4, 4)[0] != first  # the memory is not reset
    objective.segment_memory = None
    torch.testing.assert_close(losses(objective, 4, 4, 4)[0], first)


def test_model_without_an_output_layer_cannot_be_trained() -> None:
    model = Model(shrunk("bert-base", VOCAB, {"output": "none", "output_bias": False}))
    with pytest.raises(ValueError, match="without an output layer"):
        Objective(model)(batch(name="bert-base"))
