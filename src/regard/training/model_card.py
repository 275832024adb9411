"""README.md of a run: what it is, what it was made from, how good it is, how to use it."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from regard.files import replace_file
from regard.metrics import LOWER_IS_BETTER
from regard.recipe import Recipe
from regard.tasks import TASKS
from regard.training.checkpoint import Progress
from regard.training.report import CURVE, duration

CARD = "README.md"
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
TASK_MEANING = {
    "masked": {"accuracy": "masked tokens that are guessed right, in percent"},
    "classify": {
        "loss": "negative log-probability of a label, in nats",
        "accuracy": "labels that are right, in percent",
    },
    "image": {"loss": "negative log-probability of a label, in nats", "accuracy": "labels that are right, in percent"},
}
KINDS = {
    "pairs": "A sequence-to-sequence model",
    "lm": "A language model",
    "masked": "An encoder that predicts masked tokens",
    "span": "A sequence-to-sequence model that guesses masked spans of text",
    "classify": "A classifier of texts",
    "image": "A classifier of images",
}
USES = {
    "pairs": ("generate {run} input.txt", "evaluate {run} pairs.tsv", "inspect {run} TEXT -o page.html"),
    "lm": ("generate {run} prompts.txt", "evaluate {run} text.txt"),
    "masked": (
        "evaluate {run} text.txt",
        "train --task classify --data labelled.tsv --from {run} --out runs/classifier",
    ),
    "span": (
        "evaluate {run} text.txt",
        "train --data pairs.tsv --from {run} --out runs/tuned",
    ),
    "classify": ("generate {run} input.txt", "evaluate {run} labelled.tsv"),
    "image": (
        "generate {run} images.npz",
        "evaluate {run} images.npz",
    ),
}


def write_model_card(
    run: Path,
    recipe: Recipe,
    progress: Progress,
    *,
    parameters: int,
    examples: tuple[int, int],
    notes: list[str],
    signatures: dict[str, str],
) -> None:
    """Write the card; `examples` are the numbers for training and validation, `notes` the choices made."""
    data, train = recipe.data, recipe.train
    files = [data.train, data.source, data.target, data.valid, data.valid_source, data.valid_target]
    what = {"text": "characters", "images": "images"}.get(TASKS[recipe.task].reads, "examples")
    made = f"starting from `{train.start_from}`" if train.start_from else f"preset `{recipe.preset}`"
    lines = [
        f"# {run.resolve().name}",
        "",
        f"{KINDS[recipe.task]} trained with regard: {made}, {parameters:,} parameters.",
        "",
        "## Scores",
        "",
        *_scores(progress, recipe, signatures),
        "",
        *([f"![learning curve]({CURVE})", ""] if (run / CURVE).exists() else []),
        "## Data",
        "",
        f"- files: {', '.join(f'`{name}`' for name in files if name)}",
        f"- {examples[0]:,} {what} to train on, {examples[1]:,} to validate",
        *(f"- {note}" for note in notes),
        "",
        "## Training",
        "",
        f"- {progress.step:,} steps ({progress.epoch + 1} epochs begun, {progress.examples:,} examples), "
        f"{duration(progress.seconds)}, {train.workers} process{'es' * (train.workers != 1)}, seed {train.seed}",
        f"- ended by: {progress.finished}; skipped steps: {progress.skipped}",
        "- every setting: `recipe.toml`; every number: `log.jsonl`",
        "",
        "## Use",
        "",
        "```sh",
        *(f"regard {use.format(run=shlex.quote(str(run)))}" for use in USES[recipe.task]),
        "```",
    ]
    if recipe.task in ("pairs", "lm"):
        lines += ["", "```python", "import regard", f"regard.load({str(run)!r}).generate([...])", "```"]
    text = "\n".join(lines) + "\n"

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    replace_file(run / CARD, write)


def _scores(progress: Progress, recipe: Recipe, signatures: dict[str, str]) -> list[str]:
    best, metric, beam = progress.best, recipe.train.metric, recipe.train.validate_beam
    meanings = MEANING | TASK_MEANING.get(recipe.task, {})
    if best is None:
        return ["None: no validation gave a number."]
    scores = dict(best.scores)
    if recipe.task not in ("classify", "image"):
        scores["perplexity"] = math.exp(min(best.scores["loss"], 700))
    rows = ["| on the validation examples | | |", "|---|---|---|"]
    for name, value in scores.items():
        meaning = meanings.get(name, "") + (f", `{signatures[name]}`" if name in signatures else "")
        rows.append(f"| {name} | {value:.4g} | {meaning} |")
    which = f"the mean of {best.averaged} checkpoints" if best.averaged else f"step {best.step:,}"
    order = "lowest" if metric in LOWER_IS_BETTER else "highest"
    decoded = recipe.task == "pairs" and metric != "loss"
    searched = "" if not decoded else f"; outputs by {'greedy search' if beam == 1 else f'beam search ({beam})'}"
    return [*rows, "", f"The weights are those of {which}, chosen by the {order} {metric}{searched}."]
