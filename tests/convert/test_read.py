"""Reading Hugging Face directories: sharded, pickled, with old weight names, damaged, or malicious."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.hf import make, quiet
from regard.convert.hf import from_hf
from regard.errors import UserError
from regard.run import Run
from regard.weight_files import weights_of

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("read") / "gpt2"
    make("gpt2", path)
    return path


@pytest.fixture
def copy(gpt2, tmp_path) -> Path:
    shutil.copytree(gpt2, tmp_path / "hf")
    return tmp_path / "hf"


def weights(path: Path) -> dict[str, torch.Tensor]:
    return weights_of(Run.load(path).model)


def same(a: Path, b: Path) -> None:
    before = weights(a)
    after = weights(b)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_single_sharded_and_pickled_weights_give_the_same_run(gpt2, tmp_path):
    from_hf(gpt2, tmp_path / "one", 1, quiet)
    make("gpt2", tmp_path / "parts", max_shard_size="8kB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    from_hf(tmp_path / "parts", tmp_path / "several", 1, quiet)
    same(tmp_path / "one", tmp_path / "several")

    shutil.copytree(gpt2, tmp_path / "bin")
    tensors = load_file(tmp_path / "bin" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]  # old files store tied weights under both names
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    log: list[str] = []
    from_hf(tmp_path / "bin", tmp_path / "pickled", 1, log.append)
    assert any("weights_only" in line for line in log)
    same(tmp_path / "one", tmp_path / "pickled")


def test_a_pickle_that_would_execute_code_is_refused(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    trace = tmp_path / "ran"
    torch.save({"transformer.wte.weight": Evil(str(trace))}, copy / "pytorch_model.bin")
    with pytest.raises(UserError, match="not readable as plain weights"):
        from_hf(copy, tmp_path / "run", 1, quiet)
    torch.save([torch.zeros(1)], copy / "pytorch_model.bin")
    with pytest.raises(UserError, match="only a table of tensors"):
        from_hf(copy, tmp_path / "run", 1, quiet)
    assert not trace.exists()


class Evil:
    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (Path(self.trace),)


def test_half_precision_becomes_float32(gpt2, copy, tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    log: list[str] = []
    from_hf(copy, tmp_path / "run", 2, log.append)
    assert "weights in bfloat16 are converted to float32" in log
    weight = weights(tmp_path / "run")["decoder.norm.weight"]
    assert weight.dtype == torch.float32 and torch.equal(weight, tensors["transformer.ln_f.weight"].float())


def test_unprefixed_names_old_buffers_and_untied_output_are_read(gpt2, copy, tmp_path):
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(copy / "model.safetensors").items()}
    tensors |= {
        "h.0.attn.bias": torch.ones(1, 1, 30, 30, dtype=torch.uint8),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    log: list[str] = []
    from_hf(copy, tmp_path / "run", 2, log.append)
    assert "not needed: transformer.h.0.attn.bias, transformer.h.0.attn.masked_bias" in log
    from_hf(gpt2, tmp_path / "plain", 1, quiet)
    same(tmp_path / "run", tmp_path / "plain")

    save_file(tensors | {"lm_head.weight": tensors["wte.weight"] + 1}, copy / "model.safetensors", {"format": "pt"})
    report = from_hf(copy, tmp_path / "untied", 2, quiet)
    assert report.proof is not None and not Run.load(tmp_path / "untied").config.tie_output


def test_gamma_and_beta_are_read_as_names_of_norm_weights(tmp_path):
    make("bert-masked", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
           for n, x in tensors.items()}  # fmt: skip
    old |= {"cls.seq_relationship.weight": torch.ones(2, 16), "cls.seq_relationship.bias": torch.ones(2)}
    old |= {"bert.pooler.dense.weight": torch.ones(16, 16), "bert.pooler.dense.bias": torch.ones(16)}
    assert not old.keys() & {name for name in tensors if "LayerNorm" in name}
    save_file(old, file, {"format": "pt"})
    log: list[str] = []
    from_hf(tmp_path / "hf", tmp_path / "run", 1, log.append)
    assert "not needed: bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship.bias and 1 more" in log


def test_one_error_lists_every_mismatched_weight(copy, tmp_path):
    tensors = load_file(copy / "model.safetensors")
    del tensors["transformer.h.0.ln_1.weight"], tensors["transformer.h.1.mlp.c_fc.bias"]
    tensors["transformer.h.2.ln_1.weight"] = torch.zeros(16)
    tensors["transformer.wpe.weight"] = torch.zeros(31, 16)
    tensors["transformer.h.1.attn.c_attn.weight"] = torch.zeros(48, 16)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError) as error:
        from_hf(copy, tmp_path / "run", 1, quiet)
    assert str(error.value).splitlines()[1:] == [
        "  missing: transformer.h.0.ln_1.weight",
        "  missing: transformer.h.1.mlp.c_fc.bias",
        "  not known: transformer.h.2.ln_1.weight [16]",
        "  transformer.h.1.attn.c_attn.weight: shape [48, 16] where config.json says [16, 48]",
        "  transformer.wpe.weight: shape [31, 16] where config.json says [30, 16]",
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".."])
def test_an_index_may_name_only_files_in_its_directory(name, copy, tmp_path):
    (copy / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))
    with pytest.raises(UserError, match=r"is not the name of a file in the same directory|are missing"):
        from_hf(copy, tmp_path / "run", 1, quiet)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "target/tokenizer.json"])
def test_a_link_out_of_the_directory_is_refused(file, copy, tmp_path):
    (copy / file).unlink(missing_ok=True)
    (copy / file).parent.mkdir(exist_ok=True)
    (tmp_path / "outside").write_text("{}")
    (copy / file).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=f"{file}: points out of its directory"):
        from_hf(copy, tmp_path / "run", 1, quiet)


def test_symlinks_of_a_download_cache_are_followed(copy, tmp_path):
    blobs = tmp_path / "repo" / "blobs"
    snapshot = tmp_path / "repo" / "snapshots" / "123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(copy.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    from_hf(snapshot, tmp_path / "run", 1, quiet)
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_model_code_is_ignored_with_a_note(copy, tmp_path):
    settings = json.loads((copy / "config.json").read_text())
    code = {"auto_map": {"AutoModel": "modeling.Evil"}, "trust_remote_code": True}
    (copy / "config.json").write_text(json.dumps(settings | code))
    (copy / "modeling.py").write_text("raise SystemExit('this must not run')\n")
    log: list[str] = []
    from_hf(copy, tmp_path / "run", 1, log.append)
    assert any(line.startswith("ignored: auto_map, trust_remote_code, modeling.py") for line in log)


def test_ids_beyond_the_vocabulary_and_empty_settings_are_ignored(copy, tmp_path):
    settings = json.loads((copy / "config.json").read_text())
    loose = {"bos_token_id": 50256, "eos_token_id": 50256, "n_inner": None}
    (copy / "config.json").write_text(json.dumps(settings | loose))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 50256, "pad_token_id": 7}))
    log: list[str] = []
    from_hf(copy, tmp_path / "run", 1, log.append)
    assert "ignored: bos_token_id, eos_token_id (beyond the vocabulary)" in log
    assert Run.load(tmp_path / "run").config.ids.pad == 7
    (copy / "config.json").write_text(json.dumps(settings | {"scale_attn_weights": None}))
    with pytest.raises(UserError, match=r"transformers cannot load it: .*scale_attn_weights"):
        from_hf(copy, tmp_path / "other", 1, quiet)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "not readable as JSON"),
        ("config.json", "[]", "must be a table"),
        ("config.json", "{}", "model_type None is not known"),
        ("config.json", '{"model_type": ["gpt2"]}', "is not known"),
        ("model.safetensors", "junk", "not a readable safetensors file"),
        ("pytorch_model.bin", "junk", "not readable as plain weights"),
        ("model.safetensors.index.json", "{}", "no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "no weight_map"),
        ("other", "", "no weights"),
    ],
)
def test_invalid_files_are_refused(file, content, message, copy, tmp_path):
    if file != "config.json":
        (copy / "model.safetensors").unlink()
    (copy / file).write_text(content)
    with pytest.raises(UserError, match=message):
        from_hf(copy, tmp_path / "run", 1, quiet)
    assert not (tmp_path / "run").exists()
