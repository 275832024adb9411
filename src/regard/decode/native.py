"""The native engine: our own search in compiled code, without torch (package regard-native)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from regard.batch import TokenIds, in_parts
from regard.decode.engine import Engine, TopIds
from regard.decode.hypothesis import DecodedIds, Hypothesis, empty_hypothesis
from regard.decode.request import Options, check_constraints, check_engine
from regard.decode.search_inputs import Preparer, SearchInput, out_of_memory
from regard.errors import UserError
from regard.parallel.cores import cores
from regard.run import Run

INSTALL = "pip install regard-native (in a clone: pip install ./native)"
BATCH = 64  # inputs in a batch of a worker; the core refills finished places from the same batch


@cache
def library() -> ModuleType:
    """The package regard-native; a UserError if it is missing or does not fit."""
    try:
        import_module("regard_native.pack")
        return import_module("regard_native.core")
    except ImportError:
        raise UserError(f"engine: native needs the package regard-native: {INSTALL}") from None
    except Exception as error:  # a library for another machine or version
        raise UserError(f"engine: native: {error}") from None


def problem(runs: Sequence[Run], options: Options) -> str:
    """The reason why `auto` does not choose the native engine, or an empty text.

    A model in memory may differ from the stored weights, which the native engine reads.
    """
    if any(run.loaded for run in runs):
        return "the model is in memory"
    try:
        check_engine("native", options, runs=len(runs), device=str(runs[0].device))
        for run in runs:
            packed_model(run, options.precision)
    except UserError as error:
        return str(error)
    return ""


def packed_model(run: Run, precision: str) -> Any:
    """The model of a run in the layout of the core, which all engines of the run share."""
    core = library()
    pack = import_module("regard_native.pack")
    name = f"native {precision}"
    if name not in run.layouts:
        try:
            description = pack.Description(run.config.model_dump(mode="json"), run.arrays())
            packed = core.Core(description.numbers, description.tensors, precision == "int8")
        except core.NativeError as error:
            raise UserError(f"{run.path}: {error}") from None
        if run.loaded:
            return packed
        run.layouts[name] = packed
    return run.layouts[name]


class NativeEngine(Engine):
    """One run, decoded by the native engine in `workers` threads that share the weights."""

    name = "native"

    def __init__(
        self, runs: Sequence[Run], options: Options | None = None, workers: int | None = None, fallback: bool = False
    ) -> None:
        """The default of `workers` is one per core. With `fallback`, torch decodes inputs that this engine cannot."""
        self.runs = list(runs)
        self.options = options or Options()
        check_engine("native", self.options, runs=len(self.runs), device=str(self.runs[0].device))
        self.preparer = Preparer(self.runs, self.options)
        self._core = packed_model(self.runs[0], self.options.precision)
        self._workers = workers or cores()
        self._pool: ThreadPoolExecutor | None = None
        self._fallback = fallback
        self._torch: Engine | None = None

    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        results = [[empty_hypothesis(item.flags)] if item.flags else [] for item in inputs]
        order = [i for i, item in enumerate(inputs) if not item.flags and item.phrases is None]
        others = [i for i, item in enumerate(inputs) if not item.flags and item.phrases is not None]
        if others:
            if not self._fallback:
                check_constraints("native", ("require", "forbid", "stop"))
            for i, row in zip(others, self._others().decode([inputs[i] for i in others]), strict=True):
                results[i] = row
        order.sort(key=lambda i: (-len(inputs[i].sources[0]), i))  # sources of similar length are encoded together
        batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        searched = [i for batch in batches for i in batch]
        decoded = [
            row for rows in self._map(lambda batch: self._search([inputs[i] for i in batch]), batches) for row in rows
        ]
        fit = [(i, row) for i, row in zip(searched, decoded, strict=True) if row is not None]
        for i in set(searched) - {i for i, _ in fit}:
            results[i] = [empty_hypothesis(out_of_memory("source", len(inputs[i].sources[0])))]
        finished = self.finish([inputs[i] for i, _ in fit], [row for _, row in fit])
        for (i, _), row in zip(fit, finished, strict=True):
            results[i] = row
        return results

    @property
    def streams(self) -> bool:
        return self._fallback

    def steps(self, item: SearchInput) -> Iterator[tuple[int, float, TopIds]]:
        return self._others().steps(item)

    def _others(self) -> Engine:
        """The torch engine, which decodes what this engine cannot."""
        if self._torch is None:
            from regard.decode.torch_engine import TorchEngine

            self._torch = TorchEngine(self.runs, self.options)
        return self._torch

    def force(
        self, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds]
    ) -> list[tuple[float, ...] | None]:
        rows = [slice(start, start + BATCH) for start in range(0, len(targets), BATCH)]

        def scores(part: slice) -> list[tuple[float, ...] | None]:
            first = [ids[0] for ids in sources[part]]
            return self._in_parts(lambda rows: self._core.score(first[rows], targets[part][rows]), len(first))

        return [None if row is None else tuple(row) for part in self._map(scores, rows) for row in part]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _map(self, work: Callable[[Any], Any], batches: Sequence[Any]) -> Any:
        """The results of all batches, in order; several are computed at the same time."""
        if self._workers == 1 or len(batches) < 2:
            return map(work, batches)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, "native engine")
        return self._pool.map(work, batches)

    def _search(self, inputs: Sequence[SearchInput]) -> list[list[DecodedIds] | None]:
        """The outputs of each input; None for an input that does not fit into memory."""
        options = self.options

        def search(rows: slice) -> list[list[DecodedIds]]:
            part = inputs[rows]
            decoded = self._core.search(
                [item.sources[0] for item in part],
                [item.limit for item in part],
                minimums=[item.minimum for item in part],
                prefixes=[item.prefix for item in part],
                beam=options.beam,
                keep=options.mbr or options.nbest,
                length_penalty=options.length_penalty,
                exact=options.exact,
                open_end=self.preparer.continues,
                blocked=self.preparer.blocked,
                after_prefix=[self.preparer.combining] * len(part),
                no_repeat=options.no_repeat_ngram,
                repetition_penalty=options.repetition_penalty,
            )
            return [[_output(output) for output in row] for row in decoded]

        return self._in_parts(search, len(inputs))

    def _in_parts(self, work: Callable[[slice], list[Any]], count: int) -> list[Any]:
        """The results of all rows, in parts that fit into memory; None for a row that does not."""
        core = library()
        results: list[Any] = []
        try:
            parts = sorted(in_parts(work, count), key=lambda part: part[0].start)
        except core.NativeError as error:
            raise UserError(f"{self.runs[0].path}: {error}") from None
        for _, part in parts:
            results += [None] if part is None else part
        return results


def _output(output: Any) -> DecodedIds:
    scores = tuple(output.token_scores)
    return DecodedIds(tuple(output.ids), scores, output.value, output.limited)
