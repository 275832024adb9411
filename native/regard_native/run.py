"""A run directory, read without torch, and its outputs for texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from regard_native.core import Core, Decoded, NativeError
from regard_native.pack import Description
from regard_native.text import EOS, MAX_FILE_BYTES, PAD, SOS, UNK, Codec

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
READ = (CONFIG, WEIGHTS, "tokenizer.json", "source.tokenizer.json", "target.tokenizer.json")
CONTINUATION_LENGTH = 200  # default limit of a continuation, in tokens
LENGTH_RATIO = 3  # default limit of an output: this many times the source, plus LENGTH_EXTRA
LENGTH_EXTRA = 50
MAX_SOURCE = 2048  # tokens


@dataclass(frozen=True)
class Hypothesis:
    """One output for one source."""

    text: str
    score: float  # natural-log probability: the sum of token_scores
    tokens: tuple[str, ...]  # display forms, with the end token
    token_scores: tuple[float, ...]
    ids: tuple[int, ...] = ()
    flags: dict[str, str] = field(default_factory=dict)  # problems: name -> reason

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape of `regard generate --json`."""
        out: dict[str, Any] = {
            "text": self.text,
            "score": self.score,
            "tokens": list(self.tokens),
            "token_scores": list(self.token_scores),
        }
        return {**out, "flags": dict(self.flags)} if self.flags else out


class Run:
    """A trained model with its tokenizers."""

    def __init__(self, path: Path, int8: bool = False, kernels: str | None = None) -> None:
        self.path = path
        config = read_config(path)
        model = config["model"]
        self.continues = model["encoder"] is None
        self.codec = Codec(path, config["text"])
        description = Description(model, read_weights(path / WEIGHTS))
        self._core = Core(description.numbers, description.tensors, int8, kernels)
        self._vocab: int = model["target_vocab"]
        self._start: int = model["ids"][model["start"]]
        if max(self.codec.source.size + len(self.codec.features), 1) > model["source_vocab"] or (
            self.codec.target.size > self._vocab
        ):
            raise NativeError(f"{path}: its tokenizers have more tokens than its model")
        suppressed = config.get("generation", {}).get("suppressed", ())
        excluded = {PAD, UNK, SOS, *suppressed, *range(self.codec.target.size, self._vocab)}
        excluded |= set(range(self.codec.target.special)) - {EOS}
        self._blocked = sorted(index for index in excluded - {EOS} if 0 <= index < self._vocab)
        positions = [
            stack["max_length"]
            for stack in (model["encoder"], model["decoder"])
            if stack and stack["position"] == "learned"
        ]
        self._positions = min(positions, default=10**9)

    def generate(
        self,
        inputs: Iterable[str | tuple[str, str]],
        *,
        beam: int = 1,
        nbest: int = 1,
        length_penalty: float = 1.0,
        max_length: int | None = None,
        min_length: int = 0,
    ) -> list[list[Hypothesis]]:
        """The best outputs of every input, best first. An input is a text, or a text and its features."""
        if isinstance(inputs, str):
            raise NativeError('inputs: give a list of texts, such as ["hello"]')
        if not 1 <= nbest <= beam:
            raise NativeError(f"nbest: is {nbest}; allowed are 1 to beam ({beam})")
        examples = [(item, None) if isinstance(item, str) else item for item in inputs]
        outputs: list[list[Hypothesis]] = [[] for _ in examples]
        jobs: list[tuple[int, list[int], int]] = []
        for index, (text, features) in enumerate(examples):
            source = self._encode(text, features)
            limit = self._limit(len(source), max_length, min_length)
            problem = self._problem(text, features, source, limit)
            if problem:
                outputs[index] = [Hypothesis("", 0.0, (), (), flags=problem)]
            else:
                jobs.append((index, source, limit))
        jobs.sort(key=lambda job: -len(job[1]))  # sources of similar length are encoded together
        decoded = self._core.search(
            [source for _, source, _ in jobs],
            [limit for _, _, limit in jobs],
            minimums=[min_length] * len(jobs),
            beam=beam,
            keep=nbest,
            length_penalty=length_penalty,
            open_end=self.continues,
            blocked=self._blocked,
        )
        for (index, source, limit), row in zip(jobs, decoded, strict=True):
            outputs[index] = [self._hypothesis(source, limit, item) for item in row]
        return outputs

    def _encode(self, text: str, features: str | None) -> list[int]:
        if self.continues:
            return [*self.codec.before, *self.codec.target.encode(text)] or [self._start]
        return self.codec.encode_source(text, features)

    def _limit(self, source: int, max_length: int | None, min_length: int) -> int:
        positions = self._positions - 1
        if self.continues:
            default = CONTINUATION_LENGTH
            positions = self._positions - source
        else:
            default = LENGTH_RATIO * (source - 1) + LENGTH_EXTRA
        return min(positions, max(default, min_length) if max_length is None else max_length)

    def _problem(self, text: str, features: str | None, source: Sequence[int], limit: int) -> dict[str, str]:
        if not (text.strip() or self.continues):
            return {"empty": "the source is empty"}
        if (features is not None) != self.codec.takes_features:
            needs = (
                "is required" if self.codec.takes_features else "not for this run, which was trained without features"
            )
            return {"error": f"features: {needs}"}
        if len(source) > min(MAX_SOURCE, self._positions):
            return {"too_long": f"the source has {len(source)} tokens, more than {min(MAX_SOURCE, self._positions)}"}
        return {} if limit >= 0 else {"too_long": "no position of the model is left for the output"}

    def _hypothesis(self, source: Sequence[int], limit: int, item: Decoded) -> Hypothesis:
        target = self.codec.target
        if self.continues:
            prompt = target.decode(source)
            whole = target.decode([*source, *item.ids])
            text = whole.removeprefix(prompt) if whole.startswith(prompt) else target.decode(item.ids)
        else:
            text = target.decode(item.ids)
        flags = {"max_length": f"ended at the limit of {limit} tokens"} if item.limited else {}
        pieces = tuple(map(target.piece, item.ids))
        return Hypothesis(text, sum(item.token_scores), pieces, tuple(item.token_scores), tuple(item.ids), flags)


def load(path: str | Path, *, precision: str = "fp32", kernels: str | None = None) -> Run:
    """Open a run. `precision` is fp32, or int8: faster, less exact. `kernels` names an instruction set, for tests."""
    if precision not in ("fp32", "int8"):
        raise NativeError(f"precision: is {precision!r}; allowed are fp32 and int8")
    try:
        return Run(Path(path), precision == "int8", kernels)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise NativeError(f"{path}: its {CONFIG} is not that of a run: {error!r:.200}") from None


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a run whose files lie inside its directory."""
    if not path.is_dir():
        raise NativeError(f"{path}: no such run directory")
    home = path.resolve()
    for name in READ:
        file = path / name
        if file.is_symlink() and not file.resolve().is_relative_to(home):
            raise NativeError(f"{file}: points out of its directory; only files inside the directory are read")
    file = path / CONFIG
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise NativeError(f"{file}: has more than {MAX_FILE_BYTES // 2**20} MB")
        config = json.loads(file.read_text(encoding="utf-8"))
        if config["format"] != 1:
            raise NativeError(f"{file}: format {config['format']!r} is not 1, the one this version reads")
        for key in ("model", "text"):
            if not isinstance(config[key], dict):
                raise KeyError(key)
    except FileNotFoundError:
        raise NativeError(f"{path}: not a run directory: it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise NativeError(f"{file}: not readable as JSON: {error}") from None
    except (KeyError, TypeError) as error:
        raise NativeError(f"{file}: not the config of a run: {error} is missing") from None
    return dict(config)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """The weights by name."""
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except FileNotFoundError:
        raise NativeError(f"{path}: no such file; the run has no weights yet") from None
    except (OSError, SafetensorError) as error:
        raise NativeError(f"{path}: not a readable safetensors file: {error}") from None
