"""The model: token ids or images in, logits out. One class for all families, selected by the config."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.config import Config
from regard.errors import UserError, shown_value
from regard.nn.attention import Attention
from regard.nn.block import ImageEmbedding, LmHeadTransform
from regard.nn.cache import State
from regard.nn.lsh import LSHAttention
from regard.nn.primitives import Linear
from regard.nn.recurrent import RecurrentDecoder, RecurrentEncoder
from regard.nn.score import Score
from regard.nn.transformer import SegmentMemory, Transformer

ONE_STACK = "for a model with one stack, model(tokens, None) returns the logits"


class Model(nn.Module):
    """An encoder, a decoder, or both, between embeddings and an output layer: LM head or classifier."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        if not isinstance(config, Config):
            example = "regard.preset('transformer-tiny', vocab=1000)"
            raise UserError(f"Model: takes a regard.Config, such as {example}, not {shown_value(config)}")
        self.config = config
        encoder = config.encoder
        decoder = config.decoder
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
        self.pooler = Linear(top.out_width, top.out_width) if config.pooler else None
        self.transform = LmHeadTransform(top) if config.output == "transformed" else None
        self.output: Linear | None = None
        if config.output != "none":
            device = "meta" if self._tied() is not None else None  # no memory: the weight is the embedding's
            vocab = config.output_vocab
            self.output = Linear(top.out_width, config.classes or vocab, bias=config.output_bias, device=device)
            if device and config.output_bias:
                self.output.bias = nn.Parameter(torch.zeros(vocab))
        self._initialise()
        self._tie()

    @property
    def top_name(self) -> str:
        """The name of the stack whose hidden states the output layer reads."""
        return "encoder" if self.decoder is None else "decoder"

    @property
    def decoder_only(self) -> bool:
        """Whether the model is a language model, whose output continues its input."""
        return self.encoder is None

    @property
    def classifies(self) -> bool:
        return self.config.output == "classes"

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def size(self) -> int:
        """Number of parameters; a shared tensor counts once."""
        return sum(p.numel() for p in self.parameters())

    def attentions(self) -> dict[str, Attention | LSHAttention]:
        """Every attention by module name; a shared attention has its first name."""
        return {name: part for name, part in self.named_modules() if isinstance(part, Attention | LSHAttention)}

    def encode(self, source_BS: Tensor, keep_BS: Tensor | None = None) -> State:
        """Encode the source -> the decoding state before the first output token."""
        if self.encoder is None or self.decoder is None:
            raise UserError(f"encode: needs a model with an encoder and a decoder; {ONE_STACK}")
        encoded = self.encoder.encode(self._embed_source(source_BS, None), keep_BS)
        return self.decoder.start(encoded)

    def step(self, tokens_N: Tensor, state: State) -> tuple[Tensor, State]:
        """Feed one token to every hypothesis -> logits of the next token, and the new state."""
        x_N1D, state = self.read(tokens_N.unsqueeze(1), state)
        return self.predict(x_N1D.squeeze(1)), state

    def read(self, tokens_NT: Tensor, state: State, keep_NT: Tensor | None = None) -> tuple[Tensor, State]:
        """Feed tokens to the decoder -> a hidden state per token, and the new decoding state."""
        if self.decoder is None:
            raise UserError(f"read, step: this model has an encoder but no decoder; {ONE_STACK}")
        out: tuple[Tensor, State] = self.decoder(self.embed(self.target_embedding, tokens_NT), state, keep_NT)
        return out

    def read_segment(self, tokens_BT: Tensor, memory: SegmentMemory | None = None) -> tuple[Tensor, SegmentMemory]:
        """Read the next segment of a long text -> a hidden state per token, and the memory for the next segment."""
        if not isinstance(self.decoder, Transformer):
            raise UserError("read_segment: needs a Transformer decoder")
        return self.decoder.read_segment(self.embed(self.target_embedding, tokens_BT), memory)

    def hidden(
        self, source_BS: Tensor, keep_BS: Tensor | None, input_BT: Tensor | None = None, types_BS: Tensor | None = None
    ) -> Tensor:
        """The hidden states that the output layer reads, (B, T, D); a decoder is teacher-forced.

        A classifier has one per row, (B, 1, D). `types_BS` are token types; None: all tokens have the first type.
        """
        if self.decoder is None:
            assert self.encoder is not None
            x_BSD = self.encoder.encode(self._embed_source(source_BS, types_BS), keep_BS).states_BSD
            return self.pool(x_BSD).unsqueeze(1) if self.classifies else x_BSD
        if self.encoder is None:
            tokens_BT, keep_BT = (source_BS, keep_BS) if input_BT is None else (input_BT, None)
            return self.read(tokens_BT, State(()), keep_BT)[0]
        if input_BT is None:
            raise UserError("a model with an encoder and a decoder also reads its output: model(source, keep, input)")
        return self.read(input_BT, self.encode(source_BS, keep_BS))[0]

    def pool(self, x_BSD: Tensor) -> Tensor:
        """The hidden state of the first token, after the pooler if the model has one."""
        x_BD = x_BSD[:, 0]
        return x_BD if self.pooler is None else self.pooler(x_BD).tanh()

    def predict(self, x_D: Tensor) -> Tensor:
        """Logits over the vocabulary or the classes; without an output layer, the hidden states."""
        if self.output is None:
            return x_D
        out: Tensor = self.output(x_D if self.transform is None else self.transform(x_D))
        return out

    def forward(self, source_BS: Tensor, keep_BS: Tensor | None, input_BT: Tensor | None = None) -> Tensor:
        """Logits of the next token at each position, (B, T, V); (B, 1, classes) for a classifier."""
        return self.predict(self.hidden(source_BS, keep_BS, input_BT))

    def _embed_source(self, source_BS: Tensor, types_BS: Tensor | None) -> Tensor:
        if self.image is not None:
            x_BSD: Tensor = self.image(source_BS)
            return x_BSD
        x_BSD = self.embed(self.source_embedding, source_BS)
        if self.token_type_embedding is not None:
            types_BS = torch.zeros_like(source_BS) if types_BS is None else types_BS
            x_BSD = x_BSD + self.token_type_embedding(types_BS)
        return x_BSD

    def embed(self, table: nn.Embedding | None, ids_BT: Tensor) -> Tensor:
        """Embed token ids, scaled by sqrt(width) if the config sets scale_embeddings."""
        assert table is not None
        x_BTD: Tensor = table(ids_BT)
        return x_BTD * math.sqrt(table.embedding_dim) if self.config.scale_embeddings else x_BTD

    def _tied(self) -> nn.Embedding | None:
        """The embedding whose weight the LM head shares, or None."""
        tied = self.config.tie_output and self.config.predicts_tokens
        return self.target_embedding or self.source_embedding if tied else None

    def _tie(self) -> None:
        table = self._tied()
        if table is not None and self.output is not None:
            self.output.weight = table.weight

    def _initialise(self) -> None:
        """Initialise matrices by Glorot, biases with zero, and embeddings with unit variance after scaling.

        If the attention scores are not scaled by the root of the head width, the query weights are.
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


class _SkipNormal(TorchFunctionMode):
    """Skips `normal_`, which has no effect on the meta device but imports 800 modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.normal_, nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def on_meta(config: Config) -> Model:
    """A model on the meta device: tensors with shapes but no memory."""
    with torch.device("meta"), _SkipNormal():
        return Model(config)


def allocate(model: Model, device: str | torch.device = "cpu") -> Model:
    """Allocate the weights of a model on the meta device, uninitialised."""
    for module in model.modules():  # the model has no buffers
        for name, x in module.named_parameters(recurse=False):
            # to_empty would import sympy: it calls empty_like on a meta tensor
            empty = torch.empty(x.shape, dtype=x.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, x.requires_grad))
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    model._tie()  # the loop above has replaced the shared tensor by two tensors
    return model


def kind_and_layer(name: str) -> tuple[str, int]:
    """The kind (encoder, decoder or cross) and the layer of the attention with this module name."""
    stack, _, layer, role = name.split(".")
    return ("cross" if role == "cross" else stack), int(layer)
