"""A trace holds the values of the forward pass of one example; pages and drawings need no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.decode.alignment import MAX_HEADS, MIN_MERIT, alignment_quality, best_heads, load_heads
from regard.decode.request import HeadIndex, Options, Request
from regard.decode.search import NBEST_GROWTH
from regard.decode.torch_engine import TorchEngine
from regard.errors import UserError, plural
from regard.inspect import heads as head_statistics, logit_lens, page, walk
from regard.inspect.inputs import CLASS_TOKEN, NOTE_TEXTS, ImageInput, InspectionInput, Note, image_input, text_input
from regard.model import Model, kind_and_layer
from regard.nn.cache import State
from regard.nn.hooks import record, record_calls
from regard.nn.transformer import Transformer
from regard.notebook import heat_table, table
from regard.run import Run
from regard.text.codec import Direction, Example

MAX_TOKENS = 300  # per side
MAX_TEXT = 4000  # characters of a text on the page
MIN_POSITIONS = 32  # of a position heatmap
MAX_ATTRIBUTED = 64  # output tokens, one backward pass each
MAX_SILENCED = 500_000_000_000  # multiplications (a few seconds) spent on the importance of heads
PAGE_CONSTANTS = {  # with the shared constants, read by the page's script: web/shared/constants.js
    "tokens": {**page.TOKEN_NAMES, "cls": CLASS_TOKEN},
    "notes": NOTE_TEXTS,
    "max_tokens": MAX_TOKENS,
    "max_text": MAX_TEXT,
    "missing": page.MISSING,
    "shown_numbers": walk.SHOWN_NUMBERS,
    "min_positions": MIN_POSITIONS,
    "heatmap_columns": walk.HEATMAP_COLUMNS,
    "active_neuron": walk.ACTIVE_NEURON,
    "step_candidates": logit_lens.STEP_CANDIDATES,
    "lens_candidates": logit_lens.LENS_CANDIDATES,
    "max_alignment_heads": MAX_HEADS,
    "nearly_best": MIN_MERIT,
    "nbest_growth": NBEST_GROWTH,
    "kind_names": {kind: name.removesuffix("-attention") for kind, name in page.KIND_NAMES.items()},
    "head_names": head_statistics.NAMES,
    "offset_names": head_statistics.OFFSET_NAMES,
    "ramp": page.RAMP,
    "main_share": head_statistics.MAIN_SHARE,
    "part_share": head_statistics.PART_SHARE,
    "max_parts": head_statistics.MAX_PARTS,
    "even_share": head_statistics.EVEN_SHARE,
}
TOKEN_ROWS = {"encoder": ("source", "source"), "decoder": ("input", "input"), "cross": ("output", "source")}
MaskedText = tuple[torch.Tensor, list[int]]  # ids, and the positions to mask one at a time


@dataclass(frozen=True)
class AttentionMap:
    """The weights of all heads of one attention; `rows` and `columns` name the token rows of queries and keys."""

    name: str  # of the attention in the model: decoder.blocks.0.cross
    kind: str  # encoder, decoder or cross
    layer: int
    weights_HTS: np.ndarray
    rows: str
    columns: str
    heads: tuple[int, ...]  # numbers of the heads; pruned models have gaps

    def __repr__(self) -> str:
        heads, queries, keys = self.weights_HTS.shape
        return f"AttentionMap({self.name!r}, {plural(heads, 'head')}, {queries} {self.rows} x {keys} {self.columns})"

    def _repr_html_(self) -> str:
        return table([("name", self.name), ("kind", self.kind), ("shape", str(self.weights_HTS.shape))])


@dataclass(frozen=True)
class InputAttribution:
    """Gradient x input of every output token; `rows` and `columns` name its token rows."""

    values_TS: np.ndarray
    rows: str
    columns: str


class AttentionMatrix(NamedTuple):
    """Attention weights with the tokens and names of both axes: queries down, keys across."""

    weights_TS: np.ndarray
    tokens: tuple[tuple[str, ...], tuple[str, ...]]
    names: tuple[str, str]
    right_to_left: bool = False  # writing direction of the keys

    def __repr__(self) -> str:
        rows, columns = self.names
        return f"AttentionMatrix({len(self.tokens[0])} {rows} x {len(self.tokens[1])} {columns})"

    def _repr_html_(self) -> str:
        return heat_table(self.weights_TS, *self.tokens, caption=" x ".join(self.names))


@dataclass(frozen=True)
class Trace:
    """The forward pass of one example. A notebook shows it as the attention page."""

    title: str
    facts: dict[str, str]  # the architecture, in words
    texts: dict[str, str]  # source and output
    tokens: dict[str, tuple[str, ...]]  # token rows by name: source, input, output
    directions: dict[str, Direction]  # writing direction of each token row
    maps: tuple[AttentionMap, ...]
    alignment: dict[str, np.ndarray]  # (output, source) maps by name, the best guess first
    steps: tuple[logit_lens.OutputStep, ...]
    lens: tuple[logit_lens.LensLayer, ...]
    positions: tuple[walk.PositionHeatmap, ...]
    walks: tuple[walk.Walk, ...]
    notes: tuple[Note, ...] = ()
    score: float = 0.0  # log-probability of the output
    unit: str = "token"  # what a step predicts: a token or a class
    image: ImageInput | None = None
    distances: dict[str, np.ndarray] = field(default_factory=dict)  # images: pixels per head, by map
    attribution: InputAttribution | None = None  # of short outputs
    importance: dict[str, list[float]] = field(default_factory=dict)  # lost log-probability per silenced head, by map

    def __repr__(self) -> str:
        texts = " -> ".join(repr(text if len(text) <= 40 else f"{text[:39]}…") for text in self.texts.values())
        return f"Trace({texts}, score {self.score:.3f}, {plural(len(self.maps), 'attention map')})"

    def find(self, kind: str, layer: int) -> AttentionMap:
        maps = {(m.kind, m.layer): m for m in self.maps}
        if (kind, layer) not in maps:
            layers = ", ".join(f"{name} layer {number + 1}" for name, number in sorted(maps))
            raise UserError(f"no {kind} attention in layer {layer + 1}; this model has {layers}")
        return maps[kind, layer]

    @property
    def main_kind(self) -> str:
        """The default kind of attention."""
        return "cross" if self.alignment else self.maps[0].kind

    def matrix(self, kind: str | None = None, layer: int | None = None, head: int | None = None) -> AttentionMatrix:
        """A head by number, or the mean over the heads of a layer; by default the alignment, else the last layer."""
        if kind is None and layer is None and self.alignment:
            names = TOKEN_ROWS["cross"]
            weights_TS = next(iter(self.alignment.values()))
        else:
            kind = kind or self.main_kind
            last = max((m.layer for m in self.maps if m.kind == kind), default=0)
            m = self.find(kind, last if layer is None else layer)
            if head is not None and head not in m.heads:
                numbers = ", ".join(str(number + 1) for number in m.heads)
                raise UserError(f"no head {head + 1} in layer {m.layer + 1}; it has {numbers}")
            names = m.rows, m.columns
            weights_TS = m.weights_HTS.mean(0) if head is None else m.weights_HTS[m.heads.index(head)]
        rows, columns = names
        tokens = self.tokens[rows], self.tokens[columns]
        return AttentionMatrix(weights_TS, tokens, names, self.directions[columns] == "rtl")

    def to_html(self) -> str:
        """The attention page as one self-contained file."""
        return page.render_page(self.page_data())

    def _repr_html_(self) -> str:
        return page.render_frame(self.to_html())

    def page_data(self, packer: page.Packer | None = None) -> dict[str, Any]:
        """The data of the page's script: the fields of the trace and the constants."""
        packer = packer or page.Packer()
        plain = {
            "texts": {name: text[:MAX_TEXT] for name, text in self.texts.items()},
            "alignment": [{"name": name, "weights": weights} for name, weights in self.alignment.items()],
            "image": None if self.image is None else self.image.page_data(),
            "distances": {name: distance_H.tolist() for name, distance_H in self.distances.items()},
            "notes": [note._asdict() for note in self.notes],
        }
        data: dict[str, Any] = packer.json({f.name: plain.get(f.name, getattr(self, f.name)) for f in fields(self)})
        return data | {"numbers": packer.pack(), "constants": page.shared_constants() | PAGE_CONSTANTS}


def trace(
    run: Run, example: Example, target: Sequence[int] = (), *, heads: Sequence[HeadIndex] = (), most: int = MAX_TOKENS
) -> Trace:
    """Trace a text through a run's model.

    `target` holds the ids of the output or of the continuation. The target of the example is the class to compare with.
    `heads` (layer, index in the layer) are averaged for the alignment, by default the best ones.
    """
    return _trace_input(run, text_input(run, example, target, most), heads)


def trace_text(run: Run, text: str, answer: str | None = None, more: int = 0, features: str | None = None) -> Trace:
    """Trace a text through a model with one stack.

    `answer` is the continuation or the class to compare with; a language model can generate `more` tokens greedily.
    """
    if run.task.name == "lm":
        if answer is not None and more:
            raise UserError("a continuation and a number of generated tokens exclude each other; choose one")
        ids = run.codec.target.encode([answer])[0] if answer is not None else []
        return trace(run, Example(text), ids or continuation(run, text, more))
    if more:
        raise UserError(f"{run.path}: only a language model can continue a text")
    if answer is not None and not run.task.labels:
        raise UserError(f"{run.path}: this model has no output to compare {answer!r} with")
    return trace(run, Example(text, answer, features))


def trace_pair(run: Run, example: Example, target: str | None = None, beam: int = 5) -> Trace:
    """Trace a source with `target` or, by default, with the best output of a beam search."""
    if target is not None:
        return trace(run, example, run.codec.encode_target([target])[0], heads=load_heads(run.path))
    best = TorchEngine(run, Options(beam=beam))([Request(example.source, example.features)])[0][0]
    if not best.ids:
        raise UserError(f"the model has no output for this source: {', '.join(best.flags.values())}")
    ids = list(best.ids)
    limit = best.flags.get("max_length")
    if limit is not None and ids[-1] == run.config.ids.eos:  # the length limit forced the end token
        ids.pop()
    result = trace(run, example, ids, heads=load_heads(run.path))
    note = Note("limit", f"The output {limit} before its end token.")
    return result if limit is None else replace(result, notes=(*result.notes, note))


@torch.no_grad()
def continuation(run: Run, text: str, count: int) -> list[int]:
    """The ids of the greedy continuation of a text, up to `count` tokens or the end token."""
    model = run.model
    out: list[int] = []
    tokens = [run.config.start_id, *run.codec.target.encode([text])[0]]
    state = State(())
    while len(out) < count and (not out or out[-1] != run.config.ids.eos):
        x_1TD, state = model.read(torch.tensor([tokens], device=model.device), state)
        tokens = [int(model.predict(x_1TD[0, -1]).argmax())]
        out += tokens
    return out


def trace_image(run: Run, image_CHW: np.ndarray, label: str | None = None, name: str = "image") -> Trace:
    """Trace an image, with the pixel values of its file, through a run's model."""
    return _trace_input(run, image_input(run, image_CHW, label, name, MAX_TOKENS))


@torch.no_grad()
def _trace_input(run: Run, inputs: InspectionInput, heads: Sequence[HeadIndex] = ()) -> Trace:
    model = run.model
    was_training = model.training
    model.eval()
    try:
        hooks = logit_lens.lens_hooks(model).values()
        with record(model, "*.weights", *hooks) as recorded, record_calls(model) as calls:
            logits_TV = model(*inputs.arguments)[0].float()
        vectors = {hook: recorded[hook][0] for hook in hooks}
        masked = None
        if run.task.name == "masked" and run.config.predicts_tokens:
            ids = inputs.ids["encoder"]
            maskable = [i for i, index in enumerate(ids) if index not in run.codec.source.special]
            masked = torch.tensor(ids, device=model.device), maskable
            logits_TV, vectors = logit_lens.mask_each_token(model, *masked)
        walks = walk.make_walks(model, calls, inputs.ids)
        lens = logit_lens.logit_lens(model, vectors, inputs.names)
        best = logits_TV.argmax(-1).tolist()
        labels = [] if model.output is None else best if inputs.labels is None else inputs.labels
        score = float(logits_TV.log_softmax(-1)[range(len(labels)), labels].sum()) if labels else 0.0
        attribution = _attribution(model, inputs, labels, masked)
        importance, unmeasured = _importance(model, inputs, labels, score, masked)
    finally:
        model.train(was_training)
    maps = []
    for name, attention in model.attentions().items():
        kind, layer = kind_and_layer(name)
        weights_HTS = recorded[f"{name}.weights"][0].float().cpu().numpy()
        maps.append(AttentionMap(name, kind, layer, weights_HTS, *TOKEN_ROWS[kind], attention.head_numbers))
    distances = {}
    if run.task.reads == "images":
        distance_SS = head_statistics.patch_distances(run.config.image_patches)
        for m in maps:
            distance_HS = head_statistics.mean_distance(torch.from_numpy(m.weights_HTS), distance_SS)
            distances[m.name] = distance_HS.mean(-1).numpy()
    positions = max(MIN_POSITIONS, *map(len, inputs.tokens.values()))
    stacks = {name: getattr(model, name) for name in run.config.stacks}
    heatmaps = [walk.position_heatmap(name, x, positions) for name, x in stacks.items() if isinstance(x, Transformer)]
    path = run.path.resolve()
    return Trace(
        title=(path.parent if path.name == "run" else path).name or "model",
        facts=run.facts,
        texts=inputs.texts | ({"prediction": inputs.names(best)[0]} if model.classifies else {}),
        tokens=inputs.tokens,
        directions=inputs.directions,
        maps=tuple(maps),
        alignment=_alignments(maps, heads) if "source" in inputs.tokens else {},
        steps=logit_lens.output_steps(logits_TV, labels, inputs.names),
        lens=lens,
        positions=tuple(heatmap for heatmap in heatmaps if heatmap is not None),
        walks=walks,
        notes=(*inputs.notes, *unmeasured),
        score=score,
        unit="class" if model.classifies else "token",
        image=inputs.image,
        distances=distances,
        attribution=attribution,
        importance=importance,
    )


def _attribution(
    model: Model, inputs: InspectionInput, labels: Sequence[int], masked: MaskedText | None
) -> InputAttribution | None:
    """The attribution of a short output, a class, or the masked tokens of a short text."""
    if not 0 < len(labels) <= MAX_ATTRIBUTED:
        return None
    if masked is not None:
        return InputAttribution(logit_lens.masked_attribution(model, *masked).cpu().numpy(), "source", "source")
    columns = "input" if model.decoder_only else "source"
    return InputAttribution(logit_lens.attribution(model, inputs.arguments, labels).cpu().numpy(), "output", columns)


def _importance(
    model: Model, inputs: InspectionInput, labels: Sequence[int], score: float, masked: MaskedText | None
) -> tuple[dict[str, list[float]], list[Note]]:
    """The log-probability lost per silenced head, by map, or a note if measuring takes too long."""
    if not labels:
        return {}, []
    tokens = sum(len(row) for name, row in inputs.tokens.items() if name != "output")
    heads = sum(attention.heads for attention in model.attentions().values())
    if heads * model.size * tokens * (1 if masked is None else tokens) > MAX_SILENCED:
        text = f"The importance of the {heads} heads was not measured: this model or this text is too large."
        return {}, [Note("unmeasured", text)]
    if masked is not None:
        return logit_lens.masked_importance(model, *masked, score), []
    return logit_lens.head_importance(model, inputs.arguments, labels, score), []


def _alignments(maps: Sequence[AttentionMap], heads: Sequence[HeadIndex]) -> dict[str, np.ndarray]:
    """Maps from the output to the source: the mean of the chosen or best heads first, then the mean of each layer."""
    cross = {m.layer: m for m in maps if m.kind == "cross"}
    out: dict[str, np.ndarray] = {}
    several = len(cross) > 1 or any(len(m.heads) > 1 for m in cross.values())
    chosen = [(layer, index) for layer, index in heads if layer in cross and index < len(cross[layer].heads)]
    if several:
        title = "alignment heads" if chosen else "sharpest heads"
        quality = {layer: alignment_quality(m.weights_HTS).tolist() for layer, m in cross.items()}
        chosen = chosen or best_heads({(layer, i): q for layer, q_H in quality.items() for i, q in enumerate(q_H)})
        names = ", ".join(f"{layer + 1}.{cross[layer].heads[index] + 1}" for layer, index in chosen)
        out[f"{title} {names}"] = np.mean([cross[layer].weights_HTS[i] for layer, i in chosen], axis=0)
    for layer, m in cross.items():
        out[f"layer {layer + 1}, mean of heads" if several else "attention"] = m.weights_HTS.mean(0)
    if len(cross) > 1:
        out["mean of everything"] = np.mean([m.weights_HTS.mean(0) for m in cross.values()], axis=0)
    return out
