"""From tasks to outputs, all in ids: which strategy, under which rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from regard.decode.alignment import Coverage
from regard.decode.beam import beam_search
from regard.decode.greedy import Choose, Sampler, follow, greedy, steps
from regard.decode.hypothesis import DecodedIds
from regard.decode.options import Options
from regard.decode.rules import Constraint, Length, NoRepeat, Prefix, Repetition, Rule, banks
from regard.decode.scorer import Scorer, SearchInput, best


@torch.inference_mode()
def search(scorer: Scorer, tasks: Sequence[SearchInput], options: Options) -> list[list[DecodedIds]]:
    """The outputs of every task, best first (samples as drawn); a task without any had none that its rules allow."""
    if not tasks:
        return []
    if options.alternatives:
        return _alternatives(scorer, tasks, options)
    if options.samples:
        count = options.mbr or options.nbest
        return follow(
            scorer, tasks, make_rules(scorer, tasks, options, True), sampler(scorer, tasks, options, count), count
        )
    # How wide a beam must be depends on what is required of a task alone, never on its company.
    extra = [banks(task) for task in tasks]
    results: list[list[DecodedIds]] = [[] for _ in tasks]
    for stages in sorted(set(extra)):
        places = [i for i, own in enumerate(extra) if own == stages]
        for i, found in zip(places, _search(scorer, [tasks[i] for i in places], options, stages), strict=True):
            results[i] = found
    return results


def _search(scorer: Scorer, tasks: Sequence[SearchInput], options: Options, stages: int) -> list[list[DecodedIds]]:
    if options.beam == 1 and not stages:
        return follow(scorer, tasks, make_rules(scorer, tasks, options, True))
    each = options.beam // options.groups
    coverage = None
    if options.coverage_penalty:
        coverage = Coverage(scorer.models[0], [task.sources[0] for task in tasks], options)
    return beam_search(
        scorer,
        tasks,
        make_rules(scorer, tasks, options, False),
        width=each + stages,
        enough=each,
        keep=options.mbr or options.nbest,
        penalty=options.length_penalty,
        exact=options.exact,
        groups=options.groups,
        diversity=options.diversity,
        coverage=coverage,
    )


def make_rules(scorer: Scorer, tasks: Sequence[SearchInput], options: Options, one_path: bool) -> list[Rule]:
    """The rules that have something to say, in the order in which a later one may overrule an earlier."""
    device = scorer.device
    rules: list[Rule] = []
    if options.repetition_penalty > 1:
        rules.append(Repetition(tasks, options.repetition_penalty, device))
    if options.no_repeat_ngram:
        rules.append(NoRepeat(tasks, options.no_repeat_ngram, device))
    rules.append(Length(tasks, scorer.eos, device))
    prefix = [Prefix(tasks, device)] if any(task.prefix for task in tasks) else []
    if any(task.phrases is not None for task in tasks):
        rules += prefix  # phrases should know what cannot follow it; but it has the last word
        rules.append(Constraint(tasks, scorer.eos, scorer.vocab, device, yielding=one_path))
    return rules + prefix


def sampler(scorer: Scorer, tasks: Sequence[SearchInput], options: Options, count: int) -> Choose:
    """How a path chooses its next token."""
    return Sampler(tasks, count, options, scorer.device) if options.samples else greedy


def _alternatives(scorer: Scorer, tasks: Sequence[SearchInput], options: Options) -> list[list[DecodedIds]]:
    """The best tokens at one place, each completed by the strategy that the other options ask for."""
    plain = options.model_copy(update={"alternatives": 0, "alternatives_at": None})
    bases = [task.prefix for task in tasks]
    at = options.alternatives_at
    further = [i for i, base in enumerate(bases) if at is not None and at > len(base)]
    for i, found in zip(further, search(scorer, [tasks[i] for i in further], plain), strict=True):
        bases[i] = found[0].ids[:at] if found else bases[i]
        if bases[i] and bases[i][-1] == scorer.eos:  # shorter than that: the place is its end
            bases[i] = bases[i][:-1]
    based = [
        task if base == task.prefix else replace(task, prefix=base, apart=())
        for task, base in zip(tasks, bases, strict=True)
    ]
    variants: list[SearchInput] = []
    owners: list[int] = []
    for i, symbols in enumerate(_next_symbols(scorer, based, options)):
        for symbol in symbols:
            if symbol == scorer.eos:  # ends right there
                least = min(based[i].minimum, len(bases[i]))
                variants.append(replace(based[i], limit=len(bases[i]), minimum=least, open_end=False))
            else:
                variants.append(replace(based[i], prefix=(*bases[i], symbol), apart=()))
            owners.append(i)
    results: list[list[DecodedIds]] = [[] for _ in tasks]
    for start in range(0, len(variants), len(tasks)):  # no larger batches than were asked for
        part = slice(start, start + len(tasks))
        for i, variant, found in zip(owners[part], variants[part], search(scorer, variants[part], plain), strict=True):
            if found:
                results[i].append(found[0]._replace(limited=found[0].limited and variant.limit == tasks[i].limit))
    return results


def _next_symbols(scorer: Scorer, tasks: Sequence[SearchInput], options: Options) -> list[list[int]]:
    """The tokens that come first right after each task's prefix, under its rules."""
    results: list[list[int]] = [[] for _ in tasks]
    lengths = torch.tensor([len(task.prefix) for task in tasks], device=scorer.device)

    def note(value_NV: Tensor, t: int, rows_N: Tensor) -> Tensor:
        value_NK, token_NK = best(value_NV, min(options.alternatives, value_NV.shape[1]))
        for n in (lengths[rows_N] == t).nonzero().flatten().tolist():
            allowed = value_NK[n] > -torch.inf
            results[int(rows_N[n])] = token_NK[n][allowed].tolist()
        return token_NK[:, 0]

    walk = steps(scorer, tasks, make_rules(scorer, tasks, options, True), note)
    for _ in islice(walk, int(lengths.max()) + 1):
        pass
    return results
