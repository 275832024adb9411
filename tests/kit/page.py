"""Shared by tests of pages: runs, opening and querying a live page, markup that must remain text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.chromium import Chromium
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import Options, Request
from regard.decode.torch_engine import TorchEngine
from regard.inspect.live import PageEngine, Precision, WeightPacker, first_trace, model_block
from regard.inspect.page import Packer, render_page
from regard.inspect.trace import Trace
from regard.run import Run
from regard.text.codec import Example

OUTPUT = "document.querySelectorAll('.output')[0]"
TOKENS = f"Array.from({OUTPUT}.querySelectorAll('.token'), n => n.textContent).join('')"
TABS = "Array.from(document.querySelectorAll('[role=tab]'), t => t.id.slice(4))"

# Markup that a page must show as text: every core in every shell. A script that runs sets window.hit.
SHELLS = ["{}", '"{}', "'>{}", "</script>{}", "--><!-- {}", "<b>{}", "]]>{}", "\u202e{}", "</title>{}", "{}\u2028"]
CORES = [
    f"<{tag} {on}=window.hit=1>"
    for tag, on in itertools.product(
        ("img src=x", "svg", "body", "details open", "input autofocus", "video src=x", "iframe srcdoc=x", "a href=#"),
        ("onerror", "onload", "onfocus", "ontoggle", "onclick"),
    )
] + [
    "<script>window.hit=1</script>",
    "<script src=data:,window.hit=1></script>",
    "<iframe src=javascript:parent.hit=1></iframe>",
    "<a href=javascript:window.hit=1>x</a>",
    "<style>*{display:none}</style>",
    "<meta http-equiv=refresh content=0;url=javascript:window.hit=1>",
    "<base href=//evil.example>",
    "<object data=javascript:window.hit=1>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1>",
    "${window.hit=1}",
]
PAYLOADS = [shell.format(core) for shell, core in itertools.product(SHELLS, CORES)]


def complaints(browser: Chromium) -> list[str]:
    """Errors of a page: exceptions, console errors, and network requests other than for the page itself."""
    errors = []
    for event in browser.events:
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"):
            errors.append(str(event["params"]))
        if event.get("method") == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            if not url.endswith("/page.html") and url != "about:blank":
                errors.append(url)
    return errors


def sharpened(run: Run, factor: float = 3.0, biases: bool = False) -> Run:
    """Scale up the weights of a run: the outputs of small random weights are nearly uniform, which hides mistakes.

    With `biases`, also randomise biases and the weights of norms, which start as zeros and ones.
    """
    torch.manual_seed(3)
    with torch.no_grad():
        for name, x in run.model.named_parameters():
            if x.ndim > 1:
                x.mul_(factor if "embedding" not in name else 1.0)
            elif biases and "norm" in name:
                x.add_(0.2 * torch.randn_like(x))
            elif biases:
                x.normal_(std=0.3)
    return run


_pages: dict[tuple[int, str, str | None], tuple[Run, str]] = {}  # the run is kept, so that its id stays unique


def page_of(run: Run, source: str = "abcab", features: str | None = None) -> str:
    """The live page of a run; made once for each input, so a run must not change after its first page."""
    key = id(run), source, features
    if key not in _pages:
        _pages[key] = run, _make_page(run, source, features)
    return _pages[key][1]


def _make_page(run: Run, source: str, features: str | None) -> str:
    example = None if run.task.reads == "images" else Example(source, features=features)
    trace = first_trace(run, example)
    return render_page(trace.page_data(), model_block(run, WeightPacker("fp32"), [example] if example else []))


def open_page(
    browser: Chromium, run: Run, folder: Path, view: str | None = None, dark: bool = False, **options: Any
) -> Path:
    """Open the live page of a run and wait for its first answer."""
    path = folder / "page.html"
    path.write_text(page_of(run, **options), encoding="utf-8")
    browser.open(path, dark)
    settle(browser)
    if view:
        browser.click(f"#tab-{view}")
    return path


def settle(browser: Chromium) -> None:
    """Wait until all requests are computed."""
    browser.until("document.querySelector('.bar-top').getAttribute('aria-busy') === 'false'")


def enter(browser: Chromium, text: str, field: int = 0) -> None:
    """Replace the text of an input field by typing."""
    browser.run(f"(() => {{ const f = document.querySelectorAll('.field')[{field}]; f.focus(); f.select(); }})()")
    browser.write(text)


def decoded(run: Run, source: str, features: str | None = None, **options: Any) -> list[Hypothesis]:
    """The hypotheses of the torch engine."""
    return TorchEngine(run, Options(**options))([Request(source, features)])[0]


def shown(text: str) -> str:
    """An output as the page shows its tokens."""
    return text.replace(" ", "␣")


class Plain(Packer):
    """Packs arrays as lists, without rounding."""

    def weights(self, x: np.ndarray) -> dict[str, Any]:
        return self.signed(x)

    def signed(self, x: np.ndarray) -> dict[str, Any]:
        values = [float(v) if math.isfinite(v) else None for v in x.astype(np.float64).ravel()]
        return {"shape": list(x.shape), "values": values}


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """The differences of two traces; the page's trace may have more keys."""
    if isinstance(ours, dict):
        for key, value in ours.items():
            if key in ("numbers", "at", "type", "scale") and "values" not in (ours.keys() - {"scale"} or ()):
                continue
            if key not in theirs:
                yield f"{where}.{key}: missing"
            else:
                yield from differences(value, theirs[key], f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            yield f"{where}: {len(ours)} against {len(theirs)}"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(a, b, f"{where}[{i}]")
    elif isinstance(ours, float) and isinstance(theirs, int | float):
        if not math.isclose(ours, theirs, rel_tol=5e-4, abs_tol=5e-4):
            yield f"{where}: {ours} against {theirs}"
    elif ours != theirs:
        yield f"{where}: {ours!r} against {theirs!r}"


def opened(run: Run, trace: Trace, precision: Precision = "fp32", simd: bool = True) -> PageEngine:
    """The JavaScript engine of the live page that begins with a trace."""
    return PageEngine(model_block(run, WeightPacker(precision)), trace.page_data(), simd)


def same_trace(page: PageEngine, trace: Trace, request: dict[str, Any], ids: list[int]) -> None:
    """The page computes this trace for a request."""
    theirs = page.ask("trace", request, ids)
    ours = trace.page_data(Plain())
    ours["attribution"], ours["importance"] = None, {}  # computed on demand, and compared separately
    ours["image"] = theirs["image"] = None  # derived from other numbers; the results computed from them are compared
    problems = list(differences(ours, theirs))
    assert not problems, problems[:8]
