"""The six tasks: what a run reads, learns and answers, as plain values.

What a task does at a higher layer (make batches, validate, answer, evaluate) is one table from task to function there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from regard.config import Config, Frame

TaskName = Literal["pairs", "lm", "masked", "span", "classify", "image"]
# What the files of a task hold: a table of sources and targets, a table of texts and labels, plain text, or images.
Reads = Literal["pairs", "labelled", "text", "images"]
CONTEXT = 256  # tokens of plain text in a row of a batch
BOTH = ("encoder", "decoder")

# Defaults of [train] that differ from those of pairs.
_TRAIN: Mapping[Reads, Mapping[str, Any]] = {
    "pairs": {},
    "labelled": {"label_smoothing": 0.0},
    "text": {"label_smoothing": 0.0, "context": CONTEXT},
    "images": {"label_smoothing": 0.0, "batch_examples": 64},
}


@dataclass(frozen=True)
class Task:
    """The facts of a task."""

    name: TaskName
    summary: str  # for help and documentation
    model: str  # a model of this task, for messages
    reads: Reads
    stacks: tuple[str, ...]  # that its model has
    presets: tuple[str, ...]  # to choose from by data and budget, from small to large
    metrics: tuple[str, ...]  # of validation; the first is the default
    evaluation: tuple[str, ...] = ()  # metrics of `regard evaluate`; empty: chosen by the references
    frame: Frame = "end"  # special tokens around a text
    start: Literal["sos", "eos"] = "sos"  # the token before the first that is predicted

    @property
    def train(self) -> Mapping[str, Any]:
        return _TRAIN[self.reads]

    @property
    def labels(self) -> bool:
        """Whether the answer is one of a few labels."""
        return self.reads in ("labelled", "images")

    @property
    def seq2seq(self) -> bool:
        return self.stacks == BOTH


_TASKS = (
    Task("pairs", "source to target", "an encoder-decoder for pairs", "pairs", BOTH,
         ("transformer-tiny", "transformer-mini", "transformer-small", "transformer-base"),
         metrics=("loss", "accuracy", "wer", "per", "bleu", "chrf")),
    Task("lm", "plain text, the next token (causal LM)", "a language model", "text", ("decoder",), ("llama-tiny",),
         metrics=("loss",), evaluation=("perplexity", "bits_per_char", "loss"), frame="none",
         start="eos"),  # a text begins after the end of another
    Task("masked", "plain text, masked tokens", "a masked language model", "text", ("encoder",), ("bert-tiny",),
         metrics=("loss", "accuracy"), evaluation=("accuracy", "pseudo_perplexity", "loss"), frame="both"),
    Task("span", "plain text, masked spans (span corruption)", "a model trained by span corruption", "text", BOTH,
         presets=("t5-tiny",), metrics=("loss",), evaluation=("accuracy", "perplexity", "loss")),
    Task("classify", "text to a label", "a text classifier", "labelled", ("encoder",), ("bert-tiny",),
         metrics=("accuracy", "loss"), evaluation=("accuracy",), frame="both"),
    Task("image", "image to a label", "an image classifier", "images", ("encoder",), ("vit-tiny",),
         metrics=("accuracy", "loss"), evaluation=("accuracy",)),
)  # fmt: skip
TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _TASKS})
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
