"""Chat templates of Hugging Face directories, reduced to data.

A template is a program. It is rendered only here, in a child process with limits of time and memory, to find out what
it writes between the messages. All other code uses the result, which agrees with the template on many chats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import cycle, islice, product
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer as Library

from regard.config import parse
from regard.errors import UserError
from regard.parallel import children
from regard.parallel.messages import Channel, Message
from regard.text.chat import ANSWER, START, Chat, Piece
from regard.text.codec import Codec
from regard.text.tokenizer import library_errors

SAFE_JINJA = (3, 1, 6)  # older sandboxes have known escapes
MAX_CHARACTERS = 100_000  # of a template, and of a rendered chat
MAX_SECONDS = 30.0  # to reduce a template; one is usual
MAX_MEMORY = 2**30  # bytes of the address space of the child
TURNS = ("user", "assistant")
ROLES = ("system", *TURNS)
REGULAR = [(*head, *islice(cycle(TURNS), n)) for head in ((), ("system",)) for n in range(1, 6)]  # orders of roles
ALL = [*(roles for n in range(1, 5) for roles in product(ROLES, repeat=n)), *REGULAR]
MARK = re.compile("(\u2003?)content([0-9])(\u2003?)")  # a content; the template may strip its white space
# Contents for which data and template are compared.
CONTENTS = ("a", " b\n", "", "\t \n", "<think>c</think>d", "{{ 1 }} <i> & \"'\\", "e\n\n  f")

Render = Callable[[Iterable[tuple[str, str]]], str]


class _Namespace(Namespace):
    """A namespace of a template without private names, which would reach into Python."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"the private name {name!r:.40}")
        super().__setitem__(name, value)


def reduce(template: str, tokens: Mapping[str, str]) -> Chat:
    """The data of a template, with special tokens as text; UserError if it cannot be reduced."""

    def render(messages: Iterable[tuple[str, str]]) -> str:
        rows = [{"role": role, "content": content} for role, content in messages]
        text = compiled.render(**tokens, messages=rows, tools=None, documents=None, add_generation_prompt=True)
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"a chat has {len(text):,} characters")
        return text

    try:  # as in transformers; `raise_exception` is undefined, so calling it raises another error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["namespace"] = _Namespace
        compiled = environment.from_string(template)
        render([("user", "a")])
    except Exception as error:  # of any type: the template is a program
        raise UserError(f"{type(error).__name__}: {error}"[:200]) from None
    for orders in (ALL, REGULAR):  # some templates are regular only in the usual orders
        chat = _derive(render, orders)
        if "user" in chat.between.get("assistant", {}) and _agree(chat, render, orders):
            return chat
    raise UserError("what it writes depends on more than the roles of neighbouring messages")


def _derive(render: Render, orders: Iterable[Sequence[str]]) -> Chat:
    """What a template writes between contents."""
    between: dict[str, dict[str, tuple[Piece, ...]]] = {}
    stripped: set[str] = set()
    for roles in orders:
        with suppress(Exception):  # the template refuses this order
            text = render((role, f"\u2003content{i}\u2003") for i, role in enumerate(roles))
            contents = MARK.findall(text)
            if [int(number) for _, number, _ in contents] == [*range(len(roles))]:
                for before, after, each in zip((START, *roles), (*roles, ANSWER), MARK.split(text)[::4], strict=True):
                    between.setdefault(before, {}).setdefault(after, (each,))
                stripped.update(role for role, (space, *_) in zip(roles, contents, strict=True) if not space)
    return Chat(between=between, stripped=tuple(sorted(stripped)))


def _agree(chat: Chat, render: Render, orders: Iterable[Sequence[str]]) -> bool:
    """Whether a template and its data give the same prompts, for all chats that both allow."""
    contents = cycle(CONTENTS)
    for roles in (roles for roles in orders for _ in CONTENTS):
        messages = [(role, next(contents)) for role in roles]
        with suppress(Exception):
            if chat.text(messages) != render(messages):
                return False
    return True


def answer(channel: Channel, settings: dict[str, Any]) -> None:
    """The work of the child."""
    with suppress(ImportError, OSError, ValueError):  # not every system has this limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    children.answer_requests(channel, lambda request: Message(reduce(**request.header).model_dump(mode="json")))


def reduce_safely(template: str, tokens: Mapping[str, str]) -> Chat:
    """`reduce` with limits of time and memory."""
    if tuple(map(int, jinja2.__version__.split(".")[:3])) < SAFE_JINJA:
        raise UserError("its program can only be read safely with jinja2 3.1.6 or newer: pip install -U jinja2")
    if len(template) > MAX_CHARACTERS:
        raise UserError(f"it has {len(template):,} characters, more than {MAX_CHARACTERS:,}")
    child = children.spawn(f"{__name__}:answer", {})
    child.channel.connection.settimeout(MAX_SECONDS)
    try:
        return parse(Chat, child.ask({"template": template, "tokens": tokens}).header, "its data")
    except (children.ChildDied, children.ChildFault):
        raise UserError(f"it takes more than {MAX_SECONDS:g} s or {MAX_MEMORY / 2**30:g} GB to render") from None
    finally:
        child.close()


def tokens_of(chat: Chat, library: Library) -> list[str]:
    """The added tokens of a tokenizer that a chat template writes, longer ones first."""
    text = "\n".join(str(piece) for row in chat.between.values() for pieces in row.values() for piece in pieces)
    names = {token.content for token in library.get_added_tokens_decoder().values()}
    return sorted((name for name in names if name in text), key=len, reverse=True)


def end_of_turn(chat: Chat, names: Iterable[str]) -> str | None:
    """The token after the answer of an assistant, if it is one of these."""
    text = str(chat.between["assistant"]["user"][0]).lstrip()
    return next((name for name in names if text.startswith(name)), None)


@library_errors("its tokenizer does not fit")
def with_ids(chat: Chat, codec: Codec) -> Chat:
    """The data with ids of special tokens; UserError if the ids of its prompts would differ from transformers."""
    library = Library.from_str(codec.target.to_json())
    names = tokens_of(chat, library)
    end = end_of_turn(chat, names)
    if end is not None and library.token_to_id(end) != codec.ids.eos:
        raise UserError(f"an answer ends with {end}, any other text with {library.id_to_token(codec.ids.eos)}")
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    if longer := [name for name in added.difference(names) if name.startswith(tuple(names))]:
        raise UserError(f"the name of {longer[0]} begins with the name of another token")
    split = re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"\Z")

    def pieces(row: Iterable[Piece]) -> tuple[Piece, ...]:
        parts = (part for piece in row for part in split.split(str(piece)) if part)
        return tuple(library.token_to_id(part) or 0 if part in names else part for part in parts)

    between = {before: {after: pieces(row) for after, row in rows.items()} for before, rows in chat.between.items()}
    result = chat.model_copy(update={"between": between})
    contents = cycle(CONTENTS)
    for roles in REGULAR[:5] * len(CONTENTS):
        messages = [(role, next(contents)) for role in roles]
        ids = library.encode(chat.text(messages), add_special_tokens=False).ids
        if codec.target.encode_prompt(result.prompt(messages)) != ids:
            raise UserError("its tokens cannot be separated from the contents of messages")
    return result
