"""The server under load: throughput compared with simple wrappers, overload, long runs, stalled clients, and SIGTERM.

    python bench/serve.py compare RUN --lines FILE     a FastAPI wrapper around CTranslate2, 1, 8 and 64 clients
    python bench/serve.py fairness RUN --lines FILE    one line at a time, with and without requests of 1,000 lines
    python bench/serve.py overload RUN --lines FILE    1,000 connections, ten times the capacity
    python bench/serve.py soak RUN --lines FILE        100,000 requests
    python bench/serve.py stop RUN --lines FILE        SIGTERM under load, 50 times
    python bench/serve.py stalled RUN --lines FILE     500 stalled clients next to good ones
    python bench/serve.py schema RUN --lines FILE      schemathesis: valid and invalid requests from the API description

Everything runs on loopback. The figures are printed as one JSON object. Latency ends when the answer is in the client's
socket; the time until the client reads it is `client_delay`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from serve_load import Load, counts, quantiles

FOLDER = Path(__file__).parent
FIGURES = ("per_second", "p50_ms", "p99_ms")
OURS = "regard"


@contextmanager
def process(command: list[str], port: int, path: str = "/health/ready") -> Iterator[subprocess.Popen[bytes]]:
    """Start a server and wait until it answers."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1)
                break
            except OSError:
                if server.poll() is not None:
                    raise SystemExit(f"{command[0]} ended") from None
                time.sleep(0.1)
        yield server
    finally:
        if server.poll() is None:
            server.terminate()
        server.wait()


def regard(runs: list[str], port: int, *options: object) -> list[str]:
    """The command of a server; the name of its first run is `run`."""
    named = [f"run={runs[0]}", *runs[1:]]
    return [sys.executable, "-m", "regard", "serve", *named, "--port", str(port), *map(str, options)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def show(name: str, **figures: object) -> None:
    print(json.dumps({"what": name, **figures}), flush=True)


def middle(values: list[float]) -> dict[str, float]:
    """The median and the range over several rounds."""
    named = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


def compare(options: argparse.Namespace, lines: list[str]) -> None:
    """Throughput and latency compared with wrappers, in turn; each ratio is taken within a round."""
    ports = {name: free_port() for name in (OURS, "wrapper", "one at a time")}
    ours = regard(options.runs, ports[OURS], "--engine", "ctranslate2", "--precision", "int8", "--beam", options.beam)
    wrapper = [sys.executable, str(FOLDER / "serve_wrapper.py"), options.runs[0], str(options.beam)]
    names, found = list(ports), {}
    with (
        process(ours, ports[OURS]),
        process([*wrapper, str(ports["wrapper"]), "plain"], ports["wrapper"], "/openapi.json"),
        process([*wrapper, str(ports["one at a time"]), "locked"], ports["one at a time"], "/openapi.json"),
    ):
        for clients in map(int, options.clients_of_compare.split(",")):
            rounds: dict[str, list[dict[str, object]]] = {name: [] for name in names}
            for name in names:
                Load(ports[name], lines).run(clients, seconds=min(2.0, options.seconds))
            for turn in range(options.rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    load = Load(ports[name], lines)
                    rounds[name].append(load.report(load.run(clients, seconds=options.seconds)))
                print(
                    clients, turn + 1, {name: rows[-1]["per_second"] for name, rows in rounds.items()}, file=sys.stderr
                )
            rates = {name: [float(str(row["per_second"])) for row in rows] for name, rows in rounds.items()}
            found[clients] = {
                name: {
                    **{key: statistics.median(float(str(row[key])) for row in rows) for key in FIGURES},
                    "client_delay_p99_ms": statistics.median(row["client_delay"]["p99_ms"] for row in rows),  # type: ignore[index]
                    "statuses": counts(sum((Counter(row["statuses"]) for row in rows), Counter())),  # type: ignore[call-overload]
                    "ours_over_it": middle([a / b for a, b in zip(rates[OURS], rates[name], strict=True)]),
                }
                for name, rows in rounds.items()
            }
    show("compare", rounds=options.rounds, seconds=options.seconds, beam=options.beam, clients=found)


def fairness(options: argparse.Namespace, lines: list[str]) -> None:
    """Latency of one line at a time, with and without concurrent requests of 1,000 lines."""
    port = free_port()

    def measure(beside: bool) -> list[float]:
        load, bulk = Load(port, lines), Load(port, lines, (lines * 1000)[:1000])
        other = bulk.start(1, seconds=options.seconds + 1) if beside else None
        time.sleep(0.5)
        load.run(1, seconds=options.seconds)
        if other is not None:
            other.result()
        assert set(load.statuses) == {200} and set(bulk.statuses) <= {200}, (load.statuses, bulk.statuses)
        return load.seconds

    rows = []
    # 1,000 lines may take longer than the default deadline
    with process(regard(options.runs, port, "--beam", options.beam, "--deadline", 600), port):
        for _ in range(options.rounds):
            alone, beside = quantiles(measure(False)), quantiles(measure(True))
            rows.append({"alone": alone, "beside_1000": beside, "p99_ratio": beside["p99_ms"] / alone["p99_ms"]})
    show("fairness", p99_ratio=middle([float(row["p99_ratio"]) for row in rows]), rounds=rows)  # type: ignore[arg-type]


def memory(pid: int) -> dict[int, int]:
    """Kilobytes of a process and each of its children; shared memory is divided among them."""
    pids, used = [pid], {}
    while pids:
        each = pids.pop()
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            used[each] = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            for task in Path(f"/proc/{each}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return used


def growth(before: dict[int, int], after: dict[int, int]) -> dict[str, object]:
    """The growth of memory, in total and by process."""
    percent = round(100 * (sum(after.values()) / sum(before.values()) - 1), 1)
    return {"memory_percent": percent, "memory_kb": [[before.get(pid, 0), kb] for pid, kb in after.items()]}


def overload(options: argparse.Namespace, lines: list[str]) -> None:
    """More clients than the server can answer: each request is answered once, and memory does not grow.

    The clients together send requests at `--times` the capacity of the server, whatever the answers are. Memory is
    compared between a quarter of the time, when buffers and batches have reached their size, and the end.
    """
    port = free_port()
    with process(regard(options.runs, port, "--beam", options.beam, "--queue", options.queue), port) as server:
        warm = Load(port, lines)
        capacity = warm.report(warm.run(64, seconds=min(10, options.seconds)))
        rate = float(str(capacity["per_second"]))
        load = Load(port, lines)
        running = load.start(options.clients, seconds=options.seconds, rate=options.times * rate)
        used = []
        for part in (0.25, 0.74):
            time.sleep(part * options.seconds)
            used.append(memory(server.pid))
        took = running.result()
        asked = round(sum(load.statuses.values()) / took / rate, 1)
        figures = {"refused": quantiles(load.refused), **growth(*used)}
        show("overload", capacity=capacity, times_capacity=asked, **load.report(took), **figures)


def soak(options: argparse.Namespace, lines: list[str]) -> None:
    """Many requests without an error."""
    port = free_port()
    engine = ["--engine", "ctranslate2", "--precision", "int8"]
    with process(regard(options.runs, port, "--beam", options.beam, *engine), port) as server:
        Load(port, lines).run(16, requests=min(2000, options.requests))
        before = memory(server.pid)
        load = Load(port, lines)
        took = load.run(16, requests=options.requests)
        figures = growth(before, memory(server.pid))
        show("soak", requests=options.requests, minutes=round(took / 60, 1), **load.report(took), **figures)


def stop(options: argparse.Namespace, lines: list[str]) -> None:
    """SIGTERM under load: every request that was sent before the signal is answered.

    Later requests may be lost (`lost_after`): the server resets connections that arrive while its listener closes.
    """
    statuses = Counter[object]()
    codes = Counter[int]()
    lost = 0
    for _ in range(options.rounds):
        port, ended = free_port(), threading.Event()
        with process(regard(options.runs, port, "--beam", options.beam), port) as server:
            load = Load(port, lines)
            running = load.start(32, seconds=60, ended=ended)
            time.sleep(1.0)
            terminated = time.time()
            server.send_signal(signal.SIGTERM)
            server.wait()
            time.sleep(0.2)  # until clients notice that their connections have ended
            ended.set()
            running.result()
        statuses += load.statuses
        lost += sum(sent < terminated for sent in load.lost)
        codes[server.returncode] += 1
    after = int(statuses["lost"]) - lost
    show("stop", times=options.rounds, statuses=counts(statuses), lost=lost, lost_after=after, exit_codes=codes)


HEAD = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


STALLS = {  # name -> (data sent first, data sent every half second)
    "silent": (b"", b""),
    "half a header": (HEAD + b"X-A: b", b""),
    "trickled header": (HEAD + b"X-A: b", b"b"),
    "trickled body": (HEAD + b"Content-Length: 1000\r\n\r\n{", b" "),
    "slow reader": (b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 1000, b""),  # more than fits into buffers
}


def stall(port: int, clients: int) -> dict[str, float]:
    """Run stalled clients -> seconds until the server closed the last connection of each kind."""
    closed: dict[str, list[float]] = {kind: [] for kind in STALLS}
    held: set[int] = set()  # ports of clients with an open connection

    async def watch() -> None:
        """Read the connection table of the kernel: a client with unread data does not notice a closed connection."""
        while True:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            ours = [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01" and row[9] != "0"]
            held.clear()
            held.update(int(row[2].rpartition(":")[2], 16) for row in ours)
            await asyncio.sleep(0.5)

    async def client(kind: str) -> None:
        first, then = STALLS[kind]
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        with connection, suppress(OSError):
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, first)
            while time.perf_counter() - began < 60:
                await asyncio.sleep(0.5)
                if then:
                    await loop.sock_sendall(connection, then)
                if time.perf_counter() - began > 2 and connection.getsockname()[1] not in held:
                    break
        closed[kind].append(time.perf_counter() - began)

    async def all_of_them() -> None:
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client(kind) for kind in STALLS for _ in range(clients // len(STALLS))))
        watching.cancel()

    asyncio.run(all_of_them())
    return {kind: round(max(seconds), 1) for kind, seconds in closed.items()}


def stalled(options: argparse.Namespace, lines: list[str]) -> None:
    """Stalled clients (nothing sent, half a header, header or body byte by byte, no reading) next to good ones."""
    port = free_port()
    patience = ["--receive", options.timeout, "--send", options.timeout] if options.timeout else []
    with process(regard(options.runs, port, "--beam", options.beam, *patience), port), ProcessPoolExecutor(1) as other:
        alone, beside = Load(port, lines), Load(port, lines)
        alone.run(2, seconds=options.seconds)
        stalls = other.submit(stall, port, options.clients)
        time.sleep(0.5)
        beside.run(2, seconds=options.seconds)
        figures = {"alone": quantiles(alone.seconds), "beside": quantiles(beside.seconds)}
        ratio = round(figures["beside"]["p99_ms"] / figures["alone"]["p99_ms"], 2)
        statuses = counts(alone.statuses + beside.statuses)
        show(
            "stalled", clients=options.clients, closed_within_s=stalls.result(), **figures, p99_ratio=ratio,
            statuses=statuses,
        )  # fmt: skip


SCHEMA = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 408, 413, 415, 422, 429]
"""


def schema(options: argparse.Namespace, lines: list[str]) -> None:
    """Valid and invalid requests from the API description: no server error, and no invalid request accepted.

    A request may be refused for its size (413) before it is validated.
    """
    port = free_port()
    with (
        process(regard(options.runs, port, "--deadline", 30, "--max-work", 20_000), port),
        tempfile.TemporaryDirectory() as folder,
    ):
        Path(folder, "schemathesis.toml").write_text(SCHEMA)
        program = str(Path(sys.executable).with_name("schemathesis"))
        command = [program, "--config-file", f"{folder}/schemathesis.toml", "run"]
        command += [f"http://127.0.0.1:{port}/openapi.json", "--max-examples", str(options.requests), "--seed", "1"]
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,negative_data_rejection"
        command += ["--mode", "all", "--checks", checks, "--phases", options.phases]
        command += [part for path in options.path or () for part in ("--include-path", path)]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, stdout=sys.stderr)  # for its files
        minutes = round((time.perf_counter() - began) / 60, 1)
        show("schema", examples=options.requests, paths=options.path, minutes=minutes, exit_code=done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "fairness", "overload", "soak", "stop", "stalled", "schema"))
    parser.add_argument("runs", nargs="+", metavar="RUN", help="one run; schema accepts more, as NAME=DIRECTORY")
    parser.add_argument("--lines", required=True, help="sources, one per line")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, help="default: 1000 for overload, 500 for stalled")
    parser.add_argument("--queue", type=int, default=20_000, help="overload: --queue of the server")
    parser.add_argument("--timeout", type=float, help="stalled: --receive and --send of the server")
    parser.add_argument("--path", action="append", help="schema: an operation; repeatable; default: all")
    parser.add_argument("--phases", default="coverage,fuzzing", help="schema: its phases")
    parser.add_argument(
        "--clients-of-compare",
        default="1,8,64",
        metavar="N,N",
        help="compare: numbers of clients (default: %(default)s)",
    )
    parser.add_argument(
        "--times", type=float, default=10, help="overload: rate of requests, in multiples of the capacity"
    )
    options = parser.parse_args()
    options.clients = options.clients or (1000 if options.what == "overload" else 500)
    lines = [line for line in Path(options.lines).read_text("utf-8").split("\n") if line.strip()]
    globals()[options.what](options, lines)


if __name__ == "__main__":
    main()
