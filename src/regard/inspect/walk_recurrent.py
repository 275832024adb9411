"""The walk of a recurrent decoder: one step, with the formula, the shapes and the real numbers of this model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from regard.inspect.calls import Calls
from regard.inspect.cards import Card, Vector, Walk
from regard.inspect.walk import score_card, scores_of
from regard.inspect.walk_ends import prediction
from regard.model import Model
from regard.nn.recurrent import RecurrentDecoder


def walk_recurrent(model: Model, calls: Calls, ids: Sequence[int]) -> Walk:
    """One step of a recurrent decoder."""
    decoder = model.decoder
    assert isinstance(decoder, RecurrentDecoder) and model.target_embedding is not None
    stack, cross = decoder.stack, decoder.cross
    looked = calls.looked(cross)
    name = f"decoder.blocks.{stack.layers - 1}.cross"
    scores = scores_of(name, looked)
    scores = replace(scores, key_first=scores.value_first)  # one vector is both, whatever the score makes of it
    scale = math.sqrt(stack.width) if model.config.scale_embeddings else 1.0
    embedded_TD = model.target_embedding(torch.tensor(list(ids), device=looked.q_HTE.device)) * scale
    states = [calls.output(block.cell) for block in decoder.blocks]  # type: ignore[arg-type]
    query = "h_{t−1}" if stack.attend_first else "h_t"
    cell = stack.mixer.upper()
    fed = [part for part, on in (("c_t", stack.attend_first), ("h̃_{t−1}", stack.input_feeding)) if on]
    inside = " ; ".join(["y_{t−1}", *fed])
    embedding = Card(
        "The symbol before",
        "y_{t−1} = E[token_{t−1}]",
        "The embedding of the symbol that was just produced (at the start, the start symbol).",
        f"E: {len(model.target_embedding.weight)} × {stack.width}",
        (Vector.of("y", embedded_TD),),
    )
    state = Card(
        "The state",
        f"h_t = {cell}([{inside}], h_{{t−1}})" if fed else f"h_t = {cell}(y_{{t−1}}, h_{{t−1}})",
        f"The decoder's memory moves on by one symbol, through {stack.layers} layer{'s' * (stack.layers > 1)}."
        + (" The last attentional vector is fed in again." if stack.input_feeding else "")
        + (" The context joins the input." if stack.attend_first else ""),
        f"1 × {stack.width}",
        tuple(Vector.of(f"h, layer {i + 1}" if len(states) > 1 else "h", x) for i, x in enumerate(states)),
    )
    ask = Card(
        "Who asks, and who is asked",
        f"q_t = {query}    k_s = v_s = e_s",
        "The query is the decoder's state; keys and values are what the encoder wrote, a vector e per source symbol.",
        f"q: 1 × {stack.width}, e: {looked.v_HSE.shape[1]} × {stack.width}",
        (Vector.of("q", looked.q_HTE),),
        scores,
        "qkv",
    )
    similarity = score_card("", stack, cross, looked, scores, "cross")
    context = Card(
        "Context",
        "c_t = Σ_s a_{ts} e_s",
        "The source, seen through the weights: one vector for this step.",
        f"1 × {stack.width}",
        (Vector.of("c", calls.output(cross).unsqueeze(0)),),
        scores,
        "sum",
    )
    joined = calls.input(decoder.combine)
    combine = Card(
        "Concatenation",
        "h̃_t = tanh(W [c_t ; h_t])",
        "Context and state side by side, through one matrix and a tanh.",
        f"1 × {2 * stack.width}  ·  {2 * stack.width} × {stack.width}  =  1 × {stack.width}",
        (
            Vector.of("c", joined[:, : stack.width]),
            Vector.of("h", joined[:, stack.width :]),
            Vector.of("h̃", calls.output(decoder.combine).tanh()),
        ),
    )
    attend = [ask, similarity, context]
    order = [embedding, *attend, state, combine] if stack.attend_first else [embedding, state, *attend, combine]
    last = prediction(model, calls, nn.Identity())
    return Walk("decoder", "input", (("one step", (*order, last)),))
