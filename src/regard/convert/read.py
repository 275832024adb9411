"""A Hugging Face directory read safely: only its own files, tensors one by one, and never code."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.config import MAX_TOKENS
from regard.convert.family import Family, Fields, Json
from regard.errors import UserError
from regard.files import read_json
from regard.manifest import require_own_files

CONFIG, GENERATION = "config.json", "generation_config.json"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
CODE = ("auto_map", "trust_remote_code", "custom_pipelines")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}  # as safetensors names them


def open_directory(path: Path, log: Callable[[str], None]) -> Json:
    """The config.json of a directory whose files all lie in it, with the ids of its generation_config.json.

    Ids that are not in the vocabulary are left over from the defaults of a larger one, and left out.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path}: not a Hugging Face directory: it has no {CONFIG}")
    require_own_files(path, sorted(str(entry.relative_to(path)) for entry in path.rglob("*")))
    files = [Fields.load(path / name) for name in (CONFIG, GENERATION)]  # the second overrules, as in transformers
    data = files[0].data
    if "model_type" not in data and "format" in data:
        raise UserError(f"{path}: this is a run; --to hf writes it as a Hugging Face directory")
    if "quantization_config" in data:
        raise UserError(f"{path / CONFIG}: quantization_config: quantised weights are not supported")
    code = [key for key in CODE if data.get(key)] + sorted(entry.name for entry in path.glob("*.py"))
    if code:
        log(f"ignored: {', '.join(code)} (code that comes with a model is never run)")
    sizes = [size for key in ("vocab_size", "decoder_vocab_size") if type(size := data.get(key)) is int]
    size = max(sizes, default=MAX_TOKENS)
    ids: Json = {}
    beyond: set[str] = set()
    for file in files:
        for key in (key for key in file.data if key.endswith("_token_id")):
            listed = file.token_ids(key)
            known = [index for index in listed if index < size]
            if known:
                ids[key] = known if isinstance(file.get(key), list) else known[0]
            if known != listed:
                beyond.add(key)
    if beyond:
        log(f"ignored: {', '.join(sorted(beyond))} (beyond the vocabulary)")
    return {key: value for key, value in data.items() if not key.endswith("_token_id")} | ids


@dataclass
class Checkpoint:
    """Their tensors under their full names, read from a safetensors file when asked for."""

    where: str
    shapes: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)  # other than float32

    def tensor(self, name: str) -> Tensor:
        return self.readers[name]().float()

    def add(self, inner: str, shape: list[int], dtype: str, read: Callable[[], Tensor], family: Family) -> None:
        """Add a tensor by its name in a file."""
        name = family.full_name(inner)
        self.shapes[name], self.readers[name] = shape, read
        if dtype in ("float16", "bfloat16", "float64"):
            self.dtypes.add(dtype)
        elif dtype != "float32" and not family.ignores(name):
            raise UserError(f"{self.where}: {name} holds {dtype}, which is not a number format of weights")

    def unite(self, second: str, first: str) -> None:
        """Keep one name of a tensor that may be stored under two."""
        if second not in self.shapes:
            return
        if first not in self.shapes:
            self.shapes[first], self.readers[first] = self.shapes.pop(second), self.readers.pop(second)
        elif self.shapes[second] == self.shapes[first] and torch.equal(self.tensor(second), self.tensor(first)):
            del self.shapes[second]


def open_weights(path: Path, family: Family, hf: Fields, log: Callable[[str], None]) -> Checkpoint:
    """The tensors of a directory, in one file or several, each under one name."""
    for name, read in ((SAFE, _read_safetensors), (PICKLED, _read_pickled)):
        index = path / f"{name}.index.json"
        if (path / name).is_file():
            parts = [path / name]
        elif index.is_file():
            parts = _shards(index)
        else:
            continue
        checkpoint = Checkpoint(str(path))
        if name == PICKLED:
            log(f"{name}: a pickled file; only its tensors are read (weights_only), never code")
        for part in parts:
            read(part, checkpoint, family)
        if checkpoint.dtypes:
            log(f"weights in {', '.join(sorted(checkpoint.dtypes))} become float32")
        for second, first in family.aliases(hf).items():
            checkpoint.unite(second, first)
        return checkpoint
    raise UserError(f"{path}: no weights: neither {SAFE}, {PICKLED} nor an index of their parts")


def _shards(index: Path) -> list[Path]:
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


def _read_safetensors(path: Path, checkpoint: Checkpoint, family: Family) -> None:
    try:
        file = safe_open(path, framework="pt")  # open as long as its tensors may be read
        names = file.keys()
        for inner in names:
            header = file.get_slice(inner)
            dtype = str(header.get_dtype())
            read = partial(file.get_tensor, inner)
            checkpoint.add(inner, list(header.get_shape()), DTYPES.get(dtype, dtype), read, family)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None


def _read_pickled(path: Path, checkpoint: Checkpoint, family: Family) -> None:
    _require_stored(path)
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind: the file may be broken, or hold more than tensors
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not readable as plain weights: {message}") from None
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise UserError(f"{path}: must hold a table of tensors and nothing else")
    for inner, x in tensors.items():
        checkpoint.add(str(inner), list(x.shape), str(x.dtype).removeprefix("torch."), x.float, family)


def _require_stored(path: Path) -> None:
    """Refuse an archive of compressed files, which may need any amount of memory; torch writes them as they are."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [file.filename for file in archive.infolist() if file.compress_type != zipfile.ZIP_STORED]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not readable as plain weights: {error}") from None
    if packed:
        raise UserError(f"{path}: not readable as plain weights: {packed[0]} in it is compressed")
