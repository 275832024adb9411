"""A Hugging Face directory read safely: only its own files, tensors one by one, and never code."""

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
from regard.convert.family import Family, Fields, Json
from regard.convert.tokenizers import SETTINGS
from regard.decode.search_inputs import CONTINUATION_LENGTH
from regard.errors import UserError
from regard.files import read_json, replace_file, require_own_files
from regard.run import CHAT_TEMPLATE, Generation, Run
from regard.text.tokenizer import read_text

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


USUAL_LENGTH = 512  # tokens of a decoder, start and end counted, where a run does not limit its outputs
# Settings of theirs for which there is an option of `generate` or `train`, and values that change nothing.
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
# Read here or with the special tokens, or without an effect on a greedy output.
READ = {
    *("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id"),
    *("suppress_tokens", "bad_words_ids", "max_length", "max_new_tokens"),
    *("transformers_version", "_from_model_config", "early_stopping", "use_cache", "cache_implementation"),
    *("renormalize_logits", "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
}


def read_generation(directory: Path, hf: Fields, config: Config, log: Callable[[str], None]) -> Generation:
    """The ids never produced and the usual limit of outputs; older directories have them in config.json."""
    there = Fields.load(directory / GENERATION)
    if there.data:
        kept = [_named(key, value) for key, value in there.data.items() if key not in READ and not _idle(key, value)]
        if kept:
            log(f"not kept, as a run has no such defaults: {', '.join(kept)}")
    else:
        there = hf
    if longer := [row for row in _bad_words(there) if len(row) > 1]:
        log(f"not kept: {len(longer)} of bad_words_ids, which are more than one token long (--forbid PHRASE)")
    special = set(config.ids.model_dump().values())  # which a run never produces, but for the end
    suppressed = sorted(suppressed_ids(there, config) - special)
    return parse(Generation, {"suppressed": suppressed, "max_length": _limit(there, config, log)}, there.where)


def suppressed_ids(there: Fields, config: Config) -> set[int]:
    """The ids of the vocabulary that settings of theirs never produce."""
    single = (row[0] for row in _bad_words(there) if len(row) == 1)
    return {index for index in (*single, *there.token_ids("suppress_tokens")) if index < config.target_vocab}


def _bad_words(there: Fields) -> list[list[int]]:
    words = there.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(row, list) for row in words):
        raise UserError(f"{there.where}: bad_words_ids must be a list of lists of ids, not {words!r:.100}")
    rows = [(row, Fields({"bad_words_ids": row}, there.where).token_ids("bad_words_ids")) for row in words]
    return [ids for row, ids in rows if len(ids) == len(row)]


def _idle(key: str, value: Any) -> bool:
    return value is None or value in ([], {}) or (key in OPTIONS and value == OPTIONS[key][1])


def _named(key: str, value: Any) -> str:
    return f"{key} {value!r}" + (f" ({OPTIONS[key][0]})" if key in OPTIONS else "")


def _limit(there: Fields, config: Config, log: Callable[[str], None]) -> int | None:
    """Most output tokens: without the end, and without the start token, which max_length counts too."""
    new, total = (None if there.get(key) is None else there.count(key) for key in ("max_new_tokens", "max_length"))
    if config.encoder is None:
        if total is not None and new is None:
            log(f"not kept: max_length {total}, which counts the prompt too (--max-length limits what is added)")
        return new
    limit = new - 1 if new is not None else total - 2 if total is not None else 0
    return limit if limit > 0 else None


def write_generation(run: Run) -> Json:
    """The generation_config.json of a run with a decoder: what it never produces, where it ends, and how long it is."""
    config, limit = run.config, run.generation.max_length
    settings: Json = {
        "eos_token_id": config.ids.eos,
        "pad_token_id": config.ids.pad,
        "do_sample": False,
    }
    if suppressed := run.never_produced():
        settings["suppress_tokens"] = suppressed
    positions = min(config.top.max_length, config.top.max_positions or config.top.max_length)
    if config.encoder is None:
        limit = limit or CONTINUATION_LENGTH
        # A prompt and as many tokens must fit the positions: else they are the limit of both together.
        length = {"max_length": positions} if 2 * limit > positions else {"max_new_tokens": limit}
        return settings | {"bos_token_id": config.start_id} | length
    return settings | {
        "decoder_start_token_id": config.start_id,
        "forced_eos_token_id": config.ids.eos,  # at the limit, as here
        "max_length": min(USUAL_LENGTH if limit is None else limit + 2, positions),
    }


def read_chat_template(directory: Path, log: Callable[[str], None]) -> str | None:
    """The chat template of a directory; of several, the default one."""
    if (directory / CHAT_TEMPLATE).is_file():
        return read_text(directory / CHAT_TEMPLATE)
    template = Fields.load(directory / SETTINGS).get("chat_template")
    if isinstance(template, list):
        named = {str(x.get("name")): x.get("template") for x in template if isinstance(x, dict)}
        template = named.pop("default", None)
        if named:
            log(f"not kept: the chat templates {', '.join(sorted(named))}; only the default one is")
    return template if isinstance(template, str) else None


def write_chat_template(template: str, directory: Path) -> None:
    """Write a chat template into a run, or a directory of theirs."""
    replace_file(directory / CHAT_TEMPLATE, lambda temporary: temporary.write_bytes(template.encode("utf-8")))
