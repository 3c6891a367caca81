from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.tools.doctor.machines import answers, machine
from trainer.tools.doctor import folders
from trainer.tools.doctor.finding import GIB, MIB


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The free bytes of every disk; a test may change them."""
    values = {"bytes": 50 * GIB}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=values["bytes"]))
    return values


def without_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_runs_go_below_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert answers(folders.run_folder, machine()) == ("ok", f"{tmp_path}/runs, 50.0 GiB free")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir("/proc")
    status, value = answers(folders.run_folder, machine())
    assert status == "warning"
    assert value.startswith("/proc/runs cannot be written: ")


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    status, value = answers(folders.run_folder, machine())
    assert (status, value[:33]) == ("problem", "the current folder cannot be used")


def test_a_file_in_the_place_of_a_folder(tmp_path: Path):
    (tmp_path / "file").touch()
    assert folders.folder(tmp_path / "file", "move it").status == "warning"


@pytest.mark.parametrize(("code", "remedy"), [(errno.ENOSPC, "free some space, or move it"), (errno.EACCES, "move it")])
def test_a_full_folder_has_a_remedy_of_its_own(monkeypatch, tmp_path: Path, code: int, remedy: str):
    monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=OSError(code, "text")))
    assert folders.folder(tmp_path, "move it").remedy == remedy


def test_little_room(free: dict[str, int], tmp_path: Path):
    free["bytes"] = GIB // 2
    finding = folders.folder(tmp_path, "set HF_HOME")
    assert (finding.status, finding.value) == ("warning", f"{tmp_path}, 512 MiB free")
    assert finding.remedy == "free some space, or set HF_HOME"


def test_the_cache_of_data(tmp_path: Path):
    at = machine(XDG_CACHE_HOME=str(tmp_path))
    assert answers(folders.data_cache, at) == ("ok", f"{tmp_path}/trainer, 50.0 GiB free")
    assert answers(folders.data_cache, machine(XDG_CACHE_HOME="/proc/closed"))[0] == "warning"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "home", without_home)
    assert answers(folders.data_cache, machine()) == ("warning", "this user has no home folder to keep a cache in")


@pytest.mark.parametrize(
    ("total", "free", "status", "value"),
    [
        (64 * MIB, 64 * MIB, "warning", "64 MiB, 64 MiB free"),  # as Docker gives it
        (512 * MIB, 500 * MIB, "warning", "512 MiB, 500 MiB free"),
        (8 * GIB, 7 * GIB, "ok", "8.0 GiB, 7.0 GiB free"),
        (8 * GIB, 10 * MIB, "warning", "8.0 GiB, 10 MiB free"),
    ],
)
def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, status, value):
    of_disk = SimpleNamespace(f_frsize=4096, f_blocks=total // 4096, f_bavail=free // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: of_disk)
    at = machine(tmp_path, files={"/dev/shm/": ""})
    assert answers(folders.shared_memory, at) == (status, value)


def test_shared_memory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert answers(folders.shared_memory, machine(tmp_path))[0] == "ok"  # another system than Linux
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert answers(folders.shared_memory, machine(tmp_path, files={"/dev/shm/": ""}))[0] == "problem"
