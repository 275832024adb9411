"""Writing TOML: the standard library reads it, but does not write it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def dumps(tables: Mapping[str, Any]) -> str:
    """TOML that `tomllib` reads back as `tables`: text, numbers, booleans, lists and tables of them.

    TOML has no null: a key whose value is None is left out.
    """
    lines: list[str] = []
    _table(tables, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    """A table's own values first: whatever follows a header belongs to that header."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner and value is not None}
    if path and (plain or not inner):
        lines.append(f"\n[{'.'.join(map(_key, path))}]")
    lines.extend(f"{_key(key)} = {_value(value)}" for key, value in plain.items())
    for key, value in inner.items():
        _table(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)  # the shortest that reads back the same; 1e-09, inf and nan are TOML too
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"not a TOML value: {value!r}")


def _string(text: str) -> str:
    return '"' + "".join(_SHORT.get(c) or (c if c.isprintable() else _escape(c)) for c in text) + '"'


def _escape(character: str) -> str:
    """What the eye cannot see is written as its number; half a surrogate pair has no number in TOML."""
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        code = 0xFFFD
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
