"""README.md of a run: what it is, what it was made from, how good it is, how to use it."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from regard.files import replace_file
from regard.settings import LOWER_IS_BETTER, Recipe
from regard.train.curve import CURVE
from regard.train.progress import Progress
from regard.train.talk import duration

CARD = "README.md"
MEANING = {
    "loss": "negative log-probability of a symbol of the target, in nats",
    "perplexity": "exp(loss)",
    "accuracy": "sequences that are right in full, in percent",
    "wer": "sequences that are wrong, in percent",
    "per": "edits per symbol of the reference, in percent",
    "bleu": "BLEU",
    "chrf": "chrF",
}


def write_card(
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
    lines = [
        f"# {run.resolve().name}",
        "",
        f"A sequence-to-sequence model trained with regard: preset `{recipe.preset}`, {parameters:,} parameters.",
        "",
        "## Scores",
        "",
        *_scores(progress, train.metric, train.validate_beam, signatures),
        "",
        *([f"![learning curve]({CURVE})", ""] if (run / CURVE).exists() else []),
        "## Data",
        "",
        f"- files: {', '.join(f'`{name}`' for name in files if name)}",
        f"- {examples[0]:,} examples to train on, {examples[1]:,} to validate",
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
        f"regard generate {shlex.quote(str(run))} input.txt",
        f"regard evaluate {shlex.quote(str(run))} pairs.tsv",
        f"regard inspect {shlex.quote(str(run))} TEXT -o page.html",
        "```",
        "",
        "```python",
        "import regard",
        f"regard.load({str(run)!r}).generate([...], beam=5)",
        "```",
    ]
    text = "\n".join(lines) + "\n"

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    replace_file(run / CARD, write)


def _scores(progress: Progress, metric: str, beam: int, signatures: dict[str, str]) -> list[str]:
    best = progress.best
    if best is None:
        return ["None: no validation gave a number."]
    scores = {**best.scores, "perplexity": math.exp(min(best.scores["loss"], 700))}
    rows = ["| on the validation examples | | |", "|---|---|---|"]
    for name, value in scores.items():
        meaning = MEANING.get(name, "") + (f", `{signatures[name]}`" if name in signatures else "")
        rows.append(f"| {name} | {value:.4g} | {meaning} |")
    which = f"the mean of {best.averaged} checkpoints" if best.averaged else f"step {best.step:,}"
    order = "lowest" if metric in LOWER_IS_BETTER else "highest"
    searched = "" if metric == "loss" else f"; outputs by {'greedy search' if beam == 1 else f'beam search ({beam})'}"
    return [*rows, "", f"The weights are those of {which}, chosen by the {order} {metric}{searched}."]
