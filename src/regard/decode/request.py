"""Requests and options of decoding, and what each engine supports. Imports neither torch nor tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from regard.config import Count, Problem, Value, explain, parse
from regard.errors import UserError
from regard.recipe import option
from regard.suggest import nearest
from regard.tasks import NOT_STREAMED, Task

if TYPE_CHECKING:
    from regard.text.codec import Example  # slow: imports tokenizers, which shell completion does not need

Precision = Literal["fp32", "bf16", "int8"]
Utility = Literal["chrf", "bleu", "edit", "exact"]
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)  # as in JSON
HeadIndex = Annotated[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], FromList]  # layer, head
HeadList = Annotated[tuple[HeadIndex, ...], FromList]
Weight = Annotated[float, Field(gt=0)]
MAX_HYPOTHESES = 10_000
Hypotheses = Annotated[int, Field(ge=1, le=MAX_HYPOTHESES, strict=True)]
Whole = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
MIN_SIMILARITY = 0.75  # above it, an unknown key is taken for a misspelt field
ANSWER_KEYS = ("hypotheses", "candidates", "label", "probabilities", "flags", "error")  # of JSON output
Input: TypeAlias = "str | Example | Request"
EngineName = Literal["native", "torch", "ctranslate2"]
EngineChoice = Literal["auto", "native", "torch", "ctranslate2"]
ENGINE_HELP = (
    "auto (default: native if it is installed and supports the options, else torch), native, torch or ctranslate2"
)
Show = Callable[[str], str]  # the name of an option as a user writes it: beam, or --beam on a command line
CONSTRAINTS = ("prefix", "require", "forbid", "stop", "min_length", "max_length", "seed")  # fields of a request
LENGTH_RATIO = 3  # the default maximum length is LENGTH_RATIO * source + LENGTH_EXTRA
LENGTH_EXTRA = 50
CONTINUATION_LENGTH = 100  # default maximum length of a language model
MAX_NAMED = 12  # options in a message


def _not_one_text(value: Any) -> Any:
    """Refuse a single text, which would be read as a list of its letters."""
    if isinstance(value, str):
        raise ValueError(f"takes a list of texts, such as [{value[:40]!r}], not one text")
    return tuple(value) if isinstance(value, list) else value


Phrase = Annotated[str, Field(min_length=1)]
PhraseList = Annotated[tuple[Phrase, ...], Field(fail_fast=True), BeforeValidator(_not_one_text)]


class Options(Value):
    """All options of decoding.

    Scores are natural-log probabilities of the model and include the end token; constraints never change them.
    """

    # strategy: greedy search by default
    beam: Hypotheses = option(1, "Beam width; 1 is greedy search.")
    nbest: Hypotheses = option(1, "Outputs per line.")
    sample: bool = option(False, "Sample tokens instead of searching for the best output.")
    mbr: int = option(
        0,
        "Pick the candidate with the highest expected utility among N samples or the N best of a beam.",
        ge=0,
        le=MAX_HYPOTHESES,
    )
    utility: Utility = option("chrf", "Utility of --mbr: chrf, bleu, edit or exact.")
    weights: tuple[Weight, ...] = option((), "Weights of RUN and each --ensemble. (default: equal)", metavar="W,W,...")

    # beam search
    length_penalty: float = option(1.0, "Rank hypotheses by score / length ** PENALTY.", ge=0)
    coverage_penalty: float = option(0.0, "Penalise hypotheses that leave source tokens unattended.", ge=0)
    groups: Hypotheses = option(1, "Diverse beam search: number of groups that avoid each other's tokens.")
    diversity: float = option(0.5, "Penalty for a token that an earlier group chose at the same step.", ge=0)
    exact: bool = option(False, "Search until no open hypothesis can enter the list of outputs.")

    # sampling
    temperature: float = option(1.0, "Temperature of sampling; below 1 is sharper, above 1 flatter.", gt=0)
    top_k: int = option(0, "Sample from the K most probable tokens; 0: from all.", ge=0)
    top_p: float = option(1.0, "Sample from the most probable tokens with a total probability of P.", gt=0, le=1)
    min_p: float = option(0.0, "Exclude tokens less probable than P times the best one.", ge=0, lt=1)
    seed: int = option(1, "Random seed of sampling.", ge=0)

    # steering
    prefix: str = option("", "Start of every output; a line's own prefix takes precedence.")
    require: PhraseList = option((), "Phrase that the output must contain. Repeatable: all of them.", metavar="PHRASE")
    require_any: PhraseList = option((), "The output must contain one of these phrases. Repeatable.", metavar="PHRASE")
    forbid: PhraseList = option((), "Phrase that the output must not contain. Repeatable.", metavar="PHRASE")
    stop: PhraseList = option((), "End the output before the first occurrence of TEXT. Repeatable.", metavar="TEXT")
    alternatives: int = option(0, "Complete each of the K best tokens at one position.", ge=0)
    alternatives_at: int | None = option(
        None, "Position of --alternatives in output tokens, from 0. (default: after the prefix)", ge=0
    )
    min_length: int = option(0, "Minimum output tokens, without the end token.", ge=0)
    max_length: Count | None = option(
        None, f"Maximum output tokens. (default: {LENGTH_RATIO} times the source, plus {LENGTH_EXTRA})"
    )
    min_ratio: float = option(0.0, "Minimum output tokens per source token.", ge=0)
    max_ratio: float | None = option(None, "Maximum output tokens per source token.", gt=0)
    no_repeat_ngram: int = option(0, "Never repeat N consecutive tokens; 0: no limit.", ge=0)
    repetition_penalty: float = option(1.0, "Above 1: penalise tokens that the output already contains.", ge=1)
    unknown: bool = option(False, "Allow the unknown token in outputs.")

    # reporting and batching
    alignment: bool = option(False, "Show which source tokens each output token is aligned with.")
    # of the decoder, from 0; by default see `decode.alignment`
    alignment_heads: HeadList = option(
        (), "Decoder heads to read the alignment from, as LAYER.HEAD counted from 1.", metavar="L.H,L.H,..."
    )
    top_tokens: int = option(
        0, "Show the K most probable tokens at each output position; needs --json, except for masks.", ge=0
    )
    max_source: Count = option(2048, "Maximum tokens of a source; longer ones are not decoded (score: also targets).")
    batch_tokens: Count = option(8192, "Padded source tokens times hypotheses in a batch.")
    window: Count = option(4096, "Lines read ahead and sorted by length.")
    precision: Precision = option(
        "fp32", "bf16 (engine torch, some processors) or int8 (engines native, ctranslate2): faster, less exact."
    )

    def problems(self) -> Iterator[Problem]:
        yield self.beam % self.groups, f"beam {self.beam} is not a multiple of groups {self.groups}"
        yield self.sample and self.beam > 1, f"sample and beam {self.beam} are two strategies; choose one"
        wider = f"needs a beam at least as wide, not {self.beam}, or sample"
        searched = not self.samples and not self.alternatives
        yield searched and self.nbest > self.beam, f"nbest {self.nbest} {wider}"
        yield self.beam > 1 and self.mbr > self.beam, f"mbr {self.mbr} {wider}"
        ranked = self.mbr > 0
        yield ranked and self.nbest > self.mbr, f"nbest {self.nbest} is more than the {self.mbr} candidates of mbr"
        listed = self.alternatives > 0
        yield listed and ranked, "alternatives and mbr each make their own list of outputs; choose one"
        yield listed and self.nbest > 1, "alternatives lists one output per alternative; leave nbest at 1"
        placed = self.alternatives_at is not None
        yield placed and not listed, "alternatives_at needs alternatives"
        limits = (("length", self.min_length, self.max_length), ("ratio", self.min_ratio, self.max_ratio))
        for name, least, most in limits:
            crossed = most is not None and least > most
            yield crossed, f"min_{name} {least} is more than max_{name} {most}"
        # Options that would have no effect. A seed without sampling is allowed: every seed gives the same output.
        changed = changed_options(self)
        sampling = "sample, or mbr without a beam"
        beam = "a beam of at least 2"
        for name, used, needed in (
            ("temperature", self.samples, sampling),
            ("top_k", self.samples, sampling),
            ("top_p", self.samples, sampling),
            ("min_p", self.samples, sampling),
            ("utility", self.mbr > 0, "mbr"),
            ("exact", self.beam > 1, beam),
            ("coverage_penalty", self.beam > 1, beam),
            ("diversity", self.groups > 1, "groups, at least 2"),
            ("alignment_heads", self.alignment or self.coverage_penalty > 0, "alignment or coverage_penalty"),
        ):
            yield name in changed and not used, f"{name} needs {needed}"

    @property
    def samples(self) -> bool:
        return self.sample or (self.mbr > 0 and self.beam == 1)

    @property
    def rows(self) -> int:
        """Hypotheses per sentence that are decoded in parallel."""
        return max(self.beam, self.mbr, self.nbest) if self.samples else self.beam

    @classmethod
    def of(cls, **settings: Any) -> Options:
        """Checked options; an invalid one raises a UserError with its name."""
        return parse(cls, settings, "options")


class BatchSettings(TypedDict, total=False):
    """Options of classification."""

    max_source: Count
    batch_tokens: Count


class ScoringSettings(BatchSettings, total=False):
    """Options of scoring."""

    weights: tuple[Weight, ...]
    window: Count
    precision: Precision


class OptionSettings(ScoringSettings, total=False):
    """The fields of Options as keyword arguments, for editors and type checkers."""

    beam: Hypotheses
    nbest: Hypotheses
    sample: bool
    mbr: int
    utility: Utility
    length_penalty: float
    coverage_penalty: float
    groups: Hypotheses
    diversity: float
    exact: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    prefix: str
    require: PhraseList
    require_any: PhraseList
    forbid: PhraseList
    stop: PhraseList
    alternatives: int
    alternatives_at: int | None
    min_length: int
    max_length: Count | None
    min_ratio: float
    max_ratio: float | None
    no_repeat_ngram: int
    repetition_penalty: float
    unknown: bool
    alignment: bool
    alignment_heads: HeadList
    top_tokens: int


def _requirements(value: Any) -> tuple[tuple[str, ...], ...]:
    """Requirements as tuples of phrases; a text is a requirement with one phrase."""
    rows: list[Any] = list(value) if isinstance(value, list | tuple) else [None]
    rows = [(row,) if isinstance(row, str) else row for row in rows]
    for row in rows:
        if not (isinstance(row, list | tuple) and row and all(isinstance(x, str) and x for x in row)):
            raise ValueError(
                "takes a list, each item a phrase or a list of phrases of which one is enough, such as"
                f" ['a', ['b', 'c']], not {str(value)[:80]!r}"
            )
    return tuple(tuple(row) for row in rows)


class Request(BaseModel):
    """A source with its own constraints, which override (prefix, lengths, seed) or extend those of the options.

    Each item of `require` is a phrase, or a list of phrases of which the output must contain one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    features: str | None = None
    prefix: str = ""
    require: Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_requirements)] = ()
    forbid: PhraseList = ()
    stop: PhraseList = ()
    min_length: Whole | None = None
    max_length: Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)] | None = None
    seed: Whole | None = None

    def __init__(
        self,
        source: str,
        features: str | None = None,
        prefix: str = "",
        require: Sequence[str | Sequence[str]] = (),
        forbid: Sequence[str] = (),
        stop: Sequence[str] = (),
        min_length: int | None = None,
        max_length: int | None = None,
        seed: int | None = None,
    ) -> None:
        try:
            super().__init__(
                source=source, features=features, prefix=prefix, require=require, forbid=forbid, stop=stop,
                min_length=min_length, max_length=max_length, seed=seed,
            )  # fmt: skip
        except ValidationError as error:
            lines = [explain(Request, dict(item)) for item in error.errors(include_url=False)]
            raise UserError("; ".join(lines)) from None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The fields that differ from their defaults."""
        for name, field_info in type(self).model_fields.items():
            if (value := getattr(self, name)) != field_info.default:
                yield name, value


class Prompt(Request):
    """A request to a language model with special tokens, by id, between texts; no text contains them."""

    pieces: Sequence[str | int] = ()


def parse_request(data: Mapping[str, Any], fields: Sequence[str] = tuple(Request.model_fields)) -> Request:
    """A request from JSON with the keys in `fields`; null means that a key is absent.

    Other keys belong to the caller, unless they look like mistakes.
    """
    values = {key: value for key, value in data.items() if value is not None and key in fields}
    missing = [name for name in fields if name not in data]
    for key in (key for key in data if key not in fields):
        if key in ANSWER_KEYS:
            raise UserError(f"{key}: is a key of the answer; choose another name")
        if key in Request.model_fields:
            raise UserError(f"{key}: not for this run; a request has {', '.join(fields)} here")
        if key in Options.model_fields:
            raise UserError(
                f"{key}: is an option for all requests (--{key.replace('_', '-')}), not a key of a request, which has"
                f" {', '.join(fields)}"
            )
        if near := nearest(key, missing, MIN_SIMILARITY):
            raise UserError(f"{key:.100}: no such key; did you mean {near!r}?")
    if "source" not in values:
        raise UserError(f"source: is required; a request has {', '.join(fields)}, and keys of your own")
    return Request(**values)


@dataclass(frozen=True)
class EngineSupport:
    """What an engine supports. Everything else is refused: an engine never ignores an option."""

    options: frozenset[str]  # fields of `Options`
    constraints: frozenset[str]  # of single requests
    precisions: tuple[Precision, ...]
    devices: tuple[str, ...]
    ensembles: bool
    streaming: bool
    seeded_lines: bool  # the samples of a line do not depend on other lines and workers


ENGINES: Mapping[EngineName, EngineSupport] = {
    "native": EngineSupport(
        options=frozenset(Options.model_fields.keys() - {"coverage_penalty", "groups", "diversity"}),
        constraints=frozenset(CONSTRAINTS),
        precisions=("fp32", "int8"),
        devices=("cpu",),
        ensembles=True,
        streaming=True,
        seeded_lines=True,
    ),
    "torch": EngineSupport(
        options=frozenset(Options.model_fields),
        constraints=frozenset(CONSTRAINTS),
        precisions=("fp32", "bf16"),
        devices=("cpu", "cuda", "mps"),
        ensembles=True,
        streaming=True,
        seeded_lines=True,
    ),
    "ctranslate2": EngineSupport(
        options=frozenset(
            {"beam", "nbest", "length_penalty", "sample", "temperature", "top_k", "top_p", "seed", "prefix"}
            | {"min_length", "max_length", "min_ratio", "max_ratio", "no_repeat_ngram", "repetition_penalty", "unknown"}
            | {"max_source", "batch_tokens", "window", "precision"}
        ),
        constraints=frozenset({"prefix", "min_length", "max_length"}),
        precisions=("fp32", "int8"),
        devices=("cpu",),
        ensembles=False,
        streaming=False,
        seeded_lines=False,
    ),
}


def changed_options(options: Options) -> list[str]:
    """The names of the options that differ from their defaults."""
    fields = Options.model_fields.items()
    return [name for name, field_info in fields if getattr(options, name) != field_info.default]


def check_engine(
    engine: EngineChoice,
    options: Options,
    *,
    runs: int = 1,
    device: str = "cpu",
    workers: int = 1,
    stream: bool = False,
    shards: bool = False,
    show: Show = str,
) -> None:
    """Raise a UserError for the first setting that an engine does not support; `auto` is native or torch."""
    if engine == "auto":
        settings: dict[str, Any] = {"runs": runs, "device": device, "workers": workers, "stream": stream}
        try:
            check_engine("native", options, shards=shards, show=show, **settings)
        except UserError:
            check_engine("torch", options, shards=shards, show=show, **settings)
        return
    support = ENGINES[engine]
    others = "use the engine torch"
    if options.precision not in support.precisions:
        engines = [name for name in ENGINES if options.precision in ENGINES[name].precisions]
        raise UserError(
            f"{show('precision')}: {options.precision}: goes with the engine {' or '.join(engines)}, not with {engine}"
            f" (allowed: {', '.join(support.precisions)})"
        )
    for name in changed_options(options):
        if name not in support.options:
            able = " or ".join(other for other in ENGINES if name in ENGINES[other].options)
            raise UserError(f"{show(name)}: the engine {engine} cannot do this; leave it out, or use the engine {able}")
    sampling = options.sample and not support.seeded_lines
    for problem, name, reason in (
        (runs > 1 and not support.ensembles, "ensemble", "decodes with one run"),
        (device not in support.devices, "device", f"does not run on {device}, only on {', '.join(support.devices)}"),
        (stream and not support.streaming, "stream", "cannot do this"),
        (sampling and workers > 1, "workers", f"draws other samples each time with {workers} of them; use 1"),
        (sampling and shards, "sample", "draws a sample that depends on earlier lines, which --out does not allow"),
    ):
        if problem:
            raise UserError(f"{show(name)}: the engine {engine} {reason}; {others}")


def check_constraints(engine: EngineName, constraints: Collection[str]) -> None:
    """Refuse constraints of single requests that an engine does not support."""
    if unsupported := [name for name in constraints if name not in ENGINES[engine].constraints]:
        raise UserError(
            f"{', '.join(unsupported)}: the engine {engine} cannot do this for a single line; leave it out, or use"
            f" the engine {' or '.join(name for name in ENGINES if ENGINES[name].constraints >= {*unsupported})}"
        )


def check_streaming(options: Options, show: Show = str) -> None:
    """Refuse strategies that choose the first token only at the end."""
    if not {*NOT_STREAMED}.isdisjoint(changed_options(options)):
        *names, last = map(show, NOT_STREAMED)
        raise UserError(
            f"{show('stream')}: {', '.join(names)} and {last} decide only at the end; use greedy search or sample"
        )


def check_supported(
    names: Iterable[str], supported: Collection[str], task: Task, path: object, show: Show = str
) -> None:
    """Refuse options or fields (`names`) that have no meaning for the task of a run."""
    if foreign := [name for name in names if name not in supported]:
        allowed = f" (it has {', '.join(map(show, supported))})" if len(supported) <= MAX_NAMED else ""
        raise UserError(f"{', '.join(map(show, foreign))}: no meaning for {path}, which is {task.model}{allowed}")
