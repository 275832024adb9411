"""Answers: what runs give for inputs with options, for the command line, the library and the server."""

from __future__ import annotations

import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic_core import from_json

from regard.decode.ctranslate2 import CTranslate2Engine, Scores
from regard.decode.encoder_only import Classification, MaskFiller, classify, embed
from regard.decode.engine import Engine, TokenStream, TorchEngine, WorkerPool
from regard.decode.forced import Scored, score
from regard.decode.hypothesis import Hypothesis, unknown_flags
from regard.decode.request import CONSTRAINTS, ENGINES, EngineName, Options, Precision, Request
from regard.device import usable_precision
from regard.errors import UserError, plural
from regard.inspect.trace import Trace, trace_pair, trace_text
from regard.parallel.cores import cores
from regard.run import Run
from regard.text.codec import Codec, Example

EMBED_TOKENS = 4096  # in a batch of texts to embed
SMALL_MODEL = 20_000_000  # parameters
MAX_ENGINES = 32  # ready engines that a worker keeps, one for each run and set of options
Result = dict[str, Any]


class Cancelled(Exception):
    """The batch was cancelled."""


@dataclass
class BatchTask:
    """A batch: inputs of one kind, which is a method of `Answerer`, with the same options, for one run."""

    run: str
    kind: str
    options: str  # as JSON, a part of the key of a cached engine
    inputs: list[dict[str, Any]]
    cancelled: Callable[[], bool] = lambda: False
    send: Callable[[Result], None] = lambda piece: None  # of a streamed output

    @property
    def settings(self) -> dict[str, Any]:
        options: dict[str, Any] = from_json(self.options)
        return options

    def decoding(self) -> Options:
        return Options.of(**{name: value for name, value in self.settings.items() if name != "attention"})

    def check(self) -> None:
        """Raise `Cancelled` if the batch was cancelled; called before each step of a search."""
        if self.cancelled():
            raise Cancelled


class Answerer:
    """Answers tasks with the runs of this process."""

    def __init__(
        self, runs: Mapping[str, Run], engine: EngineName = "torch", precision: Precision = "fp32", slots: int = 1
    ):
        """`slots` is the number of threads that answer at the same time."""
        self.runs = runs
        self.engine = engine
        self.precision = precision
        self.slots = slots
        self._engines: OrderedDict[tuple[str, str, str], Engine] = OrderedDict()
        self._translators: dict[str, Any] = {}
        self._torch_lock = threading.Lock()  # one search with torch at a time
        self._cache_lock = threading.Lock()

    def answer(self, task: BatchTask) -> list[Result]:
        """A result or an error for each input; a failed input does not affect the others."""
        try:
            results: list[Result] = getattr(self, task.kind)(task)
            return results
        except Cancelled:
            raise
        except Exception as error:
            if len(task.inputs) > 1:
                return [self.answer(replace(task, inputs=[item]))[0] for item in task.inputs]
            if isinstance(error, UserError):  # without paths of this machine
                message = str(error).replace(str(self.runs[task.run].path), task.run)
                return [{"error": message, "status": 422}]
            traceback.print_exception(error)
            return [{"error": "an error in the server; its log has the details", "status": 500}]

    def generate(self, task: BatchTask) -> list[Result]:
        """Outputs with scores, as `regard generate --json` prints them."""
        engine = self._decoder(task)
        attention = task.settings.get("attention")
        fallback = self.engine != "torch" and isinstance(engine, TorchEngine | MaskFiller)
        requests = [Request(**item) for item in task.inputs]
        with self._cancellable(engine, task):
            inputs = engine.prepare(requests)
            answers = engine.decode(inputs)
        results = []
        for request, item, hypotheses in zip(requests, inputs, answers, strict=True):
            details: Result = {"source_tokens": len(item.sources[0]) if item.sources else 0}
            if attention and hypotheses[0].text:
                details["attention"] = self._attention(task, request, hypotheses[0].text)
            result = generation_json(request.source, hypotheses, details)
            results.append({**result, "engine": "torch"} if fallback else result)
        return results

    def _attention(self, task: BatchTask, request: Request, output: str) -> Result:
        """All attention maps of an output, with the tokens of their rows and columns."""
        task.check()
        trace = trace_example(self.runs[task.run], Example(request.source, features=request.features), output)
        maps = [
            {"name": m.name, "kind": m.kind, "layer": m.layer, "heads": m.heads, "rows": m.rows, "columns": m.columns}
            | {"weights": m.weights_HTS.round(4).tolist()}
            for m in trace.maps
        ]
        return {"tokens": trace.tokens, "maps": maps}

    def translate(self, task: BatchTask) -> list[Result]:
        """The texts of the outputs, without scores."""
        engine = self._decoder(task)
        sources = [item["source"] for item in task.inputs]
        if isinstance(engine, CTranslate2Engine):
            return [{"texts": row} for row in engine.texts(sources)]
        with self._cancellable(engine, task):
            return [{"texts": [h.text for h in row]} for row in engine(sources)]

    def stream(self, task: BatchTask) -> list[Result]:
        """Decode one input, and send every token as soon as it is decided."""
        engine = self._engine("torch", task)
        assert isinstance(engine, TorchEngine)
        request = Request(**task.inputs[0])
        (item,) = engine.prepare([request])
        if "unsatisfied" in item.flags:
            raise UserError(item.flags["unsatisfied"])
        pieces = TokenStream(engine, item)
        with self._cancellable(engine, task):
            for piece in pieces:
                task.send({"piece": piece.as_dict()})
        assert pieces.hypothesis is not None
        return [generation_json(request.source, [pieces.hypothesis])]

    def score(self, task: BatchTask) -> list[Result]:
        """Log-probabilities of given targets, as in `regard score`."""
        pairs = [Example(x["source"], x["target"], x.get("features")) for x in task.inputs]
        scored = score(self.runs[task.run], pairs, task.decoding())
        return [score_json(pair, each) for pair, each in zip(pairs, scored, strict=True)]

    def classify(self, task: BatchTask) -> list[Result]:
        """The labels of texts."""
        texts = [Example(x["source"], features=x.get("features")) for x in task.inputs]
        options = task.decoding()
        labels = classify(self.runs[task.run], texts, options.batch_tokens, options.max_source)
        return [label_json(text.source, label) for text, label in zip(texts, labels, strict=True)]

    def embed(self, task: BatchTask) -> list[Result]:
        """Vectors of texts; a truncated text has a flag."""
        sources = [item["source"] for item in task.inputs]
        normalize = task.settings.get("normalize", True)
        vectors, truncated, limit = embed(self.runs[task.run], sources, EMBED_TOKENS, False, normalize)
        results: list[Result] = [{"vector": [float(v) for v in row]} for row in vectors]
        for index, tokens in truncated.items():
            results[index]["flags"] = {"truncated": truncation({0: tokens}, limit)}
        return results

    def inspect(self, task: BatchTask) -> list[Result]:
        """The attention page of each example, as HTML."""
        run = self.runs[task.run]
        results = []
        for item in task.inputs:
            task.check()
            example = Example(item["source"], features=item.get("features"))
            results.append({"html": trace_example(run, example, item.get("target")).to_html()})
        return results

    @contextmanager
    def _cancellable(self, engine: Engine, task: BatchTask) -> Iterator[None]:
        """Check before every step of a search with torch whether the task was cancelled."""
        if not isinstance(engine, TorchEngine):
            yield
            return
        with self._torch_lock:
            engine.scorer.before_step = task.check
            try:
                yield
            finally:
                engine.scorer.before_step = None

    def _decoder(self, task: BatchTask) -> Engine:
        """An engine for a task; torch where the server's engine does not support a constraint of an input."""
        constraints = {name for item in task.inputs for name, value in item.items() if value and name in CONSTRAINTS}
        if "seed" in constraints and not task.settings.get("sample"):
            constraints.remove("seed")  # nothing is drawn
        supported = constraints <= ENGINES[self.engine].constraints
        return self._engine(self.engine if supported else "torch", task)

    def _engine(self, name: EngineName, task: BatchTask) -> Engine:
        """The engine of this name for the run and options of a task, opened on first use."""
        # The key has the options as text: checking them for every batch took as long as everything but the search.
        key = name, task.run, task.options
        with self._cache_lock:
            engine = self._engines.pop(key, None) or self._open(name, task.run, task.decoding())
            self._engines[key] = engine
            while len(self._engines) > MAX_ENGINES:
                self._engines.popitem(last=False)
        return engine

    def _open(self, name: EngineName, run: str, options: Options) -> Engine:
        loaded = self.runs[run]
        if name == "ctranslate2" and loaded.task.seq2seq:
            with suppress(UserError):  # what it does not support is decoded with torch
                quantized = options.model_copy(update={"precision": self.precision})
                translator = self._translators.get(run)
                engine = CTranslate2Engine(loaded, quantized, self.slots, translator=translator)
                self._translators[run] = engine.translator
                return engine
        precision = {"precision": self.precision} if self.precision in ENGINES["torch"].precisions else {}
        return open_engine([loaded], options.model_copy(update=precision), workers=1)


def describe(name: str, run: Run) -> Result:
    """The facts of a run that a server publishes."""
    kinds = [kind for kind in run.task.answers if kind != "generate" or run.config.predicts_tokens]
    return {
        "name": name,
        "task": run.task.name,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "labels": list(run.labels),
        "features": "features" in run.codec.columns,
        "kinds": [] if run.task.reads == "images" else kinds,  # requests contain text only
    }


def usable_options(options: Options, device: torch.device, report: Callable[[str], None]) -> Options:
    """The options with a precision that works on the device."""
    if options.precision != "bf16":
        return options
    return options.model_copy(update={"precision": usable_precision("bf16", device, report)})


def open_engine(
    runs: Sequence[Run],
    options: Options,
    engine: EngineName = "torch",
    scores: Scores = "tokens",
    workers: int | None = None,
    threads: int | None = None,
) -> Engine:
    """The engine for a run or an ensemble; without `workers` as many processes as pay off."""
    if runs[0].task.name == "masked":
        return MaskFiller(runs, options)
    if engine == "ctranslate2":
        return CTranslate2Engine.open(runs, options, scores, workers, threads)
    torch_engine = TorchEngine(runs, options)
    device = torch_engine.scorer.device
    pays_off = is_small(runs) and device.type == "cpu" and threads is None
    if workers == 1 or (workers is None and not pays_off):
        return torch_engine
    if device.type != "cpu":
        raise UserError(f"workers: {workers} processes share the cores of a CPU; on {device} use 1")
    if workers is None:
        torch.set_num_threads(1)
    elif threads is None:
        torch.set_num_threads(max(1, cores() // workers))
    return WorkerPool(torch_engine, workers, always=workers is not None)


def is_small(runs: Iterable[Run]) -> bool:
    """Whether the models are so small that threads wait longer than they compute."""
    return sum(run.model.size for run in runs) < SMALL_MODEL


def generation_json(source: str, hypotheses: Sequence[Hypothesis], details: Mapping[str, Any] = {}) -> Result:
    """The outputs for a source, with further details."""
    answer: Result = {"source": source, "hypotheses": [hypothesis.as_dict() for hypothesis in hypotheses], **details}
    if candidates := hypotheses[0].candidates:
        answer["candidates"] = [{"text": h.text, "utility": h.utility, "score": h.score} for h in candidates]
    return answer


def label_json(source: str, label: Classification) -> Result:
    """The label of a text."""
    return {"source": source, **label.as_dict()}


def score_json(pair: Example, scored: Scored) -> Result:
    """The score of a pair."""
    return {"source": pair.source, "target": pair.target, **scored.as_dict()}


def unknown_remark(codec: Codec, example: Example) -> str:
    """A remark on tokens of an example that the run does not know; features that do not fit are refused."""
    if problem := codec.features_problem(example):
        raise UserError(problem)
    target = codec.target.encode([example.target])[0] if example.target else []
    unknown = codec.unknown_tokens(example, codec.encode_source([example])[0], target)
    return unknown_flags(unknown).get("unknown", "")


def trace_example(run: Run, example: Example, target: str | None = None, beam: int = 5, more: int = 0) -> Trace:
    """All attention maps of an example, with `target` or the run's best output."""
    if problem := run.codec.features_problem(example):
        raise UserError(problem)
    if not run.task.seq2seq:
        return trace_text(run, example.source, target or example.target, more, example.features)
    if more:
        raise UserError(f"{run.path}: only a language model goes on with a text (more={more})")
    return trace_pair(run, example, target, beam)


def truncation(truncated: Mapping[int, int], limit: int) -> str:
    """A remark on truncated texts: their tokens by index, and the tokens that the model reads."""
    named = ", ".join(f"texts[{i}] has {tokens}" for i, tokens in list(truncated.items())[:3])
    more = ", ..." if len(truncated) > 3 else ""
    return (
        f"embed: {plural(len(truncated), 'text')} truncated to the {plural(limit, 'token')} that the model reads at"
        f" once ({named}{more}); average_windows=True reads all of them"
    )
