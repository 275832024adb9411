"""A stack of Transformer layers: an encoder, or a causal decoder with a decoding state."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.config import Stack
from regard.nn.attention import AttentionMask, source_mask
from regard.nn.block import Block, make_norm
from regard.nn.cache import KV, CrossCache, EncoderOutput, PrefixTree, State
from regard.nn.position import make_position
from regard.nn.primitives import Dropout
from regard.nn.reversible import ReversibleBlock, run_checkpointed, run_reversible

SegmentMemory = tuple[Tensor, ...]  # per layer, its inputs for the last tokens of earlier segments


class Transformer(nn.Module):
    """Layers that map embedded tokens to one vector per token."""

    def __init__(self, stack: Stack, *, causal: bool, source_width: int | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.window = stack.window
        self.step_window = stack.step_window
        self.memory = stack.memory
        self.position = make_position(stack, causal)
        self.embed_norm = make_norm(stack) if stack.embed_norm else nn.Identity()
        self.dropout = Dropout(stack.dropout)
        self.reversible = stack.residual == "reversible"
        self.recompute = False  # recompute the activations inside layers in the backward pass instead of storing them
        block = ReversibleBlock if self.reversible else Block
        self.blocks = nn.ModuleList(block(stack, source_width, index) for index in range(stack.layers))
        self.norm = make_norm(stack, stack.out_width) if stack.norm_at == "pre" else nn.Identity()

    def encode(self, x_BSD: Tensor, keep_BS: Tensor | None) -> EncoderOutput:
        """Encode a whole input at once."""
        x_BSD, _ = self.forward(x_BSD, State(()), keep_BS)
        return EncoderOutput(x_BSD, keep_BS)

    def start(self, encoded: EncoderOutput) -> State:
        """The state before the first token, with the keys and values of the source."""
        blocks = [block for block in self.blocks if isinstance(block, Block) and block.cross is not None]
        layers = tuple(block.project_source(encoded.states_BSD, encoded.pos_BS) for block in blocks)
        return State((), source=CrossCache(layers, encoded.keep_BS, encoded.pos_BS))

    def forward(self, x_BTD: Tensor, state: State, keep_BT: Tensor | None = None) -> tuple[Tensor, State]:
        """Feed tokens after `state` -> a vector per token, and the new state. `keep_BT` is False at padding."""
        if state.length and not state.layers:
            raise ValueError("reversible layers store no keys in training: decoding cannot continue from this state")
        if state.tree is not None:
            return self._forward_beam(x_BTD, state, state.tree)
        length = x_BTD.shape[1]
        keep_BP = state.keep_mask(length, keep_BT)
        pos_BP = state.positions(length, keep_BP if self.causal else None, x_BTD.device)
        pos_BT = pos_BP[:, state.length :]
        x_BTD = self._embed(x_BTD, pos_BT)
        if self.memory:  # earlier tokens were dropped from the cache
            first = max(0, state.length - self.memory)
            pos_BP, keep_BP = pos_BP[:, first:], None if keep_BP is None else keep_BP[:, first:]
        window = min((limit for limit in (self.memory, self.window) if limit), default=None)
        mask = AttentionMask(pos_BT, pos_BP, keep_BP, self.causal, window, self.position.bias(pos_BT, pos_BP))
        if self.reversible:
            x_BTD = torch.cat((x_BTD, x_BTD), dim=-1)
            if self.training and torch.is_grad_enabled() and not state.length:
                blocks = [block for block in self.blocks if isinstance(block, ReversibleBlock)]
                x_BTD = run_reversible(blocks, x_BTD, pos_BT, mask, self.position.at(pos_BT))
                return self.norm(x_BTD), state.advance((), length, keep_BT)  # keys are not stored
        x_BTD, layers = self._run(x_BTD, pos_BT, mask, state)
        if self.memory:
            layers = [kv.last(self.memory) for kv in layers]
        return x_BTD, state.advance(tuple(layers), length, keep_BT)

    def _forward_beam(self, x_N1D: Tensor, state: State, tree: PrefixTree) -> tuple[Tensor, State]:
        """Feed one token to every hypothesis of the beam; hypotheses of a sentence are queries of one row."""
        extended = tree.extend(self.memory)
        pos_A1 = tree.next_pos_A1
        prefix_A1WP = extended.prefix_AWP.unsqueeze(1)
        x_AWD = self._embed(x_N1D.view(len(prefix_A1WP), -1, x_N1D.shape[-1]), pos_A1)
        if self.reversible:
            x_AWD = torch.cat((x_AWD, x_AWD), dim=-1)
        bias = self.position.bias(pos_A1, extended.pos_AP)
        mask = AttentionMask(pos_A1, extended.pos_AP, None, self.causal, self.window, bias, prefix_A1WP)
        x_AWD, layers = self._run(x_AWD, pos_A1, mask, state)
        state = replace(state, layers=tuple(layers), length=state.length + 1, tree=extended)
        return x_AWD.flatten(0, 1).unsqueeze(1), state

    def _run(self, x_BTD: Tensor, pos_BT: Tensor, mask: AttentionMask, state: State) -> tuple[Tensor, list[KV]]:
        """Run all layers -> the output, and the KV of each layer."""
        cross_mask = state.source and source_mask(state.source, pos_BT, len(x_BTD), self.step_window)
        position = self.position.at(pos_BT)
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        layers: list[KV] = []
        for i, block in enumerate(self.blocks):
            past = state.layers[i] if state.layers else None
            source = (state.source.layers[i], cross_mask) if state.source and cross_mask else None
            inputs = (x_BTD, pos_BT, mask, position, past, source)
            x_BTD, kv = run_checkpointed(block, *inputs) if recompute else block(*inputs)
            layers.append(kv)
        return self.norm(x_BTD), layers

    def read_segment(self, x_BTD: Tensor, memory: SegmentMemory | None) -> tuple[Tensor, SegmentMemory]:
        """Read a segment of a long text -> a vector per token, and the memory for the next segment, without gradients.

        Unlike a KV cache, the memory holds the inputs of every layer, so their keys use the current weights.
        """
        past = 0 if memory is None else memory[0].shape[1]
        pos_1P = torch.arange(past + x_BTD.shape[1], device=x_BTD.device).unsqueeze(0)
        pos_1T = pos_1P[:, past:]
        x_BTD = self._embed(x_BTD, pos_1T)
        mask = AttentionMask(pos_1T, pos_1P, None, self.causal, self.window, self.position.bias(pos_1T, pos_1P))
        position = self.position.at(pos_1T)
        new_memory = []
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            inputs_BPD = x_BTD if memory is None else torch.cat((memory[i], x_BTD), dim=1)
            new_memory.append(inputs_BPD[:, max(0, inputs_BPD.shape[1] - self.memory) :].detach())
            past_kv = None if memory is None else block.project_memory(memory[i], pos_1P[:, :past], self.position)
            x_BTD, _ = block(x_BTD, pos_1T, mask, position, past_kv)
        return self.norm(x_BTD), tuple(new_memory)

    def _embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        embedded = self.position.embed(pos_BT)
        x_BTD = x_BTD if embedded is None else x_BTD + embedded.to(x_BTD.dtype)
        out: Tensor = self.dropout(self.embed_norm(x_BTD))
        return out
