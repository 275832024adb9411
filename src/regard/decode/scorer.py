"""One model or several, as one distribution over the next token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar

import torch
from torch import Tensor

from regard.batch import TokenIds, pad
from regard.config import Config
from regard.decode.phrases import Phrases
from regard.errors import UserError
from regard.model import Model
from regard.nn.cache import State
from regard.nn.matmul import packed_matmuls, use_matmuls

States = tuple[State, ...]  # one per model


@dataclass(frozen=True)
class SearchInput:
    """One sentence to search an output for, all in ids."""

    sources: tuple[TokenIds, ...]  # per model, each ending in its end token; for a language model the prompt, not empty
    limit: int  # most output tokens, the end not counted
    minimum: int = 0
    prefix: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()  # tokens that may not follow the prefix directly: they would change its last character
    phrases: Phrases | None = None
    key: int = 0  # what its random numbers depend on, beside the seed
    open_end: bool = False  # at the limit it stops as it is, without an end token


class Scorer:
    """Next-token log-probabilities of an ensemble: the weighted mean of the models' own, made to sum to one again."""

    def __init__(
        self,
        models: Sequence[Model],
        weights: Sequence[float] = (),
        blocked: Sequence[int] = (),
        precision: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        self.models = list(models)
        self.config = config = check(self.models)
        if weights and len(weights) != len(models):
            raise UserError(f"weights: {len(weights)} given for {len(models)} runs; give one for each")
        total = math.fsum(weights)
        self.weights = [weight / total for weight in weights] or [1 / len(models)] * len(models)
        self.continues = config.encoder is None  # a language model: the output goes on where the source stops
        self.eos = config.ids.eos
        self.vocab = config.target_vocab
        self.device = next(self.models[0].parameters()).device
        self.matmuls = packed_matmuls(self.models, precision == "bf16")
        self.blocked = torch.tensor(sorted(set(blocked)), dtype=torch.long, device=self.device)

    def start(self, tasks: Sequence[SearchInput]) -> States:
        """The models' states before the first token, one row per task."""
        with use_matmuls(self.matmuls):
            return tuple(self._start(model, [task.sources[i] for task in tasks]) for i, model in enumerate(self.models))

    def _start(self, model: Model, sources: Sequence[TokenIds]) -> State:
        pad_id = model.config.ids.pad
        if not self.continues:
            return State.join([model.encode(*self._padded(part, pad_id)) for part in alike(sources)])
        # The last token is the first to be answered, and padding comes before.
        source_BS, keep_BS = self._padded([source[-2::-1] for source in sources], pad_id)
        source_BS, keep_BS = source_BS.flip(1), None if keep_BS is None else keep_BS.flip(1)
        return model.read(source_BS, State(()), keep_BS)[1] if source_BS.shape[1] else State(())

    def _padded(self, sources: Sequence[TokenIds], pad_id: int) -> tuple[Tensor, Tensor | None]:
        source_BS, keep_BS = pad(sources, pad_id)
        return source_BS.to(self.device), None if keep_BS is None else keep_BS.to(self.device)

    def first(self, tasks: Sequence[SearchInput], count: int = 1) -> list[Tensor]:
        """What each model reads first, `count` times for every task."""
        rows = []
        for i, model in enumerate(self.models):
            ids = [int(task.sources[i][-1]) if self.continues else model.config.start_id for task in tasks]
            rows.append(torch.tensor(ids, dtype=torch.long, device=self.device).repeat_interleave(count))
        return rows

    def step(self, tokens_N: Tensor | list[Tensor], states: States) -> tuple[Tensor, States]:
        """Feed one token to every row -> log-probabilities of the next, minus infinity where blocked."""
        tokens = tokens_N if isinstance(tokens_N, list) else [tokens_N] * len(states)
        with use_matmuls(self.matmuls):
            pairs = [model.step(t, state) for model, t, state in zip(self.models, tokens, states, strict=True)]
        logp_NV = self.join([logits_NV for logits_NV, _ in pairs])
        if isinstance(tokens_N, list) and bool(logp_NV.isnan().any()):  # said at the first step, once per search
            raise UserError(
                "the model gives scores that are not numbers; its weights are broken (was training stable?)"
            )
        if len(self.blocked):
            logp_NV.index_fill_(1, self.blocked, -math.inf)
        return logp_NV, tuple(state for _, state in pairs)

    def join(self, logits: Sequence[Tensor]) -> Tensor:
        """The models' scores (..., V) as log-probabilities."""
        if len(logits) == 1:
            return logits[0].float().log_softmax(-1)
        total = torch.zeros_like(logits[0], dtype=torch.float32)
        for weight, x in zip(self.weights, logits, strict=True):
            total.add_(x.float(), alpha=weight)  # what makes each sum to one cancels out in the next line
        return total.log_softmax(-1)


def select(states: States, rows: Tensor, sentences: Tensor | None = None) -> States:
    """Carry on these rows (and, if some left, these sentences) in every model."""
    return tuple(state.select(rows, sentences) for state in states)


def branching(states: States, sentences: int, device: torch.device) -> States:
    """The states of `sentences` rows for a search whose hypotheses part."""
    return tuple(state.with_prefix_tree(sentences, device) for state in states)


def time_to_leave(gone_A: Tensor, full_A: Tensor) -> bool:
    """Whether sentences that are done leave the batch now.

    Leaving one by one would copy what is remembered more often than it saves. But one that is `full`, having reached
    its limit, must not read on: it may have come to the end of the model's positions.
    """
    return int(gone_A.sum()) * 8 >= len(gone_A) or bool((gone_A & full_A).any())


def alike(sources: Sequence[TokenIds], enough: int = 512) -> Iterator[Sequence[TokenIds]]:
    """Parts, in order, in which lengths differ little: reading padding costs as much as reading.

    A part of `enough` tokens is worth a pass of its own. Sources that come sorted give the fewest.
    """
    start = longest = 0
    for i, source in enumerate(sources):
        if len(source) * 4 < longest * 3 and (i - start) * longest >= enough:
            yield sources[start:i]
            start, longest = i, 0
        longest = max(longest, len(source))
    yield sources[start:]


def check(models: Sequence[Model]) -> Config:
    """The config that models of one ensemble agree on as far as the output goes."""
    first = models[0].config
    for model in models:
        config = model.config
        if config.decoder is None:
            raise UserError("only a run with a decoder can generate or score a text; this one has an encoder alone")
        if (config.encoder is None) != (first.encoder is None):
            raise UserError("ensemble: a language model and a model that reads a source cannot answer together")
        if config.target_vocab != first.target_vocab or config.ids != first.ids:
            raise UserError(
                "ensemble: the runs differ in their target vocabulary"
                f" ({config.target_vocab} tokens against {first.target_vocab}); train them with the same target tokens"
            )
        if model.training:
            raise ValueError("a model in training mode drops out at random; call eval() first")
    return first


def best(value_NV: Tensor, count: int, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """The `count` highest of each row, in order, and where they are.

    A large vocabulary is looked at in two steps, chunk maxima first, which is several times faster than one `topk`: the
    highest `count` lie within the `count` chunks of the highest maxima.
    """
    rows, vocab = value_NV.shape
    whole = vocab // chunk
    if rows * vocab < 1 << 15 or vocab < 1024 or count > whole // 2:
        return _top(value_NV, count)
    chunks_NCW = value_NV[:, : whole * chunk].view(rows, whole, chunk)
    _, which_NK = _top(chunks_NCW.amax(-1), count)
    near_NKW = chunks_NCW.gather(1, which_NK.unsqueeze(-1).expand(-1, -1, chunk))
    places_NKW = which_NK.unsqueeze(-1) * chunk + torch.arange(chunk, device=value_NV.device)
    near, places = near_NKW.flatten(1), places_NKW.flatten(1)
    if whole * chunk < vocab:
        rest = torch.arange(whole * chunk, vocab, device=value_NV.device).expand(rows, -1)
        near, places = torch.cat((near, value_NV[:, whole * chunk :]), 1), torch.cat((places, rest), 1)
    value_NK, index_NK = _top(near, count)
    return value_NK, places.gather(1, index_NK)


def _top(value_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count == 1:  # the first of equals, which topk does not promise
        value_N, index_N = value_NV.max(-1)
        return value_N.unsqueeze(1), index_N.unsqueeze(1)
    value_NK, index_NK = value_NV.topk(count)
    return value_NK, index_NK


T = TypeVar("T")


def windows(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`."""
    iterator = iter(items)
    while window := list(islice(iterator, size)):
        yield window


def by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first: items times longest stay within the budget."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
