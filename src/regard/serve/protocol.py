"""Messages between the server and its workers: JSON with its length in front, over a socket pair. Never pickle."""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json, to_json

Message = dict[str, Any]
HEADER = struct.Struct("!I")


def pack(message: Message) -> bytes:
    """A message as bytes."""
    data = to_json(message)
    return HEADER.pack(len(data)) + data


class Unpacker:
    """The messages in what comes over a connection, in parts of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with this part."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message: Message = from_json(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield message


class Channel:
    """A connection on which somebody waits for messages, one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unpacker, self._messages = Unpacker(), deque[Message]()

    @property
    def readable(self) -> bool:
        """Whether there is something to receive."""
        return bool(self._messages) or bool(select.select([self.connection], [], [], 0)[0])

    def send(self, message: Message) -> None:
        self.connection.sendall(pack(message))

    def receive(self) -> Message | None:
        """The next message; None if the other side has closed."""
        while not self._messages:
            try:
                data = self.connection.recv(1 << 18)
            except ConnectionError:
                return None
            if not data:
                return None
            self._messages.extend(self._unpacker.feed(data))
        return self._messages.popleft()
