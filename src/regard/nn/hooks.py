"""Hooks: named points of a model (taps) whose values can be recorded or patched, and recording of forward calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UserError, require_type, shown_value
from regard.suggest import closest

Change = Callable[[Tensor], Tensor]


class Tap(nn.Identity):
    """A named hook point. It costs nothing until it is hooked; attention with hooked weights takes its eager path."""

    @property
    def watched(self) -> bool:
        return bool(self._forward_hooks)


def taps(model: nn.Module) -> dict[str, Tap]:
    """All taps of a model by name; a module with two names is listed under the first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Tap)}


def find_taps(model: nn.Module, pattern: str) -> dict[str, Tap]:
    """The taps whose names match a pattern with * and ?; an error if there is none."""
    require_type(pattern, str, "hook points are named by a pattern, such as '*.weights'")
    known = taps(model)
    matching = {name: tap for name, tap in known.items() if fnmatchcase(name, pattern)}
    if not matching:
        names = sorted(known)
        some = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
        near = closest(pattern, names)
        raise UserError(f"no hook point of this model is named {pattern!r:.100}{near}\n  known: {some}")
    return matching


class Recording(Mapping[str, Tensor]):
    """Values by tap name; the values of several passes (decoding step by step) are concatenated."""

    def __init__(self) -> None:
        self._passes: dict[str, list[Tensor]] = {}

    def add(self, name: str, x: Tensor) -> None:
        self._passes.setdefault(name, []).append(x.detach())

    def clear(self) -> None:
        """Forget all passes so far."""
        self._passes.clear()

    def passes(self, name: str) -> list[Tensor]:
        """The value of each pass, in order."""
        return list(self._passes[name])

    def __getitem__(self, name: str) -> Tensor:
        """All passes concatenated along time; keys that were not yet in a growing cache count as zero."""
        passes = self._passes[name]
        if len(passes) == 1:
            return passes[0]
        widest = max(x.shape[-1] for x in passes)
        return torch.cat([F.pad(x, (0, widest - x.shape[-1])) for x in passes], dim=-2)

    def __iter__(self) -> Iterator[str]:
        return iter(self._passes)

    def __len__(self) -> int:
        return len(self._passes)


@contextmanager
def record(model: nn.Module, *patterns: str) -> Iterator[Recording]:
    """Record the taps that match the patterns (all by default) while the context is open.

    Attention whose weights are recorded takes its eager path, with the same results.
    """
    require_type(model, nn.Module, "record: takes a model, such as run.model")
    names = {tap: name for pattern in patterns or ("*",) for name, tap in find_taps(model, pattern).items()}
    recording = Recording()
    with _hooked(names, lambda tap, inputs, x: recording.add(names[tap], x)):
        yield recording


@contextmanager
def patch(model: nn.Module, changes: Mapping[str, Change]) -> Iterator[None]:
    """Replace the values of taps by functions of them, by pattern, while the context is open.

    A recording opened inside a patch has the patched values; a recording opened outside has the original values.
    """
    require_type(model, nn.Module, "patch: takes a model, such as run.model")
    if not isinstance(changes, Mapping) or not all(map(callable, changes.values())):
        example = "{'*.mixed': lambda x: 0 * x}"
        raise UserError(f"patch: takes functions by pattern, such as {example}, not {shown_value(changes)}")
    functions: dict[Tap, Change] = {}
    for pattern, change in changes.items():
        for name, tap in find_taps(model, pattern).items():
            if tap in functions:
                raise UserError(f"{name}: matches two patterns (second: {pattern!r}); each tap can be patched once")
            functions[tap] = change

    def change_value(tap: Tap, inputs: object, x: Tensor) -> Tensor:
        new = functions[tap](x)
        if new.shape != x.shape:
            raise ValueError(f"a patch must keep the shape {tuple(x.shape)}, but it returned {tuple(new.shape)}")
        return new

    with _hooked(functions, change_value):
        yield


def without(*heads: int) -> Change:
    """A patch for `mixed` or `weights` taps that ablates heads."""

    def ablate(x_BHTE: Tensor) -> Tensor:
        gate_H = x_BHTE.new_ones(x_BHTE.shape[1])
        gate_H[list(heads)] = 0.0
        return x_BHTE * gate_H.view(-1, 1, 1)

    return ablate


class ForwardCalls:
    """Arguments and results of every forward call, by module."""

    def __init__(self) -> None:
        self.inputs: dict[nn.Module, list[tuple[Any, ...]]] = {}
        self.outputs: dict[nn.Module, list[Any]] = {}

    def add(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.inputs.setdefault(module, []).append(inputs)
        self.outputs.setdefault(module, []).append(output)

    def output(self, module: nn.Module) -> Tensor:
        """The results of a module for a batch of one, a vector per token: (T, D)."""
        return torch.cat([x[0] if isinstance(x, tuple) else x for x in self.outputs[module]], dim=1)[0]

    def input(self, module: nn.Module) -> Tensor:
        """The first arguments of a module for a batch of one, a vector per token: (T, D)."""
        return torch.cat([args[0] for args in self.inputs[module]], dim=1)[0]


@contextmanager
def record_calls(model: nn.Module) -> Iterator[ForwardCalls]:
    """Record the forward calls of every submodule while the context is open.

    Taps are left out, because a hook on them would select the eager path; use `record` for taps.
    """
    calls = ForwardCalls()
    parts = [part for part in model.modules() if part is not model and not isinstance(part, nn.ModuleList | Tap)]
    with _hooked(parts, calls.add):
        yield calls


@contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Callable[..., Tensor | None]) -> Iterator[None]:
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(hook))
        yield
