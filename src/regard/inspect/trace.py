"""One example on its way through a model, as plain values that a page, a picture or a terminal can show.

Nothing here knows what will be drawn, and what draws does not know the model: attention is maps with names,
between rows of tokens with names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.errors import UserError
from regard.inspect.calls import Calls, watch
from regard.inspect.cards import Walk
from regard.inspect.places import attentions, head_numbers, place
from regard.inspect.positions import Picture, picture
from regard.inspect.record import record
from regard.inspect.walk import walk_recurrent, walk_transformer
from regard.model import Model, stacks
from regard.nn.recurrent import RecurrentDecoder
from regard.nn.transformer import Transformer
from regard.run import Run
from regard.text.example import Example

MOST_TOKENS = 300  # shown per side
Pieces = Callable[[Sequence[int]], list[str]]

CANDIDATES = 8  # per output symbol
LENS_CANDIDATES = 5


@dataclass(frozen=True)
class Map:
    """The weights of all heads of one attention: `rows` look at `columns`, both names of token rows of the trace."""

    name: str  # of the attention in the model: decoder.blocks.0.cross
    kind: str  # encoder, decoder or cross
    layer: int
    weights_HTS: np.ndarray
    rows: str
    columns: str
    heads: tuple[int, ...]  # their numbers; pruned models have gaps


class Candidate(NamedTuple):
    """A symbol that could come next."""

    token: str
    probability: float
    logit: float


class Step(NamedTuple):
    """How one output symbol was chosen."""

    token: str
    probability: float
    entropy: float  # of the whole distribution, in bits
    normaliser: float  # log of the sum of exp(logit): probability = exp(logit - normaliser)
    candidates: tuple[Candidate, ...]


class Lens(NamedTuple):
    """What one layer would have said at every step, had its vectors gone to the prediction layer."""

    label: str
    steps: tuple[tuple[Candidate, ...], ...]


@dataclass(frozen=True)
class Trace:
    """Everything there is to see of one example."""

    title: str
    facts: dict[str, str]  # what the model is, in words
    texts: dict[str, str]  # source and output as people read them
    tokens: dict[str, tuple[str, ...]]  # rows of tokens by name: source, input, output
    maps: tuple[Map, ...]
    alignment: dict[str, np.ndarray]  # (output, source) maps by what they are; the first is the best guess
    steps: tuple[Step, ...]
    lens: tuple[Lens, ...]
    positions: tuple[Picture, ...]
    walks: tuple[Walk, ...]
    notes: tuple[str, ...] = ()
    score: float = field(default=0.0)  # log-probability of the output

    def find(self, kind: str, layer: int) -> Map:
        """The map of a layer of a kind of attention."""
        for found in self.maps:
            if (found.kind, found.layer) == (kind, layer):
                return found
        have = sorted({(found.kind, found.layer) for found in self.maps})
        places = ", ".join(f"{name} layer {number + 1}" for name, number in have)
        raise UserError(f"no {kind} attention in layer {layer + 1}; this model has {places}")

    def to_html(self) -> str:
        """The attention page: one file that needs nothing else."""
        from regard.inspect.page import page

        return page(self)

    def _repr_html_(self) -> str:
        from regard.inspect.page import frame

        return frame(self)


def trace(
    run: Run,
    example: Example,
    target: Sequence[int],
    *,
    heads: Sequence[tuple[int, int]] = (),
    most: int = MOST_TOKENS,
) -> Trace:
    """Follow one example through a run's model.

    `target` are the ids of the output, given or decoded, with or without their end. `heads` (layer, place among the
    heads it has) are averaged for the alignment; without them a sharp head that covers the source is chosen.
    """
    model, codec, config = run.model, run.codec, run.config
    if config.encoder is None or config.decoder is None:
        raise UserError("this model has no source to attend to: it needs an encoder and a decoder")
    source = codec.encode_source([example])[0]
    labels = [*target] if target and target[-1] == config.ids.eos else [*target, config.ids.eos]
    notes = [
        _cut_note(side, len(ids), most) for side, ids in (("source", source), ("output", labels)) if len(ids) > most
    ]
    source, labels = source[:most], labels[:most]
    inputs = [config.start_id, *labels[:-1]]
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), record(model, "*.weights", "decoder.*") as maps, watch(model) as calls:
            source_1S, input_1T = (torch.tensor([ids], device=device) for ids in (source, inputs))
            logits_TV = model(source_1S, None, input_1T)[0].float()
    finally:
        model.train(was_training)
    tokens = {
        "source": tuple(codec.source_pieces(source)),
        "input": tuple(codec.target_pieces(inputs)),
        "output": tuple(codec.target_pieces(labels)),
    }
    found = tuple(_map(model, name, maps[f"{name}.weights"]) for name in attentions(model))
    text = codec.target_pieces
    steps = _steps(logits_TV, labels, text)
    return Trace(
        title=run.path.name or "model",
        facts=facts(model),
        texts={"source": example.source, "output": codec.decode_target(labels)},
        tokens=tokens,
        maps=found,
        alignment=_alignments(found, heads, len(source)),
        steps=steps,
        lens=tuple(_lens(model, maps, text)),
        positions=tuple(_pictures(model, max(len(source), len(labels), 32))),
        walks=_walks(model, calls, (source, inputs)),
        notes=tuple(notes),
        score=float(logits_TV.log_softmax(-1)[range(len(labels)), labels].sum()),
    )


def facts(model: Model) -> dict[str, str]:
    """What the model is, in words."""
    told = {}
    for name, stack in stacks(model.config).items():
        told[name] = _describe(stack)
    told["vocabulary"] = f"{model.config.source_vocab:,} source, {model.config.target_vocab:,} target symbols"
    told["parameters"] = f"{sum(p.numel() for p in model.parameters()):,}"
    return told


def _describe(stack: Stack) -> str:
    layers = f"{stack.layers} layer{'s' * (stack.layers > 1)}, width {stack.width}"
    if stack.recurrent:
        return f"{stack.mixer.upper()}, {layers}, {stack.score.replace('_', ' ')} score"
    norm = f"{stack.norm_at}-norm"
    return f"{layers}, {stack.heads} heads of {stack.head}, feed-forward {stack.ff}, {stack.position} positions, {norm}"


def _cut_note(side: str, length: int, most: int) -> str:
    return f"The {side} has {length:,} symbols; the model was shown, and you see, the first {most}."


def _map(model: Model, name: str, weights_1HTS: Tensor) -> Map:
    kind, layer = place(name)
    rows, columns = {"encoder": ("source", "source"), "decoder": ("input", "input"), "cross": ("output", "source")}[
        kind
    ]
    return Map(name, kind, layer, weights_1HTS[0].float().cpu().numpy(), rows, columns, head_numbers(model, name))


def candidates(logits_V: Tensor, count: int, pieces: Pieces) -> tuple[Candidate, ...]:
    """The most probable symbols of one distribution."""
    probability_V = logits_V.softmax(-1)
    top = probability_V.topk(min(count, len(logits_V)))
    tokens = pieces(top.indices.tolist())
    return tuple(Candidate(token, float(p), float(logits_V[i])) for token, p, i in zip(tokens, *top, strict=True))


def entropy_bits(probability: Tensor) -> Tensor:
    """Of distributions along the last axis."""
    return -(probability * probability.clamp(min=1e-12).log2()).sum(-1)


def _steps(logits_TV: Tensor, labels: Sequence[int], pieces: Pieces) -> tuple[Step, ...]:
    probability_TV = logits_TV.softmax(-1)
    entropy_T, normaliser_T = entropy_bits(probability_TV), logits_TV.logsumexp(-1)
    out = []
    for t, (label, token) in enumerate(zip(labels, pieces(labels), strict=True)):
        top = candidates(logits_TV[t], CANDIDATES, pieces)
        out.append(Step(token, float(probability_TV[t, label]), float(entropy_T[t]), float(normaliser_T[t]), top))
    return tuple(out)


def _lens(model: Model, maps: Mapping[str, Tensor], pieces: Pieces) -> list[Lens]:
    decoder = model.decoder
    norm = decoder.norm if isinstance(decoder, Transformer) else nn.Identity()
    out = []
    assert model.config.decoder is not None
    names = [(f"layer {i + 1}", f"decoder.blocks.{i}.output") for i in range(model.config.decoder.layers)]
    if isinstance(decoder, RecurrentDecoder):
        names = [(f"state {i + 1}", name) for i, (_, name) in enumerate(names)]
        names.append(("state and context", "decoder.attentional"))
    for label, name in names:
        with torch.no_grad():
            logits_TV = model.predict(norm(maps[name][0])).float()
        out.append(Lens(label, tuple(candidates(logits_V, LENS_CANDIDATES, pieces) for logits_V in logits_TV)))
    return out


def _pictures(model: Model, length: int) -> list[Picture]:
    pictures = []
    for name in stacks(model.config):
        tower = getattr(model, name)
        if isinstance(tower, Transformer):
            found = picture(name, tower.position, length, tower.causal)
            if found is not None:
                pictures.append(found)
    return pictures


def _walks(model: Model, calls: Calls, ids: tuple[Sequence[int], Sequence[int]]) -> tuple[Walk, ...]:
    walks = []
    with torch.no_grad():
        if isinstance(model.encoder, Transformer):
            walks.append(walk_transformer(model, "encoder", calls, ids[0]))
        if isinstance(model.decoder, Transformer):
            walks.append(walk_transformer(model, "decoder", calls, ids[1]))
        elif isinstance(model.decoder, RecurrentDecoder):
            walks.append(walk_recurrent(model, calls, ids[1]))
    return tuple(walks)


def _alignments(maps: Sequence[Map], heads: Sequence[tuple[int, int]], length: int) -> dict[str, np.ndarray]:
    """Maps from outputs to the source, the best guess first, then the mean of each layer."""
    cross = {found.layer: found for found in maps if found.kind == "cross"}
    out: dict[str, np.ndarray] = {}
    several = len(cross) > 1 or any(len(found.heads) > 1 for found in cross.values())
    chosen = [(layer, index) for layer, index in heads if layer in cross and index < len(cross[layer].heads)]
    if chosen and several:
        names = ", ".join(f"{layer + 1}.{cross[layer].heads[index] + 1}" for layer, index in chosen)
        out[f"alignment heads {names}"] = np.mean([cross[layer].weights_HTS[i] for layer, i in chosen], axis=0)
    elif several:
        layer, index = best_head({layer: found.weights_HTS for layer, found in cross.items()}, length)
        out[f"sharpest head: {layer + 1}.{cross[layer].heads[index] + 1}"] = cross[layer].weights_HTS[index]
    for layer, found in cross.items():
        out[f"layer {layer + 1}, mean of heads" if several else "attention"] = found.weights_HTS.mean(0)
    if len(cross) > 1:
        out["mean of everything"] = np.mean([found.weights_HTS.mean(0) for found in cross.values()], axis=0)
    return out


def best_head(weights: dict[int, np.ndarray], length: int) -> tuple[int, int]:
    """The head (layer, index) that looks most like an alignment: sharp, and leaving little of the source unseen."""
    scored = {
        (layer, head): alignment_quality(weights_TS, length)
        for layer, weights_HTS in weights.items()
        for head, weights_TS in enumerate(weights_HTS)
    }
    return max(scored, key=lambda place: scored[place])


def alignment_quality(weights_TS: np.ndarray, length: int) -> float:
    """Sharpness times coverage: the mean of the largest weights, and how much of the source but its end is seen."""
    if weights_TS.size == 0:
        return 0.0
    sharpness = weights_TS.max(-1).mean()
    coverage = np.minimum(1.0, weights_TS[:, : max(1, length - 1)].sum(0)).mean()
    return float(sharpness * coverage)
