"""Results of training: the model card (README.md), warnings about a poor result, and the learning curve."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.plain_text import Stream
from regard.data.prepare import DataFile, Prepared
from regard.data.tables import expand
from regard.decode.hypothesis import DEGENERATE, MANY_DEGENERATE, Hypothesis
from regard.decode.request import Options
from regard.decode.torch_engine import generate
from regard.errors import as_code, as_markdown, plural
from regard.files import replace_file
from regard.metrics import LOWER_IS_BETTER, MEANING
from regard.recipe import FILES, Recipe, Train
from regard.run import Run, read_statistics
from regard.tasks import TASKS
from regard.training.checkpoint import Best, Progress
from regard.training.log import LOG, read_log
from regard.training.report import format_duration

CURVE = "curve.svg"
MODEL_CARD = "README.md"
MEANINGS = MEANING | {
    "loss": "negative log-probability of a token of the target, in nats",
    "perplexity": "exp(loss)",
    "bits_per_char": "the same in bits, per character of the text",
    "accuracy": "completely correct sequences, in percent",
    "bleu": "BLEU",
    "chrf": "chrF",
}
_LABELS = {"loss": "negative log-probability of a label, in nats", "accuracy": "correct labels, in percent"}
TASK_MEANING = {
    "masked": {"accuracy": "correctly predicted masked tokens, in percent"},
    "classify": _LABELS,
    "image": _LABELS,
}
UNITS = {"text": "character", "images": "image"}  # of data, by what a task reads
USES = {
    "pairs": ("generate {run} input.txt", "evaluate {run} pairs.tsv", "inspect {run} TEXT -o page.html"),
    "lm": ("generate {run} prompts.txt", "evaluate {run} text.txt"),
    "masked": (
        "generate {run} masked.txt",
        "evaluate {run} text.txt",
        "train --task classify --data labelled.tsv --from {run} --out runs/classifier",
    ),
    "span": ("evaluate {run} text.txt", "train --data pairs.tsv --from {run} --out runs/tuned"),
    "classify": ("generate {run} input.txt", "evaluate {run} labelled.tsv"),
    "image": ("generate {run} images.npz", "evaluate {run} images.npz"),
}


def write_model_card(
    run: Path,
    recipe: Recipe,
    progress: Progress,
    *,
    parameters: int,
    examples: tuple[int, int],
    files: Mapping[str, DataFile],
    notes: list[str],
    signatures: Mapping[str, str],
) -> None:
    """Write the model card; `examples` counts training and validation examples. Files are named without directories."""
    data = recipe.data
    train = recipe.train
    task = TASKS[recipe.task]
    draw_curve(run, train.metric)
    entries = [entry for name in FILES for entry in getattr(data, name) or ()]
    paths = [*(path for entry in entries for path in {entry: None, **dict.fromkeys(expand(entry))}), train.start_from]
    names = {path: Path(path).name for path in paths if path}
    name = run.resolve().name
    one_line = re.sub(r"[\r\n]", " ", name)  # another line could end a block of code
    hashes = [f"- {role}: {as_code(x.name)}, {x.bytes:,} bytes, SHA-256 `{x.sha256}`" for role, x in files.items()]
    start = train.start_from
    origin = f"starting from {as_code(names[start])}" if start else f"preset {as_code(recipe.preset)}"
    files_used = ", ".join(as_code(names[path]) for path in paths[:-1] if path)
    lines = [
        f"# {as_markdown(name)}",
        "",
        f"{task.model[0].upper()}{task.model[1:]}, trained with regard: {origin}, {parameters:,} parameters.",
        "",
        *_example(run),
        "## Scores",
        "",
        *_score_table(progress, recipe, signatures),
        "",
        *([f"![learning curve]({CURVE})", ""] if (run / CURVE).exists() else []),
        "## Data",
        "",
        *(hashes or [f"- files: {files_used}"]),
        f"- {plural(examples[0], UNITS.get(task.reads, 'example'))} to train on, {examples[1]:,} to validate",
        *(f"- {as_markdown(_without_directories(note, names))}" for note in notes),
        "",
        "## Training",
        "",
        f"- {plural(progress.step, 'step')} ({plural(progress.epoch + 1, 'epoch')} begun, "
        f"{plural(progress.examples, 'example')}), {format_duration(progress.seconds)}, "
        f"{plural(train.workers, 'process')}, seed {train.seed}",
        f"- ended by: {progress.finished}; skipped steps: {progress.skipped}",
        "- every setting: `recipe.toml`; every number: `log.jsonl`",
        "",
        "## Use",
        "",
        "```sh",
        *(f"regard {use.format(run=shlex.quote(one_line))}" for use in USES[recipe.task]),
        "```",
    ]
    if task.name in ("pairs", "lm"):
        lines += ["", "```python", "import regard", f"regard.load({name!r}).generate([...])", "```"]
    text = "\n".join(lines) + "\n"
    replace_file(run / MODEL_CARD, lambda temporary: temporary.write_bytes(text.encode("utf-8", "replace")))


def _example(run: Path) -> list[str]:
    """An example of the data as a code block by indentation, in which nothing is markup."""
    for source, target, features in read_statistics(run).examples[:1]:
        parts = [" ".join(text.split()) for text in (source, features, target) if text]
        return ["An example of the validation data:", "", f"    {' → '.join(parts)}", ""]
    return []


def _without_directories(note: str, names: Mapping[str, str]) -> str:
    for path in sorted(names, key=len, reverse=True):
        note = note.replace(path, names[path])
    return note


def _score_table(progress: Progress, recipe: Recipe, signatures: Mapping[str, str]) -> list[str]:
    best = progress.best
    metric = recipe.train.metric
    beam = recipe.train.validate_beam
    meanings = MEANINGS | TASK_MEANING.get(recipe.task, {})
    if best is None:
        return ["None: the loss was not a finite number in any validation."]
    scores = dict(best.scores)
    if not TASKS[recipe.task].labels:
        scores["perplexity"] = math.exp(min(best.scores["loss"], 700))
    rows = ["| on the validation examples | | |", "|---|---|---|"]
    for name, value in scores.items():
        meaning = meanings.get(name, "") + (f", `{signatures[name]}`" if name in signatures else "")
        rows.append(f"| {name} | {value:.4g} | {meaning} |")
    origin = f"the mean of {plural(best.averaged, 'checkpoint')}" if best.averaged else f"step {best.step:,}"
    order = "lowest" if metric in LOWER_IS_BETTER else "highest"
    search = ""
    if TASKS[recipe.task].reads == "pairs" and metric != "loss":
        search = f"; outputs by {'greedy search' if beam == 1 else f'beam search ({beam})'}"
    return [*rows, "", f"The weights are those of {origin}, chosen by the {order} {metric}{search}."]


LAST_PART = 0.25  # share of the run in which an improvement counts as recent
MIN_IMPROVEMENT = 0.1  # of the metric in the last part, as a share of its value
CHANCE_MARGIN = 2.0  # percent by which a classifier must beat the most frequent label
MAX_DECODED = 100  # examples
UNIGRAM_MARGIN = 0.05  # share by which the loss of a language model must be below the loss of a unigram model
# The sample of a text in which tokens are counted
SAMPLE_WINDOWS = 64
SAMPLE_WINDOW_TOKENS = 1 << 14


def find_problems(
    path: Path, recipe: Recipe, prepared: Prepared[Any], best: Best | None, run: Run | None
) -> Iterator[str]:
    """Yield warnings about a poor result; `run` is the saved run if the task is pairs."""
    task = TASKS[recipe.task]
    problems = [still_improving(read_log(path / LOG), recipe.train)]
    if run is not None:
        examples = prepared.valid_examples
        sample = list(examples[:: max(1, len(examples) // MAX_DECODED)])[:MAX_DECODED]
        options = Options(max_length=2 * prepared.valid.target_lengths.longest)
        outputs = [best for best, *_ in generate(run, sample, options)]
        problems.append(degenerate(outputs, [example.target or "" for example in sample]))
    if best is not None and task.labels:
        labels = [example.target for example in prepared.valid_examples] or prepared.valid.labels.tolist()
        problems.append(at_chance(best.scores["accuracy"], labels))
    if best is not None and task.reads == "text" and not task.seq2seq:
        problems.append(no_better_than_frequencies(best.scores["loss"], prepared.train, prepared.valid))
    return filter(None, problems)


def still_improving(events: Sequence[dict[str, Any]], train: Train) -> str | None:
    """A warning if the metric improved much in the last part of the run and was best at its end."""
    name = train.metric
    values = [(event["step"], event[name]) for event in events if event["event"] == "valid" and event[name] is not None]
    if len(values) < 2:
        return None
    last_step, last = values[-1]
    earlier_values = [value for step, value in values if step <= (1 - LAST_PART) * last_step]
    lower = name in LOWER_IS_BETTER
    if not earlier_values or last != (min if lower else max)(value for _, value in values):
        return None
    earlier = earlier_values[-1]
    change = (earlier - last) / earlier if lower and earlier else (last - earlier) / last if last else 0.0
    if change < MIN_IMPROVEMENT:
        return None
    key = next((key for key in ("minutes", "steps", "epochs") if getattr(train, key) is not None), "minutes")
    change_text = f"{earlier:.4g} to {last:.4g} in the last quarter"
    return (
        f"{name} was still improving fast ({change_text}); continue with --resume --{key} {2 * getattr(train, key):g}"
    )


def degenerate(outputs: Sequence[Hypothesis], references: Sequence[str]) -> str | None:
    """A warning if many outputs are degenerate, or are equal although the references differ."""
    total = len(outputs)
    if not total:
        return None
    flagged = sum(any(flag in output.flags for flag in (*DEGENERATE, "max_length")) for output in outputs)
    if flagged > MANY_DEGENERATE * total:
        problem = f"{flagged} of {total} outputs repeat tokens, do not end or have an unusual length"
        return f"{problem}: the model has not learned the task; give it more time or data"
    text, same = Counter(output.text for output in outputs).most_common(1)[0]
    if same > max(2, MANY_DEGENERATE * total) and same > 3 * max(Counter(references).values()):
        return f"{same} of {total} outputs are {text[:40]!r}: the model ignores its input; give it more time or data"
    return None


def at_chance(accuracy: float, labels: Sequence[Any]) -> str | None:
    """A warning if a classifier is not clearly better than the constant answer of the most frequent label."""
    label, times = Counter(labels).most_common(1)[0]
    share = 100 * times / len(labels)
    if accuracy > share + CHANCE_MARGIN or len(set(labels)) == 1:
        return None
    always = f"always answering {label!r} is correct in {share:.1f} %"
    return f"the model is hardly better than chance ({always}); give it more time or data"


def no_better_than_frequencies(loss: float, train: Stream, valid: Stream) -> str | None:
    """A warning if a model of plain text is not clearly better than a unigram model of the training text."""
    valid_tokens = _sample_tokens(valid)
    smoothing = 1  # no token has probability zero
    counts = np.bincount(_sample_tokens(train), minlength=int(valid_tokens.max()) + 1) + smoothing
    unigram_loss = float(-np.log(counts[valid_tokens] / counts.sum()).mean())
    if loss < max((1 - UNIGRAM_MARGIN) * unigram_loss, UNIGRAM_MARGIN):  # both are zero if a text repeats one token
        return None
    losses = f"loss {loss:.2f}, with token frequencies alone {unigram_loss:.2f}"
    return f"the model predicts hardly better than the frequencies of tokens ({losses}); give it more time or data"


def _sample_tokens(stream: Stream) -> NDArray[np.int64]:
    """Tokens from windows spread evenly over a text, or all tokens of a short text."""
    if len(stream) <= SAMPLE_WINDOWS * SAMPLE_WINDOW_TOKENS:
        return stream.windows(np.zeros(1, np.int64), len(stream)).ravel()
    stride = (len(stream) - SAMPLE_WINDOW_TOKENS) // (SAMPLE_WINDOWS - 1)
    return stream.windows(np.arange(SAMPLE_WINDOWS) * stride, SAMPLE_WINDOW_TOKENS).ravel()


def draw_curve(run: Path, metric: str) -> Path | None:
    """Draw the log of a run as a picture -> its path, or None without matplotlib or without events."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    events = read_log(run / LOG)
    train = [(e["step"], e["loss"]) for e in events if e["event"] == "train"]
    valid = [e for e in events if e["event"] == "valid"]
    if not train and not valid:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # without pyplot: no window, no global state
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token (nats)")
    axes.grid(alpha=0.3)
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, label="training loss")
    if valid:
        steps, losses = zip(*((e["step"], e["loss"]) for e in valid), strict=True)
        axes.plot(steps, losses, "o-", ms=3, color="tab:orange", label="validation loss")
        best = max((e for e in valid if e["best"]), key=lambda e: e["step"], default=None)
        if best is not None:
            axes.axvline(best["step"], color="gray", linestyle=":", label=f"best (step {best['step']:,})")
    if metric != "loss" and valid:
        right = axes.twinx()
        right.set_ylabel(f"{metric} (%)")
        right.plot(steps, [e[metric] for e in valid], "s--", ms=3, color="tab:green", label=metric)
        lines = axes.get_lines() + right.get_lines()
        axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper right")
    else:
        axes.legend(loc="upper right")
    path = run / CURVE
    replace_file(path, lambda temporary: figure.savefig(temporary, format="svg", metadata={"Date": None}))
    return path
