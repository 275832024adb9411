"""The torch engine: our own search, in one process or in several."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.batch import TokenIds, in_parts, windows
from regard.decode.cross_attention import align_weights
from regard.decode.engine import Engine, TopIds
from regard.decode.ensemble import Scorer
from regard.decode.forced import force, force_top
from regard.decode.hypothesis import Alignment, Hypothesis, empty_hypothesis
from regard.decode.phrases import PhraseTexts
from regard.decode.request import HeadIndex, Input, Options, check_engine
from regard.decode.scoring import Pair, Scored, score_pairs
from regard.decode.search import Sampler, greedy, make_rules, search, steps, top_tokens
from regard.decode.search_inputs import Preparer, SearchInput, out_of_memory
from regard.device import tune_allocator
from regard.errors import UserError
from regard.nn.primitives import PackedWeights
from regard.parallel import children
from regard.parallel.children import Child, ChildDied, answer_requests
from regard.parallel.cores import cores
from regard.parallel.messages import Channel, Message
from regard.run import Run
from regard.text.tokenizer import PARALLELISM_VARIABLE

FORK_SECONDS = 0.1  # until a forked child starts to decode


class TorchEngine(Engine):
    """One run or an ensemble, decoded by our own search with torch."""

    def __init__(self, runs: Run | Sequence[Run], options: Options | None = None) -> None:
        self.options = options or Options()
        check_engine("torch", self.options)
        self.runs = [runs] if isinstance(runs, Run) else list(runs)
        self.preparer = Preparer(self.runs, self.options)
        models = [run.model for run in self.runs]
        packed = [run.layouts.setdefault("torch", PackedWeights()) for run in self.runs]
        self.scorer = Scorer(models, self.options.weights, self.preparer.blocked, self.options.precision, packed)

    @property
    def streams(self) -> bool:
        return True

    def cancel_by(self, check: Callable[[], None] | None) -> None:
        self.preparer.before_input = check
        self.scorer.before_step = check

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

    def force_attention(
        self, sources: Sequence[TokenIds], outputs: Sequence[TokenIds], heads: Sequence[HeadIndex]
    ) -> list[NDArray[np.floating]]:
        return align_weights(self.runs[0].model, sources, outputs, heads, self.options.batch_tokens)

    def force_top(self, sources: Sequence[Sequence[TokenIds]], outputs: Sequence[TokenIds]) -> list[list[TopIds]]:
        return force_top(self.scorer, sources, outputs, self.options.top_tokens, self.options.batch_tokens)

    def force(
        self, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds]
    ) -> list[tuple[float, ...] | None]:
        return force(self.scorer, sources, targets, self.options.batch_tokens)

    def steps(self, item: SearchInput) -> Iterator[tuple[int, float, TopIds]]:
        rules = make_rules(self.scorer, [item], self.options, one_path=True)
        choose = Sampler([item], 1, self.options, self.scorer.device) if self.options.samples else greedy
        loop = steps(self.scorer, [item], rules, choose)
        while True:
            with torch.inference_mode():  # only around the step, not around the caller's code between steps
                step = next(loop, None)
            if step is None or float(step.scores_N[0]) == -torch.inf:  # the rules allow no token
                return
            yield int(step.tokens_N[0]), float(step.scores_N[0]), top_tokens(step.logp_NV, self.options.top_tokens)[0]


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


def score(runs: Run | Sequence[Run], pairs: Iterable[Pair], options: Options | None = None) -> Iterator[Scored]:
    """Score pairs, in order; several runs form an ensemble. Uses only the options of weights and batching."""
    options = options or Options()
    runs = [runs] if isinstance(runs, Run) else list(runs)
    return score_pairs(runs, pairs, options, lambda *rows: TorchEngine(runs, options).force(*rows))


class WorkerPool(Engine):
    """A torch engine that shares its batches with up to `workers` - 1 child processes; the outputs stay the same.

    Children are forked where possible, otherwise spawned. Unless `always` is set, they are started only if decoding
    the remaining batches here would take more than twice the start-up time. This process decodes in the meantime.
    """

    def __init__(self, engine: TorchEngine, workers: int | None = None, always: bool = False) -> None:
        """The default of `workers` is one per core."""
        self.engine = engine
        self.runs = engine.runs
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

    def force(
        self, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds]
    ) -> list[tuple[float, ...] | None]:
        return self.engine.force(sources, targets)

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
