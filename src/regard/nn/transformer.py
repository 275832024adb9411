"""A tower of attention layers: an encoder, or a decoder that carries a state."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.nn.attention import KV, AttentionMask
from regard.nn.block import NOWHERE, Block, make_norm
from regard.nn.cache import CrossCache, Encoded, State, Tree
from regard.nn.dropout import Dropout
from regard.nn.position import make_position
from regard.nn.reversible import ReversibleBlock, run_reversible

SegmentMemory = tuple[Tensor, ...]  # per layer, what went into it for the last tokens read


class Transformer(nn.Module):
    """Embedded tokens in, one vector per token out."""

    def __init__(self, stack: Stack, *, causal: bool, source_width: int | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.window = stack.window
        self.cross_window = stack.cross_window if stack.cross_center == "step" else None
        self.memory = stack.memory
        self.position = make_position(stack, causal)
        self.embed_norm = make_norm(stack) if stack.embed_norm else nn.Identity()
        self.dropout = Dropout(stack.dropout)
        self.reversible = stack.residual == "reversible"
        block = ReversibleBlock if self.reversible else Block
        self.blocks = nn.ModuleList(block(stack, source_width, index) for index in range(stack.layers))
        self.norm = make_norm(stack, stack.out_width) if stack.norm_at == "pre" else nn.Identity()

    def encode(self, x_BSD: Tensor, keep_BS: Tensor | None) -> Encoded:
        """Read a whole input at once."""
        x_BSD, _ = self.forward(x_BSD, State(()), keep_BS)
        return Encoded(x_BSD, keep_BS)

    def start(self, encoded: Encoded) -> State:
        """The state before the first token; the source's keys are computed here and never again."""
        crosses = [block.cross for block in self.blocks if isinstance(block, Block)]
        keys = tuple(cross.keys(encoded.states_BSD, encoded.pos_BS, NOWHERE) for cross in crosses if cross is not None)
        return State((), source=CrossCache(keys, encoded.keep_BS, encoded.pos_BS))

    def forward(self, x_BTD: Tensor, state: State, keep_BT: Tensor | None = None) -> tuple[Tensor, State]:
        """Read on from `state`: one token or many, the same outputs. `keep_BT` is False at padding."""
        if state.length and not state.layers:
            raise ValueError("reversible layers keep no keys in training: nothing can be read on from there")
        if state.tree is not None:
            return self._branch(x_BTD, state, state.tree)
        length = x_BTD.shape[1]
        keep_BP = state.kept(length, keep_BT)
        pos_BP = state.positions(length, keep_BP if self.causal else None, x_BTD.device)
        pos_BT = pos_BP[:, state.length :]
        x_BTD = self._embed(x_BTD, pos_BT)
        if self.memory:  # what lies further back was forgotten
            first = max(0, state.length - self.memory)
            pos_BP, keep_BP = pos_BP[:, first:], None if keep_BP is None else keep_BP[:, first:]
        window = min((reach for reach in (self.memory, self.window) if reach), default=None)
        sight = AttentionMask.of(pos_BT, pos_BP, keep_BP, self.causal, window, self.position.bias(pos_BT, pos_BP))
        if self.reversible:
            x_BTD = torch.cat((x_BTD, x_BTD), dim=-1)
            if self.training and torch.is_grad_enabled() and not state.length:
                blocks = [block for block in self.blocks if isinstance(block, ReversibleBlock)]
                x_BTD = run_reversible(blocks, x_BTD, pos_BT, sight, self.position.at(pos_BT))
                return self.norm(x_BTD), state.advance((), length, keep_BT)  # keys are not stored either
        x_BTD, layers = self._run(x_BTD, pos_BT, sight, state)
        if self.memory:
            layers = [seen.last(self.memory) for seen in layers]
        return x_BTD, state.advance(tuple(layers), length, keep_BT)

    def _branch(self, x_N1D: Tensor, state: State, tree: Tree) -> tuple[Tensor, State]:
        """Read one token for every hypothesis. Those of a sentence stand side by side, as if they were its tokens."""
        grown = tree.grow(self.memory)
        x_AWD = self._embed(x_N1D.view(len(grown.seen_AWP), -1, x_N1D.shape[-1]), tree.next_A1)
        if self.reversible:
            x_AWD = torch.cat((x_AWD, x_AWD), dim=-1)
        bias = self.position.bias(tree.next_A1, grown.pos_AP)
        sight = AttentionMask(
            tree.next_A1, grown.pos_AP, grown.seen_AWP.unsqueeze(1), bias, None, self.causal, self.window
        )
        x_AWD, layers = self._run(x_AWD, tree.next_A1, sight, state)
        state = replace(state, layers=tuple(layers), length=state.length + 1, tree=grown)
        return x_AWD.flatten(0, 1).unsqueeze(1), state

    def _run(self, x_BTD: Tensor, pos_BT: Tensor, sight: AttentionMask, state: State) -> tuple[Tensor, list[KV]]:
        """All layers -> their output, and the keys that each one saw."""
        cross_sight = None if state.source is None else self._cross_sight(pos_BT, len(x_BTD), state.source)
        position = self.position.at(pos_BT)
        layers: list[KV] = []
        for i, block in enumerate(self.blocks):
            past = state.layers[i] if state.layers else None
            source = None if cross_sight is None or state.source is None else (state.source.keys[i], cross_sight)
            x_BTD, seen = block(x_BTD, pos_BT, sight, position, past, source)
            layers.append(seen)
        return self.norm(x_BTD), layers

    def read_segment(self, x_BTD: Tensor, carried: SegmentMemory | None) -> tuple[Tensor, SegmentMemory]:
        """Read a segment of a long text after the `carried` inputs of every layer, which take no gradient.

        Unlike a state, which holds keys made by the weights of then, what is carried is looked at with those of now.
        """
        past = 0 if carried is None else carried[0].shape[1]
        pos_1P = torch.arange(past + x_BTD.shape[1], device=x_BTD.device).unsqueeze(0)
        pos_1T = pos_1P[:, past:]
        x_BTD = self._embed(x_BTD, pos_1T)
        sight = AttentionMask.of(pos_1T, pos_1P, None, self.causal, self.window, self.position.bias(pos_1T, pos_1P))
        position = self.position.at(pos_1T)
        kept = []
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            seen = x_BTD if carried is None else torch.cat((carried[i], x_BTD), dim=1)
            kept.append(seen[:, max(0, seen.shape[1] - self.memory) :].detach())
            remembered = None if carried is None else block.remember(carried[i], pos_1P[:, :past], self.position)
            x_BTD, _ = block(x_BTD, pos_1T, sight, position, remembered)
        return self.norm(x_BTD), tuple(kept)

    def _embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        embedded = self.position.embed(pos_BT)
        x_BTD = x_BTD if embedded is None else x_BTD + embedded.to(x_BTD.dtype)
        out: Tensor = self.dropout(self.embed_norm(x_BTD))
        return out

    def _cross_sight(self, pos_BT: Tensor, rows: int, source: CrossCache) -> AttentionMask:
        return AttentionMask.of(
            source.query_positions(pos_BT, rows), source.pos_BS, source.keep_BS, window=self.cross_window
        )
