"""Costs compared with published numbers, with the counters of torch, and with real models."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from kit.toy import call
from regard.batch import Batch
from regard.config import Config
from regard.cost.activations import MemoryTracker, count_activations
from regard.cost.describe import (
    cache_bytes,
    count_flops,
    count_parameters,
    describe,
    duration,
    measure_rate,
    si,
)
from regard.errors import UserError
from regard.loss import Objective
from regard.model import Model, on_meta
from regard.nn.attention import Attention
from regard.nn.cache import State
from regard.nn.recurrent import RecurrentDecoder
from regard.presets import ABOUT, PRESETS, model_without_data, preset
from regard.recipe import load_recipe, recipe_names

SCORES = ("scaled_dot", "dot", "general", "additive", "concat", "cosine", "location")


def both(**changes):
    return {"encoder": changes, "decoder": changes}


def test_parameters_of_the_projections_of_a_wide_attention():
    info = describe(preset("transformer-base", changes=both(width=8192, heads=64, bias="none", layers=1)))
    assert info.parameters["encoder.self_attention.query"] == 8192**2
    assert info.subtotals()["encoder.self_attention.query_key_value"] == 3 * 8192**2 == 201_326_592


def test_a_model_of_70_billion_parameters_is_described():
    config = preset("transformer-base", 128_000, changes=both(width=16384, heads=128, layers=12, ff=65536))
    info = describe(config)
    assert info.total > 70e9
    assert info.training > 16 * info.total


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_the_parts_sum_to_the_total_for_every_preset(name):
    config = preset(name)
    model = on_meta(config)
    parts = count_parameters(model)
    assert sum(parts.values()) == model.size
    tied = config.tie_output and config.predicts_tokens
    bias = (config.classes or config.target_vocab) if config.output_bias else 0
    assert (parts["prediction"] == bias) == tied
    stacks = [name for name in ("encoder", "decoder") if getattr(config, name)]
    assert {part.partition(".")[0] for part in parts if "." in part} == set(stacks)
    assert ("embedding" in parts) == (len(stacks) == 1 and config.patches is None)


@pytest.mark.parametrize("name", ["transformer-base", "rnn-bahdanau", "rnn-luong", "t5-small"])
@pytest.mark.parametrize("score", SCORES)
def test_parameters_of_the_parts_sum_to_the_total_for_every_score(name, score):
    model = on_meta(preset(name, 100, changes=both(score=score, position="bucket")))
    assert sum(count_parameters(model).values()) == model.size


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_described_with_the_flops_and_cache_of_its_stacks(name):
    config = preset(name)
    info = describe(config)
    assert info.total * 16 < info.training
    assert (info.source_flops > 0) == (config.encoder is not None)
    assert (info.target_flops > 0) == (config.decoder is not None) == (info.cache > 0)


def test_parameters_of_each_part():
    parts = count_parameters(on_meta(preset("transformer-tiny", source_vocab=50, target_vocab=60)))
    assert parts["source_embedding"] == 50 * 128 and parts["target_embedding"] == 60 * 128
    assert parts["encoder.feed_forward"] == 2 * (128 * 512 + 512 + 512 * 128 + 128)
    assert parts["encoder.norms"] == 2 * 2 * 256 + 256  # two per layer and the final norm
    assert parts["decoder.cross_attention.key"] == 2 * (128 * 128 + 128)
    assert "encoder.cross_attention.key" not in parts


def test_grouped_heads_have_fewer_key_parameters():
    parts = count_parameters(on_meta(preset("transformer-tiny", 50, changes=both(kv_heads=1, bias="none"))))
    assert parts["encoder.self_attention.query"] == 4 * parts["encoder.self_attention.key"]


def test_key_and_value_parameters_are_proportional_to_their_widths():
    parts = count_parameters(
        on_meta(preset("transformer-tiny", 50, changes=both(head_width=8, value_width=32, bias="none")))
    )
    assert 4 * parts["encoder.self_attention.key"] == parts["encoder.self_attention.value"]


@pytest.mark.parametrize("score", SCORES)
def test_flops_equal_the_counter_of_torch(score):
    config = preset("transformer-tiny", 60, changes=both(score=score, max_length=8, kv_heads=None))
    model = Model(config).eval()
    length = 8
    for module in model.modules():
        if isinstance(module, Attention):  # a hook selects the eager path, whose matrix products torch counts
            module.weights.register_forward_hook(lambda *_: None)
    ids = torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids, None, ids)
    per_source, per_target = count_flops(model, length)
    expected = length * (per_source + per_target)
    uncounted = {"additive", "concat", "location"}  # their scores are not matrix products
    attention = 2 * config.decoder.width * length * length * 6 if score in uncounted else 0
    assert counter.get_total_flops() == expected - attention


@pytest.mark.parametrize("name", ["bert-tiny", "gpt-tiny", "llama-tiny", "xl-tiny", "reformer-tiny", "vit-tiny"])
def test_flops_of_a_single_stack_equal_the_counter_of_torch(name):
    """The flops per token include its share of what is computed once per input."""
    config = preset(name, 60)
    model = Model(config).eval()
    length = 17 if config.patches else 8
    for path, module in model.named_modules():
        if path.endswith("attention.weights"):
            module.register_forward_hook(lambda *_: None)
    ids = torch.zeros(1, 1, 8, 8) if config.patches else torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if config.has_memory:
            model.read_segment(ids, (torch.zeros(1, 128, 128),) * 4)
            model.predict(torch.zeros(1, length, 128))
        else:
            model(ids, None)
    assert sum(count_flops(model, length)) * length == pytest.approx(counter.get_total_flops(), rel=1e-5)


RECURRENT = [name for name in PRESETS if any(stack.recurrent for stack in preset(name).stacks.values())]


@pytest.mark.parametrize("score", ["scaled_dot", "general"])  # scores that are matrix products, which torch counts
@pytest.mark.parametrize("name", RECURRENT)
def test_flops_of_recurrent_presets_equal_the_counter_of_torch(name, score):
    config = preset(name, 60, changes=both(score=score))
    model = on_meta(config).eval()  # on a CPU, oneDNN runs the cells in operations that torch does not count
    assert isinstance(model.decoder, RecurrentDecoder)
    model.decoder.cross.weights.register_forward_hook(lambda *_: None)
    for length in (2, 9, 32):
        ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(ids, None, ids)
        assert sum(count_flops(model, length)) * length == pytest.approx(counter.get_total_flops(), rel=1e-5)


def test_flops_of_hashed_attention_stop_growing_with_length():
    model = on_meta(preset("reformer-tiny"))
    short, long, longer = (sum(count_flops(model, length)) for length in (64, 2048, 4096))
    assert short < long == longer


@pytest.mark.parametrize("name", ["transformer-tiny", "rnn-bahdanau"])
def test_activations_are_within_20_percent_of_a_real_forward_pass(name):
    config = preset(name, 50, changes=both(position="learned"))
    model = Model(config).train()
    activations = {}
    own = {p.data_ptr() for p in model.parameters()}

    def record(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            activations[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(4, 16, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model.hidden(ids, None, ids)
    real = sum(tensor.untyped_storage().nbytes() for tensor in activations.values())
    assert count_activations(config, 16, 64) == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize(("length", "memory"), [(32, 128), (128, 128), (64, 32)])
def test_activations_with_a_segment_memory_match_the_peak_of_a_real_pass(length, memory):
    config = preset("xl-tiny", 50, changes={"decoder": {"memory": memory}})
    objective = Objective(Model(config).train())
    ids = torch.zeros(8, length, dtype=torch.int64)
    batch = Batch(ids[:, :0], None, ids, ids, None, 1, 1)
    with MemoryTracker() as tracker:
        for _ in range(memory // length + 2):  # until the memory is full
            before = objective.segment_memory  # held by the step until its end
            objective(batch).smoothed.backward()
    own = {StorageWeakRef(x.untyped_storage()) for p in objective.parameters() for x in (p, p.grad) if x is not None}
    assert before is not None and len(before) == config.top.layers
    assert count_activations(config, length, 8 * length) == pytest.approx(tracker.peak(without=own), rel=0.2)


@pytest.mark.parametrize(("mixer", "length", "within"), [("lsh", 1024, 0.02), ("attention", 128, 0.1)])
def test_activations_of_reversible_layers_match_the_peak_of_a_real_pass(mixer, length, within):
    """The peak hardly grows with the number of layers."""
    changes = {"mixer": mixer, "layers": 2, "width": 64, "ff": 128, "position": "rotary", "axial": None}
    config = preset("reformer-tiny", 50, changes={"decoder": changes})
    model = Model(config).train()
    ids = torch.zeros(1024 // length, length, dtype=torch.int64)
    with MemoryTracker() as tracker:
        x = model.hidden(ids, None, ids)
        x.backward(torch.empty_like(x))
    own = {StorageWeakRef(t.untyped_storage()) for p in model.parameters() for t in (p, p.grad) if t is not None}
    counted = count_activations(config, length, 1024)
    assert counted == pytest.approx(tracker.peak(without=own), rel=within)
    deeper = preset("reformer-tiny", 50, changes={"decoder": changes | {"layers": 4}})
    assert counted <= count_activations(deeper, length, 1024) < 1.1 * counted


def test_activations_of_fused_attention_grow_linearly_with_length():
    """The fused kernel recomputes the attention weights of all pairs of tokens in the backward pass."""
    config = preset("llama-tiny", 50)
    assert count_activations(config, 1024, 1024) < 2.3 * count_activations(config, 512, 512)


def test_cache_size_equals_the_state_of_a_decoding_model():
    model = Model(preset("transformer-tiny", 20, changes=both(kv_heads=2, value_width=24))).eval()
    state = model.encode(torch.zeros(1, 5, dtype=torch.int64))
    for _ in range(3):
        _, state = model.step(torch.zeros(1, dtype=torch.int64), state)
    target = sum(x.numel() * 4 for memory in state.layers for x in memory)
    source = sum(x.numel() * 4 for kv in state.source.layers for x in kv)
    per_source, per_target = cache_bytes(model)
    assert (source, target) == (5 * per_source, 3 * per_target)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "xl-tiny", "reformer-tiny"])
def test_cache_size_equals_the_state_of_a_language_model(name):
    model = Model(preset(name, 20)).eval()
    _, state = model.read(torch.zeros(1, 3, dtype=torch.int64), State(()))
    size = sum(x.numel() * 4 for memory in state.layers for x in memory)
    assert cache_bytes(model) == (0, size / 3)


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        ("bert-tiny", ["a token at length 32", "memory, use", "per million tokens"], ["decoding", "target", "beam"]),
        ("gpt-tiny", ["a token at length 32", "32 texts with beam 5", "\nembedding"], ["source", "target", "a side"]),
        ("xl-tiny", ["after 128 remembered"], ["source", "target"]),
        ("vit-tiny", ["one of the 17 patches", "per million patches"], ["tokens", "decoding", "source", "target"]),
        ("reformer-tiny", ["query = key + value"], ["source", "target"]),
        ("t5-tiny", ["a source and a target token", "shared embedding", "tokens a side"], ["squares"]),
    ],
)
def test_info_mentions_only_the_parts_that_the_model_has(name, present, absent):
    result = call("info", name)
    assert result.code == 0, result.err
    assert all(words in "\n" + result.out for words in present)
    assert not any(words in result.out for words in absent)


def test_a_model_for_vectors_has_no_prediction_parameters():
    model = on_meta(preset("bert-tiny", changes={"output": "none", "output_bias": False, "pooler": True}))
    parts = count_parameters(model)
    assert "prediction" not in parts and parts["pooler"] == 128 * 129


def test_an_encoder_has_no_cache_and_no_target_flops():
    info = describe(Config(source_vocab=50, target_vocab=50, encoder={"layers": 1, "width": 32, "heads": 2, "ff": 64}))
    assert info.cache == 0 and info.target_flops == 0 and info.total > 0


def test_the_model_of_a_recipe_without_data_has_its_vocabulary_size():
    def config(tables, vocab=None):
        return model_without_data(load_recipe(tables), vocab, "r")

    assert config({"preset": "transformer-tiny", "text": {"source_tokens": "bpe:500"}}).source_vocab == 500
    assert config({"preset": "transformer-tiny"}, 77).target_vocab == 77
    with pytest.raises(UserError, match="chosen from the data"):
        config({})


def test_training_time_is_flops_divided_by_rate():
    info = describe(preset("transformer-tiny", 50))
    rate = measure_rate(64, seconds=0.01)
    assert 1e8 < rate < 1e14
    assert info.training_seconds(2e6, rate) == 3 * info.flops_per_token * 2e6 / rate
    assert [duration(5), duration(600), duration(1e6)] == ["5.0 s", "10.0 minutes", "11.6 days"]


def test_si_prefixes():
    assert [si(0), si(999), si(201_326_592), si(1.5e9, "B")] == ["0", "999", "201.3M", "1.5 GB"]


def test_info_lists_every_preset_and_recipe_with_a_description():
    rows = [line.split("\t") for line in call("info").lines]
    assert [name for kind, name, *_ in rows if kind == "preset"] == list(PRESETS)
    assert [name for kind, name, *_ in rows if kind == "recipe"] == recipe_names()
    assert all(len(about.split()) > 1 and len(about) < 120 for *_, about in rows)
    entries = [json.loads(line) for line in call("info", "--json").lines]
    assert [entry["about"] for entry in entries] == [about for *_, about in rows]
    tiny = next(entry for entry in entries if entry.get("preset") == "gpt-tiny")
    assert tiny["parameters"] == json.loads(call("info", "gpt-tiny", "--json").out)["parameters"]["total"]


def test_the_list_fits_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    output = re.sub(r"\x1b\[[0-9;]*m", "", call("info").out)
    assert max(map(len, output.splitlines())) <= 80
    assert set(ABOUT["transformer-base"].split()) <= set(output.split())  # lines break between words only


def test_a_misspelled_name_gets_a_suggestion(toy):
    for name, suggestion in ((toy / "rum", f"{toy / 'run'}?"), ("transformer-bas", "'transformer-base'?")):
        result = call("info", name)
        message = f"{name}: not a run directory, preset or recipe; did you mean {suggestion}"
        assert result.code == 2 and message in result.err
