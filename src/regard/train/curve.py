"""The learning curve as a picture, if matplotlib is installed (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path

from regard.files import replace_file
from regard.train.log import LOG, read_log

CURVE = "curve.svg"


def draw_curve(run: Path, metric: str) -> Path | None:
    """Draw the log of a run -> the picture's path, or None if there is nothing to draw or nothing to draw with."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    events = read_log(run / LOG)
    train = [(e["step"], e["loss"]) for e in events if e["event"] == "train"]
    valid = [e for e in events if e["event"] == "valid"]
    if not train and not valid:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # an object of its own: no window, no global state
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel("loss per symbol (nats)")
    axes.grid(alpha=0.3)
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, label="training loss")
    if valid:
        axes.plot(
            [e["step"] for e in valid],
            [e["loss"] for e in valid],
            "o-",
            ms=3,
            color="tab:orange",
            label="validation loss",
        )
        best = max((e for e in valid if e["best"]), key=lambda e: e["step"], default=None)
        if best is not None:
            axes.axvline(best["step"], color="gray", linestyle=":", label=f"best (step {best['step']:,})")
    if metric != "loss" and valid:
        right = axes.twinx()
        right.set_ylabel(f"{metric} (%)")
        right.plot([e["step"] for e in valid], [e[metric] for e in valid], "s--", ms=3, color="tab:green", label=metric)
        lines = axes.get_lines() + right.get_lines()
        axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper right")
    else:
        axes.legend(loc="upper right")
    path = run / CURVE
    replace_file(path, lambda temporary: figure.savefig(temporary, format="svg", metadata={"Date": None}))
    return path
