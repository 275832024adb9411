"""Rules of the code base, checked by reading the source files."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from regard.cli.app import VERBS, load_verb
from regard.decode.request import Options
from regard.model import on_meta
from regard.presets import model_without_data
from regard.recipe import load_recipe, recipe_names, recipe_tables

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "regard"
FILES = sorted(SOURCE.rglob("*.py"))

# A module imports only from its own or lower layers. A separate test forbids import cycles within a layer.
LAYERS = {
    "errors": 0, "suggest": 0, "files": 0, "config": 0, "tasks": 0, "recipe": 0, "notebook": 0,
    "parallel": 1, "nn": 1, "text": 1, "metrics": 1, "batch": 1, "device": 1,
    "model": 2, "weight_files": 2, "presets": 2, "loss": 2, "data": 2, "cost": 2,
    "run": 3,
    "decode": 4, "convert": 4,
    "inspect": 5, "evaluate": 5,
    "training": 6, "answers": 6,
    "serve": 7, "api": 7,
    "cli": 8, "__init__": 8, "__main__": 8,
}  # fmt: skip
FAMILIES = r"\b(bert|roberta|bart|gpt\d?|llama|mistral|t5|marian|reformer|vit|transformer-?xl|vaswani|bahdanau|luong)\b"


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(file: Path) -> list[str]:
    """The names of this package that a file imports, at its top or inside functions."""
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            is_package = node.module == "regard"  # from regard import demo
            names += [f"regard.{alias.name}" for alias in node.names] if is_package else [node.module or ""]
    return [name for name in names if name.split(".")[0] == "regard"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_only_from_lower_layers(file):
    here = name_of(file)
    assert here in LAYERS, f"{here} has no layer: add it to LAYERS"
    for name in imports_of(file):
        there = [*name.split("."), "__init__"][1]
        there = there if there in LAYERS else "__init__"
        if there == here or name == "regard.__version__":
            continue
        assert LAYERS[there] <= LAYERS[here], f"{file.relative_to(ROOT)} imports {name} from a higher layer"


def test_command_line_imports_no_heavy_module():
    """A verb and its imports, such as torch, are loaded when the verb is called."""
    heavy = {"torch", "numpy", "pydantic", "sacrebleu", "tokenizers", *(f"regard.cli.{verb}" for verb in VERBS)}
    code = "import sys, regard.cli.app; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not heavy & set(modules)


def module_name(file: Path) -> str:
    parts = ["regard", *file.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def edges_of(file: Path) -> set[str]:
    """The modules of this package that a file imports, except under `TYPE_CHECKING`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    edges = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            edges |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            edges |= {
                deep if (deep := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            }
    return edges & MODULES.keys() - {module_name(file)}


def test_imports_have_no_cycle():
    edges = {name: edges_of(file) for name, file in MODULES.items()}
    while leaves := [name for name, others in edges.items() if not others & edges.keys()]:
        for name in leaves:
            del edges[name]
    assert not edges, f"these modules are part of an import cycle or import one: {sorted(edges)}"


def test_no_two_modules_have_the_same_name():
    verbs = [SOURCE / "cli" / f"{verb}.py" for verb in VERBS]  # verbs are named after commands
    stems = [file.stem for file in FILES if file not in verbs and file.stem != "__init__"]
    assert sorted({stem for stem in stems if stems.count(stem) > 1}) == []


def test_no_two_public_classes_have_the_same_name():
    nodes = [node for file in FILES for node in ast.parse(file.read_text(encoding="utf-8")).body]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert len(names) > 100 and [name for name, count in names.items() if count > 1] == []


def test_no_module_exceeds_600_lines():
    assert [name for name, file in MODULES.items() if len(file.read_text(encoding="utf-8").splitlines()) > 600] == []


def functions_of(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of parameters of a function, without `self`, `cls`, `*args` and `**kwargs`."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_functions_are_short_and_have_few_parameters():
    verbs = [SOURCE / "cli" / f"{verb}.py" for verb in VERBS]
    problems = []
    for file in FILES:
        for function in functions_of(ast.parse(file.read_text(encoding="utf-8"))):
            name = f"{file.relative_to(SOURCE).as_posix()}: {function.name}"
            verb = file in verbs and function.name == "command"
            lines = (function.end_lineno or 0) - function.lineno + 1
            parameters = parameter_count(function)
            if not verb and (lines > 60 or parameters > 9):
                problems.append(f"{name}: {lines} lines, {parameters} parameters")
    assert problems == []


def test_processes_are_started_in_one_module():
    """Only `parallel/children` starts processes, except for the bfloat16 probe, which may crash its process."""
    names = {"os.fork", "os.posix_spawn", "subprocess.run", "subprocess.Popen", "asyncio.create_subprocess_exec"}
    starts = set()
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        imports = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if calls & names or {name.split(".")[0] for name in imports} & {"multiprocessing", "subprocess"}:
            starts.add(file.relative_to(SOURCE).as_posix())
    assert starts == {"device.py", "parallel/children.py"}


# Private names of torch without a public equivalent; its documentation names the first two modules.
PRIVATE_NAMES = {
    "cost/activations.py: torch.utils._python_dispatch", "cost/activations.py: torch.utils._pytree",
    "cost/activations.py: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",  # counts the fused attention
    "nn/hooks.py: self._forward_hooks",  # whether a tap is watched
    "nn/primitives.py: x._version",  # whether packed weights are out of date
    "nn/primitives.py: torch.ops.mkldnn._reorder_linear_weight", "nn/primitives.py: torch.ops.mkldnn._linear_pointwise",
}  # fmt: skip
DOCUMENTED_NAMES = {"_replace", "_asdict", "_fields", "_exit"}  # of named tuples and os, with an underscore


def test_private_names_of_other_libraries_are_listed():
    trees = {file.relative_to(SOURCE).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    functions = {node.name for _, node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    known = functions | attributes | DOCUMENTED_NAMES
    uses = set()
    for file, node in nodes:
        if isinstance(node, ast.ImportFrom) and re.search(r"(^|\.)_[a-z]", node.module or ""):
            uses.add(f"{file}: {node.module}")
        elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and node.attr not in known:
            uses.add(f"{file}: {ast.unparse(node)}")
    assert uses == PRIVATE_NAMES


def test_parallel_imports_no_torch():
    modules = [name for name in MODULES if name.startswith("regard.parallel")]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    imports = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "pydantic"} & set(imports)


def test_only_presets_convert_and_tasks_name_model_families():
    for file in FILES:
        if name_of(file) in ("presets", "convert", "tasks"):  # a task names its default preset
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            assert not re.search(FAMILIES, line, re.IGNORECASE), f"{file.relative_to(ROOT)}:{number}: {line.strip()}"


def kind_checks_of(tree: ast.AST) -> list[str]:
    """Expressions that check the kind of a model: whether it has a stack or patches, or which output."""

    def is_part(node: ast.AST, *names: str) -> bool:
        node = node.value if isinstance(node, ast.NamedExpr) else node
        return (isinstance(node, ast.Attribute) and node.attr in names) or getattr(node, "id", None) in names

    checks = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            values = [side.value for side in sides if isinstance(side, ast.Constant)]
            stack = None in values and any(is_part(side, "encoder", "decoder", "patches") for side in sides)
            output = any(isinstance(value, str) for value in values) and any(is_part(s, "output") for s in sides)
            checks += [ast.unparse(node)] * (stack or output)
        tests = node.values if isinstance(node, ast.BoolOp) else [getattr(node, "test", None)]
        tests = [node.operand] if isinstance(node, ast.UnaryOp) else tests
        for test in tests:
            value = test.value if isinstance(test, ast.NamedExpr) else test
            if isinstance(value, ast.Attribute) and is_part(value, "encoder", "decoder", "patches"):
                checks.append(ast.unparse(test))
    return checks


def test_only_model_config_tasks_and_convert_check_the_kind_of_model():
    """Other modules use the task, or a property such as `Model.decoder_only` or `Config.stacks`."""
    for file in FILES:
        if name_of(file) not in ("model", "config", "tasks", "convert"):
            checks = kind_checks_of(ast.parse(file.read_text(encoding="utf-8")))
            assert not checks, (file, checks)


@pytest.mark.parametrize(
    "code", ["c.encoder is None", "None != decoder", "if c.patches: pass", "not m.encoder", "(p := c.patches) is None",
             "x and c.decoder", "1 if (p := c.patches) else 2", "run.config.output == 'classes'"],
)  # fmt: skip
def test_checks_of_the_kind_of_model_are_detected(code):
    assert kind_checks_of(ast.parse(code))


def test_no_module_executes_loaded_data():
    banned = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                )
                assert not banned & {name.split(".")[0] for name in names}, file
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                if function == "torch.load" and file == SOURCE / "convert" / "read.py":  # loads tensors only
                    assert "weights_only=True" in ast.unparse(node)
                    continue
                assert function not in ("eval", "exec", "compile", "torch.load", "torch.save"), f"{file}: {function}"


def test_no_print_in_the_library():
    for file in FILES:
        if name_of(file) == "cli":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Call) and ast.unparse(node.func) == "print"), f"{file}:{node.lineno}"


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_loads(name):
    tables = recipe_tables(name)
    assert on_meta(model_without_data(load_recipe(tables, name), None, name)) is not None


# The command line and its documentation


def options_of(verb: str) -> set[str]:
    return {option for parameter in load_verb(verb).params for option in parameter.opts if option.startswith("--")} - {
        "--help"
    }


def test_command_line_has_exactly_the_expected_verbs():
    verbs = "average convert demo evaluate generate heads info inspect prune score serve train"
    assert sorted(VERBS) == verbs.split()


@pytest.mark.parametrize("verb", VERBS)
def test_summary_of_a_verb_is_the_first_paragraph_of_its_help(verb):
    assert load_verb(verb).help.split("\n\n")[0] == VERBS[verb]


@pytest.mark.parametrize("verb", VERBS)
def test_page_of_a_verb_documents_exactly_its_options(verb):
    text = (ROOT / "docs" / f"{verb}.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"--[a-z][a-z-]*", text))
    assert options_of(verb) - documented == set()
    assert documented - set().union(*map(options_of, VERBS)) == set()
    rows = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    assert set(re.findall(r"--[a-z][a-z-]*", rows)) == options_of(verb)


def test_generate_has_an_option_for_every_decoding_setting():
    options = {option.removeprefix("--").replace("-", "_") for option in options_of("generate")}
    assert set(Options.model_fields) - options == set()
    decoding = {"prefix_column", "ensemble", "engine", "workers", "threads", "device", "ray"}
    others = {*decoding, "json", "jsonl", "stream", "out"}
    assert options - set(Options.model_fields) == others


def test_help_shows_the_defaults_of_the_options():
    for parameter in load_verb("generate").params:
        match = re.search(r"\(default: (-?[0-9]+(?:\.[0-9]+)?)", parameter.help or "")
        if match and parameter.name in Options.model_fields and parameter.name != "max_length":
            assert Options.model_fields[parameter.name].default == float(match[1]), parameter.name


def test_ci_runs_the_two_install_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for line in readme.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert commands[0].endswith(".venv/bin/regard demo") and commands[1].endswith(".venv/bin/pytest")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert commands[1] in ci
    demo = commands[0].replace(".venv", ".ci/venv")  # where nothing else is installed
    assert any(line.startswith(f"{demo} --minutes ") and line.endswith("|| exit 1") for line in ci)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_help_is_quick():
    code = "import sys; sys.argv = ['regard', '--help']; from regard.cli.app import run; run(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "pydantic", "sacrebleu", "tokenizers"} & set(modules)
    best = 9.0
    for _ in range(5):  # the shorter of wall-clock and processor time, so that a busy machine does not fail the test
        wall_start = time.perf_counter()
        processor_start = processor_seconds()
        subprocess.run([sys.executable, "-m", "regard", "--help"], capture_output=True, check=True)
        best = min(best, time.perf_counter() - wall_start, processor_seconds() - processor_start)
    assert best < 0.3


def processor_seconds() -> float:
    """The processor time of ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_no_large_file_is_in_the_repository():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    names = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    )
    assert [name for name in names if name and (ROOT / name).is_file() and (ROOT / name).stat().st_size > 2**20] == []
