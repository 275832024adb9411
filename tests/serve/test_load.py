"""Short runs of bench/serve.py: overload, soak, SIGTERM under load, stalled clients, invalid requests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.models import letters

ROOT = Path(__file__).parent.parent.parent
WORDS = ["abc", "bcd", "cabba", "dab", "ab ba", "a", "dcba" * 3]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    path = tmp_path_factory.mktemp("load")
    letters().save(path / "run")
    (path / "lines").write_text("\n".join(WORDS) + "\n")

    def run(what: str, *options: object) -> dict[str, Any]:
        command = [sys.executable, ROOT / "bench/serve.py", what, path / "run", "--lines", path / "lines", *options]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


def test_more_than_the_server_can_answer_is_refused_and_nothing_else_happens(bench):
    found = bench("overload", "--seconds", 4, "--clients", 200, "--times", 10, "--queue", 600, "--beam", 4)
    assert set(found["statuses"]) == {"200", "429"} and found["times_capacity"] > 1, found
    assert found["refused"]["p50_ms"] < found["capacity"]["p50_ms"]  # a refusal does not wait in the queue


def test_contenders_take_turns_and_ratios_are_those_of_a_round(bench):
    for name in ("ctranslate2", "fastapi", "uvicorn"):
        pytest.importorskip(name)
    found = bench("compare", "--seconds", 0.5, "--rounds", 2, "--beam", 2, "--clients-of-compare", "1,4")
    assert set(found["clients"]) == {"1", "4"}
    for servers in found["clients"].values():
        assert set(servers) == {"regard", "wrapper", "one at a time"}
        assert all(set(row["statuses"]) == {"200"} for row in servers.values()), servers
        assert servers["regard"]["ours_over_it"] == {"median": 1, "least": 1, "most": 1}
        assert all(x["least"] <= x["median"] <= x["most"] for x in (row["ours_over_it"] for row in servers.values()))


def test_one_line_is_answered_beside_a_thousand(bench):
    found = bench("fairness", "--seconds", 1, "--rounds", 1, "--beam", 1)
    assert len(found["rounds"]) == 1 and found["p99_ratio"]["median"] > 0


@pytest.mark.slow  # ten seconds; the other load tests exercise the same server
def test_a_soak_has_no_error(bench):
    pytest.importorskip("ctranslate2")
    assert bench("soak", "--requests", 1000)["statuses"] == {"200": 1000}


def test_sigterm_under_load_loses_nothing(bench):
    found = bench("stop", "--rounds", 2)
    assert found["lost"] == 0 and found["exit_codes"] == {"0": 2}, found


def test_stalled_clients_are_let_go_while_others_are_answered(bench):
    found = bench("stalled", "--clients", 50, "--seconds", 2, "--timeout", 2)
    assert set(found["statuses"]) == {"200"} and all(x < 20 for x in found["closed_within_s"].values()), found


def test_requests_drawn_from_the_description_of_the_api_meet_no_server_error(bench):
    folder = Path(sys.executable).parent
    if not shutil.which("schemathesis", path=str(folder)):
        pytest.skip("schemathesis is not installed")
    assert bench("schema", "--requests", 5, "--phases", "fuzzing")["exit_code"] == 0
