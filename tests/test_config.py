"""Configs: frozen values, checked with messages that name the key."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from regard.config import Config, PatchConfig, Stack, parse
from regard.errors import UserError
from regard.presets import PRESETS, preset
from regard.suggest import closest, one_of

BOTH: dict[str, Any] = {"source_vocab": 10, "target_vocab": 10, "encoder": {}, "decoder": {}}
NO_DECODER: dict[str, Any] = {"decoder": None}
PATCHES = {"height": 8, "width": 8, "size": 4}
REVERSIBLE = {"residual": "reversible", "norm_at": "pre"}


def message(kind: type, data: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        parse(kind, data, "here.json")
    assert error.value.__cause__ is None
    return str(error.value)


def test_unknown_keys_are_refused_with_a_suggestion_and_a_list() -> None:
    text = message(Config, BOTH | {"tie_outptu": True})
    assert text.startswith("here.json: not valid\n")
    assert "tie_outptu: no such key; did you mean 'tie_output'?" in text
    assert "share_embeddings" in text
    nested = message(Config, BOTH | {"encoder": {"head": 4}})
    assert "encoder.head: no such key; did you mean 'heads'?" in nested
    assert "norm_at" in nested and "tie_output" not in nested
    assert "ids.padd: no such key; did you mean 'pad'?" in message(Config, BOTH | {"ids": {"padd": 0}})
    assert "did you mean" not in message(Config, BOTH | {"zzz": 1})


def test_all_mistakes_are_reported_together() -> None:
    text = message(
        Config,
        {
            "target_vocab": "many",
            "encoder": {"layers": 0, "score": "dott", "dropout": 1.0},
            "decoder": {"colour": "blue"},
        },
    )
    lines = text.splitlines()
    assert len(lines) == 7
    keys = ("source_vocab", "target_vocab", "encoder.layers", "encoder.score", "encoder.dropout", "decoder.colour")
    for key in keys:
        assert sum(line.strip().startswith(f"{key}:") for line in lines) == 1
    assert "source_vocab: is required" in text
    assert "target_vocab: input should be a valid integer" in text and "'many'" in text
    assert "greater than or equal to 1, not 0" in text
    assert "'dott' is not known; did you mean 'dot'? (allowed: scaled_dot, dot," in text


@pytest.mark.parametrize("value", ["six", 2.5, [6], None, float("nan"), True])
def test_wrong_types_are_refused(value: object) -> None:
    assert "encoder.layers: " in message(Config, BOTH | {"encoder": {"layers": value}})


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ({"width": 10, "heads": 4}, "width 10 is not divisible by heads 4"),
        ({"heads": 4, "kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"width": 6, "heads": 2, "position": "rotary"}, "even head width, not 3"),
        ({"input_feeding": True}, "recurrent"),
        ({"attend_first": True}, "recurrent"),
        ({"mixer": "gru", "width": 7}, "even"),
        ({"score": "concat", "heads": 4, "kv_heads": 2}, "concat"),
        ({"cross_center": "predicted"}, "cross_window"),
        ({"layers": 1, "kept_heads": [[1, 0]]}, "kept_heads must list"),
        ({"layers": 2, "kept_heads": [[0]]}, "for each layer (2)"),
        ({"layers": 1, "kept_cross_heads": [[0, 8]]}, "some of the heads (8)"),
        ({"layers": 1, "kept_heads": [[]]}, "kept_heads must list"),
        ({"position": "axial"}, "axial (rows, columns, row_width) belong together"),
        ({"axial": {"rows": 2, "columns": 2, "row_width": 4}}, "axial (rows, columns, row_width) belong together"),
        ({"position": "axial", "axial": {"rows": 2, "columns": 2, "row_width": 512}}, "leave room for columns"),
        ({"mixer": "lsh", "kv_heads": 1}, "shares queries and keys"),
        ({"mixer": "lsh", "score": "dot"}, "shares queries and keys"),
        ({"mixer": "lsh", "window": 3}, "shares queries and keys"),
        ({"mixer": "lsh", "position": "bucket"}, "does not support positions that are added to scores"),
        ({"mixer": "lsh", "position": "rotary", "memory": 2}, "memory or kept_heads"),
        ({"residual": "reversible"}, "reversible needs norm_at pre"),
        (
            {"residual": "reversible", "norm_at": "pre", "position": "bucket"},
            "residual reversible does not support memory or bucket positions",
        ),
        ({"residual": "reversible", "norm_at": "pre", "position": "rotary", "memory": 2}, "does not support memory"),
        ({"memory": 4}, "positions by distance (relative, rotary ...), not sinusoid"),
        ({"reach": 4}, "reach needs position relative, not sinusoid"),
        ({"rotary": {"low": 4, "high": 4}}, "high (4) must be above low (4)"),
        ({"rotary": {"factor": 0.5}}, "greater than or equal to 1, not 0.5"),
        ({"lsh": {"buckets": 3}}, "multiple of 2"),
        ({"lsh": {"chunks": 3}}, "decoder.lsh.chunks: no such key; did you mean 'chunk'?"),
    ],
)
def test_inconsistent_stacks_are_refused(stack: dict[str, Any], expected: str) -> None:
    text = message(Config, BOTH | {"decoder": stack})
    assert expected in text
    assert "decoder" in text.splitlines()[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"encoder": None, "decoder": None}, "an encoder, a decoder or both"),
        ({"share_embeddings": True, "encoder": None}, "both an encoder and a decoder"),
        ({"share_embeddings": True, "encoder": {"width": 64}}, "equal widths, not 64 and 512"),
        ({"share_embeddings": True, "target_vocab": 11}, "one vocabulary"),
        ({"decoder": {"mixer": "gru", "width": 64}}, "the width of the encoder: 64 is not 512"),
        ({"encoder": None, "decoder": {"mixer": "gru"}}, "encoder"),
        ({"ids": {"eos": 10}}, "ids must lie below both vocabularies"),
        ({"ids": {"pad": -1}}, "pad"),
        ({"output": "classes"}, "output classes and the number of classes belong together"),
        (NO_DECODER | {"classes": 3}, "output classes and the number of classes belong together"),
        ({"patches": PATCHES}, "patches needs a Transformer encoder without a decoder"),
        ({"token_types": 2}, "token_types needs a Transformer encoder without a decoder"),
        ({"pooler": True, "encoder": None}, "pooler needs a Transformer encoder without a decoder"),
        (NO_DECODER | {"encoder": {"mixer": "gru"}, "pooler": True}, "pooler needs a Transformer encoder"),
        ({"output": "none"}, "output none needs a Transformer encoder without a decoder"),
        (NO_DECODER | {"patches": PATCHES}, "reads images needs output=classes or output=none"),
        (NO_DECODER | {"patches": PATCHES | {"width": 9}}, "8 x 9 cannot be cut evenly into patches of 4"),
        ({"encoder": {"position": "relative"}}, "relative covers only earlier tokens"),
        (
            {"decoder": {"position": "rotary", "memory": 3}},
            "only a decoder without an encoder supports a segment memory",
        ),
        (
            {"encoder": {"position": "rotary", "memory": 3}},
            "only a decoder without an encoder supports a segment memory",
        ),
        ({"decoder": REVERSIBLE}, "tie_output needs an output as wide as the embeddings"),
        ({"decoder": REVERSIBLE, "tie_output": False}, "reversible layers do not support cross-attention"),
    ],
)
def test_inconsistent_configs_are_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in message(Config, BOTH | changes)


@settings(deadline=None)  # the first unknown key loads the synonyms
@given(st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers())))
def test_any_table_gives_a_config_or_a_user_error(table: dict[str, Any]) -> None:
    for data in (table, BOTH | table, BOTH | {"encoder": table}, BOTH | {"ids": table}):
        try:
            parse(Config, data, "here")
        except UserError as error:
            assert str(error).startswith("here: not valid\n")


@pytest.mark.parametrize("key", ["layers", "width", "heads", "ff", "head_width", "max_length", "memory", "reach"])
def test_excessive_sizes_are_refused(key: str) -> None:
    for size in (2**31, 10**30):
        assert f"decoder.{key}: input should be less than or equal to" in message(
            Config, BOTH | {"decoder": {key: size}}
        )
    assert "target_vocab: " in message(Config, BOTH | {"target_vocab": 2**31})


def test_values_are_frozen_and_equal_by_value() -> None:
    config = parse(Config, BOTH, "here")
    with pytest.raises(ValidationError):
        config.source_vocab = 3  # type: ignore[misc]
    assert config == parse(Config, BOTH, "there")
    assert hash(config) == hash(parse(Config, BOTH, "there"))
    assert config != parse(Config, BOTH | {"start": "eos"}, "here")


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str) -> None:
    config = preset(name)
    assert parse(Config, config.model_dump(mode="json"), "here") == config
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config  # for child processes, never for files


def test_properties_are_derived_from_the_fields() -> None:
    stack = Stack(width=12, heads=3)
    assert (stack.kv, stack.head, stack.recurrent) == (3, 4, False)
    stack = Stack(width=12, heads=3, kv_heads=1, head_width=7)
    assert (stack.kv, stack.head) == (1, 7)
    assert Stack(mixer="lstm").recurrent
    both = parse(Config, BOTH, "here")
    assert both.start_id == both.ids.sos
    assert parse(Config, BOTH | {"start": "eos"}, "here").start_id == both.ids.eos
    assert parse(Config, BOTH | {"start": "pad"}, "here").start_id == both.ids.pad
    assert not both.has_memory
    assert parse(Config, BOTH | {"encoder": None, "decoder": {"position": "rotary", "memory": 1}}, "here").has_memory
    assert PatchConfig(height=8, width=12, size=4).count == 6
    assert Stack(width=12, heads=3, residual="reversible", norm_at="pre").out_width == 24


def test_special_ids_may_coincide() -> None:
    """Some models use one token as start and end of a text, others use the padding token as start."""
    config = parse(Config, BOTH | {"ids": {"pad": 9, "sos": 9, "eos": 9, "unk": 9}}, "here")
    assert config.ids.mask is None
    assert config.start_id == 9


def test_the_string_none_is_null_in_optional_fields() -> None:
    """TOML has no null."""
    config = parse(Config, BOTH | {"encoder": "none", "classes": "none", "decoder": {"window": "none"}}, "here")
    assert config.encoder is None and config.classes is None
    assert config.decoder is not None and config.decoder.window is None
    assert parse(Config, BOTH | {"decoder": {"bias": "none"}}, "here").decoder.bias == "none"  # an allowed value


def test_closest_name_is_suggested() -> None:
    assert closest("drpout", ["dropout", "layers"]) == "; did you mean 'dropout'?"
    assert closest("xyz", ["dropout", "layers"]) == ""
    error = one_of("metric", "blue", ["bleu", "wer"])
    assert str(error) == "metric: 'blue' is not known; did you mean 'bleu'?\n  allowed: bleu, wer"
