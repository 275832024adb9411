"""The preparer turns requests into search inputs: token ids with limits and constraints."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from regard.batch import by_length
from regard.config import Config
from regard.decode.phrases import (
    BOUNDARY,
    NEVER,
    Letters,
    Phrases,
    PhraseTexts,
    Speller,
    is_combining,
    make_phrases,
)
from regard.decode.request import CONTINUATION_LENGTH, LENGTH_EXTRA, LENGTH_RATIO, Input, Options, Prompt, Request
from regard.errors import UserError, plural
from regard.run import Run
from regard.text.codec import Example

if TYPE_CHECKING:
    from regard.decode.hypothesis import DecodedIds

MAX_CHARACTERS = 1_000_000  # of a source; a longer one always has too many tokens
MAX_REQUIRED = 10  # requirements at once; the search distinguishes all subsets of them
MAX_STOP = 1000  # letters of all stop strings
MAX_TABLE = 2**25  # entries of an automaton: its letters times the target tokens, 9 bytes each
SUBSET_COST = 64  # of a subset of requirements, in columns of this table
MAX_STAGES = 48  # stages of progress towards required phrases that a beam keeps apart
MAX_CACHED_PHRASES = 256  # automata, which inputs with the same phrases share
TABLE_PER_TOKEN = 4096  # entries of an automaton that take as much of a batch as a source token
UNBOUNDED = 10**9  # positions of a model without a position table


@dataclass(frozen=True)
class SearchInput:
    """A source to decode, in token ids. An input with flags is not decoded; its output is empty."""

    sources: tuple[Sequence[int], ...]  # per run, with end token; for a language model the prompt, never empty
    limit: int = 0  # most output tokens, the end token not counted
    minimum: int = 0  # fewest output tokens
    prefix: tuple[int, ...] = ()
    not_after_prefix: tuple[int, ...] = ()  # tokens that would change the last character of the prefix
    texts: PhraseTexts = PhraseTexts()  # noqa: RUF009  immutable
    phrases: Phrases | None = None  # the automaton of the texts
    stages: int = 0  # of progress until all required phrases are met
    key: int = 0  # of its random numbers, together with the seed
    seed: int | None = None  # None: the seed of the options
    open_end: bool = False  # a continuation, which stops at its limit without an end token
    unknown: tuple[str, ...] = ()  # tokens and features of the source outside the vocabulary
    flags: dict[str, str] = field(default_factory=dict)  # name -> reason


# The latest automata of all preparers, with at most MAX_TABLE entries together.
_automata: dict[tuple[object, PhraseTexts], Phrases] = {}


class Preparer:
    """Tokenises requests for an ensemble of runs, and flags requests whose constraints cannot be satisfied."""

    def __init__(self, runs: Sequence[Run], options: Options, max_tokens: int = UNBOUNDED) -> None:
        """`max_tokens` is a limit of the engine on source and target, in addition to the limits of the runs."""
        self.runs = runs
        self.options = options
        self.config = check_ensemble(runs)
        if options.weights and len(options.weights) != len(runs):
            raise UserError(f"weights: {len(options.weights)} given for {plural(len(runs), 'run')}; give one for each")
        self.codec = runs[0].codec
        self.continues = "encoder" not in self.config.stacks
        self.max_source, self.max_target = (min(limit, max_tokens) for limit in position_limits(runs))
        for name in runs[0].task.excluded_options:
            if getattr(options, name):
                raise UserError(f"{name}: a language model has no source to align with; leave it out")
        self.blocked = sorted({index for run in runs for index in run.never_produced(options.unknown)})
        target = self.codec.target
        pieces = target.pieces(range(target.size)) if target.scheme == "nfd" else []
        # Tokens that can change the character before them.
        self.combining = tuple(i for i, piece in enumerate(pieces) if i not in target.special and is_combining(piece))
        self.before_input: Callable[[], None] | None = None  # may raise to end the preparation
        self._key = object()  # of its cached automata
        self._check_options()

    def __call__(self, inputs: Sequence[Input]) -> list[SearchInput]:
        requests = [
            Request(x) if isinstance(x, str) else Request(x.source, x.features) if isinstance(x, Example) else x
            for x in inputs
        ]
        short = [i for i, request in enumerate(requests) if len(request.source) <= MAX_CHARACTERS]
        examples = {i: Example(requests[i].source, features=requests[i].features) for i in short}
        sources = zip(*(encode(run, list(examples.values())) for run in self.runs), strict=True)
        encoded = dict(zip(short, sources, strict=True))
        for i, request in enumerate(requests):
            if isinstance(request, Prompt):
                ids = self.codec.target.encode_prompt(request.pieces) or [self.config.start_id]
                encoded[i] = (ids,) * len(self.runs)
        prepared = [self._prepare(request, encoded.get(i)) for i, request in enumerate(requests)]
        for i, example in examples.items():
            if unknown := self.codec.unknown_tokens(example, encoded[i][0]):
                prepared[i] = replace(prepared[i], unknown=tuple(unknown))
        return prepared

    def batches(self, inputs: Mapping[int, SearchInput]) -> Iterator[list[int]]:
        """Batches of keys of unflagged inputs of similar length, longest first, within `batch_tokens`."""
        keys = [key for key, item in inputs.items() if not item.flags]
        for batch in by_length([self._size(inputs[key]) for key in keys], self.options.batch_tokens):
            yield [keys[j] for j in batch]

    def _size(self, item: SearchInput) -> int:
        """The size of an input in a batch: its tokens, or its share of the logits or automata if that is more."""
        share = self.config.target_vocab // (4096 if item.phrases is None else 1024)
        tokens = max(map(len, item.sources)) + (item.limit if self.continues else 0)
        table = 0 if item.phrases is None else item.phrases.next_QV.size // TABLE_PER_TOKEN
        return max((self.options.rows + item.stages) * max(share, tokens), table)

    def _prepare(self, request: Request, sources: tuple[list[int], ...] | None) -> SearchInput:
        if self.before_input is not None:
            self.before_input()
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
            prefix, texts, phrases = self._constraints(request, limit)
        except UserError as error:  # caused by the request: `_check_options` has checked the options
            return SearchInput(sources, flags={"unsatisfied": str(error)})
        return SearchInput(
            sources,
            limit,
            minimum,
            tuple(prefix),
            not_after_prefix=self.combining if prefix else (),
            texts=texts,
            phrases=phrases,
            stages=0 if phrases is None else min(phrases.tokens_needed(()) or 0, MAX_STAGES),
            key=zlib.crc32(np.asarray(sources[0], dtype=np.int64).tobytes()),
            seed=request.seed,
            open_end=self.continues,
        )

    def _check_options(self) -> None:
        """Refuse options that no input can satisfy, whatever its length."""
        most = self.max_target - self.continues
        if self.options.min_length > most:
            length = plural(self.options.min_length, "token")
            raise UserError(f"min_length: {length} do not fit: the model has learned positions for {most}")
        self._constraints(Request(""), min(most, self.options.max_length or most))

    def _lengths(self, source: int, request: Request) -> tuple[int, int]:
        """The minimum and maximum number of output tokens for a source of this length."""
        options = self.options
        least = options.min_length if request.min_length is None else request.min_length
        most = options.max_length if request.max_length is None else request.max_length
        minimum = max(least, math.ceil(options.min_ratio * source))
        limits = [self.max_target - source if self.continues else self.max_target]
        if most is not None:
            limits.append(most)
        if options.max_ratio is not None:
            limits.append(max(1, math.ceil(options.max_ratio * source)))
        if len(limits) == 1:  # the default limit, raised to the minimum if necessary
            usual = self.runs[0].generation.max_length
            default = CONTINUATION_LENGTH if self.continues else LENGTH_RATIO * source + LENGTH_EXTRA
            if usual is not None:
                default = usual if self.continues else min(usual, default)
            limits.append(max(default, minimum))
        if minimum > min(limits):
            limit = f"{min(limits)} (max_length, max_ratio, or the model's learned positions)"
            length = plural(minimum, "token")
            raise UserError(f"min_length, min_ratio: the minimum of {length} is above the limit of {limit}")
        return minimum, min(limits)

    def _constraints(self, request: Request, limit: int) -> tuple[list[int], PhraseTexts, Phrases | None]:
        """The prefix and the phrases of an output; checks that an output of at most `limit` tokens can satisfy them."""
        options = self.options
        text = request.prefix or options.prefix
        prefix = self._prefix(text, limit)
        any_of = (options.require_any,) if options.require_any else ()
        require = (*((phrase,) for phrase in options.require), *any_of, *request.require)
        forbid = (*options.forbid, *request.forbid)
        stop = (*options.stop, *request.stop)
        texts = PhraseTexts(*(tuple(dict.fromkeys(each)) for each in (require, forbid, stop)))
        phrases = self.phrases(texts)
        if phrases is not None:
            self._check_satisfiable(text, prefix, texts, phrases, limit)
        return prefix, texts, phrases

    def _prefix(self, text: str, limit: int) -> list[int]:
        """Tokenise and check a prefix."""
        if not text:
            return []
        prefix = self.codec.target.encode([text])[0]
        if unknown := self.codec.target.unknown_tokens(text):
            raise UserError(f"prefix {text!r:.100}: {unknown[0]!r:.100} is not in the target vocabulary")
        length = plural(len(prefix), "token")
        if len(prefix) > limit:
            raise UserError(f"prefix {text!r:.100}: its {length} exceed the output limit of {limit} (max_length)")
        at = self.options.alternatives_at
        if at is not None and at < len(prefix):
            raise UserError(f"alternatives_at {at} lies within the prefix {text!r:.100}, which has {length}")
        size = self.options.no_repeat_ngram
        seen: dict[int, int] = {}  # hash of some tokens -> where they occur first
        for i in range(len(prefix) - size + 1) if size else ():
            gram = prefix[i : i + size]
            first = seen.setdefault(hash((*gram,)), i)
            if first < i and prefix[first : first + size] == gram:
                twice = f"{self.codec.decode_target(gram)!r:.100} occurs twice in it"
                raise UserError(f"prefix {text!r:.100}: {twice}, which no_repeat_ngram rules out")
        return prefix

    def phrases(self, texts: PhraseTexts) -> Phrases | None:
        """The automaton of these phrases; None without phrases."""
        if not any(texts):
            return None
        key = self._key, texts
        phrases = _automata.get(key)
        if phrases is None:
            phrases = self._make_phrases(texts)
            entries = sum(each.next_QV.size for each in [phrases, *_automata.values()])
            if len(_automata) >= MAX_CACHED_PHRASES or entries > MAX_TABLE:
                _automata.clear()
            _automata[key] = phrases
        return phrases

    def _check_satisfiable(
        self, text: str, prefix: list[int], texts: PhraseTexts, phrases: Phrases, limit: int
    ) -> None:
        """Refuse phrases that no output with this prefix and limit can satisfy."""
        if phrases.find_stop(prefix):
            raise UserError(f"prefix {text!r:.100} contains a stop string ({', '.join(map(repr, texts.stop)):.200})")
        needed = phrases.tokens_needed(prefix, self.combining if prefix else ())
        composed = normalize("NFC", text)
        if self.combining and any(normalize("NFC", phrase) in composed for phrase in texts.forbid):
            needed = None  # the automaton recognises the last character of the prefix only at the next token
        if needed is None:
            raise UserError(f"prefix {text!r:.100} contains a phrase that forbid rules out")
        required = f"require {', '.join(' or '.join(map(repr, each)) for each in texts.require):.200}"
        if needed >= NEVER:
            cause = "part of it is not in the target vocabulary, or forbid or stop rules it out"
            raise UserError(f"{required}: no output contains this: {cause}")
        if len(prefix) + needed > limit:
            length = plural(len(prefix) + needed, "token")
            raise UserError(f"{required}: needs at least {length}, more than the output limit of {limit} (max_length)")

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self.codec.target, self.config.target_vocab, self.blocked, self.config.ids.eos)

    def _make_phrases(self, texts: PhraseTexts) -> Phrases:
        """Check and spell phrases, and build their automaton."""
        if len(texts.require) > MAX_REQUIRED:
            raise UserError(f"require: at most {MAX_REQUIRED} phrases at once, not {len(texts.require)}")
        spell = self._speller.spell
        for option, phrases in (("require", (*chain(*texts.require),)), ("forbid", texts.forbid), ("stop", texts.stop)):
            if empty := [phrase for phrase in phrases if not spell(phrase)]:
                raise UserError(f"{option} {empty[0]!r}: this phrase is empty")
        if self._speller.spaced:
            texts = self._known_words(texts)
        require = [[spell(phrase) for phrase in each] for each in texts.require]
        forbid = [spell(phrase) for phrase in texts.forbid]
        stop = [spell(string) for string in texts.stop]
        columns = self.config.target_vocab + SUBSET_COST * 2 ** len(require)
        for name, count, most in (
            ("stop", sum(map(len, stop)), MAX_STOP),
            ("require, forbid, stop", sum(map(len, chain(*require, forbid, stop))), MAX_TABLE // columns),
        ):
            if count > most:
                raise UserError(f"{name}: at most {most} letters (bytes in UTF-8) for this run, not {count}")
        for phrase, word in zip(chain(*texts.require), chain(*require), strict=True):
            for string, letters in zip(texts.stop, stop, strict=True):
                if _overlap(word, letters):
                    raise UserError(f"require {phrase!r:.100} and stop {string!r:.100}: a part of one begins the other")
        return make_phrases(require, forbid, self._speller.spelling, stop)

    def _known_words(self, texts: PhraseTexts) -> PhraseTexts:
        """Keep phrases whose words are all in the vocabulary: no output can contain the others."""

        def known(phrases: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(phrase for phrase in phrases if not self.codec.target.unknown_tokens(phrase))

        for each in texts.require:
            if not known(each):
                word = self.codec.target.unknown_tokens(each[0])[0]
                raise UserError(f"require {each[0]!r}: {word!r} is not in the target vocabulary")
        return PhraseTexts(tuple(known(each) for each in texts.require), known(texts.forbid), known(texts.stop))


def _overlap(required: Letters, stop: Letters) -> bool:
    """Whether a stop string could cut off the end of a required phrase, or occur in it."""
    if required[-1:] == (BOUNDARY,):  # which also begins the next character
        required = required[:-1]
    tails = (required[start : start + len(stop)] for start in range(len(required)))
    inside = any(stop[start : start + len(required)] == required for start in range(len(stop)))
    return inside or any(tail == stop[: len(tail)] for tail in tails)


def encode(run: Run, examples: Sequence[Example]) -> list[list[int]]:
    """The ids that a run reads: sources, or the prompts of a language model, which have no end token."""
    if "encoder" in run.config.stacks:
        return run.codec.encode_source(examples)
    before, _ = run.config.ids.around(run.config.frame)
    rows = run.codec.target.encode([example.source for example in examples])
    return [[*before, *row] or [run.config.start_id] for row in rows]


def check_ensemble(runs: Sequence[Run]) -> Config:
    """Refuse runs that cannot decode together -> the config of the first; all have the same target vocabulary."""
    if not runs:
        raise UserError("no run to generate with")
    first, *others = runs
    for run in runs:
        if "decoder" not in run.task.stacks:
            raise UserError("only a run with a decoder can generate or score a text; this one has only an encoder")
    for run in others:
        if run.task.seq2seq != first.task.seq2seq:
            raise UserError("ensemble: a language model and a model that reads a source cannot answer together")
        ours, theirs = ((x.config.target_vocab, x.config.ids, x.codec.target.to_json()) for x in (run, first))
        if ours != theirs:
            advice = "train both with the same target tokens"
            raise UserError(f"ensemble: {run.path} has another target vocabulary than {first.path}; {advice}")
    return first.config


def position_limits(runs: Sequence[Run]) -> tuple[int, int]:
    """The maximum source and target tokens for which every run has positions, end tokens not counted."""
    stacks = [run.config.stacks for run in runs]
    decoder = min(stack["decoder"].max_positions or UNBOUNDED for stack in stacks)
    if "encoder" not in stacks[0]:
        return decoder - 1, decoder  # source and target share the positions, and one is left for the target
    return min(stack["encoder"].max_positions or UNBOUNDED for stack in stacks) - 1, decoder - 1


def out_of_memory(what: str, tokens: int) -> dict[str, str]:
    """A flag for an input that does not fit into memory, even in a batch of its own."""
    return {"out_of_memory": f"not enough memory for the {what} of {plural(tokens, 'token')}, even on its own"}


def too_long(side: str, length: int, positions: int, most: int) -> dict[str, str]:
    """A flag if the length exceeds the positions of a model, or `most` (max_source)."""
    if length > min(positions, most):
        learned = f"the {positions} that fit the model's learned positions"
        bound = learned if positions < most else f"{most} (max_source)"
        return {"too_long": f"the {side} has {length} tokens, more than {bound}"}
    return {}


def sampling_noise(inputs: Sequence[SearchInput], count: int, seed: int) -> NDArray[np.float32]:
    """Numbers from 0 to 1 for the tokens of `count` samples of every input (inputs, samples, tokens).

    They depend on the seed, the input and the number of the sample only.
    """
    noise = np.zeros((len(inputs), count, max(item.limit for item in inputs) + 1), np.float32)
    for item, rows in zip(inputs, noise, strict=True):
        for number, row in enumerate(rows):
            rng = np.random.default_rng((seed if item.seed is None else item.seed, item.key, number))
            row[: item.limit + 1] = rng.random(item.limit + 1)
    return np.minimum(noise, np.float32(1 - 2**-24), out=noise)


def complete_alternatives(
    inputs: Sequence[SearchInput],
    options: Options,
    eos: int,
    search: Callable[[Sequence[SearchInput], Options], Sequence[list[DecodedIds]]],
    next_tokens: Callable[[Sequence[SearchInput]], Sequence[list[int]]],
) -> list[list[DecodedIds]]:
    """The best tokens at one position, each completed with the strategy of the other options.

    `next_tokens` finds the best tokens directly after the prefix of each input, under its rules.
    """
    plain = options.model_copy(update={"alternatives": 0, "alternatives_at": None})
    bases = [item.prefix for item in inputs]
    at = options.alternatives_at
    further = [i for i, base in enumerate(bases) if at is not None and at > len(base)]
    for i, outputs in zip(further, search([inputs[i] for i in further], plain), strict=True):
        bases[i] = outputs[0].ids[:at] if outputs else bases[i]
        phrases = inputs[i].phrases
        if phrases is not None and (stop := phrases.find_stop(bases[i])):
            bases[i] = bases[i][: stop[1]]
        if bases[i] and bases[i][-1] == eos:  # the output is shorter: complete its end
            bases[i] = bases[i][:-1]
    based = [
        item if base == item.prefix else replace(item, prefix=base, not_after_prefix=())
        for item, base in zip(inputs, bases, strict=True)
    ]
    variants: list[SearchInput] = []
    owners: list[int] = []
    for i, tokens in enumerate(next_tokens(based)):
        for token in tokens:
            if token == eos:
                minimum = min(based[i].minimum, len(bases[i]))
                variants.append(replace(based[i], limit=len(bases[i]), minimum=minimum, open_end=False))
            else:
                variants.append(replace(based[i], prefix=(*bases[i], token), not_after_prefix=()))
            owners.append(i)
    results: list[list[DecodedIds]] = [[] for _ in inputs]
    for start in range(0, len(variants), len(inputs)):  # batches no larger than `inputs`
        part = slice(start, start + len(inputs))
        completed = search(variants[part], plain)
        for i, variant, outputs in zip(owners[part], variants[part], completed, strict=True):
            if outputs:
                limited = outputs[0].limited and variant.limit == inputs[i].limit
                results[i].append(outputs[0]._replace(limited=limited))
    return results
