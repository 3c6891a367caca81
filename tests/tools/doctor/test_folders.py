from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.tools.doctor.machines import answers, machine
from trainer.tools.doctor import folders
from trainer.tools.doctor.finding import GIB

CLOSED = "/proc/closed"  # where nobody can write, root included


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


def test_a_recipe_says_where_its_run_goes(tmp_path: Path):
    def at(folder: str) -> str:
        keys = (f"checkpoint.folder={folder}",)
        return answers(folders.run_folder, machine(recipe="bert_sample", overrides=keys))[0]

    assert at(str(tmp_path / "a" / "b")) == "ok"
    assert at(CLOSED) == "problem"


def test_a_recipe_names_the_folder_of_checkpoints_in_memory(tmp_path: Path):
    def at(folder: str) -> tuple[str, str]:
        keys = (f'checkpoint.memory={{"every": "1 step", "folder": "{folder}"}}',)
        return answers(folders.checkpoint_memory, machine(recipe="bert_sample", overrides=keys))

    assert at("/dev/shm") == ("ok", "/dev/shm, 50.0 GiB free")
    assert at(str(tmp_path)) == ("warning", f"{tmp_path}, 50.0 GiB free, but on a disk")
    assert at(str(tmp_path / "none"))[0] == at("/proc")[0] == "problem"


@pytest.mark.parametrize(
    ("code", "status", "remedy"),
    [
        (None, "warning", "larger --shm-size"),
        (errno.ENOSPC, "problem", "larger --shm-size"),
        (errno.EACCES, "problem", "name a writable folder"),
    ],
    ids=["nearly full", "full", "closed"],
)
def test_a_full_folder_of_memory_has_a_remedy_of_its_own(monkeypatch, free, code, status, remedy):
    free["bytes"] = 64 * 2**20
    if code is not None:
        monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=OSError(code, "text")))
    keys = ('checkpoint.memory={"every": "1 step", "folder": "/dev/shm"}',)
    found = folders.checkpoint_memory(machine(recipe="bert_sample", overrides=keys))
    assert found.status == status
    assert [text for text in ("larger --shm-size", "name a writable folder") if text in str(found.remedy)] == [remedy]


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    status, value = answers(folders.run_folder, machine())
    assert (status, value[:33]) == ("problem", "the current folder cannot be used")


def test_a_file_in_the_place_of_a_folder(tmp_path: Path):
    (tmp_path / "file").touch()
    assert folders.folder(tmp_path / "file", "move it", is_needed=True).status == "problem"


def test_little_room(free: dict[str, int], tmp_path: Path):
    free["bytes"] = GIB // 2
    finding = folders.folder(tmp_path, "set HF_HOME", is_needed=True)
    assert (finding.status, finding.value) == ("warning", f"{tmp_path}, 512 MiB free")
    assert finding.remedy == "free some space, or set HF_HOME"


def test_the_cache_of_data(tmp_path: Path):
    at = machine(XDG_CACHE_HOME=str(tmp_path))
    assert answers(folders.data_cache, at) == ("ok", f"{tmp_path}/trainer, 50.0 GiB free")
    assert answers(folders.data_cache, machine(XDG_CACHE_HOME=CLOSED))[0] == "warning"
    assert answers(folders.data_cache, machine(recipe="bert_sample", XDG_CACHE_HOME=CLOSED))[0] == "problem"
    keys = (f"data.cache={tmp_path}/own",)
    chosen = machine(recipe="bert_sample", overrides=keys, XDG_CACHE_HOME=CLOSED)
    assert answers(folders.data_cache, chosen) == ("ok", f"{tmp_path}/own, 50.0 GiB free")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "home", without_home)
    missing = "this user has no home folder to keep a cache in"
    assert answers(folders.data_cache, machine()) == ("warning", missing)
    assert answers(folders.data_cache, machine(recipe="bert_sample")) == ("problem", missing)
    assert answers(folders.hub_cache, machine()) == ("warning", missing)


def test_the_cache_of_the_hub(tmp_path: Path):
    assert answers(folders.hub_cache, machine(HF_HOME=str(tmp_path))) == ("ok", f"{tmp_path}, 50.0 GiB free")
    assert answers(folders.hub_cache, machine(XDG_CACHE_HOME=str(tmp_path)))[1].startswith(f"{tmp_path}/huggingface,")
    assert answers(folders.hub_cache, machine(HF_HOME=CLOSED))[0] == "warning"


def test_temporary_files(monkeypatch: pytest.MonkeyPatch):
    assert answers(folders.temporary, machine())[0] == "ok"

    full = machine(TMPDIR="/dev/full")
    status, value = answers(folders.temporary, full)
    assert (status, value.endswith(f"; {tempfile.gettempdir()} is used instead")) == ("warning", True)

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert answers(folders.temporary, machine()) == ("problem", "no folder for temporary files can be written")
