"""Messages between the server and its workers: JSON with its length in front, over a socket pair. Never pickle."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from pydantic_core import from_json, to_json

Message = dict[str, Any]
HEADER = struct.Struct("!I")


def pack(message: Message) -> bytes:
    """A message as bytes."""
    data = to_json(message)
    return HEADER.pack(len(data)) + data


def receive(connection: socket.socket) -> Message | None:
    """The next message, waiting for it; None if the other side has closed."""
    header = _read(connection, HEADER.size)
    data = None if header is None else _read(connection, HEADER.unpack(header)[0])
    return None if data is None else _parse(data)


def _read(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(min(size - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


class MessageProtocol(asyncio.Protocol):
    """The same in an event loop: messages are handled as soon as they are complete, without a task that waits."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = _parse(bytes(self._buffer[HEADER.size : end]))
            del self._buffer[:end]
            self.message_received(message)

    def message_received(self, message: Message) -> None:
        """Handle a message."""
        raise NotImplementedError


def _parse(data: bytes) -> Message:
    message: Message = from_json(data)
    return message
