"""The library as a program sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import regard
from regard.settings import assign
from toykit import SMALL


def test_importing_is_light():
    code = "import sys, regard, regard.cli.app; print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_announced_is_there():
    for name in regard.__all__:
        assert getattr(regard, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = regard.nothing


def test_generate_score_and_logits_agree(toy):
    run = regard.load(toy / "run")
    (best, second), *_ = run.generate(["abc", "fed"], beam=3, nbest=2)
    assert best.score >= second.score
    again = run.score([("abc", best.text)])[0]
    assert again.score == pytest.approx(best.score, abs=1e-4)
    source = run.codec.encode_source([regard.Example("abc")])
    logits_1TV = run.logits(source, [[run.config.start_id, *best.ids[:-1]]])
    logp_TV = torch.log_softmax(logits_1TV[0], -1)
    assert [float(logp_TV[t, i]) for t, i in enumerate(best.ids)] == pytest.approx(best.token_scores, abs=1e-4)


def test_attention_is_of_the_output(toy):
    run = regard.load(toy / "run")
    best = run.generate(["abc"], beam=5)[0][0]
    found = run.attention("abc")
    assert found.texts == {"source": "abc", "output": best.text}
    assert found.score == pytest.approx(best.score, abs=1e-4)
    assert run.attention("abc", "F F").tokens["output"] == ("F", "F", "<eos>")
    assert "<iframe" in found._repr_html_()


def test_options_are_checked(toy):
    run = regard.load(toy / "run")
    with pytest.raises(regard.UserError, match="did you mean 'beam'"):
        run.generate(["abc"], beem=3)
    with pytest.raises(regard.UserError, match="no such run"):
        regard.load(toy / "nowhere")


def test_models_by_name():
    model = regard.Model(regard.preset("transformer-tiny", vocab=50))
    assert isinstance(model.config, regard.Config)


def test_train_is_a_function_even_when_its_package_is_loaded(toy, tmp_path):
    import regard.train.talk  # the package `regard.train` now exists and must not be in the way

    tables = {"data": {"train": str(toy / "pairs.tsv")}, "train": {"steps": 2, "workers": 1}}
    for setting in SMALL:
        assign(tables, setting)
    run = regard.train(tables, tmp_path / "run")
    assert isinstance(run, regard.LoadedRun) and run.generate(["abc"])[0][0].text is not None
    assert (tmp_path / "run" / "model.safetensors").is_file()
