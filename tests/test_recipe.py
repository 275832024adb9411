"""Recipe files and `--set` settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from regard.config import Config, Stack
from regard.errors import UserError
from regard.presets import preset
from regard.recipe import Data, Recipe, Text, Train, assign, load_recipe, read_recipe


def tables_of(*settings: str) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for setting in settings:
        assign(tables, setting)
    return tables


@pytest.mark.parametrize(
    ("setting", "tables"),
    [
        ("train.lr=3e-4", {"train": {"lr": 3e-4}}),
        ("lr=3e-4", {"train": {"lr": 3e-4}}),
        (" lr = 0.5 ", {"train": {"lr": 0.5}}),
        ("dropout=0.2", {"model": {"encoder": {"dropout": 0.2}, "decoder": {"dropout": 0.2}}}),
        ("decoder.layers=3", {"model": {"decoder": {"layers": 3}}}),
        ("model.decoder.score=additive", {"model": {"decoder": {"score": "additive"}}}),
        ("model.tie_output=false", {"model": {"tie_output": False}}),
        ("tie_output=true", {"model": {"tie_output": True}}),
        ("ids.eos=7", {"model": {"ids": {"eos": 7}}}),
        ("preset=rnn-luong", {"preset": "rnn-luong"}),
        ("source_tokens=bpe:800", {"text": {"source_tokens": "bpe:800"}}),
        ("strict=true", {"data": {"strict": True}}),
        ("data.columns=['target', 'source']", {"data": {"columns": ["target", "source"]}}),
        ("kv_heads=none", {"model": {"encoder": {"kv_heads": "none"}, "decoder": {"kv_heads": "none"}}}),
        ("task=lm", {"task": "lm"}),
        ("patches.size=4", {"model": {"patches": {"size": 4}}}),
        ("rotary.base=5", {"model": {"encoder": {"rotary": {"base": 5}}, "decoder": {"rotary": {"base": 5}}}}),
        ("lora=8", {"train": {"lora": 8}}),
        ("encoder=none", {"model": {"encoder": "none"}}),
        ('train.device="cuda:1"', {"train": {"device": "cuda:1"}}),
        ("device=cuda:1", {"train": {"device": "cuda:1"}}),
        ("data.train=a=b.tsv", {"data": {"train": "a=b.tsv"}}),
        ("train=my data.tsv", {"data": {"train": "my data.tsv"}}),
        ("feature_separator=", {"text": {"feature_separator": ""}}),
    ],
)
def test_setting_is_stored_in_its_table(setting: str, tables: dict[str, Any]) -> None:
    assert tables_of(setting) == tables


def test_last_setting_wins_and_other_keys_stay() -> None:
    tables = tables_of("dropout=0.2", "decoder.dropout=0.5", "layers=3", "layers=4")
    assert tables == {"model": {"encoder": {"dropout": 0.2, "layers": 4}, "decoder": {"dropout": 0.5, "layers": 4}}}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dropout", "key=value"),
        ("=3", "key=value"),
        ("", "key=value"),
        ("drpout=0.1", "no such key; did you mean 'dropout'?"),
        ("label_smooting=0.1", "did you mean 'label_smoothing'?"),
        ("trian.lr=1", "no such section; did you mean 'train'?"),
        ("zzz=1", "no such key"),
        ("train.=1", "train."),
        (".lr=1", "no such section"),
    ],
)
def test_unknown_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(tables_of(setting))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.lrr=1", "train.lrr: no such key; did you mean 'lr'?"),
        ("train.lr.x=1", "train.lr"),
        ("lr=fast", "train.lr: input should be a valid number"),
        ("lr=nan", "train.lr: "),
        ("lr=inf", "train.lr: "),
        ("metric=blue", "train.metric: "),
        ("device=gpu", "device is auto, cpu, cuda, cuda:N or mps"),
        ("columns=['source']", "columns must name source and target"),
        ("columns=['source', 'target', 'target']", "columns must name source and target"),
        ("min_count=0", "text.min_count: "),
        ("steps=1.5", "train.steps: "),
        ("train.steps=true", "train.steps: "),
    ],
)
def test_invalid_values_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(tables_of(setting))
    assert message in str(error.value)


@pytest.mark.parametrize("setting", ["encoder.layer=3", "model.encodr.layers=3", "score=aditive"])
def test_invalid_model_settings_are_refused_by_the_preset(setting: str) -> None:
    with pytest.raises(UserError, match=r"did you mean|additive"):
        preset("transformer-tiny", 50, changes=tables_of(setting)["model"])


def test_value_is_not_replaced_by_a_table() -> None:
    with pytest.raises(UserError, match="encoder is a value, not a table"):
        tables_of("encoder=none", "encoder.layers=3")


KEYS = sorted(
    {*Stack.model_fields, *Config.model_fields, *Text.model_fields, *Data.model_fields, *Train.model_fields}
    - {"max_length"}  # ambiguous: a field of Stack and of Data
)


def test_ambiguous_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"could mean data\.max_length or model\.max_length"):
        tables_of("max_length=7")
    assert tables_of("model.max_length=7") == {"model": {"encoder": {"max_length": 7}, "decoder": {"max_length": 7}}}


@pytest.mark.parametrize("key", KEYS)
def test_bare_name_sets_the_field_of_that_name(key: str) -> None:
    kinds: dict[str, Any] = {"text": Text, "data": Data, "train": Train, "encoder": Stack, "decoder": Stack}
    sections = tables_of(f"{key}=1")
    model = sections.pop("model", {})
    if key in Config.model_fields and key not in Stack.model_fields:
        assert model == {key: 1}
    else:
        for name, table in {**sections, **model}.items():
            assert table == {key: 1}
            assert key in kinds[name].model_fields


INTEGERS = st.integers(-(2**63), 2**63 - 1)  # the integers of TOML


@given(st.one_of(INTEGERS, st.booleans(), st.floats(allow_nan=False), st.lists(INTEGERS, max_size=3)))
def test_values_are_parsed_as_toml(value: object) -> None:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    assert tables_of(f"train.lr={text}")["train"]["lr"] == tomllib.loads(f"x = {text}")["x"] == value


@given(st.text(st.characters(categories=["L"]), min_size=1))
def test_unquoted_words_are_strings(word: str) -> None:
    expected = {"true": True, "false": False, "inf": float("inf")}.get(word, word)
    if word != "nan":
        assert tables_of(f"text.source_tokens={word}")["text"]["source_tokens"] == expected


@given(st.text(max_size=20))
def test_any_setting_is_applied_or_gives_a_user_error(setting: str) -> None:
    for text in (setting, f"{setting}=1", f"train.{setting}", f"lr={setting}"):
        tables: dict[str, Any] = {}
        try:
            assign(tables, text)
            load_recipe(tables)
        except UserError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": "a", "source": "b", "target": "c"}, "either train"),
        ({"source": "b"}, "belong together"),
        ({"target": "b"}, "belong together"),
        ({"valid": "a", "valid_source": "b", "valid_target": "c"}, "either valid"),
        ({"train": "a", "valid_target": "c"}, "valid_source and valid_target belong together"),
    ],
)
def test_contradictory_data_settings_are_refused(data: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe({"data": data})
    assert message in str(error.value)
    assert "data" in str(error.value)


def test_empty_recipe_is_complete() -> None:
    recipe = load_recipe({})
    assert recipe == Recipe()
    assert load_recipe(recipe.model_dump(mode="json")) == recipe


def test_recipes_do_not_share_their_tables() -> None:
    assert Recipe().model is not Recipe().model


def test_recipe_file_is_read_and_changed_by_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('preset = "rnn-luong"\n[model.decoder]\nscore = "dot"\n[train]\nlr = 1e-4\n', encoding="utf-8")
    tables = read_recipe(path)
    assert load_recipe(tables, str(path)).train.lr == 1e-4
    assign(tables, "score=general")
    assert load_recipe(tables).model == {"encoder": {"score": "general"}, "decoder": {"score": "general"}}


@pytest.mark.parametrize("content", [b"lr = ", b"\xff\xfe", b"a = 1\na = 2\n", b"[train\n"])
def test_unreadable_recipes_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.toml: not a readable TOML file: "):
        read_recipe(path)


def test_missing_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml: no such recipe"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(UserError, match="not a readable TOML file"):
        read_recipe(tmp_path)


def test_none_is_null_unless_it_is_an_allowed_value() -> None:
    changes = tables_of("kv_heads=none", "bias=none", "position=none")["model"]
    stack = preset("transformer-tiny", 50, changes=changes).encoder
    assert stack is not None
    assert (stack.kv_heads, stack.bias, stack.position) == (None, "none", "none")


@pytest.mark.parametrize("value", ["9" * 5000, "0x" + "f" * 5000, str(2**63), "[" * 3000, "[" * 20 + "1" + "]" * 20])
def test_oversized_values_are_refused(value: str, tmp_path: Path) -> None:
    """Values that make the TOML library, Python or pydantic fail are user errors."""
    with pytest.raises(UserError, match=r"--set train\.steps: (an integer of more than 64 bits|.*nested too deeply)"):
        assign({}, f"train.steps={value}")
    (tmp_path / "r.toml").write_text(f"[train]\nsteps = {value}\n")
    with pytest.raises(UserError, match=r"r\.toml: an integer of more than 64 bits, or .* nested too deeply"):
        read_recipe(tmp_path / "r.toml")


def test_deeply_nested_keys_are_refused(tmp_path: Path) -> None:
    key = "model." + ".".join("a" * 3000)
    with pytest.raises(UserError, match="no such section"):
        assign({}, f"{key}=1")
    for text in (f"{key} = 1", f"[{key}]\nx = 1"):
        (tmp_path / "r.toml").write_text(text)
        with pytest.raises(UserError, match=r"r\.toml: .* nested too deeply"):
            read_recipe(tmp_path / "r.toml")


@pytest.mark.parametrize("key", ["steps", "warmup", "workers", "seed", "average", "patience", "lora"])
def test_excessive_numbers_are_refused(key: str) -> None:
    with pytest.raises(UserError, match=f"train.{key}: input should be less than or equal to 2147483647"):
        load_recipe({"train": {key: 10**5000}})
