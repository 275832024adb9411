"""A run directory, read without torch: outputs for texts, and scores of given outputs."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from regard_native.config import TEXT, checked, model_config
from regard_native.core import Core, Decoded, NativeError
from regard_native.hypothesis import (
    Alignment,
    Hypothesis,
    OutputLimits,
    Scored,
    attention_flags,
    output_flags,
    plural,
    too_long,
    unknown_flags,
)
from regard_native.options import CONTINUATION_LENGTH, LENGTH_EXTRA, LENGTH_RATIO, Options
from regard_native.pack import Description, packed
from regard_native.text import KINDS, Codec, read_text

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
HEADS = "alignment.json"
STATISTICS = "statistics.json"
READ = (CONFIG, WEIGHTS, HEADS, STATISTICS, "tokenizer.json", "source.tokenizer.json", "target.tokenizer.json")
MAX_CHARACTERS = 1_000_000  # of a source; a longer one always has too many tokens
PACKED_SCHEMES = (*KINDS, "foreign")  # by the number in a packed file
MAX_NOISE = 2**24  # random numbers for samples in memory, unless one input needs more
UNBOUNDED = 10**9  # positions of a model without a position table

Input = str | tuple[str, str]  # a text, or a text and its features
Pair = tuple[str, str] | tuple[str, str, str]  # source and target, or source, target and features


class Job(NamedTuple):
    """An input to decode."""

    row: int  # of the outputs
    source: list[int]
    limit: int
    minimum: int
    unknown: list[str]


class Run:
    """A trained model with its tokenizers."""

    def __init__(self, path: Path, int8: bool = False, kernels: str | None = None) -> None:
        self.path = path
        config = read_config(path)
        model = model_config(config["model"])
        self._model = model
        self.continues = model["encoder"] is None
        self.codec = Codec(path, checked(config["text"], TEXT, "text"))
        description = Description(model, read_weights(path / WEIGHTS))
        self._core = Core(description.numbers, description.tensors, int8, kernels)
        self._ids = model["ids"]
        self._start: int = self._ids[model["start"]]
        if max(self.codec.source.size + len(self.codec.features), 1) > model["source_vocab"] or (
            self.codec.target.size > model["target_vocab"]
        ):
            raise NativeError(f"{path}: its tokenizers have more tokens than its model")
        generation = config.get("generation", {})
        self._suppressed = set(generation.get("suppressed", ()))
        if not all(type(index) is int for index in self._suppressed):
            raise NativeError("generation.suppressed: must be a list of token ids")
        self._usual_length: int | None = generation.get("max_length")
        if self._usual_length is not None and (type(self._usual_length) is not int or self._usual_length < 1):
            raise NativeError("generation.max_length: must be a number of tokens, at least 1")
        encoder, decoder = (_positions(model[name]) for name in ("encoder", "decoder"))
        self._max_source, self._max_target = (decoder - 1, decoder) if self.continues else (encoder - 1, decoder - 1)
        statistics = read_json(path / STATISTICS) if (path / STATISTICS).is_file() else {}
        self._limits = OutputLimits.of(statistics["limits"]) if "limits" in statistics else OutputLimits()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def generate(self, inputs: Iterable[Input], **settings: Any) -> list[list[Hypothesis]]:
        """The best outputs of every input, best first. An input is a text, or a text and its features.

        `settings` are fields of `regard_native.Options`, such as beam=5. An input that cannot be decoded has an empty
        output with a flag.
        """
        options = Options.of(settings)
        examples = _examples(inputs)
        prefix = self._check(options)
        outputs: list[list[Hypothesis]] = [[] for _ in examples]
        jobs = []
        for index, (text, features) in enumerate(examples):
            job = self._prepare(index, text, features, prefix, options)
            if isinstance(job, Job):
                jobs.append(job)
            else:
                outputs[index] = [Hypothesis("", 0.0, (), (), flags=job)]
        jobs.sort(key=lambda job: -len(job.source))  # sources of similar length are encoded together
        for job, rows in zip(jobs, self._search(jobs, prefix, options), strict=True):
            outputs[job.row] = [self._hypothesis(job, item, options) for item in rows]
            if not rows:
                reason = "the search found no output that satisfies the constraints"
                outputs[job.row] = [Hypothesis("", 0.0, (), (), flags={"unsatisfied": reason})]
        if options.alignment or options.top_tokens:
            self._force(jobs, outputs, options)
        for row in outputs:
            for rank, hypothesis in enumerate(row):
                if hypothesis.ids and self._resegmented(hypothesis):
                    reason = "the text is tokenised differently, so forced decoding gives another score"
                    row[rank] = replace(hypothesis, flags={**hypothesis.flags, "segmentation": reason})
        return outputs

    def score(self, pairs: Iterable[Pair], max_source: int = 2048) -> list[Scored]:
        """The log-probability of each target given its source.

        A pair is (source, target), or (source, target, features). For a language model, the source is a prompt and the
        target its continuation. A pair that cannot be scored has a flag.
        """
        most = Options.of({"max_source": max_source}).max_source
        examples = _pairs(pairs)
        results: list[Scored] = []
        sources: list[list[int]] = []
        targets: list[list[int]] = []
        for text, target_text, features in examples:
            source = self._encode(text, features)
            target = [*self.codec.target.encode(target_text), self.codec.eos]
            flags = self._pair_flags(features, len(source), len(target) - 1, most)
            if flags:
                results.append(Scored(math.nan, (), (), flags))
            elif not text.strip() and len(target) == 1 and not self.continues:
                results.append(Scored(0.0, (), ()))
            else:
                unknown = self.codec.unknown_tokens(text, features, source, target_text, target)
                results.append(
                    Scored(math.inf, tuple(map(self.codec.target_piece, target)), (), unknown_flags(unknown))
                )
                sources.append(source)
                targets.append(target)
        scores = iter(self._core.score(sources, targets))
        for i, scored in enumerate(results):
            if scored.score == math.inf:
                row = tuple(next(scores))
                results[i] = replace(scored, score=sum(row), token_scores=row)
        return results

    def packed(self) -> Iterator[bytes]:
        """The run as the parts of one file for C programs; docs/native.md describes it."""
        if self.codec.takes_features:
            raise NativeError(f"{self.path}: its inputs have features, which a packed file cannot describe")
        sides = self.codec.target if self.continues else self.codec.source, self.codec.target
        usual = self._usual_length
        positions = self._max_target
        if not self.continues:
            positions = min(positions, usual or UNBOUNDED)
        ratio, extra = (0, usual or CONTINUATION_LENGTH) if self.continues else (LENGTH_RATIO, LENGTH_EXTRA)
        header = [
            self._core.int8, self.continues, *(PACKED_SCHEMES.index(side.kind) for side in sides),
            *(side.unk for side in sides), self.codec.eos, positions, ratio, extra,
        ]  # fmt: skip
        after = [] if self.continues else self.codec.after
        ids = self.codec.before, after, self._blocked_and_unk
        description = Description(
            self._model, read_weights(self.path / WEIGHTS)
        )  # of the core, which keeps its own copy
        return packed(header, description.numbers, description.tensors, ids, [side.texts() for side in sides])

    def _pair_flags(self, features: str | None, source: int, target: int, most: int) -> dict[str, str]:
        """Flags of a pair that cannot be scored, from its lengths; the end token of the target is not counted."""
        if problem := self.codec.features_problem(features):
            return {"error": problem}
        if self.continues:  # source and target share the positions
            whole = too_long("text", source + target, self._max_target, source + target)
            return (
                whole
                or too_long("source", source, self._max_target, most)
                or too_long("target", target, UNBOUNDED, most)
            )
        longest = too_long("source", source - 1, self._max_source, most)
        return longest or too_long("target", target, self._max_target, most)

    def _check(self, options: Options) -> list[int]:
        """Refuse options that no input can satisfy -> the ids of the prefix."""
        if options.alignment and self.continues:
            raise NativeError("alignment: a language model has no source to align with; leave it out")
        if options.alignment:
            self._heads(options)
        most = self._max_target - self.continues
        if options.min_length > most:
            length = plural(options.min_length, "token")
            raise NativeError(f"min_length: {length} do not fit: the model has learned positions for {most}")
        text = options.prefix
        if not text:
            return []
        target = self.codec.target
        prefix = target.encode(text)
        if target.has_unknown(prefix):
            raise NativeError(
                f"prefix {text!r:.100}: {target.unknown_tokens(text)[0]!r:.100} is not in the target vocabulary"
            )
        limit = min(most, options.max_length or most)
        if len(prefix) > limit:
            raise NativeError(_prefix_too_long(text, len(prefix), limit))
        size = options.no_repeat_ngram
        grams = [tuple(prefix[i : i + size]) for i in range(len(prefix) - size + 1)] if size else []
        if len(set(grams)) < len(grams):
            twice = next(gram for i, gram in enumerate(grams) if gram in grams[:i])
            repeated = f"{self.codec.decode_target(twice)!r:.100} occurs twice in it"
            raise NativeError(f"prefix {text!r:.100}: {repeated}, which no_repeat_ngram rules out")
        return prefix

    def _encode(self, text: str, features: str | None) -> list[int]:
        if self.continues:
            return [*self.codec.before, *self.codec.target.encode(text)] or [self._start]
        return self.codec.encode_source(text, features)

    def _prepare(
        self, index: int, text: str, features: str | None, prefix: Sequence[int], options: Options
    ) -> Job | dict[str, str]:
        """An input to decode, or why it cannot be decoded, as flags."""
        if len(text) > MAX_CHARACTERS:
            return {"too_long": f"the source has {len(text)} characters"}
        if not (self.continues or text.strip()):
            return {"empty": "the source is empty"}
        if problem := self.codec.features_problem(features):
            return {"error": problem}
        source = self._encode(text, features)
        length = len(source) - (not self.continues)
        if flags := too_long("source", length, self._max_source, options.max_source):
            return flags
        minimum, limit = self._lengths(length, options)
        if minimum > limit:
            bound = f"{limit} (max_length, max_ratio, or the model's learned positions)"
            least = plural(minimum, "token")
            return {"unsatisfied": f"min_length, min_ratio: the minimum of {least} is above the limit of {bound}"}
        if len(prefix) > limit:
            return {"unsatisfied": _prefix_too_long(options.prefix, len(prefix), limit)}
        return Job(index, source, limit, minimum, self.codec.unknown_tokens(text, features, source))

    def _lengths(self, source: int, options: Options) -> tuple[int, int]:
        """The minimum and maximum number of output tokens for a source of this length."""
        minimum = max(options.min_length, math.ceil(options.min_ratio * source))
        limits = [self._max_target - source if self.continues else self._max_target]
        if options.max_length is not None:
            limits.append(options.max_length)
        if options.max_ratio is not None:
            limits.append(max(1, math.ceil(options.max_ratio * source)))
        if len(limits) == 1:  # the default limit, raised to the minimum if necessary
            usual = self._usual_length
            default = CONTINUATION_LENGTH if self.continues else LENGTH_RATIO * source + LENGTH_EXTRA
            if usual is not None:
                default = usual if self.continues else min(usual, default)
            limits.append(max(default, minimum))
        return minimum, min(limits)

    def _search(self, jobs: Sequence[Job], prefix: Sequence[int], options: Options) -> list[list[Decoded]]:
        """The outputs of every job; samples in the order drawn."""
        count = len(jobs)
        longest = max((job.limit for job in jobs), default=0) + 1
        if options.sample and count > 1 and count * options.nbest * longest > MAX_NOISE:
            parts = jobs[: count // 2], jobs[count // 2 :]
            return [row for part in parts for row in self._search(part, prefix, options)]
        return self._core.search(
            [job.source for job in jobs],
            [job.limit for job in jobs],
            minimums=[job.minimum for job in jobs],
            prefixes=[prefix] * count if prefix else None,
            after_prefix=[self.codec.target.combining] * count if prefix else None,
            open_end=self.continues,
            beam=options.beam,
            keep=options.nbest,
            length_penalty=options.length_penalty,
            exact=options.exact,
            blocked=self._blocked if options.unknown else self._blocked_and_unk,
            no_repeat=options.no_repeat_ngram,
            repetition_penalty=options.repetition_penalty,
            noise=_noise(jobs, options) if options.sample and jobs else None,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
        )

    @cached_property
    def _blocked(self) -> list[int]:
        """Ids excluded from outputs: special tokens except the end and the unknown token; ids without a token."""
        ids = self._ids
        vocab = self._model["target_vocab"]
        excluded = {ids["pad"], ids["sos"], ids.get("mask"), *self._suppressed, *range(self.codec.target.size, vocab)}
        return sorted(index for index in excluded - {ids["eos"]} if index is not None and 0 <= index < vocab)

    @cached_property
    def _blocked_and_unk(self) -> list[int]:
        return sorted({*self._blocked, self._ids["unk"]} - {self._ids["eos"]})

    def _hypothesis(self, job: Job, item: Decoded, options: Options) -> Hypothesis:
        ids = item.ids
        eos = self.codec.eos
        flags = unknown_flags(job.unknown)
        length = 0 if self.continues else len(job.source) - 1  # 0: no expectation about the length
        flags |= output_flags(ids[:-1] if ids[-1:] == [eos] else ids, length, item.token_scores, self._limits)
        if item.limited:
            flags["max_length"] = f"ended at the limit of {plural(job.limit, 'token')}"
        score = sum(item.token_scores)
        normalized = score / max(1, len(ids)) ** options.length_penalty
        pieces = tuple(map(self.codec.target_piece, ids))
        text = self._text(job.source, ids)
        return Hypothesis(text, score, pieces, tuple(item.token_scores), normalized, tuple(ids), flags=flags)

    def _text(self, source: Sequence[int], ids: Sequence[int]) -> str:
        """The text of an output. The text of a continuation includes the space between prompt and continuation."""
        decode = self.codec.decode_target
        if not self.continues:
            return decode(ids)
        prompt = decode(source)
        text = decode([*source, *ids])
        return text.removeprefix(prompt) if text.startswith(prompt) else decode(ids)

    def _resegmented(self, hypothesis: Hypothesis) -> bool:
        ids = (*self.codec.target.encode(hypothesis.text), self.codec.eos)
        return ids[: len(hypothesis.ids)] != hypothesis.ids

    def _force(self, jobs: Sequence[Job], outputs: list[list[Hypothesis]], options: Options) -> None:
        """Add alignments and top tokens to outputs."""
        entries = [(job, rank) for job in jobs for rank, h in enumerate(outputs[job.row]) if h.ids]
        forced = self._core.force(
            [job.source for job, _ in entries],
            [outputs[job.row][rank].ids for job, rank in entries],
            top_tokens=min(options.top_tokens, self._model["target_vocab"]),
            blocked=self._blocked if options.unknown else self._blocked_and_unk,
            heads=self._heads(options) if options.alignment else (),
        )
        piece = self.codec.target_piece
        for (job, rank), result in zip(entries, forced, strict=True):
            hypothesis = outputs[job.row][rank]
            if result.alignment is not None:
                soft = result.alignment[:-1]
                soft = soft / np.maximum(soft.sum(1, keepdims=True), 1e-9)  # with local attention the sum is below 1
                source = tuple(map(self.codec.source_piece, job.source))
                alignment = Alignment(soft, source, tuple(map(piece, hypothesis.ids[:-1])))
                flags = {**hypothesis.flags, **attention_flags(alignment)}
                hypothesis = replace(hypothesis, alignment=alignment, flags=flags)
            tops = tuple(tuple((piece(token), score) for token, score in row) for row in result.top_tokens)
            outputs[job.row][rank] = replace(hypothesis, top_tokens=tops)

    def _heads(self, options: Options) -> list[tuple[int, int]]:
        """The alignment heads: those of the options, of the run, or all heads of the second to last layer."""
        decoder = self._model["decoder"]
        counts = {decoder["layers"] - 1: 1}  # of a recurrent decoder
        if decoder["mixer"] == "attention":
            kept = decoder["kept_cross_heads"] or [range(decoder["heads"])] * decoder["layers"]
            counts = {layer: len(heads) for layer, heads in enumerate(kept) if len(heads)}
        heads = [*options.alignment_heads]
        if not heads and (self.path / HEADS).is_file():
            heads = [(int(layer), int(head)) for layer, head in read_json(self.path / HEADS)["heads"]]
        if not heads:
            layer = sorted(counts)[-2:][0]
            return [(layer, head) for head in range(counts[layer])]
        for layer, head in heads:
            if not 0 <= head < counts.get(layer, 0):
                layers = ", ".join(f"{i + 1}: {plural(count, 'head')}" for i, count in sorted(counts.items()))
                advice = f"(layers with cross-attention, counted from 1: {layers})"
                raise NativeError(f"alignment_heads: there is no layer {layer + 1} with a head {head + 1} {advice}")
        return heads


def load(path: str | Path, *, precision: str = "fp32", kernels: str | None = None) -> Run:
    """Open a run. `precision` is fp32, or int8: faster, less exact. `kernels` names an instruction set, for tests."""
    if precision not in ("fp32", "int8"):
        raise NativeError(f"precision: is {precision!r}; allowed are fp32 and int8")
    try:
        return Run(Path(path), precision == "int8", kernels)
    except NativeError as error:
        raise NativeError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise NativeError(f"{path}: its {CONFIG} is not that of a run: {error!r:.200}") from None


def _examples(inputs: Iterable[Input]) -> list[tuple[str, str | None]]:
    """Inputs as texts with features."""
    advice = 'takes a list of texts, such as ["hello"], or of texts with their features, such as [("hello", "N;PL")]'
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable):
        raise NativeError(f"generate: {advice}, not {inputs!r:.80}")
    examples: list[tuple[str, str | None]] = []
    for item in inputs:
        match item:
            case str():
                examples.append((item, None))
            case (str() as text, str() as features):
                examples.append((text, features))
            case _:
                raise NativeError(f"generate: {advice}; item {len(examples)} is {item!r:.80}")
    return examples


def _pairs(pairs: Iterable[Pair]) -> list[tuple[str, str, str | None]]:
    advice = 'takes a list of pairs, such as [("hello", "HH AH L OW")]'
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise NativeError(f"score: {advice}, not {pairs!r:.80}")
    examples: list[tuple[str, str, str | None]] = []
    for item in pairs:
        match item:
            case (str() as source, str() as target):
                examples.append((source, target, None))
            case (str() as source, str() as target, str() | None as features):
                examples.append((source, target, features))
            case _:
                raise NativeError(f"score: {advice}; item {len(examples)} is {item!r:.80}")
    return examples


def _prefix_too_long(text: str, length: int, limit: int) -> str:
    return f"prefix {text!r:.100}: its {plural(length, 'token')} exceed the output limit of {limit} (max_length)"


def _noise(jobs: Sequence[Job], options: Options) -> np.ndarray:
    """Random numbers for samples, which depend on the seed, the source and the number of the sample."""
    noise = np.zeros((len(jobs), options.nbest, max(job.limit for job in jobs) + 1), np.float32)
    for job, rows in zip(jobs, noise, strict=True):
        key = zlib.crc32(np.asarray(job.source, dtype=np.int64).tobytes())
        for number, row in enumerate(rows):
            row[: job.limit + 1] = np.random.default_rng((options.seed, key, number)).random(job.limit + 1)
    return np.minimum(noise, np.float32(1 - 2**-24), out=noise)


def _positions(stack: dict[str, Any] | None) -> int:
    """The rows of the position table of a stack."""
    if stack is None or stack["position"] != "learned" or stack["mixer"] in ("gru", "lstm"):
        return UNBOUNDED
    return int(stack["max_length"])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a run."""
    try:
        value = json.loads(read_text(path))
    except (NativeError, ValueError, RecursionError) as error:
        raise NativeError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise NativeError(f"{path}: is not a JSON object")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a run whose files lie inside its directory."""
    if not path.is_dir():
        raise NativeError(f"{path}: no such run directory")
    home = path.resolve()
    for name in READ:
        file = path / name
        if file.is_symlink() and not _inside(file, home):
            raise NativeError(f"{file}: points out of its directory; only files inside the directory are read")
    file = path / CONFIG
    if not file.is_file():
        raise NativeError(f"{path}: not a run directory: it has no {CONFIG}")
    config = read_json(file)
    if config.get("format") != 1:
        raise NativeError(f"{file}: format {config.get('format')!r:.20} is not 1, the one this version reads")
    for key in ("model", "text"):
        if not isinstance(config.get(key), dict):
            raise NativeError(f"{file}: not the config of a run: {key!r} is missing")
    return config


def _inside(link: Path, home: Path) -> bool:
    try:
        return link.resolve().is_relative_to(home)
    except (OSError, RuntimeError):  # a loop of links
        return False


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """The weights by name."""
    if not path.is_file():
        raise NativeError(f"{path}: no such file; the run has no weights yet")
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (OSError, MemoryError, TypeError, AttributeError, ValueError, SafetensorError) as error:
        raise NativeError(f"{path}: not a readable safetensors file: {error}") from None
