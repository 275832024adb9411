"""The preparer: tokenises requests once into inputs of the search, with their limits and constraints."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from unicodedata import normalize

import numpy as np

from regard.batch import by_length
from regard.config import Config
from regard.decode.constraints import (
    BOUNDARY,
    MAX_REQUIRED,
    MAX_STOP,
    NEVER,
    Letters,
    Phrases,
    SearchInput,
    Speller,
    combining_tokens,
    make_phrases,
)
from regard.decode.request import Input, Options, Request
from regard.errors import UserError, plural
from regard.run import Run
from regard.text.codec import Example

LENGTH_RATIO, LENGTH_EXTRA = 3, 50  # of the default limit: 3 times the source and 50 more
CONTINUATION_LENGTH = 100  # tokens that a language model adds at most by default
MAX_CHARACTERS = 1_000_000  # of a source; a longer one has too many tokens in any case
CACHED_PHRASES = 256  # automata kept for lines with the same phrases
UNBOUNDED = 10**9  # positions of a model without a table of them

Requirements = tuple[tuple[str, ...], ...]


class Preparer:
    """Tokenises requests for some runs, and checks that their constraints can be met.

    Constraints that no line can meet raise a UserError at once; those of a single line flag its input.
    """

    def __init__(self, runs: Sequence[Run], options: Options, max_tokens: int = UNBOUNDED) -> None:
        """`max_tokens` is the most that the engine can read or write, the end not counted, beside the runs' limits."""
        self.runs, self.options = runs, options
        self.config = check_ensemble(runs)
        self.codec, self.continues = runs[0].codec, not runs[0].task.seq2seq
        self.max_source, self.max_target = (min(limit, max_tokens) for limit in position_limits(runs))
        for name in runs[0].task.excluded_options:
            if getattr(options, name):
                raise UserError(f"{name}: a language model has no source to align with; leave it out")
        self.blocked = sorted({index for run in runs for index in run.never_produced(options.unknown)})
        self.combining = combining_tokens(self.codec.target)
        self._phrases: dict[tuple[Requirements, tuple[str, ...], tuple[str, ...]], Phrases] = {}
        self._check_options()

    def __call__(self, inputs: Sequence[Input]) -> list[SearchInput]:
        """An input of the search for every request."""
        requests = [
            Request(x) if isinstance(x, str) else Request(x.source, x.features) if isinstance(x, Example) else x
            for x in inputs
        ]
        short = [i for i, request in enumerate(requests) if len(request.source) <= MAX_CHARACTERS]
        examples = {i: Example(requests[i].source, features=requests[i].features) for i in short}
        sources = zip(*(encode(run, list(examples.values())) for run in self.runs), strict=True)
        encoded = dict(zip(short, sources, strict=True))
        prepared = [self._prepare(request, encoded.get(i)) for i, request in enumerate(requests)]
        for i, example in examples.items():
            if unknown := self.codec.unknown_tokens(example, encoded[i][0]):
                prepared[i] = replace(prepared[i], unknown=tuple(unknown))
        return prepared

    def batches(self, inputs: Mapping[int, SearchInput]) -> Iterator[list[int]]:
        """The keys of inputs that are decoded together: not flagged, of similar length, within `batch_tokens`."""
        keys = [key for key, item in inputs.items() if not item.flags]
        for batch in by_length([self._size(inputs[key]) for key in keys], self.options.batch_tokens):
            yield [keys[j] for j in batch]

    def _size(self, item: SearchInput) -> int:
        """What an input counts in a batch: its tokens, or its share of the table of next tokens if that is more."""
        share = self.config.target_vocab // (4096 if item.phrases is None else 1024)
        tokens = max(map(len, item.sources)) + (item.limit if self.continues else 0)
        return (self.options.rows + item.stages) * max(share, tokens)

    def _prepare(self, request: Request, sources: tuple[list[int], ...] | None) -> SearchInput:
        if sources is None:
            return SearchInput((), flags={"too_long": f"the source has {len(request.source)} characters"})
        if not (request.source.strip() or self.continues):
            return SearchInput(sources, flags={"empty": "the source is empty"})
        if problem := self.codec.features_problem(Example(request.source, features=request.features)):
            return SearchInput(sources, flags={"error": problem})
        length = max(map(len, sources)) - (not self.continues)
        if flags := too_long("source", length, self.max_source, self.options.max_source):
            return SearchInput(sources, flags=flags)
        try:
            length = max(map(len, sources)) if self.continues else len(sources[0]) - 1
            minimum, limit = self._lengths(length, request)
            prefix, phrases = self._constraints(request, limit)
        except UserError as error:  # of this line: options that no line can meet were refused before
            return SearchInput(sources, flags={"unsatisfied": str(error)})
        key = zlib.crc32(np.asarray(sources[0], dtype=np.int64).tobytes())
        combining = self.combining if prefix else ()
        return SearchInput(
            sources, limit, minimum, tuple(prefix), combining, phrases, self._stops(request), key, request.seed,
            open_end=self.continues,
        )  # fmt: skip

    def _check_options(self) -> None:
        """Refuse options that no line can meet, however long it is."""
        most = self.max_target - self.continues
        if self.options.min_length > most:
            raise UserError(
                f"min_length: an output of at least {plural(self.options.min_length, 'token')} is asked for where the"
                f" model has learned positions for {most}"
            )
        self._constraints(Request(""), min(most, self.options.max_length or most))

    def _lengths(self, source: int, request: Request) -> tuple[int, int]:
        """Fewest and most output tokens for a source of so many."""
        options = self.options
        fewest = options.min_length if request.min_length is None else request.min_length
        most = options.max_length if request.max_length is None else request.max_length
        minimum = max(fewest, math.ceil(options.min_ratio * source))
        limits = [self.max_target - source if self.continues else self.max_target]
        if most is not None:
            limits.append(most)
        if options.max_ratio is not None:
            limits.append(max(1, math.ceil(options.max_ratio * source)))
        if len(limits) == 1:  # the default limit gives way to the minimum
            usual = self.runs[0].generation.max_length
            default = CONTINUATION_LENGTH if self.continues else LENGTH_RATIO * source + LENGTH_EXTRA
            if usual is not None:
                default = usual if self.continues else min(usual, default)
            limits.append(max(default, minimum))
        if minimum > min(limits):
            raise UserError(
                f"min_length, min_ratio: an output of at least {plural(minimum, 'token')} is asked for where the"
                f" limit is {min(limits)} (max_length, max_ratio, or the model's learned positions)"
            )
        return minimum, min(limits)

    def _constraints(self, request: Request, limit: int) -> tuple[list[int], Phrases | None]:
        """The prefix and the phrases of an output of at most `limit` tokens."""
        text = request.prefix or self.options.prefix
        prefix = self.codec.target.encode([text])[0] if text else []
        if unknown := self.codec.target.unknown_tokens(text) if text else []:
            raise UserError(f"prefix {text!r}: {unknown[0]!r} is not in the target vocabulary")
        if len(prefix) > limit:
            raise UserError(
                f"prefix {text!r}: its {plural(len(prefix), 'token')} are more than the output may have, {limit}"
                " (max_length)"
            )
        at = self.options.alternatives_at
        if at is not None and at < len(prefix):
            raise UserError(
                f"alternatives_at {at} lies within the prefix {text!r}, which has {plural(len(prefix), 'token')}"
            )
        if repeated := self._repeated(prefix):
            raise UserError(f"prefix {text!r}: {repeated!r} comes twice in it, which no_repeat_ngram rules out")
        any_of = (self.options.require_any,) if self.options.require_any else ()
        require = tuple(dict.fromkeys((*((phrase,) for phrase in self.options.require), *any_of, *request.require)))
        forbid = tuple(dict.fromkeys((*self.options.forbid, *request.forbid)))
        stop = self._stops(request)
        if not require and not forbid and not stop:
            return prefix, None
        if (require, forbid, stop) not in self._phrases:
            if len(self._phrases) >= CACHED_PHRASES:
                self._phrases.clear()
            self._phrases[require, forbid, stop] = self._make_phrases(require, forbid, stop)
        phrases = self._phrases[require, forbid, stop]
        if phrases.find_stop(prefix):
            raise UserError(f"prefix {text!r} contains a stop string ({', '.join(map(repr, stop))})")
        needed = phrases.tokens_needed(prefix, self.combining if prefix else ())
        if self.combining and any(normalize("NFC", phrase) in normalize("NFC", text) for phrase in forbid):
            needed = None  # the automaton recognises the last character of the prefix only at the next token
        if needed is None:
            raise UserError(f"prefix {text!r} contains a phrase that forbid rules out")
        required = f"require {', '.join(' or '.join(map(repr, each)) for each in require)}"
        if needed >= NEVER:
            raise UserError(
                f"{required}: no output contains this: some of it is not in the target vocabulary, or forbid or stop"
                " rules it out"
            )
        if len(prefix) + needed > limit:
            raise UserError(
                f"{required}: this needs at least {plural(len(prefix) + needed, 'token')} where an output has at most"
                f" {limit} (max_length)"
            )
        return prefix, phrases

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self.codec.target, self.config.target_vocab, self.blocked, self.config.ids.eos)

    def _stops(self, request: Request) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.options.stop, *request.stop)))

    def _repeated(self, prefix: Sequence[int]) -> str:
        """The first tokens of a prefix that `no_repeat_ngram` does not allow, as text."""
        size = self.options.no_repeat_ngram
        grams = [tuple(prefix[i : i + size]) for i in range(len(prefix) - size + 1)] if size else []
        return next((self.codec.decode_target(gram) for i, gram in enumerate(grams) if gram in grams[:i]), "")

    def _make_phrases(self, require: Requirements, forbid: tuple[str, ...], stop: tuple[str, ...]) -> Phrases:
        """The automaton of these phrases."""
        if len(require) > MAX_REQUIRED:
            raise UserError(f"require: at most {MAX_REQUIRED} phrases at once, not {len(require)}")
        target, speller = self.codec.target, self._speller
        for option, phrases in (("require", [x for each in require for x in each]), ("forbid", forbid), ("stop", stop)):
            if empty := [phrase for phrase in phrases if not speller.spell(phrase)]:
                raise UserError(f"{option} {empty[0]!r}: there is nothing in this phrase")
        if speller.spaced:
            for each in require:
                unknown = [target.unknown_tokens(phrase) for phrase in each]
                if all(unknown):
                    raise UserError(f"require {each[0]!r}: {unknown[0][0]!r} is not in the target vocabulary")
            require = tuple(tuple(x for x in each if not target.unknown_tokens(x)) for each in require)
            forbid, stop = (tuple(x for x in each if not target.unknown_tokens(x)) for each in (forbid, stop))
        letters = [[speller.spell(phrase) for phrase in each] for each in require]
        ends = {string: speller.spell(string) for string in stop}
        for string, end in ends.items():
            if len(end) > MAX_STOP:
                raise UserError(f"stop {string[:20]!r}...: at most {MAX_STOP} letters, not {len(end)}")
            for phrase, word in (
                (x, y) for p, w in zip(require, letters, strict=True) for x, y in zip(p, w, strict=True)
            ):
                if _overlap(word, end):
                    raise UserError(f"require {phrase!r} and stop {string!r}: a part of one begins the other")
        return make_phrases(letters, [*map(speller.spell, forbid)], speller.spelling, list(ends.values()))


def _overlap(required: Letters, stop: Letters) -> bool:
    """Whether a phrase may end within a stop string, or hold it: then it would be cut away with it, or end it early."""
    if required[-1:] == (BOUNDARY,):  # which begins the next character too
        required = required[:-1]
    tails = (required[start : start + len(stop)] for start in range(len(required)))
    inside = any(stop[start : start + len(required)] == required for start in range(len(stop)))
    return inside or any(tail == stop[: len(tail)] for tail in tails)


def encode(run: Run, examples: Sequence[Example]) -> list[list[int]]:
    """The ids that a run reads before it answers: sources, or the prompts of a language model, without an end."""
    if run.task.seq2seq:
        return run.codec.encode_source(examples)
    before, _ = run.config.ids.around(run.config.frame)
    rows = run.codec.target.encode([example.source for example in examples])
    return [[*before, *row] or [run.config.start_id] for row in rows]


def check_ensemble(runs: Sequence[Run]) -> Config:
    """Refuse runs that cannot decode together -> the config of the first, which they share as far as outputs go."""
    if not runs:
        raise UserError("no run to generate with")
    first = runs[0]
    for run in runs:
        if "decoder" not in run.task.stacks:
            raise UserError("only a run with a decoder can generate or score a text; this one has an encoder alone")
        if run.task.seq2seq != first.task.seq2seq:
            raise UserError("ensemble: a language model and a model that reads a source cannot answer together")
        ours, theirs = ((x.config.target_vocab, x.config.ids, x.codec.target.to_json()) for x in (run, first))
        if ours != theirs:
            raise UserError(
                f"ensemble: {run.path} has another target vocabulary than {first.path};"
                " train both with the same target tokens"
            )
    return first.config


def position_limits(runs: Sequence[Run]) -> tuple[int, int]:
    """Most source and target tokens, the end not counted, for which every run has positions.

    A language model has so many for both together, and reads at least one token less than that.
    """
    stacks = [run.config.stacks for run in runs]
    decoder = min(stack["decoder"].max_positions or UNBOUNDED for stack in stacks)
    if not runs[0].task.seq2seq:
        return decoder - 1, decoder
    return min(stack["encoder"].max_positions or UNBOUNDED for stack in stacks) - 1, decoder - 1


def out_of_memory(what: str, tokens: int) -> dict[str, str]:
    """A flag for what does not fit into memory even alone."""
    return {"out_of_memory": f"there is not enough memory for the {what} of {plural(tokens, 'token')}, even alone"}


def too_long(side: str, length: int, positions: int, most: int) -> dict[str, str]:
    """A flag if a side of so many tokens is longer than the positions of a model, or than `most` (max_source)."""
    if length > min(positions, most):
        learned = f"the {positions} that fit the model's learned positions"
        bound = learned if positions < most else f"{most} (max_source)"
        return {"too_long": f"the {side} has {length} tokens, more than {bound}"}
    return {}
