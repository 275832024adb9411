"""Messages between processes: a JSON object and binary parts, framed by their lengths, over a socket pair."""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

READ_BYTES = 1 << 18
MAX_HANDLES = 64  # in a message
FRAME = struct.Struct("!II")  # bytes of JSON, number of parts; then the bytes of each part, as !Q


class Message(NamedTuple):
    """A JSON object, and bytes that would be expensive as JSON."""

    header: dict[str, Any]
    parts: Sequence[bytes] = ()


def pack(message: Message) -> bytes:
    """A message as bytes: lengths, JSON, parts. Never pickle."""
    data = json.dumps(message.header, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    sizes = struct.pack(f"!{len(message.parts)}Q", *map(len, message.parts))
    return b"".join([FRAME.pack(len(data), len(message.parts)), sizes, data, *message.parts])


class Unpacker:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that these bytes complete."""
        self._buffer += data
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> Message | None:
        buffer = self._buffer
        if len(buffer) < FRAME.size:
            return None
        length, count = FRAME.unpack_from(buffer)
        part_sizes = struct.Struct(f"!{count}Q")
        start = FRAME.size + part_sizes.size
        if len(buffer) < start:
            return None
        *ends, total = accumulate((length, *part_sizes.unpack_from(buffer, FRAME.size)), initial=start)
        if len(buffer) < total:
            return None
        header, *parts = (bytes(buffer[begin:end]) for begin, end in pairwise((*ends, total)))
        del buffer[:total]
        return Message(json.loads(header.decode("utf-8", "surrogatepass")), parts)


class Channel:
    """One end of a socket pair, used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.handles: deque[int] = deque()  # file descriptors received, in order
        self._unpacker = Unpacker()
        self._messages: deque[Message] = deque()

    def send(self, header: dict[str, Any], parts: Sequence[bytes] = (), handles: Sequence[int] = ()) -> None:
        """Send a message; `handles` are open file descriptors, which are duplicated for the receiver."""
        data = pack(Message(header, parts))
        sent = socket.send_fds(self.connection, [data], handles) if handles else 0
        if sent < len(data):
            self.connection.sendall(data[sent:])

    def receive(self) -> Message | None:
        """The next message, or None if the other side has closed."""
        while not self._messages:
            try:
                if sys.platform == "win32":
                    data = self.connection.recv(READ_BYTES)
                else:
                    data, handles, _, _ = socket.recv_fds(self.connection, READ_BYTES, MAX_HANDLES)
                    self.handles.extend(handles)
            except ConnectionError:
                return None
            if not data:
                return None
            self._messages.extend(self._unpacker.feed(data))
        return self._messages.popleft()

    @property
    def readable(self) -> bool:
        """Whether `receive` would return without waiting."""
        return bool(self._messages) or bool(select.select([self.connection], [], [], 0)[0])

    def close(self) -> None:
        self.connection.close()
