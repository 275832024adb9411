"""Configs: values that say no, and say why."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from regard.config import Config, Stack, parse
from regard.errors import UserError, closest, one_of
from regard.presets import PRESETS, preset

BOTH: dict[str, Any] = {"source_vocab": 10, "target_vocab": 10, "encoder": {}, "decoder": {}}


def message(kind: type, data: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        parse(kind, data, "here.json")
    assert caught.value.__cause__ is None
    return str(caught.value)


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


def test_every_mistake_at_once() -> None:
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
    ("stack", "said"),
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
        ({"layers": 2, "kept_heads": [[0]]}, "for each of 2 layers"),
        ({"layers": 1, "kept_cross_heads": [[0, 8]]}, "some of 8 heads"),
        ({"layers": 1, "kept_heads": [[]]}, "kept_heads must list"),
    ],
)
def test_stacks_that_cannot_be(stack: dict[str, Any], said: str) -> None:
    text = message(Config, BOTH | {"decoder": stack})
    assert said in text
    assert "decoder: " in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encoder": None, "decoder": None}, "an encoder, a decoder or both"),
        ({"share_embeddings": True, "encoder": None}, "both an encoder and a decoder"),
        ({"share_embeddings": True, "encoder": {"width": 64}}, "equal widths, not 64 and 512"),
        ({"share_embeddings": True, "target_vocab": 11}, "one vocabulary"),
        ({"decoder": {"mixer": "gru", "width": 64}}, "the encoder's width, not 64 against 512"),
        ({"encoder": None, "decoder": {"mixer": "gru"}}, "encoder"),
        ({"ids": {"eos": 10}}, "eos"),
        ({"ids": {"eos": 2}}, "eos"),
        ({"ids": {"pad": -1}}, "pad"),
    ],
)
def test_configs_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    assert said in message(Config, BOTH | changes)


@given(st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers())))
def test_any_table_is_a_config_or_a_user_error(table: dict[str, Any]) -> None:
    for data in (table, BOTH | table, BOTH | {"encoder": table}, BOTH | {"ids": table}):
        try:
            parse(Config, data, "here")
        except UserError as error:
            assert str(error).startswith("here: not valid\n")


def test_values_are_frozen_and_equal_by_value() -> None:
    config = parse(Config, BOTH, "here")
    with pytest.raises(ValidationError):
        config.source_vocab = 3  # type: ignore[misc]
    assert config == parse(Config, BOTH, "there")
    assert hash(config) == hash(parse(Config, BOTH, "there"))
    assert config != parse(Config, BOTH | {"start": "eos"}, "here")


@pytest.mark.parametrize("name", PRESETS)
def test_json_and_back(name: str) -> None:
    config = preset(name, 30)
    assert parse(Config, config.model_dump(mode="json"), "here") == config
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config  # to other processes, never to a file


def test_derived_sizes() -> None:
    stack = Stack(width=12, heads=3)
    assert (stack.kv, stack.head, stack.recurrent) == (3, 4, False)
    stack = Stack(width=12, heads=3, kv_heads=1, head_width=7)
    assert (stack.kv, stack.head) == (1, 7)
    assert Stack(mixer="lstm").recurrent
    both = parse(Config, BOTH, "here")
    assert both.start_id == both.ids.sos
    assert parse(Config, BOTH | {"start": "eos"}, "here").start_id == both.ids.eos


def test_closest() -> None:
    assert closest("drpout", ["dropout", "layers"]) == "; did you mean 'dropout'?"
    assert closest("xyz", ["dropout", "layers"]) == ""
    error = one_of("metric", "blue", ["bleu", "wer"])
    assert str(error) == "metric: 'blue' is not known; did you mean 'bleu'?\n  allowed: bleu, wer"
