"""Small random and trained models with sharp distributions, and helpers of the decoding tests."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st

from regard.batch import collate
from regard.config import Config, parse
from regard.decode.hypothesis import Hypothesis
from regard.loss import Objective
from regard.model import Model
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

NAMES = ("transformer-tiny", "rnn-luong", "rnn-bahdanau")
LETTERS = "abcdef"
WIDTH = 16
STEPS = 90  # training steps: a few seconds, and most outputs are correct

names = st.sampled_from(NAMES)
seeds = st.integers(0, 5)  # few, because each seed needs a model
words = st.text(LETTERS, min_size=1, max_size=12)


@cache
def tokenizer(scheme: str, letters: str = LETTERS) -> Tokenizer:
    if scheme == "space":
        return Tokenizer.train("space", [" ".join(letters)])
    rng = random.Random(1)
    spaced = letters if scheme == "char" else letters + " "
    return Tokenizer.train(scheme, [*("".join(rng.choices(spaced, k=30)) for _ in range(200)), *letters])


def blank(name: str, seed: int, codec: Codec, width: int = WIDTH) -> Model:
    stack = {"layers": 2 if name == "transformer-tiny" else 1, "width": width, "ff": 2 * width, "heads": 2}
    changes = {"encoder": stack, "decoder": stack, "tie_output": False}
    vocabs = {"source_vocab": codec.source_vocab, "target_vocab": codec.target_vocab}
    torch.manual_seed(seed)
    return Model(preset(name, **vocabs, changes=changes)).eval()


@cache
def run_of(name: str, seed: int = 0, scheme: str = "char", letters: str = LETTERS) -> Run:
    """A run with random weights: few ties, and an end token with a moderate probability."""
    codec = Codec(tokenizer("char"), tokenizer(scheme, letters))
    model = blank(name, seed, codec)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.4 * (2 / sum(parameter.shape[-2:])) ** 0.5)
        weight_VD = model.output.weight.normal_(std=2.5 * WIDTH**-0.5)
        if name == "transformer-tiny":
            model.decoder.norm.bias += 1.5 * weight_VD[3] / weight_VD[3].square().sum()
    return Run(model.config, codec, model, Path("random"))


@cache
def trained(name: str) -> Run:
    """A run trained for a few seconds to reverse its input and double every `a`."""
    codec = Codec(tokenizer("char"), tokenizer("char"))
    model = blank(name, 1, codec, 32).train()
    objective = Objective(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    rng = random.Random(1)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 8e-3 * min(1.0, (step + 1) / 20, 2 * (STEPS - step) / STEPS)
        sources = ["".join(rng.choices(LETTERS, k=rng.randint(1, 6))) for _ in range(64)]
        batch = collate(
            codec.encode_source([Example(source) for source in sources]),
            codec.encode_target([lesson(source) for source in sources]),
            model.config,
        )
        optimizer.zero_grad()
        (objective(batch).smoothed / batch.total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return Run(model.config, codec, model.eval(), Path("trained"))


def lesson(source: str) -> str:
    """The target of a source."""
    return source[::-1].replace("a", "aa")


def sources(seed: int, count: int, longest: int = 12) -> list[str]:
    """Random sources."""
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randint(1, longest))) for _ in range(count)]


def same(ours: list[Hypothesis], theirs: list[Hypothesis]) -> bool:
    """Whether outputs and scores are equal; outputs whose normalised scores differ by less than 1e-5 may be swapped."""
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if a.ids != b.ids and abs(a.normalized - b.normalized) > 1e-5:
            return False
        if a.ids == b.ids and abs(a.score - b.score) > 1e-5 * len(a.ids):
            return False
    return True


POSITIONS = ("rotary", "learned", "alibi", "relative")


@cache
def language_model(
    position: str, seed: int = 0, frame: str = "start", memory: int = 0, scheme: str = "char", letters: str = LETTERS
) -> Run:
    """A decoder-only run with random weights and, for learned positions, at most 40 tokens."""
    codec = Codec(tokenizer(scheme, letters), frame=frame)  # type: ignore[arg-type]
    stack = {"layers": 2, "width": WIDTH, "heads": 2, "ff": 2 * WIDTH, "norm_at": "pre", "dropout": 0.0}
    stack |= {"position": position, "max_length": 40, "memory": memory}
    vocab = codec.target_vocab
    values = {"source_vocab": vocab, "target_vocab": vocab, "decoder": stack, "frame": frame, "tie_output": False}
    torch.manual_seed(seed)
    model = Model(parse(Config, values, "test")).eval()
    with torch.no_grad():
        weight_VD = model.output.weight.normal_(std=2.5 * WIDTH**-0.5)
        model.decoder.norm.bias += 2.0 * weight_VD[3] / weight_VD[3].square().sum()
    return Run(model.config, codec, model, Path("random"))
