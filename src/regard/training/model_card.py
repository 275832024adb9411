"""The model card of a run: data, scores with their meaning, training and use, as a README."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from regard.data.corpora import expand
from regard.data.prepare import DataFile
from regard.errors import plural
from regard.files import replace_file
from regard.metrics import LOWER_IS_BETTER
from regard.recipe import Recipe
from regard.tasks import TASKS
from regard.training.checkpoint import Progress
from regard.training.report import CURVE, MODEL_CARD, format_duration

MEANING = {
    "loss": "negative log-probability of a token of the target, in nats",
    "perplexity": "exp(loss)",
    "bits_per_char": "the same in bits, per character of the text",
    "accuracy": "sequences that are right in full, in percent",
    "wer": "sequences that are wrong, in percent",
    "per": "edits per token of the reference, in percent",
    "bleu": "BLEU",
    "chrf": "chrF",
}
_LABELS = {"loss": "negative log-probability of a label, in nats", "accuracy": "labels that are right, in percent"}
TASK_MEANING = {
    "masked": {"accuracy": "masked tokens that are predicted right, in percent"},
    "classify": _LABELS,
    "image": _LABELS,
}
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
    """Write the model card, which names files and runs without the directories of this machine.

    `examples` are the numbers for training and validation, `notes` the choices made.
    """
    data, train, task = recipe.data, recipe.train, TASKS[recipe.task]
    lists = [data.train, data.source, data.target, data.valid, data.valid_source, data.valid_target]
    entries = [entry for files in lists for entry in files or ()]
    paths = [*(path for entry in entries for path in {entry: None, **dict.fromkeys(expand(entry))}), train.start_from]
    names = {path: Path(path).name for path in paths if path}
    name = run.resolve().name
    described = [
        f"- {role}: `{file.name}`, {file.bytes:,} bytes, SHA-256 `{file.sha256}`" for role, file in files.items()
    ]
    unit = {"text": "character", "images": "image"}.get(task.reads, "example")
    origin = f"starting from `{names[train.start_from]}`" if train.start_from else f"preset `{recipe.preset}`"
    lines = [
        f"# {name}",
        "",
        f"{task.model[0].upper()}{task.model[1:]}, trained with regard: {origin}, {parameters:,} parameters.",
        "",
        "## Scores",
        "",
        *_score_table(progress, recipe, signatures),
        "",
        *([f"![learning curve]({CURVE})", ""] if (run / CURVE).exists() else []),
        "## Data",
        "",
        *(described or [f"- files: {', '.join(f'`{names[path]}`' for path in paths[:-1] if path)}"]),
        f"- {plural(examples[0], unit)} to train on, {examples[1]:,} to validate",
        *(f"- {_without_directories(note, names)}" for note in notes),
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
        *(f"regard {use.format(run=shlex.quote(name))}" for use in USES[recipe.task]),
        "```",
    ]
    if task.name in ("pairs", "lm"):
        lines += ["", "```python", "import regard", f"regard.load({name!r}).generate([...])", "```"]
    text = "\n".join(lines) + "\n"
    replace_file(run / MODEL_CARD, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _without_directories(note: str, names: Mapping[str, str]) -> str:
    for path in sorted(names, key=len, reverse=True):
        note = note.replace(path, names[path])
    return note


def _score_table(progress: Progress, recipe: Recipe, signatures: Mapping[str, str]) -> list[str]:
    best, metric, beam = progress.best, recipe.train.metric, recipe.train.validate_beam
    meanings = MEANING | TASK_MEANING.get(recipe.task, {})
    if best is None:
        return ["None: no validation gave a number."]
    scores = dict(best.scores)
    if not TASKS[recipe.task].labels:
        scores["perplexity"] = math.exp(min(best.scores["loss"], 700))
    rows = ["| on the validation examples | | |", "|---|---|---|"]
    for name, value in scores.items():
        meaning = meanings.get(name, "") + (f", `{signatures[name]}`" if name in signatures else "")
        rows.append(f"| {name} | {value:.4g} | {meaning} |")
    which = f"the mean of {plural(best.averaged, 'checkpoint')}" if best.averaged else f"step {best.step:,}"
    order = "lowest" if metric in LOWER_IS_BETTER else "highest"
    search = ""
    if TASKS[recipe.task].reads == "pairs" and metric != "loss":
        search = f"; outputs by {'greedy search' if beam == 1 else f'beam search ({beam})'}"
    return [*rows, "", f"The weights are those of {which}, chosen by the {order} {metric}{search}."]
