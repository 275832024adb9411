"""Answers of encoders without a decoder: classification of texts and images, filling of masks, embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unicodedata import normalize as normalize_unicode

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize as normalize_length

from regard.batch import TokenIds, by_length, in_parts, pad
from regard.decode.engine import Engine
from regard.decode.ensemble import check_numbers
from regard.decode.hypothesis import Hypothesis, empty_hypothesis, unknown_flags
from regard.decode.request import Input, Options, Request, changed_options, check_supported
from regard.decode.search import top_tokens
from regard.decode.search_inputs import MAX_CHARACTERS, UNBOUNDED, SearchInput, out_of_memory, too_long
from regard.errors import UserError
from regard.notebook import result_cells, table
from regard.run import Run
from regard.text.codec import Example

BATCH_TOKENS = 8192
MAX_SOURCE = 2048  # tokens of a text
BATCH_IMAGES = 256
CANDIDATES = 5  # per mask, the default of `top_tokens`
MAX_LOGITS = 1 << 22  # numbers in memory at once


@dataclass(frozen=True)
class Classification:
    """The most probable label, and the probabilities of all labels, most probable first."""

    label: str  # empty if the input was not classified
    probabilities: dict[str, float]
    flags: dict[str, str] = field(default_factory=dict)  # problems: name -> reason

    @property
    def probability(self) -> float:
        return self.probabilities.get(self.label, math.nan)

    def __repr__(self) -> str:
        return f"Classification({self.label!r}, probability {self.probability:.3f})"

    def cells(self) -> dict[str, object]:
        """The row of a table in a notebook."""
        return result_cells({"label": self.label, "probability": self.probability}, (), (), self.flags)

    def _repr_html_(self) -> str:
        return table(self.probabilities.items(), ("label", "probability"))

    def as_dict(self) -> dict[str, Any]:
        """The JSON shape; flags only if present; the label is null if the input was not classified."""
        out: dict[str, Any] = {"label": self.label if self.probabilities else None, "probabilities": self.probabilities}
        return {**out, "flags": dict(self.flags)} if self.flags else out


def classify(
    run: Run, texts: Sequence[str | Example], batch_tokens: int = BATCH_TOKENS, max_source: int = MAX_SOURCE
) -> list[Classification]:
    """The labels of texts, in order. A text that is too long has a flag and no label."""
    if run.task.reads == "images":
        raise UserError(f"{run.path}: its model reads images, not text")
    examples = [Example(text) if isinstance(text, str) else text for text in texts]
    rows = run.codec.encode_source(examples)
    results = classify_ids(run, rows, batch_tokens, max_source)
    for i, (example, row) in enumerate(zip(examples, rows, strict=True)):
        if problem := run.codec.features_problem(example):
            results[i] = Classification("", {}, {"error": problem})
        elif not results[i].flags and (unknown := run.codec.unknown_tokens(example, row)):
            results[i] = replace(results[i], flags=unknown_flags(unknown))
    return results


def classify_ids(
    run: Run, rows: Sequence[TokenIds], batch_tokens: int = BATCH_TOKENS, max_source: int = MAX_SOURCE
) -> list[Classification]:
    """The labels of texts as token ids, including the special tokens around them."""
    if not run.task.labels:
        raise UserError(f"{run.path}: its model is not a classifier")
    positions = run.config.top.max_positions or UNBOUNDED
    flags = [too_long("text with its special tokens", len(row), positions, max_source) for row in rows]
    results = [Classification("", {}, each) for each in flags]
    fit = [i for i, each in enumerate(flags) if not each]
    for batch in by_length([len(rows[i]) for i in fit], batch_tokens):
        indices = [fit[j] for j in batch]

        def classify_part(part: slice, indices: list[int] = indices) -> list[Classification]:
            return _classify(run, *pad([rows[i] for i in indices[part]], run.config.ids.pad, run.model.device))

        for part, answers in in_parts(classify_part, len(indices)):
            failure = Classification("", {}, out_of_memory("text", len(rows[indices[part.start]])))
            for i, answer in zip(indices[part], answers or [failure], strict=True):
                results[i] = answer
    return results


def classify_images(run: Run, images_NCHW: NDArray[Any]) -> list[Classification]:
    """The labels of images, with values on the same scale as in the training data."""
    if run.task.reads != "images":
        raise UserError(f"{run.path}: its model reads text, not images")
    patches = run.config.image_patches
    pixels = run.pixels
    shape = (patches.channels, patches.height, patches.width)
    if (actual := images_NCHW.shape[1:]) != shape:
        raise UserError(f"images of (channels, height, width) {actual}, but the model of {run.path} reads {shape}")
    results: list[Classification] = []
    for start in range(0, len(images_NCHW), BATCH_IMAGES):
        images = images_NCHW[start : start + BATCH_IMAGES]
        scaled = images.astype(np.float32) if pixels is None else pixels(images)
        results += _classify(run, torch.from_numpy(scaled).to(run.model.device), None)
    return results


@torch.inference_mode()
def _classify(run: Run, source: Tensor, keep_BS: Tensor | None) -> list[Classification]:
    labels = run.label_names
    logits_BC = run.model(source, keep_BS).squeeze(1).float()
    check_numbers(logits_BC)
    probabilities_BC, order_BC = logits_BC.softmax(-1).sort(descending=True)
    return [
        Classification(labels[order[0]], {labels[i]: p for i, p in zip(order, probabilities, strict=True)})
        for order, probabilities in zip(order_BC.tolist(), probabilities_BC.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class MaskedText(SearchInput):
    """A text with masks: its ids, and the parts between the masks."""

    parts: tuple[str, ...] = ()


class MaskFiller(Engine):
    """Fills each mask of a text with its most probable token, independently of the other masks.

    A hypothesis has one token per mask, and the candidates for each mask as `top_tokens`. Probabilities are over the
    whole vocabulary, but special tokens are not candidates.
    """

    def __init__(self, runs: Run | Sequence[Run], options: Options | None = None) -> None:
        self.options = options or Options()
        self.run, *others = [runs] if isinstance(runs, Run) else runs
        run = self.run
        names = [*changed_options(self.options), *["ensemble"] * bool(others)]
        check_supported(names, run.task.options or (), run.task, run.path)
        mask = run.config.ids.mask
        if mask is None or not run.config.predicts_tokens:
            reason = "vocabulary has no mask token" if mask is None else "model has no LM head"
            raise UserError(f"{run.path}: its {reason}, so it cannot fill masks")
        source = run.codec.source
        self.mask = source.pieces([mask])[0]
        self.mask_id = mask
        self._spellings = source.spellings()
        # If tokens include the space before a word, the space before a mask belongs to the masked token.
        self._space = " " if any(len(each) > 1 and each.startswith(b" ") for each in self._spellings) else ""
        not_candidates = sorted({*source.special, *range(source.size, run.config.source_vocab)})
        self._not_candidates = torch.tensor(not_candidates, dtype=torch.long, device=run.model.device)

    def prepare(self, inputs: Sequence[Input]) -> list[SearchInput]:
        return [self._prepare(item) for item in inputs]

    def _prepare(self, item: Input) -> MaskedText:
        request = item if isinstance(item, Request) else Request(item if isinstance(item, str) else item.source)
        text = request.source
        fields = Request.model_fields
        unsupported = [name for name in fields if name != "source" and getattr(request, name) != fields[name].default]
        if isinstance(item, Example) and item.features:
            unsupported.append("features")
        if unsupported:
            return MaskedText((), flags={"error": f"{', '.join(unsupported)}: not supported when filling masks"})
        if len(text) > MAX_CHARACTERS:
            return MaskedText((), flags={"too_long": f"the text has {len(text)} characters"})
        if not text.strip():
            return MaskedText((), flags={"empty": "the text is empty"})
        parts = text.split(self.mask)
        parts[:-1] = [part.removesuffix(self._space) for part in parts[:-1]]
        codec = self.run.codec
        rows = codec.source.encode(parts)
        before, after = codec.ids.around(codec.frame)
        row = [*before, *rows[0], *(index for ids in rows[1:] for index in (self.mask_id, *ids)), *after]
        pairs = zip(parts, rows, strict=True)
        unknown = tuple(token for part, ids in pairs for token in codec.unknown_tokens(Example(part), ids))
        special = len(before + after)
        limit = (self.run.config.top.max_positions or UNBOUNDED) - special
        flags = too_long("text", len(row) - special, limit, self.options.max_source)
        if len(parts) == 1 and not flags:
            flags = {"unsatisfied": f"there is no {self.mask} to fill"}
        return MaskedText((row,), unknown=unknown, flags=flags, parts=tuple(parts))

    @torch.inference_mode()
    def decode(self, inputs: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        results = [[empty_hypothesis(item.flags)] for item in inputs]
        texts = {i: item for i, item in enumerate(inputs) if isinstance(item, MaskedText) and not item.flags}
        keys = list(texts)
        for batch in by_length([len(texts[i].sources[0]) for i in keys], self.options.batch_tokens):
            indices = [keys[j] for j in batch]
            rows = iter(self._candidates([texts[i].sources[0] for i in indices]))
            for i in indices:
                results[i] = [self._hypothesis(texts[i], [next(rows) for _ in texts[i].parts[1:]])]
        return results

    def _candidates(self, rows: Sequence[TokenIds]) -> Iterator[list[tuple[int, float]]]:
        """The most probable tokens for each mask of these texts, with their log-probabilities."""
        model = self.run.model
        ids_BS, keep_BS = pad(rows, model.config.ids.pad, model.device)
        x_ND = model.hidden(ids_BS, keep_BS)[ids_BS == self.mask_id]
        for part_ND in x_ND.split(max(1, MAX_LOGITS // model.config.source_vocab)):
            logp_NV = model.predict(part_ND).float().log_softmax(-1)
            check_numbers(logp_NV)
            logp_NV.index_fill_(1, self._not_candidates, -torch.inf)
            yield from top_tokens(logp_NV, self.options.top_tokens or CANDIDATES)

    def _hypothesis(self, item: MaskedText, candidates: list[list[tuple[int, float]]]) -> Hypothesis:
        ids, scores = zip(*(row[0] for row in candidates), strict=True)
        pieces = self.run.codec.source_pieces
        tops = tuple(tuple(zip(pieces([i for i, _ in row]), [x for _, x in row], strict=True)) for row in candidates)
        text = self._text(item.parts, ids)
        score = sum(scores)
        flags = unknown_flags(item.unknown)
        return Hypothesis(text, score, tuple(pieces(ids)), scores, score / len(ids), ids, flags=flags, top_tokens=tops)

    def _text(self, parts: Sequence[str], ids: Sequence[int]) -> str:
        """The parts with a token in place of each mask, joined as bytes because a token may be part of a character."""
        first, *rest = (part.encode("utf-8", "replace") for part in parts)
        joined = first
        for index, part in zip(ids, rest, strict=True):
            spelling = self._spellings[index]
            joined += (spelling if joined else spelling.removeprefix(self._space.encode())) + part
        text = joined.decode("utf-8", "replace")
        return normalize_unicode("NFC", text) if self.run.codec.source.scheme == "nfd" else text


class Embeddings(NamedTuple):
    """Vectors of texts (texts, width)."""

    vectors: NDArray[np.float32]
    truncated: dict[int, int]  # index of a truncated text -> its number of tokens
    limit: int  # maximum tokens that the model reads, without special tokens


@torch.inference_mode()
def embed(run: Run, texts: Sequence[str], batch_tokens: int, average_windows: bool, normalize: bool) -> Embeddings:
    """The mean of the encoder's vectors for the tokens of each text, including special tokens.

    A text with more tokens than the model has positions is truncated or, with `average_windows`, read in windows.
    """
    codec, model, config = run.codec, run.model, run.config
    before, after = codec.ids.around(codec.frame)
    limit = (config.top.max_positions or UNBOUNDED) - len(before + after)
    rows = []
    owners = []  # the index of the text of each row
    truncated: dict[int, int] = {}
    for owner, ids in enumerate(codec.source.encode(texts)):
        starts = range(0, len(ids), limit) if average_windows and ids else range(1)
        if len(ids) > limit * len(starts):
            truncated[owner] = len(ids)
        rows += [[*before, *ids[start : start + limit], *after] for start in starts]
        owners += [owner] * len(starts)
    sums_ND = torch.zeros(len(texts), config.top.out_width)
    counts_N = torch.zeros(len(texts))
    for batch in by_length([len(row) for row in rows], batch_tokens):
        ids_BS, keep_BS = pad([rows[i] for i in batch], config.ids.pad, model.device)
        x_BSD = model.hidden(ids_BS, keep_BS)
        check_numbers(x_BSD)
        owner_B = torch.tensor([owners[i] for i in batch])
        sum_BD = (x_BSD if keep_BS is None else x_BSD * keep_BS.unsqueeze(-1)).sum(1)
        sums_ND.index_add_(0, owner_B, sum_BD.float().cpu())
        counts_N.index_add_(0, owner_B, torch.tensor([float(len(rows[i])) for i in batch]))
    mean_ND = sums_ND / counts_N.clamp(min=1).unsqueeze(1)
    return Embeddings((normalize_length(mean_ND, dim=-1) if normalize else mean_ND).numpy(), truncated, limit)
