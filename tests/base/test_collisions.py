from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, run
from tests.tools.doctor.machines import answers, machine
from trainer.tools.doctor import software


@pytest.mark.parametrize("other", ["trainer-0.0.36", "coqui_tts_trainer-0.4.0", None])
def test_a_package_that_writes_into_the_same_folder_is_refused(tmp_path: Path, other: str | None):
    (tmp_path / "trainer").symlink_to(ROOT / "trainer")
    (tmp_path / f"{other or 'trainers-1.0'}.dist-info").mkdir()
    ended = run([sys.executable, "-P", "-m", "trainer", "--version"], PYTHONPATH=str(tmp_path))
    if other is None:
        assert ended.returncode == 0, ended.stderr
        return
    name, _, version = other.partition("-")
    assert ended.returncode == 2
    assert f"the package {name.replace('_', '-')} {version} installs into the folder `trainer` too" in ended.stderr


def test_doctor_names_any_package_with_the_same_folder(monkeypatch: pytest.MonkeyPatch):
    assert answers(software.trainer_itself, machine())[0] == "ok"
    monkeypatch.setattr(software, "packages_distributions", lambda: {"trainer": ["recipe-trainer", "another"]})
    monkeypatch.setattr(software, "version", lambda name: "3.1")
    status, value = answers(software.trainer_itself, machine())
    assert status == "problem"
    assert value.startswith("the package another 3.1 installs into the folder")
    assert software.trainer_itself(machine()).remedy == "pip uninstall another recipe-trainer"
