"""Reads Hugging Face directories safely: only their own files, tensors one by one, and never code."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.config import MAX_TOKENS, Config, parse
from regard.convert.chat_template import reduce_safely
from regard.convert.family import Family, Fields, Json
from regard.convert.tokenizers import SETTINGS, read_settings
from regard.decode.request import CONTINUATION_LENGTH
from regard.errors import UserError
from regard.files import replace_file, require_own_files
from regard.run import CHAT_TEMPLATE, Generation, Run
from regard.text.chat import Chat
from regard.text.tokenizer import read_text

CONFIG = "config.json"
GENERATION = "generation_config.json"
SAFE = "model.safetensors"
PICKLED = "pytorch_model.bin"
CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}  # of safetensors
DEFAULT_LENGTH = 512  # tokens of an output, including start and end, of a run without a limit
# Settings of transformers -> (option of `generate`, value without an effect).
OPTIONS: dict[str, tuple[str, Any]] = {
    "num_beams": ("--beam", 1),
    "do_sample": ("--sample", False),
    "temperature": ("--temperature", 1.0),
    "top_k": ("--top-k", 50),
    "top_p": ("--top-p", 1.0),
    "min_p": ("--min-p", None),
    "length_penalty": ("--length-penalty", 1.0),
    "repetition_penalty": ("--repetition-penalty", 1.0),
    "no_repeat_ngram_size": ("--no-repeat-ngram", 0),
    "min_length": ("--min-length", 0),
    "min_new_tokens": ("--min-length", None),
}
# Special tokens that a run has too.
TOKEN_KEYS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id")
# Settings that are read (here or with the special tokens), or without an effect on greedy outputs.
READ = {
    *TOKEN_KEYS,
    *("suppress_tokens", "bad_words_ids", "max_length", "max_new_tokens"),
    *("transformers_version", "_from_model_config", "early_stopping", "use_cache", "cache_implementation"),
    *("renormalize_logits", "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
}


def open_directory(path: Path, log: Callable[[str], None]) -> Json:
    """The config.json of a directory, with the token ids of its generation_config.json that are in the vocabulary."""
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path}: not a Hugging Face directory: {CONFIG} is missing")
    require_own_files(path, sorted(str(entry.relative_to(path)) for entry in path.rglob("*")))
    files = [Fields.load(path / name) for name in (CONFIG, GENERATION)]  # the second takes precedence
    data = files[0].data
    if "model_type" not in data and "format" in data:
        raise UserError(f"{path}: this is a run; use --to hf to convert it to a Hugging Face directory")
    if "quantization_config" in data:
        raise UserError(f"{path / CONFIG}: quantization_config: quantised weights are not supported")
    code = [key for key in CODE_KEYS if data.get(key)] + sorted(entry.name for entry in path.glob("*.py"))
    if code:
        log(f"ignored: {', '.join(code)} (code in a model directory is never run)")
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
    """Tensors by full name, read on demand from safetensors files."""

    where: str
    shapes: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)  # other than float32

    def tensor(self, name: str) -> Tensor:
        return self.readers[name]().float()

    def add(self, inner: str, shape: list[int], dtype: str, read: Callable[[], Tensor], family: Family) -> None:
        """Add a tensor by its name in a file."""
        name = family.full_name(inner)
        self.shapes[name] = shape
        self.readers[name] = read
        if dtype in ("float16", "bfloat16", "float64"):
            self.dtypes.add(dtype)
        elif dtype != "float32" and not family.ignores(name):
            raise UserError(f"{self.where}: {name} has the type {dtype}, which weights cannot have")

    def unite(self, second: str, first: str) -> None:
        """Keep only the first name of a tensor that may be stored under two names."""
        if second not in self.shapes:
            return
        if first not in self.shapes:
            self.shapes[first] = self.shapes.pop(second)
            self.readers[first] = self.readers.pop(second)
        elif self.shapes[second] == self.shapes[first] and torch.equal(self.tensor(second), self.tensor(first)):
            del self.shapes[second]


def open_weights(path: Path, family: Family, hf: Fields, log: Callable[[str], None]) -> Checkpoint:
    """Open the tensors of a directory, in one file or several."""
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
            log(f"{name}: a pickle file; only its tensors are read (weights_only), never code")
        for part in parts:
            read(part, checkpoint, family)
        if checkpoint.dtypes:
            log(f"weights in {', '.join(sorted(checkpoint.dtypes))} are converted to float32")
        for second, first in family.aliases(hf).items():
            checkpoint.unite(second, first)
        return checkpoint
    raise UserError(f"{path}: no weights: neither {SAFE}, {PICKLED} nor an index of their parts")


def _shards(index: Path) -> list[Path]:
    """The files that an index names, which must be in the same directory."""
    names = Fields.load(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index}: has no weight_map of file names")
    parts = sorted(set(names.values()))
    for name in parts:
        if Path(name).name != name or "\\" in name:
            raise UserError(f"{index}: {name!r} is not the name of a file in the same directory")
    missing = [name for name in parts if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"{index}: these parts are missing: {', '.join(missing)}")
    return [index.parent / name for name in parts]


def _read_safetensors(path: Path, checkpoint: Checkpoint, family: Family) -> None:
    try:
        file = safe_open(path, framework="pt")  # stays open until its tensors have been read
        names = file.keys()
        for inner in names:
            header = file.get_slice(inner)
            dtype = str(header.get_dtype())
            read = partial(file.get_tensor, inner)
            checkpoint.add(inner, list(header.get_shape()), DTYPES.get(dtype, dtype), read, family)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None


def _read_pickled(path: Path, checkpoint: Checkpoint, family: Family) -> None:
    try:
        if zipfile.is_zipfile(path):  # torch does not compress; decompression may need any amount of memory
            with zipfile.ZipFile(path) as archive:
                compressed = [file.filename for file in archive.infolist() if file.compress_type != zipfile.ZIP_STORED]
            if compressed:
                raise ValueError(f"{compressed[0]} in it is compressed")
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of any type: the file may be broken, or contain other objects
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not readable as plain weights: {message}") from None
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise UserError(f"{path}: must contain only a table of tensors")
    for inner, x in tensors.items():
        checkpoint.add(str(inner), list(x.shape), str(x.dtype).removeprefix("torch."), x.float, family)


def read_generation(directory: Path, hf: Fields, config: Config, log: Callable[[str], None]) -> Generation:
    """The suppressed ids and the length limit of outputs; older directories have them in config.json."""
    settings = Fields.load(directory / GENERATION)
    if settings.data:
        others = [
            f"{key} {value!r}" + (f" ({OPTIONS[key][0]})" if key in OPTIONS else "")
            for key, value in settings.data.items()
            if key not in READ and value not in (None, [], {}, *OPTIONS.get(key, ())[1:])
        ]
        if others:
            log(f"not kept, because a run has no such defaults: {', '.join(others)}")
    else:
        settings = hf
    if longer := [row for row in _bad_words(settings) if len(row) > 1]:
        log(f"not kept: {len(longer)} of bad_words_ids, which have more than one token (use --forbid PHRASE)")
    special = set(config.ids.model_dump().values())  # a run never produces them, except the end token
    suppressed = sorted(suppressed_ids(settings, config) - special)
    return parse(Generation, {"suppressed": suppressed, "max_length": _limit(settings, config, log)}, settings.where)


def suppressed_ids(settings: Fields, config: Config) -> set[int]:
    """The ids of the vocabulary that are suppressed by their settings."""
    single = (row[0] for row in _bad_words(settings) if len(row) == 1)
    return {index for index in (*single, *settings.token_ids("suppress_tokens")) if index < config.target_vocab}


def _bad_words(settings: Fields) -> list[list[int]]:
    words = settings.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(row, list) for row in words):
        raise UserError(f"{settings.where}: bad_words_ids must be a list of lists of ids, not {words!r:.100}")
    rows = [(row, Fields({"bad_words_ids": row}, settings.where).token_ids("bad_words_ids")) for row in words]
    return [ids for row, ids in rows if len(ids) == len(row)]


def _limit(settings: Fields, config: Config, log: Callable[[str], None]) -> int | None:
    """The maximum number of output tokens, without the end token and the start token, which max_length includes."""
    new = settings.count("max_new_tokens") if settings.get("max_new_tokens") is not None else None
    total = settings.count("max_length") if settings.get("max_length") is not None else None
    if config.encoder is None:
        if total is not None and new is None:
            log(f"not kept: max_length {total}, which includes the prompt (--max-length limits only new tokens)")
        return new
    limit = new - 1 if new is not None else total - 2 if total is not None else 0
    return limit if limit > 0 else None


def write_generation(run: Run) -> Json:
    """The generation_config.json of a run with a decoder: suppressed ids, end token and length limit."""
    config = run.config
    limit = run.generation.max_length
    settings: Json = {"eos_token_id": config.ids.eos, "pad_token_id": config.ids.pad, "do_sample": False}
    if suppressed := run.never_produced():
        settings["suppress_tokens"] = suppressed
    positions = min(config.top.max_length, config.top.max_positions or config.top.max_length)
    if config.encoder is None:
        limit = limit or CONTINUATION_LENGTH
        # If a prompt of `limit` tokens and the output do not fit the positions, limit their sum instead.
        length = {"max_length": positions} if 2 * limit > positions else {"max_new_tokens": limit}
        return settings | {"bos_token_id": config.start_id} | length
    return settings | {
        "decoder_start_token_id": config.start_id,
        "forced_eos_token_id": config.ids.eos,  # at the limit, as regard does
        "max_length": min(DEFAULT_LENGTH if limit is None else limit + 2, positions),
    }


def read_chat_template(source: Path, log: Callable[[str], None]) -> str | None:
    """The chat template of a run or a Hugging Face directory, the default one of several."""
    if (source / CHAT_TEMPLATE).is_file():
        return read_text(source / CHAT_TEMPLATE)
    template = Fields.load(source / SETTINGS).get("chat_template")
    if isinstance(template, list):
        named = {str(x.get("name")): x.get("template") for x in template if isinstance(x, dict)}
        template = named.pop("default", None)
        if named:
            log(f"not kept: the chat templates {', '.join(sorted(named))}; only the default template is kept")
    return template if isinstance(template, str) else None


def reduce_chat_template(source: Path) -> Chat | None:
    """The chat template of a directory as data, with special tokens as text."""
    template = read_chat_template(source, lambda _: None)
    settings = read_settings(source).items()
    tokens = {key: name for key, name in settings if key.endswith("_token") and isinstance(name, str)}
    return None if template is None else reduce_safely(template, tokens)


def copy_chat_template(source: Path, directory: Path, log: Callable[[str], None]) -> bool:
    """Copy the chat template of a run or a Hugging Face directory; false without one."""
    template = read_chat_template(source, log)
    if template is None:
        return False
    replace_file(directory / CHAT_TEMPLATE, lambda temporary: temporary.write_bytes(template.encode("utf-8")))
    return True
