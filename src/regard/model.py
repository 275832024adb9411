"""The model: tokens in, scores over the next token out. One class for every family; the config says which."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.config import Config
from regard.nn.attention import Attention
from regard.nn.cache import State
from regard.nn.embedding import ImageEmbedding, LmHeadTransform
from regard.nn.lsh import LSHAttention
from regard.nn.recurrent import RecurrentDecoder, RecurrentEncoder
from regard.nn.score import Score
from regard.nn.transformer import SegmentMemory, Transformer


class Model(nn.Module):
    """An encoder, a decoder, or both, between embeddings and a prediction layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        encoder, decoder = config.encoder, config.decoder
        self.encoder: Transformer | RecurrentEncoder | None = None
        self.decoder: Transformer | RecurrentDecoder | None = None
        self.source_embedding: nn.Embedding | None = None
        self.target_embedding: nn.Embedding | None = None
        self.image: ImageEmbedding | None = None
        self.token_type_embedding: nn.Embedding | None = None
        if encoder is not None:
            if config.patches is not None:
                self.image = ImageEmbedding(config.patches, encoder.width)
            else:
                self.source_embedding = nn.Embedding(config.source_vocab, encoder.width)
            if config.token_types:
                self.token_type_embedding = nn.Embedding(config.token_types, encoder.width)
            self.encoder = RecurrentEncoder(encoder) if encoder.recurrent else Transformer(encoder, causal=False)
        if decoder is not None:
            shared = self.source_embedding if config.share_embeddings else None
            self.target_embedding = shared or nn.Embedding(config.target_vocab, decoder.width)
            source_width = None if encoder is None else encoder.width
            if decoder.recurrent:
                self.decoder = RecurrentDecoder(decoder)
            else:
                self.decoder = Transformer(decoder, causal=True, source_width=source_width)
        top = config.top
        self.pooler = nn.Linear(top.out_width, top.out_width) if config.pooler else None
        self.transform = LmHeadTransform(top) if config.output == "transformed" else None
        self.output: nn.Linear | None = None
        if config.output != "none":
            place = "meta" if self._tied() is not None else None  # a matrix that is only a name for a table
            vocab = config.output_vocab
            self.output = nn.Linear(top.out_width, config.classes or vocab, bias=config.output_bias, device=place)
            if place and config.output_bias:
                self.output.bias = nn.Parameter(torch.zeros(vocab))
        self._initialise()
        self._tie()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def size(self) -> int:
        """Number of parameters; a shared tensor counts once."""
        return sum(p.numel() for p in self.parameters())

    def encode(self, source_BS: Tensor, keep_BS: Tensor | None = None) -> State:
        """Read the source; what comes back is the state before the first output token."""
        if self.encoder is None or self.decoder is None:
            raise ValueError("only a model with an encoder and a decoder encodes a source for decoding")
        encoded = self.encoder.encode(self._embed_source(source_BS, None), keep_BS)
        return self.decoder.start(encoded)

    def step(self, tokens_N: Tensor, state: State) -> tuple[Tensor, State]:
        """Feed one token to every hypothesis -> scores over the next one, and the state after it."""
        x_N1D, state = self.read(tokens_N.unsqueeze(1), state)
        return self.predict(x_N1D.squeeze(1)), state

    def read(self, tokens_NT: Tensor, state: State, keep_NT: Tensor | None = None) -> tuple[Tensor, State]:
        """Feed tokens to the decoder -> a vector for each, and the state after them."""
        assert self.decoder is not None
        out: tuple[Tensor, State] = self.decoder(self._embed(self.target_embedding, tokens_NT), state, keep_NT)
        return out

    def read_segment(self, tokens_BT: Tensor, carried: SegmentMemory | None = None) -> tuple[Tensor, SegmentMemory]:
        """Read the next segment of a long text -> a vector for each token, and what to carry to the segment after."""
        if not isinstance(self.decoder, Transformer):
            raise ValueError("only a Transformer decoder reads on across segments")
        return self.decoder.read_segment(self._embed(self.target_embedding, tokens_BT), carried)

    def hidden(
        self,
        source_BS: Tensor,
        keep_BS: Tensor | None,
        input_BT: Tensor | None = None,
        types_BS: Tensor | None = None,
    ) -> Tensor:
        """The vectors that the prediction layer reads, for given output tokens (teacher forcing).

        A model of classes has one per row, (B, 1, D). `types_BS` tells segments apart; None: all are of the first kind.
        """
        if self.decoder is None:
            assert self.encoder is not None
            x_BSD = self.encoder.encode(self._embed_source(source_BS, types_BS), keep_BS).states_BSD
            return self.pool(x_BSD).unsqueeze(1) if self.config.output == "classes" else x_BSD
        if self.encoder is None:
            tokens_BT, keep_BT = (source_BS, keep_BS) if input_BT is None else (input_BT, None)
            return self.read(tokens_BT, State(()), keep_BT)[0]
        assert input_BT is not None
        return self.read(input_BT, self.encode(source_BS, keep_BS))[0]

    def pool(self, x_BSD: Tensor) -> Tensor:
        """The vector of the first token, which stands for the whole input."""
        x_BD = x_BSD[:, 0]
        return x_BD if self.pooler is None else self.pooler(x_BD).tanh()

    def predict(self, x_D: Tensor) -> Tensor:
        """The prediction layer: scores over the vocabulary or the classes; without one, the vectors themselves."""
        if self.output is None:
            return x_D
        out: Tensor = self.output(x_D if self.transform is None else self.transform(x_D))
        return out

    def forward(self, source_BS: Tensor, keep_BS: Tensor | None, input_BT: Tensor | None = None) -> Tensor:
        """Scores over the token after each given one. Padding at the end of a row never reaches what is before it."""
        return self.predict(self.hidden(source_BS, keep_BS, input_BT))

    def _embed_source(self, source_BS: Tensor, types_BS: Tensor | None) -> Tensor:
        if self.image is not None:
            x_BSD: Tensor = self.image(source_BS)
            return x_BSD
        x_BSD = self._embed(self.source_embedding, source_BS)
        if self.token_type_embedding is not None:
            types_BS = torch.zeros_like(source_BS) if types_BS is None else types_BS
            x_BSD = x_BSD + self.token_type_embedding(types_BS)
        return x_BSD

    def _embed(self, table: nn.Embedding | None, ids_BT: Tensor) -> Tensor:
        assert table is not None
        x_BTD: Tensor = table(ids_BT)
        return x_BTD * math.sqrt(table.embedding_dim) if self.config.scale_embeddings else x_BTD

    def _tied(self) -> nn.Embedding | None:
        """The table that the prediction layer is the transpose of, if it is."""
        tied = self.config.tie_output and self.config.predicts_tokens
        return self.target_embedding or self.source_embedding if tied else None

    def _tie(self) -> None:
        table = self._tied()
        if table is not None and self.output is not None:
            self.output.weight = table.weight

    def _initialise(self) -> None:
        """Glorot for matrices, zero for biases, and embeddings that have unit variance once scaled.

        Where scores are not scaled by the root of the head width, the queries start so much smaller.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
            elif isinstance(module, nn.GRU | nn.LSTM):
                for name, weight in module.named_parameters():
                    if name.startswith("weight_hh"):
                        for gate in weight.detach().split(module.hidden_size):
                            nn.init.orthogonal_(gate)
                    elif name.startswith("weight_ih"):
                        nn.init.xavier_uniform_(weight)
                    else:
                        nn.init.zeros_(weight)
        for module in self.modules():
            if isinstance(module, Attention) and type(module.score) is Score and isinstance(module.query, nn.Linear):
                with torch.no_grad():
                    module.query.weight.mul_(module.head_width**-0.5)


def on_meta(config: Config) -> Model:
    """A model with shapes but no numbers, for configurations too large to build."""
    with torch.device("meta"):
        return Model(config)


def unfilled(config: Config, device: str | torch.device = "cpu") -> Model:
    """A model whose parameters are yet to be loaded: nothing is spent on initialising them."""
    return allocate(on_meta(config), device)


def allocate(model: Model, device: str | torch.device = "cpu") -> Model:
    """Give memory to a model that has none; what is in it is anything."""
    model.to_empty(device=device)  # no module keeps numbers that are not parameters
    model._tie()  # moving made two tensors of what was one
    return model


AnyAttention = Attention | LSHAttention


def attentions(model: Model) -> dict[str, AnyAttention]:
    """Every attention of a model by name; one that two modules share has its first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AnyAttention)}


def place(name: str) -> tuple[str, int]:
    """The kind of an attention, encoder, decoder or cross, and its layer."""
    tower, _, index, role = name.split(".")
    return ("cross" if role == "cross" else tower), int(index)


def head_numbers(model: Model, name: str) -> tuple[int, ...]:
    """The numbers of an attention's heads: those it had before any pruning."""
    attention = attentions(model)[name]
    kept = attention.kept if isinstance(attention, Attention) else None
    return tuple(kept) if kept is not None else tuple(range(attention.heads))
