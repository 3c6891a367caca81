"""`launchers/slurm.sbatch` queues a failed job again, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launchers" / "slurm.sbatch"


def ended(folder: Path, code: int, restarts: int) -> tuple[str, int]:
    """Run the job once, with ranks that end with `code`; return its messages and how often it was queued again."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in (("srun", f"exit {code}"), ("scontrol", f"echo again >>{folder}/queued")):
        (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_folder / name).chmod(0o755)
    variables = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "RESTARTS": str(restarts)}
    command = ["bash", SCRIPT, "recipe"]
    environ = os.environ | variables
    job = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert job.returncode == code
    queued = folder / "queued"
    return job.stderr, len(queued.read_text().splitlines()) if queued.exists() else 0


@pytest.mark.parametrize(("code", "queued"), [(0, 0), (2, 0), (3, 0), (130, 0), (1, 1), (137, 1), (75, 1)])
def test_failures_and_stops_are_queued_again_and_refusals_are_not(tmp_path, code, queued):
    assert ended(tmp_path, code, restarts=1)[1] == queued


def test_a_container_file_gets_caches_that_can_be_written(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\n')
    srun.chmod(0o755)
    cache = tmp_path / "a cache"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CONTAINER": "image.sif", "XDG_CACHE_HOME": str(cache)}
    subprocess.run(["bash", SCRIPT, "recipe"], cwd=tmp_path, env=os.environ | variables, timeout=60, check=True)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("--bind") + 1] == f"{tmp_path},{cache}"
    assert words[words.index("--env") + 1] == f"XDG_CACHE_HOME={cache}"
    assert words[-4:] == ["image.sif", "trainer", "run", "recipe"]
    assert cache.is_dir()


def test_the_number_of_restarts_is_kept_between_them(tmp_path):
    message, queued = ended(tmp_path, 137, restarts=2)
    assert queued == 1
    assert "killed by SIGKILL" in message
    assert "restart 1 of 2" in message
    assert ended(tmp_path, 75, restarts=2)[1] == 2, "a stop is no failure"
    assert "restart 2 of 2" in ended(tmp_path, 1, restarts=2)[0]
    assert ended(tmp_path, 1, restarts=2)[1] == 3
    assert not list(tmp_path.glob(".slurm-failures-*"))
