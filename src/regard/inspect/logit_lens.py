"""What a model says at every step, and what each of its layers would have said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.model import Model
from regard.nn.hooks import record
from regard.nn.position import Alibi, Bucket, Learned, Position, Rotary
from regard.nn.recurrent import RecurrentDecoder
from regard.nn.transformer import Transformer

Pieces = Callable[[Sequence[int]], list[str]]

CANDIDATES = 8  # per output token
LENS_CANDIDATES = 5
ROWS_AT_ONCE = 32  # copies of a text that are read together


class Candidate(NamedTuple):
    """A token that could come next, or a class."""

    token: str
    probability: float
    logit: float


class Step(NamedTuple):
    """How one output token was chosen."""

    token: str
    probability: float
    entropy: float  # of the whole distribution, in bits
    normaliser: float  # log of the sum of exp(logit): probability = exp(logit - normaliser)
    candidates: tuple[Candidate, ...]


class Lens(NamedTuple):
    """What one layer would have said at every step, had its vectors gone to the prediction layer."""

    label: str
    steps: tuple[tuple[Candidate, ...], ...]


def candidates(logits_V: Tensor, count: int, pieces: Pieces) -> tuple[Candidate, ...]:
    """The most probable tokens of one distribution."""
    probability_V = logits_V.softmax(-1)
    top = probability_V.topk(min(count, len(logits_V)))
    tokens = pieces(top.indices.tolist())
    return tuple(Candidate(token, float(p), float(logits_V[i])) for token, p, i in zip(tokens, *top, strict=True))


def entropy_bits(probability: Tensor) -> Tensor:
    """Of distributions along the last axis."""
    return -(probability * probability.clamp(min=1e-12).log2()).sum(-1)


def steps(logits_TV: Tensor, labels: Sequence[int], pieces: Pieces) -> tuple[Step, ...]:
    """Every step, with what was said or should have been."""
    probability_TV = logits_TV.softmax(-1)
    entropy_T, normaliser_T = entropy_bits(probability_TV), logits_TV.logsumexp(-1)
    out = []
    for t, (label, token) in enumerate(zip(labels, pieces(labels), strict=True)):
        top = candidates(logits_TV[t], CANDIDATES, pieces)
        out.append(Step(token, float(probability_TV[t, label]), float(entropy_T[t]), float(normaliser_T[t]), top))
    return tuple(out)


def layer_places(model: Model) -> dict[str, str]:
    """The places of a model where the prediction layer could have been, by what they are; the last is where it is."""
    name = "encoder" if model.decoder is None else "decoder"
    stack = getattr(model.config, name)
    recurrent = isinstance(model.decoder, RecurrentDecoder)
    word = "state" if recurrent else "layer"
    places = {f"{word} {i + 1}": f"{name}.blocks.{i}.output" for i in range(stack.layers)}
    return places | ({"state and context": "decoder.attentional"} if recurrent else {})


@torch.no_grad()
def lens(model: Model, vectors: Mapping[str, Tensor], pieces: Pieces) -> tuple[Lens, ...]:
    """What each layer would have said; `vectors` are (T, D), by the name of their place."""
    if model.output is None:
        return ()
    top = model.encoder if model.decoder is None else model.decoder
    norm = top.norm if isinstance(top, Transformer) else nn.Identity()
    out = []
    for label, name in layer_places(model).items():
        x_TD = norm(vectors[name])
        if model.config.output == "classes":
            x_TD = model.pool(x_TD.unsqueeze(0))
        logits_TV = model.predict(x_TD).float()
        out.append(Lens(label, tuple(candidates(logits_V, LENS_CANDIDATES, pieces) for logits_V in logits_TV)))
    return tuple(out)


@torch.no_grad()
def hidden_in_turn(model: Model, ids_S: Tensor, places: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Read a text once for each of its places, with that place hidden -> its logits there, and the layers' vectors.

    What is not in `places` is never hidden: its row is what the model says where it can see the answer.
    """
    mask = model.config.ids.mask
    names = list(layer_places(model).values())
    logits: list[Tensor] = []
    vectors: dict[str, list[Tensor]] = {name: [] for name in names}
    hide_S = torch.zeros_like(ids_S, dtype=torch.bool)
    hide_S[list(places)] = mask is not None
    for rows_N in torch.arange(len(ids_S), device=ids_S.device).split(ROWS_AT_ONCE):
        here_NS = (rows_N.unsqueeze(1) == torch.arange(len(ids_S), device=ids_S.device)) & hide_S
        with record(model, *names) as made:
            x_NSD = model.hidden(ids_S.expand(len(rows_N), -1).masked_fill(here_NS, mask or 0), None)
        at_N = torch.arange(len(rows_N), device=ids_S.device)
        logits.append(model.predict(x_NSD[at_N, rows_N]).float())
        for name in names:
            vectors[name].append(made[name][at_N, rows_N])
    return torch.cat(logits), {name: torch.cat(parts) for name, parts in vectors.items()}


WIDEST = 256  # columns shown


@dataclass(frozen=True)
class Picture:
    """A matrix with names for its axes; `first_column` is the number of the first one."""

    name: str
    caption: str
    rows: str
    columns: str
    values_RC: np.ndarray
    first_column: int = 0


def picture(tower: str, position: Position, length: int, causal: bool) -> Picture | None:
    """What a position encoding looks like for so many positions, or None where there is none."""
    with torch.no_grad():
        pos_1T = torch.arange(length, device=_device(position)).unsqueeze(0)
        if isinstance(position, Learned):
            pos_1T = pos_1T[:, : position.table.num_embeddings]
        embedded = position.embed(pos_1T)
        if embedded is not None:
            kind = "trained, one row per position" if isinstance(position, Learned) else "sines and cosines"
            shown = embedded[0, :, :WIDEST]
            cut = f"; the first {WIDEST} of {embedded.shape[-1]} numbers" if embedded.shape[-1] > WIDEST else ""
            caption = f"Added to the embeddings of the {tower}: {kind}{cut}."
            return Picture(tower, caption, "position", "dimension", shown.cpu().numpy())
        if isinstance(position, Rotary):
            right_11TE = torch.ones(1, 1, length, position.width, device=pos_1T.device)
            right_11TE[..., position.width // 2 :] = 0.0  # the first number of every pair is its cosine once turned
            cos_TE = position.rotate(right_11TE, pos_1T)[0, 0, :, : position.width // 2]
            caption = (
                f"Queries and keys of the {tower} are turned: the cosine of the angle of every pair of dimensions."
            )
            return Picture(tower, caption, "position", "pair of dimensions", cos_TE.cpu().numpy())
        if isinstance(position, Alibi | Bucket):
            last = length if causal else 2 * length
            keys_1S = torch.arange(last + 1, device=pos_1T.device).unsqueeze(0)
            bias = position.bias(torch.full_like(keys_1S[:, :1], length), keys_1S)
            caption = f"Added to the scores of the {tower}, by head and by how far the key is from the query."
            return Picture(tower, caption, "head", "offset", bias[0, :, 0].cpu().numpy(), -length)
    return None


def _device(position: Position) -> torch.device:
    return next((x.device for x in [*position.parameters(), *position.buffers()]), torch.device("cpu"))
