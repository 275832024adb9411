"""How probable plain text is to a model: every token of it, or hidden ones, one by one or in spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.data.objectives import SpanCorruption, TokenMasking, Windows
from regard.data.order import Indices
from regard.data.plain import Stream
from regard.errors import UserError
from regard.model import Model
from regard.nn.attention import Relative
from regard.nn.transformer import SegmentMemory, Transformer
from regard.recipe import Recipe, Train
from regard.run import RECIPE, Run, saved_recipe

LOGITS = 1 << 22  # held at once
ROWS = 4096  # tokens read at once
CONTEXT = 1024  # where nothing else says how much a model reads at a time

Numbers = NDArray[np.float64]


class TokenScores(NamedTuple):
    """Per token: its negative log-probability, whether it scored highest, and whether it was asked for at all.

    Where masked spans are said, the first of each counts the token that stands for it too, and the last of all
    what closes the answer.
    """

    nll: Numbers
    right: Numbers
    asked: Numbers


def context_of(run: Run, given: int | None = None) -> int:
    """How many tokens to read at a time: as asked for, as in training, or as many as the model has positions for."""
    most = run.config.top.max_positions
    if given is not None:
        if given < 2 or (most is not None and given > most):
            room = "at least 2" if most is None else f"from 2 to {most}, the positions of the model"
            raise UserError(f"--context: {given} is out of range; it goes {room}")
        return given
    recipe = recipe_of(run)
    trained = None if recipe is None else recipe.train.context
    return trained or min(most or CONTEXT, CONTEXT)


def recipe_of(run: Run) -> Recipe | None:
    """How a run was trained; one that was not trained here does not say."""
    return saved_recipe(run.path) if (Path(run.path) / RECIPE).is_file() else None


def score_text(run: Run, ids: NDArray[np.uint32], context: int, memory: int | None = None) -> TokenScores:
    """Score every token but the first, each seeing at least half a window of `context` tokens before it.

    A model that reads on is given the text segment by segment; it remembers `memory` tokens, by default as many as it
    was trained with.
    """
    if run.config.has_memory:
        return _score_segments(run.model, ids, context, memory)
    last = len(ids) - 1
    context = min(context, last)
    starts = np.unique(np.minimum(np.arange(0, last, max(1, context // 2)), last - context))
    judged = TokenScores(*(np.zeros(last) for _ in TokenScores._fields))
    rows = max(1, ROWS // context)
    for at in range(0, len(starts), rows):
        part = starts[at : at + rows]
        places = part[:, None] + np.arange(context)  # of inputs; what follows each is the label
        input_BT, label_BT = (torch.from_numpy(ids[places + shift].astype(np.int64)) for shift in (0, 1))
        source_B0 = input_BT.new_empty((len(part), 0))
        device = run.model.device
        with torch.inference_mode():
            x_BTD = run.model.hidden(source_B0.to(device), None, input_BT.to(device))
            nll_BT, right_BT = _compare(run.model, x_BTD, label_BT.to(device))
        for row in range(len(part)):  # of each window, what the one before it has not reached
            fresh = context - int(starts[at + row] - starts[at + row - 1]) if at + row else 0
            judged.nll[places[row, fresh:]] = nll_BT[row, fresh:]
            judged.right[places[row, fresh:]] = right_BT[row, fresh:]
    judged.asked[:] = 1
    return judged


def _score_segments(model: Model, ids: NDArray[np.uint32], context: int, memory: int | None) -> TokenScores:
    decoder = model.decoder
    assert isinstance(decoder, Transformer)
    last = len(ids) - 1
    judged = TokenScores(*(np.zeros(last) for _ in TokenScores._fields))
    carried: SegmentMemory | None = None
    device = model.device
    with torch.inference_mode(), _remembering(decoder, decoder.memory if memory is None else memory, context):
        for start in range(0, last, context):
            end = min(start + context, last)
            tokens = torch.from_numpy(ids[start : end + 1].astype(np.int64)).to(device)
            x_1TD, carried = model.read_segment(tokens[None, :-1], carried)
            nll, right = _compare(model, x_1TD, tokens[None, 1:])
            judged.nll[start:end], judged.right[start:end] = nll[0], right[0]
    judged.asked[:] = 1
    return judged


@contextmanager
def _remembering(decoder: Transformer, memory: int, context: int) -> Iterator[None]:
    """Let a model remember so many tokens for a while.

    If these are more than in training, every token of a segment sees as far back as its last one did, and not farther:
    each further key would take its share of the attention without the model having learned what to do with it. Among
    those, distances that only the later tokens of a segment met in training count as the longest that all of them did.
    """
    relatives = [module for module in decoder.modules() if isinstance(module, Relative)]
    trained, window, reaches = decoder.memory, decoder.window, [relative.reach for relative in relatives]
    try:
        decoder.memory = memory
        if memory > trained:
            farthest = trained + context - 1
            decoder.window = farthest if window is None else min(window, farthest)
            for relative in relatives:
                relative.reach = min(relative.reach or trained, trained)
        yield
    finally:
        decoder.memory, decoder.window = trained, window
        for relative, reach in zip(relatives, reaches, strict=True):
            relative.reach = reach


def score_masked(run: Run, ids: NDArray[np.uint32], context: int) -> TokenScores:
    """Hide some tokens, the same ones every time, and score those."""
    text = ids[1:]
    stream = Stream.of(text, 0)
    masks = TokenMasking(stream, run.codec, run.config, Train(context=context))
    judged = TokenScores(*(np.zeros(len(text)) for _ in TokenScores._fields))
    device = run.model.device
    for part in _parts(masks.windows, len(text), context):
        whole = masks.batch(part, (0, 0, int(part[0])))
        batch = whole.part(slice(None), whole.tokens).to(device)
        assert batch.keep_BT is not None
        with torch.inference_mode():
            x_BSD = run.model.hidden(batch.source_BS, None)
            nll_BS, right_BS = _compare(run.model, x_BSD, batch.label_BT)
        for row, start in enumerate(part):
            keep = batch.keep_BT[row].cpu().numpy()
            places = start + np.flatnonzero(keep) - masks.text_offset
            judged.nll[places], judged.right[places] = nll_BS[row, keep], right_BS[row, keep]
            judged.asked[places] = 1
    return judged


def score_spans(run: Run, ids: NDArray[np.uint32], context: int) -> TokenScores:
    """Hide some spans as in training, the same ones every time, and score what is to be said about them."""
    recipe = recipe_of(run)
    text = ids[1:]
    train = (Train() if recipe is None else recipe.train).model_copy(update={"context": context})
    spans = SpanCorruption(Stream.of(text, 0), run.codec, run.config, train)
    judged = TokenScores(*(np.zeros(len(text)) for _ in TokenScores._fields))
    device = run.model.device
    for part in _parts(spans.windows, len(text), context):
        key = (0, 0, int(part[0]))
        whole = spans.batch(part, key)
        batch = whole.part(slice(None), whole.tokens).to(device)
        with torch.inference_mode():
            x_BTD = run.model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
            nll_BT, right_BT = _compare(run.model, x_BTD, batch.label_BT)
        for row, (start, hidden) in enumerate(zip(part, spans.spans(len(part), key), strict=True)):
            places = [place for begin, end in hidden for place in (begin, *range(begin, end))]
            places += 2 * places[-1:]  # the token that closes the answer, and the end
            for numbers, found in zip(judged, (nll_BT[row], right_BT[row], np.ones(len(places))), strict=True):
                np.add.at(numbers, start + np.asarray(places), found[: len(places)])
    return judged


def _parts(windows: Windows, symbols: int, context: int) -> Iterator[Indices]:
    """Where windows begin that together cover a text, as many as are read at once."""
    starts = np.unique(np.minimum(np.arange(0, symbols, windows.length), windows.last))
    rows = max(1, ROWS // context)
    for at in range(0, len(starts), rows):
        yield starts[at : at + rows]


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
