"""Transformer-XL, compared with recorded outputs of an old transformers (fixtures/make_transfo_xl.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kit.families import build, close, shrunk
from kit.hf import quiet
from regard.convert.hf import from_hf, to_hf
from regard.errors import UserError
from regard.model import Model
from regard.run import Run
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures" / "transfo-xl"
# Keys without effect on a model without cutoffs, and keys of the initialisation.
NO_EFFECT = {"adaptive", "tie_projs", "sample_softmax", "torch_dtype", "transformers_version", "proj_init_std"}
NO_EFFECT |= {"init", "init_range", "init_std"}


@pytest.fixture(params=["each", "shared"])
def theirs(request) -> Path:
    return FIXTURES / request.param


def settings(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


@torch.no_grad()
def log_probabilities(model: Model, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """The log-probabilities of the next tokens, segment by segment, with a memory of earlier segments."""
    memory = None
    outputs = []
    for tokens_BT in tokens:
        x_BTD, memory = model.read_segment(tokens_BT, memory)
        outputs.append(model.predict(x_BTD).log_softmax(-1))
    return outputs


def test_log_probabilities_equal_the_reference(theirs, tmp_path):
    from_hf(theirs, tmp_path / "run", 1, quiet)
    data = load_file(theirs / "expected.safetensors")
    outputs = log_probabilities(Run.load(tmp_path / "run").model, [data[f"tokens.{i}"] for i in range(4)])
    for i, ours in enumerate(outputs):
        close(ours, data[f"log_probabilities.{i}"])
        assert ours.std() > 0.1  # the outputs are not constant


def test_export_keeps_weights_and_settings(theirs, tmp_path):
    from_hf(theirs, tmp_path / "run", 1, quiet)
    to_hf(Run.load(tmp_path / "run"), tmp_path / "hf", 1, quiet)
    before = load_file(theirs / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    old = settings(theirs)
    new = settings(tmp_path / "hf")
    for name in ("r_w_bias", "r_r_bias"):  # a bias shared by all layers is exported once per layer
        if (shared := before.pop(f"transformer.{name}", None)) is not None:
            before |= {f"transformer.layers.{n}.dec_attn.{name}": shared for n in range(2)}
            old["untie_r"] = True
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert {key: new.get(key) for key in old.keys() - NO_EFFECT} == {key: old[key] for key in old.keys() - NO_EFFECT}
    from_hf(tmp_path / "hf", tmp_path / "again", 1, quiet)
    assert Run.load(tmp_path / "again").config == Run.load(tmp_path / "run").config


def test_the_report_says_that_the_conversion_is_not_proven(tmp_path):
    report = from_hf(FIXTURES / "each", tmp_path / "run", 1, quiet)
    assert report.proof is None
    assert "not proven: transformers 5 no longer has this model" in report.summary
    assert "no longer has this model" in (tmp_path / "run" / "README.md").read_text()
    assert "no longer has this model" in to_hf(Run.load(tmp_path / "run"), tmp_path / "hf", 1, quiet).summary


def test_a_run_of_regard_is_exported_and_imported(tmp_path):
    """An LM head without a bias is exported with a bias of zero."""
    config = shrunk("xl-tiny", changes={"decoder": {"reach": 5}})
    run = Run(config, Codec(Tokenizer.train("char", ["abcdefg"]), frame="none"), build(config), tmp_path / "xl")
    to_hf(run, tmp_path / "hf", 1, quiet)
    from_hf(tmp_path / "hf", tmp_path / "run", 1, quiet)
    tokens = list(torch.randint(11, (2, 30), generator=torch.Generator().manual_seed(1)).split(10, dim=1))
    again = Run.load(tmp_path / "run").model
    for a, b in zip(log_probabilities(run.model, tokens), log_probabilities(again, tokens), strict=True):
        close(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cutoffs": [4, 8]}, r"cutoffs \[4, 8\] is not supported, only \[\].*adaptive softmax"),
        ({"cutoffs": None}, "cutoffs .*20000"),  # the default has cutoffs
        ({"div_val": 4}, "div_val must be 1"),
        ({"d_embed": 4}, "d_embed and d_model must be equal"),
        ({"pre_lnorm": True}, "pre_lnorm True is not supported"),
        ({"attn_type": 1}, "attn_type 1 is not supported"),
        ({"same_length": True, "mem_len": 1}, "same_length True needs a mem_len of at least 2"),
        ({"same_length": 3}, "same_length must be true or false"),
        ({"clamp_len": "far"}, "decoder.reach"),
        ({"mem_len": -3}, "decoder.memory"),
        ({"architectures": ["TransfoXLForSequenceClassification"]}, "supported for transfo-xl: TransfoXLLMHeadModel"),
        ({"n_layer": 3}, "missing: transformer.layers.2.dec_attn.o_net.weight"),
    ],
)
def test_unsupported_settings_are_named_in_the_error(changes, message, tmp_path):
    shutil.copytree(FIXTURES / "each", tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings(FIXTURES / "each") | changes))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path / "hf", tmp_path / "run", 1, quiet)
    assert not (tmp_path / "run").exists()
