"""Proof that a converted model gives the same outputs for random inputs, and the report of a conversion."""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.config import Config
from regard.convert.family import Fields, Json
from regard.convert.read import GENERATION, TOKEN_KEYS, suppressed_ids
from regard.decode.search_inputs import SearchInput
from regard.decode.torch_engine import TorchEngine
from regard.errors import UserError
from regard.files import replace_directory
from regard.model import Model
from regard.run import Run

SHORT_TOKENS = 24  # maximum length of the samples in a padded batch
LONG_TOKENS = 512  # maximum length of the long sample
SINUSOIDS = ("sinusoid", "sinusoid_halves")
TOLERANCE = 1e-5  # of any output, relative to the largest output
MAX_TOLERANCE = 1e-3  # if rounding errors are larger
NEW_TOKENS = 16  # of an output to compare
CHUNK_SIZES = ("chunk_size_feed_forward", "chunk_size_lm_head")  # they change no output, but must divide every length
UNPADDED = {"pixel_values", "decoder_input_ids"}  # inputs of models with unpadded outputs

Samples = dict[str, Tensor]  # input name in transformers -> ids (N, S) or pixels (N, C, H, W)


def longest_input(config: Config) -> int:
    """The number of tokens of the longest input to compare."""
    longest = LONG_TOKENS
    for stack in config.stacks.values():
        longest = min(longest, stack.max_length, stack.max_positions or LONG_TOKENS)
        if stack.mixer == "lsh":  # no hashing within a chunk: hashes are random, and differ between libraries
            longest = min(longest, stack.lsh.chunk)
    return longest


def draw_samples(config: Config, count: int) -> list[Samples]:
    """Reproducible random inputs: a padded batch of different lengths, and one input of maximum length."""
    generator = torch.Generator().manual_seed(1)
    if (patches := config.patches) is not None:
        shape = (count, patches.channels, patches.height, patches.width)
        return [{"pixel_values": torch.rand(shape, generator=generator)}]
    longest = longest_input(config)
    short = min(SHORT_TOKENS, longest)
    lengths_N = torch.randint(1, short + 1, (count,), generator=generator)
    lengths_N[0] = short
    batches = [_draw_tokens(config, lengths_N, generator)]
    if longest > short:
        batches.append(_draw_tokens(config, torch.tensor([longest]), generator))
    return batches


def _draw_tokens(config: Config, lengths_N: Tensor, generator: torch.Generator) -> Samples:
    """A batch of random ids with these lengths."""
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
    """Set random weights for the proof; `run` sends inputs through the model, which scales its linear layers."""
    generator = torch.Generator().manual_seed(2)

    def noise(parameter: Tensor) -> Tensor:
        return torch.randn(parameter.shape, generator=generator).to(parameter)

    def scale(linear: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Scale the weight of a linear layer once, to give its outputs the size of its role."""
        handle, size = hooks.pop(linear)
        handle.remove()
        bias = 0 if linear.bias is None else linear.bias
        actual = float((output - bias).square().mean().sqrt())
        if embedding is None or linear.weight is not embedding.weight:
            linear.weight.mul_(size / max(actual, 1e-30))
        elif linear.bias is not None:  # the embedding has this weight too, so scale the bias instead
            linear.bias.mul_(actual / size)
        result: Tensor = linear.forward(*inputs)
        return result

    embedding = model.target_embedding or model.source_embedding
    hooks: dict[nn.Module, tuple[RemovableHandle, float]] = {}
    filled: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        size = _size(name, module, model.config)
        for key, parameter in module.named_parameters(recurse=False):
            if parameter in filled:  # a tied LM head
                continue
            filled.add(parameter)
            if key == "bias":
                parameter.copy_(0.3 * size * noise(parameter))
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                parameter.copy_(size * (1 + 0.3 * noise(parameter)))
            else:
                parameter.copy_(size * noise(parameter))
        if isinstance(module, nn.Linear):
            hooks[module] = module.register_forward_hook(scale), size
    try:
        run()
    finally:
        for handle, _ in hooks.values():
            handle.remove()


def _size(name: str, module: nn.Module, config: Config) -> float:
    """The size of the outputs of a module, by its role."""
    stack = config.stacks.get(name.partition(".")[0].replace("source_embedding", "encoder"), config.top)
    # About the size at which norm_eps is as large as the variance.
    hidden = 2 * math.sqrt(stack.norm_eps)
    last = name.rpartition(".")[2]
    if last.endswith("_embedding") or name.startswith("image"):
        size = 1.0 if stack.position in SINUSOIDS else hidden  # comparable to sines and cosines
        return size / math.sqrt(stack.width) if config.scale_embeddings and config.patches is None else size
    if last in ("out", "down", "embed_norm"):
        first = name.endswith(".blocks.0.attention.out")  # added to the embeddings
        return 1.0 if first and stack.position in SINUSOIDS else hidden
    if isinstance(module, nn.Embedding):
        return 1.0 if stack.position == "bucket" else hidden  # added to attention scores, or to embeddings
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return hidden if stack.norm_at == "post" and ".blocks." in name else 1.0
    if last == "query" and stack.score == "dot":
        return 1 / math.sqrt(stack.head)
    return 2.0 if last in ("up", "gate") else 1.0


@dataclass(frozen=True)
class Proof:
    """The difference between the outputs of two models, relative to the largest output."""

    samples: int
    difference: float
    tolerance: float
    version: str  # of the other library
    tokens: int = 0  # of the longest sample
    outputs: int = 0  # equal outputs of greedy search

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance  # false for NaN

    def require(self, source: str, outputs: str, other: str) -> None:
        """Raise a UserError if the models differ."""
        if not self.holds:
            raise UserError(
                f"{source}: the converted model is not the same: its {outputs} differ from those of {other}"
                f" by {self.difference:.3g} (allowed: {self.tolerance:g}). Nothing was written"
            )


@dataclass(frozen=True)
class ConversionReport:
    source: str
    architecture: str
    parameters: int
    proof: Proof | None
    summary: str  # the proof in a sentence
    details: dict[str, Any]  # further facts about a format

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["summary"], fields["details"]
        return fields | self.details


def require_new(out: str | Path) -> Path:
    """The directory to write; it must not exist, or be empty."""
    path = Path(out)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path}: exists already; name a new directory")
    return path


def write_reported(out: Path, write: Callable[[Path], ConversionReport]) -> ConversionReport:
    """Write a directory completely or not at all. Errors name `out`, not the temporary directory."""
    reports: list[ConversionReport] = []

    def write_named(path: Path) -> None:
        try:
            reports.append(write(path))
        except UserError as error:
            raise UserError(str(error).replace(str(path), str(out))) from None

    replace_directory(out, write_named)
    return reports[0]


@torch.no_grad()
def our_outputs(model: Model, batches: Sequence[Samples]) -> list[Tensor]:
    """The logits of every token except padding, or of a whole image or text; without an LM head, vectors."""
    config = model.config
    outputs: list[Tensor] = []
    for samples in batches:
        source, *_ = samples.values()
        source = source.to(next(model.parameters()).dtype) if source.is_floating_point() else source
        x = model.hidden(source, *map(samples.get, ("attention_mask", "decoder_input_ids", "token_type_ids")))
        logits = model.predict(x)
        outputs.append(_without_padding(logits.squeeze(1) if config.output == "classes" else logits, samples))
        if config.output == "none" and config.pooler:
            outputs.append(model.pool(x))
    return outputs


@torch.no_grad()
def their_outputs(model: Any, config: Config, batches: Sequence[Samples]) -> list[Tensor]:
    """The same outputs of a model of transformers."""
    outputs: list[Tensor] = []
    for samples in batches:
        with _their_errors("the model of transformers does not accept inputs that our model accepts"):
            out = model(**{name: x.long() if x.dtype == torch.bool else x for name, x in samples.items()})
        outputs.append(_without_padding(out.last_hidden_state if config.output == "none" else out.logits, samples))
        if config.output == "none" and config.pooler:
            outputs.append(out.pooler_output)
    return outputs


def force_random_targets(theirs: Any, config: Config, samples: Samples) -> tuple[Samples, Tensor]:
    """Force random targets through their generation, which begins with their own start token.

    Returns their logits, and the samples that should give the same logits in our model. An end token may end targets.
    """
    targets_NT = samples["decoder_input_ids"][:, :NEW_TOKENS].roll(-1, dims=1)
    with _their_errors("the model of transformers cannot generate from inputs that our model accepts"):
        out = theirs.generate(
            samples["input_ids"],
            attention_mask=samples["attention_mask"].long(),
            max_new_tokens=targets_NT.shape[1],
            prefix_allowed_tokens_fn=lambda n, ids_T: [int(targets_NT[n, len(ids_T) - 1])],
            output_logits=True,
            return_dict_in_generate=True,
        )
    inputs_NT = out.sequences[:, :-1].clone()
    inputs_NT[:, 0] = config.start_id
    return samples | {"decoder_input_ids": inputs_NT}, torch.stack(out.logits, dim=1)


def _without_padding(x: Tensor, samples: Samples) -> Tensor:
    return x[samples["attention_mask"]] if x.ndim == 3 and samples.keys().isdisjoint(UNPADDED) else x


def prove(
    run: Run,
    spare: Model,
    export: Callable[[Model], dict[str, Tensor]],
    directory: Path,
    architecture: str,
    count: int,
    defaults: Json | None = None,
) -> Proof | None:
    """Compare a run with the model of a directory, first with the converted weights, then with random weights.

    Returns None without transformers, or if it does not have this model. `spare`, a model of the run's config (possibly
    the run's own), gets the random weights. `defaults` are settings of generation for a directory without them.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return None
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        return None
    batches = draw_samples(run.config, count)
    with _quiet(transformers):
        theirs = load_theirs(model_class, directory)
        generates = run.config.decoder is not None
        if generates:
            with _their_errors(f"{run.path}: cannot be proven: transformers cannot generate"):
                _simplify_generation(theirs, run.config, defaults or {})
        generation = getattr(theirs, "generation_config", None)
        proofs = [_compare(run.model, theirs, batches)]
        outputs = 0
        if generates and proofs[0].holds:
            outputs = compare_greedy(run, theirs, batches[0], defaults or {}, proofs[0].tolerance)
        del theirs  # free the memory before loading the next model
        fill_weights(spare, lambda: our_outputs(spare, batches[-1:]))
        theirs = load_theirs(model_class, directory, export(spare))
        theirs.generation_config = generation
        proofs.append(_compare(spare, theirs, batches))
    worst = max(proofs, key=lambda proof: (not proof.holds, proof.difference / proof.tolerance))
    tokens = max((batch["input_ids"].shape[1] for batch in batches if "input_ids" in batch), default=0)
    return replace(worst, samples=count, version=transformers.__version__, tokens=tokens, outputs=outputs)


def _compare(ours: Model, theirs: Any, batches: Sequence[Samples]) -> Proof:
    """The difference between two models; the tolerance grows with the rounding errors of our model."""
    expected = their_outputs(theirs, ours.config, batches)
    if len(ours.config.stacks) == 2:
        forced, logits_NTV = force_random_targets(theirs, ours.config, batches[0])
        batches = [*batches, forced]
        expected.append(logits_NTV)
    outputs = our_outputs(ours, batches)
    difference = largest_difference(outputs, expected)
    tolerance = TOLERANCE
    if tolerance < difference < MAX_TOLERANCE:  # sharp attention, for example, amplifies rounding errors
        exact = our_outputs(copy.deepcopy(ours).double(), batches)
        tolerance = min(max(tolerance, 10 * largest_difference(outputs, exact)), MAX_TOLERANCE)
    return Proof(0, difference, tolerance, "")


def load_theirs(model_class: Any, directory: Path, weights: dict[str, Tensor] | None = None) -> Any:
    """Load the model of a directory with transformers, with its own weights or others."""
    safe = {"local_files_only": True, "trust_remote_code": False, "dtype": torch.float32}
    with _their_errors(f"{directory}: cannot be proven: transformers cannot load it"):
        config = model_class.config_class.from_pretrained(directory, local_files_only=True)
        for name in CHUNK_SIZES:
            setattr(config, name, 0)
        if weights is None:
            stored = any(directory.glob("*.safetensors"))
            theirs = model_class.from_pretrained(directory, config=config, use_safetensors=stored, **safe)
        else:
            theirs = model_class.from_pretrained(None, config=config, state_dict=weights, **safe)
    return theirs.eval()


@contextmanager
def _their_errors(what: str) -> Iterator[None]:
    """Convert errors of transformers to a UserError; a wrong directory may cause errors of any type."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{what}: {message[:500]}") from None


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference of outputs, relative to their largest value; infinite if shapes differ, NaN for NaN."""
    if [a.shape for a in ours] != [b.shape for b in theirs]:
        return math.inf
    gaps = [(a - b).abs().max() / b.abs().max().clamp(min=1e-30) for a, b in zip(ours, theirs, strict=True)]
    return torch.stack(gaps).max().item()


def compare_models(ours: Model, again: Model, count: int) -> Proof:
    """The difference between two regard models."""
    batches = draw_samples(ours.config, count)
    return Proof(count, largest_difference(our_outputs(again, batches), our_outputs(ours, batches)), TOLERANCE, "")


def compare_greedy(run: Run, theirs: Any, samples: Samples, defaults: Json, tolerance: float = TOLERANCE) -> int:
    """Require equal outputs of greedy search with both models -> the number of outputs compared."""
    config = run.config
    continues = run.model.decoder_only
    room = longest_input(config)
    new = min(NEW_TOKENS, max(1, room // 2))
    tokens = zip(samples["input_ids"], samples["attention_mask"], strict=True)
    rows = [ids_S[keep_S][: max(1, room - new)].tolist() for ids_S, keep_S in tokens]
    results = TorchEngine(run).decode([SearchInput((row,), limit=new, open_end=continues) for row in rows])
    with _their_errors(f"{run.path}: cannot be proven: transformers cannot generate"):
        ends = _simplify_generation(theirs, config, defaults)
        their_rows = [
            theirs.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row)).long(), max_new_tokens=new)
            for row in rows
        ]
    if run.generation.chat is not None:  # the end of a turn may be another token
        ends.add(config.ids.eos)
    # Their outputs may have several end tokens, ours one.
    our_ends = ends if config.ids.eos in ends else {config.ids.eos}
    for row, (hypothesis, *_), output in zip(rows, results, their_rows, strict=True):
        # The last token may be an end token forced by the length limit.
        here = _until(hypothesis.ids, our_ends)[: new - 1]
        there = _until(output[0].tolist()[len(row) if continues else 1 :], ends)[: new - 1]
        if here != there and not _tied(run.model, row, here, there, tolerance):
            raise UserError(
                f"{run.path}: the converted model is not the same: from the ids {row} greedy search gives"
                f" {here} here and {there} with transformers. Nothing was written"
            )
    return len(rows)


def _until(ids: Iterable[int], ends: set[int]) -> list[int]:
    return list(takewhile(lambda index: index not in ends, ids))


def _simplify_generation(theirs: Any, config: Config, defaults: Json) -> set[int]:
    """Reduce their generation settings to the settings that a run has too -> the ids of end tokens."""
    before = theirs.generation_config
    settings = Fields(vars(before), GENERATION)
    ours = Fields(defaults, GENERATION)
    ids: Json = {}
    for key in TOKEN_KEYS:
        known = [index for index in settings.token_ids(key) if index < config.target_vocab] or ours.token_ids(key)
        if known:
            ids[key] = known if key == "eos_token_id" else known[0]
    suppressed = sorted(suppressed_ids(settings, config) | suppressed_ids(ours, config))
    # Their cache fails if a T5 decoder has more layers than the encoder, and LSH attention hashes differently with it.
    theirs.generation_config = type(before)(
        **ids | {"suppress_tokens": suppressed or None}, do_sample=False, num_beams=1, use_cache=False
    )
    return set(ids.get("eos_token_id", ()))


@torch.no_grad()
def _tied(model: Model, row: list[int], ours: list[int], theirs: list[int], tolerance: float) -> bool:
    """Whether two outputs diverge at tokens with the same logit, except for rounding."""
    config = model.config
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    a, b = (output[at] if at < len(output) else config.ids.eos for output in (ours, theirs))
    before = [*row, *ours[:at]] if model.decoder_only else [config.start_id, *ours[:at]]
    logits_V = model(torch.tensor([row]), None, torch.tensor([before]))[0, -1]
    return a != b and float((logits_V[a] - logits_V[b]).abs()) <= 2 * tolerance * float(logits_V.abs().max())


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence logs, warnings and progress bars of transformers."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):  # some models print
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
