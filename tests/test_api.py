"""The Python API of the library."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import get_type_hints

import numpy as np
import pytest
import torch

import regard
from kit.toy import SMALL, call, small, strict_json
from regard.api import TrainSettings
from regard.decode.encoder_only import classify
from regard.decode.request import BatchSettings, OptionSettings, ScoringSettings
from regard.evaluate.evaluator import EvaluationOptions, EvaluationSettings
from regard.nn.cache import State
from regard.recipe import Data, Recipe, Text, Train, assign


def test_import_loads_no_heavy_dependency():
    code = "import sys, regard, regard.cli.app; print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_every_public_name_exists():
    for name in regard.__all__:
        assert getattr(regard, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = regard.nothing


def test_generate_score_and_logits_agree(toy):
    run = regard.load(toy / "run")
    (best, second), *_ = run.generate(["abc", "fed"], beam=3, nbest=2)
    assert best.score >= second.score
    scored_pair = run.score([("abc", best.text)])[0]
    assert scored_pair.score == pytest.approx(best.score, abs=1e-4)
    source = run.codec.encode_source([regard.Example("abc")])
    logits_1TV = run.logits(source, [[run.config.start_id, *best.ids[:-1]]])
    logp_TV = torch.log_softmax(logits_1TV[0], -1)
    assert [float(logp_TV[t, i]) for t, i in enumerate(best.ids)] == pytest.approx(best.token_scores, abs=1e-4)


def test_attention_without_a_target_traces_the_best_output(toy):
    run = regard.load(toy / "run")
    best = run.generate(["abc"], beam=5)[0][0]
    traced = run.attention("abc")
    assert traced.texts == {"source": "abc", "output": best.text}
    assert traced.score == pytest.approx(best.score, abs=1e-4)
    assert run.attention("abc", "F F").tokens["output"] == ("F", "F", "<eos>")
    assert "<iframe" in traced._repr_html_()


def test_unknown_option_and_missing_run_are_refused(toy):
    run = regard.load(toy / "run")
    with pytest.raises(regard.UserError, match="did you mean 'beam'"):
        run.generate(["abc"], beem=3)
    with pytest.raises(regard.UserError, match="no such run"):
        regard.load(toy / "nowhere")


SETTINGS = {"generate": OptionSettings, "stream": OptionSettings, "evaluate": EvaluationSettings}
SETTINGS |= {"score": ScoringSettings, "classify": BatchSettings}


@pytest.mark.parametrize(("method", "settings"), SETTINGS.items())
def test_signatures_list_the_fields_of_options(method, settings):
    """The typed dicts, which editors read, and the signatures, which notebooks show, equal the fields of Options."""
    values = [EvaluationOptions, regard.Options] if settings is EvaluationSettings else [regard.Options]
    fields = {name: field for value in values for name, field in value.model_fields.items()}
    hints, plain_hints = (
        {name: hint for value in values for name, hint in get_type_hints(value, include_extras=extras).items()}
        for extras in (True, False)
    )
    setting_hints = get_type_hints(settings, include_extras=True)
    assert setting_hints == {name: hints[name] for name in setting_hints}
    if settings in (OptionSettings, EvaluationSettings):
        assert setting_hints.keys() == fields.keys()
    function = getattr(regard.LoadedRun, method)
    parameters = inspect.signature(function).parameters
    assert {name for name in parameters if name in fields} == setting_hints.keys()
    for name in setting_hints:
        field = fields[name]
        assert (parameters[name].default, parameters[name].annotation) == (field.default, plain_hints[name])
        assert f"{name}: {field.description}" in function.__doc__
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def test_keywords_of_train_are_recipe_keys():
    parameters = inspect.signature(regard.train).parameters
    keys = {"data", "valid", "out", "settings", "recipe", "resume", "reporter"}
    assert parameters.keys() - keys == TrainSettings.__annotations__.keys()
    for name in TrainSettings.__annotations__:
        (field,) = [table.model_fields[name] for table in (Recipe, Data, Text, Train) if name in table.model_fields]
        assert parameters[name].default == field.default
        assert f"{name}: {field.description}" in regard.train.__doc__
    assert next(iter(parameters)) == "recipe"


ENSEMBLE_MESSAGE = "ensemble: takes a list of loaded runs, such as "
PAIRS = [("a", "A")]
TWO_STACKS = {"source_vocab": 9, "target_vocab": 9, "encoder": {}, "decoder": {}}
WRONG_CALLS = [
    (lambda run: run.generate(["abc"], 5), "generate: too many positional arguments"),
    (lambda run: run.generate(["abc"], num_beams=5), "no option 'num_beams'; did you mean 'beam'"),
    (lambda run: run.generate(["abc"], beam="five"), "beam: input should be a valid integer, not 'five'"),
    (lambda run: run.generate(["abc"], ensemble=run), ENSEMBLE_MESSAGE),
    (lambda run: run.generate(["abc"], ensemble="runs/x"), ENSEMBLE_MESSAGE),
    (lambda run: run.generate(["abc"], ensemble=["runs/x"]), f"{ENSEMBLE_MESSAGE}.*item 0 is str 'runs/x'"),
    (lambda run: run.generate(["abc"], ensemble=5), f"{ENSEMBLE_MESSAGE}.*, not int 5"),
    (lambda run: run.stream("abc", ensemble=5), f"{ENSEMBLE_MESSAGE}.*, not int 5"),
    (lambda run: run.score([("a", "A")], ensemble=5), f"{ENSEMBLE_MESSAGE}.*, not int 5"),
    (lambda run: run.generate([regard.Example("abc", features=["N"])]), "item 0: features is a text, as in its"),
    (lambda run: run.generate([regard.Example(None)]), "item 0: source is a text, not NoneType"),
    (lambda run: run.stream(regard.Example("abc", features=["N"])), "stream: features is a text"),
    (lambda run: run.score([("a", "A")], beam=5), "score: no option 'beam'"),
    (lambda run: run.classify(["a"], max_sourc=5), "no option 'max_sourc'; did you mean 'max_source'"),
    (lambda run: run.attention("abc", 3), "attention: target is a text, not int 3"),
    (lambda run: run.attention("abc", beam=0), "beam: input should be greater"),
    (lambda run: run.attention("abc", more=-1), "more is a number of tokens, not -1"),
    (lambda run: run.attention("abc", more=2), "only a language model continues a text"),
    (lambda run: run.evaluate(["abc"]), r"data\[0\]: is one text, str 'abc'"),
    (
        lambda run: run.evaluate(PAIRS, metrics="wer"),
        r"metrics: takes a list of texts, such as \['wer'\], not one text",
    ),
    (lambda run: run.evaluate(PAIRS, metrics=5), "evaluate: not valid\n  metrics: .*, not 5"),
    (lambda run: run.evaluate(PAIRS, metrics=[5]), "metrics.0: .*, not 5"),
    (lambda run: run.evaluate(PAIRS, ensemble=5), f"{ENSEMBLE_MESSAGE}.*, not int 5"),
    (
        lambda run: run.evaluate(PAIRS, against="runs/x"),
        "against is a loaded run, .*not str 'runs/x'; there is no such",
    ),
    (lambda run: run.evaluate(PAIRS, against=5), "against is a loaded run, .*, not int 5"),
    (lambda run: run.evaluate(PAIRS, columns=["src", "target"]), "columns: 'src' is not known; did you mean 'source'"),
    (lambda run: run.evaluate(PAIRS, columns=5), "columns: '5' is not known"),
    (lambda run: run.evaluate(PAIRS, columns=["target", "target"]), "columns target,target: name source once"),
    (lambda run: run.evaluate(PAIRS, bootstrap=-1), "bootstrap: input should be greater than or equal to 0, not -1"),
    (lambda run: run.evaluate(PAIRS, confusions=-1), "confusions: input should be greater"),
    (lambda run: run.evaluate(PAIRS, bleu_tokenize="intel"), "'intel' is not known; did you mean 'intl'"),
    (lambda run: run.evaluate(PAIRS, bleu_tokenize="intl"), "bleu_tokenize: bleu is not among the metrics"),
    (lambda run: run.evaluate(PAIRS, engine="ct2"), "engine: 'ct2' is not known"),
    (lambda run: run.evaluate(PAIRS, context=8, memory=3), "context, memory: no meaning for .* an encoder-decoder"),
    (lambda run: run.evaluate(PAIRS, reference="test.ref"), "reference: takes a list of files or lists of texts"),
    (lambda run: run.evaluate(PAIRS, reference=["AH B"]), r"reference\[0\] is a file .*'AH B'; there is no such file"),
    (lambda run: run.evaluate(PAIRS, reference=[["A", "B"]]), r"data has 1 line but reference\[0\] has 2 lines"),
    (lambda run: run.evaluate(PAIRS, outputs="none.txt"), "outputs is a file .*; there is no such file"),
    (lambda run: run.evaluate(PAIRS, outputs=[3]), r"outputs is a file .*, not list \[3\]"),
    (lambda run: run.evaluate(PAIRS, outputs=["A", "B"]), "data has 1 line but outputs has 2 lines"),
    (lambda run: run.evaluate(PAIRS, outputs=["A"], beam=3), "beam: no meaning for outputs that are ready"),
    (
        lambda run: run.evaluate(PAIRS, outputs=["A"], against=run, ensemble=[run]),
        "ensemble: of RUN, which is left out",
    ),
    (lambda run: regard.train(), "train: no training data: give data="),
    (lambda run: regard.train(data="x.tsv", epoch=3), "train: no option 'epoch'; did you mean 'epochs'"),
    (lambda run: regard.train(data="x.tsv", settings={"lrr": 3}), "settings: lrr: no such key; did you mean 'lr'"),
    (lambda run: regard.train(data="x.tsv", settings={"lr": object()}), "settings: lr cannot be object"),
    (lambda run: regard.train(data="x.tsv", steps="many"), "train.steps: input should be a valid integer"),
    (lambda run: regard.train({"train": 5}, data="x.tsv", steps=3), "train must be a table"),
    (lambda run: regard.preset("transformer-tinny"), "did you mean 'transformer-tiny'"),
    (lambda run: regard.preset(3), "preset: '3' is not known"),
    (lambda run: regard.preset("transformer-tiny", changes="width=3"), "changes must be a table"),
    (lambda run: regard.Model("transformer-tiny"), r"Model: takes a regard.Config, such as regard.preset\("),
    (lambda run: run.model(torch.tensor([[5]]), None), r"also reads its output: model\(source, keep, input\)"),
    (lambda run: regard.record(run).__enter__(), "record: takes a model, such as run.model, not LoadedRun"),
    (lambda run: regard.record(run.model, 3).__enter__(), r"by a pattern, such as '\*.weights', not int 3"),
    (lambda run: regard.patch(run, {}).__enter__(), "patch: takes a model, such as run.model, not LoadedRun"),
    (lambda run: regard.patch(run.model, {"*": 3}).__enter__(), "patch: takes functions by pattern, such as"),
    (lambda run: regard.patch(run.model, None).__enter__(), "patch: takes functions by pattern, such as"),
    (lambda run: regard.rollout("x"), "rollout: takes a trace"),
    (lambda run: regard.attribute("x", "abc"), "circuits: takes a run"),
    (lambda run: regard.qk("x", 0, 0), "circuits: takes a run"),
    (lambda run: regard.ov("x", 0, 0), "circuits: takes a run"),
    (lambda run: regard.top_neurons("x", "abc", 0), "circuits: takes a run"),
    (lambda run: regard.induction_scores(run), "induction_scores: takes a model, such as run.model, not LoadedRun"),
    (lambda run: regard.Options(beem=3), "Options: not valid\n  beem: no such key; did you mean 'beam'"),
    (lambda run: regard.Stack(layers=0), "Stack: not valid\n  layers: "),
    (lambda run: regard.Config(source_vocab=9), "Config: not valid\n  target_vocab: is required"),
    (lambda run: regard.Options(beam=3, groups=2), "Options: not valid\n  beam 3 is not a multiple of groups 2"),
    (lambda run: regard.Config(**{**TWO_STACKS, "encoder": {"width": 0}}), "Stack: not valid\n  width: input should"),
    (lambda run: regard.Recipe(train={"lrr": 1}), "Train: not valid\n  lrr: no such key; did you mean 'lr'"),
]


@pytest.mark.parametrize(("wrong_call", "message"), WRONG_CALLS, ids=range(len(WRONG_CALLS)))
def test_wrong_calls_are_explained(wrong_call, message, toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(regard.UserError, match=message):
        wrong_call(regard.load(toy / "run"))
    assert not list(tmp_path.iterdir())


def tiny(**changes):
    """Keywords of `train` for a training run of about a second."""
    settings = dict(setting.split("=") for setting in SMALL)
    settings = {key: float(value) if "." in value or "e" in value else int(value) for key, value in settings.items()}
    return {"steps": 2, "workers": 1, "settings": settings} | changes


def test_training_from_memory_equals_training_from_a_file(toy, tmp_path):
    rows = [tuple(line.split("\t")) for line in (toy / "pairs.tsv").read_text().splitlines()]
    valid_rows = [tuple(line.split("\t")) for line in (toy / "test.tsv").read_text().splitlines()]
    common = {"source_tokens": "char", "target_tokens": "space"}
    from_file = regard.train(out=tmp_path / "file", data=toy / "pairs.tsv", valid=toy / "test.tsv", **common, **tiny())
    from_memory = regard.train(out=tmp_path / "memory", data=rows, valid=iter(valid_rows), **common, **tiny())
    file_weights = from_file.model.state_dict()
    memory_weights = from_memory.model.state_dict()
    assert from_file.codec == from_memory.codec and all(
        torch.equal(file_weights[name], memory_weights[name]) for name in file_weights
    )
    recipe = (tmp_path / "memory" / "recipe.toml").read_text()
    assert 'train = "<memory>"' in recipe and 'valid = "<memory>"' in recipe
    assert "from data" in (tmp_path / "memory" / "README.md").read_text()
    # resuming works without data and with the same data, and refuses other data
    for steps in (3, 4):
        regard.train(out=tmp_path / "file", resume=True, steps=steps)
    regard.train(out=tmp_path / "memory", resume=True, steps=3)
    resumed = regard.train(out=tmp_path / "memory", data=rows, valid=valid_rows, resume=True, steps=4)
    resumed_weights = regard.load(tmp_path / "file").model.state_dict()
    assert all(torch.equal(resumed_weights[name], x) for name, x in resumed.model.state_dict().items())
    with pytest.raises(regard.UserError, match="cannot resume: data changed"):
        regard.train(out=tmp_path / "memory", data=rows[1:], resume=True, steps=5)
    result = call("train", tmp_path / "memory" / "recipe.toml", "--out", tmp_path / "again")
    assert result.code == 2 and "was in memory when it was trained; give it again" in result.err
    assert call("train", "--out", tmp_path / "memory", "--resume", "--steps", 5).code == 0


def test_every_task_trains_from_memory(tmp_path):
    rng = np.random.default_rng(1)
    images = {"images": rng.integers(0, 17, (20, 8, 8), np.uint8), "labels": np.arange(20) % 3}
    texts = [{"label": i % 2, "text": "ab"[i % 2] * (1 + i % 5)} for i in range(40)]
    for task, data in (("lm", ["the cat sat\non the mat"] * 30), ("classify", texts), ("image", images)):
        run = regard.train(out=tmp_path / task, task=task, data=data, valid=data, **tiny())
        evaluation = run.evaluate(data, bootstrap=0)
        assert run.task.name == task and evaluation.examples == (
            60 if task == "lm" else len(texts) if task == "classify" else 20
        )
        if task == "classify":
            assert run.labels == ("0", "1")
            assert run.evaluate(data, outputs=evaluation.outputs.texts, bootstrap=0).metrics == evaluation.metrics
        if task == "lm":
            check_text_options(run, tmp_path)


def check_text_options(run, path):
    """For a language model, `evaluate` accepts the text options of the command line and refuses the others."""
    (path / "text.txt").write_text("the cat sat\non the mat\n" * 20)
    result = call("evaluate", run.path, path / "text.txt", "--context", 8, "--bootstrap", 0, "--json")
    assert result.code == 0, result.err
    assert run.evaluate(path / "text.txt", context=8, bootstrap=0).to_json() == strict_json(result.out)
    for arguments, message in (
        ({"memory": 4}, "memory: .* has no memory of earlier segments"),
        ({"beam": 2}, "beam: no meaning for .* a language model"),
        ({"outputs": ["a"]}, "outputs: no meaning for .* a language model"),
        ({"against": ["a"]}, "against: no outputs that are ready; .* is compared with another run"),
    ):
        with pytest.raises(regard.UserError, match=message):
            run.evaluate(path / "text.txt", **arguments)


def test_columns_are_recognised_by_name(tmp_path):
    rows = [
        {"target": w.upper(), "id": i, "features": "N;PL", "source": w} for i, w in enumerate(["ab", "cd", "ef"] * 9)
    ]
    run = regard.train(out=tmp_path / "run", data=rows, **tiny())
    assert run.codec.columns == ("source", "features", "target") and run.codec.features == ("N", "PL")
    assert run.evaluate(rows, bootstrap=0).examples == 27
    with pytest.raises(regard.UserError, match="needed are source and features and target"):
        run.evaluate([{"source": "ab", "target": "AB"}])


def test_bf16_falls_back_to_fp32_with_a_warning(toy, monkeypatch):
    run = regard.load(toy / "run")
    expected = run.generate(["abc"], engine="torch")
    monkeypatch.setattr("regard.device.bf16_problem", lambda *_, **__: "the test crashed with SIGILL")
    with pytest.warns(UserWarning, match="fp32 instead of bf16: the test crashed with SIGILL") as warnings:
        assert run.generate(["abc"], precision="bf16") == expected
    assert warnings[0].filename == __file__  # the warning points at the caller
    with pytest.warns(UserWarning, match="fp32 instead of bf16"):
        assert run.generate(["abc"], options=regard.Options(beam=2), precision="bf16") == run.generate(["abc"], beam=2)


def test_error_names_the_stack_that_the_model_lacks():
    tokens = torch.tensor([[5, 6]])
    with pytest.raises(regard.UserError, match="encode: needs a model with an encoder and a decoder"):
        regard.Model(regard.preset("llama-tiny", vocab=20)).encode(tokens)
    encoder = regard.Model(regard.preset("bert-tiny", vocab=20))
    for wrong_call in (lambda: encoder.step(tokens[0], State(())), lambda: encoder.read(tokens, State(()))):
        with pytest.raises(regard.UserError, match="read, step: this model has an encoder but no decoder"):
            wrong_call()


def test_model_is_built_from_a_preset():
    model = regard.Model(regard.preset("transformer-tiny", vocab=50))
    assert isinstance(model.config, regard.Config)


def test_train_accepts_recipe_tables(toy, tmp_path):
    tables = {"data": {"train": str(toy / "pairs.tsv")}, "train": {"steps": 2, "workers": 1}}
    for setting in SMALL:
        assign(tables, setting)
    run = regard.train(tables, tmp_path / "run")
    assert isinstance(run, regard.LoadedRun) and run.generate(["abc"])[0][0].text is not None
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_runs_of_two_seeds_can_be_ensembled_and_averaged(toy, tmp_path):
    for seed in (1, 2):
        arguments = ["--data", toy / "pairs.tsv", "--out", tmp_path / f"{seed}", "--steps", 2, "--workers", 1]
        assert call("train", *arguments, "--seed", seed, *small()).code == 0
    ensemble = call("generate", tmp_path / "1", "--ensemble", tmp_path / "2", stdin="abc\n")
    assert ensemble.code == 0, ensemble.err
    average = call("average", tmp_path / "mean", tmp_path / "1", tmp_path / "2")
    assert average.code == 0, average.err
    first, second, averaged = (regard.load(tmp_path / name).model.state_dict() for name in ("1", "2", "mean"))
    name = "encoder.blocks.0.attention.query.weight"
    assert not torch.equal(first[name], second[name])
    assert torch.allclose(averaged[name], (first[name] + second[name]) / 2, atol=1e-6)


def test_stream_pieces_join_to_the_output(toy):
    run = regard.load(toy / "run")
    pieces = list(run.stream("abc"))
    output = run.generate(["abc"])[0][0]
    assert "".join(piece.text for piece in pieces) == output.text
    assert tuple(piece.id for piece in pieces) == output.ids
    assert [piece.score for piece in pieces] == pytest.approx(output.token_scores, abs=1e-4)
    samples = [[piece.id for piece in run.stream("abc", sample=True, temperature=3.0, seed=seed)] for seed in range(5)]
    assert len(set(map(tuple, samples))) > 1
    with pytest.raises(regard.UserError, match="beam"):
        list(run.stream("abc", beam=2))


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """A text classifier and an image classifier, trained for two steps."""
    path = tmp_path_factory.mktemp("labels")
    (path / "texts.tsv").write_text("".join(f"{'ab'[i % 2] * (1 + i % 5)}\t{'AB'[i % 2]}\n" for i in range(40)))
    rng = np.random.default_rng(1)
    np.savez(path / "images.npz", images=rng.integers(0, 17, (20, 8, 8), np.uint8), labels=np.arange(20) % 3)
    for task, data in (("classify", "texts.tsv"), ("image", "images.npz")):
        files = ["--data", path / data, "--out", path / task]
        result = call("train", "--task", task, *files, "--steps", 2, "--workers", 1, *small())
        assert result.code == 0, result.err
    return path


def test_classify_returns_labels_for_texts_and_images(classifiers):
    run = regard.load(classifiers / "classify")
    answer = run.classify(["a", "bb"])
    assert answer == classify(run, ["a", "bb"]) and {label.label for label in answer} <= {"A", "B"}
    assert sum(answer[0].probabilities.values()) == pytest.approx(1, abs=1e-5)
    with np.load(classifiers / "images.npz") as file:
        images = file["images"]
    image_run = regard.load(classifiers / "image")
    labels = image_run.classify(images)
    assert len(labels) == len(images) and labels == image_run.classify(images[:, None])  # with and without channels
    for inputs in ("abc", [1], images, None):
        with pytest.raises(regard.UserError):
            run.classify(inputs)
    for inputs in (["abc"], images[0], images[:, :4]):
        with pytest.raises(regard.UserError):
            image_run.classify(inputs)
    with pytest.raises(regard.UserError, match="reads images"):
        image_run.logits([[1, 2]])
    with pytest.raises(regard.UserError, match="one stack"):
        run.logits([[1, 2]], [[1, 2]])


def test_index_beyond_the_only_image_is_refused(classifiers):
    with np.load(classifiers / "images.npz") as file:
        np.savez(classifiers / "one.npz", images=file["images"][:1])
    result = call("inspect", classifiers / "image", classifiers / "one.npz", "--index", 1)
    assert result.code == 2 and "one.npz has 1 image, the first being 0" in result.err


@pytest.mark.parametrize(
    ("message", "wrong_call"),
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
        ("attention: source is a text", lambda run: run.attention(None)),
        ("give target_ids", lambda run: run.logits([[4, 3]])),
        ("equally long rows", lambda run: run.logits([[4, 5, 3], [4, 3]], [[2], [2]])),
        ("equally long rows", lambda run: run.logits([4, 3], [[2]])),
        ("equally long rows", lambda run: run.logits([[0.5]], [[2]])),
        ("equally long rows", lambda run: run.logits([["a"]], [[2]])),
        ("the ids of this vocabulary are 0 to", lambda run: run.logits([[4, 9999]], [[2]])),
        ("not -1", lambda run: run.logits([[4, 3]], [[-1]])),
        ("1 row of source_ids, but 2", lambda run: run.logits([[4, 3]], [[2], [2]])),
        ("device: must be auto, cpu, cuda", lambda run: regard.load(run.path, device="gpu")),
        ("device: must be auto, cpu, cuda", lambda run: regard.load(run.path, device="cpu:x")),
    ],
)
def test_invalid_arguments_are_refused(toy, message, wrong_call):
    with pytest.raises(regard.UserError, match=message):
        wrong_call(regard.load(toy / "run"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused(toy):
    with pytest.raises(regard.UserError, match="device: torch finds no CUDA GPU"):
        regard.load(toy / "run", device="cuda")
