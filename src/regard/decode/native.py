"""The native engine: our own search in compiled code, without torch (package regard-native)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.batch import TokenIds, in_parts
from regard.decode.engine import Engine, TopIds
from regard.decode.hypothesis import DecodedIds, Hypothesis, empty_hypothesis
from regard.decode.request import HeadIndex, Options, check_engine
from regard.decode.search_inputs import Preparer, SearchInput, complete_alternatives, out_of_memory, sampling_noise
from regard.errors import UserError
from regard.parallel.cores import cores
from regard.run import Run

INSTALL = "pip install regard-native (in a clone: pip install ./native)"
MAX_HYPOTHESES = 1000  # of an input
MAX_OUTPUT = 1 << 20  # tokens
BATCH = 64  # inputs in a batch of a worker; the core refills finished places from the same batch


@cache
def library() -> ModuleType:
    """The core of regard-native; a UserError if the package is missing or does not fit."""
    try:
        return import_module("regard_native.core")
    except ModuleNotFoundError as error:
        if error.name != "regard_native":
            raise
        raise UserError(f"engine: native needs the package regard-native: {INSTALL}") from None
    except Exception as error:  # a core of another version or for another machine
        raise UserError(f"engine: native: {error}") from None


def problem(runs: Sequence[Run], options: Options) -> str:
    """The reason why `auto` does not choose the native engine, or an empty text.

    A model in memory may differ from the stored weights, which the native engine reads.
    """
    if any(run.loaded for run in runs):
        return "the model is in memory, where it may have been changed (engine native reads it from there)"
    if max(options.rows, options.alternatives) > MAX_HYPOTHESES or (options.max_length or 0) > MAX_OUTPUT:
        return f"engine native: at most {MAX_HYPOTHESES:,} hypotheses and {MAX_OUTPUT:,} tokens"
    try:
        check_engine("native", options, runs=len(runs), device=str(runs[0].device))
        for run in runs:
            packed_model(run, options.precision)
    except UserError as error:
        return str(error)
    return ""


def packed_model(run: Run, precision: str) -> Any:
    """The model of a run in the layout of the core; stored weights are packed once."""
    core = library()
    name = f"native {precision}"
    if name in run.layouts and not run.loaded:
        return run.layouts[name]
    pack = import_module("regard_native.pack")
    try:
        description = pack.Description(run.config.model_dump(mode="json"), run.arrays())
        packed = core.Core(description.numbers, description.tensors, precision == "int8")
    except core.NativeError as error:
        raise UserError(f"{run.path}: {error}") from None
    if not run.loaded:
        run.layouts[name] = packed
    return packed


class NativeEngine(Engine):
    """One run or an ensemble, decoded by the native engine in `workers` threads that share the weights."""

    name = "native"

    def __init__(self, runs: Sequence[Run], options: Options | None = None, workers: int | None = None) -> None:
        """The default of `workers` is one per core."""
        self.runs = list(runs)
        self.options = options or Options()
        check_engine("native", self.options, runs=len(self.runs), device=str(self.runs[0].device))
        self.preparer = Preparer(self.runs, self.options)
        self._core, *self._others = (packed_model(run, self.options.precision) for run in self.runs)
        self._top_tokens = min(self.options.top_tokens, self.runs[0].config.target_vocab)
        self._workers = workers or cores()
        self._pool: ThreadPoolExecutor | None = None
        self._check: Callable[[], None] | None = None
        self._failed = False

    @property
    def streams(self) -> bool:
        return True

    def cancel_by(self, check: Callable[[], None] | None) -> None:
        self.preparer.before_input = check
        self._check = check

    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        results = [[empty_hypothesis(item.flags)] if item.flags else [] for item in inputs]
        order = [i for i, item in enumerate(inputs) if not item.flags]
        order.sort(key=lambda i: (-len(inputs[i].sources[0]), i))  # sources of similar length are encoded together

        def search(batch: list[int]) -> list[list[DecodedIds] | None]:
            return self._in_parts(lambda rows: self._search([inputs[i] for i in batch[rows]], self.options), len(batch))

        decoded = self._map(search, order)
        fit = [(i, row) for i, row in zip(order, decoded, strict=True) if row is not None]
        finished = self.finish([inputs[i] for i, _ in fit], [row for _, row in fit])
        for (i, _), hypotheses in zip(fit, finished, strict=True):
            results[i] = hypotheses
        for i, row in zip(order, decoded, strict=True):
            if row is None:
                results[i] = [empty_hypothesis(out_of_memory("source", max(map(len, inputs[i].sources))))]
        return results

    def force(
        self, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds]
    ) -> list[tuple[float, ...] | None]:
        rows = self._force(sources, targets)
        return [None if row is None else tuple(row.token_scores) for row in rows]

    def force_top(self, sources: Sequence[Sequence[TokenIds]], outputs: Sequence[TokenIds]) -> list[list[TopIds]]:
        rows = self._force(sources, outputs, top_tokens=self._top_tokens, blocked=self.preparer.blocked)
        return [[] if row is None else row.top_tokens for row in rows]

    def force_attention(
        self, sources: Sequence[TokenIds], outputs: Sequence[TokenIds], heads: Sequence[HeadIndex]
    ) -> list[NDArray[np.floating]]:
        rows = self._force([(source,) for source in sources], outputs, heads=heads)
        shapes = zip(outputs, sources, strict=True)
        empty = (np.zeros((len(output), len(source))) for output, source in shapes)
        return [none if row is None else row.alignment for row, none in zip(rows, empty, strict=True)]

    def steps(self, item: SearchInput) -> Iterator[tuple[int, float, TopIds]]:
        with self._user_errors():
            yield from self._core.stream(**self._arguments([item], self.options), top_tokens=self._top_tokens)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _map(self, work: Callable[[Any], list[Any]], items: Sequence[Any]) -> list[Any]:
        """The results of all items, in order; batches of items are computed at the same time."""
        batches = [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
        if self._workers == 1 or len(batches) < 2:
            return [result for batch in batches for result in work(batch)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, "native engine")
        try:
            return [result for results in self._pool.map(work, batches) for result in results]
        except BaseException:  # such as Ctrl-C
            self._failed = True
            self.close()
            self._failed = False
            raise

    def _before_step(self) -> None:
        if self._failed:  # the other threads stop, too
            raise CancelledError
        if self._check is not None:
            self._check()

    def _in_parts(self, work: Callable[[slice], list[Any]], count: int) -> list[Any]:
        """The results of all rows, in parts that fit into memory; None for a row that does not."""
        results: list[Any] = [None] * count
        with self._user_errors():
            for rows, part in in_parts(work, count):
                results[rows] = [None] if part is None else part
        return results

    @contextmanager
    def _user_errors(self) -> Iterator[None]:
        try:
            yield
        except library().NativeError as error:
            raise UserError(f"{self.runs[0].path}: {error}") from None

    def _search(self, inputs: Sequence[SearchInput], options: Options) -> list[list[DecodedIds]]:
        if not inputs:
            return []
        if options.alternatives:
            eos = self.runs[0].config.ids.eos
            return complete_alternatives(inputs, options, eos, self._search, self._next_tokens)
        rows = self._core.search(**self._arguments(inputs, options))
        return [[DecodedIds(tuple(x.ids), tuple(x.token_scores), x.value, x.limited) for x in row] for row in rows]

    def _next_tokens(self, inputs: Sequence[SearchInput]) -> list[list[int]]:
        """The best tokens directly after the prefix of each input."""
        config = self.runs[0].config
        plain = self.options.model_copy(update={"beam": 1, "nbest": 1, "sample": False, "mbr": 0})
        arguments = self._arguments([replace(item, stages=0) for item in inputs], plain)
        rows = self._core.search(**arguments, alternatives=min(self.options.alternatives, config.target_vocab))
        starts = [len(item.prefix) for item in inputs]
        return [[(*x.ids, config.ids.eos)[start] for x in row] for row, start in zip(rows, starts, strict=True)]

    def _arguments(self, inputs: Sequence[SearchInput], options: Options) -> dict[str, Any]:
        """Inputs and options as arguments of a search of the core."""
        samples = options.mbr or options.nbest
        first, *rest = zip(*(item.sources for item in inputs), strict=True)
        return {
            "check": self._before_step,
            "sources": first,
            "limits": [item.limit for item in inputs],
            "others": list(zip(self._others, rest, strict=True)),
            "weights": options.weights,
            "minimums": [item.minimum for item in inputs],
            "prefixes": [item.prefix for item in inputs],
            "after_prefix": [item.not_after_prefix for item in inputs],
            "open_end": [item.open_end for item in inputs],
            "phrases": [item.phrases for item in inputs] if any(item.phrases for item in inputs) else None,
            "stages": [item.stages for item in inputs],
            "beam": options.beam,
            "keep": 1 if options.samples else samples,
            "length_penalty": options.length_penalty,
            "exact": options.exact,
            "blocked": self.preparer.blocked,
            "no_repeat": options.no_repeat_ngram,
            "repetition_penalty": options.repetition_penalty,
            "noise": sampling_noise(inputs, samples, options.seed) if options.samples else None,
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
            "min_p": options.min_p,
        }

    def _force(
        self, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds], **options: Any
    ) -> list[Any | None]:
        """What the model predicts while it reads targets; None for a pair that does not fit into memory."""

        def force(batch: Sequence[int]) -> list[Any | None]:
            def part(rows: slice) -> list[Any]:
                indices = batch[rows]
                first, *rest = zip(*(sources[i] for i in indices), strict=True)
                others = list(zip(self._others, rest, strict=False))  # none for an alignment, which is of the first run
                weights = self.options.weights if others else ()
                outputs = [targets[i] for i in indices]
                results: list[Any] = self._core.force(first, outputs, others=others, weights=weights, **options)
                return results

            return self._in_parts(part, len(batch))

        return self._map(force, range(len(targets)))
