from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainer.base.scratch import scratch_folder

ROOT = Path(__file__).resolve().parents[2]
KILLED = """
import os, signal
from trainer.base.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "recipe.json").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("trainer-of-a-user", "trainer-0123abcd-1-2-others"):
        (tmp_path / name).mkdir()
    subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    assert len(list(tmp_path.iterdir())) == 3
    with scratch_folder() as first, scratch_folder() as second:
        assert {path.name for path in tmp_path.iterdir()} == {
            "trainer-of-a-user",
            "trainer-0123abcd-1-2-others",
            first.name,
            second.name,
        }
    assert len(list(tmp_path.iterdir())) == 2
