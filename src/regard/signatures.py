"""Public calls: signatures with the fields of a config value as options, and UserErrors for calls that are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, cleandoc, signature
from textwrap import indent
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from regard.errors import UserError
from regard.suggest import closest, nearest, synonym

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # pydantic does not export it

P = ParamSpec("P")
R = TypeVar("R")


def checked_call(
    value: type[BaseModel] | None = None, *names: str, hint: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function or initialiser so that a call that does not fit its parameters raises a UserError.

    The function's `**settings` are fields of `value`, those with `names` or all. They stand in its signature with their
    types and defaults and in its docstring with their descriptions, so that completion and help know them. The `hint`
    says where else an unknown option may belong.
    """
    fields = {} if value is None else {name: value.model_fields[name] for name in names or value.model_fields}
    types = get_type_hints(value) if value else {}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plain = signature(function)
        makes = function.__name__ in ("__init__", "__new__")
        title = function.__qualname__.split(".")[-2] if makes else function.__name__
        own = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        takes_any = len(own) < len(plain.parameters)
        own += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[name])
            for name, field in fields.items()
        ]
        shown = plain.replace(parameters=own)

        def check(*args: P.args, **keywords: P.kwargs) -> None:
            try:
                shown.bind(*args, **keywords)
            except TypeError as error:
                raise UserError(f"{title}: {_explain(str(error), keywords, own, hint)}") from None

        @wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            if takes_any:
                check(*args, **keywords)
            try:
                return function(*args, **keywords)
            except TypeError:
                check(*args, **keywords)
                raise

        call.__signature__ = shown  # type: ignore[attr-defined]
        if fields:
            texts = (f"{name}: {field.description}" for name, field in fields.items())
            call.__doc__ = cleandoc(function.__doc__ or "") + "\n\nOptions:\n" + indent("\n".join(texts), "    ")
        return call

    return decorate


def _explain(message: str, keywords: dict[str, object], parameters: list[Parameter], hint: str) -> str:
    """Why a call does not fit."""
    callers = [each for each in parameters if each.name not in ("self", "_cls")]
    named = [each.name for each in callers if each.kind is not Parameter.POSITIONAL_ONLY]
    unknown = [name for name in keywords if name not in named]
    if not unknown:
        return message
    return f"no option {unknown[0]!r}{closest(unknown[0], named)} (known: {', '.join(named)}){hint}"


class ReportsMistakes(ModelMetaclass):
    """Turns the mistakes in a value that is made by its name, `Stack(layers=0)`, into a UserError.

    Not done by `__init__`, which pydantic would call for values inside others too, whose keys it could not name then.
    """

    def __call__(cls, *args: Any, **values: Any) -> Any:
        kind: Any = cls
        if args:
            example = next(iter(kind.model_fields))
            raise UserError(f"{kind.__name__}: takes keywords, such as {example}=..., not {args[0]!r:.80}")
        try:
            return super().__call__(**values)
        except ValidationError as error:
            raise mistakes(kind, error, kind.__name__) from None


def mistakes(kind: type[BaseModel], error: ValidationError, where: str) -> UserError:
    """The mistakes in a value: one line for each, which names its key."""
    lines = [explain(kind, dict(item)) for item in error.errors(include_url=False)]
    return UserError(f"{where}: " + "\n  ".join(["not valid", *lines]))


def explain(kind: type[BaseModel], item: dict[str, Any]) -> str:
    """A mistake that pydantic found in a value of this kind, as a line that names its key."""
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}" if key else str(item["ctx"]["error"])
    if item["type"] == "extra_forbidden":
        for part in path[:-1]:
            kind = _tables(kind).get(part, kind)
        return f"{key}: no such key{_probable_key(kind, path[-1])} (known: {', '.join(sorted(kind.model_fields))})"
    if item["type"] == "missing":
        return f"{key}: is required"
    try:
        given = repr(item["input"])[:80]
    except (ValueError, RecursionError):  # Python shows no number of more than 4,300 digits
        given = f"this {type(item['input']).__name__}"
    if item["type"] in ("model_type", "dict_type"):
        return f"{key or 'it'} must be a table of keys and values, not {given}"
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        allowed = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f"{key}: {given} is not known{closest(item['input'], allowed)} (allowed: {', '.join(allowed)})"
    return f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}, not {given}"


def _probable_key(kind: type[BaseModel], word: str) -> str:
    """A suggestion from the keys of a table or, failing that, from those of the tables in it."""
    inner = {name: table.model_fields for name, table in _tables(kind).items()}
    if one := synonym(word, [*kind.model_fields, *(f"{name}.{key}" for name in inner for key in inner[name])]):
        return f"; did you mean {one!r}?"
    near = nearest(word, [key for fields in inner.values() for key in fields])
    keys = " and ".join(f"'{name}.{near}'" for name, fields in inner.items() if near in fields)
    return closest(word, kind.model_fields) or (f"; did you mean {keys}?" if keys else "")


def _tables(kind: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields that are values themselves, with their types."""
    types = {name: (field.annotation, *get_args(field.annotation)) for name, field in kind.model_fields.items()}
    return {n: t for n, each in types.items() for t in each if hasattr(t, "model_fields")}
