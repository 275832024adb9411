"""Conversion to CTranslate2, which decodes encoder-decoders fast on a CPU, proven by forced scores."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer as Library
from torch import Tensor

from regard.config import Config, Stack
from regard.convert.proof import SHORT_TOKENS, ConversionReport, Proof, require_new, write_reported
from regard.convert.table import Table, export_weights
from regard.errors import UserError, missing_extra, plural
from regard.nn.position import sinusoid
from regard.run import Run
from regard.text.tokenizer import Tokenizer
from regard.weight_files import weights_of

Precision = Literal["fp32", "int8"]

COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH", "tanh": "Tanh"}
POSITION_KINDS = ("none", "sinusoid", "sinusoid_halves", "learned", "rotary", "bucket")
POSITIONS = 8192  # rows of a written position table; regard computes positions without a limit
MAX_DISTANCE = 128  # all larger distances share a bucket
TOLERANCE = 1e-4  # of a log-probability; relative if its absolute value is above 1


def library() -> Any:
    """Import ctranslate2, an optional package."""
    try:
        return importlib.import_module("ctranslate2")
    except ImportError:
        raise missing_extra("CTranslate2", "the package ctranslate2", "ctranslate2") from None


def names_of(run: Run) -> tuple[list[str], list[str]]:
    """The names of the source and target tokens by id: unique, as CTranslate2 requires, some invented."""
    codec = run.codec
    config = run.config
    source = _token_names(codec.source, codec.features, config.source_vocab)
    return source, _token_names(codec.target, codec.features if codec.shared else (), config.target_vocab)


def _token_names(tokenizer: Tokenizer, features: Sequence[str], size: int) -> list[str]:
    pieces = Library.from_str(tokenizer.to_json())
    tokens = [pieces.id_to_token(index) for index in range(tokenizer.size)]
    tokens += [f"< feature {name} >" for name in features]
    names: dict[str, None] = {}
    for index in range(size):
        name = (tokens[index] if index < len(tokens) else None) or f"< {index} >"
        while name in names:
            name = f"< {index} {name} >"
        names[name] = None
    return list(names)


def misfits(config: Config) -> list[str]:
    """The settings that CTranslate2 does not support, each with the supported ones."""
    encoder = config.encoder
    decoder = config.decoder
    if encoder is None or decoder is None:
        return [f"only {' and '.join(config.stacks)} (there: an encoder and a decoder)"]
    wrong: list[str] = []
    for side, stack in config.stacks.items():
        for setting, fits, there in (
            (f"mixer={stack.mixer}", stack.mixer == "attention", "attention"),
            (f"score={stack.score}", stack.score in ("scaled_dot", "dot"), "scaled_dot, dot"),
            (f"window={stack.window}", stack.window is None, "none"),
            (f"cross_window={stack.cross_window}", stack.cross_window is None, "none"),
            (f"value_width={stack.value}", stack.value == stack.head, f"as wide as keys, {stack.head}"),
            (f"residual={stack.residual}", stack.residual == "add", "add"),
            (f"position={stack.position}", stack.position in POSITION_KINDS, ", ".join(POSITION_KINDS)),
            (f"rotary.factor={stack.rotary.factor:g}", stack.rotary.factor == 1 or stack.position != "rotary", "1"),
            ("kept_heads", _keeps_all(stack, stack.kept_heads), "all heads of every layer"),
            ("kept_cross_heads", _keeps_all(stack, stack.kept_cross_heads), "all heads of every layer"),
        ):
            if not fits and (setting.startswith("mixer") or not stack.recurrent):
                wrong.append(f"{side}.{setting} (there: {there})")
    if not wrong and encoder.norm_eps != decoder.norm_eps:
        wrong.append(f"encoder.norm_eps={encoder.norm_eps:g} (there: the decoder's, {decoder.norm_eps:g})")
    return wrong


def _keeps_all(stack: Stack, kept: tuple[tuple[int, ...], ...] | None) -> bool:
    return kept is None or all(len(heads) == stack.heads for heads in kept)


def weight_table(config: Config) -> Table:
    """CTranslate2 variables -> our weights. `weight` and `bias` of a norm are gamma and beta there."""
    rows: Table = {
        "encoder.embeddings.0": "source_embedding",
        "decoder.embeddings": "target_embedding",
        "decoder.projection": "output",
    }
    for side, stack in config.stacks.items():
        layer = f"{side}.layer.{{n}}."
        block = f"{side}.blocks.{{n}}."
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
        bucket = stack.position == "bucket"
        positions = "layer.0.self_attention.relative_attention_bias" if bucket else "position_encodings"
        rows[f"{side}.{positions}"] = f"{side}.position.table.weight"
    return rows


def specification(run: Run, add_special_tokens: bool) -> Any:
    """A run as a TransformerSpec; with `add_special_tokens`, CTranslate2 adds the special tokens of a source."""
    config = run.config
    if wrong := misfits(config):
        raise UserError(f"{run.path}: CTranslate2 does not support these settings:\n  " + "\n  ".join(wrong))
    specs = library().specs
    encoder = specs.TransformerEncoderSpec(**_stack_options(config.stacks["encoder"], specs))
    decoder = specs.TransformerDecoderSpec(**_stack_options(config.stacks["decoder"], specs))
    spec = specs.TransformerSpec(encoder, decoder)
    for name, tensor in export_weights(weights_of(run.model), weight_table(config)).items():
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{run.path}: some weights are not finite ({name}); was training stable?")
        _set_variable(spec, name, tensor)
    if config.share_embeddings:
        decoder.embeddings.weight = encoder.embeddings[0].weight
    if config.tie_output:
        decoder.projection.weight = decoder.embeddings.weight
    for stack_spec, stack in zip((encoder, decoder), config.stacks.values(), strict=True):
        stack_spec.scale_embeddings = config.scale_embeddings
        _set_positions(stack_spec, stack)
    source, target = names_of(run)
    ids = config.ids
    settings = spec.config
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    settings.unk_token = target[ids.unk]
    settings.bos_token = target[ids.sos]
    settings.eos_token = target[ids.eos]
    settings.decoder_start_token = target[config.start_id]
    settings.layer_norm_epsilon = config.top.norm_eps
    before, after = ids.around(run.codec.frame)
    settings.add_source_bos = add_special_tokens and bool(before)
    settings.add_source_eos = add_special_tokens and bool(after)
    return spec


def _stack_options(stack: Stack, specs: Any) -> dict[str, Any]:
    """The arguments of a TransformerEncoderSpec or TransformerDecoderSpec."""
    rotary = {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": stack.rotary.base}  # 0: the whole head
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
        **(rotary if stack.position == "rotary" else {}),
    }


def _set_variable(spec: Any, name: str, tensor: Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        spec = spec[int(part)] if part.isdecimal() else getattr(spec, part)
    if last == "position_encodings":
        spec = spec.position_encodings
        last = "encodings"
    elif hasattr(spec, "gamma"):
        last = {"weight": "gamma", "bias": "beta"}[last]
    setattr(spec, last, tensor.float().contiguous().numpy(force=True))


def _set_positions(spec: Any, stack: Stack) -> None:
    """Set the position tables that are not weights, and the scale of attention scores."""
    if stack.position in ("sinusoid", "sinusoid_halves"):
        halves = stack.position == "sinusoid_halves"
        spec.position_encodings.encodings = sinusoid(torch.arange(POSITIONS), stack.width, halves).numpy()
    elif stack.position == "none":  # without a table, CTranslate2 would use sinusoids
        spec.position_encodings.encodings = np.zeros((POSITIONS, stack.width), np.float32)
    for layer in spec.layer:
        if stack.position == "bucket":
            layer.self_attention.relative_attention_bias = spec.layer[0].self_attention.relative_attention_bias
            layer.self_attention.relative_attention_max_distance = np.int32(MAX_DISTANCE)
        for attention in (layer.self_attention, getattr(layer, "attention", None)):
            if attention is not None and stack.score == "dot":
                attention.queries_scale = 1.0


def write_model(run: Run, directory: Path, precision: Precision = "fp32", add_special_tokens: bool = False) -> None:
    """Write a run into an empty directory."""
    spec = specification(run, add_special_tokens)
    spec.validate()
    spec.optimize(COMPUTE_TYPES[precision])
    spec.save(str(directory))


def open_translator(directory: Path, precision: Precision, workers: int = 1, threads: int = 1) -> Any:
    """Load a CTranslate2 Translator; it does not need the directory afterwards."""
    ctranslate2 = library()
    compute_type = COMPUTE_TYPES[precision]
    if compute_type not in ctranslate2.get_supported_compute_types("cpu"):
        raise UserError(f"precision {precision}: CTranslate2 does not support it on this CPU; use fp32")
    return ctranslate2.Translator(
        str(directory), compute_type=compute_type, inter_threads=workers, intra_threads=threads
    )


def to_ctranslate2(run: Run, out: str | Path, samples: int, precision: Precision = "fp32") -> ConversionReport:
    """Convert a run to a CTranslate2 directory."""

    def write_proven(path: Path) -> ConversionReport:
        write_model(run, path, add_special_tokens=True)  # proven before quantisation
        proof = Proof(samples, largest_difference(run, path, samples, "fp32"), TOLERANCE, library().__version__)
        proof.require(str(run.path), "log-probabilities", f"CTranslate2 {proof.version}")
        summary = (
            f"proven: the log-probabilities of {plural(proof.samples, 'random output')} by this model and by"
            f" CTranslate2 {proof.version} in fp32 differ by at most {proof.difference:.2g}"
            f" (allowed: {proof.tolerance:g})"
        )
        difference = None  # largest difference of a log-probability in int8
        if precision == "int8":
            for file in path.iterdir():
                file.unlink()
            write_model(run, path, "int8", add_special_tokens=True)
            difference = largest_difference(run, path, samples, "int8")
            summary += f"; in int8, as written, by {difference:.2g}"
        details = {"precision": precision, "int8": difference}
        return ConversionReport(run.path.resolve().name, "TransformerSpec", run.model.size, proof, summary, details)

    return write_reported(require_new(out), write_proven)


@torch.inference_mode()
def largest_difference(run: Run, directory: Path, count: int, precision: Precision) -> float:
    """The largest difference of the log-probability of any token of random outputs; relative if it is above 1."""
    config = run.config
    device = run.model.device
    drawn = [_draw(config, vocab, count) for vocab in (config.source_vocab, config.target_vocab)]
    named = ([[names[i] for i in row] for row in rows] for names, rows in zip(names_of(run), drawn, strict=True))
    theirs = open_translator(directory, precision).score_batch(*named, max_input_length=0)
    before, after = config.ids.around(run.codec.frame)
    largest = 0.0
    for source, target, result in zip(*drawn, theirs, strict=True):
        source_1S = torch.tensor([[*before, *source, *after]], device=device)
        input_1T = torch.tensor([[config.start_id, *target]], device=device)
        logp_TV = run.model(source_1S, None, input_1T)[0].float().log_softmax(-1).cpu()
        ours_T = logp_TV.gather(1, torch.tensor([[*target, config.ids.eos]]).T).squeeze(1)
        gap_T = (ours_T - torch.tensor(result.log_probs)).abs() / ours_T.abs().clamp(min=1)
        largest = max(largest, gap_T.nan_to_num(math.inf).max().item())
    return largest


def _draw(config: Config, vocab: int, count: int) -> list[list[int]]:
    """Reproducible random texts of different lengths."""
    generator = np.random.default_rng(1)
    special = set(config.ids.model_dump(exclude_none=True).values())
    tokens = [index for index in range(vocab) if index not in special] or [config.ids.unk]
    longest = min(SHORT_TOKENS, *(stack.max_length - 2 for stack in config.stacks.values()))  # without special tokens
    return [generator.choice(tokens, generator.integers(1, max(1, longest) + 1)).tolist() for _ in range(count)]
