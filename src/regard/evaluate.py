"""Scoring a run on what it has not seen: answer, compare, and say how sure the numbers are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from regard.data.plain import TokenizedText
from regard.decode.classify import Classification
from regard.decode.generate import Decoder
from regard.decode.options import Options
from regard.decode.score import overlong, score
from regard.decode.text_score import context_of, score_masked, score_spans, score_text
from regard.decode.workers import WorkerPool
from regard.errors import UserError, one_of
from regard.metrics import (
    METRICS,
    SAMPLES,
    Measurement,
    Sums,
    compare,
    compare_sums,
    measure,
    measure_perplexity,
    measure_ratio,
)
from regard.run import Run
from regard.text.codec import Example


@dataclass(frozen=True)
class Outputs:
    """What a run says to a test set."""

    texts: list[str]
    log_probabilities: list[float]  # of the references
    symbols: list[int]


@dataclass(frozen=True)
class Evaluation:
    """Scores by metric, and against another run the other's scores and the p-values of the differences."""

    examples: int  # of plain text: lines
    metrics: dict[str, Measurement]
    outputs: Outputs | None = None
    others: dict[str, Measurement] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)

    def to_json(self, skipped: dict[str, int] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = {
            "examples": self.examples,
            "skipped": dict(skipped or {}),
            "metrics": {name: measured.to_json() for name, measured in self.metrics.items()},
        }
        if self.others:
            result["against"] = {
                name: {
                    **measured.to_json(),
                    "difference": self.metrics[name].score - measured.score,
                    "p": self.p_values[name],
                }
                for name, measured in self.others.items()
            }
        return result


Staff = Callable[[Decoder, int], AbstractContextManager[Decoder | WorkerPool]]  # who decodes so many inputs
Skip = Callable[[int, str], object]  # told the place of an example that cannot be used, and why


def alone(decoder: Decoder, inputs: int) -> AbstractContextManager[Decoder]:
    """No other process."""
    return nullcontext(decoder)


def evaluate(
    run: Run,
    examples: Sequence[Example],
    options: Options | None = None,
    metrics: Sequence[str] = (),
    against: Run | None = None,
    samples: int = SAMPLES,
    staff: Staff = alone,
    skip: Skip = lambda place, reason: None,
) -> Evaluation:
    """Evaluate a run; without `metrics`, those that fit its task. `samples` are those of the bootstrap, 0 for none.

    Pairs that are too long for one of the runs are left out; `skip` is told of each.
    """
    reasons = [overlong(each, examples, options or Options()) for each in (run, against) if each is not None]
    examples = [examples[place] for place in _usable(reasons, skip)]
    if not examples:
        raise UserError("there is nothing to evaluate: not one usable pair was found")
    references = [example.target or "" for example in examples]
    names = list(metrics) or default_metrics(run, references)
    for name in names:
        if name not in METRICS:
            raise one_of("metric", name, METRICS)
    outputs = answer(run, examples, options, names, staff)
    scores = {name: _measure(name, outputs, references, samples) for name in names}
    if against is None:
        return Evaluation(len(examples), scores, outputs)
    theirs = answer(against, examples, options, names, staff)
    others = {name: _measure(name, theirs, references, samples) for name in names}
    p_values = {name: _compare(name, outputs, theirs, references, samples or SAMPLES) for name in names}
    return Evaluation(len(examples), scores, outputs, others, p_values)


def _usable(reasons: Sequence[Sequence[str]], skip: Skip) -> list[int]:
    """The places with which nothing is wrong; `reasons` are, for each run, what is."""
    wrong = {place: reason for each in reversed(reasons) for place, reason in enumerate(each) if reason}
    for place in sorted(wrong):
        skip(place, wrong[place])
    return [place for place in range(len(reasons[0])) if place not in wrong]


def default_metrics(run: Run, references: Sequence[str]) -> list[str]:
    """Sequences of tokens, single strings and sentences are judged differently."""
    if run.codec.config.target_tokens == "space":
        return ["wer", "per", "accuracy", "perplexity"]
    words = sum(len(reference.split()) for reference in references) / len(references)
    if words < 2:
        return ["wer", "cer", "accuracy", "perplexity"]
    return ["bleu", "chrf", "ter", "perplexity"]


def answer(
    run: Run, examples: Sequence[Example], options: Options | None, metrics: Sequence[str], staff: Staff = alone
) -> Outputs:
    """Decode every source, and score every reference, if a metric asks for it."""
    texts, scored = [], []
    if set(metrics) - {"perplexity"}:
        with staff(Decoder(run, options), len(examples)) as decode:
            texts = [hypotheses[0].text for hypotheses in decode(examples)]
    if "perplexity" in metrics:
        scored = list(score(run, examples, options))
    return Outputs(texts, [item.score for item in scored], [len(item.tokens) for item in scored])


def _measure(name: str, outputs: Outputs, references: Sequence[str], samples: int) -> Measurement:
    if name == "perplexity":
        return measure_perplexity(outputs.log_probabilities, outputs.symbols, samples)
    return measure(name, outputs.texts, references, samples)


def _compare(name: str, ours: Outputs, theirs: Outputs, references: Sequence[str], samples: int) -> float:
    if name == "perplexity":  # in the logarithm: the mean log-probability of a token
        sums = [(np.asarray(o.log_probabilities), np.asarray(o.symbols, float)) for o in (ours, theirs)]
        return compare_sums(sums[0], sums[1], samples)
    return compare(name, ours.texts, theirs.texts, references, samples)


# Labels


def evaluate_labels(
    references: Sequence[str],
    said: Sequence[Classification],
    others: Sequence[Classification] | None = None,
    samples: int = SAMPLES,
    skip: Skip = lambda place, reason: None,
) -> Evaluation:
    """Evaluate told labels against the right ones; `others` are those of another run.

    What was too long to get a label is left out; `skip` is told of each.
    """
    both = [said] if others is None else [said, others]
    reasons = [["".join(labelled.flags.values()) for labelled in each] for each in both]
    kept = _usable(reasons, skip)
    references = [references[place] for place in kept]
    if not references:
        raise UserError("there is nothing to evaluate: not one usable example was found")
    texts = [said[place].label for place in kept]
    outputs = Outputs(texts, [], [])
    metrics = {"accuracy": measure("accuracy", texts, references, samples)}
    if others is None:
        return Evaluation(len(references), metrics, outputs)
    theirs = [others[place].label for place in kept]
    p_value = compare("accuracy", texts, theirs, references, samples or SAMPLES)
    other = {"accuracy": measure("accuracy", theirs, references, samples)}
    return Evaluation(len(references), metrics, outputs, other, {"accuracy": p_value})


# Plain text


class TextScores(NamedTuple):
    """Sums by line: what was asked for, how improbable it was, how often it scored highest, and the line's length."""

    asked: np.ndarray
    nll: np.ndarray
    right: np.ndarray
    characters: np.ndarray
    unknown: int = 0  # tokens of the text

    def sums(self, name: str) -> Sums:
        """Amount and total of a metric, by line; in the logarithm where it is a perplexity."""
        if name == "bits_per_char":
            return self.nll / math.log(2), self.characters
        return (100 * self.right if name == "accuracy" else self.nll), self.asked

    def measure(self, name: str, samples: int) -> Measurement:
        amounts, totals = self.sums(name)
        return measure_ratio(amounts, totals, samples, exponential=name.endswith("perplexity"))


def text_metrics(run: Run) -> tuple[str, ...]:
    """What plain text is judged by, by the kind of model."""
    if run.config.decoder is None:
        return ("accuracy", "pseudo_perplexity", "loss")
    return ("perplexity", "bits_per_char", "loss") if run.config.encoder is None else ("accuracy", "perplexity", "loss")


def judge_text(run: Run, units: TokenizedText, context: int | None = None, memory: int | None = None) -> TextScores:
    """Let a language model, or one that predicts masked tokens or spans, read a text."""
    if memory is not None and not run.config.has_memory:
        raise UserError(f"--memory: {run.path} does not remember earlier segments (decoder.memory is 0)")
    context = context_of(run, context)
    if run.config.encoder is None:
        judged = score_text(run, units.ids, context, memory)
    else:
        judged = (score_masked if run.config.decoder is None else score_spans)(run, units.ids, context)
    lines = np.repeat(np.arange(len(units.tokens)), units.tokens)
    asked, nll, right = (np.bincount(lines, x, len(units.tokens)) for x in (judged.asked, judged.nll, judged.right))
    unknown = run.codec.source.unknown(units.ids[1:].tolist())
    return TextScores(asked, nll, right, units.characters.astype(float), unknown)


def evaluate_text(
    run: Run,
    scores: TextScores,
    metrics: Sequence[str] = (),
    others: TextScores | None = None,
    samples: int = SAMPLES,
) -> Evaluation:
    """Evaluate what `judge_text` found; `others` is what it found for another run on the same text.

    Bits per character are only given if asked for where a token is unknown: who reads them back would not know which
    it was, so they are too few.
    """
    clear = not scores.unknown and (others is None or not others.unknown)
    names = list(metrics) or [name for name in text_metrics(run) if clear or name != "bits_per_char"]
    for name in names:
        if name not in text_metrics(run):
            raise one_of("metric", name, text_metrics(run))
    found = {name: scores.measure(name, samples) for name in names}
    if others is None:
        return Evaluation(len(scores.nll), found)
    theirs = {name: others.measure(name, samples) for name in names}
    p_values = {name: compare_sums(scores.sums(name), others.sums(name), samples or SAMPLES) for name in names}
    return Evaluation(len(scores.nll), found, None, theirs, p_values)
