"""Presets: what they count, by hand; what can be changed in them, and how."""

from __future__ import annotations

from typing import Any

import pytest

from regard.config import Config, Stack
from regard.errors import UserError
from regard.model import on_meta
from regard.presets import PRESETS, merge, preset
from regard.settings import assign


def count(config: Config) -> int:
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


def attention(stack: Stack, context: int) -> int:
    """Query, key, value and output matrices with their biases."""
    inner, shared = stack.heads * stack.head, stack.kv * stack.head
    return (stack.width + 1) * inner + 2 * (context + 1) * shared + (inner + 1) * stack.width


def transformer(config: Config) -> int:
    """Tables, attention, feed-forward and norms of a Transformer with layer norms and biases, written out."""
    encoder, decoder = config.encoder, config.decoder
    assert encoder is not None and decoder is not None
    tables = config.source_vocab * encoder.width
    if not config.share_embeddings:
        tables += config.target_vocab * decoder.width
    total = tables
    for stack, attentions in ((encoder, [encoder.width]), (decoder, [decoder.width, encoder.width])):
        layer = sum(attention(stack, context) for context in attentions)
        layer += (stack.width + 1) * stack.ff + (stack.ff + 1) * stack.width
        layer += 2 * stack.width * (len(attentions) + 1)  # a norm per sub-layer
        total += stack.layers * layer
        total += 2 * stack.width if stack.norm_at == "pre" else 0
        total += stack.max_length * stack.width if stack.position == "learned" else 0
    return total


def recurrent(config: Config) -> int:
    """Tables, gates, bridges, score and prediction of a recurrent encoder-decoder, written out."""
    encoder, decoder = config.encoder, config.decoder
    assert encoder is not None and decoder is not None
    width, gates = encoder.width, {"gru": 3, "lstm": 4}[encoder.mixer]

    def cell(inputs: int, states: int) -> int:
        return gates * states * (inputs + states + 2)

    joined = width * (1 + decoder.input_feeding + decoder.attend_first)
    score = {"additive": width * width * 2 + 2 * width, "general": width * width}[decoder.score]
    total = (config.source_vocab + config.target_vocab * (1 if config.tie_output else 2)) * width
    total += encoder.layers * 2 * cell(width, width // 2)
    total += cell(joined, width) + (decoder.layers - 1) * cell(width, width)
    total += decoder.layers * (width + 1) * width  # bridges
    total += score + (2 * width + 1) * width
    return total


@pytest.mark.parametrize("name", PRESETS)
def test_counts_by_hand(name: str) -> None:
    config = preset(name, 3700)
    assert count(config) == (recurrent if "rnn" in name else transformer)(config)


@pytest.mark.parametrize(("name", "published"), [("transformer-base", 65e6), ("transformer-big", 213e6)])
def test_published_counts(name: str, published: float) -> None:
    """A shared vocabulary of 37k, counted once."""
    assert count(preset(name, 37_000)) == pytest.approx(published, rel=0.03)


def varied(*settings: str) -> Config:
    """transformer-base as the command line changes it."""
    tables: dict[str, Any] = {}
    for setting in settings:
        assign(tables, setting)
    return preset("transformer-base", 37_000, changes=tables["model"])


BASE = preset("transformer-base", 37_000)


@pytest.mark.parametrize("heads", [1, 4, 16, 32])
def test_table_3_a(heads: int) -> None:
    """The number of heads at the same amount of computation: nothing to count."""
    config = varied(f"heads={heads}")
    assert config.encoder is not None
    assert config.encoder.head == 512 // heads
    assert count(config) == count(BASE)


@pytest.mark.parametrize("width", [16, 32])
def test_table_3_b(width: int) -> None:
    """Narrower heads: each of the 18 attentions loses that share of its four matrices."""
    config = varied(f"head_width={width}")
    lost = 8 * (64 - width)
    assert count(BASE) - count(config) == 18 * (4 * 512 * lost + 3 * lost)


@pytest.mark.parametrize(
    "changes",
    [["layers=2"], ["layers=4"], ["layers=8"], ["width=256"], ["width=1024"], ["ff=1024"], ["ff=4096"]],
)
def test_table_3_c(changes: list[str]) -> None:
    config = varied(*changes)
    key, value = changes[0].split("=")
    assert getattr(config.encoder, key) == getattr(config.decoder, key) == int(value)
    assert count(config) == transformer(config)
    assert (count(config) > count(BASE)) == (int(value) > getattr(BASE.encoder, key))


def test_table_3_d() -> None:
    """Dropout and label smoothing change no shape."""
    tables: dict[str, Any] = {}
    for setting in ("dropout=0.2", "label_smoothing=0.0"):
        assign(tables, setting)
    assert tables["train"] == {"label_smoothing": 0.0}
    config = preset("transformer-base", 37_000, changes=tables["model"])
    assert config.encoder is not None and config.decoder is not None
    assert config.encoder.dropout == config.decoder.dropout == 0.2
    assert count(config) == count(BASE)


def test_table_3_e() -> None:
    """Learned positions: one table per tower."""
    assert count(varied("position=learned", "model.max_length=512")) - count(BASE) == 2 * 512 * 512


def test_a_model_too_large_to_build() -> None:
    wide = {"width": 8192, "heads": 64, "layers": 1, "bias": "none"}
    model = on_meta(Config(source_vocab=100, target_vocab=100, decoder=Stack(**wide)))
    attention = model.decoder.blocks[0].attention
    q_k_v = [*attention.query.parameters(), *attention.key_value.parameters()]
    assert sum(p.numel() for p in q_k_v) == 3 * 8192**2  # the 201M


def test_vocabularies() -> None:
    both = preset("transformer-base", source_vocab=50, target_vocab=60)
    assert (both.source_vocab, both.target_vocab, both.share_embeddings) == (50, 60, False)
    assert preset("transformer-base", 70).share_embeddings
    with pytest.raises(UserError, match="one vocabulary"):
        preset("transformer-base", source_vocab=50, target_vocab=60, changes={"share_embeddings": True})


def test_no_vocabulary_is_a_mistake_not_a_default() -> None:
    with pytest.raises(UserError, match="source_vocab"):
        preset("transformer-tiny", 0)


def test_unknown_names_are_answered() -> None:
    with pytest.raises(UserError, match=r"'transformer-basic'.*did you mean 'transformer-base'"):
        preset("transformer-basic")
    with pytest.raises(
        UserError, match=r"preset transformer-tiny: .*\n.*encoder.layer: no such key; did you mean 'layers'"
    ):
        preset("transformer-tiny", changes={"encoder": {"layer": 3}})


def test_changes_never_reach_the_presets() -> None:
    before = repr(PRESETS)
    changes = {"encoder": {"layers": 1}, "decoder": {"layers": 3}, "tie_output": False}
    config = preset("transformer-tiny", 50, changes=changes)
    assert config.encoder is not None and config.decoder is not None
    assert (config.encoder.layers, config.decoder.layers, config.tie_output) == (1, 3, False)
    assert config.encoder.width == 128
    assert repr(PRESETS) == before
    assert changes == {"encoder": {"layers": 1}, "decoder": {"layers": 3}, "tie_output": False}


def test_a_tower_can_be_taken_away() -> None:
    config = preset("transformer-tiny", 50, changes={"encoder": None})
    assert config.encoder is None
    assert config.decoder is not None


def test_merge() -> None:
    base = {"a": 1, "b": {"c": 2, "d": 3}}
    assert merge(base, {"b": {"c": 4, "e": 5}, "f": 6}) == {"a": 1, "b": {"c": 4, "d": 3, "e": 5}, "f": 6}
    assert merge(base, {"b": None}) == {"a": 1, "b": None}
    assert base == {"a": 1, "b": {"c": 2, "d": 3}}
