"""The Dockerfile and the shell scripts, as their linters read them."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.docker.isolation import DOCKER
from tests.helpers.processes import ROOT, run

DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")


def linter(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; it comes with the extra dev")
    return found


def test_the_dockerfile_has_no_findings():
    linted = run([linter("hadolint"), "--failure-threshold", "style", DOCKER / "Dockerfile"], 60)
    assert linted.returncode == 0, linted.stdout


def test_the_shell_scripts_have_no_findings():
    scripts = sorted(DOCKER.glob("*.sh"))
    linted = run([linter("shellcheck"), "--external-sources", "--source-path", ROOT, *scripts], 60)
    assert linted.returncode == 0, linted.stdout


def test_bases_are_pinned_by_tag_and_digest():
    images = dict(re.findall(r"^ARG (\w+)_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE))
    digests = dict(re.findall(r"^ARG (\w+)_DIGEST=(sha256:[0-9a-f]{64})$", DOCKERFILE, re.MULTILINE))
    assert images.keys() == digests.keys() != set()
    assert all(re.search(r":[\w.-]*\d", image) for image in images.values())
    for base in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE):
        name = re.fullmatch(r"\$\{(\w+)_IMAGE\}\$\{(\w+)_DIGEST:\+@\$\{(\w+)_DIGEST\}\}", base)
        assert name is None or {*name.groups()} <= images.keys()
        assert name or re.fullmatch(r"cpu-build|\$\{DEVICE\}-(build|run)", base), "no base but the pinned ones"


def test_copied_files_are_not_ignored(tmp_path: Path):
    """`.dockerignore` lets through what the Dockerfile copies from the context, and nothing else."""
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    assert "*" in patterns
    copied: set[str] = set()
    for words in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        copied |= set(words.split()[:-1])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    shipped = re.findall(r'^(\w+) = "trainer/shipped_', project, re.MULTILINE)
    assert {"recipes", *shipped} <= copied, "the wheel is made of these"
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name in let_through or f"docker/*{Path(name).suffix}" in let_through, name
    top = {name for name in let_through if not name.startswith("docker/")}
    assert top <= copied, "ignored by nothing and copied by nobody"


def test_scripts_that_are_started_are_executable():
    not_executable = [path.name for path in DOCKER.glob("*.sh") if not path.stat().st_mode & 0o111]
    assert not_executable == []
