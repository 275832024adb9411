"""A Hugging Face directory, read with care: only its own files, and nothing that could run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.convert.table import Family, Fields
from regard.errors import UserError
from regard.files import read_json

CONFIG, GENERATION = "config.json", "generation_config.json"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
CODE = ("auto_map", "trust_remote_code", "custom_pipelines")


def open_directory(path: Path, talk: Callable[[str], None]) -> dict[str, Any]:
    """The settings of a directory that holds no surprises."""
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path}: not a Hugging Face directory: it has no {CONFIG}")
    for entry in sorted(path.rglob("*")):
        _require_inside(entry, path)
    data = read_json(path / CONFIG)
    if not isinstance(data, dict):
        raise UserError(f"{path / CONFIG}: must hold a table of settings")
    if "model_type" not in data and "format" in data:
        raise UserError(f"{path}: this is a run; --to hf writes it as a Hugging Face directory")
    if "quantization_config" in data:
        raise UserError(f"{path / CONFIG}: quantization_config: quantised weights are not supported")
    code = [key for key in CODE if data.get(key)] + sorted(entry.name for entry in path.glob("*.py"))
    if code:
        talk(f"ignored: {', '.join(code)} (code that comes with a model is never run)")
    later = {key: value for key, value in _generation_ids(path).items() if data.get(key) is None}
    return _within(data | later, talk)


def _generation_ids(path: Path) -> dict[str, Any]:
    """Ids that newer directories tell in a file of their own."""
    if not (path / GENERATION).is_file():
        return {}
    data = read_json(path / GENERATION)
    return {key: value for key, value in data.items() if key.endswith("_token_id")} if isinstance(data, dict) else {}


def _require_inside(entry: Path, directory: Path) -> None:
    """A link may lead to the same directory, or to the store of a download cache, where links are the way it works."""
    home = directory.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    target = entry.resolve()
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise UserError(f"{entry}: leads out of its directory; only a directory's own files are read")


def _within(data: dict[str, Any], talk: Callable[[str], None]) -> dict[str, Any]:
    """Without ids that are no rows of the vocabulary: left over from the defaults of a larger one."""
    sizes = [size for key in ("vocab_size", "decoder_vocab_size") if type(size := data.get(key)) is int]
    beyond = {k for k, v in data.items() if k.endswith("_token_id") and type(v) is int and sizes and v >= max(sizes)}
    if beyond:
        talk(f"ignored: {', '.join(sorted(beyond))} (beyond the vocabulary)")
    return {key: value for key, value in data.items() if key not in beyond}


@dataclass
class Checkpoint:
    """Their tensors under their full names, read one by one when asked for."""

    where: str
    files: dict[str, tuple[Path, str]] = field(default_factory=dict)  # name -> file, and the name there
    loaded: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)  # number formats other than ours

    def names(self) -> set[str]:
        return set(self.shapes)

    def shape(self, name: str) -> list[int]:
        return self.shapes[name]

    def tensor(self, name: str) -> Tensor:
        if name in self.loaded:
            return self.loaded[name].float()
        path, inner = self.files[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(inner)
        return tensor.float()

    def forget(self, name: str) -> None:
        del self.shapes[name]

    def rename(self, old: str, new: str) -> None:
        self.shapes[new] = self.shapes.pop(old)
        if old in self.loaded:
            self.loaded[new] = self.loaded.pop(old)
        else:
            self.files[new] = self.files.pop(old)


def open_weights(path: Path, family: Family, hf: Fields, talk: Callable[[str], None]) -> Checkpoint:
    """The tensors of a directory, in one file or several, each under its one name."""
    for name, read in ((SAFE, _read_safe), (PICKLED, _read_pickled)):
        index = path / f"{name}.index.json"
        if (path / name).is_file():
            parts = [path / name]
        elif index.is_file():
            parts = _parts(index)
        else:
            continue
        found = Checkpoint(str(path))
        if name == PICKLED:
            talk(f"{name}: a pickled file; only its tensors are read (weights_only), never code")
        for part in parts:
            read(part, found, family)
        if found.kinds:
            talk(f"weights in {', '.join(sorted(found.kinds))} become float32")
        _unite(found, family.same(hf))
        return found
    raise UserError(f"{path}: no weights: neither {SAFE}, {PICKLED} nor an index of their parts")


def _parts(index: Path) -> list[Path]:
    """The files that an index names, which must lie beside it."""
    data = read_json(index)
    names = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index}: has no weight_map of file names")
    parts = sorted(set(names.values()))
    for name in parts:
        if Path(name).name != name or "\\" in name:
            raise UserError(f"{index}: {name!r} is not the name of a file beside it")
    missing = [name for name in parts if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"{index}: these parts are not there: {', '.join(missing)}")
    return [index.parent / name for name in parts]


def _read_safe(path: Path, into: Checkpoint, family: Family) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            for inner in names:
                piece = file.get_slice(inner)
                name = family.full(inner)
                into.files[name] = (path, inner)
                into.shapes[name] = list(piece.get_shape())
                _note_kind(into, name, str(piece.get_dtype()), family)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None


def _read_pickled(path: Path, into: Checkpoint, family: Family) -> None:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken file, or one that holds more than tensors, makes it raise
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not readable as plain weights: {told}") from None
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise UserError(f"{path}: must hold a table of tensors and nothing else")
    for inner, tensor in tensors.items():
        name = family.full(str(inner))
        into.loaded[name] = tensor
        into.shapes[name] = list(tensor.shape)
        _note_kind(into, name, str(tensor.dtype).removeprefix("torch."), family)


def _note_kind(into: Checkpoint, name: str, kind: str, family: Family) -> None:
    words = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
    kind = words.get(kind, kind)
    if kind in ("float16", "bfloat16", "float64"):
        into.kinds.add(kind)
    elif kind != "float32" and not family.ignores(name):
        raise UserError(f"{into.where}: {name} holds {kind}, which is not a number format of weights")


def _unite(found: Checkpoint, same: dict[str, str]) -> None:
    """Keep one name of a tensor that is stored under several."""
    for second, first in same.items():
        if second not in found.shapes:
            continue
        if first not in found.shapes:
            found.rename(second, first)
        elif found.shape(second) == found.shape(first) and torch.equal(found.tensor(second), found.tensor(first)):
            found.forget(second)
