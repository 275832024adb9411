"""A family of Hugging Face models: a two-way config table, a weight table, and names.

A config table is a tuple of `Key`s. Each reads one key of a config.json into fields of our `Config`, named by dotted
paths such as `decoder.width`, and writes the key from the first of these fields. A written config is read again and
compared. In this package "ours" means regard's side of a conversion, "theirs" that of the other library.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from regard.config import Activation, Config, Frame, SpecialIds, parse
from regard.convert.table import Table
from regard.errors import UserError
from regard.files import read_json
from regard.presets import merge
from regard.suggest import closest

Json = dict[str, Any]
T = TypeVar("T")

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
# Fields that may be None -> the property with their effective value.
RESOLVED = {"kv_heads": "kv", "head_width": "head", "value_width": "value"}


@dataclass(frozen=True)
class Fields:
    """A JSON file of another library. Errors name the key of an unsupported value; null means absent."""

    data: Json
    where: str
    names: Set[str] = frozenset()  # of the tensors of its model
    ids: SpecialIds = field(default_factory=SpecialIds)  # of its tokenizer

    @classmethod
    def load(cls, path: Path) -> Fields:
        """The settings of a file; empty if the file does not exist."""
        data = read_json(path) if path.is_file() else {}
        if not isinstance(data, dict):
            raise UserError(f"{path}: must be a table of settings, not {data!r:.40}")
        return cls(data, str(path))

    def get(self, key: str, default: Any = None) -> Any:
        """A value, unchecked."""
        value = self.data.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise UserError(f"{self.where}: {key} must be a positive integer, not {value!r:.100}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key} must be true or false, not {value!r:.100}")
        return value

    def token_ids(self, key: str) -> list[int]:
        """Token ids; the file has one id or a list. Negative ids mean none."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(type(index) is not int for index in ids):
            raise UserError(f"{self.where}: {key} must be the id of a token or a list of ids, not {value!r:.100}")
        return [index for index in ids if index >= 0]

    def choice(self, key: str, allowed: Mapping[str, T], default: str) -> T:
        """The value of one of the allowed names."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            supported = f"{closest(str(value), allowed)}\n  supported: {', '.join(sorted(allowed))}"
            raise UserError(f"{self.where}: {key} {value!r:.100} is not supported{supported}")
        return allowed[value]


def value_at(config: Config, path: str) -> Any:
    """The value at a dotted path; None is replaced by the effective value."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, RESOLVED.get(name, name))
    return value


@dataclass(frozen=True)
class Key:
    """One of their keys, or several related keys: `read` returns values by dotted path of ours."""

    read: Callable[[Fields], Json]
    write: Callable[[Config], Json]

    @classmethod
    def of(cls, key: str, *paths: str, read: Callable[[Fields], Any], write: Callable[[Any], Any] = lambda x: x) -> Key:
        """A key that sets one or more fields of ours, and is written from the first field."""
        return cls(lambda hf: dict.fromkeys(paths, read(hf)), lambda config: {key: write(value_at(config, paths[0]))})

    @classmethod
    def count(cls, key: str, *paths: str, default: int | Callable[[Fields], int] | None = None) -> Key:
        """A positive integer."""
        return cls.of(key, *paths, read=lambda hf: hf.count(key, default(hf) if callable(default) else default))

    @classmethod
    def value(cls, key: str, *paths: str, default: Any) -> Key:
        """A value that is validated as a field of ours."""
        return cls.of(key, *paths, read=lambda hf: hf.get(key, default))

    @classmethod
    def flag(cls, key: str, *paths: str, default: bool) -> Key:
        return cls.of(key, *paths, read=lambda hf: hf.flag(key, default))

    @classmethod
    def activation(cls, key: str, *paths: str, default: str) -> Key:
        return cls.of(key, *paths, read=lambda hf: hf.choice(key, ACTIVATIONS, default), write=activation_name)

    @classmethod
    def fixed(cls, key: str, *allowed: Any, write: bool = True) -> Key:
        """A key that must be absent or have an allowed value: our models support nothing else."""

        def read(hf: Fields) -> Json:
            if (value := hf.get(key, allowed[0])) not in allowed:
                only = " or ".join(repr(one) for one in allowed)
                raise UserError(f"{hf.where}: {key} {value!r} is not supported, only {only}")
            return {}

        return cls(read, lambda config: {key: allowed[0]} if write else {})

    @classmethod
    def written(cls, key: str, of: Callable[[Config], Any]) -> Key:
        """A key that is only written."""
        return cls(lambda hf: {}, lambda config: {key: of(config)})

    @classmethod
    def stored(cls, name: str, path: str) -> Key:
        """A field that is true if their model has a certain tensor."""
        return cls(lambda hf: {path: name in hf.names}, lambda config: {})

    @classmethod
    def tied(cls, name: str) -> Key:
        """Whether the LM head is tied to the embedding: it is unless the head has its own tensor."""
        return cls(
            lambda hf: {"tie_output": name not in hf.names}, lambda config: {"tie_word_embeddings": config.tie_output}
        )

    @classmethod
    def special_ids(cls, start: str, usual: str) -> Key:
        """Ids of special tokens; `start` is the key of the decoder's start token, `usual` its usual role."""

        def read(hf: Fields) -> Json:
            start_id = next(iter(hf.token_ids(start)), None)
            for role in (usual, "sos", "eos", "pad"):
                if start_id is None or getattr(hf.ids, role) == start_id:
                    return {"start": role}
            return {"start": "sos", "ids": hf.ids.model_dump() | {"sos": start_id}}

        def write(config: Config) -> Json:
            return {start: config.start_id, "eos_token_id": config.ids.eos, "pad_token_id": config.ids.pad}

        return cls(read, write)


def activation_name(activation: Activation) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def both(field: str) -> tuple[str, str]:
    """The paths of a field in the encoder and in the decoder."""
    return f"encoder.{field}", f"decoder.{field}"


def tied_alias(first: str, second: str = "lm_head.weight") -> Callable[[Fields], dict[str, str]]:
    """An alias of the embedding matrix for the LM head, unless the config unties them."""
    return lambda hf: {} if hf.get("tie_word_embeddings") is False else {second: first}


# Keys that encoder-only families share.
ENCODER_KEYS = (
    Key.count("num_hidden_layers", "encoder.layers"),
    Key.count("hidden_size", "encoder.width"),
    Key.count("num_attention_heads", "encoder.heads"),
    Key.count("intermediate_size", "encoder.ff"),
    Key.activation("hidden_act", "encoder.activation", default="gelu"),
    Key.value("layer_norm_eps", "encoder.norm_eps", default=1e-12),
)


@dataclass(frozen=True)
class Family:
    """The config table, the weight table and the tensor names of a family."""

    model_type: str
    architectures: Mapping[str, Json]  # name -> fields of ours that it fixes
    config: tuple[Key, ...]
    constants: Json  # fields of ours with the same value in every model of the family
    weights: Callable[[Config, Fields], Table]
    reads_images: bool = False
    prefix: str = ""  # of tensor names in a model with a head; checkpoints may lack it
    unprefixed: tuple[str, ...] = ()  # beginnings of names without the prefix
    aliases: Callable[[Fields], dict[str, str]] = lambda hf: {}  # second name of a tensor -> first name
    extra: Callable[[Config], Mapping[str, Tensor]] = lambda config: {}  # their tensors without a counterpart here
    ignored: tuple[str, ...] = ()  # patterns of names of tensors that are not read
    unproven: str = ""  # why a conversion cannot be proven with current transformers, and what was checked instead

    @property
    def stacks(self) -> tuple[str, ...]:
        return tuple(name for name in ("encoder", "decoder") if name in self.constants)

    def read(self, hf: Fields, architecture: str, frame: Frame) -> Config:
        """Convert their config to ours."""
        tables: Json = {"ids": hf.ids.model_dump(), "frame": frame}
        for key in self.config:
            for path, value in key.read(hf).items():
                for name in reversed(path.split(".")):
                    value = {name: value}
                tables = merge(tables, value)
        tables = merge(merge(tables, self.constants), self.architectures[architecture])
        if tables.get("output") == "classes":
            labels = hf.get("id2label")
            tables["classes"] = len(labels) if isinstance(labels, dict) and labels else hf.count("num_labels", 2)
        return parse(Config, tables, hf.where)

    def write(self, config: Config) -> Json:
        """Convert our config to theirs; the architecture is the first with our output, or the first of the family."""
        fitting = (name for name, fields in self.architectures.items() if fields.get("output") == config.output)
        theirs: Json = {"model_type": self.model_type, "architectures": [next(fitting, next(iter(self.architectures)))]}
        for key in self.config:
            theirs |= key.write(config)
        return theirs | write_labels((), config)

    def full_name(self, name: str) -> str:
        """The full, current name of a tensor."""
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        return name if not self.prefix or name.startswith((self.prefix, *self.unprefixed)) else self.prefix + name

    def ignores(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


def read_labels(hf: Fields, config: Config) -> tuple[str, ...]:
    """The labels in id2label, by class number; empty without classes."""
    if config.classes is None:
        return ()
    names = hf.get("id2label", {})
    if not isinstance(names, dict):
        raise UserError(f"{hf.where}: id2label must be a table of names, not {names!r}")
    labels = tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(config.classes))
    if len(set(labels)) < len(labels):
        raise UserError(f"{hf.where}: id2label gives two classes the same name")
    return labels


def write_labels(labels: tuple[str, ...], config: Config) -> Json:
    """id2label and label2id of a config.json."""
    if config.classes is None:
        return {}
    names = labels or tuple(f"LABEL_{number}" for number in range(config.classes))
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
