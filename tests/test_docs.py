"""Every console and Python block of the documentation runs, in a directory with the files of its examples.

The tour of the README creates its own files. In a console block, lines that start with `$` are commands. The lines
after a command must occur in its output, in this order; `...` matches anything. Commands run as written, except that
training is limited to a few steps of a small model. A text block right after a Python block is its expected output.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from kit.shared import shared_copy
from kit.toy import SMALL, CliResult, call, small
from regard.cli import demo
from regard.config import Config, Stack
from regard.recipe import Data, Text, Train

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(kind, text, output, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name != "README.md"
    for number, (kind, text, output) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), 1)
]


@pytest.fixture(scope="session")
def directory(toy, tmp_path_factory):
    """A directory with the files and runs that the examples use."""
    return shared_copy(tmp_path_factory, "docs", partial(fill_directory, toy))


def fill_directory(toy: Path, path: Path) -> None:
    pairs = (toy / "pairs.tsv").read_text()
    (path / "pairs.tsv").write_text(pairs)
    (path / "test.tsv").write_text((toy / "test.tsv").read_text())
    rows = [line.split("\t") for line in pairs.splitlines()]
    (path / "train.src").write_text("".join(f"{source}\n" for source, _ in rows))
    (path / "train.tgt").write_text("".join(f"{target}\n" for _, target in rows))
    (path / "words.txt").write_text("".join(f"{source}\n" for source, _ in rows[:4]))
    (path / "forms.tsv").write_text(
        "".join(f"{s}\tN;{n}\t{s}{n.lower()}\n" for s, _ in rows[:40] for n in ("SG", "PL"))
    )
    # Some blocks use files that earlier blocks write. Write them here too, because blocks run in any order.
    (path / "corpus").mkdir()
    (path / "corpus" / "a.tsv").write_text(pairs)
    (path / "corpus" / "b.tsv").write_text((toy / "test.tsv").read_text())
    (path / "pairs.jsonl").write_text("".join(f'{{"de": "{s}", "en": "{t}"}}\n' for s, t in rows))
    tests = [line.split("\t") for line in (toy / "test.tsv").read_text().splitlines()]
    (path / "test.ref").write_text("".join(f"{target}\n" for _, target in tests))
    for name in ("g2p", "other", "copy", "first"):
        shutil.copytree(toy / "run", path / "runs" / name)
    (path / "book.txt").write_text("the cat sat on the mat\nand the dog sat on the log\n\n" * 30)
    (path / "topics.tsv").write_text("".join(f"{s}\t{'long' if len(s) > 3 else 'short'}\n" for s, _ in rows))
    rng = np.random.default_rng(1)
    np.savez(path / "digits.npz", images=rng.integers(0, 17, (60, 8, 8), np.uint8), labels=np.arange(60) % 10)
    runs = (("lm", "book.txt", "lm"), ("masked", "book.txt", "masked"), ("classify", "topics.tsv", "topics"))
    for task, data, name in runs:
        arguments = ["--task", task, "--data", path / data, "--out", path / "runs" / name, "--source-tokens", "char"]
        result = call("train", *arguments, "--steps", 2, "--workers", 1, *small())
        assert result.code == 0, result.err


@pytest.mark.parametrize(("kind", "text", "output"), BLOCKS)
def test_documentation_block_runs(kind, text, output, directory, monkeypatch):
    if "native" in text or ("int8" in text and "ctranslate2" not in text):
        pytest.importorskip("regard_native")
    monkeypatch.chdir(directory)
    run_block(kind, text, output)


def test_readme_tour_runs_after_the_demo(tmp_path, monkeypatch):
    """Run all commands of the README in an empty directory."""
    entries = sorted(demo.dictionary().items())[::400]
    monkeypatch.setattr(demo, "dictionary", lambda: dict(entries))
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (demo_command,) = re.findall(r"\.venv/bin/(regard demo.*)$", readme, re.MULTILINE)
    assert shell(f"{demo_command} --minutes 0.05").code == 0
    for block in BLOCK.findall(readme):
        run_block(*block)


def run_block(kind: str, text: str, output: str) -> None:
    if kind == "python":
        with redirect_stdout(StringIO()) as out:
            exec(compile(text, "docs", "exec"), {})
        assert not output or out.getvalue() == output
        return
    for command, expected in commands(text):
        result = shell(command)
        assert result.code == 0, f"{command}\n{result.err}"
        pattern = ".*".join(re.escape(part) for line in expected for part in (*line.split("..."), ""))
        assert re.search(pattern, result.out + result.err, re.DOTALL), f"{command}\n{result.out}{result.err}"


def commands(text: str) -> list[tuple[str, list[str]]]:
    pairs: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            pairs.append((line[2:], []))
        else:
            pairs[-1][1].append(line)
    return pairs


def shell(line: str) -> CliResult:
    """Run a pipeline: regard in this process, other commands in a shell."""
    line, _, fallback = line.partition(" || ")
    data = b""
    err = ""
    code = 0
    for stage in line.split(" | "):
        stage = stage.replace("regard-native ", f"{sys.executable} -m regard_native ")
        words = shlex.split(stage)
        if words[0] == "regard":
            stage, _, file = stage.partition(" > ")
            words = shlex.split(stage)
            result = call(*words[1:], *(short_training(words) if words[1] == "train" else []), stdin=data)
            data = result.out.encode()
            err += result.err
            code = code or result.code
            if file:
                Path(file).write_bytes(data)
                data = b""
        else:
            process = subprocess.run(["bash", "-c", stage], input=data, capture_output=True, check=False)
            data = process.stdout
            err += process.stderr.decode()
            code = code or process.returncode
    if fallback and code:
        return CliResult(0, data.decode() + err + fallback.removeprefix("echo ").replace("$?", str(code)), "")
    return CliResult(code, data.decode(), err)


def short_training(words: list[str]) -> list[str]:
    """Options that shorten the training of an example to about a second."""
    if "--resume" in words:
        return ["--steps", "3"]
    shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
    no_cluster = ["--ray", "off"] if "--sweep" in words and "--ray" not in words else []
    unsupported = ("heads=2", "ff=64") if "rnn-luong" in words else ()  # by recurrent stacks
    settings = [f"--set={setting}" for setting in SMALL if setting not in unsupported]
    return ["--steps", "2", "--workers", "1", *no_cluster, *settings]


@pytest.mark.parametrize(
    ("page", "kind"), [("models", Stack), ("models", Config), ("train", Text), ("train", Data), ("train", Train)]
)
def test_every_setting_is_documented(page, kind):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    assert [name for name in kind.model_fields if f"`{name}`" not in rows] == []


PAGES_WITH_LINKS = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "BENCHMARKS.md", "docs/families/README.md"))]


def test_links_point_to_existing_files_and_headings():
    for page in PAGES_WITH_LINKS:
        for name, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            file = page.parent / name if name else page
            assert file.exists(), f"{page.name}: {name}"
            assert not heading or heading in anchors(file), f"{page.name}: {name}#{heading}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_changelog_has_at_most_seven_bullets_per_version():
    versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert {text.split()[0]: text.count("\n- ") for text in versions if text.count("\n- ") > 7} == {}
    assert len(versions) > 15


@pytest.mark.parametrize("script", sorted((ROOT / "bench").glob("*.py")), ids=lambda script: script.stem)
def test_benchmarks_import_names_that_exist(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "regard":
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_pre_commit_runs_the_checks_of_ci():
    hooks = re.findall(r"^ *entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    checks = re.findall(
        r"^\.venv/bin/(?:ruff|mypy).*$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(checks) == 3 and set(checks) < set(hooks)
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(check in contributing for check in checks)


@pytest.mark.parametrize(
    ("settings", "millions"),
    [
        (["head_width=16", "value_width=64"], 56.0),
        (["head_width=32", "value_width=64"], 58.4),
        (["layers=2"], 33.7),
        (["width=1024"], 163.9),
        (["ff=1024"], 50.5),
        (["position=learned"], 64.1),
    ],
)
def test_model_sizes_in_the_docs_equal_the_counts(settings, millions):
    from regard.cost.describe import count_parameters
    from regard.model import on_meta
    from regard.presets import changed_recipe, model_without_data
    from regard.recipe import load_recipe

    assert f"{millions:.1f}" in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    recipe = load_recipe(changed_recipe(None, {"preset": "transformer-base"}, settings))
    total = sum(count_parameters(on_meta(model_without_data(recipe, 37000, "docs"))).values())
    assert total / 1e6 == pytest.approx(millions, abs=0.05)
