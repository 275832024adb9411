"""The CTranslate2 engine: search by CTranslate2, with our tokenisation, limits and flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from regard.batch import TokenIds
from regard.convert.to_ctranslate2 import POSITIONS, library, names_of, open_translator, write_model
from regard.decode.engine import Engine, Scores
from regard.decode.hypothesis import (
    DecodedIds,
    Hypothesis,
    empty_hypothesis,
    output_text,
)
from regard.decode.request import Options, check_constraints, check_engine
from regard.decode.search_inputs import UNBOUNDED, Preparer, SearchInput
from regard.decode.torch_engine import TorchEngine
from regard.errors import UserError
from regard.files import scratch_directory
from regard.parallel.cores import cores
from regard.run import Run
from regard.text.codec import Example

# CTranslate2 stops as soon as patience * beam hypotheses have ended; ours continues while an open one is better.
# With 1.5, both gave the same outputs for 2,000 words; with less, CTranslate2 was worse than greedy search.
PATIENCE = 1.5
SCORE_CHANGING = ("sample", "no_repeat_ngram", "repetition_penalty")  # options that change its total scores

Inputs = dict[int, SearchInput]


def _load(run: Run, precision: str, workers: int, threads: int) -> Any:
    try:
        with scratch_directory() as directory:
            write_model(run, directory)
            return open_translator(directory, "int8" if precision == "int8" else "fp32", workers, threads)
    except OSError as error:
        raise UserError(f"cannot write the model for CTranslate2: {error.strerror or error}; set TMPDIR") from None


class CTranslate2Engine(Engine):
    """One run, decoded by CTranslate2: `workers` batches at once, each with `threads` threads.

    Scores that are not requested are NaN. Total scores need a forced pass only if options change the search scores.
    """

    name = "ctranslate2"

    def __init__(
        self,
        run: Run,
        options: Options | None = None,
        workers: int = 1,
        threads: int = 1,
        scores: Scores = "tokens",
        translator: Any = None,
    ) -> None:
        """`translator` is the loaded model of another engine of the same run, to share it."""
        self.run = run
        self.runs = [run]
        self.options = options or Options()
        self.scores = scores
        # Computed positions are written as a table of POSITIONS rows; one is needed for the end token.
        computed = any(s.position in ("none", "sinusoid", "sinusoid_halves") for s in run.config.stacks.values())
        self.preparer = Preparer([run], self.options, POSITIONS - 1 if computed else UNBOUNDED)
        check_engine("ctranslate2", self.options, workers=workers)
        self._source, self._target = names_of(run)
        self._id = {name: index for index, name in enumerate(self._target)}
        self._blocked = frozenset(self.preparer.blocked)
        self._search_options = self._make_search_options()
        self._by_length: dict[int, SearchInput] = {}
        if self.options.sample:
            library().set_random_seed(self.options.seed % 2**32)  # affects only workers that start later
        self.translator = translator or _load(run, self.options.precision, workers, threads)

    @classmethod
    def open(
        cls, runs: Sequence[Run], options: Options, scores: Scores, workers: int | None, threads: int | None
    ) -> CTranslate2Engine:
        """Check the options and open an engine, by default with one worker per core."""
        workers = workers or (1 if threads or options.sample else cores())
        check_engine("ctranslate2", options, runs=len(runs), device=runs[0].model.device.type, workers=workers)
        return cls(runs[0], options, workers, threads or 1, scores)

    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        results = [[empty_hypothesis(item.flags)] if item.flags else [] for item in inputs]
        searched = {i: item for i, item in enumerate(inputs) if not item.flags}
        outputs = self._search_all(searched)
        scores = self._score(searched, outputs)
        decoded = [
            [output._replace(token_scores=scores.get((i, output.ids), ())) for output in outputs[i]] for i in searched
        ]
        for i, row in zip(searched, self.finish(list(searched.values()), decoded), strict=True):
            results[i] = row
        return results

    def force(
        self, sources: Sequence[Sequence[TokenIds]], targets: Sequence[TokenIds]
    ) -> list[tuple[float, ...] | None]:
        return TorchEngine(self.runs).force(sources, targets)

    def texts(self, sources: Sequence[str]) -> list[list[str]]:
        """The output texts of plain sources, without scores and flags, which take extra time."""
        codec = self.run.codec
        rows = codec.encode_source([Example(source) for source in sources])
        inputs = [self._plain_input(source, row) for source, row in zip(sources, rows, strict=True)]
        outputs = self._search_all({i: item for i, item in enumerate(inputs) if not item.flags})
        return [
            [output_text(codec, item, output.ids) for output in outputs.get(i, ())] or [""]
            for i, item in enumerate(inputs)
        ]

    def _plain_input(self, source: str, row: list[int]) -> SearchInput:
        """The search input of a plain source, cached by length: preparing one takes 0.2 ms, decoding it 4 ms."""
        if (cached := self._by_length.get(len(row))) and source.strip():
            return replace(cached, sources=(row,))
        (item,) = self.prepare([source])
        if not item.flags:
            self._by_length[len(row)] = item
        return item

    def _search_all(self, inputs: Inputs) -> dict[int, list[DecodedIds]]:
        phrases = any(item.phrases is not None for item in inputs.values())
        seeds = self.options.sample and any(item.seed is not None for item in inputs.values())
        check_constraints("ctranslate2", ("require", "forbid", "stop") * phrases + ("seed",) * seeds)
        return self._search(inputs, strict=self.options.sample)

    def close(self) -> None:
        self.translator.unload_model()

    def _search(self, inputs: Inputs, strict: bool, exact: bool = False) -> dict[int, list[DecodedIds]]:
        """Search, then repeat the search for inputs whose outputs break a rule that CTranslate2 does not support.

        Blocked tokens are suppressed (`strict`) only where they occur, because CTranslate2 then renormalises, which
        changes the ranking. A batch has one limit; inputs that reach their own limit are searched again (`exact`).
        """
        searches = []
        for batch in self._batches(inputs, strict, exact or strict or self.options.sample):
            items = [inputs[i] for i in batch]
            limit = max(item.limit for item in items)
            searches.append((batch, limit, self._translate(items, limit, strict)))
        outputs: dict[int, list[DecodedIds]] = {}
        at_limit: Inputs = {}
        for batch, limit, answers in searches:
            for i, answer in zip(batch, answers, strict=True):
                item = inputs[i]
                outputs[i] = self._outputs(item, answer.result(), strict)
                if item.limit < limit and any(output.limited for output in outputs[i]):
                    at_limit[i] = item
        outputs |= self._search(at_limit, strict, exact=True) if at_limit else {}
        violations = {i: x for i, x in inputs.items() if not all(self._allowed(x, output) for output in outputs[i])}
        if strict:  # no other outputs exist
            return outputs | {i: [x for x in outputs[i] if self._allowed(item, x)] for i, item in violations.items()}
        return outputs | self._search(violations, strict=True) if violations else outputs

    def _batches(self, inputs: Inputs, strict: bool, exact: bool) -> list[list[int]]:
        """Batches of keys of inputs with similar limits, or equal limits (`exact`)."""
        if len(inputs) == 1:
            return [list(inputs)]
        groups: dict[Any, Inputs] = {}
        for i, item in inputs.items():
            prefix = item.prefix if strict and item.not_after_prefix else ()
            limit = item.limit if exact else item.limit.bit_length()
            groups.setdefault((limit, item.minimum, prefix), {})[i] = item
        return [batch for part in groups.values() for batch in self.preparer.batches(part)]

    def _allowed(self, item: SearchInput, output: DecodedIds) -> bool:
        """Whether an output has no blocked token, and the token after its prefix does not alter the prefix."""
        return self._blocked.isdisjoint(output.ids) and output.ids[len(item.prefix)] not in item.not_after_prefix

    def _make_search_options(self) -> dict[str, Any]:
        """The options that are the same for all batches."""
        options = self.options
        sampling = {
            "sampling_topk": min(options.top_k, self.run.config.target_vocab),
            "sampling_topp": options.top_p,
            "sampling_temperature": options.temperature,
        }
        return {
            "asynchronous": True,
            "beam_size": options.beam,
            "patience": PATIENCE,
            "num_hypotheses": options.nbest,
            "length_penalty": options.length_penalty,
            "repetition_penalty": options.repetition_penalty,
            "no_repeat_ngram_size": options.no_repeat_ngram,
            "max_input_length": 0,
            "return_end_token": True,
            "return_scores": self.scores == "totals",
            **(sampling if options.sample else {}),
        }

    def _translate(self, inputs: Sequence[SearchInput], limit: int, strict: bool) -> list[Any]:
        """Start the search of a batch, with outputs of at most `limit` tokens -> futures of the answers."""
        first = inputs[0]
        sequences = [[index] for index in sorted(self._blocked)]
        sequences += [[*first.prefix, index] for index in first.not_after_prefix]
        suppressed = [[self._target[i] for i in sequence] for sequence in sequences] if strict else None
        prefixes = [[self._target[i] for i in item.prefix] for item in inputs]
        answers: list[Any] = self.translator.translate_batch(
            self._source_names(inputs),
            prefixes if any(prefixes) else None,
            suppress_sequences=suppressed,
            min_decoding_length=first.minimum,
            max_decoding_length=limit + 1,  # the end token counts
            **self._search_options,
        )
        return answers

    def _outputs(self, item: SearchInput, answer: Any, strict: bool) -> list[DecodedIds]:
        """The outputs of an answer, with the end token, which CTranslate2 omits at the limit."""
        eos = self.run.config.ids.eos
        options = self.options
        outputs = []
        exact = not strict and not item.minimum and not item.prefix and self.scores == "totals"
        exact = exact and all(getattr(options, name) == Options.model_fields[name].default for name in SCORE_CHANGING)
        for rank, tokens in enumerate(answer.hypotheses):
            ids = tuple(map(self._id.__getitem__, tokens))
            ended = ids[-1:] == (eos,)
            total = answer.scores[rank] * len(ids) ** options.length_penalty if exact and ended else math.nan
            ids = ids if ended else (*ids[: item.limit], eos)
            if len(ids) > item.minimum:  # otherwise only the end was allowed
                outputs.append(DecodedIds(ids, (), total, limited=len(ids) - 1 >= item.limit))
        return outputs if options.sample else list({output.ids: output for output in outputs}.values())

    def _score(
        self, inputs: Inputs, outputs: dict[int, list[DecodedIds]]
    ) -> dict[tuple[int, tuple[int, ...]], tuple[float, ...]]:
        """The log-probability of every token of the outputs that need a forced pass."""
        pending = []
        for batch in self.preparer.batches(inputs) if self.scores != "none" else ():
            entries = [(i, output.ids) for i in batch for output in outputs[i] if math.isnan(output.value)]
            answers = self.translator.score_batch(
                self._source_names([inputs[i] for i, _ in entries]),
                [[self._target[index] for index in ids[:-1]] for _, ids in entries],
                max_input_length=0,
                asynchronous=True,
            )
            pending.append((entries, answers))
        return {
            entry: tuple(answer.result().log_probs)
            for entries, answers in pending
            for entry, answer in zip(entries, answers, strict=True)
        }

    def _source_names(self, inputs: Sequence[SearchInput]) -> list[list[str]]:
        return [[self._source[i] for i in item.sources[0]] for item in inputs]
