"""The library as a program sees it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import regard
from regard.decode.classify import classify
from regard.recipe import assign
from toykit import SMALL, call, small


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
    traced = run.attention("abc")
    assert traced.texts == {"source": "abc", "output": best.text}
    assert traced.score == pytest.approx(best.score, abs=1e-4)
    assert run.attention("abc", "F F").tokens["output"] == ("F", "F", "<eos>")
    assert "<iframe" in traced._repr_html_()


def test_options_are_checked(toy):
    run = regard.load(toy / "run")
    with pytest.raises(regard.UserError, match="did you mean 'beam'"):
        run.generate(["abc"], beem=3)
    with pytest.raises(regard.UserError, match="no such run"):
        regard.load(toy / "nowhere")


def test_bf16_that_does_not_work_is_not_used(toy, monkeypatch):
    run = regard.load(toy / "run")
    expected = run.generate(["abc"])
    monkeypatch.setattr("regard.device.bf16_problem", lambda *_, **__: "a trial crashed with SIGILL")
    with pytest.warns(UserWarning, match="fp32 instead of bf16: a trial crashed with SIGILL") as heard:
        assert run.generate(["abc"], precision="bf16") == expected
    assert heard[0].filename == __file__  # it points at the caller
    with pytest.warns(UserWarning, match="fp32 instead of bf16"):
        assert run.generate(["abc"], options=regard.Options(beam=2), precision="bf16") == run.generate(["abc"], beam=2)


def test_models_by_name():
    model = regard.Model(regard.preset("transformer-tiny", vocab=50))
    assert isinstance(model.config, regard.Config)


def test_train_is_a_function(toy, tmp_path):
    tables = {"data": {"train": str(toy / "pairs.tsv")}, "train": {"steps": 2, "workers": 1}}
    for setting in SMALL:
        assign(tables, setting)
    run = regard.train(tables, tmp_path / "run")
    assert isinstance(run, regard.LoadedRun) and run.generate(["abc"])[0][0].text is not None
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_runs_of_two_seeds_can_be_joined(toy, tmp_path):
    for seed in (1, 2):
        order = ["--data", toy / "pairs.tsv", "--out", tmp_path / f"{seed}", "--steps", 2, "--workers", 1]
        assert call("train", *order, "--seed", seed, *small()).code == 0
    both = call("generate", tmp_path / "1", "--ensemble", tmp_path / "2", stdin="abc\n")
    assert both.code == 0, both.err
    mean = call("average", tmp_path / "mean", tmp_path / "1", tmp_path / "2")
    assert mean.code == 0, mean.err
    first, second, averaged = (regard.load(tmp_path / name).model.state_dict() for name in ("1", "2", "mean"))
    name = "encoder.blocks.0.attention.query.weight"
    assert not torch.equal(first[name], second[name])
    assert torch.allclose(averaged[name], (first[name] + second[name]) / 2, atol=1e-6)


def test_names_of_version_0_4_still_work(toy, tmp_path, capsys):
    with pytest.warns(DeprecationWarning, match="make_reporter") as warned:
        make_talk = regard.make_talk
    assert make_talk is regard.make_reporter and warned[0].filename == __file__
    tables = {"data": {"train": str(toy / "pairs.tsv")}, "train": {"steps": 1, "workers": 1}}
    for setting in SMALL:
        assign(tables, setting)
    with pytest.warns(DeprecationWarning, match="reporter=") as warned:
        regard.train(tables, tmp_path / "run", talk=make_talk())
    assert warned[0].filename == __file__ and "step 1" in capsys.readouterr().err


def test_a_stream_joins_to_the_output(toy):
    run = regard.load(toy / "run")
    pieces = list(run.stream("abc"))
    whole = run.generate(["abc"])[0][0]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(piece.id for piece in pieces) == whole.ids
    assert [piece.score for piece in pieces] == pytest.approx(whole.token_scores, abs=1e-4)
    drawn = [[piece.id for piece in run.stream("abc", sample=True, temperature=3.0, seed=seed)] for seed in range(5)]
    assert len(set(map(tuple, drawn))) > 1
    with pytest.raises(regard.UserError, match="beam"):
        list(run.stream("abc", beam=2))


@pytest.fixture(scope="module")
def labelling(tmp_path_factory):
    """A classifier of texts and one of images, hardly trained."""
    path = tmp_path_factory.mktemp("labels")
    (path / "texts.tsv").write_text("".join(f"{'ab'[i % 2] * (1 + i % 5)}\t{'AB'[i % 2]}\n" for i in range(40)))
    draw = np.random.default_rng(1)
    np.savez(path / "images.npz", images=draw.integers(0, 17, (20, 8, 8), np.uint8), labels=np.arange(20) % 3)
    for task, data in (("classify", "texts.tsv"), ("image", "images.npz")):
        order = ["--task", task, "--data", path / data, "--out", path / task, "--steps", 2, "--workers", 1, *small()]
        result = call("train", *order)
        assert result.code == 0, result.err
    return path


def test_labels_of_texts_and_of_images(labelling):
    run = regard.load(labelling / "classify")
    answer = run.classify(["a", "bb"])
    assert answer == classify(run, ["a", "bb"]) and {f.label for f in answer} <= {"A", "B"}
    assert sum(answer[0].probabilities.values()) == pytest.approx(1, abs=1e-5)
    with np.load(labelling / "images.npz") as file:
        images = file["images"]
    pictures = regard.load(labelling / "image")
    labels = pictures.classify(images)
    assert len(labels) == len(images) and labels == pictures.classify(images[:, None])  # with and without channels
    for wrong in ("abc", [1], images, None):
        with pytest.raises(regard.UserError):
            run.classify(wrong)
    for wrong in (["abc"], images[0], images[:, :4]):
        with pytest.raises(regard.UserError):
            pictures.classify(wrong)
    with pytest.raises(regard.UserError, match="reads images"):
        pictures.logits([[1, 2]])
    with pytest.raises(regard.UserError, match="one stack"):
        run.logits([[1, 2]], [[1, 2]])


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (r"generate: takes a list of inputs, such as \[\"abc\"\], not str 'abc'", lambda run: run.generate("abc")),
        ("item 1 is NoneType None", lambda run: run.generate(["abc", None])),
        ("item 0 is int 1", lambda run: run.generate([1])),
        ("generate: takes a list", lambda run: run.generate(None)),
        ("generate: takes a list", lambda run: run.generate(regard.Example("abc"))),
        ("score: takes a list of pairs", lambda run: run.score("ab")),
        ("item 0 is str 'ab'", lambda run: run.score(["ab"])),
        ("a source and a target", lambda run: run.score([("a", "b", "c")])),
        ("a source and a target", lambda run: run.score([("a", None)])),
        ("a source and a target", lambda run: run.score([regard.Example("abc")])),
        ("stream: takes one text", lambda run: run.stream(["abc"])),
        ("options: takes a regard.Options", lambda run: run.generate(["abc"], options={"beam": 2})),
        ("attention: takes one text", lambda run: run.attention(None)),
        ("give target_ids", lambda run: run.logits([[4, 3]])),
        ("equally long rows", lambda run: run.logits([[4, 5, 3], [4, 3]], [[2], [2]])),
        ("equally long rows", lambda run: run.logits([4, 3], [[2]])),
        ("equally long rows", lambda run: run.logits([[0.5]], [[2]])),
        ("equally long rows", lambda run: run.logits([["a"]], [[2]])),
        ("the ids of this vocabulary are 0 to", lambda run: run.logits([[4, 9999]], [[2]])),
        ("not -1", lambda run: run.logits([[4, 3]], [[-1]])),
        ("1 rows of source_ids, but 2", lambda run: run.logits([[4, 3]], [[2], [2]])),
        ("device: is auto, cpu, cuda", lambda run: regard.load(run.path, device="gpu")),
        ("device: is auto, cpu, cuda", lambda run: regard.load(run.path, device="cpu:x")),
        ("train: takes a recipe", lambda run: regard.train(3)),
    ],
)
def test_what_a_caller_gets_wrong_is_reported(toy, message, wrong):
    with pytest.raises(regard.UserError, match=message):
        wrong(regard.load(toy / "run"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(toy):
    with pytest.raises(regard.UserError, match="device: cuda was asked for, but torch finds no CUDA GPU"):
        regard.load(toy / "run", device="cuda")
