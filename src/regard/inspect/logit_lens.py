"""The predictions of every output step and layer (logit lens), and their attribution to inputs and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.model import Model
from regard.nn.hooks import patch, record, without
from regard.nn.recurrent import RecurrentDecoder
from regard.nn.transformer import Transformer

OutputNames = Callable[[Sequence[int]], list[str]]  # names of tokens, or of classes, by id

STEP_CANDIDATES = 8
LENS_CANDIDATES = 5
MASKED_COPIES = 32  # per batch: copies of a text, each with a different token masked
SILENCED_COPIES = 32  # per batch: copies of an input, each with a different head silenced
SILENCED_LOGITS = 1 << 24  # maximum logits of a batch of silenced copies


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
    """The candidates at every output step when the LM head is applied to one layer."""

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
    """The output steps, each with the probability of its label."""
    probability_TV = logits_TV.softmax(-1)
    entropy_T = entropy_bits(probability_TV).tolist()
    normaliser_T = logits_TV.logsumexp(-1).tolist()
    steps = []
    for t, (label, token) in enumerate(zip(labels, names(labels), strict=True)):
        candidates = top_predictions(logits_TV[t], STEP_CANDIDATES, names)
        steps.append(OutputStep(token, float(probability_TV[t, label]), entropy_T[t], normaliser_T[t], candidates))
    return tuple(steps)


def lens_hooks(model: Model) -> dict[str, str]:
    """The hook points that the LM head can be applied to, by label; the last one is its actual input."""
    recurrent = isinstance(model.decoder, RecurrentDecoder)
    word = "state" if recurrent else "layer"
    hooks = {f"{word} {i + 1}": f"{model.top_name}.blocks.{i}.output" for i in range(model.config.top.layers)}
    return hooks | ({"state and context": "decoder.attentional"} if recurrent else {})


@torch.no_grad()
def logit_lens(model: Model, vectors: Mapping[str, Tensor], names: OutputNames) -> tuple[LensLayer, ...]:
    """The predictions of each layer; `vectors` (T, D) are keyed by hook point."""
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
        layers.append(LensLayer(label, tuple(top_predictions(x_V, LENS_CANDIDATES, names) for x_V in logits_TV)))
    return tuple(layers)


@torch.no_grad()
def mask_each_token(model: Model, ids_S: Tensor, maskable: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits (S, V) and lens vectors (S, D) of every token; each token in `maskable` is masked in its own copy."""
    logits: list[Tensor] = []
    vectors: dict[str, list[Tensor]] = {hook: [] for hook in lens_hooks(model).values()}
    for masked_NS, row_N, position_N in _masked_copies(model, ids_S, maskable):
        with record(model, *vectors) as recorded:
            x_NSD = model.hidden(masked_NS, None)
        logits.append(model.predict(x_NSD[row_N, position_N]).float())
        for hook, parts in vectors.items():
            parts.append(recorded[hook][row_N, position_N])
    return torch.cat(logits), {hook: torch.cat(parts) for hook, parts in vectors.items()}


def _masked_copies(model: Model, ids_S: Tensor, maskable: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of copies of a text with one masked token each, and the rows and columns of the masked tokens."""
    copies_SS = ids_S.repeat(len(ids_S), 1)
    if model.config.ids.mask is not None:
        copies_SS[maskable, maskable] = model.config.ids.mask
    for position_N in torch.arange(len(ids_S), device=ids_S.device).split(MASKED_COPIES):
        yield copies_SS[position_N], position_N - position_N[0], position_N


def attribution(model: Model, arguments: Sequence[Tensor | None], labels: Sequence[int]) -> Tensor:
    """Gradient x input (T, S) of the log-probability of each label, for the first stack of a batch of one."""
    with _embedded(model) as embedded, torch.enable_grad():
        label_logps = list(model(*arguments)[0].float().log_softmax(-1)[range(len(labels)), labels])
    first_1SD = embedded[0]  # with a shared table, the source is embedded first
    gradients = (torch.autograd.grad(logp, first_1SD, retain_graph=True)[0] for logp in label_logps)
    return torch.stack([(gradient_1SD * first_1SD.detach())[0].sum(-1) for gradient_1SD in gradients])


def masked_attribution(model: Model, ids_S: Tensor, maskable: Sequence[int]) -> Tensor:
    """Gradient x input (S, S) of every token of a text when that token is masked, as in `mask_each_token`."""
    rows = []
    for masked_NS, row_N, position_N in _masked_copies(model, ids_S, maskable):
        with _embedded(model) as embedded, torch.enable_grad():
            logp_NV = model(masked_NS, None)[row_N, position_N].float().log_softmax(-1)
            logp_N = logp_NV[row_N, ids_S[position_N]]
            gradient_NSD = torch.autograd.grad(logp_N.sum(), embedded[0])[0]  # copies are independent
        rows.append((gradient_NSD * embedded[0].detach()).sum(-1))
    return torch.cat(rows)


@contextmanager
def _embedded(model: Model) -> Iterator[list[Tensor]]:
    """Collect the embeddings of forward calls as leaves with gradients."""
    table = model.image or (model.target_embedding if model.decoder_only else model.source_embedding)
    assert table is not None
    embedded: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = table.register_forward_hook(keep)
    try:
        yield embedded
    finally:
        handle.remove()


@torch.no_grad()
def head_importance(
    model: Model, arguments: Sequence[Tensor | None], labels: Sequence[int], score: float
) -> dict[str, list[float]]:
    """The log-probability lost from `score` when one head is silenced, by attention and head; for a batch of one."""
    attentions = model.attentions()
    keys = [(name, head) for name, attention in attentions.items() for head in range(attention.heads)]
    logits = len(labels) * (model.config.classes or model.config.output_vocab)
    copies = max(1, min(SILENCED_COPIES, SILENCED_LOGITS // logits))
    out: dict[str, list[float]] = {name: [] for name in attentions}
    for start in range(0, len(keys), copies):
        silenced = keys[start : start + copies]
        gates = {name: torch.ones(len(silenced), a.heads, 1, 1, device=model.device) for name, a in attentions.items()}
        for row, (name, head) in enumerate(silenced):
            gates[name][row, head] = 0.0
        inputs = [x if x is None else x.expand(len(silenced), *x.shape[1:]) for x in arguments]
        with patch(model, {f"{name}.mixed": gate_NH11.mul for name, gate_NH11 in gates.items()}):
            logp_NTV = model(*inputs).float().log_softmax(-1)
        scores_N = logp_NTV[:, range(len(labels)), labels].sum(-1).tolist()
        for (name, _), score_without in zip(silenced, scores_N, strict=True):
            out[name].append(score - score_without)
    return out


@torch.no_grad()
def masked_importance(model: Model, ids_S: Tensor, maskable: Sequence[int], score: float) -> dict[str, list[float]]:
    """`head_importance` of a text with each token masked in turn."""

    def score_without(name: str, head: int) -> float:
        with patch(model, {f"{name}.mixed": without(head)}):
            logits_SV, _ = mask_each_token(model, ids_S, maskable)
        return float(logits_SV.log_softmax(-1)[range(len(ids_S)), ids_S].sum())

    return {
        name: [score - score_without(name, head) for head in range(attention.heads)]
        for name, attention in model.attentions().items()
    }
