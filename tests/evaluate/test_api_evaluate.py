"""run.evaluate: what it is asked, and that it tells what the command line tells."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import regard
from kit.toy import call, strict_json


def test_evaluation_in_memory_is_that_of_the_file(toy):
    run = regard.load(toy / "run")
    run.load_model()  # torch answers all calls
    rows = [tuple(line.split("\t")) for line in (toy / "test.tsv").read_text().splitlines()]
    from_file = run.evaluate(toy / "test.tsv", beam=3, bootstrap=20)
    in_memory = run.evaluate(rows, beam=3, bootstrap=20)
    twice = run.evaluate(rows, beam=3, bootstrap=20, ensemble=[run])
    assert twice.metrics["wer"] == in_memory.metrics["wer"]  # the mean of two equals
    assert (in_memory.metrics, in_memory.outputs) == (from_file.metrics, from_file.outputs)
    with pytest.warns(UserWarning, match=r"data: 40 of 41 lines; skipped 1 empty side \(data\[40\]\)") as warned:
        evaluation = run.evaluate([*rows, ("abc", None)], beam=3, bootstrap=20)
    assert warned[0].filename == __file__ and evaluation.metrics == from_file.metrics
    assert "data[40]" in evaluation._repr_html_()
    with pytest.raises(regard.UserError, match=r"data\[40\]: empty side: target"):
        run.evaluate([*rows, ("abc", None)], strict=True)
    assert run.evaluate(rows, metrics=["wer"], against=run, bootstrap=0).p_values["wer"] == 1.0


def test_another_run_is_compared_without_the_weights_of_the_ensemble(toy):
    run = regard.load(toy / "run")
    both = run.evaluate(toy / "test.tsv", ensemble=[run], weights=(1, 2), against=run, metrics=["wer"], bootstrap=0)
    assert both.p_values == {"wer": 1.0}


@pytest.fixture(scope="module")
def mistaken(toy, tmp_path_factory):
    """A run that makes mistakes."""
    path, run = tmp_path_factory.mktemp("mistaken"), regard.load(toy / "run")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    run.save(path / "run")
    return regard.load(path / "run")


def test_evaluate_asks_what_the_command_line_asks(toy, mistaken, tmp_path):
    rows = [tuple(line.split("\t")) for line in (toy / "test.tsv").read_text().splitlines()]
    second = [target.replace("AH", "EH") for _, target in rows]
    (tmp_path / "second.txt").write_text("".join(f"{text}\n" for text in second))
    settings = ["--reference", tmp_path / "second.txt", "--metric", "bleu,per", "--bleu-tokenize", "intl"]
    settings += ["--lowercase", "--confusions", 3, "--beam", 2, "--bootstrap", 20, "--json"]
    told = call("evaluate", mistaken.path, toy / "test.tsv", *settings)
    assert told.code == 0, told.err
    common = {"metrics": ["bleu", "per"], "bleu_tokenize": "intl", "lowercase": True, "confusions": 3, "beam": 2}
    of_file = mistaken.evaluate(toy / "test.tsv", reference=[second], bootstrap=20, **common)
    assert json.loads(json.dumps(of_file.to_json())) == strict_json(told.out)
    assert 0 < len(of_file.confusions) <= 3 and "most frequent confusions" in of_file._repr_html_()
    for data, more in (
        (rows, {"reference": [tmp_path / "second.txt"]}),
        ([(*row, other) for row, other in zip(rows, second, strict=True)], {"columns": ["source", "target", "target"]}),
        ([(source,) for source, _ in rows], {"columns": "source", "reference": [[t for _, t in rows], iter(second)]}),
    ):
        assert mistaken.evaluate(data, bootstrap=20, **more, **common).metrics == of_file.metrics


def test_ready_outputs_are_judged_like_the_run_s_own(toy, mistaken, tmp_path):
    rows = [tuple(line.split("\t")) for line in (toy / "test.tsv").read_text().splitlines()]
    common = {"metrics": ["per", "wer"], "bootstrap": 20}
    own = mistaken.evaluate(rows, beam=2, **common)
    texts = own.outputs.texts
    (tmp_path / "out.txt").write_text("".join(f"{text}\n" for text in texts))
    for outputs in (texts, np.array(texts), tmp_path / "out.txt"):
        ready = mistaken.evaluate(rows, outputs=outputs, **common)
        assert (ready.metrics, ready.confusions) == (own.metrics, own.confusions)
        assert mistaken.evaluate(rows, beam=2, against=outputs, **common).p_values == {"per": 1.0, "wer": 1.0}
        assert mistaken.evaluate(rows, outputs=outputs, against=mistaken, beam=2, **common).p_values["per"] == 1.0
    same = mistaken.evaluate(rows, outputs=tmp_path / "out.txt", against=tmp_path / "out.txt", **common)
    assert same.others == same.metrics == own.metrics


def test_evaluation_with_the_other_engine(toy, mistaken):
    pytest.importorskip("ctranslate2")
    options = ["--engine", "ctranslate2", "--precision", "int8", "--beam", 2]
    printed = call("generate", mistaken.path, toy / "test.tsv", *options)
    common = {"engine": "ctranslate2", "metrics": ["wer"], "bootstrap": 0}
    told = mistaken.evaluate(toy / "test.tsv", precision="int8", beam=2, **common)
    assert printed.code == 0 and told.outputs.texts == printed.lines
    for wrong, message in (
        ({"ensemble": [mistaken]}, "ctranslate2 decodes with one run"),
        ({"precision": "bf16"}, "precision: bf16: goes with the engine torch"),
        ({"forbid": ["K"]}, "forbid: the engine ctranslate2 cannot do this"),
    ):
        with pytest.raises(regard.UserError, match=message):
            mistaken.evaluate(toy / "test.tsv", **common, **wrong)
