"""Failing saves of real runs: all ranks exit soon, with one message, and the previous checkpoint stays valid."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.samples import newest
from tests.helpers import processes, warm
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode
from trainer.checkpoint.store import CheckpointStore

# A separate program: the limit must affect only the ranks in the second save. Root ignores permissions while it has the
# capability CAP_DAC_OVERRIDE. A new program does not get the capability after it is dropped from the bounding set.
LIMIT = 240.0  # seconds in which a run ends, on a busy machine
LIMITED = """
import ctypes, os, resource, sys
from pathlib import Path
kind, *words = sys.argv[1:]
if kind == "permission" and os.environ.get("BOUND") is None:
    PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)
    os.execve(sys.executable, [*sys.orig_argv], {**os.environ, "BOUND": "1"})
import safetensors.torch
save_file = safetensors.torch.save_file
def limited(tensors, path, metadata=None):
    if ".saving-step-00000004" in str(path):
        if kind == "size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        else:
            Path(path).parent.chmod(0o555)
    return save_file(tensors, path)
safetensors.torch.save_file = limited
from trainer.cli import main
sys.exit(main(words))
"""


def run_limited(kind: str, recipe: Path) -> subprocess.CompletedProcess[str]:
    words = ["run", recipe, "--processes", "2", "checkpoint.every=2 steps", 'logging.to=["console"]']
    return processes.run([sys.executable, "-c", LIMITED, kind, *words])


def assert_failed_whole(finished: subprocess.CompletedProcess[str], run: Path, words: str) -> None:
    assert finished.returncode == ExitCode.FAILED, finished.stderr
    assert "the checkpoint of step 4 could not be written" in finished.stderr
    assert words in finished.stderr
    assert "the last complete one is that of step 2" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count("could not be written") == 1, "one message"
    state, problems = newest(CheckpointStore(run, 1))
    assert problems == []
    assert state.facts.progress.step == 2


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path):
    """The write fails in the middle, as on a full disk."""
    recipe = write_tiny_run(tmp_path)
    finished = run_limited("size", recipe)
    assert_failed_whole(finished, tmp_path / "run", "File too large")
    again = processes.finish(warm.start(["run", recipe, "--processes", "2"]))
    assert again.returncode == ExitCode.DONE, again.stderr


@pytest.mark.slow
def test_permission_that_is_lost(tmp_path):
    recipe = write_tiny_run(tmp_path)
    assert_failed_whole(run_limited("permission", recipe), tmp_path / "run", "Permission denied")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, timeout=60, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], timeout=60, check=True)


def test_a_full_disk(tmp_path, small_disk):
    recipe = write_tiny_run(tmp_path, checkpoint={"folder": str(small_disk / "run"), "every": "1 step", "keep": 9})
    started = time.monotonic()
    finished = processes.finish(warm.start(["run", recipe, "--processes", "2", "evaluation.every=null"]))
    assert finished.returncode == ExitCode.FAILED, finished.stderr
    assert "could not be written" in finished.stderr
    assert "No space left on device" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert time.monotonic() - started < LIMIT
    store = CheckpointStore(small_disk / "run", 1)
    state, problems = newest(store)
    assert problems == []
    assert state is not None
    assert not list(store.folder.glob(".saving-*")), "room is made again"


def test_a_folder_that_is_deleted(tmp_path):
    """Delete the folder during the run, which must not silently create it again, because its files are lost."""
    recipe = write_tiny_run(tmp_path, checkpoint={"every": "1 step"}, training={"max_steps": 5000})
    process = warm.start(["run", recipe, "--processes", "2", "evaluation.every=null"])
    try:
        store = CheckpointStore(tmp_path / "run", 1)
        deadline = time.monotonic() + LIMIT
        while not store.steps() and time.monotonic() < deadline:
            time.sleep(0.1)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        deleted = time.monotonic()
    except BaseException:
        processes.kill(process)
        raise
    finished = processes.finish(process)
    assert time.monotonic() - deleted < LIMIT
    assert finished.returncode == ExitCode.FAILED
    # The next write fails: that of a checkpoint, or of the metrics of a step. A save looks at the folder's owner first.
    said = r"(could not|can no longer) be written|the run folder .* was removed|\.owner\.json was removed"
    assert re.search(said, finished.stderr), finished.stderr
    assert "Traceback" not in finished.stderr
