"""The scorer: one model or an ensemble as one distribution over the next token, with their decoding states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from regard.batch import TokenIds, pad
from regard.decode.constraints import SearchInput
from regard.errors import UserError, plural
from regard.model import Model
from regard.nn.cache import State
from regard.nn.primitives import Matmuls, PackedWeights, use_matmuls

States = tuple[State, ...]  # one per model


class Scorer:
    """Next-token log-probabilities of an ensemble: the weighted mean of those of its models, normalised again."""

    def __init__(
        self,
        models: Sequence[Model],
        weights: Sequence[float] = (),
        blocked: Sequence[int] = (),
        precision: str = "fp32",
        packed: Sequence[PackedWeights] = (),
    ) -> None:
        """`packed` are products that the owners of the models keep, one for each."""
        self.models = list(models)
        if any(model.training for model in models):
            raise ValueError("a model in training mode drops out at random; call eval() first")
        if weights and len(weights) != len(models):
            raise UserError(f"weights: {len(weights)} given for {plural(len(models), 'run')}; give one for each")
        total = math.fsum(weights)
        self.weights = [weight / total for weight in weights] or [1 / len(models)] * len(models)
        config = self.models[0].config
        self.continues = self.models[0].decoder_only  # the output goes on where the source stops
        self.eos = config.ids.eos
        self.vocab = config.target_vocab
        self.device = self.models[0].device
        self.matmuls: Matmuls = {}
        for model, kept in zip(self.models, packed or [PackedWeights() for _ in models], strict=True):
            self.matmuls = {**self.matmuls, **kept.matmuls(model, precision == "bf16")}
        self.blocked = torch.tensor(sorted(set(blocked)), dtype=torch.long, device=self.device)
        self.before_step: Callable[[], None] | None = None  # called before every step; what it raises ends the search

    def start(self, inputs: Sequence[SearchInput]) -> States:
        """The models' states before the first token, one row per input."""
        with use_matmuls(self.matmuls):
            return tuple(self._start(model, [x.sources[i] for x in inputs]) for i, model in enumerate(self.models))

    def _start(self, model: Model, sources: Sequence[TokenIds]) -> State:
        pad_id = model.config.ids.pad
        if not self.continues:
            parts = similar_lengths(sources)
            return State.join([model.encode(*pad(part, pad_id, self.device)) for part in parts])
        # The last token of a prompt is fed by the first step. Padding comes before the prompt.
        source_BS, keep_BS = pad([source[-2::-1] for source in sources], pad_id, self.device)
        source_BS, keep_BS = source_BS.flip(1), None if keep_BS is None else keep_BS.flip(1)
        return model.read(source_BS, State(()), keep_BS)[1] if source_BS.shape[1] else State(())

    def first(self, inputs: Sequence[SearchInput], count: int = 1) -> list[Tensor]:
        """The token that each model is fed first, in `count` rows for every input."""
        rows = []
        for i, model in enumerate(self.models):
            ids = [int(x.sources[i][-1]) if self.continues else model.config.start_id for x in inputs]
            rows.append(torch.tensor(ids, dtype=torch.long, device=self.device).repeat_interleave(count))
        return rows

    def step(self, tokens_N: Tensor | list[Tensor], states: States) -> tuple[Tensor, States]:
        """Feed one token to every row -> log-probabilities of the next (N, V), minus infinity where blocked."""
        if self.before_step is not None:
            self.before_step()
        tokens = tokens_N if isinstance(tokens_N, list) else [tokens_N] * len(states)
        with use_matmuls(self.matmuls):
            pairs = [model.step(t, state) for model, t, state in zip(self.models, tokens, states, strict=True)]
        logp_NV = self.join([logits_NV for logits_NV, _ in pairs])
        if isinstance(tokens_N, list):  # at the first step, once per search
            check_numbers(logp_NV)
        return self.block(logp_NV), tuple(state for _, state in pairs)

    def block(self, logp_NV: Tensor) -> Tensor:
        """Log-probabilities, changed in place, with minus infinity where a token is never produced."""
        return logp_NV.index_fill_(1, self.blocked, -math.inf) if len(self.blocked) else logp_NV

    def join(self, logits: Sequence[Tensor]) -> Tensor:
        """The models' logits (..., V) as log-probabilities of the ensemble."""
        if len(logits) == 1:
            return logits[0].float().log_softmax(-1)
        total = torch.zeros_like(logits[0], dtype=torch.float32)
        for weight, x in zip(self.weights, logits, strict=True):
            total.add_(x.float(), alpha=weight)  # the normaliser of each model cancels out in the next line
        return total.log_softmax(-1)


def check_numbers(scores: Tensor) -> None:
    """Refuse scores of a model whose weights are broken."""
    if bool(scores.isnan().any()):
        raise UserError("the model gives scores that are not numbers; its weights are broken (was training stable?)")


def select(states: States, rows: Tensor, sentences: Tensor | None = None) -> States:
    """Carry on these rows (and, if some left, these sentences) in every model."""
    return tuple(state.select(rows, sentences) for state in states)


def should_leave(done_A: Tensor, full_A: Tensor) -> bool:
    """Whether finished sentences leave the batch now.

    Leaving one by one would copy the state more often than it saves. But a sentence that is `full`, having reached its
    limit, must not be fed further: it may be at the end of the model's positions.
    """
    return int(done_A.sum()) * 8 >= len(done_A) or bool((done_A & full_A).any())


def similar_lengths(sources: Sequence[TokenIds], enough: int = 512) -> Iterator[Sequence[TokenIds]]:
    """Parts, in order, in which lengths differ little: encoding padding costs as much as encoding tokens.

    A part of `enough` tokens is worth a forward pass of its own. Sorted sources give the fewest parts.
    """
    start = longest = 0
    for i, source in enumerate(sources):
        if len(source) * 4 < longest * 3 and (i - start) * longest >= enough:
            yield sources[start:i]
            start, longest = i, 0
        longest = max(longest, len(source))
    yield sources[start:]


def best(value_NV: Tensor, count: int, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """The `count` highest values of each row, in order, and their indices.

    A large vocabulary is searched in two steps, chunk maxima first, which is several times faster than one `topk`: the
    highest `count` lie within the `count` chunks of the highest maxima.
    """
    rows, vocab = value_NV.shape
    chunks = vocab // chunk
    if rows * vocab < 1 << 15 or vocab < 1024 or count > chunks // 2:
        return _top(value_NV, count)
    chunks_NCW = value_NV[:, : chunks * chunk].view(rows, chunks, chunk)
    _, which_NK = _top(chunks_NCW.amax(-1), count)
    near_NKW = chunks_NCW.gather(1, which_NK.unsqueeze(-1).expand(-1, -1, chunk))
    index_NKW = which_NK.unsqueeze(-1) * chunk + torch.arange(chunk, device=value_NV.device)
    near, index = near_NKW.flatten(1), index_NKW.flatten(1)
    if chunks * chunk < vocab:
        rest = torch.arange(chunks * chunk, vocab, device=value_NV.device).expand(rows, -1)
        near, index = torch.cat((near, value_NV[:, chunks * chunk :]), 1), torch.cat((index, rest), 1)
    value_NK, order_NK = _top(near, count)
    return value_NK, index.gather(1, order_NK)


def top_tokens(logp_NV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` most probable tokens of every row with their log-probabilities; blocked tokens are left out."""
    if not count:
        return [[] for _ in logp_NV]
    logp_NK, index_NK = best(logp_NV, min(count, logp_NV.shape[1]))
    rows = zip(index_NK.tolist(), logp_NK.tolist(), strict=True)
    return [[(i, x) for i, x in zip(*row, strict=True) if x > -math.inf] for row in rows]


def _top(value_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count == 1:  # the first of equals, which topk does not promise
        value_N, index_N = value_NV.max(-1)
        return value_N.unsqueeze(1), index_N.unsqueeze(1)
    value_NK, index_NK = value_NV.topk(count)
    return value_NK, index_NK
