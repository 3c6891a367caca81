"""The health check: what `trainer doctor` finds, as an engine wants to hear it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docker.isolation import DOCKER, UID, as_any_user
from tests.helpers.processes import run

HEALTHCHECK = DOCKER / "healthcheck.sh"


@pytest.fixture
def doctor(tmp_path: Path) -> Path:
    """A folder with a `trainer` whose health is the exit code that stands in `FOLDER/code`."""
    trainer = tmp_path / "trainer"
    trainer.write_text(f'#!/bin/sh\necho "$* HOME=$HOME LOGNAME=${{LOGNAME:-}}"\nexit "$(cat {tmp_path}/code)"\n')
    trainer.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(("code", "health"), [(0, 0), (1, 1), (2, 1), (75, 1)])
def test_health_is_0_or_1_whatever_is_wrong(code: int, health: int, doctor: Path):
    (doctor / "code").write_text(str(code))
    ended = run([HEALTHCHECK], PATH=f"{doctor}:/usr/bin:/bin")
    assert ended.returncode == health
    assert ended.stdout.startswith("doctor ")


def test_any_user_is_examined(doctor: Path):
    (doctor / "code").write_text("0")
    ended = run(as_any_user(HEALTHCHECK), PATH=f"{doctor}:/usr/bin:/bin", TMPDIR="/tmp")
    assert f"HOME=/tmp LOGNAME=uid{UID}" in ended.stdout


@pytest.mark.slow
def test_the_doctor_is_asked(tmp_path: Path):
    trainer = tmp_path / "trainer"
    trainer.write_text(f'#!/bin/sh\nexec {sys.executable} -m trainer "$@"\n')
    trainer.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"
    health = run([HEALTHCHECK], 100, PATH=path)
    assert health.returncode in (0, 1)
    assert "torch" in health.stdout
