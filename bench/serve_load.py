"""Clients for bench/serve.py: they ask one line after the other over connections that are kept.

What the server takes must not be mixed up with what the client takes, which is Python on the same processor cores: an
answer has come when the kernel has put it into the socket (SO_TIMESTAMPNS), and the time until the client looked at it
is told apart, as the client's own delay. Hence bare sockets and epoll, which also cost a tenth of an HTTP library.
"""

from __future__ import annotations

import json
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from typing import Any

TIMESTAMPS = 35  # SO_TIMESTAMPNS of Linux, for which the socket module has no name
TIMESPEC = struct.Struct("qq")
PATIENCE = 120.0  # seconds
RETRY = 0.05  # seconds after which a client that was refused asks again


def quantiles(seconds: list[float]) -> dict[str, float]:
    """The median, the 99th percentile and the greatest, in milliseconds."""
    ordered = sorted(seconds) or [float("nan")]
    last = len(ordered) - 1
    named = {"p50_ms": ordered[(last + 1) // 2], "p99_ms": ordered[min(last, int(0.99 * len(ordered)))]}
    return {name: round(1000 * value, 2) for name, value in (named | {"max_ms": ordered[-1]}).items()}


class Client:
    """One connection, with at most one request on its way."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.draw = port, random.Random(seed)
        self.socket: socket.socket | None = None
        self.sent, self.received = 0.0, 0.0
        self._buffer = b""

    def send(self, request: bytes) -> bool:
        """Send a request; False if nobody takes the connection."""
        if self.socket is None:
            try:
                self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
            except OSError:
                return False
            self.socket.setsockopt(socket.SOL_SOCKET, TIMESTAMPS, 1)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer, self.sent = b"", time.time()
        self.socket.sendall(request)
        return True

    def receive(self) -> int | None:
        """The status of the answer if it is complete, else None; a ConnectionError if the server has left."""
        assert self.socket is not None
        data, extra, _, _ = self.socket.recvmsg(1 << 18, 64, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionError
        self.received = time.time()
        for _, kind, value in extra:
            if kind == TIMESTAMPS:
                seconds, nanoseconds = TIMESPEC.unpack(value)
                self.received = seconds + nanoseconds / 1e9
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return None
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(fields[b"content-length"]):
            return None
        if fields.get(b"connection") == b"close":
            self.close()
        return int(head[9:12])

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class Load:
    """Clients that ask one line after the other, and what came of it."""

    def __init__(self, port: int, lines: list[str], many: list[str] | None = None) -> None:
        """`many` are asked at once each time, instead of one of the lines."""
        self.port = port
        self.requests = [_request(line) for line in lines] if many is None else [_request(many)]
        self.statuses: Counter[object] = Counter()
        self.seconds: list[float] = []  # until an answer was there
        self.refused: list[float] = []  # until a refusal was there
        self.delays: list[float] = []  # from then until a client had looked at it

    def start(self, clients: int, **limits: Any) -> Future[float]:
        """`run` in a thread of its own."""
        return ThreadPoolExecutor(1).submit(self.run, clients, **limits)

    def run(
        self,
        clients: int,
        seconds: float = 1e9,
        requests: int = 10**12,
        rate: float = 1e9,
        ended: threading.Event | None = None,
    ) -> float:
        """Ask with so many clients for a time, or for a number of requests -> seconds that it took.

        All together ask at most `rate` times a second, without it each as soon as it is answered. With `ended`, what
        is on its way then is waited for no longer.
        """
        began = due = time.perf_counter()
        order = count()
        idle = [(began, next(order), Client(self.port, i)) for i in range(clients)]  # by when they may ask
        kept: dict[int, Client] = {}  # by the number of their socket
        asking: set[int] = set()
        poll = select.epoll()
        while not (ended is not None and ended.is_set()):
            now = time.perf_counter()
            over = now - began >= seconds or not requests
            if over and not asking:
                break
            while idle and not over and max(due, idle[0][0]) <= now:
                client = heappop(idle)[2]
                requests, due = requests - 1, due + 1 / rate
                opened = client.socket is None
                if not self._send(client):
                    heappush(idle, (now + RETRY, next(order), client))
                    continue
                assert client.socket is not None
                asking.add(number := client.socket.fileno())
                kept[number] = client
                if opened:
                    poll.register(number, select.EPOLLIN)
                over = not requests
            next_time = max(due, idle[0][0]) - time.perf_counter() if idle and not over else 0.1
            for number, _ in poll.poll(min(0.1, max(0.0, next_time))):
                client = kept[number]
                if number not in asking:  # the server has closed a connection that was not in use
                    client.close()
                elif (status := self._receive(client)) is not None:
                    asking.remove(number)
                    heappush(idle, (time.perf_counter() + RETRY * (status != 200), next(order), client))
        for client in kept.values():
            client.close()
        return time.perf_counter() - began

    def _send(self, client: Client) -> bool:
        try:
            sent = client.send(client.draw.choice(self.requests))
        except OSError:
            sent = True  # the connection is broken: read what came before, or that it has ended
        if not sent:
            self.statuses["refused connection"] += 1
        return sent

    def _receive(self, client: Client) -> object:
        try:
            status: object = client.receive()
        except OSError:
            client.close()
            status = "lost"
        if status is not None:
            self.statuses[status] += 1
            if status != "lost":
                (self.seconds if status == 200 else self.refused).append(max(0.0, client.received - client.sent))
                self.delays.append(max(0.0, time.time() - client.received))
        return status

    def report(self, took: float) -> dict[str, object]:
        """Answers per second, their latencies, the clients' own delays, and how many answers of each status."""
        return {
            "per_second": round(self.statuses[200] / took, 1),
            **quantiles(self.seconds),
            "client_delay": quantiles(self.delays),
            "statuses": counts(self.statuses),
        }


def counts(statuses: Counter[object]) -> dict[str, int]:
    """Counts by status, in order."""
    return {str(key): count for key, count in sorted(statuses.items(), key=str) if count}


def _request(what: object) -> bytes:
    body = json.dumps({"q": what}).encode()
    head = "POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
