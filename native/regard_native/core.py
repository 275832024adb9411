"""The binding of the compiled core: models in memory and searches over token ids, by ctypes."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

import numpy as np

STATUS = (
    "",
    "not enough memory for this batch",
    "the scores of the model are not numbers (NaN); its weights are broken",
    "invalid token ids or limits",
)
SENTENCES = 32  # decoded at the same time


class NativeError(Exception):
    """A mistake in the use of the engine, or in a run."""


class _Description(Structure):
    _fields_ = (
        ("numbers", POINTER(c_double)),
        ("count", c_size_t),
        ("tensors", POINTER(c_void_p)),
        ("sizes", POINTER(c_int64)),
        ("rows", POINTER(c_int64)),
        ("tensor_count", c_size_t),
    )


class _Options(Structure):
    _fields_ = (
        ("beam", c_int32),
        ("keep", c_int32),
        ("exact", c_int32),
        ("open_end", c_int32),
        ("sentences", c_int32),
        ("blocked_count", c_int32),
        ("after_prefix_count", c_int32),
        ("no_repeat", c_int32),
        ("sample", c_int32),
        ("top_k", c_int32),
        ("length_penalty", c_double),
        ("repetition_penalty", c_double),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("blocked", c_void_p),
        ("after_prefix", c_void_p),
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
        ("noise", c_void_p),
        ("noise_stride", c_int32),
    )


class _Output(Structure):
    _fields_ = (("first", c_int64), ("length", c_int32), ("limited", c_int32), ("value", c_double))


class _Results(Structure):
    _fields_ = (
        ("counts", POINTER(c_int32)),
        ("outputs", POINTER(_Output)),
        ("ids", POINTER(c_int32)),
        ("scores", c_void_p),  # floats, or doubles in a build in double precision
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


class Decoded(NamedTuple):
    """An output in token ids, with the end token unless it stopped at its limit."""

    ids: list[int]
    token_scores: list[float]
    value: float
    limited: bool


class Forced(NamedTuple):
    """What the model predicts while it reads a given output."""

    token_scores: list[float]
    top_tokens: list[list[tuple[int, float]]]  # the most probable tokens at each position, if requested
    alignment: np.ndarray | None  # (output tokens, source tokens): the mean weights of the requested heads


def load_library(directory: Path) -> ctypes.CDLL:
    """The compiled core in a directory."""
    library = ctypes.CDLL(str(directory / "libregard.so"))
    library.rn_kernels.restype = c_char_p
    library.rn_kernels.argtypes = (c_char_p,)
    library.rn_model.restype = c_void_p
    library.rn_model.argtypes = (POINTER(_Description), c_int32, c_char_p, POINTER(c_char_p))
    library.rn_free_model.argtypes = (c_void_p,)
    library.rn_workspace.restype = c_void_p
    library.rn_free_workspace.argtypes = (c_void_p,)
    library.rn_score.argtypes = (c_void_p, c_void_p, POINTER(_Inputs), POINTER(_Forced))
    library.rn_search.argtypes = (c_void_p, c_void_p, POINTER(_Options), POINTER(_Inputs), POINTER(_Results))
    sizes = ctypes.sizeof(_Options) * 1000 + ctypes.sizeof(_Inputs) * 100
    sizes += ctypes.sizeof(_Output) * 10 + ctypes.sizeof(_Forced)
    if library.rn_interface() != sizes:
        raise NativeError("the compiled core is of another version; install regard-native again")
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
        self._tensors = [np.ascontiguousarray(x, dtype=np.float32) for x in tensors]  # the core reads them in place
        values = np.asarray(numbers, dtype=np.float64)
        pointers = (c_void_p * len(tensors))(*(x.ctypes.data for x in self._tensors))
        sizes = np.asarray([x.size for x in self._tensors], dtype=np.int64)
        rows = np.asarray([x.shape[0] if x.ndim else 1 for x in self._tensors], dtype=np.int64)
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

    def search(
        self,
        sources: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        minimums: Sequence[int] | None = None,
        prefixes: Sequence[Sequence[int]] | None = None,
        beam: int = 1,
        keep: int = 1,
        length_penalty: float = 1.0,
        exact: bool = False,
        open_end: bool = False,
        blocked: Sequence[int] = (),
        after_prefix: Sequence[int] = (),
        no_repeat: int = 0,
        repetition_penalty: float = 1.0,
        noise: np.ndarray | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> list[list[Decoded]]:
        """The best outputs of every source, in order; none if the limits allow none.

        With `noise`, a row of numbers from 0 to 1 for each source, tokens are sampled.
        """
        if not sources:
            return []
        count = len(sources)
        source_ids, source_end = _joined(sources)
        prefix_ids, prefix_end = _joined(prefixes or [()] * count)
        limit = np.asarray(limits, dtype=np.int32)
        minimum = np.zeros(count, np.int32) if minimums is None else np.asarray(minimums, dtype=np.int32)
        blocked_ids = np.asarray(blocked, dtype=np.int32)
        sentences = max(1, SENTENCES // beam) if beam > 1 else SENTENCES
        after_prefix_ids = np.asarray(after_prefix, dtype=np.int32)
        options = _Options(
            beam,
            keep,
            exact,
            open_end,
            sentences,
            len(blocked_ids),
            len(after_prefix_ids),
            no_repeat,
            noise is not None,
            top_k,
            length_penalty,
            repetition_penalty,
            temperature,
            top_p,
            min_p,
            blocked_ids.ctypes.data,
            after_prefix_ids.ctypes.data,
        )
        draws = None if noise is None else np.ascontiguousarray(noise, dtype=np.float32)
        inputs = _Inputs(
            count,
            source_ids.ctypes.data,
            source_end.ctypes.data,
            prefix_ids.ctypes.data,
            prefix_end.ctypes.data,
            limit.ctypes.data,
            minimum.ctypes.data,
            None if draws is None else draws.ctypes.data,
            0 if draws is None else draws.shape[1],
        )
        workspace = self._workspace()
        results = _Results()
        _check(_library.rn_search(self._model, workspace.handle, byref(options), byref(inputs), byref(results)))
        scores = ctypes.cast(results.scores, POINTER(self._real))
        decoded: list[list[Decoded]] = []
        for i in range(count):
            row = []
            for j in range(i * keep, i * keep + results.counts[i]):
                out = results.outputs[j]
                span = slice(out.first, out.first + out.length)
                row.append(Decoded(results.ids[span], scores[span], out.value, bool(out.limited)))
            decoded.append(row)
        return decoded

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of every token of every target, which includes its end token."""
        return [forced.token_scores for forced in self.force(sources, targets)]

    def force(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        *,
        top_tokens: int = 0,
        blocked: Sequence[int] = (),
        heads: Sequence[tuple[int, int]] = (),
    ) -> list[Forced]:
        """Read given targets, which include their end token. Consecutive pairs with the same source share its encoding.

        `blocked` tokens are never among the `top_tokens`. `heads` are cross-attention heads as (layer, head).
        """
        if not sources:
            return []
        source_ids, source_end = _joined(sources)
        target_ids, target_end = _joined(targets)
        lengths = np.asarray([len(target) for target in targets], dtype=np.int32)
        minimum = np.zeros(len(targets), np.int32)
        inputs = _Inputs(
            len(sources),
            source_ids.ctypes.data,
            source_end.ctypes.data,
            target_ids.ctypes.data,
            target_end.ctypes.data,
            lengths.ctypes.data,
            minimum.ctypes.data,
            None,
            0,
        )
        blocked_ids = np.asarray(blocked, dtype=np.int32)
        head_numbers = np.asarray(heads, dtype=np.int32)
        scores = np.empty(int(target_end[-1]), dtype=self._real)
        top_ids = np.empty((len(scores), top_tokens), dtype=np.int32)
        top_scores = np.empty(top_ids.shape, dtype=self._real)
        sizes = lengths.astype(np.int64) * np.diff(source_end, prepend=0) if heads else np.zeros(len(targets), np.int64)
        weights = np.zeros(int(sizes.sum()), dtype=self._real)
        forced = _Forced(
            top_tokens,
            len(blocked_ids),
            len(heads),
            blocked_ids.ctypes.data,
            head_numbers.ctypes.data,
            scores.ctypes.data,
            top_ids.ctypes.data,
            top_scores.ctypes.data,
            weights.ctypes.data,
        )
        _check(_library.rn_score(self._model, self._workspace().handle, byref(inputs), byref(forced)))
        rows = [row.tolist() for row in np.split(scores, target_end[:-1])]
        tops: list[list[list[tuple[int, float]]]] = [[] for _ in targets]
        if top_tokens:
            pairs = np.split(top_ids, target_end[:-1]), np.split(top_scores, target_end[:-1])
            tops = [[_present(*row) for row in zip(*each, strict=True)] for each in zip(*pairs, strict=True)]
        matrices: list[np.ndarray | None] = [None] * len(targets)
        if heads:
            parts = np.split(weights, np.cumsum(sizes)[:-1])
            matrices = [part.reshape(len(target), -1) for part, target in zip(parts, targets, strict=True)]
        return [Forced(*each) for each in zip(rows, tops, matrices, strict=True)]

    def _workspace(self) -> _Workspace:
        if not hasattr(self._local, "workspace"):
            self._local.workspace = _Workspace()
        workspace: _Workspace = self._local.workspace
        return workspace


def _check(status: int) -> None:
    if status:
        raise MemoryError(STATUS[1]) if status == 1 else NativeError(STATUS[status])


def _present(ids: np.ndarray, scores: np.ndarray) -> list[tuple[int, float]]:
    """The most probable tokens at one position, with their scores."""
    return [(token, score) for token, score in zip(ids.tolist(), scores.tolist(), strict=True) if token >= 0]


class _Workspace:
    """The memory of one thread."""

    def __init__(self) -> None:
        self.handle = _library.rn_workspace()
        if not self.handle:
            raise MemoryError(STATUS[1])

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            _library.rn_free_workspace(self.handle)


def _joined(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all rows, and where each row ends."""
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    ids = np.fromiter((x for row in rows for x in row), dtype=np.int32, count=int(ends[-1]))
    return ids, ends
