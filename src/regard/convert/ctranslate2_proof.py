"""A run written as a directory of CTranslate2, proven on samples."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.config import Config
from regard.convert.ctranslate2 import Precision, library, names_of, open_translator, write
from regard.convert.proof import LONGEST, Proof
from regard.errors import UserError
from regard.files import replace_directory
from regard.run import Run, weights_of

TOLERANCE = 1e-4  # of a log-probability, relative to it where it is above 1


@dataclass
class Written:
    """What was written, and how it was proven."""

    source: str
    architecture: str
    parameters: int
    precision: Precision
    proof: Proof
    int8: float | None  # the largest difference of a log-probability when weights are written in 8 bits

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def told(self) -> str:
        """The proof in a sentence."""
        proof = self.proof
        told = (
            f"proven: log-probabilities of {proof.samples} random outputs by this model and by CTranslate2"
            f" {proof.version} in fp32 differ by at most {proof.difference:.2g} (allowed: {proof.tolerance:g})"
        )
        return told if self.int8 is None else f"{told}; in int8, as written, by {self.int8:.2g}"


def to_ctranslate2(run: Run, out: str | Path, samples: int, precision: Precision = "fp32") -> Written:
    """Write a run as a directory of CTranslate2."""
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: exists already; name a new directory")
    size = sum(parameter.numel() for parameter in weights_of(run.model).values())
    reports: list[Written] = []

    def fill(path: Path) -> None:
        write(run, path, marks=True)  # what is proven is the model, before its weights lose digits
        proof = Proof(samples, compare(run, path, samples, "fp32"), TOLERANCE, library().__version__)
        if not proof.holds:
            raise UserError(
                f"{run.path}: the converted model is not the same: its log-probabilities differ from those of"
                f" CTranslate2 {proof.version} by {proof.difference:.3g}, where {proof.tolerance:g} is allowed."
                " Nothing was written"
            )
        off = None
        if precision == "int8":
            for file in path.iterdir():
                file.unlink()
            write(run, path, "int8", marks=True)
            off = compare(run, path, samples, "int8")
        reports.append(Written(run.path.resolve().name, "TransformerSpec", size, precision, proof, off))

    replace_directory(out, fill)
    return reports[0]


def compare(run: Run, directory: Path, count: int, precision: Precision) -> float:
    """The largest difference of the log-probability of any symbol, relative where that is above 1."""
    config, ids, frame = run.config, run.config.ids, run.codec.frame
    sources, targets = _draw(config, config.source_vocab, count), _draw(config, config.target_vocab, count)
    names = names_of(run)
    theirs = open_translator(directory, precision).score_batch(
        [[names.source[i] for i in row] for row in sources],
        [[names.target[i] for i in row] for row in targets],
        max_input_length=0,
    )
    worst = 0.0
    for source, target, result in zip(sources, targets, theirs, strict=True):
        before = [ids.sos] if frame in ("both", "start") else []
        after = [ids.eos] if frame in ("both", "end") else []
        ours_T = forced(run, [*before, *source, *after], target)
        gap_T = (ours_T - torch.tensor(result.log_probs)).abs() / ours_T.abs().clamp(min=1)
        worst = max(worst, gap_T.nan_to_num(math.inf).max().item())
    return worst


def _draw(config: Config, vocab: int, count: int) -> list[list[int]]:
    """The same random texts each time, of different lengths."""
    assert config.encoder is not None and config.decoder is not None
    dice = np.random.default_rng(1)
    marks = set(config.ids.model_dump(exclude_none=True).values())
    text = [index for index in range(vocab) if index not in marks] or [config.ids.unk]
    longest = min(LONGEST, config.encoder.max_length - 2, config.decoder.max_length - 2)  # room for marks
    return [dice.choice(text, dice.integers(1, max(1, longest) + 1)).tolist() for _ in range(count)]


@torch.inference_mode()
def forced(run: Run, source: list[int], target: list[int]) -> Tensor:
    """Our log-probability of every symbol of an output, and of the end after them."""
    config, device = run.config, next(run.model.parameters()).device
    input_1T = torch.tensor([[config.start_id, *target]], device=device)
    logp_TV = run.model(torch.tensor([source], device=device), None, input_1T)[0].float().log_softmax(-1).cpu()
    logp_T: Tensor = logp_TV.gather(1, torch.tensor([[*target, config.ids.eos]]).T).squeeze(1)
    return logp_T
