"""What a user may ask of the search, as one frozen value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from regard.config import Count, Value, parse

Utility = Literal["chrf", "bleu", "edit", "exact"]
HeadIndex = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]  # layer, head

Phrase = Annotated[str, Field(min_length=1)]


class Options(Value):
    """How to search, what to steer, what to report. Whatever steers changes which output is chosen, never its score.

    Scores are the model's own natural-log probabilities, the end token included.
    """

    # strategy: greedy unless something here says otherwise
    beam: Count = 1
    nbest: Count = 1
    sample: bool = False
    mbr: int = Field(
        default=0, ge=0
    )  # candidates to choose from by expected utility: samples, or with a beam its n-best
    utility: Utility = "chrf"
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()  # of an ensemble's runs, in their order; none: equal ones

    # beam search
    length_penalty: float = Field(default=1.0, ge=0)  # rank by score / length ** penalty
    coverage_penalty: float = Field(default=0.0, ge=0)  # rank lower what leaves source tokens unattended
    groups: Count = 1  # diverse beam search: so many groups, which avoid each other's tokens
    diversity: float = Field(default=0.5, ge=0)  # how much a token costs that an earlier group has chosen at this step
    exact: bool = False  # stop only when nothing alive can overtake, not when `beam` have ended, none alive better

    # sampling
    temperature: float = Field(default=1.0, gt=0)
    top_k: int = Field(default=0, ge=0)  # 0: all
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)  # of the probability of the most probable token
    seed: int = Field(default=1, ge=0)

    # steering
    prefix: str = ""  # every output starts so, unless its line brings its own
    require: tuple[Phrase, ...] = ()
    forbid: tuple[Phrase, ...] = ()
    alternatives: int = Field(default=0, ge=0)  # the so many best tokens at one place, each completed
    alternatives_at: int | None = Field(default=None, ge=0)  # the place, in output tokens; None: right after the prefix
    min_length: int = Field(default=0, ge=0)  # output tokens, the end not counted
    max_length: Count | None = None
    min_ratio: float = Field(default=0.0, ge=0)  # the same in units of the source's length
    max_ratio: float | None = Field(default=None, gt=0)  # with neither maximum: 3 times the source and 50 more
    no_repeat_ngram: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, ge=1)
    unknown: bool = False  # whether the unknown token may be produced

    # reporting and batching
    alignment: bool = False
    alignment_heads: tuple[HeadIndex, ...] = ()  # (layer, head) of the decoder, from 0; none: see `decode.alignment`
    max_source: Count = 2048  # a longer source is not searched, a longer source or target not scored: it is flagged
    batch_tokens: Count = 8192  # padded source tokens times hypotheses
    window: Count = 4096  # lines read ahead, to be sorted by length
    precision: Literal["fp32", "bf16"] = "fp32"  # of matrix products

    @field_validator("beam", "nbest", "mbr", "groups")
    @classmethod
    def _not_too_many(cls, count: int) -> int:
        if count > 10_000:
            raise ValueError(f"at most 10000, not {count}")
        return count

    @field_validator("precision", mode="before")
    @classmethod
    def _of_this_engine(cls, precision: Any) -> Any:
        if precision == "int8":
            raise ValueError("int8 is of the engine ctranslate2 (generate --engine ctranslate2); here fp32 or bf16")
        return precision

    @model_validator(mode="after")
    def _agree(self) -> Options:
        if self.beam % self.groups:
            raise ValueError(f"beam {self.beam} is not a multiple of groups {self.groups}")
        if self.sample and self.beam > 1:
            raise ValueError(f"sample and beam {self.beam} are two strategies; choose one")
        if not self.samples and not self.alternatives and self.nbest > self.beam:
            raise ValueError(f"nbest {self.nbest} needs a beam at least as wide, not {self.beam}, or sample")
        if self.mbr and self.beam > 1 and self.mbr > self.beam:
            raise ValueError(f"mbr {self.mbr} needs a beam at least as wide, not {self.beam}, or sample")
        if self.mbr and self.nbest > self.mbr:
            raise ValueError(f"nbest {self.nbest} is more than the {self.mbr} candidates of mbr")
        if self.alternatives and self.mbr:
            raise ValueError("alternatives and mbr each make their own list of outputs; choose one")
        if self.alternatives and self.nbest > 1:
            raise ValueError("alternatives lists one output per alternative; leave nbest at 1")
        if self.alternatives_at is not None and not self.alternatives:
            raise ValueError("alternatives_at needs alternatives, the number of them")
        if self.max_length is not None and self.min_length > self.max_length:
            raise ValueError(f"min_length {self.min_length} is more than max_length {self.max_length}")
        if self.max_ratio is not None and self.min_ratio > self.max_ratio:
            raise ValueError(f"min_ratio {self.min_ratio} is more than max_ratio {self.max_ratio}")
        self._heard()
        return self

    def _heard(self) -> None:
        """Refuse what would be ignored. A seed is heard without draws: the output is the same for every seed."""
        drawn, searched = self.samples, self.beam > 1
        for name, heard, needed in (
            ("temperature", drawn, "sample, or mbr without a beam"),
            ("top_k", drawn, "sample, or mbr without a beam"),
            ("top_p", drawn, "sample, or mbr without a beam"),
            ("min_p", drawn, "sample, or mbr without a beam"),
            ("utility", self.mbr > 0, "mbr"),
            ("exact", searched, "a beam of at least 2"),
            ("coverage_penalty", searched, "a beam of at least 2"),
            ("diversity", self.groups > 1, "groups, at least 2"),
            ("alignment_heads", self.alignment or self.coverage_penalty > 0, "alignment or coverage_penalty"),
        ):
            if not heard and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs {needed}")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, not searched for."""
        return self.sample or (self.mbr > 0 and self.beam == 1)

    @property
    def rows(self) -> int:
        """Hypotheses per sentence that are worked on side by side."""
        return max(self.beam, self.mbr, self.nbest) if self.samples else self.beam

    @classmethod
    def of(cls, **settings: Any) -> Options:
        """Options checked with messages for people: a UserError that names the option."""
        return parse(cls, settings, "options")
