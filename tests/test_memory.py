"""Segment memory: a copying task that cannot be solved without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.batch import Batch
from regard.config import Config, parse
from regard.loss import Objective
from regard.model import Model

BLOCK = 12
LETTERS = 8
BATCH = 16


def stream(blocks: int, seed: int) -> Tensor:
    """Random blocks, each twice. A segment is one block, so a repeated block is in the previous segment."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 4 + LETTERS, (BATCH, blocks, 1, BLOCK), generator=generator)
    return ids.expand(-1, -1, 2, -1).flatten(1)


def segments(ids_BT: Tensor) -> list[Tensor]:
    return [ids_BT[:, start : start + BLOCK + 1] for start in range(0, ids_BT.shape[1] - BLOCK, BLOCK)]


def train(with_memory: bool) -> Model:
    torch.manual_seed(0)
    stack = {"layers": 1, "width": 32, "heads": 2, "ff": 64, "dropout": 0.0, "bias": "ff"}
    decoder = stack | {"position": "relative", "memory": 2 * BLOCK}
    vocab = 4 + LETTERS
    model = Model(parse(Config, {"source_vocab": vocab, "target_vocab": vocab, "decoder": decoder}, "test"))
    objective = Objective(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(18):
        objective.segment_memory = None
        for segment_BT in segments(stream(13, epoch)):
            if not with_memory:
                objective.segment_memory = None
            batch = Batch(segment_BT[:, :0], None, segment_BT[:, :-1], segment_BT[:, 1:], None, 1, 1)
            optimizer.zero_grad()
            (objective(batch).smoothed / batch.label_BT.numel()).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def copy_accuracy(model: Model, with_memory: bool) -> float:
    """The accuracy on repeated tokens, without the last of a segment, which predicts a new block."""
    segment_memory = None
    accuracies = []
    for number, segment_BT in enumerate(segments(stream(8, 10**6))):
        x_BTD, segment_memory = model.read_segment(segment_BT[:, :-1], segment_memory if with_memory else None)
        if number % 2:
            accuracies.append((model.predict(x_BTD).argmax(-1) == segment_BT[:, 1:])[:, :-1].float().mean())
    return float(torch.stack(accuracies).mean())


@pytest.fixture(scope="module")
def model_with_memory() -> Model:
    return train(with_memory=True)


def test_model_copies_only_with_its_memory(model_with_memory):
    assert copy_accuracy(model_with_memory, with_memory=True) > 0.95
    assert copy_accuracy(model_with_memory, with_memory=False) < 0.3


def test_memory_may_be_longer_than_in_training(model_with_memory):
    decoder = model_with_memory.decoder
    trained_memory = decoder.memory
    decoder.memory = 4 * BLOCK
    try:
        assert copy_accuracy(model_with_memory, with_memory=True) > 0.9
    finally:
        decoder.memory = trained_memory


def test_copying_is_not_learned_without_memory():
    assert copy_accuracy(train(with_memory=False), with_memory=False) < 0.3
