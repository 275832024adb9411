"""Heads that training has shut: cut out of the finished run, and put back when it is trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

from regard.errors import UserError
from regard.files import replace_file
from regard.inspect.cut import cut
from regard.inspect.places import attentions
from regard.model import Model
from regard.nn.attention import Attention
from regard.nn.gates import add_gates
from regard.nn.reversible import ReversibleBlock
from regard.run import WEIGHTS, Run

FILES = ("config.json", WEIGHTS)  # what cutting changes


def gate_heads(model: Model) -> None:
    """Put gates on all heads, if they can be cut afterwards."""
    found = attentions(model).values()
    plain = all(isinstance(a, Attention) and a.key_value is not None for a in found)
    if not plain or any(isinstance(part, ReversibleBlock) for part in model.modules()):
        raise UserError("train.l0: only heads of plain Transformer layers learn to be done without")
    if all(attention.heads < 2 for attention in found):
        raise UserError("train.l0: every attention has one head, which cannot go")
    add_gates(model)


def cut_shut_heads(path: Path, whole: Path) -> str:
    """Cut the heads of a run that say nothing -> what was done, in words. One stays in every attention.

    What the run was before is kept in the directory `whole`.
    """
    run = Run.load(path)
    removed = {}
    for name, attention in attentions(run.model).items():
        weight_DHE = run.model.get_parameter(f"{name}.out.weight").unflatten(1, (attention.heads, -1))
        shut = [head for head in range(attention.heads) if not weight_DHE[:, head].any()]
        removed[name] = shut[1:] if len(shut) == attention.heads else shut
    total, gone = sum(a.heads for a in attentions(run.model).values()), sum(map(len, removed.values()))
    if gone:
        whole.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            _copy(path / name, whole / name)
        small = cut(run.model, removed)
        Run(small.config, run.codec, small, path, run.labels, run.pixels).save(path)
    return f"heads: {gone} of {total} were shut in training and are cut"


def restore_uncut(path: Path, whole: Path) -> None:
    """Make a run that was cut at its end what it was, so that training goes on with all its heads."""
    if all((whole / name).is_file() for name in FILES):
        for name in FILES:
            _copy(whole / name, path / name)
    shutil.rmtree(whole, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    replace_file(target, lambda temporary: shutil.copyfile(source, temporary))
