"""Rules that steer a search. They change the values that rank tokens, never the reported scores."""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.text.tokenizer import Tokenizer

Letters = tuple[int, ...]
NEVER = 30_000  # more tokens than any output has
BOUNDARY = 0x110000  # a letter beyond all characters, which marks the end of a character


class PhraseTexts(NamedTuple):
    """The phrases of a request."""

    require: tuple[tuple[str, ...], ...] = ()  # the output must contain at least one phrase of each tuple
    forbid: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class Spelling:
    """The letters of every token of a vocabulary, and which tokens may be produced before the end token."""

    def __init__(self, letters: Sequence[Sequence[int]], usable: Sequence[bool], eos: int) -> None:
        self.letters_VL = np.full((len(letters), max(map(len, letters), default=0)), -1, dtype=np.int64)  # padded: -1
        for row, word in zip(self.letters_VL, letters, strict=True):
            row[: len(word)] = list(word)
        self.usable_V = np.asarray(usable, dtype=bool)
        self.eos = eos


class Speller:
    """Spells tokens and phrases as letters: bytes, or whole tokens if the vocabulary separates them by spaces.

    If tokens are parts of characters (scheme nfd), the letters are these parts, with `BOUNDARY` before each part that
    begins a character and at the end, so `e` does not match in `é`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, blocked: Sequence[int], eos: int) -> None:
        self.tokenizer = tokenizer
        self.spaced = tokenizer.scheme == "space"
        self.decomposed = tokenizer.scheme == "nfd"
        letters: list[Sequence[int]] = [*tokenizer.spellings()]
        if self.spaced:
            letters = [[index] for index in range(tokenizer.size)]
        elif self.decomposed:
            letters = [_character_parts(piece) for piece in tokenizer.pieces(range(tokenizer.size))]
        letters = [[] if index in tokenizer.special else spelled for index, spelled in enumerate(letters)]
        letters += [[]] * (vocab - tokenizer.size)
        letters[eos] = [BOUNDARY] if self.decomposed else []
        unusable = {*blocked, eos}
        self.spelling = Spelling(letters, [index not in unusable for index in range(vocab)], eos)

    def spell(self, phrase: str) -> Letters:
        if self.spaced:
            return tuple(self.tokenizer.encode([phrase.strip(" ")])[0])
        if self.decomposed:
            return (*_character_parts(unicodedata.normalize("NFD", phrase)), BOUNDARY) if phrase else ()
        return tuple(phrase.encode("utf-8", "replace"))


def is_combining(part: str) -> bool:
    """Whether a code point combines with the one before it: a diacritic, or a later part of a Hangul syllable."""
    return unicodedata.category(part).startswith("M") or "\u1161" <= part <= "\u1175" or "\u11a8" <= part <= "\u11c2"


def _character_parts(text: str) -> list[int]:
    return [letter for part in text for letter in ((ord(part),) if is_combining(part) else (BOUNDARY, ord(part)))]


@dataclass(frozen=True, eq=False)
class Phrases:
    """The automaton of some phrases over a vocabulary, with Q states and M = 2^requirements subsets of requirements."""

    next_QV: np.ndarray
    met_QV: np.ndarray  # bits of the requirements that the token meets
    ban_QV: np.ndarray  # whether the token completes a forbidden phrase, or is not usable
    stop_QV: np.ndarray  # if the token completes a stop string: letters from its start to the end of the token; else 0
    need_MQ: np.ndarray  # fewest tokens until the output may end with every requirement met
    held_Q: np.ndarray  # number of last letters that may begin a stop string
    letters_V: np.ndarray  # number of letters of a token
    eos: int

    def find_stop(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """Find the first stop string -> the number of tokens up to its end, and how many of them begin before it."""
        state = 0
        for position, index in enumerate(ids):
            if last := int(self.stop_QV[state, index]):
                *starts, total = self._ends(ids[: position + 1])
                return position + 1, bisect_left(starts, total - last)
            state = int(self.next_QV[state, index])
        return None

    def tokens_certain(self, ids: Sequence[int]) -> int:
        """The number of first `ids` that cannot be part of a stop string that later tokens complete."""
        state = 0
        for index in ids:
            state = int(self.next_QV[state, index])
        _, *ends = self._ends(ids)
        return bisect_right(ends, ends[-1] - int(self.held_Q[state])) if ends else 0

    def _ends(self, ids: Sequence[int]) -> list[int]:
        """The number of letters before the first of `ids` and after each of them."""
        return list(accumulate((int(self.letters_V[index]) for index in ids), initial=0))

    def tokens_needed(self, ids: Sequence[int], not_next: Sequence[int] = ()) -> int | None:
        """Fewest tokens between `ids` and the end if none of `not_next` follows; None if `ids` break a rule."""
        state = met = 0
        for index in ids:
            if self.ban_QV[state, index]:
                return None
            met |= int(self.met_QV[state, index])
            state = int(self.next_QV[state, index])
        need = int(self.need_MQ[met, state])
        if need == 0 or not not_next:
            return need
        after_V = self.need_MQ[met | self.met_QV[state], self.next_QV[state]].astype(int)
        after_V[self.ban_QV[state]] = NEVER
        after_V[[*not_next, self.eos]] = NEVER
        return min(NEVER, 1 + int(after_V.min()))


def make_phrases(
    require: Sequence[Sequence[Letters]], forbid: Sequence[Letters], spelling: Spelling, stop: Sequence[Letters] = ()
) -> Phrases:
    """Build the automaton; a requirement is met by any one of its phrases."""
    require = list(dict.fromkeys(tuple(dict.fromkeys(each)) for each in require))
    letters = sorted({x for word in (*(word for each in require for word in each), *forbid, *stop) for x in word})
    classes = {letter: i + 1 for i, letter in enumerate(letters)}
    delta_QC, met_Q, ban_Q, stop_Q, held_Q = _letter_automaton(require, forbid, stop, classes)
    states = len(delta_QC)
    vocab = len(spelling.letters_VL)
    letters_V = (spelling.letters_VL >= 0).sum(1)
    next_QV = np.repeat(np.arange(states)[:, None], vocab, axis=1)
    met_QV = np.zeros((states, vocab), dtype=np.int32)
    ban_QV = np.zeros((states, vocab), dtype=bool)
    stop_QV = np.zeros((states, vocab), dtype=np.int16)
    class_VL = np.zeros_like(spelling.letters_VL)
    for letter, i in classes.items():
        class_VL[spelling.letters_VL == letter] = i
    for position in range(class_VL.shape[1]):
        tokens = np.nonzero(letters_V > position)[0]
        moved = delta_QC[next_QV[:, tokens], class_VL[tokens, position]]
        next_QV[:, tokens] = moved
        met_QV[:, tokens] |= met_Q[moved]
        ban_QV[:, tokens] |= ban_Q[moved]
        if stop:  # the first stop string counts, and the longest of several that end at the same letter
            before = stop_QV[:, tokens]
            here = stop_Q[moved]
            after = here + (letters_V[tokens] - position - 1)
            stop_QV[:, tokens] = np.where((before == 0) & (here > 0), after, before)
    end_met_Q = met_QV[:, spelling.eos].copy()
    end_ban_Q = ban_QV[:, spelling.eos].copy()
    ban_QV |= ~spelling.usable_V
    ban_QV[:, spelling.eos] = True  # on the way to the end
    need_MQ = _fewest_tokens(next_QV, met_QV, ban_QV, stop_QV > 0, end_met_Q, end_ban_Q, len(require))
    ban_QV[:, spelling.eos] = end_ban_Q
    return Phrases(
        next_QV.astype(np.int32), met_QV.astype(np.int16), ban_QV, stop_QV, need_MQ, held_Q, letters_V, spelling.eos
    )


def _letter_automaton(
    require: Sequence[Sequence[Letters]], forbid: Sequence[Letters], stop: Sequence[Letters], classes: dict[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Build the Aho-Corasick automaton of the phrases over letters.

    Returns the transitions and, per state: the bits of the requirements just met, whether a forbidden phrase was just
    completed, the length of the longest stop string just completed, how many of the last letters may begin one.
    """
    children: list[dict[int, int]] = [{}]

    def add(word: Letters) -> list[int]:
        """Add the states of a phrase -> these states."""
        path = [0]
        for letter in word:
            if letter not in children[path[-1]]:
                children[path[-1]][letter] = len(children)
                children.append({})
            path.append(children[path[-1]][letter])
        return path

    require_ends = [[add(word)[-1] for word in phrases] for phrases in require]
    forbid_ends = [add(word)[-1] for word in forbid]
    stop_paths = [add(word) for word in stop]
    met = np.zeros(len(children), np.int32)
    ban = np.zeros(len(children), bool)
    stopped = np.zeros(len(children), np.int16)
    held = np.zeros(len(children), np.int16)
    for i, ends in enumerate(require_ends):
        met[ends] |= 1 << i
    ban[forbid_ends] = True
    for path in stop_paths:
        stopped[path[-1]] = len(path) - 1
        held[path] = range(len(path))
    delta_QC = np.zeros((len(children), len(classes) + 1), dtype=np.int64)
    suffix = [0] * len(children)
    queue = deque([0])
    while queue:
        node = queue.popleft()
        if node:
            delta_QC[node] = delta_QC[suffix[node]]
            met[node] |= met[suffix[node]]
            ban[node] |= ban[suffix[node]]
            stopped[node] = stopped[node] or stopped[suffix[node]]
            held[node] = held[node] or held[suffix[node]]
        for letter, child in children[node].items():
            suffix[child] = int(delta_QC[node, classes[letter]]) if node else 0
            delta_QC[node, classes[letter]] = child
            queue.append(child)
    return delta_QC, met, ban, stopped, held


def _fewest_tokens(
    next_QV: np.ndarray,
    met_QV: np.ndarray,
    ban_QV: np.ndarray,
    stops_QV: np.ndarray,
    end_met_Q: np.ndarray,  # requirements that the end token meets
    end_ban_Q: np.ndarray,
    count: int,
) -> np.ndarray:
    """Shortest paths from every state and subset of met requirements to a state in which the output may end.

    Breadth-first search backwards from these states: every edge is visited once per subset.
    """
    states = len(next_QV)
    full = (1 << count) - 1
    subset_M1 = np.arange(full + 1)[:, None]
    may_end_MQ = ((subset_M1 | end_met_Q) == full) & ~end_ban_Q
    need_MQ = np.where(may_end_MQ, 0, NEVER).astype(np.int16)
    if not need_MQ.any():
        return need_MQ
    edges = []  # from, to, requirements met, whether it completes a stop string; without duplicates
    for node in range(states):
        usable = ~ban_QV[node]
        to, met, stops = (x[node, usable].astype(np.int64) for x in (next_QV, met_QV, stops_QV))
        pairs = np.unique(to << 32 | met << 1 | stops)
        edges.append(np.stack((np.full(len(pairs), node), pairs >> 32, (pairs & 0xFFFFFFFF) >> 1, pairs & 1)))
    table = np.concatenate(edges, axis=1)
    table = table[:, np.argsort(table[1], kind="stable")]
    steps = []  # subsets before an edge that meets some requirements: those with and without each of them
    for met in np.unique(table[2]).tolist():
        begin, to, _, stops = table[:, table[2] == met]
        starts = np.searchsorted(to, np.arange(states + 1))
        steps += [(met, part, begin, stops, starts) for part in range(met + 1) if part & met == part]
    subset, state = np.nonzero(may_end_MQ)
    for need in range(1, NEVER):
        reached = [np.zeros(0, np.int64)]
        for met, part, begin, stops, starts in steps:
            fits = subset & met == met
            after = subset[fits]
            to = state[fits]
            number = starts[to + 1] - starts[to]
            edge = np.arange(number.sum()) + np.repeat(starts[to + 1] - number.cumsum(), number)
            last = np.repeat(may_end_MQ[after, to], number)  # else no token may complete a stop string here
            reached.append(((np.repeat(after, number) & ~part) * states + begin[edge])[last | (stops[edge] == 0)])
        places = np.unique(np.concatenate(reached))
        places = places[need_MQ.reshape(-1)[places] == NEVER]
        if not len(places):
            break
        need_MQ.reshape(-1)[places] = need
        subset, state = np.divmod(places, states)
    return need_MQ


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


class Rule:
    """A rule over values (N, V), where N = alive sentences times hypotheses per sentence, sentence-major."""

    def active(self, t: int) -> bool:
        """Whether the rule may change values at step `t`."""
        return True

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        """Change values in place; minus infinity forbids. `alive_B` are the indices of unfinished sentences."""

    def spread(self, rows_N: Tensor) -> None:
        """Before the first step, start several hypotheses per sentence, copied from these rows."""

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        """Continue the hypotheses of these rows, each with the token that it appended."""


def steer(logp_NV: Tensor, rules: Sequence[Rule], t: int, alive_B: Tensor) -> Tensor:
    """The values that rank tokens; the log-probabilities themselves if no rule is active."""
    active = [rule for rule in rules if rule.active(t)]
    if not active:
        return logp_NV
    value_NV = logp_NV.clone()
    for rule in active:
        rule.apply(value_NV, logp_NV, t, alive_B)
    return value_NV


class Length(Rule):
    """Forbids the end token before the minimum, and all others at the limit, where a continuation ends at no cost."""

    def __init__(self, inputs: Sequence[SearchInput], eos: int, device: torch.device) -> None:
        self.eos = eos
        self.minimum_B = torch.tensor([item.minimum for item in inputs], device=device)
        self.limit_B = torch.tensor([item.limit for item in inputs], device=device)
        self.open_B = torch.tensor([item.open_end for item in inputs], device=device)
        self.until = max(item.minimum for item in inputs)
        self.since = min(item.limit for item in inputs)

    def active(self, t: int) -> bool:
        return t < self.until or t >= self.since

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        value_BKV = value_NV.view(len(alive_B), -1, value_NV.shape[1])
        end_BK = value_BKV[:, :, self.eos].clone()
        if t >= self.since:
            full_B = self.limit_B[alive_B] <= t
            value_BKV.masked_fill_(full_B[:, None, None], -math.inf)
            end_BK.masked_fill_((full_B & self.open_B[alive_B])[:, None], 0.0)
        value_BKV[:, :, self.eos] = end_BK.masked_fill((self.minimum_B[alive_B] > t)[:, None], -math.inf)


class Prefix(Rule):
    """Forces the first tokens and forbids tokens that would alter them; comes last and overrides other rules."""

    def __init__(self, inputs: Sequence[SearchInput], device: torch.device) -> None:
        longest = max(len(item.prefix) for item in inputs)
        table = [list(item.prefix) + [-1] * (longest - len(item.prefix)) for item in inputs]
        self.table_BP = torch.tensor(table, dtype=torch.long, device=device).view(len(inputs), longest)
        self.length_B = torch.tensor([len(item.prefix) for item in inputs], device=device)
        never_next = sorted({x for item in inputs for x in item.not_after_prefix})
        self.never_next = torch.tensor(never_next, dtype=torch.long, device=device)
        never = [[x in item.not_after_prefix for x in never_next] for item in inputs]
        self.never_BX = torch.tensor(never, dtype=torch.bool, device=device)
        self.until = longest + bool(len(self.never_next))

    def active(self, t: int) -> bool:
        return t < self.until

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        if t > 0 and len(self.never_next):
            ended_B = self.length_B[alive_B] == t
            never_BX = self.never_BX[alive_B] & ended_B.unsqueeze(1)
            row, which = never_BX.repeat_interleave(len(value_NV) // len(alive_B), 0).nonzero(as_tuple=True)
            value_NV[row, self.never_next[which]] = -math.inf
        if t >= self.table_BP.shape[1]:
            return
        forced_N = self.table_BP[alive_B, t].repeat_interleave(len(value_NV) // len(alive_B))
        rows = (forced_N >= 0).nonzero().squeeze(1)
        value_NV[rows] = -math.inf
        value_NV[rows, forced_N[rows]] = logp_NV[rows, forced_N[rows]]


class PastTokens(Rule):
    """A rule that depends on the tokens of each hypothesis."""

    def __init__(self, inputs: Sequence[SearchInput], device: torch.device) -> None:
        self.past_NT = torch.zeros((len(inputs), 0), dtype=torch.long, device=device)

    def active(self, t: int) -> bool:
        return t > 0

    def spread(self, rows_N: Tensor) -> None:
        self.past_NT = self.past_NT[rows_N]

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        self.past_NT = torch.cat((self.past_NT[rows_N], tokens_N.unsqueeze(1)), 1)


class NoRepeat(PastTokens):
    """Forbids any sequence of `size` tokens from occurring twice."""

    def __init__(self, inputs: Sequence[SearchInput], size: int, device: torch.device) -> None:
        super().__init__(inputs, device)
        self.size = size

    def active(self, t: int) -> bool:
        return t >= self.size

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        windows_NWS = self.past_NT.unfold(1, self.size, 1)
        last_N1S = self.past_NT[:, None, self.past_NT.shape[1] - self.size + 1 :]
        row, start = (windows_NWS[:, :, :-1] == last_N1S).all(-1).nonzero(as_tuple=True)
        value_NV[row, windows_NWS[row, start, -1]] = -math.inf


class Repetition(PastTokens):
    """Multiplies the negative log-probability of tokens that have occurred by `penalty`."""

    def __init__(self, inputs: Sequence[SearchInput], penalty: float, device: torch.device) -> None:
        super().__init__(inputs, device)
        self.penalty = penalty

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        value_NV.scatter_(1, self.past_NT, value_NV.gather(1, self.past_NT) * self.penalty)


class PhraseProgress(NamedTuple):
    """The distance of hypotheses from meeting their requirements, at one step."""

    need_NV: Tensor  # fewest tokens until all requirements are met, after each token
    nearer_NV: Tensor  # whether a token is allowed and brings a requirement nearer
    pulled_N: Tensor  # whether the end was more probable than all tokens that bring a requirement nearer


class PhraseConstraint(Rule):
    """Enforces required phrases, forbidden phrases and stop strings: runs an automaton along every hypothesis.

    A token is forbidden if it completes a forbidden phrase or leaves too few tokens for the requirements. With
    `redistribute` (greedy search and sampling), the probability of ending too early is moved to tokens that bring a
    phrase nearer. After a stop string, a hypothesis ends at no cost. A stop string may not begin within the prefix or
    the minimum length, or before all requirements are met.
    """

    def __init__(
        self, inputs: Sequence[SearchInput], eos: int, vocab: int, device: torch.device, redistribute: bool
    ) -> None:
        self.eos = eos
        self.redistribute = redistribute
        next_1V = np.zeros((1, vocab), np.int32)
        zeros_1V = np.zeros((1, vocab), np.int16)
        zeros_1 = np.zeros(1, np.int16)
        no_phrases = Phrases(next_1V, zeros_1V, zeros_1V > 0, zeros_1V, zeros_1[None], zeros_1, next_1V[0], eos)
        phrases = [item.phrases or no_phrases for item in inputs]
        automata = list(dict.fromkeys(phrases))
        # The states of all automata are numbered consecutively; tables of fewer subsets are padded.
        ends = list(accumulate(len(each.next_QV) for each in automata))
        first_state = dict(zip(automata, [0, *ends], strict=False))
        subsets = max(len(each.need_MQ) for each in automata)

        def join(tables: list[np.ndarray], axis: int = 0) -> Tensor:
            return torch.from_numpy(np.concatenate(tables, axis)).to(device)

        def per_input(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        self.next_QV = join([each.next_QV + first_state[each] for each in automata])
        self.met_QV = join([each.met_QV for each in automata])
        self.ban_QV = join([each.ban_QV for each in automata])
        self.stop_QV = join([each.stop_QV for each in automata]) if any(item.texts.stop for item in inputs) else None
        needs = [np.pad(each.need_MQ, ((0, subsets - len(each.need_MQ)), (0, 0))) for each in automata]
        self.need_MQ = join(needs, axis=1)
        self.requires = any(each.need_MQ.any() for each in automata)
        self.limit_B = per_input([item.limit for item in inputs])
        self.first_stop_B = per_input([max(item.minimum, len(item.prefix)) for item in inputs])
        # The state of each hypothesis. N is the number of inputs until `spread`.
        self.state_N = per_input([first_state[each] for each in phrases])
        self.met_N = torch.zeros_like(self.state_N)  # subset of requirements
        self.committed_N = torch.zeros_like(self.state_N, dtype=torch.bool)  # to a phrase that it has begun
        self.stopped_N = torch.zeros_like(self.committed_N)
        need_B = self.need_MQ[self.met_N, self.state_N]
        self.stages_per_token_B = per_input([item.stages for item in inputs]) / need_B.clamp(min=1)
        self._progress: PhraseProgress | None = None  # of the latest step

    def apply(self, value_NV: Tensor, logp_NV: Tensor, t: int, alive_B: Tensor) -> None:
        sentence_N = alive_B.repeat_interleave(len(value_NV) // len(alive_B))
        if self.stop_QV is not None:
            stop_NV = self.stop_QV[self.state_N]
            # Each letter of a stop string belongs to at most one token, so at least the other tokens come before it.
            before_NV = (t + 1 - stop_NV).clamp(min=0)
            value_NV.masked_fill_((stop_NV > 0) & (before_NV < self.first_stop_B[sentence_N, None]), -math.inf)
        if self.requires:
            self._apply_required(value_NV, logp_NV, self.limit_B[sentence_N] - t)
        else:
            value_NV.masked_fill_(self.ban_QV[self.state_N], -math.inf)
        if self.stop_QV is not None:
            value_NV.masked_fill_(self.stopped_N.unsqueeze(1), -math.inf)
            value_NV[:, self.eos].masked_fill_(self.stopped_N, 0.0)

    def _apply_required(self, value_NV: Tensor, logp_NV: Tensor, left_N: Tensor) -> None:
        """Forbid tokens after which the `left_N` tokens up to the limit are too few."""
        met_NV = self.met_N.unsqueeze(1) | self.met_QV[self.state_N]
        need_NV = self.need_MQ[met_NV, self.next_QV[self.state_N].long()]
        need_N = self.need_MQ[self.met_N, self.state_N]
        end_N = value_NV[:, self.eos].masked_fill(need_N > 0, -math.inf)
        allowed_NV = ~self.ban_QV[self.state_N] & (need_NV < left_N.unsqueeze(1))
        if self.stop_QV is not None:
            allowed_NV &= (self.stop_QV[self.state_N] == 0) | (need_NV == 0)
        allowed_NV[:, self.eos] = False  # its value is set below
        nearer_NV = allowed_NV & (need_NV < need_N.unsqueeze(1))
        value_NV.masked_fill_(~allowed_NV, -math.inf)
        pulled_N = torch.zeros_like(self.committed_N)
        if self.redistribute:
            pulled_N = self._redistribute(value_NV, logp_NV[:, self.eos], need_N > 0, nearer_NV)
        value_NV[:, self.eos] = end_N
        self._progress = PhraseProgress(need_NV, nearer_NV, pulled_N)

    def _redistribute(self, value_NV: Tensor, end_N: Tensor, unmet_N: Tensor, nearer_NV: Tensor) -> Tensor:
        """Move the probability of the end to tokens that bring a requirement nearer, until the phrase is complete."""
        near_NV = value_NV.masked_fill(~nearer_NV, -math.inf)
        committed_N1 = (self.committed_N & (near_NV > -math.inf).any(1)).unsqueeze(1)
        value_NV.masked_fill_(committed_N1 & ~nearer_NV, -math.inf)
        near_N = near_NV.logsumexp(1)
        unmet_N = unmet_N & (near_N > -math.inf)
        grown_NV = near_NV + (torch.logaddexp(near_N, end_N) - near_N).unsqueeze(1)
        torch.where(unmet_N.unsqueeze(1) & nearer_NV, grown_NV, value_NV, out=value_NV)
        return unmet_N & (near_N < end_N)  # the end was more probable than all these tokens together

    def spread(self, rows_N: Tensor) -> None:
        self.state_N = self.state_N[rows_N]
        self.met_N = self.met_N[rows_N]
        self.committed_N = self.committed_N[rows_N]
        self.stopped_N = self.stopped_N[rows_N]

    def advance(self, rows_N: Tensor, tokens_N: Tensor) -> None:
        state_N = self.state_N[rows_N]
        met_N = self.met_N[rows_N]
        self.state_N = self.next_QV[state_N, tokens_N].long()
        self.met_N = met_N | self.met_QV[state_N, tokens_N]
        if self.stop_QV is not None:
            self.stopped_N = self.stop_QV[state_N, tokens_N] > 0
        if self._progress is not None and self.redistribute:
            nearer_N = self._progress.nearer_NV[rows_N, tokens_N]
            committed_N = (self.committed_N | self._progress.pulled_N)[rows_N]
            self.committed_N = committed_N & nearer_N & (self.met_N == met_N)

    def stages(self, alive_B: Tensor) -> tuple[Tensor, Tensor] | None:
        """After `apply`: the stage after each token (0: all met), and whether it is nearer; None without phrases."""
        if self._progress is None:
            return None
        need_AHV, nearer_AHV = (
            x_NV.view(len(alive_B), -1, x_NV.shape[1]) for x_NV in (self._progress.need_NV, self._progress.nearer_NV)
        )
        return (need_AHV * self.stages_per_token_B[alive_B][:, None, None]).ceil().long(), nearer_AHV
