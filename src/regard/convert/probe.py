"""Inputs and weights that make every setting of a model show in its outputs.

With the weights of a trained model a setting may hide: a `norm_eps` beside large variances, a window beyond short
inputs, the slope of an activation that is never reached. The probe weights are random, and scaled layer by layer so
that hidden states, attention scores and pre-activations have about the size at which every term counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.config import Config
from regard.model import Model

SHORT, LONG = 24, 512  # most tokens of the samples that are padded together, and of the long one
SINUSOIDS = ("sinusoid", "sinusoid_halves")

Samples = dict[str, Tensor]  # the inputs of a model, ids (N, S) or pixels (N, C, H, W), by their names in transformers


def longest_input(config: Config) -> int:
    """The tokens of the longest input to compare."""
    longest = LONG
    for stack in config.stacks.values():
        longest = min(longest, stack.max_length, stack.max_positions or LONG)
        if stack.mixer == "lsh":  # within a chunk nothing is hashed: hashes are random, and differ between libraries
            longest = min(longest, stack.lsh.chunk)
    return longest


def draw_samples(config: Config, count: int) -> list[Samples]:
    """Random inputs, the same each time: some of different lengths, padded, and one as long as is allowed."""
    generator = torch.Generator().manual_seed(1)
    if (patches := config.patches) is not None:
        shape = (count, patches.channels, patches.height, patches.width)
        return [{"pixel_values": torch.rand(shape, generator=generator)}]
    longest = longest_input(config)
    short = min(SHORT, longest)
    lengths_N = torch.randint(1, short + 1, (count,), generator=generator)
    lengths_N[0] = short
    batches = [_draw_tokens(config, lengths_N, generator)]
    if longest > short:
        batches.append(_draw_tokens(config, torch.tensor([longest]), generator))
    return batches


def _draw_tokens(config: Config, lengths_N: Tensor, generator: torch.Generator) -> Samples:
    """A batch of random ids of these lengths."""
    shape = len(lengths_N), int(lengths_N.max())
    keep_NS = torch.arange(shape[1]) < lengths_N[:, None]
    vocab = config.source_vocab if "encoder" in config.stacks else config.target_vocab
    ids_NS = torch.randint(vocab, shape, generator=generator)
    samples = {"input_ids": ids_NS.masked_fill(~keep_NS, config.ids.pad), "attention_mask": keep_NS}
    if config.token_types:
        samples["token_type_ids"] = torch.randint(config.token_types, shape, generator=generator)
    if len(config.stacks) == 2:
        samples["decoder_input_ids"] = torch.randint(config.target_vocab, shape, generator=generator)
        samples["decoder_input_ids"][:, 0] = config.start_id
    return samples


@torch.no_grad()
def fill_weights(model: Model, run: Callable[[], Any]) -> None:
    """Give a model the probe weights; `run` sends inputs through it, by which its linear layers are scaled."""
    generator = torch.Generator().manual_seed(2)

    def noise(parameter: Tensor) -> Tensor:
        return torch.randn(parameter.shape, generator=generator).to(parameter)

    hooks: list[RemovableHandle] = []
    filled: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        size = _size(name, module, model.config)
        for key, parameter in module.named_parameters(recurse=False):
            if parameter in filled:  # an LM head that is the embedding
                continue
            filled.add(parameter)
            if key == "bias":
                parameter.copy_(0.3 * size * noise(parameter))
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                parameter.copy_(size * (1 + 0.3 * noise(parameter)))
            else:
                parameter.copy_(size * noise(parameter))
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_hook(_Scaling(size, tied=module.weight is _embedding(model))))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()


class _Scaling:
    """A forward hook that scales the weight of a linear layer, once, so that its outputs have a certain size."""

    def __init__(self, size: float, tied: bool) -> None:
        self.size, self.tied, self.done = size, tied, False

    def __call__(self, linear: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        if not self.done:
            self.done = True
            bias = 0 if linear.bias is None else linear.bias
            found = float((output - bias).square().mean().sqrt())
            if not self.tied:
                linear.weight.mul_(self.size / max(found, 1e-30))
            elif linear.bias is not None:  # the weight is the embedding's: the bias takes the size of its products
                linear.bias.mul_(found / self.size)
        result: Tensor = linear.forward(*inputs)
        return result


def _embedding(model: Model) -> Tensor | None:
    table = model.target_embedding or model.source_embedding
    return None if table is None else table.weight


def _size(name: str, module: nn.Module, config: Config) -> float:
    """The size of the outputs of a module, by what it is for."""
    stack = config.stacks.get(name.partition(".")[0].replace("source_embedding", "encoder"), config.top)
    # About the size at which norm_eps counts as much as the variance.
    hidden = 2 * math.sqrt(stack.norm_eps)
    last = name.rpartition(".")[2]
    if last.endswith("_embedding") or name.startswith("image"):
        size = 1.0 if stack.position in SINUSOIDS else hidden  # beside sines and cosines
        return size / math.sqrt(stack.width) if config.scale_embeddings and config.patches is None else size
    if last in ("out", "down", "embed_norm"):
        first = name.endswith(".blocks.0.attention.out")  # which is added to the embeddings
        return 1.0 if first and stack.position in SINUSOIDS else hidden
    if isinstance(module, nn.Embedding):
        return 1.0 if stack.position == "bucket" else hidden  # added to scores, or to embeddings
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return hidden if stack.norm_at == "post" and ".blocks." in name else 1.0
    if last == "query" and stack.score == "dot":
        return 1 / math.sqrt(stack.head)
    return 2.0 if last in ("up", "gate") else 1.0
