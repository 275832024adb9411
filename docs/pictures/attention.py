"""Draw the pictures of docs/attention.md: python docs/pictures/attention.py

Writes attention-*.svg next to this file. Numbers come from regard's own modules with fixed seeds; one model is
trained for a few seconds. The script needs only regard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.model import on_meta
from regard.nn.hooks import record

HERE = Path(__file__).parent
CELL = 26  # side of a cell of a matrix, in pixels

STYLE = """
svg { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
.ground { fill: #ffffff; } text { font-size: 12px; fill: #14202e; } .small { font-size: 11px; fill: #4a5765; }
.number { font-size: 11px; }
.head { font-size: 13px; font-weight: 600; } .mono { font-family: ui-monospace, Menlo, Consolas, monospace; }
.grid { fill: none; } .grid, .cell { stroke: #c3ccd6; } .weight { fill: #1f5fa8; } .minus { fill: #c26a12; }
.masked { fill: url(#hatch); } .hatch { stroke: #98a4b1; } .light { fill: #ffffff; }
.box { fill: #f1f4f8; stroke: #44617f; } .attention { fill: #dce9f8; } .forward { fill: #fdebd3; }
.norm { fill: #e3f1e3; } .frame { fill: none; stroke: #98a4b1; stroke-dasharray: 4 3; }
.flow { fill: none; stroke: #44617f; stroke-width: 1.4; } .second { stroke: #c26a12; } .tip { fill: #44617f; }
.curve { fill: none; stroke: #1f5fa8; stroke-width: 2; } .curve.second { stroke: #c26a12; }
.first-text { fill: #1f5fa8; } .second-text { fill: #a4560a; }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117; } text { fill: #e6edf3; } .small { fill: #a3afbb; }
.grid, .cell { stroke: #3a4450; } .weight { fill: #6cb0f5; } .minus { fill: #f0a04b; }
.hatch { stroke: #56616d; } .light { fill: #0d1117; }
.box { fill: #161b22; stroke: #7fa3c7; } .attention { fill: #12304f; } .forward { fill: #43301a; }
.norm { fill: #1c3a24; } .frame { stroke: #62788f; }
.flow { stroke: #7fa3c7; } .second { stroke: #f0a04b; } .tip { fill: #7fa3c7; }
.curve { stroke: #6cb0f5; } .curve.second { stroke: #f0a04b; }
.first-text { fill: #6cb0f5; } .second-text { fill: #f0a04b; }
}
"""
DEFINITIONS = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="tip" d="M0 0L8 4L0 8z"/></marker><pattern id="hatch" width="6" height="6" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line class="hatch" y2="6"/></pattern></defs>'
)


class Picture:
    """An SVG drawing; coordinates are pixels from the top left."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="{escape(label)}">',
            f"<style>{STYLE}</style>{DEFINITIONS}",
            f'<rect class="ground" width="{width}" height="{height}"/>',
        ]

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> None:
        kind = f' class="{style}"' if style else ""
        self.parts.append(f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def rect(
        self, x: float, y: float, width: float, height: float, style: str, *, round: int = 0, opacity: float = 1
    ) -> None:
        extra = f' rx="{round}"' if round else ""
        extra += "" if opacity == 1 else f' fill-opacity="{opacity:.2f}"'
        self.parts.append(
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{extra}/>'
        )

    def box(self, x: float, y: float, width: float, text: str, style: str = "", note: str = "") -> None:
        """A named box centred at (x, y), with a note on its right side."""
        self.rect(x - width / 2, y - 13, width, 26, f"box {style}".strip(), round=4)
        self.text(x - width / 2 + 8 if note else x, y + 4, text, anchor="start" if note else "middle")
        if note:
            self.text(x + width / 2 - 8, y + 4, note, "small", "end")

    def path(self, *points: tuple[float, float], style: str = "flow", tip: bool = True) -> None:
        route = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(f'<path class="{style}" d="{route}"{end}/>')

    def plus(self, x: float, y: float) -> None:
        """A residual addition."""
        self.parts.append(f'<circle class="box" cx="{x:.1f}" cy="{y:.1f}" r="8"/>')
        self.text(x, y + 4, "+")

    def matrix(
        self,
        x: float,
        y: float,
        weights: Tensor,
        rows: Sequence[str],
        columns: Sequence[str],
        *,
        masked: Tensor | None = None,
    ) -> None:
        """Attention weights in percent as cells, queries in rows and keys in columns; masked cells are hatched."""
        for j, name in enumerate(columns):
            self.text(x + (j + 0.5) * CELL, y - 6, name, "mono")
        for i, name in enumerate(rows):
            self.text(x - 6, y + (i + 0.5) * CELL + 4, name, "mono", "end")
            for j in range(len(columns)):
                place = (x + j * CELL, y + i * CELL)
                weight = weights[i, j].item()
                if masked is not None and masked[i, j]:
                    self.rect(*place, CELL, CELL, "cell masked")
                    continue
                self.rect(*place, CELL, CELL, "cell weight", opacity=weight)
                if weight >= 0.005:
                    shade = "number light" if weight > 0.65 else "number"
                    self.text(place[0] + CELL / 2, place[1] + CELL / 2 + 4, f"{100 * weight:.0f}", shade)

    def chart(
        self, x: float, y: float, size: tuple[float, float], title: str, curves: dict[str, Sequence[float]]
    ) -> None:
        """Curves over layers 1, 2, ..., on an axis that starts at 0."""
        width, height = size
        top = max(max(curve) for curve in curves.values()) * 1.1
        self.text(x, y - 10, title, "head", "start")
        self.path((x, y), (x, y + height), (x + width, y + height), style="grid", tip=False)
        for (name, curve), style in zip(curves.items(), ("", " second"), strict=True):
            steps = len(curve) - 1
            points = [(x + width * i / steps, y + height * (1 - v / top)) for i, v in enumerate(curve)]
            self.path(*points, style=f"curve{style}", tip=False)
            kind = "second-text" if style else "first-text"
            self.text(x + width + 6, points[-1][1] + 4, f"{name} {curve[-1]:.1f}", kind, "start")
            apart = 5 if curve[0] == min(other[0] for other in curves.values()) else -5
            self.text(x - 5, points[0][1] + 4 + apart, f"{curve[0]:.1f}", f"small {kind}", "end")
        self.text(x, y + height + 16, "layer 1", "small", "start")
        self.text(x + width, y + height + 16, str(steps + 1), "small", "end")


def millions(*parts: nn.Module | None) -> str:
    """The number of parameters of some modules."""
    return f"{sum(p.numel() for part in parts if part is not None for p in part.parameters()) / 1e6:.2f} M"


def architecture() -> Picture:
    """The whole Transformer, with the first layer of each stack in detail; parameters are counted on the model."""
    config = regard.preset("transformer-base", vocab=37000)
    model = on_meta(config)
    assert config.encoder is not None and model.encoder is not None and model.decoder is not None
    layers, width, vocab = config.encoder.layers, config.encoder.width, f"{config.target_vocab:,}"
    picture = Picture(
        886,
        664,
        f"A Transformer: {layers} encoder layers in sequence, {layers} decoder layers in sequence that each attend to "
        "the encoder output, LM head, softmax, and the chosen token fed back",
    )
    side, trunk, bottom = 220, 404, 622
    left, right = 220, 620
    encoder = (("self-attention", "attention"), ("feed-forward", "feed_forward"))
    decoder = (("masked self-attention", "attention"), ("cross-attention", "cross"), encoder[1])
    ends = {}
    for x, name, tokens, block, parts in (
        (left, "encoder", "r  e  g  a  r  d  ∎", model.encoder.blocks[0], encoder),
        (right, "decoder", "<s>  d  r  a", model.decoder.blocks[0], decoder),
    ):
        edge = x + side / 2
        picture.text(x, bottom + 24, tokens, "mono")
        source = "source" if name == "encoder" else "output so far"
        picture.text(x - side / 2 - 8, bottom + 24, source, "small", "end")
        picture.path((x, bottom + 10), (x, bottom - 17))
        picture.box(x, bottom - 30, side, "embedding, × √d", note=f"{vocab} × {width}")
        picture.path((x, bottom - 43), (x, bottom - 62))
        picture.plus(x, bottom - 71)
        picture.path((x - side / 2, bottom - 71), (x - 9, bottom - 71))
        picture.text(x - side / 2 - 6, bottom - 67, "positions", "small", "end")
        y = bottom - 79.0
        top = y - 90 * len(parts)
        picture.rect(x - side / 2 - 24, top - 26, side + 48, y - top + 12, "frame", round=8)
        picture.text(x - side / 2 - 14, top - 9, f"{name}, layer 1", "head", "start")
        for label, part in parts:
            kind = "forward" if part == "feed_forward" else "attention"
            picture.path((x, y), (x, y - 33))
            picture.path((x, y - 22), (edge + 14, y - 22), (edge + 14, y - 77), (edge, y - 77))
            picture.box(x, y - 46, side, label, kind, millions(getattr(block, part)))
            picture.path((x, y - 59), (x, y - 64), tip=False)
            shape = tuple(getattr(block, f"{part}_residual").norm.weight.shape)
            picture.box(x, y - 77, side, "add & norm", "norm", f"γ, β: 2 × {shape[0]}")
            ends[part] = y - 46
            y -= 90
        picture.path((x, y), (x, y - 41))
        for label, above in (("layer 2", 54), ("⋮", 83), (f"layer {layers}", 112)):
            if label == "⋮":
                picture.text(x, y - above + 4, label)
            else:
                picture.box(x, y - above, side, label, "attention", millions(block))
            ends[f"{name} {label}"] = y - above
        picture.path((x, y - 67), (x, y - 72), tip=False)
        picture.path((x, y - 94), (x, y - 99), tip=False)
        ends[name] = y - 125
    output = ends["encoder"] - 27
    picture.path((left, ends["encoder"]), (left, output + 13))
    picture.box(left, output, side, "encoder output", note=f"7 × {width}")
    picture.path((left + side / 2, output), (trunk, output), tip=False)
    picture.path((trunk, ends[f"decoder layer {layers}"]), (trunk, ends["cross"]), tip=False)
    for y in (ends["cross"], ends["decoder layer 2"], ends[f"decoder layer {layers}"]):
        picture.path((trunk, y), (right - side / 2, y))
    picture.text(trunk - 8, output - 38, "each decoder layer computes", "small", "end")
    picture.text(trunk - 8, output - 23, "its own K and V from it", "small", "end")
    y = ends["decoder"]
    for label, note in (
        ("LM head", "shares the embedding"),
        ("softmax", f"{vocab} probabilities"),
        ("choose one token", "g"),
    ):
        picture.path((right, y), (right, y - 14))
        picture.box(right, y - 27, side, label, note=note)
        y -= 40
    out = right + side / 2 + 64
    back = ((right + side / 2, y + 13), (out, y + 13), (out, bottom + 20), (right + 62, bottom + 20))
    picture.path(*back, style="flow second")
    for i, line in enumerate(("fed back:", "the token,", "not the", "probabilities")):
        picture.text(out + 8, 320 + 16 * i, line, "second-text", "start")
    return picture


def softmax() -> Picture:
    """The weights of a query over 16 keys for three head widths, unscaled and scaled."""
    widths = (4, 64, 1024)
    keys = 16
    wide, high = 200, 96
    picture = Picture(
        760,
        322,
        "Softmax weights over 16 keys for head widths 4, 64 and 1024: without scaling one key gets all weight, "
        "divided by the root of the width the weights stay spread",
    )
    for column, width in enumerate(widths):
        torch.manual_seed(0)
        query, key = torch.randn(500, width), torch.randn(keys, width)
        largest = (query @ key.T).softmax(-1).amax(-1)
        typical = int(
            (largest - largest.mean()).abs().argmin()
        )  # the query whose largest weight is closest to the mean
        x = 110 + column * (wide + 20)
        picture.text(x + wide / 2, 20, f"d_k = {width}", "head")
        for row, scale in enumerate((1.0, width**-0.5)):
            scores = (query @ key.T * scale).requires_grad_()
            weights = scores.softmax(-1)
            (gradient,) = torch.autograd.grad(weights[:, 0].sum(), scores)
            y = 34 + row * (high + 50)
            picture.path((x, y), (x, y + high), (x + wide, y + high), style="grid", tip=False)
            for i, weight in enumerate(weights[typical].tolist()):
                picture.rect(x + 4 + i * (wide - 4) / keys, y + high * (1 - weight), 8, high * weight, "weight")
            caption = f"largest {weights.amax(-1).mean():.2f}, gradient {gradient.abs().mean():.4f}"
            picture.text(x + wide / 2, y + high + 18, caption, "small")
    for row, name in enumerate(("q · k", "q · k / √d_k")):
        picture.text(98, 34 + row * (high + 50) + high / 2, name, "head", "end")
    picture.text(110, 312, "bars: the weights of one query; below: means over 500 queries", "small", "start")
    return picture


def mask() -> Picture:
    """The weights of an untrained model in its three attentions, with masked cells hatched."""
    torch.manual_seed(0)
    model = regard.Model(regard.preset("transformer-tiny", vocab=50)).eval()
    source, target = torch.tensor([[5, 6, 7, 8, 3, 0, 0]]), torch.tensor([[2, 9, 10, 11]])
    with torch.no_grad(), record(model, "*.blocks.0.*.weights") as maps:
        model(source, source != 0, target)
    inputs, outputs = ("d", "o", "g", "s", "∎", "·", "·"), ("<s>", "D", "AO", "G")
    picture = Picture(
        760, 296, "Masks: padding in encoder self-attention and cross-attention, the future in decoder self-attention"
    )
    padding = (source == 0).expand(7, 7)
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for x, title, name, (rows, columns), masked in (
        (60, "encoder self-attention", "encoder.blocks.0.attention", (inputs, inputs), padding),
        (330, "decoder self-attention", "decoder.blocks.0.attention", (outputs, outputs), future),
        (530, "cross-attention", "decoder.blocks.0.cross", (outputs, inputs), padding[:4]),
    ):
        weights = maps[f"{name}.weights"][0, 0]
        assert bool((weights[masked] == 0).all()) and bool((weights[~masked] > 0).all())
        picture.text(x, 22, title, "head", "start")
        picture.matrix(x, 56, weights, rows, columns, masked=masked)
    for y, line in (
        (200, "rows: queries, columns: keys"),
        (217, "numbers: weights in %, each row sums to 100"),
        (234, "hatched: masked, the weight is exactly 0"),
        (251, "· padding, ∎ end of the source, <s> start token"),
    ):
        picture.text(330, y, line, "small", "start")
    return picture


def train_reversal() -> regard.Model:
    """Train a small model to reverse six letters, as in docs/attention.md."""
    torch.manual_seed(0)
    stack = {"layers": 2, "width": 64, "heads": 1, "ff": 128, "position": "sinusoid", "dropout": 0.0}
    config = regard.preset("transformer-tiny", vocab=30, changes={"encoder": stack, "decoder": stack})
    model = regard.Model(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(120):
        source = torch.randint(4, 30, (64, 6))
        target = source.flip(1)
        shifted = F.pad(target[:, :-1], (1, 0), value=config.start_id)
        loss = F.cross_entropy(model(source, None, shifted).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def cross() -> Picture:
    """The origin of Q, K and V in cross-attention, and its weights in a model that reverses words."""
    model = train_reversal()
    word = "regard"
    source = torch.tensor([[4 + ord(letter) - ord("a") for letter in word]])
    shifted = F.pad(source.flip(1)[:, :-1], (1, 0), value=model.config.start_id)
    with torch.no_grad(), record(model, "decoder.*.cross.weights") as maps:
        output = model(source, None, shifted).argmax(-1)
    assert output.equal(source.flip(1)), "the model has not learned to reverse words"
    picture = Picture(
        790,
        300,
        "Cross-attention: queries from the decoder, keys and values of each layer from the same encoder output; "
        "in a model that reverses words, the first output attends to the last letter",
    )
    picture.box(84, 150, 124, "encoder output")
    for layer, y in enumerate((88, 212), 1):
        picture.rect(196, y - 56, 210, 112, "frame", round=8)
        picture.text(206, y - 40, f"decoder layer {layer}", "head", "start")
        for shift, name in ((-20, "K"), (12, "V")):
            picture.path((146, 150), (172, 150), (172, y + shift), (206, y + shift))
            picture.box(236, y + shift, 60, f"W_{name}", "attention")
            picture.path((266, y + shift), (306, y + shift))
        picture.rect(306, y - 36, 90, 64, "box attention", round=4)
        picture.text(351, y - 8, "softmax")
        picture.text(351, y + 8, "(Q Kᵀ/√d_k) V")
        picture.path((226, y + 43), (351, y + 43), (351, y + 29))
        picture.text(222, y + 47, "Q", "", "end")
    picture.text(301, 296, "Q: the decoder's own vectors × W_Q", "small")
    for x, layer in ((464, 0), (644, 1)):
        weights = maps[f"decoder.blocks.{layer}.cross.weights"][0, 0]
        picture.text(x - 20, 40, f"weights of layer {layer + 1}", "head", "start")
        picture.matrix(x - 20, 74, weights, tuple(word[::-1]), tuple(word))
    picture.text(444, 250, "columns: source, rows: output; in %", "small", "start")
    return picture


def layer_norm() -> Picture:
    """Vectors before and after LayerNorm: every token is normalised by itself."""
    torch.manual_seed(0)
    tokens, width = 5, 16
    x = torch.randn(tokens, width) * torch.tensor([0.4, 1.0, 2.0, 0.7, 1.5]).unsqueeze(1)
    x = x + torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5]).unsqueeze(1)
    stack = {"width": width, "heads": 2}
    block = regard.Model(regard.preset("transformer-tiny", vocab=50, changes={"encoder": stack})).encoder.blocks[0]
    with torch.no_grad():
        normed = block.attention_residual.norm(x)
    picture = Picture(
        784,
        214,
        "LayerNorm: each row, the vector of one token, gets mean 0 and deviation 1, independent of the other rows",
    )
    cell = 15
    for left, title, values in ((66, "x", x), (462, "LayerNorm(x), γ = 1, β = 0", normed)):
        picture.text(left, 24, title, "head", "start")
        picture.text(left + width * cell + 12, 44, "mean", "small", "start")
        picture.text(left + width * cell + 52, 44, "dev.", "small", "start")
        for i, row in enumerate(values):
            y = 52 + i * 26
            picture.text(left - 8, y + 15, f"token {i + 1}", "small", "end")
            for j, value in enumerate(row.tolist()):
                style = "weight" if value > 0 else "minus"
                picture.rect(left + j * cell, y, cell, 22, f"cell {style}", opacity=min(1.0, abs(value) / 3))
            mean, deviation = row.mean().item(), row.std(correction=0).item()
            picture.text(left + width * cell + 12, y + 15, f"{mean:.1f}".replace("-0.0", "0.0"), "mono", "start")
            picture.text(left + width * cell + 52, y + 15, f"{deviation:.1f}", "mono", "start")
    picture.text(66, 202, "→ mean and deviation are over this axis: the 16 numbers of one token", "small", "start")
    return picture


def norm_at() -> Picture:
    """Post-norm and pre-norm as flows, and their effect on 12 untrained layers."""
    sizes: dict[str, list[float]] = {}
    gradients: dict[str, list[float]] = {}
    for at in ("post", "pre"):
        torch.manual_seed(0)
        model = regard.Model(regard.preset("gpt-tiny", vocab=50, changes={"decoder": {"norm_at": at, "layers": 12}}))
        text = torch.randint(4, 50, (16, 33))
        model.eval()
        with record(model, "decoder.blocks.*.output") as outputs:
            logits = model(text[:, :-1], None)
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        sizes[f"{at}-norm"] = [x.norm(dim=-1).mean().item() for x in outputs.values()]
        assert model.decoder is not None
        gradients[f"{at}-norm"] = [
            nn.utils.get_total_norm([p.grad for p in block.parameters() if p.grad is not None]).item()
            for block in model.decoder.blocks
        ]
    picture = Picture(
        860,
        330,
        "Post-norm normalises the sum, pre-norm the input of the sub-layer; over 12 layers pre-norm's vectors grow and "
        "its gradients shrink, post-norm's stay the same",
    )
    for x, name, steps in (
        (80, "post-norm", (("sub-layer", "attention"), ("+", ""), ("norm", "norm"))),
        (230, "pre-norm", (("norm", "norm"), ("sub-layer", "attention"), ("+", ""))),
    ):
        picture.text(x, 24, name, "head")
        y = 284
        picture.text(x, y + 20, "x")
        for label, style in steps:
            start = y if label != steps[0][0] else y + 6
            y -= 62
            picture.path((x, start), (x, y + (9 if label == "+" else 13)))
            if label == "+":
                picture.plus(x, y)
                picture.path((x, 274), (x + 62, 274), (x + 62, y), (x + 9, y), style="flow second")
                y -= 9
            else:
                picture.box(x, y, 90, label, style)
                y -= 13
        picture.path((x, y), (x, 40))
    picture.chart(370, 60, (320, 90), "length of the vectors after each layer", sizes)
    picture.chart(370, 210, (320, 90), "gradient of the weights of each layer", gradients)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "attention-architecture": architecture,
    "attention-softmax": softmax,
    "attention-mask": mask,
    "attention-cross": cross,
    "attention-layer-norm": layer_norm,
    "attention-norm-at": norm_at,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
