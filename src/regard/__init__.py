"""regard: train, understand and ship sequence models built on attention.

Names are imported on first use, so `import regard` is fast and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.api import LoadedRun as LoadedRun, load as load, train as train
    from regard.config import Config as Config, Stack as Stack
    from regard.decode.request import Options as Options, Request as Request
    from regard.errors import UserError as UserError
    from regard.inspect.circuits import (
        attribute as attribute,
        ov as ov,
        qk as qk,
        rollout as rollout,
        top_neurons as top_neurons,
    )
    from regard.inspect.heads import induction_scores as induction_scores
    from regard.model import Model as Model
    from regard.nn.hooks import patch as patch, record as record
    from regard.presets import preset as preset
    from regard.recipe import Recipe as Recipe
    from regard.text.codec import Example as Example
    from regard.training.report import make_reporter as make_reporter

__version__ = "0.17.0"

_NAMES = {
    "api": ("LoadedRun", "load", "train"),
    "config": ("Config", "Stack"),
    "decode.request": ("Options", "Request"),
    "errors": ("UserError",),
    "inspect.circuits": ("attribute", "ov", "qk", "rollout", "top_neurons"),
    "inspect.heads": ("induction_scores",),
    "model": ("Model",),
    "nn.hooks": ("patch", "record"),
    "presets": ("preset",),
    "recipe": ("Recipe",),
    "text.codec": ("Example",),
    "training.report": ("make_reporter",),
}
_HOMES = {name: f"regard.{module}" for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
