"""The walk: one token through one layer, step by step, with the formula, the shapes and the real numbers of this model.

What a sub-layer was given and made is known from the pass; only what happens inside an attention is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.inspect.cards import MOST_STEPS, Card, Scores, Vector, Walk, embedding, prediction
from regard.model import Model
from regard.nn.attention import Attention, AttentionMask
from regard.nn.block import Block, Residual
from regard.nn.cache import KV
from regard.nn.hooks import ForwardCalls
from regard.nn.position import Position
from regard.nn.recurrent import RecurrentDecoder
from regard.nn.transformer import Transformer

FORMULAS = {
    "scaled_dot": "q_t · k_s",
    "dot": "q_t · k_s",
    "general": "q_t · W k_s",
    "cosine": "τ (q_t · k_s) / (|q_t| |k_s|)",
    "additive": "v · tanh(W q_t + U k_s)",
    "concat": "v · tanh(W [q_t ; k_s])",
    "location": "(W q_t)_s",
}


def can_walk(tower: Transformer) -> bool:
    """Whether a tower is made of layers that the cards tell of; hashed attention and reversible layers are not."""
    return all(type(block) is Block and isinstance(block.attention, Attention) for block in tower.blocks)


def walk_transformer(model: Model, name: str, calls: ForwardCalls, ids: Sequence[int] | None) -> Walk:
    """The walk through an attention tower; without ids, that of the patches of an image."""
    tower: Transformer = getattr(model, name)
    stack: Stack = getattr(model.config, name)
    layers = []
    for index, block in enumerate(tower.blocks):
        assert isinstance(block, Block) and isinstance(block.attention, Attention)
        cards = [embedding(model, name, calls, ids) if index == 0 else _incoming(calls, block, index, stack.width)]
        cards += _attention(f"{name}.blocks.{index}.attention", block.attention, stack, calls, tower.position, name)
        cards += [_add(block.attention_residual, block.attention, calls, stack, "attention")]
        if block.cross is not None:
            cards += _attention(f"{name}.blocks.{index}.cross", block.cross, stack, calls, Position(), "cross")
            cards += [_add(block.cross_residual, block.cross, calls, stack, "cross-attention")]
        cards += [_feed_forward(block, stack, calls)]
        cards += [_add(block.feed_forward_residual, block.feed_forward, calls, stack, "feed-forward")]
        # Where tokens are hidden in turn, what is said is not what this pass would say.
        if index == stack.layers - 1 and (name == "decoder" or model.config.output == "classes"):
            cards.append(prediction(model, calls, tower.norm))
        layers.append((f"layer {index + 1}", tuple(cards)))
    rows = "source" if name == "encoder" else "input"
    return Walk(name, rows, tuple(layers))


def _incoming(calls: ForwardCalls, block: Block, index: int, width: int) -> Card:
    text = f"What layer {index} made of this token."
    x = Vector.of("x", calls.input(block))
    return Card("What comes in", f"x_t = layer_{index}(…)_t", text, f"1 × {width}", (x,))


def _attention(
    name: str, attention: Attention, stack: Stack, calls: ForwardCalls, position: Position, kind: str
) -> list[Card]:
    looked = _looked(calls, attention)
    cross = kind == "cross"
    width, head, value = stack.width, attention.head_width, stack.value
    where = "Cross-attention: " if cross else ""
    scores = scores_of(name, looked)
    head_count = attention.heads
    turned = " Position is turned into q and k by rotation." if _turns(position) else ""
    asked = "All three come from the same tokens: that is what makes it self-attention."
    if cross:
        asked = "The queries come from this side, keys and values from what the encoder wrote."
    normed = " x̂ is x after the normalisation." if stack.norm_at == "pre" else ""
    x = "x̂" if stack.norm_at == "pre" else "x"
    other = "e_s" if cross else f"{x}_s"
    width_in = attention.key_value.in_features if attention.key_value is not None else width
    matrices = f"W_Q of a head: {width} × {head}; W_K: {width_in} × {head}; W_V: {width_in} × {value}"
    shape = f"{matrices}; all {head_count} heads are one matrix"
    return [
        Card(
            where + "query, key, value",
            f"q_t = {x}_t W_Q    k_s = {other} W_K    v_s = {other} W_V",
            asked + normed + turned,
            shape,
            (Vector.of(x, calls.input(attention)), Vector.of("q", looked.q_HTE)),
            scores,
            "qkv",
        ),
        score_card(where, stack, attention, looked, scores, kind),
        Card(
            where + "weighted sum",
            "z_t = Σ_s a_{ts} v_s",
            "What this head brings back: the values it looked at, each as much as its weight says.",
            f"1 × {value}",
            (Vector.of("z", _mixed(calls, attention)),),
            scores,
            "sum",
        ),
        Card(
            where + "heads side by side",
            f"o_t = [z^1_t ; … ; z^{head_count}_t] W_O",
            "Every head has its own z. Side by side they go through one matrix, which mixes them.",
            f"1 × {head_count * value}  ·  {head_count * value} × {width}  =  1 × {width}",
            (Vector.of("z", _mixed(calls, attention)), Vector.of("o", calls.output(attention))),
            None,
            "heads",
        ),
    ]


def _turns(position: Position) -> bool:
    return type(position).rotate is not Position.rotate


def _mixed(calls: ForwardCalls, attention: Attention) -> Tensor:
    """(H, T, E), from what the output matrix was given."""
    if isinstance(attention.out, nn.Identity):
        return calls.output(attention).unsqueeze(0)
    mixed_TD: Tensor = calls.input(attention.out)
    return mixed_TD.unflatten(-1, (attention.heads, -1)).transpose(0, 1)  # type: ignore[no-any-return]


def scores_of(name: str, looked: AttentionCall) -> Scores:
    def cut(x_HTS: Tensor | None) -> np.ndarray | None:
        return None if x_HTS is None else x_HTS[..., :MOST_STEPS, :].float().cpu().numpy()

    raw_HTS, bias_HTS = cut(looked.raw_HTS), cut(looked.bias_HTS)
    assert raw_HTS is not None
    seen_TS = None if looked.mask_TS is None else looked.mask_TS
    if seen_TS is not None and seen_TS.shape[0] == 1:
        seen_TS = seen_TS.expand(raw_HTS.shape[1], -1)
    seen = None if seen_TS is None or bool(seen_TS.all()) else seen_TS[:MOST_STEPS].cpu().numpy()
    if bias_HTS is not None:
        bias_HTS = np.broadcast_to(bias_HTS, raw_HTS.shape)
    return Scores(
        name,
        raw_HTS,
        looked.scale,
        bias_HTS,
        seen,
        Vector.of("k", looked.k_HSE, None),
        Vector.of("v", looked.v_HSE, None),
    )


def score_card(
    where: str, stack: Stack, attention: Attention, looked: AttentionCall, scores: Scores, kind: str
) -> Card:
    formula = f"score_{{ts}} = {FORMULAS[stack.score]}"
    text = "How well the query fits each key."
    if scores.scale != 1:
        formula += f" / √{attention.head_width}"
        text += f" Divided by √{attention.head_width} = {1 / scores.scale:.2f}, so that the softmax does not saturate."
    if scores.bias_HTS is not None:
        formula += " + b_{t−s}"
        text += " A number for the distance is added."
    if attention.relative is not None:
        text += " It depends on this query: (q_t + v) · W_R r_{t−s}, and the keys met q_t + u."
    if kind == "decoder":
        text += " What comes later is masked: a score of −∞, a weight of 0."
    elif scores.seen_TS is not None:
        text += " What lies outside the window is masked: a score of −∞, a weight of 0."
    formula += "    a_t = softmax(score_t)"
    if attention.center is not None:
        text += " Weights fade with the distance from a predicted place."
    heads = f"{attention.heads} heads, each " if attention.heads > 1 else ""
    shape = f"{heads}{looked.raw_HTS.shape[1]} × {looked.raw_HTS.shape[2]}"
    return Card(where + "scores, mask, softmax", formula, text, shape, (), scores, "scores")


def _add(residual: Residual, sublayer: nn.Module, calls: ForwardCalls, stack: Stack, what: str) -> Card:
    norm = "LayerNorm" if stack.norm == "layer" else "RMSNorm"
    before, made = calls.input(residual), calls.output(sublayer)
    vectors = [Vector.of("x", before), Vector.of("o", made)]
    if residual.pre:
        formula, title = "x_t ← x_t + o_t", f"Add ({what})"
        text = f"The sub-layer's result is added to what came in; {norm} came before it."
        vectors.append(Vector.of("x + o", calls.output(residual)))
    else:
        formula, title = f"x_t ← {norm}(x_t + o_t)", f"Add & norm ({what})"
        text = "The sub-layer's result is added to what came in, and the sum is normalised."
        vectors += [Vector.of("x + o", before + made), Vector.of("norm", calls.output(residual))]
    return Card(title, formula, text, f"1 × {stack.width}", tuple(vectors))


def _feed_forward(block: Block, stack: Stack, calls: ForwardCalls) -> Card:
    part = block.feed_forward
    hidden_TF = calls.input(part.down)
    act = {"gelu_tanh": "gelu"}.get(stack.activation, stack.activation)
    x = "x̂" if stack.norm_at == "pre" else "x"
    formula = f"o_t = {act}({x}_t W_1) W_2" if not stack.gated else f"o_t = ({act}({x}_t W_g) ∘ {x}_t W_1) W_2"
    active = float((hidden_TF.abs() > 1e-6).float().mean())
    text = f"Each token by itself. {active:.0%} of all neurons are not zero here."
    shape = f"1 × {stack.width}  ·  {stack.width} × {stack.ff}  ·  {stack.ff} × {stack.width}"
    vectors = (
        Vector.of(x, calls.input(part)),
        Vector.of("neurons", hidden_TF),
        Vector.of("o", calls.output(part)),
    )
    return Card("Feed-forward", formula, text, shape, vectors)


def walk_recurrent(model: Model, calls: ForwardCalls, ids: Sequence[int]) -> Walk:
    """One step of a recurrent decoder."""
    decoder = model.decoder
    assert isinstance(decoder, RecurrentDecoder) and model.target_embedding is not None
    stack, cross = decoder.stack, decoder.cross
    looked = _looked(calls, cross)
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
        "The token before",
        "y_{t−1} = E[token_{t−1}]",
        "The embedding of the token that was just produced (at the start, the start token).",
        f"E: {len(model.target_embedding.weight)} × {stack.width}",
        (Vector.of("y", embedded_TD),),
    )
    state = Card(
        "The state",
        f"h_t = {cell}([{inside}], h_{{t−1}})" if fed else f"h_t = {cell}(y_{{t−1}}, h_{{t−1}})",
        f"The decoder's memory moves on by one token, through {stack.layers} layer{'s' * (stack.layers > 1)}."
        + (" The last attentional vector is fed in again." if stack.input_feeding else "")
        + (" The context joins the input." if stack.attend_first else ""),
        f"1 × {stack.width}",
        tuple(Vector.of(f"h, layer {i + 1}" if len(states) > 1 else "h", x) for i, x in enumerate(states)),
    )
    ask = Card(
        "Who asks, and who is asked",
        f"q_t = {query}    k_s = v_s = e_s",
        "The query is the decoder's state; keys and values are what the encoder wrote, a vector e per source token.",
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


class AttentionCall:
    """One attention with what it was asked, over the whole pass. Batch of one; all tensors without the batch."""

    def __init__(self, attention: Attention, calls: list[tuple[Tensor, KV, AttentionMask, Position]]) -> None:
        x_1TD = torch.cat([x for x, *_ in calls], dim=1)
        _, kv, sight, position = calls[-1]
        pos_1T = torch.cat([call[2].q_pos_BT.reshape(1, -1) for call in calls], dim=1)
        masks = [call[2].mask_B1TS for call in calls]
        self.mask_TS: Tensor | None = None if masks[0] is None else torch.cat([m[0, 0] for m in masks if m is not None])
        self.scale = attention.score.scale
        q_1HTE = attention.query(x_1TD).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        q_1HTE = position.rotate(q_1HTE, pos_1T)
        if attention.relative is not None:  # the distances' part of the scores depends on the queries
            q_1HTE, sight = attention.relative(q_1HTE, sight, self.scale)
        k_1HSE, v_1HSE = (x[:, attention.kv_indices] for x in kv)
        scores_1HTS = attention.score.compare(attention.score.query(q_1HTE), k_1HSE, sight.k_pos_BS)
        bias_BHTS = sight.bias_BHTS if attention.relative is not None else attention.own_bias(sight.bias_BHTS)
        self.q_HTE, self.k_HSE, self.v_HSE = q_1HTE[0], k_1HSE[0], v_1HSE[0]
        self.raw_HTS = scores_1HTS[0] / self.scale
        self.bias_HTS: Tensor | None = None if bias_BHTS is None else bias_BHTS[0]


def _looked(calls: ForwardCalls, attention: Attention) -> AttentionCall:
    """The numbers inside an attention, computed again from what it was given."""
    return AttentionCall(attention, [(args[0], args[1], args[2], args[3]) for args in calls.inputs[attention]])
