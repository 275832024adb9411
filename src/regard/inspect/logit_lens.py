"""What a model predicts at every output step, what each layer would predict (logit lens), and from which inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.model import Model
from regard.nn.hooks import record
from regard.nn.recurrent import RecurrentDecoder
from regard.nn.transformer import Transformer

OutputNames = Callable[[Sequence[int]], list[str]]  # names of tokens, or of classes, by id

STEP_CANDIDATES = 8
LENS_CANDIDATES = 5
MASKED_COPIES = 32  # copies of a text, each with another token masked, that are read in one batch


class Prediction(NamedTuple):
    """A token or a class with its probability."""

    token: str
    probability: float
    logit: float


@dataclass(frozen=True)
class OutputStep:
    """One output token: its probability, and the most probable candidates."""

    token: str
    probability: float
    entropy: float  # of the distribution, in bits
    normaliser: float  # log of the sum of exp(logit): probability = exp(logit - normaliser)
    candidates: tuple[Prediction, ...]


@dataclass(frozen=True)
class LensLayer:
    """The candidates at every output step when the LM head reads the vectors of one layer."""

    label: str
    steps: tuple[tuple[Prediction, ...], ...]


def top_predictions(logits_V: Tensor, count: int, names: OutputNames) -> tuple[Prediction, ...]:
    """The most probable tokens of one distribution."""
    top = logits_V.softmax(-1).topk(min(count, len(logits_V)))
    tokens = names(top.indices.tolist())
    return tuple(Prediction(token, float(p), float(logits_V[i])) for token, p, i in zip(tokens, *top, strict=True))


def entropy_bits(probability: Tensor) -> Tensor:
    """The entropy of distributions along the last axis."""
    return -(probability * probability.clamp(min=1e-12).log2()).sum(-1)


def output_steps(logits_TV: Tensor, labels: Sequence[int], names: OutputNames) -> tuple[OutputStep, ...]:
    """Every output step, with the label whose probability is shown."""
    probability_TV = logits_TV.softmax(-1)
    entropy_T, normaliser_T = entropy_bits(probability_TV), logits_TV.logsumexp(-1)
    return tuple(
        OutputStep(
            token,
            float(probability_TV[t, label]),
            float(entropy_T[t]),
            float(normaliser_T[t]),
            top_predictions(logits_TV[t], STEP_CANDIDATES, names),
        )
        for t, (label, token) in enumerate(zip(labels, names(labels), strict=True))
    )


def lens_hooks(model: Model) -> dict[str, str]:
    """The hook points whose vectors the LM head can read, by label; the last is the one that it does read."""
    recurrent = isinstance(model.decoder, RecurrentDecoder)
    word = "state" if recurrent else "layer"
    hooks = {f"{word} {i + 1}": f"{model.top_name}.blocks.{i}.output" for i in range(model.config.top.layers)}
    return hooks | ({"state and context": "decoder.attentional"} if recurrent else {})


@torch.no_grad()
def logit_lens(model: Model, vectors: Mapping[str, Tensor], names: OutputNames) -> tuple[LensLayer, ...]:
    """What each layer would predict; `vectors` are (T, D), by the name of their hook point."""
    if model.output is None:
        return ()
    top = model.get_submodule(model.top_name)
    norm = top.norm if isinstance(top, Transformer) else nn.Identity()
    layers = []
    for label, hook in lens_hooks(model).items():
        x_TD = norm(vectors[hook])
        if model.classifies:
            x_TD = model.pool(x_TD.unsqueeze(0))
        logits_TV = model.predict(x_TD).float()
        steps = tuple(top_predictions(logits_V, LENS_CANDIDATES, names) for logits_V in logits_TV)
        layers.append(LensLayer(label, steps))
    return tuple(layers)


@torch.no_grad()
def mask_each_token(model: Model, ids_S: Tensor, maskable: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Read a text once per token with that token masked -> logits (S, V) and lens vectors (S, D) of the masked token.

    Only the positions in `maskable` are masked; at the others the model sees the token that it predicts.
    """
    mask = model.config.ids.mask
    hooks = list(lens_hooks(model).values())
    logits: list[Tensor] = []
    vectors: dict[str, list[Tensor]] = {hook: [] for hook in hooks}
    position_S = torch.arange(len(ids_S), device=ids_S.device)
    maskable_S = torch.zeros_like(ids_S, dtype=torch.bool)
    maskable_S[list(maskable)] = mask is not None
    for position_N in position_S.split(MASKED_COPIES):
        masked_NS = (position_N.unsqueeze(1) == position_S) & maskable_S
        with record(model, *hooks) as recorded:
            x_NSD = model.hidden(ids_S.expand(len(position_N), -1).masked_fill(masked_NS, mask or 0), None)
        row_N = torch.arange(len(position_N), device=ids_S.device)
        logits.append(model.predict(x_NSD[row_N, position_N]).float())
        for hook in hooks:
            vectors[hook].append(recorded[hook][row_N, position_N])
    return torch.cat(logits), {hook: torch.cat(parts) for hook, parts in vectors.items()}


def attribution(model: Model, arguments: Sequence[Tensor | None], labels: Sequence[int]) -> Tensor:
    """Gradient x input (T, S): how the log-probability of each label changes as an input embedding grows in length.

    `arguments` are those of the model for a batch of one; the inputs are the first of them, the source or the text.
    """
    table = model.target_embedding if model.decoder_only else model.source_embedding
    assert table is not None
    embedded: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = table.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            logp_TV = model(*arguments)[0].float().log_softmax(-1)
            wanted = [logp_TV[t, label] for t, label in enumerate(labels)]
    finally:
        handle.remove()
    first_1SD = embedded[0]  # a table that both sides share embeds the source first
    gradients = (torch.autograd.grad(logp, first_1SD, retain_graph=True)[0] for logp in wanted)
    return torch.stack([(gradient_1SD * first_1SD.detach())[0].sum(-1) for gradient_1SD in gradients])
