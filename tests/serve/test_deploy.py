"""The examples for containers, systemd and Kubernetes pass their linters, and their options exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from regard.serve.settings import ServeSettings

ROOT = Path(__file__).parent.parent.parent


def run(*command: object) -> str:
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_containerfile_passes_hadolint():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    run(hadolint, ROOT / "Containerfile")


def test_systemd_unit_passes_systemd_analyze(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = (ROOT / "deploy/regard.service").read_text()
    assert "ExecStart=/opt/regard/bin/regard" in text
    text = text.replace("/opt/regard/bin/regard", "/bin/true")  # the verifier requires an existing program
    (tmp_path / "regard.service").write_text(text)
    run("systemd-analyze", "verify", "--man=no", tmp_path / "regard.service")


def test_kubernetes_manifests_are_valid():
    validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    manifests = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
    assert {manifest["kind"] for manifest in manifests} == {"Service", "Deployment"}
    for manifest in manifests:
        validate.validate(manifest, "1.31", strict=True)


def test_server_does_not_run_as_root_and_writes_only_to_tmp():
    lines = (ROOT / "Containerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
    yaml = pytest.importorskip("yaml")
    deployment = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))[1]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert [x["mountPath"] for x in container["volumeMounts"] if not x.get("readOnly")] == ["/tmp"]
    unit = (ROOT / "deploy/regard.service").read_text()
    assert "DynamicUser=yes" in unit and "ProtectSystem=strict" in unit and "PrivateTmp=yes" in unit


@pytest.mark.parametrize("name", ["Containerfile", "deploy/regard.service", "deploy/kubernetes.yaml"])
def test_options_in_the_examples_exist(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    options = set(re.findall(r"(?<![\w-])--(host|port|public|keys|workers|drain|[a-z]+)\b", "\n".join(lines)))
    others = {"from", "system", "uid", "no", "shell", "interval", "timeout", "start"}  # options of other programs
    assert options - others <= {field.replace("_", "-") for field in ServeSettings.model_fields}
