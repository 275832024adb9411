"""Every family is imported with equal outputs and exported with equal weights; unsupported settings are errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import regard
from kit.families import BOTH, DECODERS, ENCODERS, build, shrunk
from kit.hf import MODELS, V, make, quiet
from kit.toy import call
from regard.config import Config
from regard.convert.family import ACTIVATIONS
from regard.convert.hf import RECORD, from_hf, to_hf
from regard.convert.proof import draw_samples, our_outputs, their_outputs
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    """A function that returns directory and model of a family, created once."""
    root = tmp_path_factory.mktemp("hub")
    models = {}

    def get(name: str):
        if name not in models:
            models[name] = (root / name, make(name, root / name))
        return models[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_import_keeps_outputs_and_export_keeps_weights(name, hub, tmp_path):
    path, model = hub(name)
    report = from_hf(path, tmp_path / "run", 4, quiet)
    assert report.proof is not None and report.proof.difference < 1e-5
    run = Run.load(tmp_path / "run")
    assert run.task.name == read(tmp_path / "run")["task"] == task_of(name)
    samples = draw_samples(run.config, 6)[:1]
    for ours, theirs in zip(our_outputs(run.model, samples), their_outputs(model, run.config, samples), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
        assert theirs.std() > 0.1  # the outputs are not constant
    back = to_hf(run, tmp_path / "hf", 4, quiet)
    assert back.proof is not None and back.proof.difference < 1e-5
    assert back.architecture == type(model).__name__
    before = load_file(path / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    _, loading = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading.values()), loading
    again = from_hf(tmp_path / "hf", tmp_path / "again", 4, quiet)
    assert again.parameters == report.parameters
    last = Run.load(tmp_path / "again").config
    assert last.start_id == run.config.start_id
    assert last.model_copy(update={"ids": run.config.ids}) == run.config  # missing special ids are filled with others


def task_of(name: str) -> str:
    """The task of a converted model; bert-vectors is a masked LM without its head."""
    tasks = {"bert-classes": "classify", "bert-vectors": "masked", "bert-masked": "masked", "vit": "image"}
    return tasks.get(name, "pairs" if name.startswith(("marian", "t5")) else "lm")


@pytest.mark.parametrize("name", [*BOTH, *DECODERS, *ENCODERS])
def test_every_preset_is_exported_or_refused_with_a_reason(name, tmp_path):
    config = shrunk(name)
    if config.patches is not None:
        config = shrunk(name, changes={"encoder": {"max_length": 1 + config.patches.count}})
    codec = Codec(Tokenizer.train("char", ["abcdefg"]), frame=config.frame)
    run = Run(config, codec, build(config), tmp_path / name)
    reason = reason_against_export(config)
    if reason is None:
        report = to_hf(run, tmp_path / "hf", 4, quiet)
        if report.details["model_type"] != "transfo-xl":  # removed from transformers
            assert report.proof is not None and report.proof.difference < 1e-5
        return
    with pytest.raises(UserError, match="no counterpart") as error:
        to_hf(run, tmp_path / "hf", 2, quiet)
    assert reason in str(error.value)
    assert list(tmp_path.iterdir()) == []


def reason_against_export(config: Config) -> str | None:
    """The setting that no model of transformers supports, if any."""
    stack = config.decoder or config.encoder
    if stack.recurrent:
        return f"mixer={stack.mixer}"
    if config.encoder and config.decoder and stack.position in ("sinusoid", "rotary"):
        return f"encoder.position={stack.position} (there: "
    return None


def test_settings_without_effect_do_not_prevent_export(tmp_path):
    idle = {"output": "classes", "classes": 3, "pooler": True, "tie_output": False, "start": "eos"}
    config = shrunk("bert-base", changes=idle)
    run = Run(config, Codec(Tokenizer.train("char", ["abc"]), frame="both"), build(config), tmp_path / "run")
    report = to_hf(run, tmp_path / "hf", 2, quiet)
    assert report.architecture == "BertForSequenceClassification" and report.proof is not None


def test_pruned_heads_are_not_exported(tmp_path):
    config = shrunk("gpt2", changes={"decoder": {"kept_heads": [[0], [0, 1]]}})
    run = Run(config, Codec(Tokenizer.train("char", ["abc"])), build(config), tmp_path / "run")
    with pytest.raises(UserError, match=r"gpt2.*\n.*decoder.kept_heads="):
        to_hf(run, tmp_path / "hf", 2, quiet)


def test_greedy_search_equals_transformers(hub, tmp_path):
    path, model = hub("marian")
    from_hf(path, tmp_path / "run", 1, quiet)
    run = regard.load(tmp_path / "run")
    (best, *_), *_ = run.generate(["5 6 7 8"], beam=1, max_length=8)
    ids = torch.tensor([[5, 6, 7, 8, 0]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=8)
    theirs = out[0, 1:].tolist()
    length = min(len(theirs), len(best.ids)) - 1  # transformers forces the end token at the limit
    assert length > 3 and list(best.ids[:length]) == theirs[:length]


def test_without_tokenizer_files_a_text_consists_of_ids(hub, tmp_path):
    path, _ = hub("llama-2")
    notes: list[str] = []
    from_hf(path, tmp_path / "run", 1, notes.append)
    assert any("no tokenizer" in note for note in notes)
    codec = Run.load(tmp_path / "run").codec
    assert codec.source.encode(["12 7 39"]) == [[12, 7, 39]]
    assert codec.source.decode([12, 7, 39]) == "12 7 39"
    assert codec.source.encode(["12 7\n", "12\r\n7\n\n39", "12\u2028 7\t39\x85"]) == [[12, 7], [12, 7, 39], [12, 7, 39]]


def test_the_proof_is_recorded_in_the_run_and_its_model_card(hub, tmp_path):
    path, _ = hub("vit")
    report = from_hf(path, tmp_path / "run", 3, quiet)
    record = json.loads((tmp_path / "run" / RECORD).read_text())
    assert record == json.loads(json.dumps(report.to_json()))
    assert record["proof"]["samples"] == 3
    card = (tmp_path / "run" / "README.md").read_text()
    assert "ViTForImageClassification" in card and f"{record['proof']['difference']:.2g}" in card
    run = Run.load(tmp_path / "run")
    assert run.labels == tuple(f"LABEL_{n}" for n in range(5))
    assert run.pixels is not None and run.pixels.scale == pytest.approx((127.5,) * 3)


def test_different_outputs_stop_the_conversion(hub, tmp_path, monkeypatch):
    path, _ = hub("gpt2")
    shutil.copytree(path, tmp_path / "hf")
    monkeypatch.setitem(ACTIVATIONS, "gelu_new", "relu")
    with pytest.raises(UserError, match="not the same"):
        from_hf(tmp_path / "hf", tmp_path / "run", 4, quiet)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def test_without_transformers_the_report_says_not_proven(hub, tmp_path, monkeypatch):
    path, _ = hub("t5")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    report = from_hf(path, tmp_path / "run", 4, quiet)
    assert report.proof is None and "not proven" in report.summary
    assert "Not proven" in (tmp_path / "run" / "README.md").read_text()
    assert to_hf(Run.load(tmp_path / "run"), tmp_path / "hf", 4, quiet).proof is None


def test_convert_on_the_command_line(hub, tmp_path):
    path, _ = hub("bert-masked")
    result = call("convert", path, tmp_path / "run", "--samples", 2, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["architecture"] == "BertForMaskedLM"
    assert "for 2 random inputs" in result.err
    result = call("convert", tmp_path / "run", tmp_path / "hf", "--to", "hf")
    assert result.code == 0, result.err
    assert result.lines[0] == "model\tBertForMaskedLM"
    for args, message in (
        (("convert", path, tmp_path / "run"), "exists already"),
        (("convert", tmp_path / "run", tmp_path / "new"), "this is a run"),
        (("convert", tmp_path / "run", tmp_path / "new", "--to", "hg"), "allowed: ctranslate2, hf"),
        (("convert", tmp_path / "none", tmp_path / "new"), "no such directory"),
    ):
        result = call(*args)
        assert result.code == 2 and message in result.err, result.err
        assert not (tmp_path / "new").exists()


def test_the_output_directory_may_exist_if_empty(hub, tmp_path):
    path, _ = hub("t5")
    (tmp_path / "run").mkdir()
    from_hf(path, tmp_path / "run", 1, quiet)
    assert Run.load(tmp_path / "run").config.target_vocab == V


def read(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("marian", {"activation_function": "quick_gelu"}, "activation_function 'quick_gelu' is not supported"),
        ("marian", {"tie_word_embeddings": False}, "tie_word_embeddings False is not supported, only True"),
        ("marian", {"d_model": "wide"}, "d_model must be a positive integer, not 'wide'"),
        ("bert-masked", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("bert-masked", {"is_decoder": True}, "is_decoder True is not supported"),
        ("bert-masked", {"architectures": ["BertForMultipleChoice"]}, "supported for bert: BertForMaskedLM"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("gpt2", {"model_type": "gpt_2"}, "model_type 'gpt_2' is not known; did you mean 'gpt2'"),
        ("gpt2", {"quantization_config": {}}, "quantised weights"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj 'gated-mish'"),
        ("t5", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets 64"),
        ("llama-2", {"attention_bias": True}, "attention_bias True is supported only together with mlp_bias"),
        ("llama-2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
        ("llama-2", {"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_type 'linear'"),
        ("llama-2", {"num_key_value_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ("reformer", {"num_buckets": ["a"]}, "decoder.lsh.buckets"),
        ("llama-2", {"rope_parameters": {"rope_theta": "far"}}, "decoder.rotary.base"),
        ("reformer", {"attn_layers": ["local", "lsh"]}, r"attn_layers \['local', 'lsh'\] is not supported"),
        ("vit", {"patch_size": [4, 2]}, "patches must be square"),
        ("vit", {"qkv_bias": False}, "qkv_bias False is not supported"),
    ],
)
def test_unsupported_settings_are_named_in_the_error(name, changes, message, hub, tmp_path):
    path, _ = hub(name)
    shutil.copytree(path, tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(read(path) | changes))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path / "hf", tmp_path / "run", 1, quiet)
    assert not (tmp_path / "run").exists()


def test_rope_scaling_of_older_configs_is_read(hub, tmp_path):
    path, _ = hub("llama-3")
    shutil.copytree(path, tmp_path / "hf")
    settings = read(path)
    scaling = settings.pop("rope_parameters")
    settings |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings))
    report = from_hf(tmp_path / "hf", tmp_path / "run", 4, quiet)
    assert report.proof is not None and report.proof.difference < 1e-5
    assert Run.load(tmp_path / "run").config.decoder.rotary.factor == 8


def test_label_names_survive_import_and_export(hub, tmp_path):
    path, _ = hub("bert-classes")
    shutil.copytree(path, tmp_path / "hf")
    names = ["good", "bad", "so so", "no", "yes"]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(read(path) | labels))
    from_hf(tmp_path / "hf", tmp_path / "run", 1, quiet)
    run = Run.load(tmp_path / "run")
    assert run.labels == tuple(names)
    to_hf(run, tmp_path / "back", 1, quiet)
    assert list(read(tmp_path / "back")["id2label"].values()) == names
