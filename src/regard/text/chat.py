"""The prompt of a chat, made from data: the chat template of a converted model, without its code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from regard.config import Id, Value
from regard.errors import UserError

START = "start"  # before the first message
ANSWER = "answer"  # after the last message
Piece = str | Id  # a text, or the id of a special token


class Chat(Value):
    """What stands between the messages of a chat; it depends only on the roles before and after."""

    between: Mapping[str, Mapping[str, tuple[Piece, ...]]]  # role before -> role after -> pieces
    stripped: tuple[str, ...] = ()  # roles whose contents lose white space at both ends

    def prompt(self, messages: Sequence[tuple[str, str]]) -> list[Piece]:
        """The prompt for (role, content) pairs, up to the beginning of the answer."""
        row: list[Piece] = []
        for (before, _), (role, content) in pairwise([(START, ""), *messages, (ANSWER, "")]):
            after = self.between.get(before, {})
            if role not in after:
                place = "as the first message" if before == START else f"after {before:.40}"
                allowed = ", ".join(sorted(after)) or "nothing"
                raise UserError(f"messages: the model's chat template has no {role:.40} {place} (allowed: {allowed})")
            row += [*after[role], content.strip() if role in self.stripped else content]
        return row

    def text(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt of a chat without ids."""
        return "".join(map(str, self.prompt(messages)))
