"""From what a user gives to what the search needs: ids, limits and automata, with everything wrong said clearly."""

from __future__ import annotations

import math
import unicodedata
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from regard.decode.options import Options
from regard.decode.phrases import MOST, NEVER, Letters, Phrases, Spelling, make_phrases
from regard.decode.scorer import Scorer, SearchInput
from regard.errors import UserError
from regard.model import Model
from regard.run import Run
from regard.text.codec import Example
from regard.text.tokenizer import Tokenizer

SLACK, RATIO = 50, 3  # of the default limit: 3 times the source and 50 more
CONTINUED = 100  # tokens that a language model adds at most by default
KNOWN = 256  # automata kept for lines that ask for the same


class Request(NamedTuple):
    """A source with wishes of its own: its prefix replaces that of the options, its phrases come on top of theirs."""

    source: str
    features: str | None = None
    prefix: str = ""
    require: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    skip: bool = False  # it cannot be used: its output is empty


Input = str | Example | Request


class Preparer:
    """Makes tasks for some runs."""

    def __init__(self, runs: Sequence[Run], options: Options) -> None:
        self.runs, self.options = runs, options
        check_vocabulary(runs)
        self.codec = runs[0].codec
        ids = runs[0].config.ids
        marks = {ids.pad, ids.sos, ids.mask, *([] if options.unknown else [ids.unk])} - {ids.eos, None}
        blocked = [*marks, *range(self.codec.target.size, runs[0].config.target_vocab)]
        self.scorer = Scorer([run.model for run in runs], options.weights, blocked, options.precision)
        self.longest_source, self.longest_target = position_limits(self.scorer.models)
        for name in ("alignment", "coverage_penalty"):
            if getattr(options, name) and self.scorer.continues:
                raise UserError(f"{name}: a language model has no source to look at; leave it out")
        self._blocked = blocked
        self.joining = joining(self.codec.target)
        self._speller: Speller | None = None
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], Phrases] = {}
        self._check_options()

    def __call__(self, inputs: Sequence[Input]) -> list[SearchInput | dict[str, str]]:
        """A task for every input, or flags that say why there is nothing to search."""
        requests = [as_request(item) for item in inputs]
        examples = [Example(request.source, features=request.features) for request in requests]
        readable = [i for i, request in enumerate(requests) if self._readable(request)]
        sources = zip(*(encode(run, [examples[i] for i in readable]) for run in self.runs), strict=True)
        encoded = dict(zip(readable, sources, strict=True))
        return [self._prepare(request, encoded.get(i)) for i, request in enumerate(requests)]

    def text(self, task: SearchInput, ids: Sequence[int]) -> str:
        """The text of an output. That of a continuation is what it adds to its prompt, the space between included."""
        if not self.scorer.continues:
            return self.codec.decode_target(ids)
        before, after = (self.codec.decode_target([*task.sources[0], *more]) for more in ((), ids))
        return after.removeprefix(before) if after.startswith(before) else self.codec.decode_target(ids)

    def _readable(self, request: Request) -> bool:
        """No token has more than so many characters, so a line that is far too long need not be cut into tokens."""
        return len(request.source) <= 1_000_000

    def _prepare(self, request: Request, sources: tuple[list[int], ...] | None) -> SearchInput | dict[str, str]:
        if request.skip or not (request.source.strip() or self.scorer.continues):
            return {"empty": "the source is empty"}
        if sources is None:
            return {"too_long": f"the source has {len(request.source)} characters"}
        length = max(map(len, sources)) - (not self.scorer.continues)
        if flags := too_long("source", length, self.longest_source, self.options.max_source):
            return flags
        try:
            return self._task(request, sources)
        except UserError as error:  # of this line: what no line can be given was refused before
            return {"unsatisfied": str(error)}

    def _check_options(self) -> None:
        """Raise if the options alone ask for what no line can be given, however long it is."""
        most = self.longest_target - self.scorer.continues
        if self.options.min_length > most:
            raise UserError(
                f"min_length: an output of at least {self.options.min_length} tokens is asked for where the model has"
                f" learned positions for {most}"
            )
        self._wishes(Request(""), min(most, self.options.max_length or most))

    def _task(self, request: Request, sources: tuple[list[int], ...]) -> SearchInput:
        continues = self.scorer.continues
        minimum, limit = self._lengths(max(map(len, sources)) if continues else len(sources[0]) - 1)
        prefix, phrases = self._wishes(request, limit)
        key = zlib.crc32(np.asarray(sources[0], dtype=np.int64).tobytes())
        return SearchInput(
            sources, limit, minimum, tuple(prefix), self.joining if prefix else (), phrases, key, continues
        )

    def _wishes(self, request: Request, limit: int) -> tuple[list[int], Phrases | None]:
        """The prefix and the phrases of an output of at most `limit` tokens."""
        text = request.prefix or self.options.prefix
        prefix = self.codec.target.encode([text])[0] if text else []
        if unknown := self.codec.target.unknown_tokens(text) if text else []:
            raise UserError(f"prefix {text!r}: {unknown[0]!r} is not in the target vocabulary")
        if len(prefix) > limit:
            raise UserError(
                f"prefix {text!r}: its {len(prefix)} tokens are more than the output may have, {limit} (max_length)"
            )
        at = self.options.alternatives_at
        if at is not None and at < len(prefix):
            raise UserError(f"alternatives_at {at} lies within the prefix {text!r}, which has {len(prefix)} tokens")
        require = tuple(dict.fromkeys((*self.options.require, *request.require)))
        forbid = tuple(dict.fromkeys((*self.options.forbid, *request.forbid)))
        phrases = self._phrases(require, forbid) if require or forbid else None
        if phrases is not None:
            self._check(phrases, require, forbid, text, prefix, limit)
        return prefix, phrases

    def _lengths(self, source: int) -> tuple[int, int]:
        """Fewest and most output tokens for a source of so many."""
        options = self.options
        minimum = max(options.min_length, math.ceil(options.min_ratio * source))
        limits = [self.longest_target - source if self.scorer.continues else self.longest_target]
        if options.max_length is not None:
            limits.append(options.max_length)
        if options.max_ratio is not None:
            limits.append(max(1, math.ceil(options.max_ratio * source)))
        if len(limits) == 1:  # a default gives way to what was asked for
            limits.append(max(CONTINUED if self.scorer.continues else RATIO * source + SLACK, minimum))
        if minimum > min(limits):
            raise UserError(
                f"min_length, min_ratio: an output of at least {minimum} tokens is asked for where at most"
                f" {min(limits)} are possible (max_length, max_ratio, or the model's learned positions)"
            )
        return minimum, min(limits)

    def _phrases(self, require: tuple[str, ...], forbid: tuple[str, ...]) -> Phrases:
        """The automaton of these phrases, made once."""
        if (require, forbid) in self._known:
            return self._known[require, forbid]
        if len(require) > MOST:
            raise UserError(f"require: at most {MOST} phrases at once, not {len(require)}")
        if self._speller is None:
            self._speller = Speller(self.codec.target, self.scorer.vocab, self._blocked, self.scorer.eos)
        speller, target = self._speller, self.codec.target
        for option, phrases in (("require", require), ("forbid", forbid)):
            if empty := [phrase for phrase in phrases if not speller.spell(phrase)]:
                raise UserError(f"{option} {empty[0]!r}: there is nothing in this phrase")
        if speller.spaced:
            for phrase in require:
                if unknown := target.unknown_tokens(phrase):
                    raise UserError(f"require {phrase!r}: {unknown[0]!r} is not in the target vocabulary")
            forbid = tuple(phrase for phrase in forbid if not target.unknown_tokens(phrase))  # never produced
        made = make_phrases([*map(speller.spell, require)], [*map(speller.spell, forbid)], speller.spelling)
        if len(self._known) >= KNOWN:
            self._known.clear()
        self._known[require, forbid] = made
        return made

    def _check(
        self,
        phrases: Phrases,
        require: tuple[str, ...],
        forbid: tuple[str, ...],
        text: str,
        prefix: Sequence[int],
        limit: int,
    ) -> None:
        needed = phrases.walk(prefix, self.joining if prefix else ())
        if self.joining and any(composed(bad) in composed(text) for bad in forbid):
            needed = None  # the automaton would only know at the next token that the prefix's last character is whole
        if needed is None:
            raise UserError(f"prefix {text!r} contains a phrase that forbid rules out")
        if needed >= NEVER:
            raise UserError(
                f"require {', '.join(map(repr, require))}: no output contains this: some of it is not in the target"
                " vocabulary, or forbid rules it out"
            )
        if len(prefix) + needed > limit:
            raise UserError(
                f"require {', '.join(map(repr, require))}: this needs at least {len(prefix) + needed} tokens"
                f" where an output has at most {limit} (max_length)"
            )


def as_request(item: Input) -> Request:
    """Any kind of input as the full one."""
    if isinstance(item, Request):
        return item
    if isinstance(item, Example):
        return Request(item.source, item.features)
    return Request(item)


def check_vocabulary(runs: Sequence[Run]) -> None:
    """The runs of an ensemble must mean the same by a target token."""
    if not runs:
        raise UserError("no run to generate with")
    for run in runs[1:]:
        if run.codec.target.to_json() != runs[0].codec.target.to_json():
            raise UserError(
                f"ensemble: {run.path} has another target vocabulary than {runs[0].path};"
                " train both with the same target tokens"
            )


def encode(run: Run, examples: Sequence[Example]) -> list[list[int]]:
    """What a run reads before it answers: sources, or the prompts of a language model, which nothing ends."""
    if run.config.encoder is not None:
        return run.codec.encode_source(examples)
    before = [run.config.ids.sos] if run.config.frame in ("both", "start") else []
    rows = run.codec.target.encode([example.source for example in examples])
    return [[*before, *row] or [run.config.start_id] for row in rows]


def too_long(side: str, length: int, positions: int, most: int) -> dict[str, str]:
    """A flag if a side of so many tokens is more than a model has positions for, or than `most` (max_source)."""
    if length > min(positions, most):
        room = f"the {positions} that fit the model's learned positions" if positions < most else f"{most} (max_source)"
        return {"too_long": f"the {side} has {length} tokens, more than {room}"}
    return {}


UNBOUNDED = 10**9  # positions of a model that has no table of them


def position_limits(models: Sequence[Model]) -> tuple[int, int]:
    """Most source and target tokens, the end not counted, for which every model has positions.

    A language model has so many for both together, and reads at least one token less than that.
    """
    encoders, decoders = ([getattr(model.config, side) for model in models] for side in ("encoder", "decoder"))
    target = min(stack.max_positions or UNBOUNDED for stack in decoders)
    if None in encoders:
        return target - 1, target
    return min(stack.max_positions or UNBOUNDED for stack in encoders) - 1, target - 1


APART = 0x110000  # a letter of its own, beyond all characters: here the character before is complete


class Speller:
    """Letters are the bytes of the text; in a vocabulary of tokens set apart by spaces, the tokens themselves.

    Where tokens are parts of characters, which join when the text is put together, letters are those parts, with
    `APART` before each that begins a character and at the end: so `e` is not found in `é`, nor in any marked `e`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, blocked: Sequence[int], eos: int) -> None:
        self.tokenizer = tokenizer
        self.spaced = tokenizer.scheme == "space"
        self.joined = tokenizer.scheme == "nfd"
        letters: list[Sequence[int]] = [*tokenizer.spellings()]
        if self.spaced:
            letters = [[index] for index in range(tokenizer.size)]
        elif self.joined:
            letters = [_parts(piece) for piece in tokenizer.pieces(range(tokenizer.size))]
        letters = [[] if index in tokenizer.special else one for index, one in enumerate(letters)]
        letters += [[] for _ in range(vocab - tokenizer.size)]
        letters[eos] = [APART] if self.joined else []
        unusable = {*blocked, eos}
        self.spelling = Spelling.of(letters, [index not in unusable for index in range(vocab)], eos)

    def spell(self, phrase: str) -> Letters:
        """The letters of a phrase."""
        if self.spaced:
            return tuple(self.tokenizer.encode([phrase.strip(" ")])[0])
        if self.joined:
            return (*_parts(unicodedata.normalize("NFD", phrase)), APART) if phrase else ()
        return tuple(phrase.encode("utf-8", "replace"))


def joins(part: str) -> bool:
    """Whether a part may join the character before it: a mark, or the middle or end of a Hangul syllable."""
    return unicodedata.category(part).startswith("M") or "\u1161" <= part <= "\u1175" or "\u11a8" <= part <= "\u11c2"


def joining(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that may change the character before them."""
    if tokenizer.scheme != "nfd":
        return ()
    pieces = tokenizer.pieces(range(tokenizer.size))
    return tuple(index for index, piece in enumerate(pieces) if index not in tokenizer.special and joins(piece))


def composed(text: str) -> str:
    """Text with the parts of its characters joined."""
    return unicodedata.normalize("NFC", text)


def _parts(text: str) -> list[int]:
    return [letter for part in text for letter in ((ord(part),) if joins(part) else (APART, ord(part)))]
