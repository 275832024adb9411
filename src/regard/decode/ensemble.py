"""The scorer: the next-token distribution of a model or an ensemble."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from regard.batch import TokenIds, pad
from regard.decode.search_inputs import SearchInput
from regard.errors import UserError, plural
from regard.model import Model
from regard.nn.cache import State
from regard.nn.primitives import Matmuls, PackedWeights, use_matmuls

States = tuple[State, ...]  # one per model


class Scorer:
    """Next-token log-probabilities of an ensemble: the renormalised weighted mean over its models."""

    def __init__(
        self,
        models: Sequence[Model],
        weights: Sequence[float] = (),
        blocked: Sequence[int] = (),
        precision: str = "fp32",
        packed: Sequence[PackedWeights] = (),
    ) -> None:
        """`packed` are the packed weights of each model, which its run caches."""
        self.models = list(models)
        if any(model.training for model in models):
            raise ValueError("a model in training mode applies dropout; call eval() first")
        if weights and len(weights) != len(models):
            raise UserError(f"weights: {len(weights)} given for {plural(len(models), 'run')}; give one for each")
        total = math.fsum(weights)
        self.weights = [weight / total for weight in weights] or [1 / len(models)] * len(models)
        first = self.models[0]
        self.continues = "encoder" not in first.config.stacks  # the output continues the source
        self.eos = first.config.ids.eos
        self.vocab = first.config.target_vocab
        self.device = first.device
        self.matmuls: Matmuls = {}
        for model, weights_of_model in zip(self.models, packed or [PackedWeights() for _ in models], strict=True):
            self.matmuls = {**self.matmuls, **weights_of_model.matmuls(model, precision == "bf16")}
        self.blocked = torch.tensor(sorted(set(blocked)), dtype=torch.long, device=self.device)
        self.before_step: Callable[[], None] | None = None  # called before every step; may raise to end the search

    def start(self, inputs: Sequence[SearchInput]) -> tuple[list[Tensor], States]:
        """Read the sources -> per model the first token to feed and the decoding state, one row per input."""
        tokens = []
        states = []
        with use_matmuls(self.matmuls):
            for i, model in enumerate(self.models):
                sources = [item.sources[i] for item in inputs]
                ids = [int(source[-1]) if self.continues else model.config.start_id for source in sources]
                tokens.append(torch.tensor(ids, dtype=torch.long, device=self.device))
                states.append(self._read(model, sources))
        return tokens, tuple(states)

    def _read(self, model: Model, sources: Sequence[TokenIds]) -> State:
        pad_id = model.config.ids.pad
        if not self.continues:
            return State.join([model.encode(*pad(part, pad_id, self.device)) for part in similar_lengths(sources)])
        # The first step feeds the last token of a prompt. Padding comes before the prompt.
        source_BS, keep_BS = pad([source[-2::-1] for source in sources], pad_id, self.device)
        source_BS, keep_BS = source_BS.flip(1), None if keep_BS is None else keep_BS.flip(1)
        return model.read(source_BS, State(()), keep_BS)[1] if source_BS.shape[1] else State(())

    def step(self, tokens_N: Tensor | list[Tensor], states: States) -> tuple[Tensor, States]:
        """Feed one token to every row -> log-probabilities of the next (N, V), minus infinity for blocked tokens."""
        if self.before_step is not None:
            self.before_step()
        tokens = tokens_N if isinstance(tokens_N, list) else [tokens_N] * len(states)
        with use_matmuls(self.matmuls):
            pairs = [model.step(t, state) for model, t, state in zip(self.models, tokens, states, strict=True)]
        logp_NV = self.join([logits_NV for logits_NV, _ in pairs])
        if isinstance(tokens_N, list):  # at the first step of a search
            check_numbers(logp_NV)
        return self.block(logp_NV), tuple(state for _, state in pairs)

    def block(self, logp_NV: Tensor) -> Tensor:
        """Set the log-probabilities of blocked tokens to minus infinity, in place."""
        return logp_NV.index_fill_(1, self.blocked, -math.inf) if len(self.blocked) else logp_NV

    def join(self, logits: Sequence[Tensor]) -> Tensor:
        """Combine the logits (..., V) of the models into log-probabilities of the ensemble."""
        if len(logits) == 1:
            return logits[0].float().log_softmax(-1)
        total = torch.zeros_like(logits[0], dtype=torch.float32)
        for weight, x in zip(self.weights, logits, strict=True):
            total.add_(x.float(), alpha=weight)  # the normalisation of each model cancels out in log_softmax
        return total.log_softmax(-1)


def check_numbers(scores: Tensor) -> None:
    """Raise an error if scores are NaN."""
    if bool(scores.isnan().any()):
        raise UserError("the scores of the model are not numbers (NaN); its weights are broken (was training stable?)")


def similar_lengths(sources: Sequence[TokenIds], enough: int = 512) -> Iterator[Sequence[TokenIds]]:
    """Split sources, in order, into parts of similar length with at least `enough` tokens, to save padding."""
    start = longest = 0
    for i, source in enumerate(sources):
        if len(source) * 4 < longest * 3 and (i - start) * longest >= enough:
            yield sources[start:i]
            start = i
            longest = 0
        longest = max(longest, len(source))
    yield sources[start:]
