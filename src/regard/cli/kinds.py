"""How runs of each kind are evaluated, and the options of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from regard.cli.input import UnknownParts
    from regard.data.plain import TokenizedText
    from regard.data.reader import LineCounter, Located, Source
    from regard.decode.options import Options
    from regard.evaluate import Evaluation, Skip, Staff
    from regard.run import Run
    from regard.text.codec import Example

T = TypeVar("T")

# What a run is evaluated on, and the options that this has beside --against, --bootstrap, --json, --threads, --device.
PLAIN = ("metric", "context", "memory", "strict")
OPTIONS = {
    "pairs": (
        "target", "columns", "metric", "beam", "length_penalty", "max_length", "max_source", "batch_tokens",
        "strict", "workers",
    ),
    "labels": ("target", "columns", "metric", "max_source", "batch_tokens", "strict"),
    "image": ("metric",),
    "text": PLAIN,
    "hidden": PLAIN,
    "stretches": PLAIN,
}  # fmt: skip
NAMES = {
    "pairs": "a model of pairs",
    "labels": "a classifier of texts",
    "image": "a classifier of images",
    "text": "a language model",
    "hidden": "an encoder that predicts masked tokens",
    "stretches": "a model that fills in masked spans",
}


class Found(NamedTuple):
    """An evaluation, how many tokens or labels of the file RUN does not know, by side, and what to say about them."""

    result: Evaluation
    unknown: dict[str, int]
    remarks: list[str]


def _second(found: list[T]) -> T | None:
    return found[1] if len(found) > 1 else None


def _named(runs: list[Run], remarks: list[list[str]]) -> list[str]:
    """Remarks on each run; if there are two, with their names, unless both are the same."""
    if len(remarks) == 1 or remarks[0] == remarks[1]:
        return remarks[0]
    return [f"{run.path}: {remark}" for run, told in zip(runs, remarks, strict=True) for remark in told]


def evaluate_pairs(
    runs: list[Run],
    source: Source,
    account: LineCounter,
    options: Options,
    metrics: list[str],
    samples: int,
    staff: Staff,
) -> Found:
    """Decode the sources and compare with the targets."""
    from regard.evaluate import evaluate

    located = list(source.read(account))
    examples = [item.example for item in located]
    unknown = _unknown(runs, examples)
    skip = _skipper(source, located, account)
    result = evaluate(runs[0], examples, options, metrics, _second(runs), samples, staff, skip)
    return Found(result, unknown[0].to_json(), _named(runs, [each.remarks() for each in unknown]))


def evaluate_labelled(
    runs: list[Run], source: Source, account: LineCounter, options: Options, metrics: list[str], samples: int
) -> Found:
    """Tell the labels of texts and compare."""
    from regard.decode.classify import classify
    from regard.evaluate import evaluate_labels

    _only_accuracy(metrics)
    located = list(source.read(account))
    examples = [item.example for item in located]
    unknown = _unknown(runs, examples)
    said = [classify(run, examples, options.batch_tokens, options.max_source) for run in runs]
    skip = _skipper(source, located, account)
    result = evaluate_labels([e.target or "" for e in examples], said[0], _second(said), samples, skip)
    return Found(result, unknown[0].to_json(), _named(runs, [each.remarks() for each in unknown]))


def _unknown(runs: list[Run], examples: list[Example]) -> list[UnknownParts]:
    from regard.cli.input import UnknownParts

    found = [UnknownParts(run) for run in runs]
    for each in found:
        each.note(examples)
    return found


def _skipper(source: Source, located: list[Located], account: LineCounter) -> Skip:
    from regard.data.reader import LONG

    return lambda place, reason: account.skip(LONG, source.place(located[place].number), reason, tell=True)


def _only_accuracy(metrics: list[str]) -> None:
    from regard.errors import one_of

    for name in metrics:
        if name != "accuracy":
            raise one_of("metric", name, ("accuracy",))


def kind_of(run: Run) -> str:
    """What a run is evaluated on."""
    config = run.config
    if config.patches is not None:
        return "image"
    if config.output == "classes":
        return "labels"
    if config.encoder is None:
        return "text"
    if config.decoder is None:
        return "hidden"
    from regard.decode.text_score import recipe_of

    recipe = recipe_of(run)
    return "stretches" if recipe is not None and recipe.task == "span" else "pairs"


def evaluate_plain(
    runs: list[Run],
    file: str,
    account: LineCounter,
    metrics: list[str],
    samples: int,
    context: int | None,
    memory: int | None,
) -> Found:
    """Let a model read a text, and say what it does not know of it."""
    from regard.data.plain import read_pieces, tokenize_text
    from regard.data.reader import Source
    from regard.evaluate import evaluate_text, judge_text

    pieces = list(read_pieces(Source((file,)), account))
    units = [tokenize_text(pieces, run.codec.source, file) for run in runs]
    scores = [judge_text(run, each, context, memory) for run, each in zip(runs, units, strict=True)]
    result = evaluate_text(runs[0], scores[0], metrics, _second(scores), samples)
    remarks = [_strange(run, pieces, each, result) for run, each in zip(runs, units, strict=True)]
    return Found(result, {"source": scores[0].unknown} if scores[0].unknown else {}, _named(runs, remarks))


def _strange(run: Run, pieces: list[str], units: TokenizedText, result: Evaluation) -> list[str]:
    """What is to be said about tokens of a text that a run does not know."""
    import numpy as np

    from regard.evaluate import text_metrics
    from regard.text.codec import UnknownTokens

    unknown, ends = UnknownTokens(), units.tokens.cumsum()
    unknown.add(run.codec.source, pieces, [row.tolist() for row in np.split(units.ids[1:], ends[:-1])])
    if not unknown:
        return []
    remark = f"{100 * unknown.total / int(ends[-1]):.3g} % of the text: {unknown.summary()}"
    if "bits_per_char" in text_metrics(run):
        what = "are too few" if "bits_per_char" in result.metrics else "are left out"
        remark += f"; bits per character {what}, since an unknown token does not say which character it was"
    return [remark]


def evaluate_images(runs: list[Run], file: str, metrics: list[str], samples: int) -> Found:
    """Tell the labels of images and compare."""
    from regard.cli.input import UnknownParts
    from regard.data.images import read_images
    from regard.decode.classify import classify_images
    from regard.evaluate import evaluate_labels

    _only_accuracy(metrics)
    pictures = read_images(file)
    labels = pictures.labels or []
    unknown = [UnknownParts(run) for run in runs]
    for each in unknown:
        each.note_labels(labels)
    said = [classify_images(run, pictures.images_NCHW) for run in runs]
    result = evaluate_labels(labels, said[0], _second(said), samples)
    return Found(result, unknown[0].to_json(), _named(runs, [each.remarks() for each in unknown]))
