"""docs/families: each file gives the logits of its preset with the same weights."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from kit.families import IMAGE, VOCAB, build, close, pixels, shrunk
from regard.config import Config, Stack
from regard.model import Model
from regard.nn.cache import State
from regard.presets import PRESETS, preset

FOLDER = Path(__file__).parent.parent / "docs" / "families"
FILES = sorted(FOLDER.glob("*.py"))
SIZES = {"width": 12, "heads": 2, "hidden": 16, "layers": 2}
SOURCE = torch.tensor([[5, 6, 7, 8, 3], [9, 4, 3, 0, 0], [3, 0, 0, 0, 0]])
KEEP = torch.arange(5) < torch.tensor([[5], [3], [1]])
TEXT = torch.tensor([[2, 4, 5, 6, 7, 8], [2, 9, 9, 4, 10, 1], [2, 7, 3, 3, 5, 4]])


def import_file(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"family_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_weights(file: ModuleType, kind: str, model: Model, **sizes: Any) -> nn.Module:
    """Build the model of the file with the weights of the preset; missing and unused weights are errors."""
    theirs: nn.Module = getattr(file, kind)(**sizes).eval().requires_grad_(False)
    weights = model.state_dict()
    for wrong in (weights | {"another.weight": torch.zeros(1)}, dict(list(weights.items())[1:])):
        with pytest.raises((RuntimeError, KeyError)):
            file.load(theirs, wrong)
    file.load(theirs, weights)
    return theirs


def pair(name: str, kind: str, preset_name: str, **sizes: Any) -> tuple[nn.Module, Model]:
    changes = sizes.pop("changes", None)
    model = build(shrunk(preset_name, changes=changes))
    return load_weights(import_file(name), kind, model, **sizes), model


def test_transformer_equals_its_preset() -> None:
    theirs, model = pair("transformer", "Transformer", "transformer-base", vocab=VOCAB, **SIZES)
    close(theirs(SOURCE, KEEP, TEXT), model(SOURCE, KEEP, TEXT))


def test_bahdanau_equals_its_preset() -> None:
    single = {"encoder": {"layers": 1}, "decoder": {"layers": 1}}
    theirs, model = pair("rnn_attention", "Bahdanau", "rnn-bahdanau", vocab=VOCAB, width=12, changes=single)
    close(theirs(SOURCE, TEXT), model(SOURCE, None, TEXT))


def test_luong_equals_its_preset() -> None:
    theirs, model = pair("rnn_attention", "Luong", "rnn-luong", vocab=VOCAB, width=12, layers=2)
    close(theirs(SOURCE, TEXT), model(SOURCE, None, TEXT))


def test_bert_equals_its_preset() -> None:
    """Compare the logits and the output of the pooler."""
    theirs, model = pair("bert", "BERT", "bert-base", vocab=VOCAB, length=20, **SIZES, changes={"pooler": True})
    kinds = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    x = model.hidden(SOURCE, KEEP, types_BS=kinds)
    close(theirs(SOURCE, KEEP, kinds)[KEEP], model.predict(x)[KEEP])
    close(theirs.pool(SOURCE, KEEP, kinds), model.pool(x))


def test_gpt2_equals_its_preset() -> None:
    theirs, model = pair("gpt2", "GPT2", "gpt2", vocab=VOCAB, length=20, **SIZES)
    close(theirs(TEXT), model(TEXT, None))
    x, state = model.read(TEXT, State(()))
    tokens = model.predict(x[:, -1]).argmax(-1)
    output = TEXT
    for _ in range(5):
        output = torch.cat((output, tokens[:, None]), 1)
        scores, state = model.step(tokens, state)
        tokens = scores.argmax(-1)
    assert torch.equal(theirs.generate(TEXT, 5), output)


def test_t5_equals_its_preset() -> None:
    """Compare a short text, and a long text whose distances share buckets."""
    sizes = SIZES | {"vocab": VOCAB, "head_width": 5}
    theirs, model = pair("t5", "T5", "t5-small", **sizes)
    close(theirs(SOURCE, KEEP, TEXT), model(SOURCE, KEEP, TEXT))
    long = torch.arange(300).unsqueeze(0) * 7 % VOCAB
    close(theirs(long, torch.ones_like(long, dtype=torch.bool), long), model(long, None, long))


@pytest.mark.parametrize(("name", "kv_heads"), [("llama-2-7b", 2), ("llama-2-70b", 1), ("llama-3-8b", 1)])
def test_llama_equals_its_preset(name: str, kv_heads: int) -> None:
    base = shrunk(name).decoder.rotary.base
    theirs, model = pair("llama", "Llama", name, vocab=VOCAB, kv_heads=kv_heads, base=base, **SIZES)
    close(theirs(TEXT), model(TEXT, None))


def test_transformer_xl_equals_its_preset() -> None:
    """Three segments; the memory is too short for all tokens before the last one."""
    sizes = SIZES | {"vocab": VOCAB, "memory": 7}
    short = {"decoder": {"memory": 7}}
    theirs, model = pair("transformer_xl", "TransformerXL", "transformer-xl", **sizes, changes=short)
    memory = memories = None
    for piece in torch.cat((TEXT, TEXT.flip(1)), 1).split((5, 4, 3), 1):
        x, memory = model.read_segment(piece, memory)
        scores, memories = theirs(piece, memories)
        close(scores, model.predict(x))
        for a, b in zip(memories, memory, strict=True):
            close(a, b)


def reformer() -> tuple[nn.Module, Model]:
    sizes = SIZES | {"vocab": VOCAB, "rows": 6, "columns": 5, "row_width": 5, "rounds": 2, "chunk": 4}
    lsh = {"hashes": 2, "chunk": 4, "once": False}
    changes = {"decoder": {"axial": {"rows": 6, "columns": 5, "row_width": 5}, "lsh": lsh, "max_length": 30}}
    return pair("reformer", "Reformer", "reformer", **sizes, changes=changes)


@pytest.mark.parametrize("length", [6, 16, 24, 28])
def test_reformer_equals_its_preset(length: int) -> None:
    """Short texts use exact attention, long texts hashed attention."""
    theirs, model = reformer()
    text = torch.arange(3 * length).view(3, length) ** 2 % VOCAB
    close(theirs(text), model(text, None))


def test_reformer_layer_is_invertible() -> None:
    theirs, _ = reformer()
    one, two = torch.randn(2, 1, 24, 12)
    for a, b in zip(theirs.layers[0].backwards(*theirs.layers[0](one, two)), (one, two), strict=True):
        close(a, b)


def test_vit_equals_its_preset() -> None:
    sizes = SIZES | {"classes": 7, "size": IMAGE["size"], "patches": 19, "channels": IMAGE["channels"]}
    theirs, model = pair("vit", "ViT", "vit-base", **sizes)
    close(theirs(pixels()), model(pixels(), None)[:, 0])


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_files_are_short_and_import_only_torch(path: Path) -> None:
    """Files import only torch and the standard library, are short, and name an existing preset."""
    text = path.read_text()
    modules = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.partition(".")[0] for name in modules} <= {"__future__", "math", "torch"}
    assert len(text.splitlines()) < 180
    preset_line = re.search(r"regard's presets?: (.+)", text)
    assert preset_line is not None
    assert {name.split()[0] for name in preset_line[1].split(", ")} <= PRESETS.keys()


def table() -> list[dict[str, str]]:
    """The rows of the table in the README."""
    lines = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def values(config: Config) -> dict[str, str]:
    """The columns of the table for a config."""
    stack = config.decoder or config.encoder
    assert isinstance(stack, Stack)
    stacks = [name for name in ("encoder", "decoder") if getattr(config, name) is not None]
    columns = {"stacks": " + ".join(stacks), "mixer": stack.mixer, "position": stack.position}
    if stack.recurrent:
        return columns | dict.fromkeys(("norm", "at", "activation", "gated", "bias"), "-")
    columns |= {"norm": stack.norm, "at": stack.norm_at, "activation": stack.activation}
    return columns | {"gated": "yes" if stack.gated else "", "bias": stack.bias}


def test_family_table_has_the_values_of_the_presets() -> None:
    rows = table()
    names = set()
    links = {name for row in rows for name in re.findall(r"\((\w+\.py)\)", row["family"])}
    assert links == {path.name for path in FILES}
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row["presets"]):
            expected = values(preset(name))
            assert {key: row[key] for key in expected} == expected, name
            names.add(name)
    assert names == PRESETS.keys()


def test_readme_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example with the directory of the files on the import path."""
    text = (FOLDER / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    monkeypatch.syspath_prepend(str(FOLDER))
    exec(compile(code[1], "README.md", "exec"), {})
