"""The live page: one HTML file that contains the model and computes in the browser.

Before the file is written, its script runs on samples in a JavaScript engine. The results must equal those of torch
with the same stored weights.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from regard.convert.proof import ConversionReport, Proof
from regard.decode.alignment import load_heads
from regard.decode.request import CONTINUATION_LENGTH, LENGTH_EXTRA, LENGTH_RATIO, Options, Request
from regard.decode.search_inputs import UNBOUNDED, position_limits
from regard.decode.torch_engine import TorchEngine
from regard.errors import UserError, missing_extra, plural
from regard.files import replace_file
from regard.inspect.page import bundle, render_page
from regard.inspect.trace import Trace, trace_image, trace_pair, trace_text
from regard.model import Model
from regard.run import Run, require_numbers
from regard.text.codec import Codec, Example
from regard.text.tokenizer import ForeignTokenizer, Tokenizer

Precision = Literal["int8", "fp16", "fp32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TOLERANCE = 1e-3  # largest difference of scores between script and torch
MAX_PARAMETERS = 200_000_000  # browsers cannot open larger files
SCRIPT_MEMORY = 4 << 30  # bytes available to the proof
PROVEN_LENGTH = 40  # tokens of the compared outputs


class WeightPacker:
    """Collects tensors as bytes: matrices at the chosen precision, other tensors as fp32."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.entries: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, torch.Tensor] = {}  # values after packing
        self.bytes = bytearray()
        self._names: dict[int, str] = {}  # by address

    def add(self, name: str, x: torch.Tensor) -> None:
        """Add a tensor; a shared tensor is stored once."""
        if x.data_ptr() in self._names:
            self.entries[name] = self.entries[self._names[x.data_ptr()]]
            return
        self._names[x.data_ptr()] = name
        values = x.detach().float().cpu().numpy()
        kind, data, stored = _pack(values, self.precision if values.ndim == 2 else "fp32")
        self.entries[name] = {"shape": list(values.shape), "type": kind, "at": len(self.bytes)}
        self.stored[name] = torch.from_numpy(stored)
        self.bytes += data + bytes(-len(data) % 4)  # each tensor starts at a multiple of four


def _pack(values: np.ndarray, precision: Precision) -> tuple[str, bytes, np.ndarray]:
    """The type name, the bytes, and the values they decode to."""
    if precision == "fp32":
        return "f4", values.astype("<f4").tobytes(), values
    if precision == "fp16":
        if np.abs(values).max(initial=0.0) > 65_504:
            raise UserError("fp16 cannot represent all weights of this model; use fp32 or int8")
        half = values.astype("<f2")
        return "f2", half.tobytes(), half.astype(np.float32)
    scale = (np.abs(values).max(1, initial=0.0) / 127).astype("<f4")
    steps = np.rint(values / np.where(scale > 0, scale, 1.0)[:, None]).astype("i1")
    return "q8", steps.tobytes() + scale.tobytes(), steps.astype(np.float32) * scale[:, None]


def model_block(run: Run, weights: WeightPacker, examples: Sequence[Example] = ()) -> dict[str, Any]:
    """The model block of the page: config, weights, tokenizers and search limits."""
    config = run.config
    task = run.task
    for name, x in run.model.named_parameters(remove_duplicate=False):
        weights.add(name, x)
    return {
        "task": task.name,
        "config": config.model_dump(mode="json"),
        "tensors": weights.entries,
        "bytes": base64.b64encode(weights.bytes).decode("ascii"),
        "text": None if task.reads == "images" else _text_block(run.codec),
        "start_id": config.start_id,
        "labels": list(run.label_names) if task.labels else [],
        "pixels": None if run.pixels is None else run.pixels.model_dump(mode="json"),
        "alignment_heads": [list(head) for head in load_heads(run.path)],
        "never": run.never_produced() if "decoder" in task.stacks else [],
        "limits": _limits(run),
        "examples": [example._asdict() for example in examples],
    }


def _text_block(codec: Codec) -> dict[str, Any]:
    def side(tokenizer: Tokenizer) -> dict[str, Any]:
        return {"kind": tokenizer.scheme.partition(":")[0], "state": json.loads(tokenizer.to_json())}

    return {
        "source": side(codec.source),
        "target": None if codec.shared else side(codec.target),
        "features": list(codec.features),
        "columns": list(codec.columns),
        "separator": codec.feature_separator,
        "frame": codec.frame,
        "ids": codec.ids.model_dump(mode="json"),
    }


def _limits(run: Run) -> dict[str, Any]:
    source = target = (run.config.top.max_positions or UNBOUNDED) - 2
    if "decoder" in run.task.stacks:
        source, target = position_limits([run])
    return {
        "max_source": min(source, Options().max_source),
        "max_target": min(target, UNBOUNDED),
        "usual": run.generation.max_length,
        "ratio": LENGTH_RATIO,
        "extra": LENGTH_EXTRA,
        "continuation": CONTINUATION_LENGTH,
    }


def require_supported(run: Run) -> None:
    """Refuse models that the page's script cannot compute."""
    require_numbers(run)
    if any(stack.mixer == "lsh" for stack in run.config.stacks.values()):
        raise UserError(f"{run.path}: a page cannot compute LSH attention; use regard inspect without --live")
    if isinstance(run.codec.source, ForeignTokenizer) and run.task.reads != "images":
        supported = "char, nfd, space, word, byte, bpe and unigram tokenizers learned by regard"
        raise UserError(f"{run.path}: its tokenizer was imported; a page supports {supported}")
    if run.model.size > MAX_PARAMETERS:
        raise UserError(f"{run.path}: {run.model.size:,} parameters are too many for a page (at most 200 million)")


def first_trace(run: Run, example: Example | None) -> Trace:
    """The trace that the page shows first; its titles, labels and formulas are kept for other traces."""
    if run.task.reads == "images":
        patches = run.config.image_patches
        return trace_image(run, np.zeros((patches.channels, patches.height, patches.width), np.float32))
    assert example is not None
    if run.task.seq2seq:
        return trace_pair(run, example)
    return trace_text(run, example.source, more=12 if run.task.name == "lm" else 0, features=example.features)


def sample_sources(run: Run, count: int) -> list[Example]:
    """Texts of random tokens with random features; low ids, which are frequent tokens, are drawn more often."""
    random = np.random.default_rng(1)
    source = run.codec.source
    first = max(source.special, default=-1) + 1
    examples = []
    for _ in range(count):
        length = int(random.integers(2, 13))
        ids = first + ((source.size - first) * random.random(length) ** 2).astype(int)
        text = source.decode(ids.tolist()).strip() or source.decode([first])
        features = None
        if "features" in run.codec.columns:
            names = random.permutation(run.codec.features)[: int(random.integers(1, 4))]
            features = run.codec.feature_separator.join(names.tolist())
        examples.append(Example(text, features=features))
    return examples


def live_page(
    run: Run,
    precision: Precision = "int8",
    example: Example | None = None,
    samples: int = 4,
    first: Trace | None = None,
    title: str | None = None,
) -> tuple[str, ConversionReport]:
    """The proven page of a run with its model, and the report. The page opens with `first` or a trace of `example`.

    The default of `example` is that of the run; a run without examples has a page with an empty input.
    """
    require_supported(run)
    weights = WeightPacker(precision)
    offered = [*([example] if example else []), *(each._replace(target=None) for each in run.statistics.examples)]
    random = [] if run.task.reads == "images" else sample_sources(run, samples)
    block = model_block(run, weights, offered)
    stored = with_weights(run, weights.stored)
    first = first or first_trace(stored, next(iter([*offered, *random]), None))
    data = replace(first, title=title or first.title).page_data()
    proof = prove(stored, block, data, [*offered, *random])
    page = render_page(data, block)
    size = len(page.encode("utf-8"))
    summary = f"proven: the page's own script and torch agree on {plural(proof.samples, 'sample')} with these weights;"
    summary += f" scores differ by at most {proof.difference:.2g}; {size / 1e6:.1f} MB"
    details = {"precision": precision, "bytes": size}
    return page, ConversionReport(run.path.resolve().name, "page", run.model.size, proof, summary, details)


def write_live_page(
    run: Run,
    path: str | Path,
    precision: Precision = "int8",
    example: Example | None = None,
    samples: int = 4,
    title: str | None = None,
) -> ConversionReport:
    """Write the page of a run with its model, unless the script's results differ from those of torch."""
    page, report = live_page(run, precision, example, samples, title=title)
    replace_file(Path(path), lambda temporary: temporary.write_text(page, encoding="utf-8"))
    return report


def with_weights(run: Run, stored: dict[str, torch.Tensor]) -> Run:
    """The run with these weights, on the CPU."""
    model = Model(run.config).eval()
    model.load_state_dict(stored, strict=False)  # a shared tensor is stored under one of its names
    return replace(run, weights=model)


def require_script_engine() -> Any:
    """The class of the JavaScript engine (V8, from mini-racer), or an error that names the extra."""
    try:
        from py_mini_racer import MiniRacer
    except ImportError:
        raise missing_extra("a page with the model inside", "a JavaScript engine (mini-racer)", "html") from None
    return MiniRacer


class PageEngine(AbstractContextManager["PageEngine"]):
    """The page's script with a model, in a JavaScript engine."""

    def __init__(self, block: dict[str, Any], template: dict[str, Any], simd: bool = True) -> None:
        self._context = require_script_engine()()
        self.version = str(self._context.v8_version)
        self._context.set_hard_memory_limit(SCRIPT_MEMORY)
        self._context.eval(bundle("page/proof.js"))
        self.simd = bool(self._context.eval("loadModel")(json.dumps(block), json.dumps(template), simd))

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the script's engine."""
        return json.loads(self._context.eval("askModel")(method, json.dumps(arguments)))

    def __exit__(self, *exception: object) -> None:
        self._context.close()


def prove(run: Run, block: dict[str, Any], template: dict[str, Any], examples: Sequence[Example]) -> Proof:
    """Compare the page's script with torch on examples; a difference is an error."""
    with PageEngine(block, template) as page:
        if "decoder" in run.task.stacks:
            differences = [_same_outputs(page, run, example, beam) for example in examples for beam in (1, 5)]
        else:
            differences = [_same_predictions(page, run, example) for example in examples or (None,)]
        return Proof(max(1, len(examples)), max(differences), TOLERANCE, page.version)


def page_input(example: Example) -> dict[str, Any]:
    """An example as an input of the page's script."""
    return {"source": example.source, "features": example.features}


def _same_outputs(page: PageEngine, run: Run, example: Example, beam: int) -> float:
    """Search with script and torch, and score the output of torch with both -> the largest difference."""
    engine = TorchEngine(run, Options(beam=beam, max_length=PROVEN_LENGTH))
    ours = engine([Request(example.source, example.features)])[0][0]
    options = {"strategy": "beam" if beam > 1 else "greedy", "beam": beam, "nbest": 1, "maxLength": PROVEN_LENGTH}
    answer = page.ask("generate", page_input(example), options)
    theirs: dict[str, Any] = answer["hypotheses"][0] if answer["hypotheses"] else {"text": "", "score": 0.0}
    if not ours.ids:
        return 0.0
    forced = page.ask("forced", page_input(example), list(ours.ids))
    difference = float(np.abs(np.subtract(forced, ours.token_scores)).max())
    tied = abs(theirs["score"] - ours.score) <= TOLERANCE  # two outputs with equal scores
    if difference > TOLERANCE or (theirs["text"] != ours.text and not tied):
        wrong = f"{theirs['text']!r} ({theirs['score']:.4f}) to {example.source!r}"
        expected = f"{ours.text!r} ({ours.score:.4f})"
        raise UserError(f"{run.path}: not written: the page would answer {wrong}, the run {expected}")
    return difference


def _same_predictions(page: PageEngine, run: Run, example: Example | None) -> float:
    """Predict with script and torch, by default for a random image -> the largest difference of probabilities."""
    if example is None:
        patches = run.config.image_patches
        image = np.random.default_rng(1).random((patches.channels, patches.height, patches.width)).astype(np.float32)
        ours = trace_image(run, image)
        theirs = page.ask("trace", {"pixels": image.flatten().tolist(), "name": "image"}, [])
    else:
        ours = trace_text(run, example.source, features=example.features)
        theirs = page.ask("trace", page_input(example), [])
    pairs = zip(ours.steps, theirs["steps"], strict=True)
    difference = max((abs(step.probability - other["probability"]) for step, other in pairs), default=0.0)
    if difference > TOLERANCE:
        raise UserError(f"{run.path}: not written: the page's probabilities differ by {difference:.2g} from the run's")
    return difference
