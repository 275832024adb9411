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

    def run(experiment: str, *options: object) -> dict[str, Any]:
        script = ROOT / "bench/serve.py"
        command = [sys.executable, script, experiment, path / "run", "--lines", path / "lines", *options]
        process = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
        assert process.returncode == 0, process.stderr[-3000:]
        return json.loads(process.stdout)

    return run


def test_overloaded_server_refuses_excess_requests_without_other_errors(bench):
    report = bench("overload", "--seconds", 2, "--clients", 200, "--times", 10, "--queue", 600, "--beam", 4)
    assert set(report["statuses"]) == {"200", "429"} and report["times_capacity"] > 1, report
    assert report["refused"]["p50_ms"] < report["capacity"]["p50_ms"]  # a refusal does not wait in the queue


def test_comparison_reports_ratios_for_every_server(bench):
    for name in ("ctranslate2", "fastapi", "uvicorn"):
        pytest.importorskip(name)
    report = bench("compare", "--seconds", 0.5, "--rounds", 2, "--beam", 2, "--clients-of-compare", "1,4")
    assert set(report["clients"]) == {"1", "4"}
    for servers in report["clients"].values():
        assert set(servers) == {"regard", "wrapper", "one at a time"}
        assert all(set(row["statuses"]) == {"200"} for row in servers.values()), servers
        assert servers["regard"]["ours_over_it"] == {"median": 1, "least": 1, "most": 1}
        assert all(x["least"] <= x["median"] <= x["most"] for x in (row["ours_over_it"] for row in servers.values()))


@pytest.mark.slow  # eight seconds; test_schedule.py has the order of the jobs
def test_single_line_is_answered_during_a_large_request(bench):
    report = bench("fairness", "--seconds", 1, "--rounds", 1, "--beam", 1)
    assert len(report["rounds"]) == 1 and report["p99_ratio"]["median"] > 0


@pytest.mark.slow  # ten seconds; the other load tests exercise the same server
def test_soak_has_no_error(bench):
    pytest.importorskip("ctranslate2")
    assert bench("soak", "--requests", 1000)["statuses"] == {"200": 1000}


def test_sigterm_under_load_loses_no_request(bench):
    report = bench("stop", "--rounds", 2)
    assert report["lost"] == 0 and report["exit_codes"] == {"0": 2}, report


@pytest.mark.slow  # nine seconds; test_refusals.py has the same clients one by one
def test_stalled_clients_are_disconnected_while_others_are_answered(bench):
    report = bench("stalled", "--clients", 50, "--seconds", 2, "--timeout", 2)
    assert set(report["statuses"]) == {"200"} and all(x < 20 for x in report["closed_within_s"].values()), report


def test_requests_generated_from_the_api_schema_cause_no_server_error(bench):
    folder = Path(sys.executable).parent
    if not shutil.which("schemathesis", path=str(folder)):
        pytest.skip("schemathesis is not installed")
    assert bench("schema", "--requests", 5, "--phases", "fuzzing")["exit_code"] == 0
