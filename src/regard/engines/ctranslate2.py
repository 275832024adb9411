"""Decoding by CTranslate2: text and ids, limits and flags are those of `decode.generate`, the search is another's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from regard.config import Config
from regard.convert.to_ctranslate2 import POSITIONS, Precision, library, names_of, open_translator, write
from regard.decode.generate import Decoder, nothing
from regard.decode.hypothesis import DecodedIds, Hypothesis, normalize
from regard.decode.options import Options
from regard.decode.request import Input
from regard.decode.scorer import SearchInput
from regard.errors import UserError
from regard.run import Run

HEARD = {
    "beam", "nbest", "length_penalty", "sample", "temperature", "top_k", "top_p", "seed", "prefix", "min_length",
    "max_length", "min_ratio", "max_ratio", "no_repeat_ngram", "repetition_penalty", "unknown", "max_source",
    "batch_tokens", "window",
}  # fmt: skip
# CTranslate2 stops at so many times as many ends as the beam is wide, even if something better is alive; ours goes on
# then. With this much patience both found the same for all of 2,000 words, with less CTranslate2 was worse than greedy.
PATIENCE = 1.5
CHANGED = ("sample", "no_repeat_ngram", "repetition_penalty")  # what makes the search's own sums others

Scores = Literal["symbols", "totals", "none"]


class Output(NamedTuple):
    """An output, and its log-probability if the search told it."""

    ids: tuple[int, ...]
    total: float | None = None


class Engine(Decoder):
    """A run that CTranslate2 answers with.

    `workers` batches are worked on at once, each by `threads` threads. Scores of tokens come from a pass of their own
    over the outputs. For totals alone that is needed only where the search ranked by something else than the model's
    probability. Scores that are not wanted are not numbers.
    """

    def __init__(
        self,
        run: Run,
        options: Options | None = None,
        precision: Precision = "fp32",
        workers: int = 1,
        threads: int = 1,
        scores: Scores = "symbols",
    ) -> None:
        super().__init__(run, options)
        self.scores = scores
        self._refuse(workers)
        names = names_of(run)
        self._source, self._target = names.source, names.target
        self._number = {name: index for index, name in enumerate(names.target)}
        self._never = frozenset(self.scorer.blocked.tolist())
        longest = _computed_positions(run.config)
        self.prepare.longest_source = min(self.prepare.longest_source, longest)
        self.prepare.longest_target = min(self.prepare.longest_target, longest)
        if self.options.sample:
            library().set_random_seed(self.options.seed % 2**32)  # heard by workers that are yet to start
        try:
            with TemporaryDirectory() as directory:
                write(run, Path(directory))
                self._translator = open_translator(Path(directory), precision, workers, threads)
        except OSError as error:
            raise UserError(f"cannot write what CTranslate2 reads: {error.strerror or error}; set TMPDIR") from None

    def _refuse(self, workers: int) -> None:
        """Whatever would be ignored is an error."""
        for name, field in Options.model_fields.items():
            if name not in HEARD and getattr(self.options, name) != field.default:
                raise UserError(
                    f"{name}: the engine ctranslate2 cannot do this; leave it out, or use the engine regard"
                )
        if self.options.sample and workers > 1:
            raise UserError(
                f"workers: with {workers} of them the engine ctranslate2 would draw other samples each time; use 1"
            )

    def __call__(self, inputs: Sequence[Input]) -> list[list[Hypothesis]]:
        """The outputs for some inputs."""
        prepared = self.prepare(inputs)
        results = [[] if isinstance(item, SearchInput) else [nothing(item)] for item in prepared]
        tasks = {i: item for i, item in enumerate(prepared) if isinstance(item, SearchInput)}
        if any(task.phrases is not None for task in tasks.values()):
            raise UserError("require, forbid: the engine ctranslate2 cannot do this; use the engine regard")
        outputs = self._find(tasks, strict=self.options.sample)
        scores = self._scored(tasks, outputs)
        for i, task in tasks.items():
            results[i] = self._hypotheses(task, [self._told(task, x, scores.get((i, x), ())) for x in outputs[i]])
        self._name_other_cuts(results)
        return results

    def _find(self, tasks: dict[int, SearchInput], strict: bool) -> dict[int, list[Output]]:
        """The outputs for some tasks. What is never allowed is ruled out where it came up, by `strict`.

        Ruling it out changes what CTranslate2 ranks by: there the rest is made to sum to one first. And what may not
        follow a prefix can only be ruled out behind the same tokens anywhere.
        """
        alike: dict[Any, dict[int, SearchInput]] = {}
        for i, task in tasks.items():  # limits are told once per batch
            alike.setdefault((task.limit, task.minimum, task.prefix if strict and task.apart else ()), {})[i] = task
        batches = [batch for part in alike.values() for batch in self._batches(part)]
        searches = [(batch, self._search([tasks[i] for i in batch], strict)) for batch in batches]
        found: dict[int, list[Output]] = {}
        for batch, answers in searches:
            for i, answer in zip(batch, answers, strict=True):
                found[i] = self._outputs(tasks[i], answer.result(), strict)
        wrong = {i for i, task in tasks.items() if not all(self._allowed(task, output) for output in found[i])}
        if strict:  # there was nothing else
            return found | {i: [x for x in found[i] if self._allowed(tasks[i], x)] for i in wrong}
        return found | self._find({i: tasks[i] for i in wrong}, strict=True) if wrong else found

    def _allowed(self, task: SearchInput, output: Output) -> bool:
        """Whether there is no mark in an output, and what follows its prefix leaves the prefix as it is."""
        return self._never.isdisjoint(output.ids) and output.ids[len(task.prefix)] not in task.apart

    def _search(self, tasks: Sequence[SearchInput], strict: bool) -> list[Any]:
        """Have outputs searched for; the answers are waited for when they are needed."""
        options, first = self.options, tasks[0]
        never = [[index] for index in sorted(self._never)] + [[*first.prefix, index] for index in first.apart]
        drawn = {
            "sampling_topk": min(options.top_k, self.scorer.vocab),
            "sampling_topp": options.top_p,
            "sampling_temperature": options.temperature,
        }
        answers: list[Any] = self._translator.translate_batch(
            self._named(tasks),
            [[self._target[i] for i in task.prefix] for task in tasks] if any(task.prefix for task in tasks) else None,
            asynchronous=True,
            beam_size=options.beam,
            patience=PATIENCE,
            num_hypotheses=options.nbest,
            length_penalty=options.length_penalty,
            repetition_penalty=options.repetition_penalty,
            no_repeat_ngram_size=options.no_repeat_ngram,
            suppress_sequences=[[self._target[i] for i in sequence] for sequence in never] if strict else None,
            min_decoding_length=first.minimum,
            max_decoding_length=first.limit + 1,  # its end is a token too
            max_input_length=0,
            return_end_token=True,
            return_scores=self.scores == "totals",
            **(drawn if options.sample else {}),
        )
        return answers

    def _outputs(self, task: SearchInput, answer: Any, strict: bool) -> list[Output]:
        """The outputs of an answer, each with its end. What had none by the limit is given one there."""
        eos, options, outputs = self.scorer.eos, self.options, []
        plain = not strict and not task.minimum and not task.prefix and self.scores == "totals"
        plain = plain and all(getattr(options, name) == Options.model_fields[name].default for name in CHANGED)
        for rank, tokens in enumerate(answer.hypotheses):
            ids = tuple(self._number[token] for token in tokens)
            ended = ids[-1:] == (eos,)
            total = answer.scores[rank] * len(ids) ** options.length_penalty if plain and ended else None
            output = Output(ids if ended else (*ids[: task.limit], eos), total)
            if len(output.ids) > task.minimum:  # else nothing was allowed but the end
                outputs.append(output)
        return outputs if options.sample else list({output.ids: output for output in outputs}.values())

    def _scored(
        self, tasks: dict[int, SearchInput], outputs: dict[int, list[Output]]
    ) -> dict[tuple[int, Output], tuple[float, ...]]:
        """The model's log-probability of every token of the outputs for which that is to be found out."""
        asked = []
        for batch in self._batches(tasks) if self.scores != "none" else ():
            places = [(i, output) for i in batch for output in outputs[i] if output.total is None]
            answers = self._translator.score_batch(
                self._named([tasks[i] for i, _ in places]),
                [[self._target[index] for index in output.ids[:-1]] for _, output in places],
                max_input_length=0,
                asynchronous=True,
            )
            asked.append((places, answers))
        return {
            place: tuple(answer.result().log_probs)
            for places, answers in asked
            for place, answer in zip(places, answers, strict=True)
        }

    def _told(self, task: SearchInput, output: Output, token_scores: tuple[float, ...]) -> DecodedIds:
        total = math.nan if output.total is None else output.total
        return DecodedIds(
            output.ids,
            token_scores,
            sum(token_scores) if token_scores else total,
            limited=len(output.ids) - 1 == task.limit,
        )

    def _hypothesis(self, task: SearchInput, found: DecodedIds) -> Hypothesis:
        hypothesis = super()._hypothesis(task, found)
        if found.token_scores:
            return hypothesis
        normalized = normalize(found.value, len(found.ids), self.options.length_penalty)
        return replace(hypothesis, score=found.value, normalized=normalized)

    def _named(self, tasks: Sequence[SearchInput]) -> list[list[str]]:
        return [[self._source[i] for i in task.sources[0]] for task in tasks]


def _computed_positions(config: Config) -> int:
    """Most tokens, the end not counted, for which the positions that we compute were written down."""
    computed = any(stack.position in ("none", "sinusoid", "sinusoid_halves") for stack in config.stacks.values())
    return POSITIONS - 1 if computed else 10**9
