"""The walk: one token through every layer, card by card, with formulas, shapes and the numbers of this model.

Inputs and outputs of sub-layers are recorded in the forward pass; only the inside of an attention is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.errors import plural
from regard.model import Model, kind_and_layer
from regard.nn.attention import Attention
from regard.nn.block import Block, Residual
from regard.nn.hooks import ForwardCalls
from regard.nn.position import Alibi, Bucket, Learned, Position, Rotary
from regard.nn.recurrent import RecurrentDecoder
from regard.nn.transformer import Transformer

SHOWN_NUMBERS = 8  # of each vector
WALK_TOKENS = 40  # tokens with a stored walk
HEATMAP_COLUMNS = 256
ACTIVE_NEURON = 1e-6  # absolute value above which a neuron counts as active
FORMULAS = {  # of attention scores, by score function
    "scaled_dot": "q_t · k_s",
    "dot": "q_t · k_s",
    "general": "q_t · W k_s",
    "cosine": "τ (q_t · k_s) / (|q_t| |k_s|)",
    "additive": "v · tanh(W q_t + U k_s + b)",
    "concat": "v · tanh(W [q_t ; k_s])",
    "location": "(W q_t)_s",
}


@dataclass(frozen=True)
class Vector:
    """A vector per token, or per head and token: its first numbers, norm and width."""

    label: str
    first: np.ndarray  # (T, SHOWN_NUMBERS) or (H, T, SHOWN_NUMBERS)
    norm: np.ndarray  # (T,) or (H, T)
    width: int

    @classmethod
    def of(cls, label: str, x: Tensor, tokens: int | None = WALK_TOKENS) -> Vector:
        """Make a vector from (T, D) or (H, T, E)."""
        x = x[..., :tokens, :].float().cpu()
        return cls(label, x[..., :SHOWN_NUMBERS].numpy(), x.norm(dim=-1).numpy(), x.shape[-1])


def vectors_of(tensors: Mapping[str, Tensor]) -> tuple[Vector, ...]:
    """The vectors of a card, by label."""
    return tuple(Vector.of(label, x) for label, x in tensors.items())


@dataclass(frozen=True)
class AttentionScores:
    """The steps from queries to attention weights; the weights are in the attention map named `map`."""

    map: str
    raw_HTS: np.ndarray
    scale: float  # scores are raw * scale
    bias_HTS: np.ndarray | None
    mask_TS: np.ndarray | None  # True: may attend; None: no mask
    keys: Vector
    values: Vector


@dataclass(frozen=True)
class Card:
    """One step of a computation."""

    title: str
    formula: str
    text: str
    shape: str = ""
    vectors: tuple[Vector, ...] = ()
    scores: AttentionScores | None = None
    show: str = "vectors"  # vectors, qkv, scores, sum, heads or prediction
    active: float | None = None  # share of active neurons of a feed-forward layer


@dataclass(frozen=True)
class Walk:
    """The cards of every layer of a stack."""

    name: str
    rows: str  # token row of the trace that is the input of the stack
    layers: tuple[tuple[Card, ...], ...]


def bias_term(name: str, layer: nn.Module | None) -> str:
    """The bias term of a formula; empty if the layer has no bias."""
    return "" if getattr(layer, "bias", None) is None else f" + {name}"


def norm_formula(norm: nn.Module, x: str) -> str:
    """The formula of a normalisation; μ and σ are the statistics of one vector."""
    scaled = "" if getattr(norm, "weight", None) is None else "γ ∘ "
    if isinstance(norm, nn.RMSNorm):
        return f"{scaled}{x} / √(mean({x}^2) + ε)"
    return f"{scaled}({x} − μ) / √(σ^2 + ε){bias_term('β', norm)}"


def embedding_card(model: Model, name: str, calls: ForwardCalls, ids: Sequence[int] | None) -> Card:
    """The card of the input of a stack's first layer; without ids, the input is an image."""
    stack: Transformer = getattr(model, name)
    if ids is None:
        patches = model.config.image_patches
        image = model.image
        assert image is not None
        pixels = image.project.in_features
        width = image.project.out_features
        embedded_TD = calls.output(image)
        title = "Patch and position"
        formula = "x_t = W pixels_t + b"
        text = (
            f"The {pixels} pixels of a patch ({patches.channels} × {patches.size} × {patches.size}) times one matrix;"
            " the first vector, the class token, is trained"
        )
        shape = f"1 × {pixels}  ·  {pixels} × {width}  =  1 × {width}"
    else:
        table = model.source_embedding if name == "encoder" else model.target_embedding
        assert table is not None
        width = table.embedding_dim
        scaled = model.config.scale_embeddings
        embedded_TD = model.embed(table, torch.tensor(list(ids), device=model.device))
        title = "Embedding and position"
        formula = f"x_t = {'√d · ' if scaled else ''}E[token_t]"
        text = "The token's row of the embedding table" + (f", times √{width} = {width**0.5:.2f}" if scaled else "")
        shape = f"E: {len(table.weight)} × {width}"
    vectors = {"embedding": embedded_TD}
    if name == "encoder" and model.token_type_embedding is not None:
        vectors["segment"] = model.token_type_embedding.weight[0].expand_as(embedded_TD)
        formula += " + S[0]"
        text += ", plus the vector of the first segment"
    pos_1TD = stack.position.embed(torch.arange(len(embedded_TD), device=model.device).unsqueeze(0))
    if pos_1TD is not None:
        vectors["position"] = pos_1TD[0]
        formula += " + P[t]"
        text += ", plus the vector of its position"
    else:
        text += "; the position is added later, in the attention"
    normed = not isinstance(stack.embed_norm, nn.Identity)
    if normed:
        formula = f"e_t{formula.removeprefix('x_t')}    x_t = {norm_formula(stack.embed_norm, 'e_t')}"
        text += ", normalised"
    if normed or len(vectors) > 1:
        vectors["x"] = calls.input(stack.blocks[0])
    return Card(title, formula, text + ".", shape, vectors_of(vectors))


def prediction_card(model: Model, calls: ForwardCalls, norm: nn.Module) -> Card:
    """The card of the step from the last vector to logits and probabilities."""
    assert model.output is not None
    vocab, width = model.output.weight.shape
    normed = "" if isinstance(norm, nn.Identity) else " after a last normalisation"
    if model.classifies:
        pooled = " and the pooler, tanh(W x + b)," if model.pooler is not None else ""
        text = f"The first vector{normed}{pooled} represents the whole input and is compared with every class."
    else:
        side = " of the target" if len(model.config.stacks) == 2 else ""
        tied = f" W is the embedding table{side}, used again." if model.config.tie_output else ""
        text = f"The vector of the last layer{normed} is compared with every token of the vocabulary.{tied}"
    last = "" if isinstance(norm, nn.Identity) else f"x_t ← {norm_formula(norm, 'x_t')}    "
    formula = f"{last}logits = x_t W^T{bias_term('b', model.output)}    p = softmax(logits)"
    shape = f"1 × {width}  ·  {width} × {vocab}  =  1 × {vocab}"
    vectors = vectors_of({"x": calls.input(model.output)})
    return Card("Prediction: logits and softmax", formula, text, shape, vectors, show="prediction")


@dataclass(frozen=True)
class PositionHeatmap:
    """A position encoding as a matrix with named axes; `first_column` is the label of the first column."""

    name: str  # of the stack
    caption: str
    rows: str
    columns: str
    values_RC: np.ndarray
    first_column: int = 0


@torch.no_grad()
def position_heatmap(name: str, stack: Transformer, length: int) -> PositionHeatmap | None:
    """The encoding of the first `length` positions of a stack; None if no heatmap can show it."""
    position = stack.position
    pos_1T = torch.arange(length, device=next(stack.parameters()).device).unsqueeze(0)
    if isinstance(position, Learned):
        pos_1T = pos_1T[:, : position.table.num_embeddings]
    embedded_1TD = position.embed(pos_1T)
    if embedded_1TD is not None:
        kind = "trained, one row per position" if isinstance(position, Learned) else "sines and cosines"
        width = embedded_1TD.shape[-1]
        part = f"; the first {HEATMAP_COLUMNS} of {width} numbers" if width > HEATMAP_COLUMNS else ""
        caption = f"Added to the embeddings of the {name}: {kind}{part}."
        shown_TD = embedded_1TD[0, :, :HEATMAP_COLUMNS].cpu().numpy()
        return PositionHeatmap(name, caption, "position", "dimension", shown_TD)
    if isinstance(position, Rotary):
        unit_11TE = torch.ones(1, 1, length, position.width, device=pos_1T.device)
        unit_11TE[..., position.width // 2 :] = 0.0  # the rotation turns (1, 0) into (cos, sin)
        cos_TE = position.rotate(unit_11TE, pos_1T)[0, 0, :, : position.width // 2]
        caption = f"Queries and keys of the {name} are rotated: the cosine of the angle for every pair of dimensions."
        return PositionHeatmap(name, caption, "position", "pair of dimensions", cos_TE.cpu().numpy())
    if isinstance(position, Alibi | Bucket):
        last = length if stack.causal else 2 * length
        key_1S = torch.arange(last + 1, device=pos_1T.device).unsqueeze(0)
        bias_BHTS = position.bias(torch.full_like(key_1S[:, :1], length), key_1S)
        caption = f"Added to the scores of the {name}, by head and by the offset of the key from the query."
        return PositionHeatmap(name, caption, "head", "offset", bias_BHTS[0, :, 0].cpu().numpy(), -length)
    return None


def make_walks(model: Model, calls: ForwardCalls, ids: dict[str, list[int]]) -> tuple[Walk, ...]:
    """The walks of all supported stacks, from recorded forward calls and token ids (none for patches)."""
    walks = []
    for name in model.config.stacks:
        stack = getattr(model, name)
        if isinstance(stack, Transformer) and has_plain_blocks(stack):
            walks.append(_walk_transformer(model, name, calls, ids.get(name)))
        elif isinstance(stack, RecurrentDecoder):
            walks.append(_walk_recurrent(model, calls, ids[name]))
    return tuple(walks)


def has_plain_blocks(stack: Transformer) -> bool:
    """Whether no layer has hashed attention or is reversible."""
    return all(type(block) is Block and isinstance(block.attention, Attention) for block in stack.blocks)


def _walk_transformer(model: Model, name: str, calls: ForwardCalls, ids: Sequence[int] | None) -> Walk:
    transformer: Transformer = getattr(model, name)
    stack = model.config.stacks[name]
    layers = []
    for index, block in enumerate(transformer.blocks):
        assert isinstance(block, Block) and isinstance(block.attention, Attention)
        if index == 0:
            cards = [embedding_card(model, name, calls, ids)]
        else:
            formula = f"x_t = layer_{index}(…)_t"
            text = f"The output of layer {index} for this token."
            cards = [Card("Input", formula, text, f"1 × {stack.width}", vectors_of({"x": calls.input(block)}))]
        path = f"{name}.blocks.{index}"
        cards += _attention_cards(f"{path}.attention", block.attention, block.attention_residual, stack, calls)
        if block.cross is not None:
            cards += _attention_cards(f"{path}.cross", block.cross, block.cross_residual, stack, calls)
        cards += _feed_forward_cards(block, stack, calls)
        # The predictions of a masked language model come from other forward passes, with one masked token each.
        if index == stack.layers - 1 and (name == "decoder" or model.classifies):
            cards.append(prediction_card(model, calls, transformer.norm))
        layers.append(tuple(cards))
    return Walk(name, "source" if name == "encoder" else "input", tuple(layers))


def _attention_inside(name: str, attention: Attention, calls: ForwardCalls) -> tuple[Tensor, AttentionScores]:
    """The queries (H, T, E) and scores of an attention, recomputed from recorded inputs."""
    inputs = calls.inputs[attention]  # (x, keys and values, attention mask, position) of each forward call
    _, kv, mask, position, *_ = inputs[-1]
    x_1TD = torch.cat([args[0] for args in inputs], dim=1)
    pos_1T = torch.cat([args[2].q_pos_BT.reshape(1, -1) for args in inputs], dim=1)
    masks = [args[2].mask_B1TS for args in inputs]
    scale = attention.score.scale
    q_1HTE = attention.query(x_1TD).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
    q_1HTE = position.rotate(q_1HTE, pos_1T)
    if attention.relative is not None:  # the distance-dependent part of the scores also depends on the query
        q_1HTE, mask = attention.relative(q_1HTE, mask, scale)
    k_1HSE, v_1HSE = (x[:, attention.kv_indices] for x in kv)
    scores_1HTS = attention.score.compare(attention.score.query(q_1HTE), k_1HSE, mask.k_pos_BS)
    raw_HTS = (scores_1HTS[0] / scale)[:, :WALK_TOKENS].float().cpu()
    bias_BHTS = attention.own_bias(mask.bias_BHTS)
    bias_HTS = mask_TS = None
    if bias_BHTS is not None:
        bias_HTS = bias_BHTS[0, :, :WALK_TOKENS].float().cpu().expand_as(raw_HTS).numpy()
    if masks[0] is not None:
        all_TS = torch.cat([mask_B1TS[0, 0] for mask_B1TS in masks])
        if not bool(all_TS.all()):
            mask_TS = all_TS.expand(q_1HTE.shape[2], -1)[:WALK_TOKENS].cpu().numpy()
    keys = Vector.of("k", k_1HSE[0], None)
    values = Vector.of("v", v_1HSE[0], None)
    return q_1HTE[0], AttentionScores(name, raw_HTS.numpy(), scale, bias_HTS, mask_TS, keys, values)


def _attention_cards(
    name: str, attention: Attention, residual: Residual, stack: Stack, calls: ForwardCalls
) -> list[Card]:
    cross = kind_and_layer(name)[0] == "cross"
    prefix = "Cross-attention: " if cross else ""
    q_HTE, scores = _attention_inside(name, attention, calls)
    x = "x̂" if residual.pre else "x"
    other = "e_s" if cross else f"{x}_s"
    formula = f"x̂_t = {norm_formula(residual.norm, 'x_t')}    " if residual.pre else ""
    formula += f"q_t = {x}_t W_Q{bias_term('b_Q', attention.query)}"
    formula += f"    k_s = {other} W_K{bias_term('b_K', attention.key_value)}"
    formula += f"    v_s = {other} W_V{bias_term('b_V', attention.key_value)}"
    text = "All three come from the same tokens, hence self-attention."
    if cross:
        text = "The queries come from the decoder, keys and values from the encoder's output."
    if residual.pre:
        text += " x̂ is x after the normalisation."
    position = calls.inputs[attention][-1][3]
    if type(position).rotate is not Position.rotate:
        text += " Rotating q and k encodes the position."
    width_in = attention.key_value.in_features if attention.key_value is not None else stack.width
    shape = (
        f"W_Q of a head: {stack.width} × {stack.head}; W_K: {width_in} × {stack.head};"
        f" W_V: {width_in} × {stack.value}; {plural(attention.heads, 'head')}, one matrix"
    )
    vectors = vectors_of({x: calls.input(attention), "q": q_HTE})
    projections = Card(prefix + "query, key, value", formula, text, shape, vectors, scores, "qkv")
    text = "The output of this head: the values, weighted by attention and summed."
    z = vectors_of({"z": calls.input(attention.out).unflatten(-1, (attention.heads, -1)).transpose(0, 1)})
    weighted_sum = Card(prefix + "weighted sum", "z_t = Σ_s a_{ts} v_s", text, f"1 × {stack.value}", z, scores, "sum")
    numbers = [f"z^{{{number + 1}}}_t" for number in attention.head_numbers]
    side_by_side = " ; ".join(numbers if attention.heads < 4 else [numbers[0], "…", numbers[-1]])
    formula = f"o_t = [{side_by_side}] W_O{bias_term('b_O', attention.out)}"
    text = "The vectors z of all heads, concatenated and mixed by one matrix."
    width = attention.heads * stack.value
    shape = f"1 × {width}  ·  {width} × {stack.width}  =  1 × {stack.width}"
    vectors = (*z, Vector.of("o", calls.output(attention)))
    joined = Card(prefix + "heads side by side", formula, text, shape, vectors, scores, "heads")
    added = _residual_card(residual, attention, calls, stack, "cross-attention" if cross else "attention")
    return [projections, _score_card(prefix, attention, stack, scores), weighted_sum, joined, added]


def _score_card(prefix: str, attention: Attention, stack: Stack, scores: AttentionScores) -> Card:
    kind, _ = kind_and_layer(scores.map)
    formula = f"score_{{ts}} = {FORMULAS[stack.score]}"
    text = "How well the query matches each key."
    if scores.scale != 1:
        formula += f" / √{attention.head_width}"
        text += f" Divided by √{attention.head_width} = {1 / scores.scale:.2f} to keep the softmax from saturating."
    if scores.bias_HTS is not None:
        formula += " + b_{t−s}"
        text += " A bias depending on the distance is added."
    if attention.relative is not None:
        text += " It depends on this query: (q_t + v) · W_R r_{t−s}; the keys are compared with q_t + u."
    if kind == "decoder" or (stack.step_window if kind == "cross" else stack.window):
        masked = "Later tokens" if kind == "decoder" else "Tokens outside the window"
        text += f" {masked} are masked: a score of −∞, a weight of 0."
    formula += "    a_t = softmax(score_t)"
    if attention.center is not None:
        text += " Weights decay with the distance from a predicted position."
    return Card(prefix + "scores, mask, softmax", formula, text, scores=scores, show="scores")


def _residual_card(residual: Residual, sublayer: nn.Module, calls: ForwardCalls, stack: Stack, what: str) -> Card:
    norm = "LayerNorm" if stack.norm == "layer" else "RMSNorm"
    x_TD = calls.input(residual)
    o_TD = calls.output(sublayer)
    vectors = {"x": x_TD, "o": o_TD}
    if residual.pre:
        formula = "x_t ← x_t + o_t"
        title = f"Add ({what})"
        text = f"The output of the sub-layer is added to its input; {norm} precedes the sub-layer."
        vectors["x + o"] = calls.output(residual)
    else:
        formula = f"y_t = x_t + o_t    x_t ← {norm_formula(residual.norm, 'y_t')}"
        title = f"Add & norm ({what})"
        text = f"The output of the sub-layer is added to its input, and the sum is normalised ({norm})."
        vectors |= {"x + o": x_TD + o_TD, "norm": calls.output(residual)}
    return Card(title, formula, text, f"1 × {stack.width}", vectors_of(vectors))


def _feed_forward_cards(block: Block, stack: Stack, calls: ForwardCalls) -> list[Card]:
    part = block.feed_forward
    hidden_TF = calls.input(part.down)
    act = {"gelu_tanh": "gelu"}.get(stack.activation, stack.activation)
    x = "x̂" if stack.norm_at == "pre" else "x"
    up = f"{x}_t W_1{bias_term('b_1', part.up)}"
    down = f"W_2{bias_term('b_2', part.down)}"
    gate = f"{act}({x}_t W_g{bias_term('b_g', part.gate)})"
    formula = f"o_t = ({gate} ∘ ({up})) {down}" if stack.gated else f"o_t = {act}({up}) {down}"
    if stack.norm_at == "pre":
        formula = f"x̂_t = {norm_formula(block.feed_forward_residual.norm, 'x_t')}    {formula}"
    active = float((hidden_TF.abs() > ACTIVE_NEURON).float().mean())
    text = "Applied to each token independently."
    shape = f"1 × {stack.width}  ·  {stack.width} × {stack.ff}  ·  {stack.ff} × {stack.width}"
    vectors = vectors_of({x: calls.input(part), "neurons": hidden_TF, "o": calls.output(part)})
    card = Card("Feed-forward", formula, text, shape, vectors, active=active)
    return [card, _residual_card(block.feed_forward_residual, part, calls, stack, "feed-forward")]


def _walk_recurrent(model: Model, calls: ForwardCalls, ids: Sequence[int]) -> Walk:
    """One step of a recurrent decoder."""
    decoder = model.decoder
    assert isinstance(decoder, RecurrentDecoder) and model.target_embedding is not None
    stack = decoder.stack
    cross = decoder.cross
    width = stack.width
    q_HTE, scores = _attention_inside(f"decoder.blocks.{stack.layers - 1}.cross", cross, calls)
    scores = replace(scores, keys=scores.values)  # keys and values are the same vectors
    vectors = vectors_of({"y": model.embed(model.target_embedding, torch.tensor(list(ids), device=model.device))})
    text = "The embedding of the last produced token (initially the start token)."
    shape = f"E: {len(model.target_embedding.weight)} × {width}"
    embedding = Card("The previous token", "y_{t−1} = E[token_{t−1}]", text, shape, vectors)
    joined = [part for part, on in (("c_t", stack.attend_first), ("h̃_{t−1}", stack.input_feeding)) if on]
    cell_input = f"[{' ; '.join(['y_{t−1}', *joined])}]" if joined else "y_{t−1}"
    formula = f"h_t = {stack.mixer.upper()}({cell_input}, h_{{t−1}})"
    text = f"The decoder state after the token, through {plural(stack.layers, 'layer')}."
    if stack.input_feeding:
        text += " The last attentional vector is part of the input."
    if stack.attend_first:
        text += " The context is part of the input."
    states = [calls.output(block.cell) for block in decoder.blocks]  # type: ignore[arg-type]
    vectors = vectors_of({f"h, layer {i + 1}" if len(states) > 1 else "h": x for i, x in enumerate(states)})
    state = Card("The state", formula, text, f"1 × {width}", vectors)
    formula = f"q_t = {'h_{t−1}' if stack.attend_first else 'h_t'}    k_s = v_s = e_s"
    text = "The query is the decoder state; keys and values are the encoder outputs, one vector e per source token."
    shape = f"q: 1 × {width}, e: 1 × {width} for each source token"
    query = Card("Query, keys and values", formula, text, shape, vectors_of({"q": q_HTE}), scores, "qkv")
    text = "The encoder vectors, weighted by attention and summed: one vector for this step."
    vectors = vectors_of({"c": calls.output(cross).unsqueeze(0)})
    context = Card("Context", "c_t = Σ_s a_{ts} e_s", text, f"1 × {width}", vectors, scores, "sum")
    formula = f"h̃_t = tanh(W [c_t ; h_t]{bias_term('b', decoder.combine)})"
    text = "Context and state, concatenated, times one matrix, then tanh."
    shape = f"1 × {2 * width}  ·  {2 * width} × {width}  =  1 × {width}"
    both_TD = calls.input(decoder.combine)
    h_TD = calls.output(decoder.combine).tanh()
    vectors = vectors_of({"c": both_TD[:, :width], "h": both_TD[:, width:], "h̃": h_TD})
    combine = Card("Concatenation", formula, text, shape, vectors)
    attend = [query, _score_card("", cross, stack, scores), context]
    order = [*attend, state] if stack.attend_first else [state, *attend]
    cards = (embedding, *order, combine, prediction_card(model, calls, nn.Identity()))
    return Walk("decoder", "input", (cards,))
