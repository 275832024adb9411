"""Worker processes answer batches. They are forked from the template process, which loads the runs once."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from regard.answers import (
    EMBED_TOKENS,
    Answerer,
    Result,
    generation_json,
    label_json,
    load_models,
    open_engine,
    score_json,
    truncation,
)
from regard.decode import native
from regard.decode.request import CONSTRAINTS, ENGINES, EngineChoice, Options, Precision, Prompt, Request
from regard.device import release_memory
from regard.errors import NO_TORCH, UserError, lacks_torch
from regard.parallel.children import Work
from regard.parallel.messages import Channel
from regard.run import CHAT_TEMPLATE, Run
from regard.serve.pool import INTERNAL_ERROR, body_message, read_body
from regard.text.codec import Example

if TYPE_CHECKING:
    from regard.inspect.trace import Trace

RELEASE_SECONDS = 5.0  # between calls of release_memory: batches of different sizes fragment the heap
WEIGHT_BYTES = 7  # of an attention weight in JSON
MAX_ANSWERERS = 32  # ready answerers that a worker keeps, one for each engine, run and set of options


class Cancelled(Exception):
    """The batch was cancelled."""


@dataclass
class WorkerBatch:
    """A batch: inputs of one kind, which is a method of `BatchAnswerer`, with the same options, for one run."""

    run: str
    kind: str
    options: str  # as JSON, a part of the key of a cached answerer
    inputs: list[dict[str, Any]]
    cancelled: Callable[[], bool] = lambda: False
    send: Callable[[Result], None] = lambda piece: None  # of a streamed output

    @property
    def settings(self) -> dict[str, Any]:
        options: dict[str, Any] = from_json(self.options)
        return options

    def requests(self) -> list[Request]:
        """The inputs as requests; those of a chat with a template have pieces."""
        return [Prompt.model_construct(**x) if "pieces" in x else Request(**x) for x in self.inputs]

    def examples(self) -> list[Example]:
        return [Example(x["source"], x.get("target"), x.get("features")) for x in self.inputs]

    def check(self) -> None:
        """Raise `Cancelled` if the batch was cancelled; called before each step of a search."""
        if self.cancelled():
            raise Cancelled


class BatchAnswerer:
    """Answers batches with the runs of this process."""

    def __init__(
        self, runs: Mapping[str, Run], engine: EngineChoice = "auto", precision: Precision = "fp32", slots: int = 1
    ):
        """`slots` is the number of threads that answer at the same time."""
        self.runs = runs
        # The same runs for what only torch can do: an engine of a run whose model is in memory is always torch.
        self._loaded = {name: run if run.loaded else replace(run) for name, run in runs.items()}
        self.engine = engine
        self.precision = precision
        self.slots = slots
        self._answerers: OrderedDict[tuple[str, str, str], Answerer] = OrderedDict()
        self._translators: dict[str, Any] = {}
        self._torch_lock = threading.Lock()  # one search with torch at a time
        self._cache_lock = threading.Lock()

    def answer(self, batch: WorkerBatch) -> list[Result]:
        """A result or an error for each input; a failed input does not affect the others."""
        try:
            results: list[Result] = getattr(self, batch.kind)(batch)
            return results
        except Cancelled:
            raise
        except Exception as error:
            if len(batch.inputs) > 1:
                return [self.answer(replace(batch, inputs=[item]))[0] for item in batch.inputs]
            if isinstance(error, UserError):  # without paths of this machine
                message = str(error).replace(str(self.runs[batch.run].path), batch.run)
                return [{"error": message, "status": 422}]
            if lacks_torch(error):
                return [{"error": f"this {NO_TORCH}", "status": 422}]
            traceback.print_exception(error)
            return [{"error": INTERNAL_ERROR, "status": 500}]

    def generate(self, batch: WorkerBatch) -> list[Result]:
        """Outputs with scores, as `regard generate --json` prints them."""
        answerer = self._decoder(batch)
        attention = batch.settings.get("attention")  # its maximum bytes for an input
        fallback = self.engine not in ("auto", answerer.engine.name)
        requests = batch.requests()
        with self._cancellable(answerer, batch):
            answers = answerer.generate(requests)
        results = []
        for request, (item, hypotheses) in zip(requests, answers, strict=True):
            details: Result = {"source_tokens": len(item.sources[0]) if item.sources else 0}
            if attention and hypotheses[0].text:
                batch.check()
                example = Example(request.source, features=request.features)
                trace = Answerer([self._loaded[batch.run]]).trace(example, hypotheses[0].text)
                details["attention"] = attention_json(trace, attention)
            result = generation_json(request.source, hypotheses, details)
            results.append({**result, "engine": answerer.engine.name} if fallback else result)
        return results

    def translate(self, batch: WorkerBatch) -> list[Result]:
        """The texts of the outputs, without scores; a source without an output is an error."""
        answerer = self._decoder(batch)
        sources = [item["source"] for item in batch.inputs]
        with self._cancellable(answerer, batch):
            rows = answerer.texts(sources)
        results: list[Result] = [{"texts": row} for row in rows]
        for index in (i for i, row in enumerate(rows) if not row[0]):
            if flags := answerer.engine.prepare([sources[index]])[0].flags:
                results[index] = {"error": f"q: {'; '.join(flags.values())}", "status": 422}
        return results

    def stream(self, batch: WorkerBatch) -> list[Result]:
        """Decode one input, and send every token as soon as it is decided."""
        answerer = self._answerer(self._scoring_engine, batch)
        [request] = batch.requests()
        with self._cancellable(answerer, batch):
            pieces = answerer.stream(request)
            if pieces.problem:
                raise UserError(pieces.problem)
            for piece in pieces:
                batch.send({"piece": piece.as_dict()})
        assert pieces.hypothesis is not None
        return [generation_json(request.source, [pieces.hypothesis], {"source_tokens": pieces.source_tokens})]

    def score(self, batch: WorkerBatch) -> list[Result]:
        """Log-probabilities of given targets, as in `regard score`."""
        pairs = batch.examples()
        scored = self._answerer(self._scoring_engine, batch).score(pairs)
        return [score_json(pair, each) for pair, each in zip(pairs, scored, strict=True)]

    def classify(self, batch: WorkerBatch) -> list[Result]:
        texts = batch.examples()
        labels = Answerer([self._loaded[batch.run]], self._options(batch)).classify(texts)
        return [label_json(text.source, label) for text, label in zip(texts, labels, strict=True)]

    def embed(self, batch: WorkerBatch) -> list[Result]:
        """Vectors of texts; a truncated text has a flag."""
        normalize = batch.settings.get("normalize", True)
        run = self.runs[batch.run]
        texts = [item["source"] for item in batch.inputs]
        longest = max(map(len, run.codec.source.encode(texts)))
        if run.config.top.max_positions is None and longest > (most := batch.settings.get("max_source", longest)):
            raise UserError(f"source: {longest} tokens; at most {most} (max_source)")
        answerer = Answerer([self._loaded[batch.run]], Options(batch_tokens=EMBED_TOKENS))
        vectors, truncated, limit = answerer.embed(texts, normalize=normalize)
        results: list[Result] = [{"vector": [float(v) for v in row]} for row in vectors]
        for index, tokens in truncated.items():
            results[index]["flags"] = {"truncated": truncation({0: tokens}, limit)}
        return results

    def inspect(self, batch: WorkerBatch) -> list[Result]:
        """The attention page of each example, as HTML."""
        answerer = Answerer([self._loaded[batch.run]])
        results = []
        for example in batch.examples():
            batch.check()
            results.append({"html": answerer.trace(example._replace(target=None), example.target).to_html()})
        return results

    @contextmanager
    def _cancellable(self, answerer: Answerer, batch: WorkerBatch) -> Iterator[None]:
        """Check before every input and step of a search whether the batch was cancelled, if the engine can do so."""
        engine = answerer.engine
        with self._torch_lock if engine.name == "torch" else nullcontext():
            engine.cancel_by(batch.check)
            try:
                yield
            finally:
                engine.cancel_by(None)

    @property
    def _scoring_engine(self) -> EngineChoice:
        """The engine of scores and streams, which CTranslate2 does not have."""
        return "torch" if self.engine == "ctranslate2" else self.engine

    def _options(self, batch: WorkerBatch) -> Options:
        return Options.of(**{option: value for option, value in batch.settings.items() if option != "attention"})

    def _decoder(self, batch: WorkerBatch) -> Answerer:
        """An answerer for a batch; with torch where the server's engine does not support a constraint of an input."""
        constraints = {name for item in batch.inputs for name, value in item.items() if value and name in CONSTRAINTS}
        if "seed" in constraints and not batch.settings.get("sample"):
            constraints.remove("seed")  # without sampling, a seed has no effect
        supported = self.engine == "auto" or constraints <= ENGINES[self.engine].constraints
        return self._answerer(self.engine if supported else "torch", batch)

    def _answerer(self, engine: EngineChoice, batch: WorkerBatch) -> Answerer:
        """An answerer with this engine for the run and options of a batch, made on first use."""
        # The key has the options as text: checking them for every batch took as long as everything but the search.
        key = engine, batch.run, batch.options
        with self._cache_lock:
            answerer = self._answerers.pop(key, None) or self._open(engine, batch)
            self._answerers[key] = answerer
            while len(self._answerers) > MAX_ANSWERERS:
                self._answerers.popitem(last=False)
        return answerer

    def _open(self, name: EngineChoice, batch: WorkerBatch) -> Answerer:
        run = self.runs[batch.run]
        options = self._options(batch)
        chosen = options.model_copy(update={"precision": self.precision})
        if name in ("native", "auto") and not native.problem([run], chosen):
            return Answerer([run], chosen, native.NativeEngine([run], chosen, workers=1))
        with suppress(UserError):  # an unsupported option is decoded with torch
            if name == "ctranslate2" and run.task.seq2seq:
                from regard.decode.ctranslate2 import CTranslate2Engine

                engine = CTranslate2Engine(run, chosen, self.slots, translator=self._translators.get(batch.run))
                self._translators[batch.run] = engine.translator
                return Answerer([run], options, engine)
        precision = {"precision": self.precision} if self.precision in ENGINES["torch"].precisions else {}
        options = options.model_copy(update=precision)
        loaded = [self._loaded[batch.run]]
        return Answerer(loaded, options, open_engine(loaded, options, "torch", workers=1))


def attention_json(trace: Trace, limit: int) -> Result:
    """All attention maps of an output, with the tokens of their rows and columns, in at most `limit` bytes."""
    weights = sum(m.weights_HTS.size for m in trace.maps)
    if (size := weights * WEIGHT_BYTES) > limit:
        each = f"at most {limit} for each input of this request (--max-answer)"
        raise UserError(f"attention: {weights} weights have about {size} bytes; {each}")
    maps = [
        {"name": m.name, "kind": m.kind, "layer": m.layer, "heads": m.heads, "rows": m.rows, "columns": m.columns}
        | {"weights": m.weights_HTS.astype(float).round(4).tolist()}
        for m in trace.maps
    ]
    return {"tokens": trace.tokens, "maps": maps}


def describe(name: str, run: Run) -> Result:
    """The facts of a run that a server publishes."""
    kinds = [kind for kind in run.task.answers if kind != "generate" or run.config.predicts_tokens]
    return {
        "name": name,
        "task": run.task.name,
        "parameters": run.weights.size,
        "labels": list(run.labels),
        "width": run.config.top.out_width,
        "features": "features" in run.codec.columns,
        "feature_names": list(run.codec.features),
        "feature_separator": run.codec.feature_separator,
        "characters": run.statistics.source_characters,
        "generation": run.generation.model_dump(mode="json"),
        "chat_template": (run.path / CHAT_TEMPLATE).is_file(),
        "kinds": [] if run.task.reads == "images" else kinds,  # requests contain text only
        "examples": [{"source": each.source, "features": each.features} for each in run.statistics.examples],
    }


def prepare(settings: dict[str, Any]) -> tuple[Work, dict[str, Any]]:
    """Load the runs -> the work of a worker, and a description of the runs."""
    _ignore_signals()
    runs = {name: Run.load(path, model=False) for name, path in settings["runs"].items()}
    slots: int = settings["slots"]
    for run in runs.values():  # engines pack the weights, once for all workers
        open_for_workers(run, settings["engine"], settings["precision"], settings["threads"])
    answerer = BatchAnswerer(runs, settings["engine"], settings["precision"], slots)
    warnings.simplefilter("ignore", UserWarning)  # warnings quote words of a request, which must not be logged
    gc.collect()
    gc.freeze()  # a garbage collection would write to memory pages that workers share

    def work(channel: Channel, _: dict[str, Any]) -> None:
        _ignore_signals()
        os.nice(settings["nice"])
        answer_in_threads(answerer, channel, slots)

    return work, {"runs": [describe(name, run) for name, run in runs.items()]}


def open_for_workers(run: Run, engine: EngineChoice, precision: Precision, threads: int) -> None:
    """Open the engine of a run; an engine that does not support the run is replaced by torch."""
    decodes = "generate" in run.task.answers and run.config.predicts_tokens
    if not decodes:
        load_models([run], threads)
    elif engine == "ctranslate2":
        load_models([run], threads)
        if "stream" in run.task.answers:
            open_engine([run], Options(), "torch", workers=1)
    else:
        open_engine([run], Options(precision=precision), engine, workers=1, threads=threads)


def _ignore_signals() -> None:
    """Ignore signals that the server gets as well: the server decides when this process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def answer_in_threads(answerer: BatchAnswerer, channel: Channel, slots: int) -> None:
    """Answer batches in one thread per slot; the connections of further slots arrive over the first channel."""
    threads = []
    for _ in range(1, slots):
        if channel.receive() is None:
            return
        further = Channel(socket.socket(fileno=channel.handles.popleft()))
        threads.append(threading.Thread(target=answer_batches, args=(answerer, further)))
    for thread in threads:
        thread.start()
    answer_batches(answerer, channel)
    for thread in threads:
        thread.join()


def answer_batches(answerer: BatchAnswerer, channel: Channel) -> None:
    """Answer batches until the server closes the connection."""

    def send(body: dict[str, Any]) -> None:
        channel.send(*body_message(body))

    released = time.monotonic()
    with suppress(OSError):  # the server has closed the connection
        while message := channel.receive():
            body = read_body(message)
            if "cancel" in body:  # the batch has been answered in the meantime
                continue
            # Until the results are sent, a message can only be the cancellation of this batch.
            batch = WorkerBatch(**body, cancelled=lambda: channel.readable, send=send)
            try:
                results: list[Result] | None = answerer.answer(batch)
            except Cancelled:
                results = None
            send({"results": results})
            if time.monotonic() - released > RELEASE_SECONDS:
                release_memory()
                released = time.monotonic()
