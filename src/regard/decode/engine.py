"""Engines decode requests into hypotheses. The torch engine runs our own search; it can use processes, and stream."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from regard.batch import in_parts, windows
from regard.decode.alignment import align, load_heads
from regard.decode.constraints import PhraseTexts, SearchInput
from regard.decode.ensemble import Scorer
from regard.decode.forced import force_top
from regard.decode.hypothesis import (
    Alignment,
    DecodedIds,
    Hypothesis,
    TopTokens,
    attention_flags,
    empty_hypothesis,
    flag_segmentation,
    make_hypotheses,
    output_text,
    top_tokens_json,
)
from regard.decode.request import Input, Options, check_engine, check_streaming
from regard.decode.search import Sampler, greedy, make_rules, search, steps, top_tokens
from regard.decode.search_inputs import Preparer, out_of_memory
from regard.device import tune_allocator
from regard.errors import UserError
from regard.parallel import children
from regard.parallel.children import Child, ChildDied, answer_requests
from regard.parallel.cores import cores
from regard.parallel.messages import Channel, Message
from regard.run import Run
from regard.text.tokenizer import PARALLELISM_VARIABLE

FORK_SECONDS = 0.1  # until a forked child starts to decode


class Engine(AbstractContextManager["Engine"]):
    """Decodes with loaded runs. The outputs do not depend on how inputs are grouped."""

    options: Options
    preparer: Preparer

    def prepare(self, inputs: Sequence[Input]) -> list[SearchInput]:
        """One search input per request; an input with `flags` is not decoded."""
        return self.preparer(inputs)

    @abstractmethod
    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        """The best outputs of every input, or one empty hypothesis with a flag if it has no output."""

    def close(self) -> None:
        """Release resources; the engine must not be used afterwards."""

    def __call__(self, inputs: Sequence[Input]) -> list[list[Hypothesis]]:
        return self.decode(self.prepare(inputs))

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close()


class TorchEngine(Engine):
    """One run or an ensemble, decoded by our own search with torch."""

    def __init__(self, runs: Run | Sequence[Run], options: Options | None = None) -> None:
        self.options = options or Options()
        check_engine("torch", self.options)
        self.runs = [runs] if isinstance(runs, Run) else list(runs)
        self.preparer = Preparer(self.runs, self.options)
        models = [run.model for run in self.runs]
        packed = [run.packed for run in self.runs]
        self.scorer = Scorer(models, self.options.weights, self.preparer.blocked, self.options.precision, packed)

    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        results = [[empty_hypothesis(item.flags)] if item.flags else [] for item in inputs]
        for batch in self.preparer.batches(dict(enumerate(inputs))):
            items = [inputs[i] for i in batch]
            for rows, decoded in in_parts(lambda rows: self._decode_batch(items[rows]), len(items)):  # noqa: B023
                if decoded is None:
                    flags = out_of_memory("source", max(map(len, items[rows.start].sources)))
                    decoded = [[empty_hypothesis(flags)]]
                for i, row in zip(batch[rows], decoded, strict=True):
                    results[i] = row
        return results

    def _decode_batch(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        return self.finish(inputs, search(self.scorer, inputs, self.options))

    def finish(self, inputs: Sequence[SearchInput], decoded: Sequence[list[DecodedIds]]) -> list[list[Hypothesis]]:
        """The outputs of a search as hypotheses, with alignments and top tokens if the options request them."""
        codec = self.runs[0].codec
        limits = self.runs[0].statistics.limits
        options = self.options
        pairs = zip(inputs, decoded, strict=True)
        results = [make_hypotheses(codec, limits, options, item, outputs) for item, outputs in pairs]
        entries = [(i, rank) for i, row in enumerate(results) for rank, h in enumerate(row) if h.ids]
        ids = [results[i][rank].ids for i, rank in entries]
        if options.alignment:
            heads = options.alignment_heads or load_heads(self.runs[0].path)
            sources = [inputs[i].sources[0] for i, _ in entries]
            alignments = align(self.runs[0], sources, ids, heads, options.batch_tokens)
            for (i, rank), alignment in zip(entries, alignments, strict=True):
                flags = {**results[i][rank].flags, **attention_flags(alignment)}
                results[i][rank] = replace(results[i][rank], alignment=alignment, flags=flags)
        if options.top_tokens:
            of_models = [inputs[i].sources for i, _ in entries]
            tops = force_top(self.scorer, of_models, ids, options.top_tokens, options.batch_tokens)
            for (i, rank), rows in zip(entries, tops, strict=True):
                results[i][rank] = replace(results[i][rank], top_tokens=tuple(map(self.named_tokens, rows)))
        flag_segmentation(codec, results)
        return results

    def named_tokens(self, row: Sequence[tuple[int, float]]) -> TopTokens:
        """(Token id, score) pairs as (token, score) pairs."""
        pieces = self.runs[0].codec.target_pieces([index for index, _ in row])
        return tuple((piece, score) for piece, (_, score) in zip(pieces, row, strict=True))


def generate(
    runs: Run | Sequence[Run], inputs: Iterable[Input], options: Options | None = None
) -> Iterator[list[Hypothesis]]:
    """The best outputs for every input, in order; several runs form an ensemble.

    Reads `window` inputs ahead. An input that cannot be decoded has an empty output with a flag. Options that no input
    can satisfy raise an error.
    """
    engine = TorchEngine(runs, options)
    for window in windows(inputs, engine.options.window):
        yield from engine(window)


class WorkerPool(Engine):
    """A torch engine that shares its batches with up to `workers` - 1 child processes; the outputs stay the same.

    Children are forked where possible, otherwise spawned. Unless `always` is set, they are started only if decoding
    the remaining batches here would take more than twice the start-up time. This process decodes in the meantime.
    """

    def __init__(self, engine: TorchEngine, workers: int | None = None, always: bool = False) -> None:
        """The default of `workers` is one per core."""
        self.engine = engine
        self.options = engine.options
        self.preparer = engine.preparer
        self.workers = workers
        self.always = always
        self.children: list[Child] = []
        self._loading: list[Child] = []  # spawned children that have not answered yet
        self._spawn_seconds = time.process_time()  # a spawned child repeats the work of this process so far
        self._seconds_per_token = 0.0  # measured on the last batch

    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        results = [[empty_hypothesis(item.flags)] if item.flags else [] for item in inputs]
        batches = deque(self.preparer.batches(dict(enumerate(inputs))))  # longest inputs first

        def decode_here(batch: list[int]) -> list[list[Hypothesis]]:
            return self.engine.decode([inputs[i] for i in batch])

        def decode_in_child(child: Child, batch: list[int]) -> list[list[Hypothesis]]:
            request = {"inputs": [{**vars(inputs[i]), "phrases": None} for i in batch]}
            try:
                rows = child.ask(request).header["rows"]
            except ChildDied as error:
                raise UserError(f"workers: {error}\n  with fewer workers, each has more memory") from None
            return [[_hypothesis_from_json(data) for data in row] for row in rows]

        while batches:
            sizes = [sum(1 + max(map(len, inputs[i].sources)) for i in batch) for batch in batches]
            if self._has_children(len(batches), sum(sizes)):
                break
            start = time.perf_counter()
            batch = batches.pop()  # a small one, to measure the speed of this process
            for i, row in zip(batch, decode_here(batch), strict=True):
                results[i] = row
            self._seconds_per_token = (time.perf_counter() - start) / sizes[-1]
        if batches:
            workers = [partial(decode_in_child, child) for child in self.children]
            decoded = children.ordered_map(workers, batches, decode_here, self.close)
            for i, row in zip(chain(*batches), chain.from_iterable(decoded), strict=True):
                results[i] = row
        return results

    def _has_children(self, batches: int, tokens: int) -> bool:
        """Whether children are ready to share these batches; starts some if that pays off."""
        if batches == 1:
            return False
        self.workers = self.workers or cores()
        count = min(self.workers, batches) - 1 - len(self.children)  # one batch is for this process
        if count > 0:
            fork = can_fork()
            start_seconds = FORK_SECONDS if fork else self._spawn_seconds
            if self.always or tokens * self._seconds_per_token > 2 * start_seconds:
                for _ in range(count):
                    self._start_child(fork)
        for child in [child for child in self._loading if child.channel.readable]:
            child.answer()
            self._loading.remove(child)
        return bool(self.children) and not self._loading

    def _start_child(self, fork: bool) -> None:
        name = f"decoding process {len(self.children) + 2}"  # this process is the first
        if fork:
            answer = partial(_answer, self.engine)
            self.children.append(children.fork(lambda channel, _: answer_requests(channel, answer), {}, name))
            return
        settings = {
            "runs": [str(run.path) for run in self.engine.runs],
            "options": self.options.model_dump(mode="json"),
            "threads": torch.get_num_threads(),
        }
        child = children.spawn(f"{__name__}:load_and_answer", settings, name)
        child.channel.send({})  # answered when the runs are loaded
        self.children.append(child)
        self._loading.append(child)

    def close(self) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.close()
        self.children.clear()
        self._loading.clear()


def can_fork() -> bool:
    """Whether this process can be forked for decoding: it has one thread, and tokenizers starts no further ones."""
    return children.can_fork() and os.environ.get(PARALLELISM_VARIABLE) == "false"


def load_and_answer(channel: Channel, settings: dict[str, Any]) -> None:
    """The work of a spawned child: load the runs at the first request, then answer batches."""
    engine: TorchEngine | None = None

    def answer(request: Message) -> Message:
        nonlocal engine
        if engine is not None:
            return _answer(engine, request)
        tune_allocator()
        torch.set_num_threads(settings["threads"])
        engine = TorchEngine([Run.load(path) for path in settings["runs"]], Options(**settings["options"]))
        return Message({})

    answer_requests(channel, answer)


def _answer(engine: TorchEngine, request: Message) -> Message:
    inputs = [_input_from_json(engine.preparer, data) for data in request.header["inputs"]]
    return Message({"rows": [[_hypothesis_to_json(h) for h in row] for row in engine.decode(inputs)]})


def _input_from_json(preparer: Preparer, data: dict[str, Any]) -> SearchInput:
    texts = PhraseTexts(*_tuples(data["texts"]))
    values = {name: _tuples(value) for name, value in data.items()}
    return SearchInput(**{**values, "texts": texts, "phrases": preparer.phrases(texts)})


def _hypothesis_to_json(hypothesis: Hypothesis) -> dict[str, Any]:
    data = dict(vars(hypothesis))
    if (alignment := hypothesis.alignment) is not None:
        soft = alignment.soft
        data["alignment"] = (soft.tolist(), soft.dtype.name, alignment.source, alignment.output)
    data["candidates"] = [_hypothesis_to_json(each) for each in hypothesis.candidates]
    return data


def _hypothesis_from_json(data: dict[str, Any]) -> Hypothesis:
    values = {name: _tuples(value) for name, value in data.items()}
    if values["alignment"] is not None:
        soft, dtype, source, output = values["alignment"]
        values["alignment"] = Alignment(np.array(soft, dtype).reshape(len(output), len(source)), source, output)
    values["candidates"] = tuple(_hypothesis_from_json(each) for each in data["candidates"])
    return Hypothesis(**values)


def _tuples(value: Any) -> Any:
    """A JSON value with tuples instead of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Piece:
    """One decoded token and the text that it completes. The texts of all pieces, joined, are the output."""

    text: str
    token: str
    id: int
    score: float  # natural-log probability
    top_tokens: TopTokens = ()  # most probable tokens at its position, if requested

    def as_dict(self) -> dict[str, object]:
        """The JSON shape."""
        top = {"top_tokens": top_tokens_json(self.top_tokens)} if self.top_tokens else {}
        return {"text": self.text, "token": self.token, "score": self.score, **top}


class TokenStream(Iterator[Piece]):
    """The pieces of one output, decoded on demand; at the end `hypothesis` is the same as without streaming.

    An empty or overlong source has no pieces. The end token is included, except after a continuation that ends at its
    limit or before a stop string. Tokens that may be part of a stop string are held back, together with the token
    before them. If required phrases need a beam search, all pieces follow after the search.
    """

    def __init__(self, engine: TorchEngine, item: SearchInput) -> None:
        check_streaming(engine.options)
        self.hypothesis: Hypothesis | None = None
        self._engine = engine
        self._item = item
        self._codec = engine.runs[0].codec
        self._sent = ""
        self._pieces = self._decode()

    @property
    def problem(self) -> str:
        """Why no output fits the request; empty if the request is sound."""
        return self._item.flags.get("error") or self._item.flags.get("unsatisfied", "")

    @property
    def unknown(self) -> tuple[str, ...]:
        return self._item.unknown

    @property
    def source_tokens(self) -> int:
        return len(self._item.sources[0]) if self._item.sources else 0

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __repr__(self) -> str:
        return f"TokenStream({self._sent!r}, {'open' if self.hypothesis is None else 'ended'})"

    def close(self) -> None:
        """Stop decoding; no more pieces follow."""
        self._pieces.close()

    def _decode(self) -> Generator[Piece, None, None]:
        engine = self._engine
        item = self._item
        if item.flags or (item.stages > 0 and not engine.options.samples):  # no search, or a beam search
            self.hypothesis = engine.decode([item])[0][0]
            yield from self._pieces_until_end(0)
            return
        scorer = engine.scorer
        rules = make_rules(scorer, [item], engine.options, one_path=True)
        choose = Sampler([item], 1, engine.options, scorer.device) if engine.options.samples else greedy
        loop = steps(scorer, [item], rules, choose)
        ids: list[int] = []
        scores: list[float] = []
        tops: list[TopTokens] = []
        shown = 0
        while True:
            with torch.inference_mode():  # only around the step, not around the caller's code between steps
                step = next(loop)
            index = int(step.tokens_N[0])
            score = float(step.scores_N[0])
            if score == -torch.inf:  # the rules allow no token
                self.hypothesis = engine.finish([item], [[]])[0][0]
                return
            ids.append(index)
            scores.append(score)
            tops.append(engine.named_tokens(top_tokens(step.logp_NV, engine.options.top_tokens)[0]))
            stopped = bool(item.texts.stop) and item.phrases is not None and item.phrases.find_stop(ids) is not None
            ended = index == scorer.eos
            if stopped or ended or (item.open_end and len(ids) == item.limit):
                limited = len(ids) - ended == item.limit
                output = DecodedIds(tuple(ids), tuple(scores), sum(scores), limited)
                self.hypothesis = engine.finish([item], [[output]])[0][0]
                yield from self._pieces_until_end(shown)
                return
            certain = len(ids)
            if item.texts.stop and item.phrases is not None:
                certain = item.phrases.tokens_certain(ids) - 1  # the text of the last one may still change
            for n in range(shown, certain):
                yield self._piece(self._text(ids[: n + 1]), ids[n], scores[n], tops[n])
            shown = max(shown, certain)

    def _pieces_until_end(self, shown: int) -> Generator[Piece, None, None]:
        assert self.hypothesis is not None
        whole = self.hypothesis
        tops = whole.top_tokens or ((),) * len(whole.ids)
        for n in range(shown, len(whole.ids)):
            text = whole.text if n == len(whole.ids) - 1 else self._text(whole.ids[: n + 1])
            yield self._piece(text, whole.ids[n], whole.token_scores[n], tops[n])

    def _piece(self, text: str, index: int, score: float, top: TopTokens) -> Piece:
        new = text[len(self._sent) :]
        self._sent += new
        return Piece(new, self._codec.target_pieces([index])[0], index, score, top)

    def _text(self, ids: Sequence[int]) -> str:
        """The text of the first tokens, without final characters that a later token may change."""
        combining = self._engine.preparer.combining
        certain = len(ids)
        if combining:  # the next token may combine with the last character
            certain = max((position for position, token in enumerate(ids) if token not in combining), default=0)
        # A character whose bytes are incomplete decodes to replacement characters.
        return output_text(self._codec, self._item, ids[:certain]).rstrip("\N{REPLACEMENT CHARACTER}")
