"""The options of decoding, with the names, defaults and meanings that they have in regard."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any

from regard_native.core import NativeError

# Options of regard that this package does not have.
ELSEWHERE = (
    "alternatives", "alternatives_at", "batch_tokens", "coverage_penalty", "diversity", "forbid", "groups", "mbr",
    "precision", "require", "require_any", "stop", "utility", "weights", "window",
)  # fmt: skip
MAX_SAMPLES = 1000
MAX_BEAM = 1000
MAX_LENGTH = 1_000_000  # of an output, in tokens
LENGTH_RATIO = 3  # the default maximum length is LENGTH_RATIO * source + LENGTH_EXTRA
LENGTH_EXTRA = 50
CONTINUATION_LENGTH = 100  # default maximum length of a language model

COMPARE = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
HEADS = "tuple[tuple[int, int], ...]"  # layers and heads from 0


def option(
    default: Any,
    description: str,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    metavar: str | None = None,
) -> Any:
    """A field with its bounds; the description is the help of its command-line option."""
    bounds = zip(COMPARE, (least, above, most, below), strict=True)
    allowed = {words: bound for words, bound in bounds if bound is not None}
    return field(default=default, metadata={"help": description, "allowed": allowed, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of decoding. Scores are natural-log probabilities of the model and include the end token."""

    beam: int = option(1, "Beam width; 1 is greedy search.", least=1, most=MAX_BEAM)
    nbest: int = option(1, "Outputs per line.", least=1, most=MAX_SAMPLES)
    length_penalty: float = option(1.0, "Rank hypotheses by score / length ** PENALTY.", least=0)
    exact: bool = option(False, "Search until no open hypothesis can enter the list of outputs.")
    sample: bool = option(False, "Sample tokens instead of searching for the best output.")
    temperature: float = option(1.0, "Temperature of sampling; below 1 is sharper, above 1 flatter.", above=0)
    top_k: int = option(0, "Sample from the K most probable tokens; 0: from all.", least=0, most=2**31 - 1)
    top_p: float = option(1.0, "Sample from the most probable tokens with a total probability of P.", above=0, most=1)
    min_p: float = option(0.0, "Exclude tokens less probable than P times the best one.", least=0, below=1)
    seed: int = option(1, "Random seed of sampling.", least=0)
    prefix: str = option("", "Start of every output.")
    no_repeat_ngram: int = option(0, "Never repeat N consecutive tokens; 0: no limit.", least=0, most=2**31 - 1)
    repetition_penalty: float = option(1.0, "Above 1: penalise tokens that the output already contains.", least=1)
    unknown: bool = option(False, "Allow the unknown token in outputs.")
    min_length: int = option(0, "Minimum output tokens, without the end token.", least=0, most=MAX_LENGTH)
    max_length: int | None = option(
        None,
        f"Maximum output tokens. (default: {LENGTH_RATIO} times the source, plus {LENGTH_EXTRA})",
        least=1,
        most=MAX_LENGTH,
    )
    min_ratio: float = option(0.0, "Minimum output tokens per source token.", least=0)
    max_ratio: float | None = option(None, "Maximum output tokens per source token.", above=0)
    max_source: int = option(
        2048, "Maximum tokens of a source; longer ones are not decoded (score: also targets).", least=1, most=2**31 - 1
    )
    alignment: bool = option(False, "Show which source tokens each output token is aligned with.")
    alignment_heads: tuple[tuple[int, int], ...] = option(
        (), "Decoder heads to read the alignment from, as LAYER.HEAD counted from 1.", metavar="L.H,L.H,..."
    )
    top_tokens: int = option(
        0, "Show the K most probable tokens at each output position; needs --json.", least=0, most=2**31 - 1
    )

    @classmethod
    def of(cls, settings: Mapping[str, Any], show: Callable[[str], str] = str) -> Options:
        """Checked options. `show` writes the name of an option as the user does."""
        if not settings:
            return DEFAULTS
        known = _fields()
        values = {}
        for name, value in settings.items():
            if name not in known:
                raise NativeError(unknown_option(name, known, show))
            values[name] = _checked(show(name), value, known[name].type, known[name].metadata["allowed"])
        options = cls(**values)
        for problem, message in options.problems():
            if problem:
                raise NativeError(message)
        return options

    def problems(self) -> Iterator[tuple[bool, str]]:
        """Consistency checks as (failed, message) pairs."""
        yield self.sample and self.beam > 1, f"sample and beam {self.beam} are two strategies; choose one"
        wider = not self.sample and self.nbest > self.beam
        yield wider, f"nbest {self.nbest} needs a beam at least as wide, not {self.beam}, or sample"
        limits = (("length", self.min_length, self.max_length), ("ratio", self.min_ratio, self.max_ratio))
        for name, least, most in limits:
            crossed = most is not None and least > most
            yield crossed, f"min_{name} {least} is more than max_{name} {most}"
        # Options that would have no effect.
        for name, used, needed in (
            ("temperature", self.sample, "sample"),
            ("top_k", self.sample, "sample"),
            ("top_p", self.sample, "sample"),
            ("min_p", self.sample, "sample"),
            ("exact", self.beam > 1, "a beam of at least 2"),
            ("alignment_heads", self.alignment, "alignment"),
        ):
            yield not used and getattr(self, name) != getattr(Options, name), f"{name} needs {needed}"


DEFAULTS = Options()


@cache
def _fields() -> dict[str, Field[Any]]:
    return {each.name: each for each in fields(Options)}


def unknown_option(name: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """The message about an option that does not exist here."""
    names = list(known)
    if name in ELSEWHERE:
        return f"{show(name)}: regard-native cannot do this; leave it out, or use regard"
    from difflib import get_close_matches  # rarely needed

    near = get_close_matches(name, [*names, *ELSEWHERE], n=1)
    hint = f"; did you mean {show(near[0])!r}?" if near else ""
    return f"{show(name)}: no such option{hint} (known: {', '.join(map(show, names))})"


def _checked(name: str, value: Any, kind: Any, allowed: Mapping[str, float]) -> Any:
    """A value of the kind of its field and within its bounds."""
    if value is None and kind.endswith(" | None"):
        return None
    kind = kind.removesuffix(" | None")
    if kind == HEADS:
        return _heads(name, value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    right = {
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
        "int": is_number and isinstance(value, int),
        "float": is_number and math.isfinite(value),
    }
    words = {"bool": "True or False", "str": "a text", "int": "a whole number", "float": "a number"}
    if not right[kind] or not all(COMPARE[words](value, bound) for words, bound in allowed.items()):
        bounds = " and ".join(f"{words} {bound}" for words, bound in allowed.items())
        raise NativeError(f"{name}: must be {words[kind]}{', ' * bool(bounds)}{bounds}, not {value!r:.80}")
    return float(value) if kind == "float" else value


def _heads(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of a layer and a head."""
    if isinstance(value, list | tuple):
        pairs = [tuple(pair) if isinstance(pair, list | tuple) else () for pair in value]
        if all(len(pair) == 2 and all(type(x) is int and 0 <= x < 2**31 for x in pair) for pair in pairs):
            return tuple((layer, head) for layer, head in pairs)
    raise NativeError(f"{name}: must be pairs of a layer and a head, such as [(1, 0)], not {value!r:.80}")
