"""The layout of CTranslate2, which decodes encoder-decoders fast on a processor: our settings and weights there.

Whatever it has no place for is refused by name, so that nothing is written that would compute something else.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer as Library
from torch import Tensor

from regard.config import Config, Stack
from regard.convert.proof import LONGEST, Proof
from regard.convert.table import Table, unfill
from regard.errors import UserError
from regard.files import replace_directory
from regard.nn.position import sinusoid
from regard.run import Run, weights_of
from regard.text.tokenizer import Tokenizer

Precision = Literal["fp32", "int8"]

COMPUTE = {"fp32": "float32", "int8": "int8"}
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH", "tanh": "Tanh"}
POSITIONS = 8192  # rows of a table written for positions that we compute: there it ends, here it never does
FAR = 128  # distance from which on buckets are one


def library() -> Any:
    """The package, which is an extra."""
    try:
        return importlib.import_module("ctranslate2")
    except ImportError:
        raise UserError("ctranslate2 is not installed: pip install 'regard[ctranslate2]'") from None


class Names(NamedTuple):
    """The tokens of both sides by id, as CTranslate2 wants them: different strings."""

    source: list[str]
    target: list[str]


def names_of(run: Run) -> Names:
    """The pieces as the tokenizers write them. No text is cut into one of the names that are not pieces."""
    codec, config = run.codec, run.config
    source = _named(codec.source, codec.features, config.source_vocab)
    return Names(source, _named(codec.target, codec.features if codec.shared else (), config.target_vocab))


def _named(tokenizer: Tokenizer, features: Sequence[str], size: int) -> list[str]:
    pieces = Library.from_str(tokenizer.to_json())
    wanted = [pieces.id_to_token(index) for index in range(tokenizer.size)]
    wanted += [f"< feature {name} >" for name in features]
    names: dict[str, None] = {}
    for index in range(size):
        name = (wanted[index] if index < len(wanted) else None) or f"< {index} >"
        while name in names:
            name = f"< {index} {name} >"
        names[name] = None
    return list(names)


def misfits(config: Config) -> list[str]:
    """The settings that CTranslate2 has no place for, each with what it has."""
    encoder, decoder = config.encoder, config.decoder
    if encoder is None or decoder is None:
        return [f"{' and '.join(config.stacks)} alone (there: an encoder and a decoder)"]
    found: list[str] = []
    for side, stack in config.stacks.items():
        positions = "none, sinusoid, sinusoid_halves, learned, rotary, bucket"
        for setting, fits, there in (
            (f"mixer={stack.mixer}", stack.mixer == "attention", "attention"),
            (f"score={stack.score}", stack.score in ("scaled_dot", "dot"), "scaled_dot, dot"),
            (f"window={stack.window}", stack.window is None, "none"),
            (f"cross_window={stack.cross_window}", stack.cross_window is None, "none"),
            (f"value_width={stack.value}", stack.value == stack.head, f"as wide as keys, {stack.head}"),
            (f"residual={stack.residual}", stack.residual == "add", "add"),
            (f"position={stack.position}", stack.position in positions.split(", "), positions),
            (f"rotary.factor={stack.rotary.factor:g}", stack.rotary.factor == 1 or stack.position != "rotary", "1"),
            ("kept_heads", _whole(stack, stack.kept_heads), "all heads of every layer"),
            ("kept_cross_heads", _whole(stack, stack.kept_cross_heads), "all heads of every layer"),
        ):
            if not fits and (setting.startswith("mixer") or not stack.recurrent):
                found.append(f"{side}.{setting} (there: {there})")
    if not found and encoder.norm_eps != decoder.norm_eps:
        found.append(f"encoder.norm_eps={encoder.norm_eps:g} (there: the decoder's, {decoder.norm_eps:g})")
    return found


def _whole(stack: Stack, kept: tuple[tuple[int, ...], ...] | None) -> bool:
    return kept is None or all(len(heads) == stack.heads for heads in kept)


def table(config: Config) -> Table:
    """Their places for our weights. `weight` and `bias` of a norm are called gamma and beta there."""
    rows: dict[str | tuple[str, ...], str | tuple[str, ...]] = {
        "encoder.embeddings.0": "source_embedding",
        "decoder.embeddings": "target_embedding",
        "decoder.projection": "output",
    }
    for side, stack in config.stacks.items():
        layer, block = f"{side}.layer.{{n}}.", f"{side}.blocks.{{n}}."
        cross = f"{layer}attention."
        rows |= {
            f"{side}.layernorm_embedding": f"{side}.embed_norm",
            f"{layer}self_attention.layer_norm": f"{block}attention_residual.norm",
            f"{layer}self_attention.linear.0": (f"{block}attention.query", f"{block}attention.key_value"),
            f"{layer}self_attention.linear.1": f"{block}attention.out",
            f"{cross}layer_norm": f"{block}cross_residual.norm",
            f"{cross}linear.0": f"{block}cross.query",
            f"{cross}linear.1": f"{block}cross.key_value",
            f"{cross}linear.2": f"{block}cross.out",
            f"{layer}ffn.layer_norm": f"{block}feed_forward_residual.norm",
            f"{layer}ffn.linear_0": f"{block}feed_forward.{'gate' if stack.gated else 'up'}",
            f"{layer}ffn.linear_1": f"{block}feed_forward.down",
            f"{side}.layer_norm": f"{side}.norm",
        }
        if stack.gated:
            rows[f"{layer}ffn.linear_0_noact"] = f"{block}feed_forward.up"
        place = "layer.0.self_attention.relative_attention_bias" if stack.position == "bucket" else "position_encodings"
        rows[f"{side}.{place}"] = f"{side}.position.table.weight"
    return rows


def specify(run: Run, marks: bool) -> Any:
    """Everything that CTranslate2 must be told about a run, and whether to set the marks around a source itself."""
    config = run.config
    if wrong := misfits(config):
        raise UserError(f"{run.path}: CTranslate2 has no place for these settings:\n  " + "\n  ".join(wrong))
    specs = library().specs
    assert config.encoder is not None and config.decoder is not None
    encoder = specs.TransformerEncoderSpec(**_shape(config.encoder, specs))
    decoder = specs.TransformerDecoderSpec(**_shape(config.decoder, specs))
    spec = specs.TransformerSpec(encoder, decoder)
    for name, tensor in unfill(weights_of(run.model), table(config)).items():
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{run.path}: some of its weights are not numbers ({name}); was training stable?")
        _put(spec, name, tensor)
    if config.share_embeddings:
        decoder.embeddings.weight = encoder.embeddings[0].weight
    if config.tie_output:
        decoder.projection.weight = decoder.embeddings.weight
    for tower, stack in ((encoder, config.encoder), (decoder, config.decoder)):
        tower.scale_embeddings = config.scale_embeddings
        _place(tower, stack)
    spec.config.layer_norm_epsilon = config.decoder.norm_eps
    _name(spec, run)
    spec.config.add_source_bos = marks and run.codec.frame in ("both", "start")
    spec.config.add_source_eos = marks and run.codec.frame in ("both", "end")
    return spec


def _shape(stack: Stack, specs: Any) -> dict[str, Any]:
    """What the makers of both towers want to know."""
    turning = {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": stack.rotary.base}  # 0: all of a head
    return {
        "num_layers": stack.layers,
        "num_heads": stack.heads,
        "pre_norm": stack.norm_at == "pre",
        "activation": getattr(specs.Activation, ACTIVATIONS[stack.activation]),
        "layernorm_embedding": stack.embed_norm,
        "relative_attention_bias": stack.position == "bucket",
        "ffn_glu": stack.gated,
        "rms_norm": stack.norm == "rms",
        "num_heads_kv": None if stack.kv == stack.heads else stack.kv,
        "head_dim": None if stack.heads * stack.head == stack.width else stack.head,
        **(turning if stack.position == "rotary" else {}),
    }


def _put(spec: Any, name: str, tensor: Tensor) -> None:
    """Set a variable by its path."""
    *path, last = name.split(".")
    for part in path:
        spec = spec[int(part)] if part.isdecimal() else getattr(spec, part)
    if last == "position_encodings":
        spec, last = spec.position_encodings, "encodings"
    elif hasattr(spec, "gamma"):
        last = {"weight": "gamma", "bias": "beta"}[last]
    setattr(spec, last, tensor.float().contiguous().numpy(force=True))


def _place(tower: Any, stack: Stack) -> None:
    """Positions that are not weights, and how scores are scaled."""
    if stack.position in ("sinusoid", "sinusoid_halves"):
        halves = stack.position == "sinusoid_halves"
        tower.position_encodings.encodings = sinusoid(torch.arange(POSITIONS), stack.width, halves).numpy()
    elif stack.position == "none":  # without a table it would have one of its own
        tower.position_encodings.encodings = np.zeros((POSITIONS, stack.width), np.float32)
    for layer in tower.layer:
        own = layer.self_attention
        if stack.position == "bucket":
            own.relative_attention_bias = tower.layer[0].self_attention.relative_attention_bias
            own.relative_attention_max_distance = np.int32(FAR)
        for attention in (own, getattr(layer, "attention", None)):
            if attention is not None and stack.score == "dot":
                attention.queries_scale = 1.0


def _name(spec: Any, run: Run) -> None:
    names, ids, told = names_of(run), run.config.ids, spec.config
    spec.register_source_vocabulary(names.source)
    spec.register_target_vocabulary(names.target)
    told.unk_token, told.bos_token, told.eos_token = (names.target[i] for i in (ids.unk, ids.sos, ids.eos))
    told.decoder_start_token = names.target[run.config.start_id]


def write(run: Run, directory: Path, precision: Precision = "fp32", marks: bool = False) -> None:
    """Write a run into a directory that is there and empty."""
    spec = specify(run, marks)
    spec.validate()
    spec.optimize(COMPUTE[precision])
    spec.save(str(directory))


def open_translator(directory: Path, precision: Precision, workers: int = 1, threads: int = 1) -> Any:
    """What CTranslate2 makes of a directory, in memory: the directory is not needed any more."""
    there = library()
    if COMPUTE[precision] not in there.get_supported_compute_types("cpu"):
        raise UserError(f"precision {precision}: CTranslate2 cannot do this on this processor; use fp32")
    return there.Translator(
        str(directory), compute_type=COMPUTE[precision], inter_threads=workers, intra_threads=threads
    )


TOLERANCE = 1e-4  # of a log-probability, relative to it where it is above 1


@dataclass
class CTranslate2Report:
    """What was written, and how it was proven."""

    source: str
    architecture: str
    parameters: int
    precision: Precision
    proof: Proof
    int8: float | None  # the largest difference of a log-probability when weights are written in 8 bits

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def told(self) -> str:
        """The proof in a sentence."""
        proof = self.proof
        told = (
            f"proven: log-probabilities of {proof.samples} random outputs by this model and by CTranslate2"
            f" {proof.version} in fp32 differ by at most {proof.difference:.2g} (allowed: {proof.tolerance:g})"
        )
        return told if self.int8 is None else f"{told}; in int8, as written, by {self.int8:.2g}"


def to_ctranslate2(run: Run, out: str | Path, samples: int, precision: Precision = "fp32") -> CTranslate2Report:
    """Write a run as a directory of CTranslate2."""
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: exists already; name a new directory")
    size = sum(parameter.numel() for parameter in weights_of(run.model).values())
    reports: list[CTranslate2Report] = []

    def fill(path: Path) -> None:
        write(run, path, marks=True)  # what is proven is the model, before its weights lose digits
        proof = Proof(samples, compare(run, path, samples, "fp32"), TOLERANCE, library().__version__)
        if not proof.holds:
            raise UserError(
                f"{run.path}: the converted model is not the same: its log-probabilities differ from those of"
                f" CTranslate2 {proof.version} by {proof.difference:.3g}, where {proof.tolerance:g} is allowed."
                " Nothing was written"
            )
        off = None
        if precision == "int8":
            for file in path.iterdir():
                file.unlink()
            write(run, path, "int8", marks=True)
            off = compare(run, path, samples, "int8")
        reports.append(CTranslate2Report(run.path.resolve().name, "TransformerSpec", size, precision, proof, off))

    replace_directory(out, fill)
    return reports[0]


def compare(run: Run, directory: Path, count: int, precision: Precision) -> float:
    """The largest difference of the log-probability of any token, relative where that is above 1."""
    config, ids, frame = run.config, run.config.ids, run.codec.frame
    sources, targets = _draw(config, config.source_vocab, count), _draw(config, config.target_vocab, count)
    names = names_of(run)
    theirs = open_translator(directory, precision).score_batch(
        [[names.source[i] for i in row] for row in sources],
        [[names.target[i] for i in row] for row in targets],
        max_input_length=0,
    )
    worst = 0.0
    for source, target, result in zip(sources, targets, theirs, strict=True):
        before = [ids.sos] if frame in ("both", "start") else []
        after = [ids.eos] if frame in ("both", "end") else []
        ours_T = forced(run, [*before, *source, *after], target)
        gap_T = (ours_T - torch.tensor(result.log_probs)).abs() / ours_T.abs().clamp(min=1)
        worst = max(worst, gap_T.nan_to_num(math.inf).max().item())
    return worst


def _draw(config: Config, vocab: int, count: int) -> list[list[int]]:
    """The same random texts each time, of different lengths."""
    assert config.encoder is not None and config.decoder is not None
    dice = np.random.default_rng(1)
    marks = set(config.ids.model_dump(exclude_none=True).values())
    text = [index for index in range(vocab) if index not in marks] or [config.ids.unk]
    longest = min(LONGEST, config.encoder.max_length - 2, config.decoder.max_length - 2)  # room for marks
    return [dice.choice(text, dice.integers(1, max(1, longest) + 1)).tolist() for _ in range(count)]


@torch.inference_mode()
def forced(run: Run, source: list[int], target: list[int]) -> Tensor:
    """Our log-probability of every token of an output, and of the end after them."""
    config, device = run.config, run.model.device
    input_1T = torch.tensor([[config.start_id, *target]], device=device)
    logp_TV = run.model(torch.tensor([source], device=device), None, input_1T)[0].float().log_softmax(-1).cpu()
    logp_T: Tensor = logp_TV.gather(1, torch.tensor([[*target, config.ids.eos]]).T).squeeze(1)
    return logp_T
