"""The server over HTTP: its answers equal those of the library, even after its processes are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import regard
from kit.models import family, letters
from kit.server import Client, serving
from kit.toy import strict_json
from regard.decode.ctranslate2 import CTranslate2Engine
from regard.decode.request import Options

ADMIN = "a" * 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve")
    new_runs = {"toy": letters(), "lm": family("lm"), "cls": family("classes"), "mlm": family("masked")}
    for name, run in new_runs.items():
        run.save(path / name)
    return {name: path / name for name in new_runs}


@pytest.fixture(scope="module")
def client(runs):
    with serving(runs, max_inputs=500, receive=1.5, deadline=30.0) as client:
        yield client


WORDS = ["abc", "bcd", "cabba", "dab", "ab ba", "a", "dcba" * 3]
OPTIONS = [
    {},
    {"beam": 4, "nbest": 3},
    {"sample": True, "seed": 7, "nbest": 2, "temperature": 0.7, "top_k": 4},
    {"mbr": 4, "seed": 3},
    {"alternatives": 3},
    {"beam": 3, "require": ["ab"], "forbid": ["c"]},
    {"alignment": True, "top_tokens": 2},
    {"prefix": "ab", "max_length": 9},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(x) or "greedy")
def test_generate_equals_the_library(client, runs, options):
    expected = [[h.as_dict() for h in row] for row in regard.load(runs["toy"]).generate(WORDS, **options)]
    reply = client.post("/v1/generate", {"run": "toy", "inputs": WORDS, **options})
    assert reply.status == 200, reply.body
    assert same([result["hypotheses"] for result in strict_json(reply.body.decode())["results"]], expected)


def same(one, other, tolerance: float = 1e-5) -> bool:
    """Whether two answers are equal up to the rounding errors that docs/serve.md allows."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return one == pytest.approx(other, rel=tolerance, abs=tolerance) if isinstance(one, float) else one == other


def test_inputs_of_a_request_may_have_different_constraints(client, runs):
    item = {"source": "abc", "prefix": "ba", "forbid": ["d"], "max_length": 6}
    expected = regard.load(runs["toy"]).generate([regard.Request(**item)])[0][0]
    assert (
        client.post("/v1/generate", {"run": "toy", "inputs": [item, "a"]}).json["results"][0]["hypotheses"][0]["text"]
        == expected.text
    )


def test_concurrent_requests_share_batches_without_changing_answers(runs):
    with serving({"toy": runs["toy"]}, workers=1) as client:
        single_results = {word: client.post("/v1/generate", {"inputs": word}).json["results"][0] for word in WORDS}
        before = client.server.service.numbers.batches
        with ThreadPoolExecutor(16) as threads:
            replies = list(
                threads.map(lambda word: (word, client.post("/v1/generate", {"inputs": word}).json), WORDS * 12)
            )
        assert all(same(reply["results"][0], single_results[word]) for word, reply in replies)
        assert client.server.service.numbers.batches - before < len(replies)


def test_stream_pieces_join_to_the_output(client, runs):
    for options in ({}, {"sample": True, "seed": 5}, {"stop": ["c"]}):
        output = regard.load(runs["toy"]).generate(["cabba"], **options)[0][0]
        events = client.post("/v1/generate", {"run": "toy", "inputs": "cabba", "stream": True, **options}).events
        assert "".join(event["piece"]["text"] for event in events[:-1]) == output.text
        assert same(events[-1]["result"]["hypotheses"][0], output.as_dict())
    assert client.post("/v1/generate", {"run": "toy", "inputs": "a", "stream": True, "beam": 2}).status == 422
    assert client.post("/v1/generate", {"run": "toy", "inputs": ["a", "b"], "stream": True}).status == 422


def test_score_classify_embed_and_inspect_equal_the_library(client, runs):
    score = client.post("/v1/score", {"run": "toy", "pairs": [{"source": "abc", "target": "cab"}]}).json["results"]
    assert score[0]["score"] == pytest.approx(regard.load(runs["toy"]).score([("abc", "cab")])[0].score)
    label = client.post("/v1/classify", {"inputs": ["abc", "dab"]}).json["results"]
    assert [x["label"] for x in label] == [c.label for c in regard.load(runs["cls"]).classify(["abc", "dab"])]
    vector = client.post("/v1/embed", {"inputs": ["abc"]}).json["results"][0]["vector"]
    assert vector == pytest.approx(regard.load(runs["mlm"]).embed(["abc"])[0].tolist())
    result = client.post("/v1/generate", {"run": "mlm", "inputs": "a<mask>c", "top_tokens": 3}).json["results"][0]
    expected = regard.load(runs["mlm"]).generate(["a<mask>c"], top_tokens=3)[0]
    assert same(result["hypotheses"], [h.as_dict() for h in expected])
    page = client.post("/v1/inspect", {"run": "toy", "source": "abc<b>"}).json["html"]
    assert page.startswith("<!doctype html>") and "abc<b>" not in page
    assert client.post("/v1/classify", {"run": "toy", "inputs": ["a"]}).status == 422
    refusal = client.post("/v1/generate", {"run": "mlm", "inputs": "a<mask>", "beam": 2})
    assert refusal.status == 422 and str(runs["mlm"].parent) not in refusal.body.decode()


def test_attention_is_returned_with_the_output(client, runs):
    body = {"run": "toy", "inputs": ["abc"], "max_length": 5, "attention": True}
    result = client.post("/v1/generate", body).json["results"][0]
    trace = regard.load(runs["toy"]).attention("abc", result["hypotheses"][0]["text"])
    assert {m["name"] for m in result["attention"]["maps"]} == {m.name for m in trace.maps}
    assert result["attention"]["tokens"] == {name: list(row) for name, row in trace.tokens.items()}
    for actual, expected in zip(result["attention"]["maps"], trace.maps, strict=True):
        assert same(actual["weights"], expected.weights_HTS.tolist(), tolerance=1e-4)
    assert client.post("/v1/generate", body | {"stream": True}).status == 422


def test_invalid_input_does_not_affect_other_inputs(client):
    texts = ["abc", {"source": "b", "features": "V"}, "dab"]
    first, invalid, last = client.post("/v1/generate", {"run": "toy", "inputs": texts}).json["results"]
    assert "features" in json.dumps(invalid.get("error") or invalid["hypotheses"][0]["flags"]["error"])
    for result, text in ((first, "abc"), (last, "dab")):
        assert same(result, client.post("/v1/generate", {"run": "toy", "inputs": text}).json["results"][0])


def test_metrics_contain_no_text_of_requests(client):
    client.post("/v1/generate", {"run": "toy", "inputs": "cabba"})
    text = client.get("/metrics").body.decode()
    assert 'regard_requests_total{path="/v1/generate",status="200"}' in text and "cabba" not in text
    samples = {x.name: x for family in text_string_to_metric_families(text) for x in family.samples if x.labels}
    assert samples["regard_request_seconds_count"].value >= 1 and samples["regard_batch_inputs_count"].value >= 1
    assert samples["regard_request_seconds_bucket"].labels["le"] == "+Inf"  # the last bucket counts all values
    assert {name for x in samples.values() for name in x.labels} == {"path", "status", "run", "kind", "le"}
    client.get("/secret-path")
    assert "secret" not in client.get("/metrics").body.decode()


def test_disconnecting_client_cancels_its_request(client):
    body = json.dumps({"run": "toy", "inputs": ["abcd" * 20] * 200, "beam": 20, "min_length": 200, "max_length": 250})
    with socket.create_connection(("127.0.0.1", client.server.port)) as connection:
        connection.sendall(
            b"POST /v1/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body.encode())
        )
        service = client.server.service
        wait_for(lambda: not service.idle)
    wait_for(lambda: service.idle)


def test_killed_worker_is_replaced_and_every_request_is_answered(runs):
    with serving({"toy": runs["toy"]}, workers=2) as client, ThreadPoolExecutor(8) as threads:
        service = client.server.service
        body = {"inputs": ["abcd" * 5] * 3, "beam": 5}
        expected = client.post("/v1/generate", body).json
        pending = [threads.submit(client.post, "/v1/generate", body) for _ in range(16)]
        wait_for(lambda: not service.idle)
        os.kill(service._pool.workers[0].pid, signal.SIGKILL)
        replies = [each.result(60) for each in pending]
        assert {reply.status for reply in replies} <= {200, 503}
        assert all(same(reply.json, expected) for reply in replies if reply.status == 200)
        os.kill(service._pool.workers[0].pid, signal.SIGKILL)  # an idle worker is replaced too
        wait_for(lambda: service.numbers.restarts == 2 and service.workers == 2, seconds=5)
        assert same(client.post("/v1/generate", body).json, expected)


def test_killed_template_is_restarted(runs):
    with serving({"toy": runs["toy"]}, workers=1) as client:
        service = client.server.service
        service._pool._template._process.kill()
        time.sleep(0.1)
        os.kill(service._pool.workers[0].pid, signal.SIGKILL)
        wait_for(lambda: service.numbers.restarts == 1 and service.workers == 1, seconds=30)
        assert client.post("/v1/generate", {"inputs": "abc"}).status == 200


def test_processes_end_when_the_server_stops(runs):
    with serving({"toy": runs["toy"]}, workers=2) as client:
        pool = client.server.service._pool
        pids = [pool._template._process.pid, *(worker.pid for worker in pool.workers)]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        start = time.monotonic()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() - start < 10


def test_workers_have_the_priority_of_the_option(runs):
    for nice in (0, 7):
        with serving({"toy": runs["toy"]}, nice=nice) as client:
            (worker,) = client.server.service._pool.workers
            expected = min(19, os.nice(0) + nice)
            wait_for(lambda: os.getpriority(os.PRIO_PROCESS, worker.pid) == expected, seconds=10)  # noqa: B023


def test_processes_end_when_the_server_is_killed(runs):
    command = [sys.executable, "-m", "regard", "serve", str(runs["toy"]), "--port", "0", "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        while not server.stderr.readline().startswith("serving"):
            assert server.poll() is None
        (template,) = children(server.pid)
        pids = [template, *children(template)]
        assert len(pids) == 3
        server.kill()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_reload_serves_the_new_weights_and_drops_no_request(runs, tmp_path):
    path = tmp_path / "run"
    letters().save(path)
    (tmp_path / "keys").write_text(f"admin {ADMIN}\n")
    with serving({"toy": path}, keys=str(tmp_path / "keys")) as client:
        bearer = f"Bearer {ADMIN}"
        statuses = []
        stop = threading.Event()

        def send_requests() -> None:
            while not stop.is_set():
                statuses.append(client.post("/v1/generate", {"inputs": "abc"}, Authorization=bearer).status)

        sender = threading.Thread(target=send_requests)
        sender.start()
        new_run = letters(layers=1)
        new_run.save(path)
        assert client.post("/v1/runs/reload", {}, Authorization=bearer).status == 200
        reply = client.post("/v1/generate", {"inputs": "abc"}, Authorization=bearer)
        hypothesis = reply.json["results"][0]["hypotheses"][0]
        (path / "config.json").write_text("{}")
        refusal = client.post("/v1/runs/reload", {}, Authorization=bearer)
        assert refusal.status == 422 and "the old runs stay" in refusal.json["error"]["message"]
        stop.set()
        sender.join()
        assert hypothesis["text"] == best_text(new_run) and set(statuses) == {200}


def best_text(run) -> str:
    from regard.decode.torch_engine import generate

    return next(iter(generate(run, ["abc"])))[0].text


def test_stopping_server_answers_all_accepted_requests(runs):
    with serving({"toy": runs["toy"]}, workers=1) as client, ThreadPoolExecutor(9) as threads:
        body = {"inputs": ["abcd" * 5] * 5, "beam": 5}
        pending = [threads.submit(client.post, "/v1/generate", body) for _ in range(8)]
        wait_for(lambda: not client.server.service.idle)
        stopping = threads.submit(client.wait, client.server.stop())
        wait_for(lambda: client.server.handlers.draining)
        reply = client.get("/health/ready")
        assert reply.status == 503 and reply.headers["Connection"] == "close"
        assert {each.result(60).status for each in pending} == {200}
        stopping.result(60)


def wait_for(condition, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_api_description_contains_every_route(client: Client):
    """Its schema references resolve too."""
    api = client.get("/openapi.json").json
    assert {route.path for route in client.server.routes} == set(api["paths"])
    text = json.dumps(api)
    for name in set(part.split('"')[0] for part in text.split("#/components/schemas/")[1:]):
        assert name in api["components"]["schemas"]


def test_torch_answers_requests_that_ctranslate2_does_not_support(runs):
    pytest.importorskip("ctranslate2")
    with serving({"toy": runs["toy"]}, engine="ctranslate2", workers=2) as client:
        service = client.server.service
        assert len({worker.pid for worker in service._pool.workers}) == 1  # one process; its threads share the weights
        expected = regard.load(runs["toy"]).generate(WORDS, beam=3, max_length=8)
        with ThreadPoolExecutor(8) as threads:
            body = {"inputs": WORDS, "beam": 3, "max_length": 8}
            replies = list(threads.map(lambda _: client.post("/v1/generate", body), range(16)))
        for reply in replies:
            assert [x["hypotheses"][0]["text"] for x in reply.json["results"]] == [row[0].text for row in expected]
            assert all("engine" not in x for x in reply.json["results"])
        torch_result = client.post("/v1/generate", {"inputs": "abc", "forbid": ["d"]}).json["results"][0]
        assert torch_result["engine"] == "torch" and "d" not in torch_result["hypotheses"][0]["text"]


@pytest.mark.parametrize("options", [{}, {"beam": 3, "nbest": 2}, {"prefix": "ab", "max_length": 5}], ids=str)
def test_ctranslate2_texts_equal_those_of_its_hypotheses(runs, options):
    pytest.importorskip("ctranslate2")
    sources = [*WORDS, "", " ", "zz", "ab" * 2000, *WORDS[::-1], "   ", "cab"]  # some of the same length
    with CTranslate2Engine(regard.load(runs["toy"]), Options(**options)) as engine:
        assert engine.texts(sources) == [[h.text for h in row] for row in engine(sources)]


def test_output_that_reaches_max_length_is_searched_only_once(runs):
    pytest.importorskip("ctranslate2")
    with CTranslate2Engine(regard.load(runs["toy"]), Options(max_length=2)) as engine:
        searches = []
        engine._translate = lambda *args: searches.append(args) or CTranslate2Engine._translate(engine, *args)
        (hypothesis,) = engine(["abc"])[0]
        assert "max_length" in hypothesis.flags and len(searches) == 1


def test_examples_of_the_documentation_work(runs):
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text("utf-8")
    requests = re.findall(r"^curl localhost:8000(\S+) .*?-d '([^']*)'", text, re.MULTILINE | re.DOTALL)
    programs = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    with serving({"g2p": runs["toy"], "en-de": runs["toy"], "shakespeare": runs["lm"]}) as client:
        assert len(requests) == 1
        for path, body in requests:
            assert client.post(path, body.encode()).status == 200, body
        assert len(programs) == 2
        for program, library in zip(programs, ("libretranslatepy", "openai"), strict=True):
            pytest.importorskip(library)
            exec(program.replace("http://127.0.0.1:8000", client.url), {})


def test_stream_is_not_restarted_when_its_worker_is_killed(runs):
    with serving({"lm": runs["lm"]}, workers=1, engine="torch") as client, ThreadPoolExecutor(1) as threads:
        service = client.server.service
        body = {"inputs": "abab", "stream": True, "min_length": 90, "max_length": 100, "sample": True, "seed": 1}
        pending = threads.submit(client.post, "/v1/generate", body)
        wait_for(lambda: any(x.batch.entries[0][0].started for x in list(service._running.values())))
        os.kill(service._pool.workers[0].pid, signal.SIGKILL)
        events = pending.result(60).events
        assert len(events) < 100 and events[-1]["error"]["status"] == 503 and all("piece" in x for x in events[:-1])
