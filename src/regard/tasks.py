"""The six tasks: what a run reads, learns and answers, as plain values.

What a task does at a higher layer (make batches, validate, answer, evaluate) is one table from task to function there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from regard.config import Config, Frame

TaskName = Literal["pairs", "lm", "masked", "span", "classify", "image"]
# What the files of a task hold: a table of sources and targets, a table of texts and labels, plain text, or images.
Reads = Literal["pairs", "labelled", "text", "images"]
CONTEXT = 256  # tokens of plain text in a row of a batch


@dataclass(frozen=True, kw_only=True)
class Task:
    """The facts of a task."""

    name: TaskName
    summary: str  # for help and documentation
    model: str  # a model of this task, for messages
    reads: Reads
    stacks: tuple[str, ...]  # that its model has
    preset: str | None  # the default; None: chosen by the amount of data
    metrics: tuple[str, ...]  # of validation; the first is the default
    evaluation: tuple[str, ...] = ()  # of `regard evaluate`; empty: chosen by the references
    frame: Frame = "end"  # special tokens around a text
    start: Literal["sos", "eos"] = "sos"  # the token before the first that is predicted
    train: Mapping[str, Any] = field(default_factory=dict)  # defaults of [train] that differ from those of pairs

    @property
    def plain_text(self) -> bool:
        return self.reads == "text"

    @property
    def labels(self) -> bool:
        """Whether the answer is one of a few labels."""
        return self.reads in ("labelled", "images")

    @property
    def seq2seq(self) -> bool:
        return self.stacks == BOTH


BOTH = ("encoder", "decoder")
_TEXT: Mapping[str, Any] = MappingProxyType({"label_smoothing": 0.0, "context": CONTEXT})
_LABELS: Mapping[str, Any] = MappingProxyType({"label_smoothing": 0.0})

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task(
                name="pairs",
                summary="source to target",
                model="an encoder-decoder for pairs",
                reads="pairs",
                stacks=BOTH,
                preset=None,
                metrics=("loss", "accuracy", "wer", "per", "bleu", "chrf"),
            ),
            Task(
                name="lm",
                summary="plain text, the next token (causal LM)",
                model="a language model",
                reads="text",
                stacks=("decoder",),
                preset="llama-tiny",
                metrics=("loss",),
                evaluation=("perplexity", "bits_per_char", "loss"),
                frame="none",
                start="eos",  # a text begins after the end of another
                train=_TEXT,
            ),
            Task(
                name="masked",
                summary="plain text, masked tokens",
                model="a masked language model",
                reads="text",
                stacks=("encoder",),
                preset="bert-tiny",
                metrics=("loss", "accuracy"),
                evaluation=("accuracy", "pseudo_perplexity", "loss"),
                frame="both",
                train=_TEXT,
            ),
            Task(
                name="span",
                summary="plain text, masked spans (span corruption)",
                model="a model trained by span corruption",
                reads="text",
                stacks=BOTH,
                preset="t5-tiny",
                metrics=("loss",),
                evaluation=("accuracy", "perplexity", "loss"),
                train=_TEXT,
            ),
            Task(
                name="classify",
                summary="text to a label",
                model="a text classifier",
                reads="labelled",
                stacks=("encoder",),
                preset="bert-tiny",
                metrics=("accuracy", "loss"),
                evaluation=("accuracy",),
                frame="both",
                train=_LABELS,
            ),
            Task(
                name="image",
                summary="image to a label",
                model="an image classifier",
                reads="images",
                stacks=("encoder",),
                preset="vit-tiny",
                metrics=("accuracy", "loss"),
                evaluation=("accuracy",),
                train=MappingProxyType({**_LABELS, "batch_examples": 64}),
            ),
        )
    }
)
assert tuple(TASKS) == get_args(TaskName)


def infer_task(config: Config) -> TaskName:
    """The task of a model that does not name it: a run of version 0.4 or older, or a model converted from elsewhere."""
    if config.patches is not None:
        return "image"
    if config.output == "classes":
        return "classify"
    if config.decoder is None:
        return "masked"
    return "lm" if config.encoder is None else "pairs"
