"""Proof that a converted model computes the same: random inputs through both, and the report of a conversion."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.config import Config
from regard.errors import UserError
from regard.files import replace_directory
from regard.model import Model

LONGEST = 24  # tokens of a sample
UNPADDED = {"pixel_values", "decoder_input_ids"}  # inputs of models whose outputs have no padding


@dataclass(frozen=True)
class Proof:
    """How far apart the outputs of two models are, relative to the largest output where that is above 1."""

    samples: int
    difference: float
    tolerance: float
    version: str  # of the other library

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance  # false when it is not a number

    def require(self, source: str, outputs: str, library: str) -> None:
        """Refuse models that differ."""
        if not self.holds:
            raise UserError(
                f"{source}: the converted model is not the same: its {outputs} differ from those of {library}"
                f" {self.version} by {self.difference:.3g}, where {self.tolerance:g} is allowed. Nothing was written"
            )


@dataclass(frozen=True)
class ConversionReport:
    """What was converted into what, and how it was proven."""

    source: str
    architecture: str
    parameters: int
    proof: Proof | None
    summary: str  # the proof in a sentence
    details: dict[str, Any]  # what else there is to know of a format

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["summary"], fields["details"]
        return fields | self.details


def require_new(out: str | Path) -> Path:
    """The directory to write, which must not exist, or be empty."""
    path = Path(out)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path}: exists already; name a new directory")
    return path


def write_reported(out: Path, write: Callable[[Path], ConversionReport]) -> ConversionReport:
    """Write a directory, complete or not at all."""
    reports: list[ConversionReport] = []
    replace_directory(out, lambda path: reports.append(write(path)))
    return reports[0]


Samples = dict[str, Tensor]  # the inputs of a model, ids (N, S) or pixels (N, C, H, W), by their names in transformers


def draw_samples(config: Config, count: int) -> Samples:
    """Random inputs of different lengths, padded; the same each time."""
    generator = torch.Generator().manual_seed(1)
    if (patches := config.patches) is not None:
        shape = (count, patches.channels, patches.height, patches.width)
        return {"pixel_values": torch.rand(shape, generator=generator)}
    longest = LONGEST
    for stack in config.stacks.values():
        # A sequence within a chunk is not hashed: hashes are random, and differ between the libraries.
        longest = min(longest, stack.max_length, stack.lsh.chunk if stack.mixer == "lsh" else longest)
    lengths_N = torch.randint(1, longest + 1, (count,), generator=generator)
    lengths_N[0] = longest
    keep_NS = torch.arange(longest) < lengths_N[:, None]
    vocab = config.source_vocab if "encoder" in config.stacks else config.target_vocab
    ids_NS = torch.randint(vocab, (count, longest), generator=generator)
    samples = {"input_ids": ids_NS.masked_fill(~keep_NS, config.ids.pad), "attention_mask": keep_NS}
    if config.token_types:
        samples["token_type_ids"] = torch.randint(config.token_types, (count, longest), generator=generator)
    if len(config.stacks) == 2:
        samples["decoder_input_ids"] = torch.randint(config.target_vocab, (count, longest), generator=generator)
        samples["decoder_input_ids"][:, 0] = config.start_id
    return samples


@torch.inference_mode()
def our_outputs(model: Model, samples: Samples) -> list[Tensor]:
    """Logits of every token that is not padding (or of the image or text as a whole), or vectors without an LM head."""
    config = model.config
    source, *_ = samples.values()
    x = model.hidden(source, *map(samples.get, ("attention_mask", "decoder_input_ids", "token_type_ids")))
    logits = model.predict(x)
    outputs = [_without_padding(logits.squeeze(1) if config.output == "classes" else logits, samples)]
    if config.output == "none" and config.pooler:
        outputs.append(model.pool(x))
    return outputs


@torch.inference_mode()
def their_outputs(model: Any, config: Config, samples: Samples) -> list[Tensor]:
    """The same from a model of transformers."""
    out = model(**{name: x.long() if x.dtype == torch.bool else x for name, x in samples.items()})
    if config.output != "none":
        return [_without_padding(out.logits, samples)]
    return [_without_padding(out.last_hidden_state, samples), *([out.pooler_output] if config.pooler else [])]


def _without_padding(x: Tensor, samples: Samples) -> Tensor:
    return x[samples["attention_mask"]] if x.ndim == 3 and samples.keys().isdisjoint(UNPADDED) else x


def prove(model: Model, directory: Path, architecture: str, count: int, tolerance: float) -> Proof | None:
    """Compare our model with the one that transformers loads from a directory; None where it has no such model."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return None
    samples = draw_samples(model.config, count)
    with _quiet(transformers):
        model_class = getattr(transformers, architecture, None)
        if model_class is None:
            return None
        try:
            theirs = model_class.from_pretrained(
                directory,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=any(directory.glob("*.safetensors")),
            )
        except Exception as error:  # of any kind: the directory may be wrong in many ways
            message = " ".join(str(error).split())
            raise UserError(f"{directory}: cannot be proven, transformers does not load it: {message[:500]}") from None
        outputs = their_outputs(theirs.eval(), model.config, samples)
    pairs = zip(our_outputs(model.eval(), samples), outputs, strict=True)
    difference = max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)
    return Proof(count, difference, tolerance, transformers.__version__)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence the library's log, warnings and progress bars."""
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
