"""A tower of attention layers: an encoder, or a decoder that carries a state."""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import Stack
from regard.nn.attention import KV, Sight
from regard.nn.block import NOWHERE, Block, make_norm
from regard.nn.dropout import Dropout
from regard.nn.position import make_position
from regard.nn.state import Encoded, Memory, Source, State


class Transformer(nn.Module):
    """Embedded symbols in, one vector per symbol out."""

    def __init__(self, stack: Stack, *, causal: bool, source_width: int | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.window = stack.window
        self.cross_window = stack.cross_window if stack.cross_center == "step" else None
        self.position = make_position(stack, causal)
        self.dropout = Dropout(stack.dropout)
        self.blocks = nn.ModuleList(Block(stack, source_width, index) for index in range(stack.layers))
        self.norm = make_norm(stack) if stack.norm_at == "pre" else nn.Identity()

    def encode(self, x_BSD: Tensor, keep_BS: Tensor | None) -> Encoded:
        """Read a whole input at once."""
        x_BSD, _ = self.forward(x_BSD, State(()), keep_BS)
        return Encoded(x_BSD, keep_BS)

    def start(self, encoded: Encoded) -> State:
        """The state before the first symbol; the source's keys are computed here and never again."""
        crosses = [block.cross for block in self.blocks if isinstance(block, Block)]
        keys = tuple(cross.keys(encoded.states_BSD, encoded.pos_BS, NOWHERE) for cross in crosses if cross is not None)
        return State((), source=Source(keys, encoded.keep_BS, encoded.pos_BS))

    def forward(self, x_BTD: Tensor, state: State, keep_BT: Tensor | None = None) -> tuple[Tensor, State]:
        """Read on from `state`: one symbol or many, the same outputs. `keep_BT` is False at padding."""
        length = x_BTD.shape[1]
        keep_BP = state.kept(length, keep_BT)
        pos_BP = state.positions(length, keep_BP if self.causal else None, x_BTD.device)
        pos_BT = pos_BP[:, state.length :]
        embedded = self.position.embed(pos_BT)
        x_BTD = self.dropout(x_BTD if embedded is None else x_BTD + embedded.to(x_BTD.dtype))
        sight = Sight.of(pos_BT, pos_BP, keep_BP, self.causal, self.window, self.position.bias(pos_BT, pos_BP))
        cross_sight = None if state.source is None else self._cross_sight(pos_BT, len(x_BTD), state.source)
        layers: list[Memory] = []
        for i, block in enumerate(self.blocks):
            past = KV(*state.layers[i]) if state.layers else None
            source = None if cross_sight is None or state.source is None else (state.source.keys[i], cross_sight)
            x_BTD, seen = block(x_BTD, pos_BT, sight, self.position, past, source)
            layers.append(seen)
        return self.norm(x_BTD), state.advance(tuple(layers), length, keep_BT)

    def _cross_sight(self, pos_BT: Tensor, rows: int, source: Source) -> Sight:
        return Sight.of(source.query_positions(pos_BT, rows), source.pos_BS, source.keep_BS, window=self.cross_window)
