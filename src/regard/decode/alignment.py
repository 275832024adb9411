"""Which source token an output token comes from, read off the attention in a second, forced pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.batch import TokenIds, collate
from regard.config import Value, parse
from regard.decode.hypothesis import Alignment
from regard.decode.options import HeadIndex, Options
from regard.decode.scorer import by_length
from regard.errors import UserError
from regard.files import read_json, write_json
from regard.model import Model, kind_and_layer
from regard.nn.attention import Attention
from regard.nn.hooks import record
from regard.run import HEADS, Run
from regard.text.codec import Example


class Heads(Value):
    """What alignment.json holds: layers and heads counted from 0, as in `Options`; people are shown them from 1."""

    heads: tuple[HeadIndex, ...]


def align(
    run: Run,
    sources: Sequence[TokenIds],
    outputs: Sequence[TokenIds],
    heads: Sequence[HeadIndex] = (),
    batch_tokens: int = 8192,
) -> list[Alignment]:
    """The alignment of every output with its source, both as ids that end in the end token: the mean of the heads.

    The source's end token has its column (attention parks there), but no hard link.
    """
    heads = heads_of(run.model, heads)
    results: list[Alignment] = [Alignment(np.zeros((0, 0)), (), ())] * len(outputs)
    lengths = [max(len(source), len(output)) for source, output in zip(sources, outputs, strict=True)]
    for batch in by_length(lengths, batch_tokens):
        seen = _forced(
            run.model, [sources[i] for i in batch], [outputs[i] for i in batch], [layer for layer, _ in heads]
        )
        weights_BTS = mean_heads(seen, heads).numpy(force=True)
        for i, weights_TS in zip(batch, weights_BTS, strict=True):
            soft = weights_TS[: len(outputs[i]) - 1, : len(sources[i])]
            soft = soft / np.maximum(soft.sum(1, keepdims=True), 1e-9)  # local attention fades within its window
            shown = run.codec.source_pieces(sources[i]), run.codec.target_pieces(outputs[i][:-1])
            results[i] = Alignment(soft, tuple(shown[0]), tuple(shown[1]))
    return results


def choose_heads(
    run: Run, pairs: Iterable[tuple[str, str] | Example], most: int = 4, lines: int = 200
) -> tuple[HeadIndex, ...]:
    """The decoder heads that align best on given pairs: sharp, and over the pairs looking at all of the source.

    A head's merit is its mean weight on the token it looks at most, times the share of source tokens that it ever
    looks at. The best head is taken, and up to `most` with nearly its merit.
    """
    examples = [pair if isinstance(pair, Example) else Example(*pair) for pair in islice(pairs, lines)]
    examples = [example for example in examples if example.source.strip() and example.target]
    if not examples:
        raise UserError("choosing alignment heads needs pairs with a source and a target")
    sources = run.codec.encode_source(examples)
    targets = run.codec.encode_target([example.target or "" for example in examples])
    layers = sorted(cross_attentions(run.model))
    merits: dict[HeadIndex, float] = {}
    for batch in by_length([max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)], 8192):
        seen = _forced(run.model, [sources[i] for i in batch], [targets[i] for i in batch], layers)
        for layer, passes in seen.items():
            for row, weights_HTS in zip(batch, torch.cat(passes, 2), strict=True):
                weights_HTS = weights_HTS[:, : len(targets[row]) - 1, : len(sources[row]) - 1]
                sharp_H = weights_HTS.amax(2).mean(1)
                covered_H = weights_HTS.sum(1).clamp(max=1.0).mean(1)
                for head, merit in enumerate((sharp_H * covered_H).tolist()):
                    merits[layer, head] = merits.get((layer, head), 0.0) + merit
    ranked = sorted(merits, key=lambda head: (-merits[head], head))
    return tuple(sorted(head for head in ranked[:most] if merits[head] >= 0.9 * merits[ranked[0]]))


def save_heads(path: Path, heads: Sequence[HeadIndex]) -> None:
    """Keep the heads to align with in a run directory."""
    write_json(path / HEADS, {"heads": [list(head) for head in heads]})


def load_heads(path: Path) -> tuple[HeadIndex, ...]:
    """The heads kept in a run directory, if any."""
    if not (path / HEADS).is_file():
        return ()
    return parse(Heads, read_json(path / HEADS), str(path / HEADS)).heads


@torch.inference_mode()
def _forced(
    model: Model, sources: Sequence[TokenIds], outputs: Sequence[TokenIds], layers: Sequence[int]
) -> dict[int, list[Tensor]]:
    made = collate(sources, outputs, model.config).to(model.device)
    with watching(model, sorted(set(layers))) as seen:
        model.hidden(made.source_BS, made.source_keep_BS, made.input_BT)
    return seen


def cross_attentions(model: Model) -> dict[int, Attention]:
    """The attention over the source in each decoder layer that has one."""
    assert model.decoder is not None
    layers = {i: getattr(block, "cross", None) for i, block in enumerate(model.decoder.blocks)}
    return {i: cross for i, cross in layers.items() if cross is not None}


@contextmanager
def watching(model: Model, layers: Sequence[int]) -> Iterator[dict[int, list[Tensor]]]:
    """While open, collect the weights (B, H, T, S) of every pass through these layers."""
    seen: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    handles = []
    crosses = cross_attentions(model)
    try:
        for layer in layers:

            def note(module: nn.Module, args: Any, weights: Tensor, layer: int = layer) -> None:
                seen[layer].append(weights.detach())

            handles.append(crosses[layer].weights.register_forward_hook(note))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def heads_of(model: Model, chosen: Sequence[HeadIndex]) -> tuple[HeadIndex, ...]:
    """The heads to read: the chosen ones, checked, or all of the last layer but one, where alignments are clearest."""
    crosses = cross_attentions(model)
    if not chosen:
        layer = sorted(crosses)[-2:][0]
        return tuple((layer, head) for head in range(crosses[layer].heads))
    for layer, head in chosen:
        if layer not in crosses or head >= crosses[layer].heads:
            known = ", ".join(f"{i + 1}: {cross.heads} heads" for i, cross in sorted(crosses.items()))
            raise UserError(
                f"alignment_heads: there is no layer {layer + 1} with a head {head + 1}"
                f" (layers that look at the source, from 1: {known})"
            )
    return tuple(chosen)


def mean_heads(seen: dict[int, list[Tensor]], heads: Sequence[HeadIndex]) -> Tensor:
    """What was seen, joined over passes: the mean of the heads, (B, T, S)."""
    joined = {layer: torch.cat(passes, dim=2) for layer, passes in seen.items()}
    return torch.stack([joined[layer][:, head] for layer, head in heads]).mean(0)


LEAST = 1e-3  # attention counted for a token that got less: one token alone must not decide everything


class Coverage:
    """Sums up the attention that source tokens get from a hypothesis, which ranks by p * sum log min(1, attention)."""

    def __init__(self, model: Model, sources: Sequence[TokenIds], options: Options) -> None:
        self.model, self.penalty = model, options.coverage_penalty
        self.heads = heads_of(model, options.alignment_heads)
        self.seen: dict[int, list[Tensor]] = {}
        device = model.device
        lengths_B = torch.tensor([len(source) for source in sources], device=device)
        place_S = torch.arange(int(lengths_B.max()), device=device)
        self.real_BS = place_S < lengths_B.unsqueeze(1) - 1  # the end token needs no attention
        self.sum_NS = torch.zeros_like(self.real_BS, dtype=torch.float32)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While open, the model's attention is collected."""
        with watching(self.model, sorted({layer for layer, _ in self.heads})) as self.seen:
            yield

    def add(self) -> None:
        """Count the attention of the last step."""
        weights_BKS = mean_heads(self.seen, self.heads)
        self.sum_NS = self.sum_NS + weights_BKS.flatten(0, 1)
        for passes in self.seen.values():
            passes.clear()

    def value(self, alive_B: Tensor) -> Tensor:
        """What to add to the rank of a hypothesis that ends now, per row: zero when all was attended to."""
        covered_BKS = self.sum_NS.clamp(LEAST, 1.0).log().view(len(alive_B), -1, self.sum_NS.shape[1])
        return self.penalty * (covered_BKS * self.real_BS[alive_B].unsqueeze(1)).sum(-1)

    def select(self, rows_N: Tensor) -> None:
        """Carry on these rows."""
        self.sum_NS = self.sum_NS[rows_N]


Links = list[tuple[int, int]]  # (source place, output place) from 0


def alignment_merits(
    model: Model, pairs: Sequence[tuple[TokenIds, TokenIds]], links: Sequence[Links] | None = None
) -> dict[tuple[str, int], float]:
    """How well each head of the cross-attention aligns: agreement with links, or sharpness times coverage without any.

    Agreement is the share of linked output tokens whose heaviest weight is on a token they are linked with.
    """
    names = [name for name in model.attentions() if kind_and_layer(name)[0] == "cross"]
    total: dict[tuple[str, int], float] = {}
    count = 0.0
    for start in range(0, len(pairs), 32):
        part = list(pairs[start : start + 32])
        batch = collate([source for source, _ in part], [target for _, target in part], model.config)
        device = model.device
        with torch.no_grad(), record(model, *(f"{name}.weights" for name in names)) as maps:
            batch = batch.to(device)
            model.hidden(batch.source_BS, batch.source_keep_BS, batch.input_BT)
        for row, (source, target) in enumerate(part):
            given = None if links is None else links[start + row]
            rows = max(1, len(target) - 1)
            wanted = None if given is None else _by_output(given, rows)
            count += 1.0 if wanted is None else len(wanted)
            for name in names:
                for head, all_TS in enumerate(maps[f"{name}.weights"][row].float().cpu().numpy()):
                    seen_TS = all_TS[:rows, : len(source)]
                    merit = alignment_quality(seen_TS, len(source)) if wanted is None else _agreeing(seen_TS, wanted)
                    total[name, head] = total.get((name, head), 0.0) + merit
    if links is not None and not count:
        raise UserError("not one of the links is within its pair of texts; they are written source-output, from 0")
    return {spot: value / count for spot, value in total.items()}


def _by_output(links: Links, rows: int) -> dict[int, set[int]]:
    wanted: dict[int, set[int]] = {}
    for source, output in links:
        if output < rows:
            wanted.setdefault(output, set()).add(source)
    return wanted


def _agreeing(weights_TS: np.ndarray, wanted: dict[int, set[int]]) -> float:
    best = weights_TS[:, : max(1, weights_TS.shape[1] - 1)].argmax(1)
    return float(sum(int(best[output]) in sources for output, sources in wanted.items()))


def read_links(path: str | Path) -> list[Links]:
    """An alignment file: per line, pairs like `0-0 1-2`, source first, from 0."""
    out = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable: {error}") from None
    for number, line in enumerate(text.split("\n")[: text.count("\n") or 1], start=1):
        links = []
        for word in line.split():
            if not re.fullmatch(r"[0-9]{1,6}-[0-9]{1,6}", word):
                raise UserError(f"{path}:{number}: {word!r} is not a link; write source-output from 0, like 0-0 1-2")
            source, _, output = word.partition("-")
            links.append((int(source), int(output)))
        out.append(links)
    return out


def alignment_quality(weights_TS: np.ndarray, length: int) -> float:
    """Sharpness times coverage: the mean of the largest weights, and how much of the source but its end is seen."""
    if weights_TS.size == 0:
        return 0.0
    sharpness = weights_TS.max(-1).mean()
    coverage = np.minimum(1.0, weights_TS[:, : max(1, length - 1)].sum(0)).mean()
    return float(sharpness * coverage)
