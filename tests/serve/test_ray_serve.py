"""Replicas of Ray Serve give the same answers as the server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

import regard
from kit.server import serving
from kit.toy import toy_words
from regard.errors import UserError
from regard.serve.ray_serve import Replica, app
from regard.serve.responses import EventStream, Reply

JSON = {"content-type": "application/json"}
KEY = "0123456789abcdef"
BODIES: list[tuple[str, Any]] = [
    ("/v1/generate", {"inputs": toy_words(6, 3), "beam": 3, "nbest": 2}),
    ("/v1/generate", {"inputs": [{"source": "abc", "prefix": "K"}, "zzz", ""], "run": "toy"}),
    ("/v1/generate", {"inputs": "abc", "sample": True, "seed": 7}),
    ("/translate", {"q": ["abc", "fed"], "alternatives": 1}),
    ("/v1/score", {"pairs": [{"source": "abc", "target": "AH B K"}]}),
    # requests that are refused
    ("/v1/generate", {"inputs": "abc", "bean": 3}),
    ("/v1/generate", {"inputs": "abc", "run": "toys"}),
    ("/v1/generate", {"inputs": ["abc"] * 11}),
    ("/v1/classify", {"inputs": ["abc"]}),
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/generate", b"{"),
]


class LocalReplica:
    """A replica in this process, without Ray."""

    def __init__(self, replica: Replica, runner: asyncio.Runner) -> None:
        self.replica = replica
        self.runner = runner

    def __call__(self, method: str, path: str, body: Any = b"", headers: dict[str, str] = JSON) -> web.Response:
        reply = self._reply(method, path, body, headers)
        assert isinstance(reply, web.Response)
        return reply

    def stream(self, path: str, body: Any) -> list[str]:
        """The data of all events."""
        reply = self._reply("POST", path, body, JSON)
        assert isinstance(reply, EventStream)

        async def collect() -> list[str]:
            try:
                return [data async for data in reply.events]
            finally:
                reply.finish()

        return self.runner.run(collect())

    def _reply(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.runner.run(self.replica.reply(method, path, headers, data))


@contextmanager
def replica_of(run: Path, **arguments: Any) -> Iterator[LocalReplica]:
    with asyncio.Runner() as runner:
        replica = Replica({"toy": str(run)}, {"runs": [str(run)], **arguments})
        try:
            runner.run(replica.check_health())
            yield LocalReplica(replica, runner)
        finally:
            runner.run(replica.service.close())


def test_replica_gives_the_answers_of_the_server(toy: Path) -> None:
    with serving({"toy": toy / "run"}, max_inputs=10) as server, replica_of(toy / "run", max_inputs=10) as send:
        for path, body in BODIES:
            expected = server.post(path, body)
            reply = send("POST", path, body)
            assert (reply.status, json.loads(reply.body)) == (expected.status, expected.json), (path, body)
            assert reply.headers["Content-Type"] == expected.headers["Content-Type"]
        assert send("GET", "/v1/models").body == server.get("/v1/models").body
        for options in ({}, {"sample": True, "seed": 3}, {"min_length": 9, "max_length": 9}):
            body = {"inputs": "abc", "stream": True, **options}
            assert list(map(json.loads, send.stream("/v1/generate", body))) == server.post("/v1/generate", body).events
        assert send("GET", "/health/ready").status == 200


def test_replica_refuses_invalid_requests_and_missing_keys(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    body = {"inputs": "abc"}
    with replica_of(toy / "run", keys=str(tmp_path / "keys"), max_body=200) as send:
        headers_with_key = {**JSON, "authorization": f"Bearer {KEY}"}
        assert send("POST", "/v1/generate", body, headers_with_key).status == 200
        assert send("POST", "/v1/generate", body).status == 401
        assert send("POST", "/v1/generate", body, {**JSON, "authorization": f"Bearer {KEY}x"}).status == 401
        assert send("GET", "/v1/models").status == 401 and send("GET", "/health/live").status == 200
        assert send("POST", "/translate", {"q": "abc"}).status == 401
        assert send("POST", "/translate", {"q": "abc", "api_key": KEY}).status == 200
        for path, request_body, headers, status, message in (
            ("/v1/generate", {**body, "stream": True, "beam": 2}, headers_with_key, 422, "stream: beam, nbest"),
            ("/v1/generate", {"inputs": "a" * 300}, headers_with_key, 413, "the body has more than 200 bytes"),
            ("/v1/generate", body, {**headers_with_key, "content-type": "text/plain"}, 415, "the body must be JSON"),
            ("/v1/runs/reload", {}, headers_with_key, 404, "POST /v1/runs/reload: no such path"),
            ("/v1/models", {}, headers_with_key, 405, "allowed methods: GET, HEAD"),
        ):
            reply = send("POST", path, request_body, headers)
            assert reply.status == status and message in json.loads(reply.body)["error"]["message"], reply


def test_arguments_are_checked_before_ray_is_imported(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    run = str(toy / "run")
    for arguments, message in (
        ({}, "runs: is required"),
        ({"runs": run, "max_replica": 3}, "did you mean 'max_replicas'"),
        ({"runs": run, "min_replicas": 3, "max_replicas": "2"}, "3 is more than max_replicas, 2"),
        ({"runs": run, "port": 80}, "port: belongs to the configuration of Ray Serve"),
        ({"runs": str(tmp_path)}, "not a run directory"),
        ({"runs": run, "engine": "torch", "precision": "int8"}, "int8: goes with"),
        ({"runs": run, "keys": str(tmp_path / "none")}, "cannot be read"),
        ({"runs": run, "max_replicas": "3", "cpus": "0.5"}, "needs ray, which is not installed"),
    ):
        with pytest.raises(UserError, match=message):
            app(arguments)


class FakeServe(ModuleType):
    """The parts of ray.serve that `app` uses; records its arguments."""

    def __init__(self) -> None:
        super().__init__("ray.serve")
        self.settings: dict[str, Any] = {}
        self.bound: tuple[Any, ...] = ()

    def deployment(self, kind: type) -> FakeServe:
        assert kind is Replica
        return self

    def options(self, **settings: Any) -> FakeServe:
        self.settings = settings
        return self

    def bind(self, *arguments: Any) -> FakeServe:
        self.bound = arguments
        return self


def test_settings_are_passed_to_ray_serve(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServe()
    ray = ModuleType("ray")
    ray.serve = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    scaling = {"min_replicas": "0", "max_replicas": "9", "target_ongoing_requests": "2.5"}
    delays = {"upscale_delay": "3", "downscale_delay": "60.5"}
    app(
        {
            "runs": f"toy={toy / 'run'}",
            **scaling,
            **delays,
            "max_ongoing_requests": "7",
            "cpus": "1.5",
            "max_inputs": "3",
        }
    )
    assert fake.settings.pop("autoscaling_config") == {
        "min_replicas": 0,
        "max_replicas": 9,
        "target_ongoing_requests": 2.5,
        "upscale_delay_s": 3,
        "downscale_delay_s": 60.5,
    }
    assert fake.settings == {"name": "regard", "max_ongoing_requests": 7, "ray_actor_options": {"num_cpus": 1.5}}
    runs, settings = fake.bound
    assert runs == {"toy": str((toy / "run").resolve())} and settings["max_inputs"] == 3


SCRIPT = """
import json, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
import ray
from ray import serve
from regard.serve.ray_serve import DEPLOYMENT, app

run, port, bodies = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ray.init(address="local", num_cpus=4, include_dashboard=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(app({"runs": f"toy={run}", "min_replicas": 2, "max_replicas": "2", "cpus": 0.5, "max_inputs": 10}))
replicas = serve.status().applications["default"].deployments[DEPLOYMENT].replica_states

def post(item):
    data = json.dumps(item[1]).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{item[0]}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())

with ThreadPoolExecutor(8) as threads:
    answers = list(threads.map(post, bodies))
data = sys.argv[5].encode()
request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/generate", data, {"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=120) as answer:
    kind = answer.headers["Content-Type"]
    events = [line.decode()[6:] for line in answer if line.startswith(b"data: ")]
with open(sys.argv[4], "w") as file:
    states = {str(getattr(k, "value", k)): v for k, v in replicas.items()}
    json.dump({"replicas": states, "answers": answers, "kind": kind, "events": events}, file)
serve.shutdown()
ray.shutdown()
"""


def close(ours: Any, theirs: Any) -> bool:
    """Whether two answers are equal up to rounding errors, which depend on the batch."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(close(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-5)
    return bool(ours == theirs)


@pytest.mark.slow
def test_two_replicas_give_the_answers_of_the_server_and_the_library(toy: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    bodies = [item for item in BODIES if not isinstance(item[1], bytes)]
    bodies += [("/v1/generate", {"inputs": [word], "beam": 2}) for word in toy_words(30, 4)]
    stream_body = {"inputs": "cabba", "stream": True, "min_length": 20, "max_length": 20}
    with serving({"toy": toy / "run"}, max_inputs=10) as server:
        expected = [[reply.status, reply.json] for reply in (server.post(*item) for item in bodies)]
        events = server.post("/v1/generate", stream_body).events
        port = str(server.server.port)
    arguments = [str(toy / "run"), port, json.dumps(bodies), str(tmp_path / "results"), json.dumps(stream_body)]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True,
        env={**os.environ, "HOME": str(tmp_path)}, timeout=400, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "results").read_text())
    assert results["replicas"] == {"RUNNING": 2}
    assert close(results["answers"], expected)
    assert results["kind"].startswith("text/event-stream") and len(events) > 20
    assert close(list(map(json.loads, results["events"])), events)
    texts = [row[0].text for row in regard.load(toy / "run").generate(toy_words(30, 4), beam=2)]
    assert [answer["results"][0]["hypotheses"][0]["text"] for _, answer in results["answers"][-30:]] == texts
