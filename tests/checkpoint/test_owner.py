"""One run at a time owns a run folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import TrainerError
from trainer.checkpoint.owner import OWNER_FILE, FolderOwner
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.training import run, session

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from pathlib import Path
from trainer.checkpoint.owner import FolderOwner
with FolderOwner(Path(sys.argv[1])) as owner:
    owner.take()
    print("taken", flush=True)
    for _ in sys.stdin:
        try:
            owner.check()
            print("still the owner", flush=True)
        except Exception as error:
            print(error, flush=True)
"""


@contextmanager
def another_owner(folder: Path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        cwd=ROOT,
        bufsize=1,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "taken\n"
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def test_a_folder_in_use_is_refused_with_host_and_process(tmp_path):
    with another_owner(tmp_path) as other, pytest.raises(TrainerError, match=f"is in use .*process {other.pid} on '"):
        FolderOwner(tmp_path, wait_seconds=0.5).take()


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({}, "stop it, or give this run a folder of its own$"),
        ({"started": "1"}, "its process has ended, but the file server still holds its lock: delete .*owner.json"),
        ({"pid": 2**22 + 1}, "its process has ended, but the file server still holds its lock"),
        ({"host": "node7", "machine": "another"}, "'node7' since .* If that machine is gone for good, delete .*json"),
    ],
)
def test_the_remedy_depends_on_the_owner(tmp_path, changed, remedy):
    """A later process may have the number of the owner, and no process of another machine can be seen from here."""
    with another_owner(tmp_path):
        file = tmp_path / OWNER_FILE
        record = json.loads(file.read_text())
        file.write_text(json.dumps(record | changed))
        with pytest.raises(TrainerError, match=f"is in use .*{remedy}"):
            FolderOwner(tmp_path, wait_seconds=0).take()


def test_a_run_whose_lock_was_deleted_stops_instead_of_saving(tmp_path):
    with another_owner(tmp_path) as other, FolderOwner(tmp_path, wait_seconds=0) as owner:

        def asked() -> str:
            other.stdin.write("\n")
            return other.stdout.readline()

        assert asked() == "still the owner\n"
        (tmp_path / OWNER_FILE).unlink()
        assert owner.take() is None
        assert "was removed, so another run may write to" in asked()
        other.stdin.close()
        other.wait(60)
        other.stdin = None
        owner.check()
        assert (tmp_path / OWNER_FILE).exists(), "the other has removed the file of its successor"


def test_the_lock_of_a_killed_owner_is_taken_over(tmp_path):
    with another_owner(tmp_path) as other:
        os.killpg(other.pid, signal.SIGKILL)
        other.wait(60)
        assert (tmp_path / OWNER_FILE).exists()
        with FolderOwner(tmp_path, wait_seconds=0) as owner:
            assert owner.take() is None
            assert f'"pid": {os.getpid()}' in (tmp_path / OWNER_FILE).read_text()


def test_a_start_waits_for_the_end_of_the_previous_owner(tmp_path):
    with another_owner(tmp_path) as other:
        other.stdin.close()  # ends the process
        other.stdin = None
        with FolderOwner(tmp_path, wait_seconds=60) as owner:
            assert owner.take() is None


def test_nothing_is_left_after_a_release(tmp_path):
    with FolderOwner(tmp_path / "run") as owner:
        owner.take()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_file_system_without_locks_gives_a_note(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert "has no locks (No locks available)" in FolderOwner(tmp_path).take()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainerError, match="must be a folder that can be written"):
        FolderOwner(tmp_path / "file").take()


def test_a_second_run_changes_nothing_in_the_folder_of_the_first(tmp_path, monkeypatch):
    recipe, folder = write_tiny_run(tmp_path), tmp_path / "run"
    monkeypatch.setattr(session, "FolderOwner", partial(FolderOwner, wait_seconds=0.5))
    unfinished = folder / "checkpoints" / ".saving-step-00000004"
    with another_owner(folder):
        unfinished.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("of the first run\n")
        with pytest.raises(TrainerError, match="is in use by another run"):
            run.run(load_recipe(str(recipe)), LaunchEnvironment("none"))
        assert unfinished.exists()
        assert (folder / "metrics.jsonl").read_text() == "of the first run\n"
