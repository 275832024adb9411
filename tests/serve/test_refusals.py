"""Refused requests and stalled clients: no client can break or block the server."""

from __future__ import annotations

import base64
import json
import random
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

import pytest

from kit.models import letters
from kit.server import serving
from regard.config import Config, parse
from regard.decode import search_inputs
from regard.model import Model
from regard.run import Run
from regard.serve.bodies import GenerateBody, key_in_body
from regard.serve.worker import BatchAnswerer, Cancelled, WorkerBatch
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

KEY = "k" * 20
ADMIN = "a" * 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("refusals") / "toy"
    letters().save(path)
    return {"toy": path}


@pytest.fixture(scope="module")
def client(runs):
    with serving(runs, max_inputs=500, receive=1.5, deadline=30.0) as client:
        yield client


INVALID_BODIES = [
    ({"inputs": "a", "run": "toy", "beam": 0}, 422, "beam"),
    ({"inputs": "a", "run": "toy", "beam": "5"}, 422, "beam"),
    ({"inputs": "a", "run": "toy", "bream": 5}, 422, "did you mean 'beam'"),
    ({"inputs": "a", "run": "tot"}, 404, "did you mean 'toy'"),
    ({"inputs": []}, 422, "inputs"),
    ({"inputs": [{}], "run": "toy"}, 422, "source: is required"),
    ({"inputs": ["a", {"source": "a", "prefxi": "b"}], "run": "toy"}, 422, "did you mean 'prefix'"),
    ({"run": "toy"}, 422, "inputs: is required"),
    ({"inputs": "a", "run": "toy", "nbest": 3}, 422, "nbest"),
    ({"inputs": ["a"] * 501, "run": "toy"}, 413, "at most 500"),
    ({"inputs": "a", "run": "toy", "beam": 1000, "max_length": 100_000}, 413, "at most"),
    ({"inputs": "a", "run": "toy", "window": 3}, 422, "set by the server"),
    (b'{"inputs": "\\ud800", "run": "toy"}', 400, "not JSON"),
    (b"[1, 2", 400, "not JSON"),
    (b'{"inputs": "a", "beam": 1, "beam": 2}', 422, "beam: occurs twice"),
    (b'{"inputs": [{"source": "a", "source": "b"}]}', 422, "source: occurs twice"),
    (b"\xff\xfe", 400, "not JSON"),
    (b"[" * 100_000, 400, ""),
    (b'{"inputs": "a", "temperature": NaN}', 422, ""),
    (b'{"inputs": "a", "sample": true, "temperature": 1e400}', 422, ""),
]


@pytest.mark.parametrize(("body", "status", "part"), INVALID_BODIES, ids=lambda x: str(x)[:40])
def test_invalid_body_gives_an_error_that_names_the_mistake(client, body, status, part):
    reply = client.post("/v1/generate", body)
    assert reply.status == status, reply.body
    error = reply.json["error"]
    assert set(error) == {"status", "code", "message"} and error["status"] == status and part in error["message"]


def test_unknown_paths_methods_and_content_types_are_refused(client):
    assert client.get("/nothing").status == 404
    assert client.get("/v1/generate").status == 405
    assert client.post("/v1/generate", b"{}", Content_Type="text/plain").status == 415
    assert client.get("/../../etc/passwd").status == 404
    assert client.get("/health/live").status == client.get("/health/ready").status == 200


POST = b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


INVALID_REQUESTS = {
    "a long header": (b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    "a long path": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 431),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(500)) + b"\r\n", 400),
    "another protocol": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "half a body": (POST.replace(b"/translate", b"/v1/score") + b"Content-Length: 99\r\n\r\n{", 408),
    "a length above the limit": (
        POST.replace(b"/translate", b"/v1/score") + b"Content-Length: 999999999\r\n\r\n{",
        413,
    ),
}


@pytest.mark.parametrize("kind", INVALID_REQUESTS)
def test_errors_of_the_http_parser_have_the_same_format(client, kind):
    data, status = INVALID_REQUESTS[kind]
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=20) as connection:
        connection.sendall(data)
        head, _, body = b"".join(iter(lambda: connection.recv(65_536), b"")).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert f" {status} ".encode() in head[:14] and set(error) == {"status", "code", "message"}
    assert error["status"] == status and "aaaa" not in error["message"]


def test_expect_100_continue_is_answered_before_the_body(client):
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=20) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b'{"q": "a"}')
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")


def test_head_equals_get_without_the_body(client):
    for path in ("/", "/openapi.json", "/health/ready", "/v1/models"):
        request = urllib.request.Request(client.url + path, method="HEAD")
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200 and not answer.read() and int(answer.headers["Content-Length"]) > 0


def test_too_large_body_is_refused(runs):
    with serving({"toy": runs["toy"]}, max_body=1000) as client:
        reply = client.post("/v1/generate", {"inputs": "a" * 2000})
        assert reply.status == 413 and reply.json["error"]["code"] == "too_large"


BODIES_WITH_TOO_MANY_VALUES = [
    {"run": "toy", "inputs": [0] * 501},
    {"run": "toy", "inputs": ["a"] * 501},
    {"run": "toy", "inputs": "a", "forbid": [0] * 60_000},
    {"run": "toy", "inputs": [{"source": "a", "require": ["a"] * 60_000}]},
    {"run": "toy", "inputs": [[0]] * 400 + [[[0] * 300] * 200]},
    {f"key{i}": 0 for i in range(1000)},
]


LONG_CONSTRAINTS = [
    {"require": ["n \u02e7\u02e7 " * 20_000]},
    {"forbid": ["a" * 6000], "require_any": ["b" * 6000]},
    {"stop": ["a" * 6000], "inputs": {"source": "an", "forbid": ["b" * 6000]}},
    {"inputs": ["a", {"source": "an", "require": [["a" * 6000, "b"], "c" * 6000]}]},
    {"prefix": "ab" * 200_000},
    {"inputs": {"source": "an", "prefix": "ab" * 200_000}},
    {"inputs": {"source": "an", "features": "N;" * 200_000}},
]


@pytest.mark.parametrize("body", LONG_CONSTRAINTS, ids=lambda x: str(x)[:40])
def test_long_constraints_are_refused_before_any_worker_sees_them(client, body, monkeypatch):
    monkeypatch.setattr(client.server.service, "submit", None)
    for stream in (False, True):
        reply = client.post("/v1/generate", {"inputs": "an", **body, **({"stream": True} if stream else {"beam": 4})})
        assert reply.status in (413, 422), reply.body
        assert stream or ("bytes for an input; at most" in reply.json["error"]["message"] and len(reply.body) < 300)


def test_limit_of_the_server_on_source_length_wins(client, runs):
    reply = client.post("/v1/generate", {"inputs": "a" * 3000, "run": "toy", "max_source": 100_000})
    assert "2048 (max_source)" in str(reply.json["results"])
    with serving({"toy": runs["toy"]}, max_source=20) as client:
        for limit in (5, 20, 100_000):
            reply = client.post("/v1/generate", {"inputs": ["a" * 10, "a" * 30], "max_source": limit})
            short, long = (result["hypotheses"][0] for result in reply.json["results"])
            assert "more than" in long["flags"]["too_long"] and f"{min(limit, 20)} (max_source)" in str(long["flags"])
            assert ("too_long" in short.get("flags", {})) == (limit == 5)
        assert client.post("/v1/score", {"pairs": [{"source": "a" * 30, "target": "b"}]}).json["results"]
        assert "20 (max_source)" in client.post("/translate", {"q": "a" * 30}).json["error"]


def test_embedded_texts_are_bounded_where_the_model_reads_any_length():
    codec = Codec(Tokenizer.train("char", ["abcd"], mask=True))
    stack = {"layers": 1, "width": 16, "heads": 2, "ff": 32, "position": "sinusoid"}
    sizes = {"source_vocab": codec.source_vocab, "target_vocab": codec.source_vocab, "ids": codec.ids.model_dump()}
    config = parse(Config, {"encoder": stack, **sizes}, "test")
    answerer = BatchAnswerer({"toy": Run(config, codec, Model(config).eval(), Path("toy"))})
    texts = [{"source": "abc"}, {"source": "a" * 30}]
    short, long = answerer.answer(WorkerBatch("toy", "embed", '{"max_source": 20}', texts))
    assert len(short["vector"]) == 16 and long == {"error": "source: 30 tokens; at most 20 (max_source)", "status": 422}


LARGE_ANSWERS = [
    {"inputs": "a" * 300, "top_tokens": 1000},
    {"inputs": "a" * 300, "top_tokens": 100, "nbest": 10, "beam": 10},
    {"inputs": ["a"] * 500, "nbest": 150, "beam": 150, "max_length": 100},
    {"inputs": ["a"] * 100, "alternatives": 1000, "min_length": 50},
    {"inputs": "a", "max_length": 90_000, "top_tokens": 10, "stream": True},
    {"inputs": ["a"] * 100, "sample": True, "mbr": 1000, "max_length": 400},
]


@pytest.mark.parametrize("body", LARGE_ANSWERS, ids=lambda x: str(x)[:60])
def test_request_for_a_large_answer_is_refused_before_any_worker_sees_it(client, body, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(client.server.service, "submit", None)
        reply = client.post("/v1/generate", body)
    assert reply.status == 413 and "(--max-answer)" in reply.json["error"]["message"], reply.body


def test_attention_of_an_answer_is_bounded(runs):
    body = {"inputs": "abcd" * 5, "attention": True, "max_length": 20, "min_length": 20}
    with serving({"toy": runs["toy"]}) as client:
        full = client.post("/v1/generate", body)
        page = client.post("/v1/inspect", {"source": "abc"})
        assert full.json["results"][0]["attention"]["maps"] and page.status == 200
    size = len(full.body)
    for most, status in ((2 * size, 200), (size // 2, 422)):
        with serving({"toy": runs["toy"]}, max_answer=most) as client:
            reply = client.post("/v1/generate", body)
            assert reply.status == status, reply.body[:300]
            assert status == 200 or "weights have about" in reply.json["error"]["message"]
            several = client.post("/v1/generate", {**body, "inputs": [body["inputs"]] * 3})
            assert several.status == 422  # the inputs share the limit
            assert client.post("/v1/inspect", {"source": "abc"}).status == (200 if len(page.body) <= most else 413)


def test_random_requests_have_bounded_answers(runs):
    seed = random.randrange(10**9)
    print("seed", seed)
    rng = random.Random(seed)
    values = {
        "beam": [1, 2, 5, 30], "nbest": [1, 2, 5, 30], "top_tokens": [0, 1, 5, 50], "alternatives": [0, 3, 30],
        "mbr": [0, 4, 20], "sample": [True, False], "attention": [True, False], "alignment": [True, False],
        "max_length": [1, 10, 100, 5000], "min_length": [0, 5, 50], "stream": [True, False],
        "max_source": [1, 100_000], "forbid": [["a"], ["ab" * 900], ["ab" * 6000]], "prefix": ["a", "ab" * 6000],
    }  # fmt: skip
    statuses = set()
    with serving({"toy": runs["toy"]}, max_answer=30_000, max_work=100_000) as client:
        for _ in range(60):
            chosen = {name: rng.choice(values[name]) for name in rng.sample(list(values), rng.randrange(4))}
            inputs = ["".join(rng.choices("abcd", k=rng.choice((1, 5, 60)))) for _ in range(rng.choice((1, 3, 40)))]
            reply = client.post("/v1/generate", {"inputs": inputs, **chosen})
            statuses.add(reply.status)
            assert reply.status in (200, 413, 422), (chosen, reply.body[:300])
            assert len(reply.body) < 6 * 30_000, (chosen, len(inputs), len(reply.body))
    assert statuses == {200, 413, 422}


def test_cancelled_batch_ends_before_the_next_input_is_prepared(runs, monkeypatch):
    made = []
    make = search_inputs.make_phrases
    monkeypatch.setattr(search_inputs, "make_phrases", lambda *args: (made.append(args), make(*args))[1])
    answerer = BatchAnswerer({"toy": Run.load(runs["toy"])})
    for kind in ("generate", "stream"):
        made.clear()
        inputs = [{"source": "a", "forbid": [f"{i}ab"]} for i in range(5 if kind == "generate" else 1)]
        limit = len(inputs) // 2
        with pytest.raises(Cancelled):
            answerer.answer(WorkerBatch("toy", kind, "{}", inputs, cancelled=lambda n=limit: len(made) >= n))
        assert len(made) == limit


@pytest.mark.parametrize("body", BODIES_WITH_TOO_MANY_VALUES, ids=lambda x: str(x)[:40])
def test_body_with_too_many_values_is_refused_before_validation(client, body, monkeypatch):
    monkeypatch.setattr(GenerateBody, "model_validate_json", None)
    reply = client.post("/v1/generate", body)
    assert reply.status == 413 and "at most" in reply.json["error"]["message"].replace("more than", "at most")


def test_error_names_the_first_of_several_invalid_inputs(client):
    error = client.post("/v1/generate", {"run": "toy", "inputs": ["a", 1, 2, 3]}).json["error"]
    assert "1" in error["message"] and len(error["message"]) < 1000


def test_full_queue_refuses_a_request_before_reading_its_body(runs):
    head = POST + b"Content-Length: 99\r\n\r\n{"
    with serving({"toy": runs["toy"]}, queue=1000) as client:
        queue = client.server.service.queue
        for cost, full in ((900, False), (999, True)):
            queue.cost += cost
            assert queue.full == full
            with socket.create_connection(("127.0.0.1", client.server.port)) as connection:
                connection.sendall(head)
                connection.settimeout(5 if full else 0.5)
                try:
                    answer = connection.recv(4096)
                except TimeoutError:
                    answer = b""
            queue.cost -= cost
            assert (b" 429 " in answer and b"Retry-After: " in answer) == full, answer


def test_requests_without_a_key_are_refused_except_for_health(runs, tmp_path):
    (tmp_path / "keys").write_text(f"# keys\n{KEY}\nadmin {ADMIN}\n")
    with serving({"toy": runs["toy"]}, keys=str(tmp_path / "keys")) as client:
        bearer = f"Bearer {KEY}"
        basic = "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode()
        body = {"inputs": "abc"}
        for path in ("/v1/models", "/metrics", "/openapi.json", "/languages", "/nothing", "/"):
            assert client.get(path).status == 401, path
            assert client.get(path, Authorization=bearer).status in (200, 404)
        assert client.post("/v1/generate", body).status == 401
        assert client.post("/v1/generate", body, Authorization=bearer).status == 200
        assert client.post("/v1/generate", body, Authorization=basic).status == 200
        assert client.post("/v1/generate", body, Authorization=bearer + "x").status == 401
        assert client.post("/translate", {"q": "abc", "api_key": KEY}).status == 200
        assert client.post("/translate", {"q": "abc", "api_key": "wrong"}).status == 401
        assert client.get("/health/ready").status == 200
        assert client.post("/v1/runs/reload", {}, Authorization=bearer).status == 403
        assert client.post("/v1/runs/reload", {}, Authorization=f"Bearer {ADMIN}").status == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": 1',
        b'{"q": "a", "api_key": "wrong-wrong-wrong"}',
        b'{"q": "a", "api_key": "%s"}' % KEY[:-1].encode(),
        b'{"api_key": 5}',
        b'{"%s": 1}' % (b"k" * 990_000),
        b"[" * 100_000,
        b'"api_key":"' * 80_000,
    ],
    ids=lambda body: str(body)[:40],
)
def test_body_without_a_key_is_not_parsed(runs, tmp_path, body, monkeypatch):
    monkeypatch.setattr("regard.serve.bodies.parse_body", None)
    (tmp_path / "keys").write_text(KEY)
    with serving({"toy": runs["toy"]}, keys=str(tmp_path / "keys")) as client:
        for path in ("/translate", "/v1/generate", "/nothing"):
            reply = client.post(path, body)
            assert reply.status == 401 and len(reply.body) < 300, reply.body


def test_key_in_a_body_is_found_in_json_and_forms():
    key = "/a+b=c&d" * 3
    form = f'--x\r\nContent-Disposition: form-data; name="api_key"\r\n\r\n{key}\r\n--x--\r\n'
    for body in (json.dumps({"q": '"api_key":"', "api_key": key}), urlencode({"q": "a", "api_key": key}), form):
        assert key_in_body(body.encode()) == key
    assert key_in_body(json.dumps({"api_key": key}).replace("/", "\\/").encode()) == key
    assert key_in_body(b"") == key_in_body(b'{"q": "api_key"}') == ""


def test_long_names_are_not_repeated_in_errors(client):
    for body in ({"inputs": "a", "k" * 100_000: 1}, {"inputs": [{"source": "a", "k" * 100_000: 1}]}):
        reply = client.post("/v1/generate", body)
        assert reply.status == 422 and "k" * 100 in reply.json["error"]["message"] and len(reply.body) < 2000
    assert len(client.post("/v1/generate", {"inputs": "a", "run": "k" * 200}).body) < 300
    assert len(client.get("/" + "k" * 5000).body) < 300


HOSTS = [
    ("localhost", True), ("LOCALHOST.:80", True), ("a.localhost:9", True), ("127.0.0.1", True), ("10.1.2.3:80", True),
    ("[::1]:8000", True), ("", True), (socket.gethostname(), True), ("models.example", True), ("MODELS.example", True),
    ("evil.example", False), ("evil.example:8000", False), ("localhost.evil.example", False), ("127.0.0.1.evil", False),
    ("a@localhost:80:80", False), ("models.example.evil", False), ("notlocalhost", False), ("e" * 5000, False),
]  # fmt: skip


def test_pages_of_other_host_names_are_refused_without_keys(runs, tmp_path):
    """DNS rebinding: the page of a web site whose name leads to this machine."""
    with serving({"toy": runs["toy"]}, host_name=("Models.example",)) as client:
        for host, known in HOSTS:
            for reply in (
                client.get("/v1/models", Host=host, Origin=f"http://{host}"),
                client.post("/v1/generate", {"inputs": "a"}, Host=host, Origin=f"http://{host}"),
            ):
                assert reply.status == (200 if known else 421), (host, reply.body)
                assert known or ("--host-name NAME" in reply.json["error"]["message"] and len(reply.body) < 400)
            assert client.get("/health/live", Host=host).status == 200
    with serving({"toy": runs["toy"]}, host_name=("*",)) as client:
        assert client.get("/v1/models", Host="evil.example").status == 200
    (tmp_path / "keys").write_text(KEY)
    with serving({"toy": runs["toy"]}, keys=str(tmp_path / "keys")) as client:
        assert client.get("/v1/models", Host="evil.example").status == 401
        assert client.get("/v1/models", Host="evil.example", Authorization=f"Bearer {KEY}").status == 200


def test_no_answer_names_versions_of_software(client):
    answers = [client.get("/"), client.get("/nothing"), client.post("/v1/generate", {"inputs": "a", "stream": True})]
    assert {answer.headers["Server"] for answer in answers} == {"regard"}
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=20) as connection:
        connection.sendall(b"not HTTP\r\n\r\n")
        head = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert b"Server: regard\r\n" in head and b"iohttp" not in head


def test_only_configured_origins_are_allowed(runs):
    with serving({"toy": runs["toy"]}, cors=("https://a.example",)) as client:
        allowed = client.get("/v1/models", Origin="https://a.example").headers
        assert allowed["Access-Control-Allow-Origin"] == "https://a.example"
        assert client.get("/v1/models", Origin="https://b.example").headers["Access-Control-Allow-Origin"] is None


def test_full_queue_refuses_requests_with_retry_after(runs):
    with serving({"toy": runs["toy"]}, queue=20, workers=1) as client:
        with ThreadPoolExecutor(24) as threads:
            replies = list(
                threads.map(lambda i: client.post("/v1/generate", {"inputs": "abcd" * 3, "beam": 8}), range(72))
            )
        statuses = {reply.status for reply in replies}
        assert statuses == {200, 429}
        assert all(int(reply.headers["Retry-After"]) >= 1 for reply in replies if reply.status == 429)
        assert client.post("/v1/generate", {"inputs": "abc"}).status == 200


def test_request_past_its_deadline_is_answered_and_stopped(runs):
    with serving({"toy": runs["toy"]}, deadline=0.4) as client:
        start = time.monotonic()
        slow = {"inputs": ["abcd" * 20] * 200, "beam": 50, "min_length": 400, "max_length": 450}
        reply = client.post("/v1/generate", slow)
        assert reply.status == 504
        while (status := client.post("/v1/generate", {"inputs": "a"}).status) == 504:
            assert time.monotonic() - start < 10, "the expired request still occupies the worker"
        assert status == 200


STALLS = {
    "silent": b"",
    "half a header": b"POST /v1/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b",
    "half a body": (
        b"POST /v1/generate HTTP/1.1\r\nHost: 10.1.2.3\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    ),
}


@pytest.mark.parametrize("kind", STALLS)
@pytest.mark.parametrize("trickle", [False, True])
def test_stalled_clients_are_disconnected(client, kind, trickle):
    with socket.create_connection(("127.0.0.1", client.server.port)) as connection:
        connection.sendall(STALLS[kind])
        connection.settimeout(0.2)
        start = time.monotonic()
        while time.monotonic() - start < 20:
            try:
                if trickle and STALLS[kind]:
                    connection.sendall(b" ")
                if not connection.recv(4096):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() - start < 10  # 1.5 seconds, plus delays on a busy machine


@pytest.mark.parametrize(
    ("proxies", "forwarded", "expected"),
    [
        ((), "1.2.3.4", "127.0.0.1"),
        (("127.0.0.1",), "1.2.3.4", "1.2.3.4"),
        (("127.0.0.0/8",), "6.6.6.6, 1.2.3.4, 127.0.0.9", "1.2.3.4"),
        (("127.0.0.1",), "<script>", "127.0.0.1"),
        (("10.0.0.1",), "1.2.3.4", "127.0.0.1"),
    ],
)
def test_log_trusts_only_configured_proxies(runs, caplog, proxies, forwarded, expected):
    with caplog.at_level("INFO", "regard.serve"), serving({"toy": runs["toy"]}, proxy=proxies) as client:
        client.get("/health/live", **{"X-Forwarded-For": forwarded})
    assert any(line.startswith(f"{expected} GET /health/live 200 ") for line in caplog.messages)


def test_empty_run_name_is_refused(runs):
    with serving({"toy": runs["toy"]}) as client:
        assert client.post("/v1/generate", {"inputs": "a", "run": ""}).status == 404
        assert client.post("/v1/generate", {"inputs": "a", "run": None}).status == 200
