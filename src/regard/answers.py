"""Answers: what runs give for inputs with options, for the command line, the library and the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.decode import native
from regard.decode.engine import Engine, Scores, TokenStream
from regard.decode.hypothesis import Hypothesis, unknown_flags
from regard.decode.request import ENGINES, EngineChoice, Input, Options, check_engine
from regard.decode.scoring import Pair, Scored, score_pairs
from regard.decode.search_inputs import SearchInput
from regard.errors import NO_TORCH, UserError, lacks_torch, plural
from regard.parallel.cores import cores
from regard.run import Run
from regard.text.codec import Codec, Example

if TYPE_CHECKING:  # these import torch, which the native engine does not need
    from regard.decode.encoder_only import Classification, Embeddings
    from regard.inspect.trace import Trace

EMBED_TOKENS = 4096  # in a batch of texts to embed
SMALL_MODEL = 20_000_000  # parameters
Result = dict[str, Any]


class Generated(NamedTuple):
    """The outputs for an input, best first."""

    item: SearchInput
    hypotheses: list[Hypothesis]


class Answerer:
    """Runs, options and an engine that answer inputs; several runs are an ensemble."""

    def __init__(self, runs: Sequence[Run], options: Options | None = None, engine: Engine | None = None) -> None:
        """Without an engine, one is opened in this process when outputs or scores are requested."""
        self.runs = runs
        self.run = runs[0]
        self.options = options or Options()
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The engine that decodes, opened on first use."""
        if self._engine is None:
            self._engine = open_engine(self.runs, self.options, workers=1)
        return self._engine

    def generate(self, inputs: Sequence[Input]) -> list[Generated]:
        """The outputs for every input, best first."""
        items = self.engine.prepare(inputs)
        rows = self.engine.decode(items)
        return list(map(Generated, items, rows))

    def texts(self, sources: Sequence[str]) -> list[list[str]]:
        """The output texts of plain sources; an engine may leave out what takes extra time."""
        return self.engine.texts(sources)

    def stream(self, item: Input) -> TokenStream:
        """The output for one input, token by token."""
        engine = self.engine
        if not engine.streams:
            check_engine(engine.name, Options(), stream=True)
            raise UserError(f"stream: {self.run.path}, which is {self.run.task.model}, does not decode token by token")
        (prepared,) = engine.prepare([item])
        return TokenStream(engine, prepared)

    def score(self, pairs: Iterable[Pair]) -> Iterator[Scored]:
        """The log-probability of each target given its source."""
        if self.engine.name == "ctranslate2":
            raise UserError("score: the engine ctranslate2 does not score given targets; use native or torch")
        return score_pairs(self.runs, pairs, self.options, lambda *rows: self.engine.force(*rows))

    def classify(self, inputs: Sequence[str | Example] | NDArray[Any]) -> list[Classification]:
        """The labels of texts or images."""
        from regard.decode.encoder_only import classify, classify_images

        if isinstance(inputs, np.ndarray):
            return classify_images(self.run, inputs)
        return classify(self.run, inputs, self.options.batch_tokens, self.options.max_source)

    def embed(self, texts: Sequence[str], average_windows: bool = False, normalize: bool = True) -> Embeddings:
        """A vector for each text."""
        from regard.decode.encoder_only import embed

        return embed(self.run, texts, self.options.batch_tokens, average_windows, normalize)

    def trace(self, example: Example, target: str | None = None, beam: int = 5, more: int = 0) -> Trace:
        """All attention maps of an example, with `target` or the run's best output."""
        from regard.inspect.trace import trace_pair, trace_text

        if problem := self.run.codec.features_problem(example):
            raise UserError(problem)
        if not self.run.task.seq2seq:
            return trace_text(self.run, example.source, target or example.target, more, example.features)
        if more:
            raise UserError(f"{self.run.path}: only a language model continues a text (more={more})")
        return trace_pair(self.run, example, target, beam)

    def close(self) -> None:
        """Release the engine."""
        if self._engine is not None:
            self._engine.close()


def usable_options(options: Options, run: Run, report: Callable[[str], None]) -> Options:
    """The options with a precision that works on the device of a run."""
    if options.precision != "bf16":
        return options
    from regard.device import usable_precision

    return options.model_copy(update={"precision": usable_precision("bf16", run.model.device, report)})


def load_models(runs: Sequence[Run], threads: int | None = None) -> None:
    """Load the weights of runs and set the number of threads of torch; small models are fastest with one."""
    import torch

    default_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # starting threads takes longer than copying the weights
    for run in runs:
        run.load_model()
    if threads is not None or not is_small(runs):
        torch.set_num_threads(threads or default_threads)


def open_engine(
    runs: Sequence[Run],
    options: Options,
    engine: EngineChoice = "auto",
    scores: Scores = "tokens",
    workers: int | None = None,
    threads: int | None = None,
    tune: bool = True,
) -> Engine:
    """The engine for a run or an ensemble; without `workers` as many as pay off. `auto` prefers the native engine.

    Unless `tune` is set, the number of threads of torch, a setting of the whole process, is not changed.
    """
    problem = "" if engine == "native" else native.problem(runs, options) if engine == "auto" else engine
    if not problem:
        return native.NativeEngine(runs, options, workers or threads)
    if engine == "auto" and options.precision not in ENGINES["torch"].precisions:
        raise UserError(f"precision: {options.precision} needs the engine native or ctranslate2; {problem}")
    try:
        if not tune:
            for run in runs:
                run.load_model()
        return _open_torch(runs, options, engine, scores, workers, threads)
    except ModuleNotFoundError as error:
        if not lacks_torch(error):
            raise
        raise UserError(f"engine {engine} {NO_TORCH}" if engine != "auto" else f"{problem}; this {NO_TORCH}") from None


def _open_torch(
    runs: Sequence[Run],
    options: Options,
    engine: EngineChoice,
    scores: Scores,
    workers: int | None,
    threads: int | None,
) -> Engine:
    """An engine that needs torch; without `workers` as many processes as pay off."""
    import torch

    from regard.decode.ctranslate2 import CTranslate2Engine
    from regard.decode.encoder_only import MaskFiller
    from regard.decode.torch_engine import TorchEngine, WorkerPool

    if any(not run.loaded for run in runs):
        load_models(runs, threads)
    if "embed" in runs[0].task.answers:
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
    return sum(run.weights.size for run in runs) < SMALL_MODEL


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


def truncation(truncated: Mapping[int, int], limit: int) -> str:
    """A remark on truncated texts: their tokens by index, and the tokens that the model reads."""
    named = ", ".join(f"texts[{i}] has {tokens}" for i, tokens in list(truncated.items())[:3])
    more = ", ..." if len(truncated) > 3 else ""
    return (
        f"embed: {plural(len(truncated), 'text')} truncated to the {plural(limit, 'token')} that the model reads at"
        f" once ({named}{more}); average_windows=True reads all of them"
    )
