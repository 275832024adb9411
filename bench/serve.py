"""The server under load: throughput compared with simple wrappers, overload, long runs, stalled clients, and SIGTERM.

    python bench/serve.py compare RUN --lines FILE     native, CTranslate2, and wrappers around it: 1, 8, 64 clients
    python bench/serve.py fairness RUN --lines FILE    single lines, with and without concurrent requests of 1,000 lines
    python bench/serve.py overload RUN --lines FILE    1,000 connections, ten times the capacity
    python bench/serve.py soak RUN --lines FILE        100,000 requests
    python bench/serve.py stop RUN --lines FILE        SIGTERM under load, 50 times
    python bench/serve.py stalled RUN --lines FILE     other clients while 500 clients are stalled
    python bench/serve.py schema RUN --lines FILE      schemathesis: requests generated from the API description

Everything runs on loopback. Each command prints one JSON object. Latency ends when the answer is in the client's
socket; `client_delay` is the time from then until the client reads it.
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
                    raise SystemExit(f"the server stopped at its start: {' '.join(command)}") from None
                time.sleep(0.1)
        yield server
    finally:
        if server.poll() is None:
            server.terminate()
        server.wait()


def regard(runs: list[str], port: int, *options: object) -> list[str]:
    """The command of a server; the name of its first run is `run`."""
    named_runs = [f"run={runs[0]}", *runs[1:]]
    return [sys.executable, "-m", "regard", "serve", *named_runs, "--port", str(port), *map(str, options)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def show(name: str, **figures: object) -> None:
    print(json.dumps({"what": name, **figures}), flush=True)


def summary(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum over several rounds."""
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 3) for name, value in figures.items()}


def compare(options: argparse.Namespace, lines: list[str]) -> None:
    """Throughput and latency of the native engine, compared with CTranslate2 in our server and in wrappers.

    Servers take turns; each ratio is taken within a round.
    """
    ports = {name: free_port() for name in (OURS, "ctranslate2", "wrapper", "one at a time")}
    settings = "--precision", "int8", "--beam", options.beam
    ours = regard(options.runs, ports[OURS], "--engine", "native", *settings)
    other = regard(options.runs, ports["ctranslate2"], "--engine", "ctranslate2", *settings)
    wrapper = [sys.executable, str(FOLDER / "serve_wrapper.py"), options.runs[0], str(options.beam)]
    names = list(ports)
    results = {}
    with (
        process(ours, ports[OURS]),
        process(other, ports["ctranslate2"]),
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
            results[clients] = {
                name: {
                    **{key: statistics.median(float(str(row[key])) for row in rows) for key in FIGURES},
                    "client_delay_p99_ms": statistics.median(row["client_delay"]["p99_ms"] for row in rows),  # type: ignore[index]
                    "statuses": counts(sum((Counter(row["statuses"]) for row in rows), Counter())),  # type: ignore[call-overload]
                    "ours_over_it": summary([a / b for a, b in zip(rates[OURS], rates[name], strict=True)]),
                }
                for name, rows in rounds.items()
            }
    show("compare", rounds=options.rounds, seconds=options.seconds, beam=options.beam, clients=results)


def fairness(options: argparse.Namespace, lines: list[str]) -> None:
    """Latency of single lines, with and without concurrent requests of 1,000 lines."""
    port = free_port()

    def measure(with_bulk: bool) -> dict[str, float]:
        load = Load(port, lines)
        bulk = Load(port, lines, (lines * 1000)[:1000])
        running = bulk.start(1, seconds=options.seconds + 1) if with_bulk else None
        time.sleep(0.5)
        load.run(1, seconds=options.seconds)
        if running is not None:
            running.result()
        assert set(load.statuses) == {200} and set(bulk.statuses) <= {200}, (load.statuses, bulk.statuses)
        return quantiles(load.seconds)

    rows = []
    # With the default deadline, 1,000 lines could expire.
    with process(regard(options.runs, port, "--beam", options.beam, "--deadline", 600), port):
        for _ in range(options.rounds):
            without = measure(with_bulk=False)
            during = measure(with_bulk=True)
            rows.append({"without": without, "during": during, "p99_ratio": during["p99_ms"] / without["p99_ms"]})
    show("fairness", p99_ratio=summary([float(row["p99_ratio"]) for row in rows]), rounds=rows)  # type: ignore[arg-type]


def memory(pid: int) -> dict[int, int]:
    """Kilobytes of a process and of each of its descendants; shared memory is divided among them."""
    pids = [pid]
    kilobytes = {}
    while pids:
        each = pids.pop()
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            kilobytes[each] = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            for task in Path(f"/proc/{each}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return kilobytes


def growth(before: dict[int, int], after: dict[int, int]) -> dict[str, object]:
    """The growth of memory, in total and by process."""
    percent = round(100 * (sum(after.values()) / sum(before.values()) - 1), 1)
    return {"memory_percent": percent, "memory_kb": [[before.get(pid, 0), kb] for pid, kb in after.items()]}


def overload(options: argparse.Namespace, lines: list[str]) -> None:
    """More requests than the server can process: each is answered or refused once, and memory does not grow.

    The clients together send requests at `--times` the capacity of the server, independent of the answers. Memory at
    the end is compared with memory after a quarter of the time, when buffers and batches have reached their size.
    """
    port = free_port()
    with process(regard(options.runs, port, "--beam", options.beam, "--queue", options.queue), port) as server:
        warm = Load(port, lines)
        capacity = warm.report(warm.run(64, seconds=min(10, options.seconds)))
        rate = float(str(capacity["per_second"]))
        load = Load(port, lines)
        running = load.start(options.clients, seconds=options.seconds, rate=options.times * rate)
        measurements = []
        for part in (0.25, 0.74):
            time.sleep(part * options.seconds)
            measurements.append(memory(server.pid))
        duration = running.result()
        times_capacity = round(sum(load.statuses.values()) / duration / rate, 1)
        figures = {"refused": quantiles(load.refused), **growth(*measurements)}
        show("overload", capacity=capacity, times_capacity=times_capacity, **load.report(duration), **figures)


def soak(options: argparse.Namespace, lines: list[str]) -> None:
    """Statuses, latency and memory growth over many requests."""
    port = free_port()
    engine = ["--engine", "ctranslate2", "--precision", "int8"]
    with process(regard(options.runs, port, "--beam", options.beam, *engine), port) as server:
        Load(port, lines).run(16, requests=min(2000, options.requests))
        before = memory(server.pid)
        load = Load(port, lines)
        duration = load.run(16, requests=options.requests)
        figures = growth(before, memory(server.pid))
        show("soak", requests=options.requests, minutes=round(duration / 60, 1), **load.report(duration), **figures)


def stop(options: argparse.Namespace, lines: list[str]) -> None:
    """SIGTERM under load: every request that was sent before the signal must be answered.

    Later requests may be lost (`lost_after`), because connections that arrive while the listener closes are reset.
    """
    statuses = Counter[object]()
    codes = Counter[int]()
    lost = 0
    for _ in range(options.rounds):
        port = free_port()
        stop_clients = threading.Event()
        with process(regard(options.runs, port, "--beam", options.beam), port) as server:
            load = Load(port, lines)
            running = load.start(32, seconds=60, stop=stop_clients)
            time.sleep(1.0)
            terminated = time.time()
            server.send_signal(signal.SIGTERM)
            server.wait()
            time.sleep(0.2)  # the clients must notice the closed connections
            stop_clients.set()
            running.result()
        statuses += load.statuses
        lost += sum(sent < terminated for sent in load.lost)
        codes[server.returncode] += 1
    after = int(statuses["lost"]) - lost
    show("stop", times=options.rounds, statuses=counts(statuses), lost=lost, lost_after=after, exit_codes=codes)


HEAD = b"POST /v1/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


STALLS = {  # name -> (data sent first, data sent every half second)
    "silent": (b"", b""),
    "half a header": (HEAD + b"X-A: b", b""),
    "trickled header": (HEAD + b"X-A: b", b"b"),
    "trickled body": (HEAD + b"Content-Length: 1000\r\n\r\n{", b" "),
    # more than the socket buffers hold
    "slow reader": (b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000, b""),
}


def stall(port: int, clients: int) -> dict[str, float]:
    """Run stalled clients; seconds until the server closed the last connection of each kind."""
    durations: dict[str, list[float]] = {kind: [] for kind in STALLS}
    open_ports: set[int] = set()  # client ports of open connections

    async def watch() -> None:
        """Poll the kernel's connection table, because a client with unread data does not notice a closed connection."""
        while True:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            established = [r for r in rows if r[1].endswith(f":{port:04X}") and r[3] == "01" and r[9] != "0"]
            open_ports.clear()
            open_ports.update(int(row[2].rpartition(":")[2], 16) for row in established)
            await asyncio.sleep(0.5)

    async def client(kind: str) -> None:
        first_data, repeated_data = STALLS[kind]
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        with connection, suppress(OSError):
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, first_data)
            while time.perf_counter() - began < 60:
                await asyncio.sleep(0.5)
                if repeated_data:
                    await loop.sock_sendall(connection, repeated_data)
                if time.perf_counter() - began > 2 and connection.getsockname()[1] not in open_ports:
                    break
        durations[kind].append(time.perf_counter() - began)

    async def run_clients() -> None:
        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(client(kind) for kind in STALLS for _ in range(clients // len(STALLS))))
        watcher.cancel()

    asyncio.run(run_clients())
    return {kind: round(max(seconds), 1) for kind, seconds in durations.items()}


def stalled(options: argparse.Namespace, lines: list[str]) -> None:
    """Latency of ordinary clients before and while other clients are stalled, by every kind of STALLS."""
    port = free_port()
    timeouts = ["--receive", options.timeout, "--send", options.timeout] if options.timeout else []
    with (
        process(regard(options.runs, port, "--beam", options.beam, *timeouts), port),
        ProcessPoolExecutor(1) as executor,
    ):
        before = Load(port, lines)
        during = Load(port, lines)
        before.run(2, seconds=options.seconds)
        stalls = executor.submit(stall, port, options.clients)
        time.sleep(0.5)
        during.run(2, seconds=options.seconds)
        figures = {"before": quantiles(before.seconds), "during": quantiles(during.seconds)}
        ratio = round(figures["during"]["p99_ms"] / figures["before"]["p99_ms"], 2)
        statuses = counts(before.statuses + during.statuses)
        show(
            "stalled", clients=options.clients, closed_within_s=stalls.result(), **figures, p99_ratio=ratio,
            statuses=statuses,
        )  # fmt: skip


SCHEMA = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 408, 413, 415, 422, 429]
"""


def schema(options: argparse.Namespace, lines: list[str]) -> None:
    """Valid and invalid requests from the API description: no server error, and no invalid request is accepted.

    A request may be refused because of its size (413) before it is validated.
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
        # schemathesis writes files into its working directory.
        process_result = subprocess.run(command, cwd=folder, stdout=sys.stderr)
        minutes = round((time.perf_counter() - began) / 60, 1)
        show(
            "schema",
            examples=options.requests,
            paths=options.path,
            minutes=minutes,
            exit_code=process_result.returncode,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("compare", "fairness", "overload", "soak", "stop", "stalled", "schema"))
    parser.add_argument("runs", nargs="+", metavar="RUN", help="one run; schema accepts more, as NAME=DIRECTORY")
    parser.add_argument("--lines", required=True, help="sources, one per line")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, help="default: 1000 for overload, 500 for stalled")
    parser.add_argument("--queue", type=int, default=20_000, help="overload: --queue of the server")
    parser.add_argument("--timeout", type=float, help="stalled: --receive and --send of the server")
    parser.add_argument("--path", action="append", help="schema: an operation to test; repeatable; default: all")
    parser.add_argument(
        "--phases", default="coverage,fuzzing", help="schema: phases of schemathesis (default: %(default)s)"
    )
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
    options.clients = options.clients or (1000 if options.command == "overload" else 500)
    lines = [line for line in Path(options.lines).read_text("utf-8").split("\n") if line.strip()]
    globals()[options.command](options, lines)


if __name__ == "__main__":
    main()
