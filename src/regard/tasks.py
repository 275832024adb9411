"""The six tasks as plain values. A higher layer maps tasks to functions in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from regard.config import Config, Frame

TaskName = Literal["pairs", "lm", "masked", "span", "classify", "image"]
# The content of data files: a table of sources and targets, a table of texts and labels, plain text, or images.
Reads = Literal["pairs", "labelled", "text", "images"]
Answer = Literal["generate", "stream", "score", "classify", "embed", "inspect"]
CONTEXT = 256  # default number of tokens of plain text in a row of a batch
BOTH = ("encoder", "decoder")
DECODES: tuple[Answer, ...] = ("generate", "stream", "score", "inspect")
LABELS: tuple[Answer, ...] = ("classify", "inspect")
TABLE = ("target", "columns", "reference", "strict", "confusions", "outputs")  # options to evaluate on a table

# Options of decoding without a meaning for an answer: those that decide on the first token only at the end cannot be
# streamed, and only one output is evaluated.
NOT_STREAMED = ("beam", "nbest", "mbr", "alternatives")
NOT_EVALUATED = ("nbest", "alternatives", "alternatives_at", "alignment", "top_tokens")

# Options of `regard evaluate`, except metrics, against and bootstrap, which every task has. Pairs are decoded, so all
# options of decoding apply to them too.
_EVALUATION: Mapping[Reads, tuple[str, ...]] = {
    "pairs": (*TABLE, "bleu_tokenize", "lowercase", "ensemble", "prefix_column", "engine", "workers"),
    "labelled": (*TABLE, "max_source", "batch_tokens"),
    "text": ("context", "memory", "strict"),
    "images": ("confusions",),
}

# Settings in [data] without a meaning.
_NOT_DATA: Mapping[Reads, tuple[str, ...]] = {
    "pairs": (),
    "labelled": ("max_ratio",),
    "text": ("min_length", "max_ratio", "deduplicate"),
    "images": ("weights", "temperature", "min_length", "max_ratio", "deduplicate"),
}

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
    stacks: tuple[str, ...]  # of its model
    presets: tuple[str, ...]  # candidates for `preset = "auto"`, from small to large
    answers: tuple[Answer, ...]  # kinds of answers of a run
    metrics: tuple[str, ...]  # of validation; the first is the default
    evaluation: tuple[str, ...] = ()  # metrics of `regard evaluate`; empty: chosen by the references
    frame: Frame = "end"  # special tokens around a text
    start: Literal["sos", "eos"] = "sos"  # the token before the first predicted one
    request_fields: tuple[str, ...] | None = None  # supported fields of a request; None: all
    options: tuple[str, ...] | None = None  # supported options of decoding; None: all except `excluded_options`
    excluded_options: tuple[str, ...] = ()

    @property
    def train(self) -> Mapping[str, Any]:
        return _TRAIN[self.reads]

    @property
    def unsupported_data(self) -> tuple[str, ...]:
        """Settings in [data] that have no meaning for the task."""
        return _NOT_DATA[self.reads]

    @property
    def evaluation_options(self) -> tuple[str, ...]:
        """Options of `regard evaluate`, in addition to those of every task and, for pairs, of decoding."""
        return _EVALUATION[self.reads]

    @property
    def labels(self) -> bool:
        """Whether the answers are labels."""
        return self.reads in ("labelled", "images")

    @property
    def seq2seq(self) -> bool:
        return self.stacks == BOTH


_TASKS = (
    Task("pairs", "source to target", "an encoder-decoder for pairs", "pairs", BOTH,
         ("transformer-tiny", "transformer-mini", "transformer-small", "transformer-base"), DECODES,
         metrics=("loss", "accuracy", "wer", "per", "bleu", "chrf")),
    Task("lm", "plain text, the next token (causal LM)", "a language model", "text", ("decoder",), ("llama-tiny",),
         DECODES, metrics=("loss",), evaluation=("perplexity", "bits_per_char", "loss"), frame="none",
         start="eos",  # a text begins after the end token of another text
         excluded_options=("alignment", "coverage_penalty")),  # there is no source
    Task("masked", "plain text, masked tokens", "a masked language model", "text", ("encoder",), ("bert-tiny",),
         ("generate", "embed", "inspect"), metrics=("loss", "accuracy"),
         evaluation=("accuracy", "pseudo_perplexity", "loss"), frame="both", request_fields=("source",),
         options=("top_tokens", "max_source", "batch_tokens", "window")),
    Task("span", "plain text, masked spans (span corruption)", "a model trained by span corruption", "text", BOTH,
         ("t5-tiny",), DECODES, metrics=("loss",), evaluation=("accuracy", "perplexity", "loss")),
    Task("classify", "text to a label", "a text classifier", "labelled", ("encoder",), ("bert-tiny",),
         LABELS, metrics=("accuracy", "loss"), evaluation=("accuracy",), frame="both",
         request_fields=("source", "features"), options=("max_source", "batch_tokens", "window")),
    Task("image", "image to a label", "an image classifier", "images", ("encoder",), ("vit-tiny",),
         LABELS, metrics=("accuracy", "loss"), evaluation=("accuracy",), request_fields=(), options=()),
)  # fmt: skip
TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _TASKS})
assert tuple(TASKS) == get_args(TaskName)


def infer_task(config: Config) -> TaskName:
    """The task of a model whose config does not name it: a run of version 0.4 or older, or a converted model."""
    if config.patches is not None:
        return "image"
    if config.output == "classes":
        return "classify"
    if config.decoder is None:
        return "masked"
    return "lm" if config.encoder is None else "pairs"
