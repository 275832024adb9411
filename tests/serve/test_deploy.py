"""The examples for containers, systemd and Kubernetes pass their linters, and all packages are pinned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import regard
from regard.serve.settings import ServeSettings

ROOT = Path(__file__).parent.parent.parent
LEFT_OUT = {"torch", "huggingface-hub"}  # of the packages in deploy/native.lock


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


def test_systemd_unit_is_restricted():
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    run("systemd-analyze", "security", "--offline=true", "--threshold=20", ROOT / "deploy/regard.service")  # 2.0 of 10
    assert (
        "\nMemoryDenyWriteExecute" not in (ROOT / "deploy/regard.service").read_text()
    )  # CTranslate2 would compute garbage


def test_kubernetes_manifests_are_valid():
    validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    manifests = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
    assert {manifest["kind"] for manifest in manifests} == {"Service", "Deployment"}
    for manifest in manifests:
        validate.validate(manifest, "1.31", strict=True)


def test_kubernetes_image_has_the_version_of_the_package():
    tags = re.findall(r"image: \S+/regard:(\S+)", (ROOT / "deploy/kubernetes.yaml").read_text())
    assert tags == [regard.__version__]


def test_server_does_not_run_as_root_and_writes_only_to_tmp():
    lines = (ROOT / "Containerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 65532"]
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
    yaml = pytest.importorskip("yaml")
    deployment = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))[1]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert [x["mountPath"] for x in container["volumeMounts"] if not x.get("readOnly")] == ["/tmp"]
    unit = (ROOT / "deploy/regard.service").read_text()
    assert "DynamicUser=yes" in unit and "ProtectSystem=strict" in unit and "PrivateTmp=yes" in unit


@pytest.mark.parametrize("name", ["Containerfile", "deploy/regard.service", "deploy/kubernetes.yaml"])
def test_options_in_the_examples_exist(name):
    (line,) = re.findall(r"(?m)^ *(?:ENTRYPOINT |ExecStart=|args: ).*", (ROOT / name).read_text())
    options = set(re.findall(r"--([a-z-]+)", line))
    assert options
    assert options <= {field.replace("_", "-") for field in ServeSettings.model_fields}


def closure(requirements: list[str], without: Collection[str] = ()) -> set[str]:
    """Names of all packages that these requirements need in this environment, directly or through others."""
    names: set[str] = set()
    visited: set[tuple[str, str]] = set()
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in without:
            continue
        names.add(name)
        for extra in ["", *requirement.extras]:
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            try:
                further = [Requirement(text) for text in distribution(name).requires or ()]
            except PackageNotFoundError:
                continue
            pending += [each for each in further if each.marker is None or each.marker.evaluate({"extra": extra})]
    return names


def requirements_of(*extras: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]


def pins(name: str) -> dict[str, str]:
    """Package -> version, without the local part, of a file of pinned packages."""
    text = re.sub(r"(?m)^#.*|\\\n|--hash=\S+", "", (ROOT / name).read_text())
    requirements = [Requirement(line) for line in text.splitlines() if line.strip()]
    assert all(re.fullmatch(r"==[^*,]+", str(requirement.specifier)) for requirement in requirements)
    return {canonicalize_name(each.name): str(each.specifier)[2:].partition("+")[0] for each in requirements}


def test_constraints_pin_every_package_of_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = closure(requirements_of(*extras))
    assert len(packages) > 80
    assert packages - set(pins("constraints.txt")) == set()


@pytest.mark.parametrize(
    "name, extras, without", [("requirements", ["serve", "ctranslate2"], ()), ("native", ["serve"], LEFT_OUT)]
)
def test_lock_file_has_every_package_of_the_server_with_a_hash(name, extras, without):
    locked = pins(f"deploy/{name}.lock")
    packages = closure(requirements_of(*extras), without)
    assert packages <= set(locked)
    constraints = pins("constraints.txt")
    assert {name: version for name, version in locked.items() if constraints.get(name, version) != version} == {}
    text = (ROOT / f"deploy/{name}.lock").read_text()
    assert len(re.findall(r"(?m)^[a-z][^\n]*== *\S+ \\\n    --hash=sha256:[0-9a-f]{64}( |$)", text)) == len(locked)
    assert re.findall(r"torch==\S+", text) == ([] if without else [f"torch=={locked['torch']}+cpu"])


def test_lock_files_have_the_same_packages():
    native, full = ((ROOT / f"deploy/{name}.lock").read_text() for name in ("native", "requirements"))
    entries = re.findall(r"(?m)^[a-z].*(?:\n +--hash=.*)+", native)
    assert len(entries) == len(pins("deploy/native.lock"))
    assert all(entry + "\n" in full for entry in entries)


def test_image_has_packages_with_hashes_and_no_build_tools():
    text = (ROOT / "Containerfile").read_text()
    assert "ARG LOCK=native.lock" in text and "--require-hashes" in text
    (names,) = re.findall(r"uninstall --yes \\\n +(.*) \\\n", text)
    used = closure(requirements_of("serve", "ctranslate2"))  # with torch
    assert set(pins("deploy/native.lock")) - used == set(names.split())


def test_server_needs_no_package_that_its_image_leaves_out():
    pytest.importorskip("regard_native")
    program = """
import sys
sys.modules |= dict.fromkeys(("torch", "huggingface_hub"))
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
import regard.cli.app, regard.serve.server, regard.serve.worker, regard_native, tokenizers
"""
    run(sys.executable, "-c", program)
