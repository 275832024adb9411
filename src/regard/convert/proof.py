"""Proof that two models are one: sample inputs through both, and the largest difference of what comes out."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.config import Config
from regard.errors import UserError
from regard.model import Model

LONGEST = 24  # tokens of a sample


@dataclass(frozen=True)
class Proof:
    """How far apart the outputs of two models are, relative to the largest output where that is above 1."""

    samples: int
    difference: float
    tolerance: float
    version: str  # of transformers

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance  # not a number is not at most anything


@dataclass(frozen=True)
class Samples:
    """Random inputs of different lengths, padded."""

    source: Tensor  # ids (N, S) or pixels (N, C, H, W)
    keep_NS: Tensor | None
    types_NS: Tensor | None
    input_NT: Tensor | None


def draw_samples(config: Config, count: int) -> Samples:
    """The same random inputs each time."""
    dice = torch.Generator().manual_seed(1)
    patches = config.patches
    if patches is not None:
        pixels = torch.rand(count, patches.channels, patches.height, patches.width, generator=dice)
        return Samples(pixels, None, None, None)
    longest = LONGEST
    for stack in (config.encoder, config.decoder):
        if stack is not None:  # within a chunk nothing is hashed: hashes are random, and others there than here
            longest = min(longest, stack.max_length, stack.lsh.chunk if stack.mixer == "lsh" else longest)
    lengths_N = torch.randint(1, longest + 1, (count,), generator=dice)
    lengths_N[0] = longest
    keep_NS = torch.arange(longest) < lengths_N[:, None]
    vocab = config.source_vocab if config.encoder else config.target_vocab
    source = torch.randint(vocab, (count, longest), generator=dice).masked_fill(~keep_NS, config.ids.pad)
    types_NS = input_NT = None
    if config.token_types:
        types_NS = torch.randint(config.token_types, (count, longest), generator=dice)
    if config.encoder and config.decoder:
        input_NT = torch.randint(config.target_vocab, (count, longest), generator=dice)
        input_NT[:, 0] = config.start_id
    return Samples(source, keep_NS, types_NS, input_NT)


@torch.inference_mode()
def our_outputs(model: Model, samples: Samples) -> list[Tensor]:
    """Scores of every real token (or of the image or text as a whole), or vectors where nothing is predicted."""
    config = model.config
    x = model.hidden(samples.source, samples.keep_NS, samples.input_NT, samples.types_NS)
    outputs = [_real(model.predict(x).squeeze(1) if config.output == "classes" else model.predict(x), samples)]
    if config.output == "none" and config.pooler:
        outputs.append(model.pool(x))
    return outputs


@torch.inference_mode()
def their_outputs(model: Any, config: Config, samples: Samples) -> list[Tensor]:
    """The same from a model of transformers."""
    if config.patches is not None:
        return [model(pixel_values=samples.source).logits]
    given = {
        "input_ids": samples.source,
        "attention_mask": samples.keep_NS.long() if samples.keep_NS is not None else None,
    }
    if samples.types_NS is not None:
        given["token_type_ids"] = samples.types_NS
    if samples.input_NT is not None:
        given["decoder_input_ids"] = samples.input_NT
    out = model(**given)
    if config.output != "none":
        return [_real(out.logits, samples)]
    return [_real(out.last_hidden_state, samples)] + ([out.pooler_output] if config.pooler else [])


def _real(x: Tensor, samples: Samples) -> Tensor:
    """Without what stands at padding."""
    return x if x.ndim < 3 or samples.input_NT is not None or samples.keep_NS is None else x[samples.keep_NS]


def prove(model: Model, directory: Path, architecture: str, count: int, tolerance: float) -> Proof | None:
    """Compare our model with the one that transformers finds in a directory; None where that has no such model."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return None
    samples = draw_samples(model.config, count)
    with _quiet(transformers):
        kind = getattr(transformers, architecture, None)
        if kind is None:
            return None
        try:
            theirs = kind.from_pretrained(
                directory,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=any(directory.glob("*.safetensors")),
            )
        except Exception as error:  # whatever it may have against the directory
            told = " ".join(str(error).split())
            raise UserError(f"{directory}: cannot be proven, transformers does not load it: {told[:500]}") from None
        outputs = their_outputs(theirs.eval(), model.config, samples)
    pairs = zip(our_outputs(model.eval(), samples), outputs, strict=True)
    difference = max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)
    return Proof(count, difference, tolerance, transformers.__version__)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Let the library load without its own talk."""
    logging = transformers.utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
