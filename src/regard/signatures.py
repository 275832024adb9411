"""Signatures of public functions whose `**settings` are fields of a config value."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, cleandoc, signature
from textwrap import indent
from typing import ParamSpec, TypeVar, get_type_hints

from pydantic import BaseModel

from regard.errors import UserError
from regard.suggest import closest

P = ParamSpec("P")
R = TypeVar("R")


def checked_call(value: type[BaseModel], *names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose `**settings` are fields of `value`: all fields, or those with `names`.

    The fields replace `**settings` in the signature and are listed in the docstring, for completion and help. A call
    that does not match the signature raises a UserError.
    """
    fields = {name: value.model_fields[name] for name in names or value.model_fields}
    types = get_type_hints(value)
    descriptions = "\n".join(f"{name}: {field.description}" for name, field in fields.items())

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plain = signature(function)
        parameters = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[name])
            for name, field in fields.items()
        ]
        full = plain.replace(parameters=parameters)
        known = [each.name for each in parameters if each.name != "self"]

        @wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            for name in keywords:
                if name not in known:
                    hint = f"{closest(name, known)} (known: {', '.join(known)})"
                    raise UserError(f"{function.__name__}: no option {name!r}{hint}")
            try:
                full.bind(*args, **keywords)
            except TypeError as error:
                raise UserError(f"{function.__name__}: {error}") from None
            return function(*args, **keywords)

        call.__signature__ = full  # type: ignore[attr-defined]
        call.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\nOptions:\n{indent(descriptions, '    ')}"
        return call

    return decorate
