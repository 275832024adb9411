"""`evaluate`, `score` and `generate` on tables with headers, CSV, Parquet and translations; messages name options."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import regard
from kit.toy import call, small
from regard.errors import UserError


@pytest.fixture(scope="module")
def pairs(toy: Path) -> list[list[str]]:
    return [line.split("\t") for line in (toy / "test.tsv").read_text().splitlines()]


@pytest.fixture(scope="module")
def tables(toy: Path, pairs: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """Files with the pairs of the test file, and the options that they need."""
    path = tmp_path_factory.mktemp("tables")
    numbered = [["id", "word", "sound"], *([str(n), *pair] for n, pair in enumerate(pairs))]
    for name, rows, dialect in (
        ("header.tsv", [["target", "source"], *(pair[::-1] for pair in pairs)], {"delimiter": "\t"}),
        ("usual.csv", [["word", "ipa"], *pairs], {}),
        ("plain.csv", pairs, {"delimiter": ";", "quoting": csv.QUOTE_ALL}),
        ("named.csv", numbered, {"lineterminator": "\n"}),
    ):
        with open(path / name, "w", newline="") as file:
            csv.writer(file, **dialect).writerows(rows)
    rows = [{"translation": {"en": source, "de": target}} for source, target in pairs]
    (path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files: dict[str, tuple] = {name: (path / name,) for name in ("header.tsv", "usual.csv", "plain.csv", "a.jsonl")}
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path / "a.parquet")
    return {**files, "a.parquet": (path / "a.parquet",), "named.csv": (path / "named.csv", "--columns", "word,sound")}


NAMES = ["header.tsv", "usual.csv", "plain.csv", "a.jsonl", "a.parquet", "named.csv"]


@pytest.mark.parametrize("name", NAMES)
def test_evaluate_and_score_read_tables_of_all_formats(name: str, toy: Path, tables: dict[str, tuple]) -> None:
    for verb, options in (("evaluate", ("--json", "--metric", "per")), ("score", ()), ("score", ("--json",))):
        expected = call(verb, toy / "run", toy / "test.tsv", *options)
        result = call(verb, toy / "run", *tables[name], *options)
        assert result.code == 0, result.err
        first = 2 if name in ("header.tsv", "usual.csv", "named.csv") else 1
        if verb == "evaluate":
            assert json.loads(result.out)["metrics"] == json.loads(expected.out)["metrics"]
        elif options == ("--json",):
            rows = [json.loads(line) for line in expected.lines]
            assert [json.loads(line) for line in result.lines] == [
                {**row, "line": row["line"] + first - 1} for row in rows
            ]
        else:
            assert result.lines == expected.lines
        assert ("names the columns" in result.err) == (first == 2)


def test_references_in_other_files_belong_to_the_rows_after_the_header(
    toy: Path, tables, pairs, tmp_path: Path
) -> None:
    (tmp_path / "references").write_text("".join(f"{target}\n" for _, target in pairs))
    (tmp_path / "outputs").write_text("".join(f"{target}\n" for _, target in pairs))
    command = "evaluate", *tables["usual.csv"], "--outputs", tmp_path / "outputs", "--json"
    for more in ((), ("--reference", tmp_path / "references")):
        assert json.loads(call(*command, *more).out)["metrics"]["per"]["score"] == 0


@pytest.mark.parametrize("name", ["usual.csv", "plain.csv", "a.parquet"])
def test_generate_answers_each_record(name: str, toy: Path, tables: dict[str, tuple], pairs) -> None:
    expected = call("generate", toy / "run", stdin="".join(f"{source}\n" for source, _ in pairs))
    result = call("generate", toy / "run", *tables[name])
    assert result.code == 0 and result.lines == expected.lines
    refused = call("generate", toy / "run", *tables[name], "--out", toy / "never")
    assert refused.code == 2 and "--out: " in refused.err and not (toy / "never").exists()


def test_records_of_several_lines_give_one_line_each(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('source,target\nabc,x\n"a\nb",x\n"a"b,x\n,x\nabc,"x\ny"\n')
    result = call("generate", toy / "run", tmp_path / "a.csv")
    assert result.code == 0 and len(result.lines) == 5 and result.lines[0] == result.lines[4]
    assert f"wrong quotes ({tmp_path}/a.csv:5: " in result.err
    scored = call("score", toy / "run", tmp_path / "a.csv")
    assert len(scored.lines) == 5 and [line == "nan" for line in scored.lines] == [False, False, True, True, False]


def test_training_on_csv_and_its_columns(toy: Path, pairs, tables, tmp_path: Path) -> None:
    path, *columns = tables["named.csv"]
    order = ["train", "--data", path, *columns, "--steps", 2, "--workers", 1, *small()]
    result = call(*order, "--out", tmp_path / "run")
    assert result.code == 0 and "named.csv: commas between columns, no quotes; the first line" in result.err
    assert "source is word, target is sound" in result.err
    for wrong, message in (
        (
            "word,soud",
            "has no column 'soud'; did you mean 'sound'?\n  columns: id, word, sound; name those to read in --co",
        ),
        ("source,soud", "columns"),
    ):
        result = call(*order[:3], "--columns", wrong, "--out", tmp_path / "wrong")
        assert result.code == 2 and message in result.err


def test_library_errors_name_settings_and_the_command_line_names_options(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "three.tsv").write_text("a\tb\tc\n" * 5)
    with pytest.raises(UserError, match=r"for example data\.columns=source,features,target") as error:
        regard.train(data=tmp_path / "three.tsv", out=tmp_path / "run")
    assert "--" not in str(error.value)
    result = call("train", "--data", tmp_path / "three.tsv", "--out", tmp_path / "run")
    assert "for example --columns source,features,target" in result.err
    with pytest.raises(UserError, match="continue it with resume=True, or choose another directory") as error:
        regard.train(data=toy / "pairs.tsv", out=toy / "run")
    assert "--" not in str(error.value)
    assert "continue it with --resume, or" in call("train", "--data", toy / "pairs.tsv", "--out", toy / "run").err
    assert "give a table with --data FILE.tsv, or --source FILE and --target FILE" in call("train", "--out", "x").err
