"""Named places where a forward hook can read or replace what passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from regard.errors import UserError, closest


class Tap(nn.Identity):
    """A place to look. It costs nothing until someone hooks it; being watched is what selects a slow path."""

    @property
    def watched(self) -> bool:
        return bool(self._forward_hooks)


Change = Callable[[Tensor], Tensor]


class Recording(Mapping[str, Tensor]):
    """What passed, by the name of its place; several passes (decoding step by step) are put one after the other."""

    def __init__(self) -> None:
        self._passes: dict[str, list[Tensor]] = {}

    def passes(self, name: str) -> list[Tensor]:
        """Each pass by itself, in order."""
        return list(self._passes[name])

    def __getitem__(self, name: str) -> Tensor:
        """All passes joined along time; where a cache grew, what was not there yet is zero."""
        passes = self._passes[name]
        if len(passes) == 1:
            return passes[0]
        widest = max(x.shape[-1] for x in passes)
        return torch.cat([F.pad(x, (0, widest - x.shape[-1])) for x in passes], dim=-2)

    def __iter__(self) -> Iterator[str]:
        return iter(self._passes)

    def __len__(self) -> int:
        return len(self._passes)

    def _add(self, name: str, x: Tensor) -> None:
        self._passes.setdefault(name, []).append(x.detach())


def taps(model: nn.Module) -> dict[str, Tap]:
    """Every place of a model where one can look, by name; a module that two names share has its first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Tap)}


def find_taps(model: nn.Module, pattern: str) -> dict[str, Tap]:
    """The places whose names fit a pattern with * and ?; it is a mistake if there are none."""
    known = taps(model)
    found = {name: tap for name, tap in known.items() if fnmatchcase(name, pattern)}
    if not found:
        names = sorted(known)
        some = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
        raise UserError(f"no place in this model is named {pattern!r}{closest(pattern, names)}\n  known: {some}")
    return found


@contextmanager
def record(model: nn.Module, *patterns: str) -> Iterator[Recording]:
    """Keep what passes through the places named, while the context lasts.

    Attention whose weights are watched takes its slow path, for as long as it is watched; the results stay the same.
    """
    found = {name: tap for pattern in patterns or ("*",) for name, tap in find_taps(model, pattern).items()}
    recording = Recording()

    def keeper(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda module, inputs, x: recording._add(name, x)

    with _hooked({tap: keeper(name) for name, tap in found.items()}):
        yield recording


@contextmanager
def patch(model: nn.Module, changes: Mapping[str, Change]) -> Iterator[None]:
    """Replace what passes through the places named by a function of it, while the context lasts.

    A recording opened inside a patch sees what the patch made; one opened outside sees what was there before.
    """
    functions: dict[Tap, Change] = {}
    for pattern, change in changes.items():
        for name, tap in find_taps(model, pattern).items():
            if tap in functions:
                raise UserError(f"{name}: two patterns want to change it, the second being {pattern!r}; name it once")
            functions[tap] = change

    def changer(change: Change) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def hook(module: nn.Module, inputs: object, x: Tensor) -> Tensor:
            new = change(x)
            if new.shape != x.shape:
                raise ValueError(f"a patch must keep the shape {tuple(x.shape)}, not make it {tuple(new.shape)}")
            return new

        return hook

    with _hooked({tap: changer(change) for tap, change in functions.items()}):
        yield


def without(*heads: int) -> Change:
    """A patch for `mixed` or `weights` places that silences heads."""

    def silence(x_BHTE: Tensor) -> Tensor:
        gate_H = x_BHTE.new_ones(x_BHTE.shape[1])
        gate_H[list(heads)] = 0.0
        return x_BHTE * gate_H.view(-1, 1, 1)

    return silence


@contextmanager
def _hooked(hooks: Mapping[Tap, Callable[..., Tensor | None]]) -> Iterator[None]:
    handles: list[RemovableHandle] = []
    try:
        for tap, hook in hooks.items():
            handles.append(tap.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


class Calls:
    """Inputs and outputs of every module, by module."""

    def __init__(self) -> None:
        self.given: dict[nn.Module, list[tuple[Any, ...]]] = {}
        self.made: dict[nn.Module, list[Any]] = {}

    def output(self, module: nn.Module) -> Tensor:
        """All that a module made, one vector per token: (T, D)."""
        return torch.cat([x[0] if isinstance(x, tuple) else x for x in self.made[module]], dim=1)[0]

    def input(self, module: nn.Module) -> Tensor:
        """All that a module was given, one vector per token: (T, D)."""
        return torch.cat([args[0] for args in self.given[module]], dim=1)[0]


@contextmanager
def watch(model: nn.Module) -> Iterator[Calls]:
    """Keep what every module is given and makes, while the context lasts."""
    calls = Calls()
    handles: list[RemovableHandle] = []

    def keep(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        calls.given.setdefault(module, []).append(given)
        calls.made.setdefault(module, []).append(made)

    try:
        for name, module in model.named_modules():
            # The places to look are for `record`; a hook on them would change which path is taken.
            if name and not isinstance(module, nn.ModuleList) and not isinstance(module, Tap):
                handles.append(module.register_forward_hook(keep))
        yield calls
    finally:
        for handle in handles:
            handle.remove()
