"""The binding of the compiled core: models in memory and searches over token ids, by ctypes."""

from __future__ import annotations

import array
import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from regard_native import __version__

LIBRARY_SUFFIXES = {"darwin": "dylib", "win32": "dll"}
REPAIR = "install regard-native again"
STATUS = (
    "",
    "not enough memory for this batch",
    "the scores of the model are not numbers (NaN); its weights are broken",
    "invalid token ids or limits",
)
INVALID, RUNNING, CANCELLED = 3, 4, 5
MAX_NUMBER = 2**31 - 1
TOO_LARGE = f"a number is larger than {MAX_NUMBER:,}"
SENTENCES = 32  # decoded at the same time


class NativeError(Exception):
    """A mistake in the use of the engine, or in a run."""


class OutOfMemory(NativeError, MemoryError):
    """A request needs more memory than the machine has."""


class _Description(Structure):
    _fields_ = (
        ("numbers", POINTER(c_double)),
        ("count", c_size_t),
        ("tensors", POINTER(c_void_p)),
        ("sizes", POINTER(c_int64)),
        ("rows", POINTER(c_int64)),
        ("tensor_count", c_size_t),
    )


class _Ensemble(Structure):
    _fields_ = (
        ("count", c_int32),
        ("models", POINTER(c_void_p)),
        ("spaces", POINTER(c_void_p)),
        ("weights", POINTER(c_double)),
    )


_Cancelled = ctypes.CFUNCTYPE(c_int32)


class _Options(Structure):
    _fields_ = (
        ("beam", c_int32),
        ("keep", c_int32),
        ("exact", c_int32),
        ("sentences", c_int32),
        ("blocked_count", c_int32),
        ("no_repeat", c_int32),
        ("samples", c_int32),
        ("top_k", c_int32),
        ("alternatives", c_int32),
        ("top_tokens", c_int32),
        ("length_penalty", c_double),
        ("repetition_penalty", c_double),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("blocked", c_void_p),
        ("cancelled", _Cancelled),
    )


class _Phrases(Structure):
    _fields_ = (
        ("next", c_void_p),
        ("met", c_void_p),
        ("ban", c_void_p),
        ("stop", c_void_p),
        ("need", c_void_p),
        ("states", c_int32),
        ("subsets", c_int32),
        ("stages", c_int32),
    )


class _Inputs(Structure):
    _fields_ = (
        ("count", c_int32),
        ("sources", c_void_p),
        ("source_end", c_void_p),
        ("prefixes", c_void_p),
        ("prefix_end", c_void_p),
        ("limits", c_void_p),
        ("minimums", c_void_p),
        ("open_ends", c_void_p),
        ("after_prefix", c_void_p),
        ("after_prefix_end", c_void_p),
        ("noise", c_void_p),
        ("noise_stride", c_int32),
        ("phrases", POINTER(_Phrases)),
    )


class _Output(Structure):
    _fields_ = (("first", c_int64), ("length", c_int32), ("limited", c_int32), ("value", c_double))


class _Results(Structure):
    _fields_ = (
        ("counts", POINTER(c_int32)),
        ("outputs", POINTER(_Output)),
        ("ids", POINTER(c_int32)),
        ("scores", POINTER(c_float)),  # doubles in a build in double precision
        ("problem", c_char_p),
    )


class _Forced(Structure):
    _fields_ = (
        ("top_tokens", c_int32),
        ("blocked_count", c_int32),
        ("head_count", c_int32),
        ("blocked", c_void_p),
        ("heads", c_void_p),
        ("scores", c_void_p),
        ("top_ids", c_void_p),
        ("top_scores", c_void_p),
        ("alignment", c_void_p),
    )


class _Step(Structure):
    _fields_ = (
        ("token", c_int32),
        ("top_count", c_int32),
        ("score", c_double),
        ("top_tokens", POINTER(c_int32)),
        ("top_scores", POINTER(c_double)),
    )


class Phrases(Protocol):
    """The automaton of required and forbidden phrases and stop strings, as in regard's decode/constraints.py."""

    next_QV: np.ndarray
    met_QV: np.ndarray
    ban_QV: np.ndarray
    stop_QV: np.ndarray
    need_MQ: np.ndarray


Others: TypeAlias = (
    "Sequence[tuple[Core, Sequence[Sequence[int]]]]"  # further models of an ensemble, with their sources
)


@dataclass(slots=True)
class Search:
    """Sources in token ids, with the rules of each and the options of all."""

    sources: Sequence[Sequence[int]]
    limits: Sequence[int]  # most output tokens, the end token not counted
    others: Others = ()
    weights: Sequence[float] = ()  # of the models of an ensemble; default: equal ones
    minimums: Sequence[int] | None = None  # fewest output tokens
    prefixes: Sequence[Sequence[int]] | None = None
    after_prefix: Sequence[Sequence[int]] | None = None  # tokens that do not follow the prefix directly
    open_end: bool | Sequence[bool] = False  # a continuation stops at its limit without an end token
    phrases: Sequence[Phrases | None] | None = None
    stages: Sequence[int] | None = None  # of progress until all required phrases are met
    beam: int = 1
    keep: int = 1  # outputs of a source
    length_penalty: float = 1.0
    exact: bool = False
    blocked: Sequence[int] = ()  # tokens that are never produced
    no_repeat: int = 0
    repetition_penalty: float = 1.0
    noise: np.ndarray | None = None  # of samples (sources, samples, tokens): numbers from 0 to 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    alternatives: int = 0  # outputs are the prefix and one of this many best tokens after it
    top_tokens: int = 0  # of a stream: most probable tokens to report at each step
    check: Callable[[], None] = lambda: None  # called before each step; may raise to end the search


class Token(NamedTuple):
    """A token of a stream."""

    id: int
    score: float  # natural-log probability
    top: list[tuple[int, float]]  # the most probable tokens at its position


class Decoded(NamedTuple):
    """An output in token ids, with the end token unless it stopped at its limit."""

    ids: list[int]
    token_scores: list[float]
    value: float
    limited: bool


class Forced(NamedTuple):
    """The predictions of the model while it reads a given output."""

    token_scores: list[float]
    top_tokens: list[list[tuple[int, float]]]  # the most probable tokens at each position, if requested
    alignment: np.ndarray | None  # (output tokens, source tokens): the mean weights of the requested heads


def load_library(directory: Path) -> ctypes.CDLL:
    """The compiled core in a directory."""
    path = directory / f"libregard.{LIBRARY_SUFFIXES.get(sys.platform, 'so')}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"the compiled core of regard-native does not load; {REPAIR} ({error})") from None
    version = "unknown"
    if hasattr(library, "rn_version"):
        library.rn_version.restype = c_char_p
        version = library.rn_version().decode()
    if version not in ("", __version__):  # empty: not built by the package's build, but for a test
        raise NativeError(f"{path} has version {version}, but the Python package has {__version__}; {REPAIR}")
    library.rn_kernels.restype = c_char_p
    library.rn_kernels.argtypes = (c_char_p,)
    library.rn_model.restype = c_void_p
    library.rn_model.argtypes = (POINTER(_Description), c_int32, c_char_p, POINTER(c_char_p))
    library.rn_free_model.argtypes = (c_void_p,)
    library.rn_workspace.restype = c_void_p
    library.rn_free_workspace.argtypes = (c_void_p,)
    library.rn_score.argtypes = (POINTER(_Ensemble), POINTER(_Inputs), POINTER(_Forced), POINTER(c_char_p))
    arguments = (POINTER(_Ensemble), POINTER(_Options), POINTER(_Inputs), POINTER(_Results))
    library.rn_search.argtypes = arguments
    library.rn_begin.argtypes = (*arguments, POINTER(c_void_p))
    library.rn_step.argtypes = (c_void_p, POINTER(_Step))
    structures = (_Description, _Ensemble, _Options, _Inputs, _Phrases, _Results, _Output, _Forced, _Step)
    sizes = sum(ctypes.sizeof(structure) * 5**i for i, structure in enumerate(structures))
    if library.rn_interface() != sizes:
        raise NativeError(f"{path} does not fit the Python package; {REPAIR}")
    return library


_library = load_library(Path(os.environ.get("REGARD_NATIVE_LIBRARY", Path(__file__).parent)))


def available_kernels() -> list[str]:
    """The names of the instruction sets that this machine can use, fastest first."""
    names = (b"avx512", b"avx2", b"dotprod", b"portable")
    return [name.decode() for name in names if _library.rn_kernels(name)]


class Core:
    """A packed model. Searches may run in several threads; each thread has its own memory."""

    def __init__(
        self, numbers: Sequence[float], tensors: Sequence[np.ndarray], int8: bool = False, kernels: str | None = None
    ) -> None:
        self.int8 = int8
        tensors = [np.ascontiguousarray(x, dtype=np.float32) for x in tensors]  # copied by the core
        values = np.asarray(numbers, dtype=np.float64)
        pointers = (c_void_p * len(tensors))(*(x.ctypes.data for x in tensors))
        sizes = np.asarray([x.size for x in tensors], dtype=np.int64)
        rows = np.asarray([x.shape[0] if x.ndim else 1 for x in tensors], dtype=np.int64)
        description = _Description(
            values.ctypes.data_as(POINTER(c_double)),
            len(values),
            pointers,
            sizes.ctypes.data_as(POINTER(c_int64)),
            rows.ctypes.data_as(POINTER(c_int64)),
            len(tensors),
        )
        problem = c_char_p()
        name = kernels.encode() if kernels else None
        self._model = _library.rn_model(byref(description), int8, name, byref(problem))
        if not self._model:
            raise NativeError((problem.value or b"").decode())
        self._real = c_double if _library.rn_score_size() == 8 else c_float
        self._local = threading.local()

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            _library.rn_free_model(self._model)

    def search(self, sources: Sequence[Sequence[int]], limits: Sequence[int], **options: Any) -> list[list[Decoded]]:
        """The best outputs of every source, in order; none if the rules allow none. Options are those of `Search`.

        With `noise`, tokens are sampled; all samples are returned, in their order.
        """
        if not sources:
            return []
        call = _Call(self, Search(sources, limits, **options), Core._workspace)
        call.check(_library.rn_search(*call.arguments))
        results = call.results
        keep = call.options.keep
        ids = results.ids
        scores: Any = results.scores
        if self._real is c_double:
            scores = ctypes.cast(scores, POINTER(c_double))
        outputs = results.outputs
        decoded: list[list[Decoded]] = []
        for i, stored in enumerate(results.counts[: len(sources)]):
            row = []
            for j in range(i * keep, i * keep + stored):
                out = outputs[j]
                first = out.first
                end = first + out.length
                row.append(Decoded(ids[first:end], scores[first:end], out.value, out.limited != 0))
            decoded.append(row)
        return decoded

    def stream(self, sources: Sequence[Sequence[int]], limits: Sequence[int], **options: Any) -> Iterator[Token]:
        """The tokens of the output of `search` for one source, computed on demand; no beam, and at most one sample.

        The last one is the end token, unless a continuation stops at its limit or the rules allow no output.
        """
        call = _Call(self, Search(sources, limits, **options), lambda core: _Workspace())
        if len(sources) != 1 or call.width > 1 or call.options.alternatives:
            raise NativeError("a stream has one source, no beam, one sample and no alternatives")
        handle = c_void_p()
        status = _library.rn_begin(*call.arguments, byref(handle))
        step = _Step()
        while True:
            call.check(0 if status == RUNNING else status)
            status = _library.rn_step(handle, byref(step))
            if status == 0 or (status == RUNNING and step.token < 0):
                return
            if status == RUNNING:
                count = step.top_count
                top = list(zip(step.top_tokens[:count], step.top_scores[:count], strict=True))
                yield Token(step.token, step.score, top)

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of every token of every target, which includes its end token."""
        return [forced.token_scores for forced in self.force(sources, targets)]

    def force(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        *,
        others: Others = (),
        weights: Sequence[float] = (),
        top_tokens: int = 0,
        blocked: Sequence[int] = (),
        heads: Sequence[tuple[int, int]] = (),
    ) -> list[Forced]:
        """Read given targets, which include their end token. Consecutive pairs with the same source share its encoding.

        `blocked` tokens are never among the `top_tokens`. `heads` are cross-attention heads of this model as (layer,
        head). `others` and `weights` make an ensemble, as in `Search`.
        """
        if not sources:
            return []
        if len(targets) != len(sources):
            raise NativeError(f"{len(targets)} targets for {len(sources)} sources; give one for each")
        members = _Members(self, Core._workspace, sources, others, weights)
        source_ids, source_end = _joined(members.sources)
        target_ids, target_end = _joined(targets)
        lengths = np.asarray([len(target) for target in targets], dtype=np.int32)
        inputs = _Inputs(
            count=len(sources),
            sources=source_ids.ctypes.data,
            source_end=source_end.ctypes.data,
            prefixes=target_ids.ctypes.data,
            prefix_end=target_end.ctypes.data,
            limits=lengths.ctypes.data,
        )
        blocked_ids = np.asarray(blocked, dtype=np.int32)
        head_numbers = np.asarray(heads, dtype=np.int32)
        scores = np.empty(int(target_end[-1]), dtype=self._real)
        top_ids = np.empty((len(scores), top_tokens), dtype=np.int32)
        top_scores = np.empty(top_ids.shape, dtype=self._real)
        source_lengths = np.diff(source_end[: len(sources)], prepend=0)
        sizes = lengths.astype(np.int64) * source_lengths if heads else np.zeros(len(targets), np.int64)
        alignment = np.zeros(int(sizes.sum()), dtype=self._real)
        forced = _Forced(
            top_tokens,
            len(blocked_ids),
            len(heads),
            blocked_ids.ctypes.data,
            head_numbers.ctypes.data,
            scores.ctypes.data,
            top_ids.ctypes.data,
            top_scores.ctypes.data,
            alignment.ctypes.data,
        )
        problem = c_char_p()
        _check(_library.rn_score(byref(members.ensemble), byref(inputs), byref(forced), byref(problem)), problem.value)
        rows = [row.tolist() for row in np.split(scores, target_end[:-1])]
        tops: list[list[list[tuple[int, float]]]] = [[] for _ in targets]
        if top_tokens:
            pairs = np.split(top_ids, target_end[:-1]), np.split(top_scores, target_end[:-1])
            tops = [[_present(*row) for row in zip(*each, strict=True)] for each in zip(*pairs, strict=True)]
        matrices: list[np.ndarray | None] = [None] * len(targets)
        if heads:
            parts = np.split(alignment, np.cumsum(sizes)[:-1])
            matrices = [part.reshape(len(target), -1) for part, target in zip(parts, targets, strict=True)]
        return [Forced(*each) for each in zip(rows, tops, matrices, strict=True)]

    def _workspace(self) -> _Workspace:
        if not hasattr(self._local, "workspace"):
            self._local.workspace = _Workspace()
        workspace: _Workspace = self._local.workspace
        return workspace


def _check(status: int, problem: bytes | None = None) -> None:
    if status == INVALID and problem:
        raise NativeError(problem.decode())
    if status:
        raise OutOfMemory(STATUS[1]) if status == 1 else NativeError(STATUS[status])


def _present(ids: np.ndarray, scores: np.ndarray) -> list[tuple[int, float]]:
    """The most probable tokens at one position, with their scores."""
    return [(token, score) for token, score in zip(ids.tolist(), scores.tolist(), strict=True) if token >= 0]


class _Members:
    """The models of an ensemble, or one model, and the ids of their sources."""

    def __init__(
        self,
        core: Core,
        space: Callable[[Core], _Workspace],
        sources: Sequence[Sequence[int]],
        others: Others,
        weights: Sequence[float],
    ) -> None:
        self.sources = [*sources, *(source for _, rows in others for source in rows)]
        cores = [core, *(other for other, _ in others)]
        repeated = (each in cores[:i] for i, each in enumerate(cores))  # needs a workspace for each occurrence
        self._workspaces = [_Workspace() if again else space(each) for each, again in zip(cores, repeated, strict=True)]
        if not (others or weights):
            workspace = self._workspaces[0]
            self.ensemble = workspace.ensemble or workspace.for_one(core)
            return
        weights = weights or [1] * len(cores)
        if len(weights) != len(cores):
            raise NativeError(f"weights: {len(weights)} given for {len(cores)} models; give one for each")
        if any(len(rows) != len(sources) for _, rows in others):
            raise NativeError("others: every model needs its ids of every source")
        total = math.fsum(weights)
        self.ensemble = _ensemble(cores, self._workspaces, [weight / total for weight in weights])


def _watch(check: Callable[[], None], errors: list[BaseException]) -> Iterator[bool]:
    """Whether a search ends, asked before each of its steps; `check` is called then, and signals are handled.

    A signal handler may raise when Python code resumes. In a generator this is within `try`; ctypes would drop an error
    at the start of a function.
    """
    while True:
        try:
            yield bool(errors)
            check()
        except GeneratorExit:
            return
        except BaseException as error:
            errors.append(error)


class _Call:
    """The arguments of a search in the core, with the arrays that they point to."""

    def __init__(self, core: Core, search: Search, space: Callable[[Core], _Workspace]) -> None:
        self._arrays: list[np.ndarray | array.array[int]] = []
        self._search = search
        self._errors: list[BaseException] = []
        self._members = _Members(core, space, search.sources, search.others, search.weights)
        samples = self._samples()
        stages = max(search.stages, default=0) if search.phrases and search.stages else 0
        self.width = samples or search.beam + stages
        self.options = self._options(samples)
        self._inputs = self._input_lists()
        self.results = _Results()
        self.arguments = byref(self._members.ensemble), byref(self.options), byref(self._inputs), byref(self.results)

    def check(self, status: int) -> None:
        """Raise the error of a search that has failed."""
        if status == CANCELLED:
            raise self._errors.pop() if self._errors else KeyboardInterrupt()
        if status == 1:
            search = self._search
            raise OutOfMemory(
                f"not enough memory: an output of up to {max(search.limits):,} tokens for a source of up to "
                f"{max(map(len, search.sources)):,} tokens, with {self.width} hypotheses, needs more than this machine "
                "has; lower max_length or beam"
            )
        _check(status, self.results.problem)

    def _samples(self) -> int:
        noise = self._search.noise
        if noise is None:
            return 0
        if noise.ndim != 3 or len(noise) != len(self._search.sources):
            raise NativeError("noise: its shape is not (sources, samples, tokens)")
        return int(noise.shape[1])

    def _options(self, samples: int) -> _Options:
        search = self._search
        counts = (search.beam, search.keep, search.no_repeat, search.top_k, search.alternatives, search.top_tokens)
        if not all(-MAX_NUMBER <= count <= MAX_NUMBER for count in counts):  # ctypes would drop the higher bits
            raise NativeError(TOO_LARGE)
        watch = _watch(search.check, self._errors)
        next(watch)  # up to its first `yield`
        return _Options(
            beam=search.beam,
            keep=samples or search.alternatives or search.keep,
            exact=search.exact,
            sentences=max(1, SENTENCES // self.width),
            blocked_count=len(search.blocked),
            no_repeat=search.no_repeat,
            samples=samples,
            top_k=search.top_k,
            alternatives=search.alternatives,
            top_tokens=search.top_tokens,
            length_penalty=search.length_penalty,
            repetition_penalty=search.repetition_penalty,
            temperature=search.temperature,
            top_p=search.top_p,
            min_p=search.min_p,
            blocked=self._pointer(search.blocked, np.int32),
            cancelled=_Cancelled(watch.__next__),
        )

    def _input_lists(self) -> _Inputs:
        search = self._search
        count = len(search.sources)
        per_input = search.limits, search.minimums, search.prefixes, search.after_prefix, search.phrases, search.stages
        if any(values is not None and len(values) != count for values in per_input):
            raise NativeError(f"give one value of each rule for each of the {count} sources")
        inputs = _Inputs(count=count, limits=self._pointer(search.limits, np.int32))
        inputs.sources, inputs.source_end = self._lists(self._members.sources)
        if search.minimums is not None:
            inputs.minimums = self._pointer(search.minimums, np.int32)
        if search.prefixes is not None:
            inputs.prefixes, inputs.prefix_end = self._lists(search.prefixes)
        if search.after_prefix is not None:
            inputs.after_prefix, inputs.after_prefix_end = self._lists(search.after_prefix)
        if search.open_end is not False:
            open_ends = [True] * count if search.open_end is True else search.open_end
            inputs.open_ends = self._pointer(open_ends, np.uint8)
        if search.noise is not None:
            inputs.noise = self._pointer(search.noise, np.float32)
            inputs.noise_stride = search.noise.shape[2]
        if search.phrases is not None:
            stages = search.stages or [0] * count
            pairs = zip(search.phrases, stages, strict=True)
            inputs.phrases = (_Phrases * count)(*(self._automaton(*pair) for pair in pairs))
        return inputs

    def _automaton(self, phrases: Phrases | None, stages: int) -> _Phrases:
        if phrases is None:
            return _Phrases()
        return _Phrases(
            self._pointer(phrases.next_QV, np.int32),
            self._pointer(phrases.met_QV, np.int16),
            self._pointer(phrases.ban_QV, np.uint8),
            self._pointer(phrases.stop_QV, np.int16) if phrases.stop_QV.any() else None,
            self._pointer(phrases.need_MQ, np.int16),
            len(phrases.next_QV),
            len(phrases.need_MQ),
            stages,
        )

    def _pointer(self, values: Any, kind: type[np.generic]) -> int:
        if kind is np.int32 and not isinstance(values, np.ndarray):
            return self._integers("i", values)
        try:
            values = np.ascontiguousarray(values, dtype=kind)
        except OverflowError:
            raise NativeError(TOO_LARGE) from None
        self._arrays.append(values)
        return int(values.ctypes.data)

    def _integers(self, kind: str, values: Iterable[int]) -> int:
        """Keep integers for the core; for a few of them, `array` takes a fraction of the time of numpy."""
        try:
            integers = array.array(kind, values)
        except OverflowError:
            raise NativeError(TOO_LARGE) from None
        self._arrays.append(integers)
        return integers.buffer_info()[0]

    def _lists(self, rows: Sequence[Sequence[int]]) -> tuple[int, int]:
        return self._integers("i", chain.from_iterable(rows)), self._integers("q", accumulate(map(len, rows)))


class _Workspace:
    """The memory of one thread."""

    def __init__(self) -> None:
        self.handle = _library.rn_workspace()
        self.ensemble: _Ensemble | None = None
        if not self.handle:
            raise OutOfMemory(STATUS[1])

    def for_one(self, core: Core) -> _Ensemble:
        """The ensemble of the only model that uses this memory."""
        self.ensemble = _ensemble([core], [self], [1])
        return self.ensemble

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            _library.rn_free_workspace(self.handle)


def _ensemble(cores: Sequence[Core], workspaces: Sequence[_Workspace], weights: Sequence[float]) -> _Ensemble:
    return _Ensemble(
        len(cores),
        (c_void_p * len(cores))(*(each._model for each in cores)),
        (c_void_p * len(cores))(*(each.handle for each in workspaces)),
        (c_double * len(cores))(*weights),
    )


def _joined(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all rows, and where each row ends."""
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    try:
        ids = np.fromiter((x for row in rows for x in row), dtype=np.int32, count=int(ends[-1]))
    except OverflowError:
        raise NativeError(TOO_LARGE) from None
    return ids, ends
