"""`regard evaluate` scores the outputs of `regard generate`, with references and outputs from all kinds of files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.ct2 import random_run, tokenizer, words
from kit.toy import call, strict_json
from regard.cli.app import load_verb
from regard.decode.request import Options
from regard.metrics import METRICS, measure
from regard.run import Run
from regard.text.codec import Codec


def report(*args: object) -> dict[str, Any]:
    result = call("evaluate", *args, "--json", "--bootstrap", 20)
    assert result.code == 0, result.err
    return strict_json(result.out)


@pytest.fixture(scope="module")
def folder(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with noisy weights, and the files of a test set."""
    path = tmp_path_factory.mktemp("evaluate")
    for name, seed in (("run", 1), ("other", 2)):
        run = Run.load(toy / "run")
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter += 0.15 * torch.randn_like(parameter)
        run.save(path / name)
    rows = [line.split("\t") for line in (toy / "test.tsv").read_text().splitlines()][:16]
    second = ["" if n % 3 else target.replace("AH", "EH") for n, (_, target) in enumerate(rows)]
    (path / "test.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in rows))
    (path / "prefixes.tsv").write_text("".join(f"{s}\t{t}\t{('B', '')[n % 2]}\n" for n, (s, t) in enumerate(rows)))
    (path / "three.tsv").write_text("".join(f"{s}\t{t}\t{x}\n" for (s, t), x in zip(rows, second, strict=True)))
    for name, lines in (("src", [s for s, _ in rows]), ("ref", [t for _, t in rows]), ("ref2", second)):
        (path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def scored_outputs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A list that collects the outputs scored by each call of `regard evaluate`."""
    import regard.cli.evaluate as verb

    texts = []
    evaluate_file = verb.evaluate_file

    def record(*arguments: Any) -> Any:
        evaluation = evaluate_file(*arguments)
        texts.append(evaluation.outputs.texts)
        return evaluation

    monkeypatch.setattr(verb, "evaluate_file", record)
    return texts


@pytest.mark.parametrize(
    "options",
    [
        "--beam 3 --length-penalty 0.5",
        "--beam 4 --groups 2 --diversity 1 --window 5",
        "--beam 3 --coverage-penalty 0.3 --alignment-heads 1.2",
        "--mbr 6 --utility edit --seed 3",
        "--sample --temperature 1.5 --top-k 4 --seed 7",
        "--ensemble other --weights 1,2 --beam 2",
        "--require K --forbid EH --beam 3",
        "--prefix B --max-length 3",
        "--prefix-column",
        "--precision bf16",
    ],
)
def test_evaluated_outputs_equal_the_output_of_generate(
    folder: Path, scored_outputs: list[list[str]], options: str
) -> None:
    arguments = [folder / word if word == "other" else word for word in options.split()]
    file = folder / ("prefixes.tsv" if "--prefix-column" in arguments else "test.tsv")
    generated = call("generate", folder / "run", file, *arguments)
    assert generated.code == 0, generated.err
    plain = call("generate", folder / "run", folder / "test.tsv").lines
    assert generated.lines != plain or "--precision" in arguments
    answer = report(folder / "run", file, *arguments)
    assert scored_outputs == [generated.lines]
    references = (folder / "ref.txt").read_text().splitlines()
    assert answer["metrics"]["per"]["score"] == measure("per", generated.lines, references, 0).score


def test_evaluation_with_ctranslate2_equals_generate(folder: Path, scored_outputs: list[list[str]]) -> None:
    pytest.importorskip("ctranslate2")
    options = "--engine", "ctranslate2", "--precision", "int8", "--beam", 2
    generated = call("generate", folder / "run", folder / "test.tsv", *options)
    report(folder / "run", folder / "test.tsv", *options)
    assert generated.code == 0 and scored_outputs == [generated.lines]


def test_decoding_options_equal_those_of_generate() -> None:
    evaluate, generate = ({p.name: p.help for p in load_verb(verb).params} for verb in ("evaluate", "generate"))
    decoding = {*Options.model_fields, "ensemble", "prefix_column", "engine"}
    display = {"nbest", "alternatives", "alternatives_at", "alignment", "top_tokens"}  # only for the display
    shared = decoding - display
    assert decoding & evaluate.keys() == shared
    assert {name: evaluate[name] for name in shared} == {name: generate[name] for name in shared}


def test_references_in_columns_and_in_files_give_equal_metrics(folder: Path) -> None:
    run = folder / "run"
    columns = report(run, folder / "three.tsv", "--columns", "source,target,target", "--beam", 2)
    files = report(run, folder / "src.txt", "--target", folder / "ref.txt", "--reference", folder / "ref2.txt",
                   "--beam", 2)  # fmt: skip
    mixed = report(run, folder / "test.tsv", "--reference", folder / "ref2.txt", "--beam", 2)
    sources = report(run, folder / "src.txt", "--columns", "source", "--reference", folder / "ref.txt",
                     "--reference", folder / "ref2.txt", "--beam", 2)  # fmt: skip
    assert columns["metrics"] == files["metrics"] == mixed["metrics"] == sources["metrics"]
    assert columns["metrics"]["per"]["signature"] == "nrefs:var" and columns["examples"] == 16
    one = report(run, folder / "test.tsv", "--beam", 2)["metrics"]
    assert columns["metrics"]["per"]["score"] <= one["per"]["score"] and "signature" not in one["per"]


def test_json_requests_with_targets_are_evaluated(folder: Path, scored_outputs: list[list[str]]) -> None:
    sources, references = ((folder / name).read_text().splitlines() for name in ("src.txt", "ref.txt"))
    constraints: list[dict[str, Any]] = [
        {"prefix": "B"},
        {"forbid": ["AH"]},
        {"require": [["K", "D"]]},
        {"max_length": 2},
    ]
    rows = [
        {"source": source, **constraints[n % 4], "target": [target, "F"] if n % 2 else target}
        for n, (source, target) in enumerate(zip(sources, references, strict=True))
    ]
    lines = [json.dumps(row) for row in rows]
    lines[4:4] = ["no JSON", '{"source": " ", "target": "F"}', '{"source": "abc", "target": 3}', '{"source": "abc"}']
    file = folder / "requests.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines))
    answer = report(folder / "run", file, "--beam", 2)
    answers = [json.loads(line) for line in call("generate", folder / "run", file, "--beam", 2).lines]
    texts = [row["hypotheses"][0]["text"] for row in answers[:4] + answers[8:]]
    assert scored_outputs == [texts] and answer["skipped"] == {"not a valid request": 2, "empty side": 2}
    multiple_references = [(target, "F") if n % 2 else (target,) for n, target in enumerate(references)]
    assert answer["metrics"]["per"]["score"] == measure("per", texts, multiple_references, 0).score
    (folder / "plain.jsonl").write_text("".join(json.dumps({"source": s}) + "\n" for s in sources))
    with_references = report(folder / "run", folder / "plain.jsonl", "--reference", folder / "ref.txt")
    assert with_references["metrics"] == report(folder / "run", folder / "test.tsv")["metrics"]


def test_metrics_of_a_file_of_outputs_equal_those_of_the_run(folder: Path) -> None:
    outputs = folder / "out.txt"
    outputs.write_text(call("generate", folder / "run", folder / "src.txt", "--beam", 2).out)
    of_run = report(folder / "run", folder / "test.tsv", "--beam", 2, "--against", folder / "other")
    other = folder / "other.txt"
    other.write_text(call("generate", folder / "other", folder / "src.txt", "--beam", 2).out)
    del of_run["metrics"]["perplexity"], of_run["against"]["perplexity"]
    names = [part for name in of_run["metrics"] for part in ("--metric", name)]
    from_file = report(folder / "test.tsv", "--outputs", outputs, "--against", other, *names)
    assert from_file == of_run
    default_metrics = report(folder / "test.tsv", "--outputs", outputs)["metrics"]
    assert default_metrics == of_run["metrics"]  # the outputs are recognised as tokens
    without_sources = report("--outputs", outputs, "--reference", folder / "ref.txt", *names)
    assert without_sources["metrics"] == of_run["metrics"]
    mixed = report(folder / "run", folder / "test.tsv", "--beam", 2, "--against", other)
    assert mixed["against"] == of_run["against"] and "perplexity" in mixed["metrics"]
    same = report(folder / "test.tsv", "--outputs", outputs, "--against", outputs, *names)
    assert same["metrics"] == of_run["metrics"] and {each["p"] for each in same["against"].values()} == {1.0}
    swapped = report(folder / "test.tsv", "--outputs", other, "--against", folder / "run", "--beam", 2)
    assert swapped["against"]["per"]["difference"] == -of_run["against"]["per"]["difference"]


def test_outputs_of_bad_lines_do_not_shift_the_others(folder: Path) -> None:
    lines = (folder / "test.tsv").read_bytes().splitlines(keepends=True)
    file = folder / "bad.tsv"
    outputs = folder / "bad.txt"
    file.write_bytes(
        b"".join([lines[0], b"\n", b"no target\n", lines[1], b"a\xff\tB\n", b"\tB\n", b"a\t\n", *lines[2:]])
    )
    outputs.write_text(call("generate", folder / "run", file).out)
    good = report(folder / "run", folder / "test.tsv")
    bad = report(file, "--outputs", outputs)
    assert bad["metrics"].items() <= good["metrics"].items() and bad["examples"] == 16
    skipped = {"blank line": 1, "wrong column count": 1, "invalid UTF-8": 1, "empty side": 2}
    assert bad["skipped"] == skipped == report(folder / "run", file)["skipped"]
    result = call("evaluate", folder / "run", file, "--bootstrap", 0)
    assert result.err.startswith(f"{file}: 16 of 21 lines; skipped 2 empty side ({file}:6, {file}:7), 1 blank line")


def test_every_metric_of_pairs_is_reported_with_its_signature(folder: Path) -> None:
    names = [part for name in METRICS for part in ("--metric", name)]
    answer = report(folder / "run", folder / "three.tsv", "--columns", "source,target,target", *names,
                    "--against", folder / "other", "--lowercase", "--bleu-tokenize", "intl")  # fmt: skip
    assert list(answer["metrics"]) == list(answer["against"]) == list(METRICS)
    signatures = {name: answer["metrics"][name].get("signature", "") for name in METRICS}
    assert "case:lc" in signatures["bleu"] and "tok:intl" in signatures["bleu"] and "nrefs:var" in signatures["ter"]
    assert "nw:0" in signatures["chrf"] and "nw:2" in signatures["chrf++"]
    assert signatures["per"] == "nrefs:var|case:lc" and not signatures["perplexity"]


def test_confusions_are_reported_with_examples(folder: Path, scored_outputs: list[list[str]]) -> None:
    answer = report(folder / "run", folder / "test.tsv", "--confusions", 1000)
    rows = answer["confusions"]
    references = (folder / "ref.txt").read_text().splitlines()
    tokens = sum(len(reference.split()) for reference in references)
    assert sum(row["count"] for row in rows) == pytest.approx(answer["metrics"]["per"]["score"] * tokens / 100)
    assert [row["count"] for row in rows] == sorted((row["count"] for row in rows), reverse=True)
    for row in rows:
        number = int(row["example"]["location"].rpartition(":")[2])
        assert row["example"]["location"] == f"{folder / 'test.tsv'}:{number}"
        assert (row["example"]["reference"], row["example"]["output"]) == (
            references[number - 1], scored_outputs[0][number - 1]
        )  # fmt: skip
        assert (row["reference"] or "") in references[number - 1]
        assert (row["output"] or "") in scored_outputs[0][number - 1]
    assert report(folder / "run", folder / "test.tsv")["confusions"] == rows[:10]
    assert "confusions" not in report(folder / "run", folder / "test.tsv", "--confusions", 0)
    table = call("evaluate", folder / "run", folder / "test.tsv", "--confusions", 1, "--bootstrap", 0).lines
    assert table[-2:] == [
        "reference\toutput\tcount\texample",
        f"{rows[0]['reference'] or '∅'}\t{rows[0]['output'] or '∅'}\t{rows[0]['count']}\t"
        f"{rows[0]['example']['location']} {rows[0]['example']['source']}",
    ]


def test_files_of_labels_are_detected_and_scored_by_accuracy(folder: Path) -> None:
    references = ["a", "b", "c"] * 10
    outputs = ["a", "b", "b"] * 10
    for name, labels in (("labels", references), ("predictions", outputs)):
        (folder / f"{name}.txt").write_text("".join(f"{label}\n" for label in labels))
    answer = report("--outputs", folder / "predictions.txt", "--reference", folder / "labels.txt")
    assert list(answer["metrics"]) == ["accuracy"]
    counts = Counter((r, o) for r, o in zip(references, outputs, strict=True) if r != o)
    assert {(row["reference"], row["output"]): row["count"] for row in answer["confusions"]} == counts


def test_a_constraint_that_a_line_cannot_meet_gives_an_empty_output(folder: Path) -> None:
    file = folder / "impossible.tsv"
    file.write_text("abc\tAH B K\tZZ\nabc\tAH B K\tAH\n")
    result = call("evaluate", folder / "run", file, "--prefix-column", "--json", "--bootstrap", 0)
    assert result.code == 0 and strict_json(result.out)["examples"] == 2
    assert f"1 output is empty and counted as such ({file}:1: prefix 'ZZ'" in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["test.tsv", "--outputs", "short.txt"], "test.tsv has 16 lines but {}/short.txt has 1 line;"),
        (["--outputs", "short.txt", "--reference", "ref.txt"], "ref.txt has 16 lines but {}/short.txt has 1 line;"),
        (["run", "test.tsv", "--reference", "short.txt"], "test.tsv has 16 lines but {}/short.txt has 1 line;"),
        (["run", "test.tsv", "--outputs", "ref.txt"], "is evaluated without a run; leave out {}/run"),
        (["--outputs", "ref.txt"], "what to compare with?"),
        ([], "RUN is missing"),
        (["test.tsv", "--outputs", "ref.txt", "--beam", "2", "--workers", "2"], "--beam, --workers: no meaning for"),
        (["test.tsv", "--outputs", "ref.txt", "--metric", "perplexity"], "ready outputs have no probabilities"),
        (
            ["--outputs", "ref.txt", "--reference", "ref.txt", "--against", "run"],
            "FILE is missing: a run needs sources",
        ),
        (["test.tsv", "--outputs", "ref.txt", "--against", "run", "--ensemble", "run"], "--ensemble: of RUN, which is"),
        (["test.tsv", "--outputs", ""], "no such file"),
        (["test.tsv", "--outputs", "bytes.txt"], "bytes.txt:2: invalid UTF-8"),
        (["-", "--outputs", "-"], "stdin can be read once"),
        (["run", "test.tsv", "--against", "nowhere"], "neither a run directory nor a file of outputs"),
        (["run", "test.tsv", "--columns", "source,tgt"], "did you mean 'target'?"),
        (["run", "test.tsv", "--columns", "target,target"], "name source once"),
        (["run", "test.tsv", "--columns", "source"], "name source once"),
        (["run", "test.tsv", "--columns", "source,target", "--target", "ref.txt"], "without it"),
        (["--outputs", "ref.txt", "--reference", "ref.txt", "--columns", "source,target"], "there is no table"),
        (["run", "three.tsv"], "three.tsv: no usable example: 0 of 16 lines; skipped 16 wrong column count"),
        (["run", "test.tsv", "--prefix-column"], "most lines have 2 columns, not 3 (source,target and the prefix)"),
        (["run", "short.tsv", "--max-source", "2"], "short.tsv: there is nothing to evaluate: 0 of 1 line; skipped 1"),
        (["run", "empty.txt"], "empty.txt: the file is empty"),
        (["run", "empty.jsonl", "--columns", "source,target"], "has JSON objects in its lines, with keys"),
        (["run", "test.tsv", "--bleu-tokenize", "intel"], "did you mean 'intl'?"),
        (
            ["run", "test.tsv", "--bleu-tokenize", "intl"],
            "bleu is not among the metrics (wer, per, accuracy, perplexity)",
        ),
        (["run", "test.tsv", "--nbest", "2"], "--nbest"),
        (["run", "test.tsv", "--length-penalty", "2"], "give --beam too"),
        (["run", "test.tsv", "--ensemble", "other", "--engine", "ctranslate2"], "ensemble: the engine ctranslate2"),
    ],
)
def test_invalid_options_and_files_are_refused(folder: Path, args: list[str], message: str) -> None:
    (folder / "short.txt").write_text("AH B\n")
    (folder / "short.tsv").write_text("abc\tAH B K\n")
    (folder / "empty.txt").write_text("")
    (folder / "empty.jsonl").write_text("")
    (folder / "bytes.txt").write_bytes(b"AH\n\xff\n" + b"B\n" * 14)
    if "ctranslate2" in args:
        pytest.importorskip("ctranslate2")
    known = {file.name for file in folder.iterdir()}
    result = call("evaluate", *(folder / arg if arg in known else arg for arg in args))
    assert result.code == 2 and result.out == "" and message.replace("{}", str(folder)) in result.err, result.err


def test_features_are_read_from_the_file_of_sources(tmp_path: Path) -> None:
    codec = Codec(tokenizer(), tokenizer(), ("PL", "SG"), ("source", "features", "target"))
    random_run(codec=codec).save(tmp_path / "run")
    rows = [(word, ("PL", "SG")[n % 2], word[::-1]) for n, word in enumerate(words(8))]
    (tmp_path / "forms.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    (tmp_path / "src.tsv").write_text("".join("\t".join(row[:2]) + "\n" for row in rows))
    (tmp_path / "ref.txt").write_text("".join(row[2] + "\n" for row in rows))
    table = report(tmp_path / "run", tmp_path / "forms.tsv")
    files = report(tmp_path / "run", tmp_path / "src.tsv", "--target", tmp_path / "ref.txt")
    assert files["metrics"] == table["metrics"] and "unknown" not in files
