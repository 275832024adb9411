"""How probable plain text is to a model: every symbol of it, or hidden ones."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.config import Stack
from regard.data.stream import Stream
from regard.errors import UserError
from regard.model import Model
from regard.nn.transformer import Carried, Transformer
from regard.run import Run
from regard.settings import Train
from regard.train.record import RECIPE, saved_recipe
from regard.train.text_feed import Masks

LOGITS = 1 << 22  # held at once
ROWS = 4096  # symbols read at once
CONTEXT = 1024  # where nothing else says how much a model reads at a time

Numbers = NDArray[np.float64]


class Judged(NamedTuple):
    """Per symbol: its negative log-probability, whether it scored highest, and whether it was asked for at all."""

    nll: Numbers
    right: Numbers
    asked: Numbers


def context_of(run: Run, given: int | None = None) -> int:
    """How many symbols to read at a time: as asked for, as in training, or as many as the model has positions for."""
    stack = run.config.decoder or run.config.encoder
    assert stack is not None
    most = _positions(stack)
    if given is not None:
        if given < 2 or (most is not None and given > most):
            room = "at least 2" if most is None else f"from 2 to {most}, the positions of the model"
            raise UserError(f"--context: {given} is out of range; it goes {room}")
        return given
    trained = saved_recipe(run.path).train.context if (Path(run.path) / RECIPE).is_file() else None
    return trained or min(most or CONTEXT, CONTEXT)


def _positions(stack: Stack) -> int | None:
    if stack.axial is not None:
        return stack.axial.rows * stack.axial.columns
    return stack.max_length if stack.position == "learned" else None


def score_text(run: Run, ids: NDArray[np.uint32], context: int, memory: int | None = None) -> Judged:
    """Score every symbol but the first, each seeing at least half a window of `context` symbols before it.

    A model that reads on is given the text segment by segment; it remembers `memory` symbols, by default as many as it
    was trained with.
    """
    if run.config.reads_on:
        return _score_segments(run.model, ids, context, memory)
    if memory is not None:
        raise UserError(f"--memory: {run.path} does not remember earlier segments (decoder.memory is 0)")
    last = len(ids) - 1
    context = min(context, last)
    starts = np.unique(np.minimum(np.arange(0, last, max(1, context // 2)), last - context))
    judged = Judged(*(np.zeros(last) for _ in Judged._fields))
    rows = max(1, ROWS // context)
    for at in range(0, len(starts), rows):
        part = starts[at : at + rows]
        places = part[:, None] + np.arange(context)  # of inputs; what follows each is the label
        input_BT, label_BT = (torch.from_numpy(ids[places + shift].astype(np.int64)) for shift in (0, 1))
        source_B0 = input_BT.new_empty((len(part), 0))
        device = next(run.model.parameters()).device
        with torch.inference_mode():
            x_BTD = run.model.hidden(source_B0.to(device), None, input_BT.to(device))
            nll_BT, right_BT = _compare(run.model, x_BTD, label_BT.to(device))
        for row in range(len(part)):  # of each window, what the one before it has not reached
            fresh = context - int(starts[at + row] - starts[at + row - 1]) if at + row else 0
            judged.nll[places[row, fresh:]] = nll_BT[row, fresh:]
            judged.right[places[row, fresh:]] = right_BT[row, fresh:]
    judged.asked[:] = 1
    return judged


def _score_segments(model: Model, ids: NDArray[np.uint32], context: int, memory: int | None) -> Judged:
    decoder = model.decoder
    assert isinstance(decoder, Transformer)
    trained, last = decoder.memory, len(ids) - 1
    judged = Judged(*(np.zeros(last) for _ in Judged._fields))
    carried: Carried | None = None
    device = next(model.parameters()).device
    try:
        decoder.memory = trained if memory is None else memory
        with torch.inference_mode():
            for start in range(0, last, context):
                end = min(start + context, last)
                tokens = torch.from_numpy(ids[start : end + 1].astype(np.int64)).to(device)
                x_1TD, carried = model.read_segment(tokens[None, :-1], carried)
                nll, right = _compare(model, x_1TD, tokens[None, 1:])
                judged.nll[start:end], judged.right[start:end] = nll[0], right[0]
    finally:
        decoder.memory = trained
    judged.asked[:] = 1
    return judged


def score_hidden(run: Run, ids: NDArray[np.uint32], context: int) -> Judged:
    """Hide some symbols, the same ones every time, and score those."""
    text = ids[1:]
    stream = Stream.of(text, 0)
    masks = Masks(stream, run.codec.source, run.config, Train(context=context))
    judged = Judged(*(np.zeros(len(text)) for _ in Judged._fields))
    starts = np.unique(np.minimum(np.arange(0, len(text), masks.windows.length), masks.windows.last))
    rows = max(1, ROWS // context)
    device = next(run.model.parameters()).device
    for at in range(0, len(starts), rows):
        part = starts[at : at + rows]
        whole = masks.whole(part, (0, 0, int(part[0])))
        batch = whole.part(slice(None), whole.tokens).to(device)
        assert batch.keep_BT is not None
        with torch.inference_mode():
            x_BSD = run.model.hidden(batch.source_BS, None)
            nll_BS, right_BS = _compare(run.model, x_BSD, batch.label_BT)
        for row, start in enumerate(part):
            keep = batch.keep_BT[row].cpu().numpy()
            places = start + np.flatnonzero(keep) - masks.before
            judged.nll[places], judged.right[places] = nll_BS[row, keep], right_BS[row, keep]
            judged.asked[places] = 1
    return judged


def _compare(model: Model, x_BTD: Tensor, label_BT: Tensor) -> tuple[Numbers, Numbers]:
    """Negative log-probabilities of labels, and whether each scored highest, a few logits at a time."""
    x_ND, label_N = x_BTD.flatten(0, 1), label_BT.flatten()
    rows = max(1, LOGITS // max(model.config.source_vocab, model.config.target_vocab))
    nll, right = [], []
    for x, label in zip(x_ND.split(rows), label_N.split(rows), strict=True):
        logits = model.predict(x).float()
        chosen = logits.gather(1, label.unsqueeze(1)).squeeze(1)
        nll.append(logits.logsumexp(-1) - chosen)
        right.append(chosen >= logits.amax(-1))
    shape = tuple(label_BT.shape)
    return (
        torch.cat(nll).double().cpu().numpy().reshape(shape),
        torch.cat(right).double().cpu().numpy().reshape(shape),
    )
