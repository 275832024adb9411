"""Forced decoding: the log-probabilities of targets, and of the tokens of plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.batch import Batch, TokenIds, by_length, collate, in_parts, pad
from regard.data.objectives import SpanCorruption, TextObjective, TokenMasking, lm_batch
from regard.data.order import Indices
from regard.data.plain_text import Stream
from regard.decode.ensemble import Scorer, check_numbers
from regard.decode.search import top_tokens
from regard.errors import UserError
from regard.model import Model
from regard.nn.attention import Relative
from regard.nn.primitives import use_matmuls
from regard.nn.transformer import SegmentMemory, Transformer
from regard.recipe import Train
from regard.run import RECIPE, Run, saved_recipe

Numbers = NDArray[np.float64]
Part = tuple[NDArray[np.integer[Any]], Numbers, Numbers]  # indices of tokens, with nll and correct of each
MAX_LOGITS = 1 << 22  # in memory at once
TEXT_BATCH = 4096  # tokens of plain text in a batch
DEFAULT_CONTEXT = 1024  # for a model that has no position table and was not trained on plain text


@torch.inference_mode()
def force(
    scorer: Scorer, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds], batch_tokens: int = 8192
) -> list[tuple[float, ...] | None]:
    """The log-probability of each token of every target (with end token); None if a pair does not fit into memory."""

    def scores(batch: Sequence[int]) -> list[NDArray[np.float64]]:
        parts = _forced(scorer, [sources[i] for i in batch], [targets[i] for i in batch])
        scores_N = torch.cat([logp_NV.gather(1, label_N.unsqueeze(1)).squeeze(1) for logp_NV, label_N in parts])
        check_numbers(scores_N)
        ends = np.cumsum([len(targets[i]) for i in batch])[:-1]
        return np.split(scores_N.double().numpy(force=True), ends)

    results: list[tuple[float, ...] | None] = [None] * len(targets)
    for batch in _batches(scorer, sources, targets, batch_tokens):
        for rows, part in in_parts(lambda rows: scores(batch[rows]), len(batch)):  # noqa: B023
            for i, row in zip(batch[rows], part or (), strict=part is not None):
                results[i] = tuple(row.tolist())
    return results


@torch.inference_mode()
def force_top(
    scorer: Scorer, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds], count: int, batch_tokens: int
) -> list[list[list[tuple[int, float]]]]:
    """The `count` most probable tokens, with log-probabilities, at the position of each token of every target."""
    results: list[list[list[tuple[int, float]]]] = [[] for _ in targets]
    for batch in _batches(scorer, sources, targets, batch_tokens):
        parts = _forced(scorer, [sources[i] for i in batch], [targets[i] for i in batch])
        rows = (row for logp_NV, _ in parts for row in top_tokens(scorer.block(logp_NV), count))
        for i in batch:
            results[i] = list(islice(rows, len(targets[i])))
    return results


def _batches(
    scorer: Scorer, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds], batch_tokens: int
) -> Iterator[list[int]]:
    join = sum if scorer.continues else max
    lengths = [join((len(target), max(map(len, ids)))) for ids, target in zip(sources, targets, strict=True)]
    return by_length(lengths, batch_tokens)


def _forced(
    scorer: Scorer, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The log-probabilities (N, V) of a batch in parts, with the target tokens (N,)."""
    hidden = []
    for m, model in enumerate(scorer.models):
        with use_matmuls(scorer.matmuls):
            hidden.append(_hidden(model, [ids[m] for ids in sources], targets))
    label_N = torch.from_numpy(np.concatenate([np.asarray(label, dtype=np.int64) for label in targets]))
    label_N = label_N.to(scorer.device)
    rows = max(1, MAX_LOGITS // scorer.vocab)
    for start in range(0, len(label_N), rows):
        part = slice(start, start + rows)
        logits = [model.predict(x_ND[part]) for model, x_ND in zip(scorer.models, hidden, strict=True)]
        yield scorer.join(logits), label_N[part]


def _hidden(model: Model, sources: Sequence[TokenIds], targets: Sequence[TokenIds]) -> Tensor:
    """The vectors (N, D) that predict the tokens of all targets, which are concatenated."""
    if not model.decoder_only:
        batch = collate(sources, targets, model.config).to(model.device)
        x_BTD = model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
        return x_BTD.flatten(0, 1) if batch.keep_BT is None else x_BTD[batch.keep_BT]
    rows = [[*source, *target[:-1]] for source, target in zip(sources, targets, strict=True)]
    x_BTD = model.hidden(*pad(rows, model.config.ids.pad, model.device))
    pairs = zip(x_BTD, sources, rows, strict=True)
    return torch.cat([x_TD[len(source) - 1 : len(row)] for x_TD, source, row in pairs])


class TokenScores(NamedTuple):
    """Per token of a plain text except the first: negative log-probability, whether correct, whether predicted.

    The sentinel before a span counts towards its first token, the closing sentinel and the end token to the last one.
    """

    nll: Numbers
    correct: Numbers
    predicted: Numbers


@torch.inference_mode()
def score_text(run: Run, ids: NDArray[np.uint32], context: int, memory: int | None = None) -> TokenScores:
    """Score a plain text with the objective of the run's task, with `memory` tokens of segment memory if set."""
    scores = TokenScores(*(np.zeros(len(ids) - 1) for _ in TokenScores._fields))
    for index, nll, correct in TEXT_SCORERS[run.task.name](run, ids, context, memory):
        for sums, values in zip(scores, (nll, correct, np.ones(len(index))), strict=True):
            np.add.at(sums, index, values)
    return scores


def scoring_context(run: Run, context: int | None = None) -> int:
    """Tokens per window: `context`, or as in training, or the positions of the model."""
    positions = run.config.top.max_positions
    if context is not None:
        if context < 2 or (positions is not None and context > positions):
            bound = "at least 2" if positions is None else f"from 2 to {positions}, the positions of the model"
            raise UserError(f"context: {context} is out of range; allowed: {bound}")
        return context
    return _train_settings(run).context or min(positions or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def _train_settings(run: Run) -> Train:
    """The training settings of a run; the defaults for a converted run, which has no recipe."""
    return saved_recipe(run.path).train if (run.path / RECIPE).is_file() else Train()


def _score_lm(run: Run, ids: NDArray[np.uint32], context: int, memory: int | None) -> Iterator[Part]:
    """Score tokens in overlapping windows, each after at least half a window, or by segments."""
    if run.config.has_memory:
        yield from _score_segments(run.model, ids, context, memory)
        return
    last = len(ids) - 1
    context = min(context, last)
    starts = np.unique(np.minimum(np.arange(0, last, max(1, context // 2)), last - context))
    rows = max(1, TEXT_BATCH // context)
    for first in range(0, len(starts), rows):
        index_BW = starts[first : first + rows, None] + np.arange(context + 1)
        nll_BT, correct_BT = _score_batch(run.model, lm_batch(ids[index_BW].astype(np.int64)))
        for row, index_W in enumerate(index_BW):  # only tokens that the previous window has not scored
            window = first + row
            new = context - int(starts[window] - starts[window - 1]) if window else 0
            yield index_W[new:-1], nll_BT[row, new:], correct_BT[row, new:]


def _score_segments(model: Model, ids: NDArray[np.uint32], context: int, memory: int | None) -> Iterator[Part]:
    decoder = model.decoder
    assert isinstance(decoder, Transformer)
    last = len(ids) - 1
    segment_memory: SegmentMemory | None = None
    with _use_memory(decoder, decoder.memory if memory is None else memory, context):
        for start in range(0, last, context):
            end = min(start + context, last)
            tokens = torch.from_numpy(ids[start : end + 1].astype(np.int64)).to(model.device)
            x_1TD, segment_memory = model.read_segment(tokens[None, :-1], segment_memory)
            nll_1T, correct_1T = _compare(model, x_1TD, tokens[None, 1:])
            yield np.arange(start, end), nll_1T[0], correct_1T[0]


@contextmanager
def _use_memory(decoder: Transformer, memory: int, context: int) -> Iterator[None]:
    """Set the length of the segment memory of a decoder while the context is open.

    If it is longer than in training, attention is limited to the longest distance in training, and relative distances
    are clipped to the longest one that all tokens of a segment had in training.
    """
    relatives = [module for module in decoder.modules() if isinstance(module, Relative)]
    training_memory = decoder.memory
    window = decoder.window
    reaches = [relative.reach for relative in relatives]
    try:
        decoder.memory = memory
        if memory > training_memory:
            farthest = training_memory + context - 1
            decoder.window = farthest if window is None else min(window, farthest)
            for relative in relatives:
                relative.reach = min(relative.reach or training_memory, training_memory)
        yield
    finally:
        decoder.memory, decoder.window = training_memory, window
        for relative, reach in zip(relatives, reaches, strict=True):
            relative.reach = reach


def _score_masked(run: Run, ids: NDArray[np.uint32], context: int, memory: int | None) -> Iterator[Part]:
    """Mask and score some tokens, the same ones every time."""
    masking = TokenMasking(Stream(ids[1:], 0), run.codec, run.config, Train(context=context))
    nll, correct, masked = (np.zeros(len(ids) - 1, dtype) for dtype in (float, float, bool))
    for starts, _, batch in _text_batches(masking, len(ids) - 1, context):
        assert batch.keep_BT is not None
        nll_BS, correct_BS = _score_batch(run.model, batch)
        for row, (start, keep) in enumerate(zip(starts, batch.keep_BT.numpy(), strict=True)):
            index = start + np.flatnonzero(keep) - masking.text_offset
            # The last two windows overlap; a token that both mask counts once, as scored in the last one.
            nll[index], correct[index], masked[index] = nll_BS[row, keep], correct_BS[row, keep], True
    (index,) = masked.nonzero()
    yield index, nll[index], correct[index]


def _score_spans(run: Run, ids: NDArray[np.uint32], context: int, memory: int | None) -> Iterator[Part]:
    """Mask and score some spans, as in training, the same ones every time."""
    train = _train_settings(run).model_copy(update={"context": context})
    corruption = SpanCorruption(Stream(ids[1:], 0), run.codec, run.config, train)
    for starts, key, batch in _text_batches(corruption, len(ids) - 1, context):
        nll_BT, correct_BT = _score_batch(run.model, batch)
        for row, (start, spans) in enumerate(zip(starts, corruption.spans(len(starts), key), strict=True)):
            index = [i for begin, end in spans for i in (begin, *range(begin, end))]
            index += 2 * index[-1:]  # the closing sentinel, and the end token
            yield start + np.asarray(index), nll_BT[row, : len(index)], correct_BT[row, : len(index)]


TEXT_SCORERS = {"lm": _score_lm, "masked": _score_masked, "span": _score_spans}  # by task


def _text_batches(
    objective: TextObjective, tokens: int, context: int
) -> Iterator[tuple[Indices, tuple[int, ...], Batch]]:
    """Batches of windows that cover a text, as (starts of the windows, key of the random choices, batch)."""
    windows = objective.windows
    starts = np.unique(np.minimum(np.arange(0, tokens, windows.length), windows.last))
    rows = max(1, TEXT_BATCH // context)
    for first in range(0, len(starts), rows):
        part = starts[first : first + rows]
        key = (0, 0, int(part[0]))
        batch = objective.batch(part, key)
        yield part, key, batch.part(slice(None), batch.tokens)


def _score_batch(model: Model, batch: Batch) -> tuple[Numbers, Numbers]:
    batch = batch.to(model.device)
    return _compare(model, model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT), batch.label_BT)


def _compare(model: Model, x_BTD: Tensor, label_BT: Tensor) -> tuple[Numbers, Numbers]:
    """Negative log-probabilities of labels, and whether each label is the most probable token."""
    rows = max(1, MAX_LOGITS // max(model.config.source_vocab, model.config.target_vocab))
    nll = []
    correct = []
    for x_ND, label_N in zip(x_BTD.flatten(0, 1).split(rows), label_BT.flatten().split(rows), strict=True):
        logits_NV = model.predict(x_ND).float()
        chosen_N = logits_NV.gather(1, label_N.unsqueeze(1)).squeeze(1)
        nll.append(logits_NV.logsumexp(-1) - chosen_N)
        check_numbers(nll[-1])
        correct.append(chosen_N >= logits_NV.amax(-1))
    nll_BT, correct_BT = (torch.cat(x).double().view(label_BT.shape).numpy(force=True) for x in (nll, correct))
    return nll_BT, correct_BT
