"""One example on its way through a model, as plain values that a page, a picture or a terminal can show.

Nothing here knows what will be drawn, and what draws does not know the model: attention is maps with names,
between rows of tokens with names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from regard.config import Config, Stack
from regard.decode.alignment import alignment_quality
from regard.errors import UserError
from regard.inspect.cards import Walk
from regard.inspect.inputs import Given, Shot, give, give_image
from regard.inspect.logit_lens import (
    Lens,
    Picture,
    Step,
    hidden_in_turn,
    layer_places,
    lens,
    picture,
    steps,
)
from regard.inspect.walk import can_walk, walk_recurrent, walk_transformer
from regard.model import Model, kind_and_layer
from regard.nn.cache import State
from regard.nn.hooks import ForwardCalls, record, record_calls
from regard.nn.recurrent import RecurrentDecoder
from regard.nn.transformer import Transformer
from regard.run import Run
from regard.text.codec import Example

MOST_TOKENS = 300  # shown per side


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
    unit: str = "symbol"  # what a step says: a token, or a class
    shot: Shot | None = None  # the image that was read
    distances: dict[str, np.ndarray] = field(default_factory=dict)  # in an image: pixels, by map, for each head

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
    target: Sequence[int] | None = None,
    *,
    heads: Sequence[tuple[int, int]] = (),
    most: int = MOST_TOKENS,
) -> Trace:
    """Follow one example through a run's model.

    `target` are the ids of the output, given or decoded, with or without their end; for a language model, those of the
    continuation, if there is one; an encoder alone has none, and a class to compare with is the example's target.
    `heads` (layer, place among the heads it has) are averaged for the alignment; without them a sharp head that covers
    the source is chosen.
    """
    return follow(run, give(run, example, target, most), heads)


def trace_text(run: Run, text: str, answer: str | None = None, more: int = 0, features: str | None = None) -> Trace:
    """Follow a text through a model that has an encoder or a decoder alone.

    A language model reads `answer` as the continuation, or goes on by itself for `more` tokens, the most probable
    ones. For a model of classes `answer` is the class to compare with.
    """
    config = run.config
    if config.encoder is not None:
        if more:
            raise UserError(f"{run.path}: only a language model goes on with a text")
        if answer is not None and config.output != "classes":
            raise UserError(f"{run.path}: this model has no output of its own to compare {answer!r} with")
        return trace(run, Example(text, answer, features))
    if answer is not None and more:
        raise UserError("a continuation is either given or left to the model, not both")
    ids = run.codec.target.encode([answer])[0] if answer is not None else []
    return trace(run, Example(text), ids or continuation(run, text, more))


@torch.no_grad()
def continuation(run: Run, text: str, count: int) -> list[int]:
    """The most probable next token, so many times or until the end, as ids."""
    model, out = run.model, list[int]()
    tokens = [run.config.start_id, *run.codec.target.encode([text])[0]]
    device, state = model.device, State(())
    while len(out) < count and (not out or out[-1] != run.config.ids.eos):
        x_1TD, state = model.read(torch.tensor([tokens], device=device), state)
        tokens = [int(model.predict(x_1TD[0, -1]).argmax())]
        out += tokens
    return out


def trace_image(run: Run, image_CHW: np.ndarray, label: str | None = None, name: str = "image") -> Trace:
    """Follow an image, with its numbers as they stand in its file, through a run's model."""
    return follow(run, give_image(run, image_CHW, label, name, MOST_TOKENS))


@torch.no_grad()
def follow(run: Run, given: Given, heads: Sequence[tuple[int, int]] = ()) -> Trace:
    """Follow what a model is given through it."""
    model, config = run.model, run.config
    vocabulary_alone = config.decoder is None and config.predicts_tokens
    was_training = model.training
    model.eval()
    try:
        names = layer_places(model).values()
        with record(model, "*.weights", *names) as recorded, record_calls(model) as calls:
            out = model(*given.inputs)[0].float()
        vectors = {name: recorded[name][0] for name in names}
        if vocabulary_alone:
            ids_S = given.inputs[0]
            assert ids_S is not None
            text = [i for i, index in enumerate(given.ids["encoder"]) if index not in run.codec.source.special]
            out, vectors = hidden_in_turn(model, ids_S[0], text)
        walks = _walks(model, calls, given)
        said = lens(model, vectors, given.pieces)
    finally:
        model.train(was_training)
    best = out.argmax(-1).tolist()
    labels = [] if model.output is None else best if given.labels is None else given.labels
    answer = {"prediction": given.pieces(best)[0]} if config.output == "classes" else {}
    maps = maps_of(model, recorded)
    tokens = given.tokens
    longest = max(len(row) for row in tokens.values())
    return Trace(
        title=run.path.name or "model",
        facts=facts(model),
        texts=given.texts | answer,
        tokens=tokens,
        maps=maps,
        alignment=alignments(maps, heads, len(tokens["source"])) if "source" in tokens else {},
        steps=steps(out, labels, given.pieces),
        lens=said,
        positions=tuple(_pictures(model, max(longest, 32))),
        walks=walks,
        notes=(*given.notes, *_told(config, vocabulary_alone)),
        score=float(out.log_softmax(-1)[range(len(labels)), labels].sum()) if labels else 0.0,
        unit="class" if config.output == "classes" else "symbol",
        shot=given.shot,
        distances={} if given.shot is None else square_distances(maps, given.shot),
    )


def _told(config: Config, vocabulary_alone: bool) -> list[str]:
    if not vocabulary_alone:
        return []
    if config.ids.mask is None:
        return ["This vocabulary has no token for what is hidden: each token was guessed with itself in sight."]
    return ["Output and logit lens: each token was hidden in turn, and guessed from the others."]


def facts(model: Model) -> dict[str, str]:
    """What the model is, in words."""
    config = model.config
    told = {name: _describe(stack) for name, stack in config.stacks.items()}
    if config.patches is not None:
        p = config.patches
        told["image"] = f"{p.height} × {p.width}, {p.count} patches of {p.size} × {p.size}"
    elif config.encoder is not None and config.decoder is not None:
        told["vocabulary"] = f"{config.source_vocab:,} source, {config.target_vocab:,} target tokens"
    else:
        told["vocabulary"] = f"{config.source_vocab if config.decoder is None else config.target_vocab:,} tokens"
    if config.classes is not None:
        told["classes"] = str(config.classes)
    told["parameters"] = f"{model.size:,}"
    return told


def _describe(stack: Stack) -> str:
    layers = f"{stack.layers} layer{'s' * (stack.layers > 1)}, width {stack.width}"
    if stack.recurrent:
        return f"{stack.mixer.upper()}, {layers}, {stack.score.replace('_', ' ')} score"
    norm = f"{stack.norm_at}-norm"
    heads = f"{stack.heads} heads of {stack.head}" + (", hashed" if stack.mixer == "lsh" else "")
    return f"{layers}, {heads}, feed-forward {stack.ff}, {stack.position} positions, {norm}"


def _pictures(model: Model, length: int) -> list[Picture]:
    towers = {name: getattr(model, name) for name in model.config.stacks}
    found = [
        picture(name, tower.position, length, tower.causal)
        for name, tower in towers.items()
        if isinstance(tower, Transformer)
    ]
    return [made for made in found if made is not None]


def _walks(model: Model, calls: ForwardCalls, given: Given) -> tuple[Walk, ...]:
    walks = []
    for name in model.config.stacks:
        tower, ids = getattr(model, name), given.ids.get(name)
        if isinstance(tower, Transformer) and can_walk(tower):
            walks.append(walk_transformer(model, name, calls, ids))
        elif isinstance(tower, RecurrentDecoder) and ids is not None:
            walks.append(walk_recurrent(model, calls, ids))
    return tuple(walks)


ROWS = {"encoder": ("source", "source"), "decoder": ("input", "input"), "cross": ("output", "source")}


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


def maps_of(model: Model, recorded: Mapping[str, Tensor]) -> tuple[Map, ...]:
    """The maps of one example, from what was recorded of all weights."""
    out = []
    for name in model.attentions():
        kind, layer = kind_and_layer(name)
        weights_HTS = recorded[f"{name}.weights"][0].float().cpu().numpy()
        out.append(Map(name, kind, layer, weights_HTS, *ROWS[kind], model.attentions()[name].head_numbers))
    return tuple(out)


def alignments(maps: Sequence[Map], heads: Sequence[tuple[int, int]], length: int) -> dict[str, np.ndarray]:
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


def between_squares(rows: int, columns: int, size: int) -> Tensor:
    """Pixels between the middles of any two patches, (patches, patches)."""
    row_S = torch.arange(rows).repeat_interleave(columns)
    column_S = torch.arange(columns).repeat(rows)
    place_S2 = torch.stack((row_S, column_S), dim=1).float() * size
    return torch.cdist(place_S2, place_S2)


def square_distance(weights_BHTS: Tensor, far_SS: Tensor) -> Tensor:
    """The mean distance of every square's look, (B, H, patches). What goes to the image as a whole has no distance."""
    squares_BHSS = weights_BHTS[..., 1:, 1:]
    total_BHS = squares_BHSS.sum(-1).clamp(min=1e-9)
    mean_BHS: Tensor = (squares_BHSS * far_SS).sum(-1) / total_BHS
    return mean_BHS


def square_distances(maps: Sequence[Map], shot: Shot) -> dict[str, np.ndarray]:
    """For every map of an image, the mean distance of each head in pixels."""
    far_SS = between_squares(shot.rows, shot.columns, shot.size)
    return {m.name: square_distance(torch.from_numpy(m.weights_HTS)[None], far_SS)[0].mean(-1).numpy() for m in maps}
