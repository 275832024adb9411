"""Attention before the Transformer: Bahdanau et al. 2015 and Luong et al. 2015.

A bidirectional recurrent encoder reads the source, a recurrent decoder predicts the target, and at every step the
decoder attends to the states of the encoder. Read from top to bottom: encoder, two scores, two decoders. Only torch is
needed.
Shapes: B sentences of one length, S source tokens, T target tokens, D width, V vocabulary.
regard's presets: rnn-bahdanau, rnn-luong
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    """A state for each source token, half of it from each direction."""

    def __init__(self, cell: type[nn.GRU] | type[nn.LSTM], width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            cell(width, width // 2, batch_first=True, bidirectional=True) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(B, S, D) -> (B, S, D), and for each layer the final states of its two directions, (B, D)."""
        finals = []
        for layer in self.layers:
            x, last = layer(x)
            hidden = last[0] if isinstance(last, tuple) else last  # an LSTM has a cell in addition to its state
            finals.append(torch.cat((hidden[0], hidden[1]), dim=-1))
        return x, finals


class Additive(nn.Module):
    """Bahdanau: v . tanh(W q + U k), a small network over query and key."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """(B, D), (B, S, D) -> scores (B, S)."""
        return self.v(torch.tanh(self.query(query).unsqueeze(1) + self.key(keys))).squeeze(-1)


class General(nn.Module):
    """Luong: q . W k, a bilinear form, which is cheaper and often as good."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return (keys @ self.query(query).unsqueeze(-1)).squeeze(-1)


def attend(scores: Tensor, states: Tensor) -> Tensor:
    """The weighted sum of the encoder's states, (B, D), by a softmax over scores (B, S)."""
    return (scores.softmax(dim=-1).unsqueeze(1) @ states).squeeze(1)


class Bahdanau(nn.Module):
    """Attend first, with the state before the step as query; then step, with the context as part of the input."""

    def __init__(self, vocab: int, width: int = 256) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encoder = Encoder(nn.GRU, width, layers=1)
        self.bridge = nn.Linear(width, width)
        self.score = Additive(width)
        self.cell = nn.GRUCell(2 * width, width)
        self.combine = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, vocab, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Ids (B, S) and (B, T) -> logits of the token after each target token, (B, T, V)."""
        states, finals = self.encoder(self.source(source))
        h = self.bridge(finals[0]).tanh()  # the initial state of the decoder
        outs = []
        for x in self.target(target).unbind(dim=1):  # (B, D) at a time: each step needs the state of the one before
            context = attend(self.score(h, states), states)
            h = self.cell(torch.cat((x, context), dim=-1), h)
            outs.append(self.combine(torch.cat((context, h), dim=-1)).tanh())
        return self.output(torch.stack(outs, dim=1))


class Luong(nn.Module):
    """Step first, then attend, with the state after the step as query; the result is part of the next input.

    Input feeding: the decoder reads what it has already attended to, so it neither repeats nor skips a part.
    """

    def __init__(self, vocab: int, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encoder = Encoder(nn.LSTM, width, layers)
        self.bridges = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.cells = nn.ModuleList(nn.LSTMCell(width if i else 2 * width, width) for i in range(layers))
        self.score = General(width)
        self.combine = nn.Linear(2 * width, width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Ids (B, S) and (B, T) -> logits of the token after each target token, (B, T, V)."""
        states, finals = self.encoder(self.source(source))
        hs = [bridge(final).tanh() for bridge, final in zip(self.bridges, finals, strict=True)]
        cs = [torch.zeros_like(h) for h in hs]
        out, outs = torch.zeros_like(hs[0]), []
        for x in self.target(target).unbind(dim=1):
            x = torch.cat((x, out), dim=-1)
            for i, cell in enumerate(self.cells):
                hs[i], cs[i] = cell(x, (hs[i], cs[i]))
                x = hs[i]
            context = attend(self.score(x, states), states)
            out = self.combine(torch.cat((context, x), dim=-1)).tanh()
            outs.append(out)
        return torch.stack(outs, dim=1) @ self.target.weight.T  # tied LM head


def load(model: Bahdanau | Luong, weights: dict[str, Tensor]) -> None:
    """Load the weights of regard's preset; every name must have a counterpart."""
    one = isinstance(model, Bahdanau)
    names = {  # regard's name: name in this file
        "source_embedding": "source",
        "target_embedding": "target",
        "encoder.blocks": "encoder.layers",
        "decoder.combine": "combine",
        "decoder.bridges.0" if one else "decoder.bridges": "bridge" if one else "bridges",
        "decoder.blocks.0.cross.score.query_weight": "score.query.weight",
        "decoder.blocks.0.cross.score.bias": "score.query.bias",
        "decoder.blocks.0.cross.score.key_weight": "score.key.weight",
        "decoder.blocks.0.cross.score.v": "score.v.weight",
        "decoder.blocks.1.cross.score.weight": "score.query.weight",
    }
    renamed = {}
    for name, x in weights.items():
        if not one and name == "output.weight":  # tied to the target embedding
            continue
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if name.startswith("decoder.blocks"):  # a cell has the names of a network of one layer, less its number
            name = name.replace("decoder.blocks.0.cell" if one else "decoder.blocks", "cell" if one else "cells")
            name = name.replace(".cell.", ".").removesuffix("_l0")
        if name.startswith("score"):  # in regard with a dimension of heads, and multiplied from the right
            x = x.squeeze() if name.endswith("bias") else x[0] if name.startswith("score.v") else x[0].T
        renamed[name] = x
    model.load_state_dict(renamed)
