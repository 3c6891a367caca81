"""DeepSpeed where it cannot run: said before training starts, with a remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.processes import finish, start
from tests.helpers.tiny_run import write_tiny_run


def refusal(folder: Path, strategy: str, **variables: str) -> str:
    """What a run of two ranks says that must end with exit code 2 and leave nothing behind."""
    words = ["run", write_tiny_run(folder, parallel={"strategy": strategy}), "--processes", "2"]
    has_path = "PYTHONPATH" in variables  # which a process that is warm would not look at
    ended = finish(
        start([sys.executable, "-m", "trainer", *words], **variables) if has_path else warm.start(words, **variables)
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (folder / "run" / "model").exists()
    return ended.stderr


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_without_deepspeed(tmp_path, strategy):
    package = tmp_path / "path" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no module named deepspeed')")
    said = refusal(tmp_path / "tiny", strategy, PYTHONPATH=str(package.parent))
    assert 'pip install "recipe-trainer[deepspeed]"' in said
    assert "or use fsdp" in said


def test_without_a_compiler(tmp_path):
    """DeepSpeed would end with a traceback of many lines, or compile with something else."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ninja").write_text("#!/bin/sh\n")
    (programs / "ninja").chmod(0o755)
    said = refusal(tmp_path / "tiny", "zero2", PATH=str(programs))
    assert "g++ is not on the PATH" in said
    assert "`parallel.strategy` fsdp" in said
