"""Recurrent stacks with the interface of `Transformer`: a bidirectional encoder and a decoder with attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.config import Stack
from regard.nn.attention import Attention, source_mask
from regard.nn.cache import CrossCache, EncoderOutput, LayerState, State
from regard.nn.hooks import Tap
from regard.nn.position import NO_POSITION
from regard.nn.primitives import Dropout, Linear

CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}


class RecurrentEncoder(nn.Module):
    """Bidirectional layers; the vector of a token concatenates the states of both directions."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        cell = CELLS[stack.mixer]
        self.dropout = Dropout(stack.dropout)
        self.blocks = nn.ModuleList(
            cell(stack.width, stack.width // 2, batch_first=True, bidirectional=True) for _ in range(stack.layers)
        )

    def encode(self, x_BSD: Tensor, keep_BS: Tensor | None) -> EncoderOutput:
        """Encode a whole input; the backward direction starts at the last token before the padding."""
        final = []
        for block in self.blocks:
            x_BSD = self.dropout(x_BSD)
            if keep_BS is None:
                x_BSD, last = block(x_BSD)
            else:
                packed = pack_padded_sequence(x_BSD, keep_BS.sum(1).cpu(), batch_first=True, enforce_sorted=False)
                out, last = block(packed)
                x_BSD, _ = pad_packed_sequence(out, batch_first=True, total_length=keep_BS.shape[1])
            last_2BD = last[0] if isinstance(last, tuple) else last
            final.append(torch.cat((last_2BD[0], last_2BD[1]), dim=-1))
        return EncoderOutput(x_BSD, keep_BS, tuple(final))


class RecurrentBlock(nn.Module):
    """One recurrent layer; `cross` is the attention of the layer that attends to the source."""

    def __init__(self, stack: Stack, input_width: int, cross: Attention | None) -> None:
        super().__init__()
        self.cell = CELLS[stack.mixer](input_width, stack.width, batch_first=True)
        self.cross = cross
        self.output = Tap()

    def forward(self, x_NTD: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        hidden = tuple(m.unsqueeze(0).contiguous() for m in state)
        x_NTD, last = self.cell(x_NTD, hidden if len(hidden) == 2 else hidden[0])
        last = last if isinstance(last, tuple) else (last,)
        return self.output(x_NTD), tuple(m.squeeze(0) for m in last)


class RecurrentDecoder(nn.Module):
    """Recurrent layers and one attention over the source: tanh(W [context ; state]) is the output.

    The query is the state of the top layer after the step. With `attend_first` it is the state before the step, and the
    context is also concatenated to the input of the first layer.
    """

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack
        cross = Attention(stack, stack.width, project=False, cross=True)
        extra = stack.width * (int(stack.input_feeding) + int(stack.attend_first))
        self.bridges = nn.ModuleList(Linear(stack.width, stack.width) for _ in range(stack.layers))
        self.blocks = nn.ModuleList(
            RecurrentBlock(stack, stack.width + (extra if i == 0 else 0), cross if i == stack.layers - 1 else None)
            for i in range(stack.layers)
        )
        self.combine = Linear(2 * stack.width, stack.width)
        self.dropout = Dropout(stack.dropout)
        self.output_dropout = Dropout(stack.dropout)
        self.attentional = Tap()  # (N, T, D): tanh(W [context ; state])

    @property
    def cross(self) -> Attention:
        attention: Attention = self.blocks[-1].cross  # type: ignore[assignment]
        return attention

    def start(self, encoded: EncoderOutput) -> State:
        """The state before the first token: the last encoder states, projected by the bridges."""
        finals = encoded.final or (encoded.states_BSD[:, 0],)
        initial = [torch.tanh(bridge(finals[min(i, len(finals) - 1)])) for i, bridge in enumerate(self.bridges)]
        layers: list[LayerState] = [(h, torch.zeros_like(h)) if self.stack.mixer == "lstm" else (h,) for h in initial]
        if self.stack.input_feeding:
            layers.append((torch.zeros_like(initial[-1]),))
        kv = self.cross.project_kv(encoded.states_BSD, encoded.pos_BS, NO_POSITION)
        return State(tuple(layers), source=CrossCache((kv,), encoded.keep_BS, encoded.pos_BS))

    def forward(self, x_NTD: Tensor, state: State, keep_NT: Tensor | None = None) -> tuple[Tensor, State]:
        """Feed tokens after `state`, all at once if no step needs the output of the previous step."""
        if keep_NT is None and not (self.stack.input_feeding or self.stack.attend_first):
            return self._forward_steps(x_NTD, state, None)
        outs = []
        for t, x_N1D in enumerate(x_NTD.split(1, dim=1)):
            keep_N1 = None if keep_NT is None else keep_NT[:, t : t + 1]
            out_N1D, state = self._forward_steps(x_N1D, state, keep_N1)
            outs.append(out_N1D)
        return torch.cat(outs, dim=1), state

    def _forward_steps(self, x_NTD: Tensor, state: State, keep_N1: Tensor | None) -> tuple[Tensor, State]:
        assert state.source is not None
        x_NTD = self.dropout(x_NTD)
        layers: list[LayerState] = []
        context_NTD = None
        if self.stack.attend_first:
            query_N1D = state.layers[len(self.blocks) - 1][0].unsqueeze(1)
            context_NTD = self._attend(query_N1D, state, keep_N1)
            x_NTD = torch.cat((x_NTD, context_NTD), dim=-1)
        if self.stack.input_feeding:
            x_NTD = torch.cat((x_NTD, state.layers[-1][0].unsqueeze(1)), dim=-1)
        for i, block in enumerate(self.blocks):
            x_NTD, layer_state = block(x_NTD if i == 0 else self.dropout(x_NTD), state.layers[i])
            layers.append(layer_state)
        if context_NTD is None:
            context_NTD = self._attend(x_NTD, state, keep_N1)
        out_NTD = self.attentional(torch.tanh(self.combine(torch.cat((context_NTD, x_NTD), dim=-1))))
        out_NTD = self.output_dropout(out_NTD)
        if self.stack.input_feeding:
            layers.append((out_NTD[:, -1],))
        new_layers = tuple(layers)
        if keep_N1 is not None:  # padding does not change the state
            pairs = zip(new_layers, state.layers, strict=True)
            new_layers = tuple(
                tuple(torch.where(keep_N1, a, b) for a, b in zip(new, old, strict=True)) for new, old in pairs
            )
        return out_NTD, state.advance(new_layers, x_NTD.shape[1], keep_N1)

    def _attend(self, query_NTD: Tensor, state: State, keep_N1: Tensor | None) -> Tensor:
        source, (rows, length, _) = state.source, query_NTD.shape
        assert source is not None
        pos_NT = state.positions(length, state.keep_mask(length, keep_N1), query_NTD.device)[:, state.length :]
        mask = source_mask(source, pos_NT, rows, self.stack.step_window)
        out: Tensor = self.cross(query_NTD, source.layers[0], mask, NO_POSITION)
        return out
