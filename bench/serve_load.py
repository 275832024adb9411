"""Clients for bench/serve.py: each sends one request after the other over a persistent connection.

The clients are Python code on the same cores as the server, so their own time must not count as latency. Latency ends
when the kernel puts the answer into the socket (SO_TIMESTAMPNS); the time until the client reads it is reported
separately, as `client_delay`. This needs plain sockets and epoll, which cost a tenth of the time of an HTTP library.
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

SO_TIMESTAMPNS = 35  # a Linux constant that the socket module lacks
TIMESPEC = struct.Struct("qq")
CLIENT_TIMEOUT = 120.0  # seconds
RETRY_SECONDS = 0.05  # pause of a client after a refusal


def quantiles(seconds: list[float]) -> dict[str, float]:
    """The median, the 99th percentile and the maximum, in milliseconds."""
    ordered = sorted(seconds) or [float("nan")]
    last = len(ordered) - 1
    figures = {"p50_ms": ordered[(last + 1) // 2], "p99_ms": ordered[min(last, int(0.99 * len(ordered)))]}
    return {name: round(1000 * value, 2) for name, value in (figures | {"max_ms": ordered[-1]}).items()}


class Client:
    """One connection with at most one pending request."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.draw = random.Random(seed)
        self.socket: socket.socket | None = None
        self.sent = 0.0
        self.received = 0.0
        self._buffer = b""

    def send(self, request: bytes) -> bool:
        """Send a request; False if the connection is refused."""
        if self.socket is None:
            try:
                self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=CLIENT_TIMEOUT)
            except OSError:
                return False
            self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self.sent = time.time()
        self.socket.sendall(request)
        return True

    def receive(self) -> int | None:
        """The status of the answer, or None while it is incomplete; ConnectionError if the server has closed."""
        assert self.socket is not None
        data, extra, _, _ = self.socket.recvmsg(1 << 18, 64, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionError
        self.received = time.time()
        for _, kind, value in extra:
            if kind == SO_TIMESTAMPNS:
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
        """Close the connection; the next request opens a new one."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class Load:
    """Clients that send one request after the other, and the results."""

    def __init__(self, port: int, lines: list[str], many: list[str] | None = None) -> None:
        """With `many`, every request has all of these lines, otherwise one line of `lines`."""
        self.port = port
        self.requests = [_request(line) for line in lines] if many is None else [_request(many)]
        self.statuses: Counter[object] = Counter()
        self.seconds: list[float] = []  # latencies of answers
        self.refused: list[float] = []  # latencies of refusals
        self.delays: list[float] = []  # from the arrival of an answer until the client read it
        self.lost: list[float] = []  # send times of requests without a complete answer

    def start(self, clients: int, **limits: Any) -> Future[float]:
        """Call `run` in a new thread."""
        return ThreadPoolExecutor(1).submit(self.run, clients, **limits)

    def run(
        self,
        clients: int,
        seconds: float = 1e9,
        requests: int = 10**12,
        rate: float = 1e9,
        stop: threading.Event | None = None,
    ) -> float:
        """Send requests for `seconds` or until `requests` are sent, and return the duration in seconds.

        All clients together send at most `rate` requests per second. By default each client sends its next request as
        soon as it has an answer. Once `stop` is set, pending answers are not awaited.
        """
        began = due = time.perf_counter()
        order = count()
        idle = [
            (began, next(order), Client(self.port, i)) for i in range(clients)
        ]  # ordered by the time of their next request
        clients_by_socket: dict[int, Client] = {}
        pending: set[int] = set()  # sockets with a request
        poll = select.epoll()
        while not (stop is not None and stop.is_set()):
            now = time.perf_counter()
            over = now - began >= seconds or not requests
            if over and not pending:
                break
            while idle and not over and max(due, idle[0][0]) <= now:
                client = heappop(idle)[2]
                requests -= 1
                due += 1 / rate
                opened = client.socket is None
                if not self._send(client):
                    heappush(idle, (now + RETRY_SECONDS, next(order), client))
                    continue
                assert client.socket is not None
                number = client.socket.fileno()
                pending.add(number)
                clients_by_socket[number] = client
                if opened:
                    poll.register(number, select.EPOLLIN)
                over = not requests
            next_time = max(due, idle[0][0]) - time.perf_counter() if idle and not over else 0.1
            for number, _ in poll.poll(min(0.1, max(0.0, next_time))):
                client = clients_by_socket[number]
                if number not in pending:  # the server has closed an idle connection
                    client.close()
                elif (status := self._receive(client)) is not None:
                    pending.remove(number)
                    heappush(idle, (time.perf_counter() + RETRY_SECONDS * (status != 200), next(order), client))
        for client in clients_by_socket.values():
            client.close()
        return time.perf_counter() - began

    def _send(self, client: Client) -> bool:
        try:
            sent = client.send(client.draw.choice(self.requests))
        except OSError:
            sent = True  # `_receive` handles the broken connection
        if not sent:
            self.statuses["refused connection"] += 1
        return sent

    def _receive(self, client: Client) -> object:
        try:
            status: object = client.receive()
        except OSError:
            client.close()
            self.lost.append(client.sent)
            status = "lost"
        if status is not None:
            self.statuses[status] += 1
            if status != "lost":
                (self.seconds if status == 200 else self.refused).append(max(0.0, client.received - client.sent))
                self.delays.append(max(0.0, time.time() - client.received))
        return status

    def report(self, duration: float) -> dict[str, object]:
        """Answers per second, latencies, delays of the clients, and counts by status."""
        return {
            "per_second": round(self.statuses[200] / duration, 1),
            **quantiles(self.seconds),
            "client_delay": quantiles(self.delays),
            "statuses": counts(self.statuses),
        }


def counts(statuses: Counter[object]) -> dict[str, int]:
    """Counts by status, sorted."""
    return {str(key): count for key, count in sorted(statuses.items(), key=str) if count}


def _request(text: object) -> bytes:
    body = json.dumps({"q": text}).encode()
    head = "POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
