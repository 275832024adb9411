"""Messages between the server and its workers: JSON with its length in front, over a socket pair. Never pickle."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from pydantic_core import from_json, to_json

Message = dict[str, Any]
HEADER = struct.Struct("!I")
MAX_MESSAGE = 1 << 30  # bytes


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


async def receive_async(reader: asyncio.StreamReader) -> Message:
    """The next message in an event loop; EOFError if the other side has closed."""
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        if size > MAX_MESSAGE:
            raise EOFError
        return _parse(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise EOFError from None


def _parse(data: bytes) -> Message:
    message: Message = from_json(data)
    return message
