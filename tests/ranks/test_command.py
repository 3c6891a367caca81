"""The command that an end summary gives: it can be pasted into the shell that the run was started from."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from trainer.ranks.command import command_line
from trainer.ranks.environment import LaunchEnvironment

ALONE = LaunchEnvironment("none")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A console script of an environment."""
    file = tmp_path / "bin" / "trainer"
    file.parent.mkdir()
    file.write_text("#!/bin/sh\n")
    file.chmod(stat.S_IRWXU)
    return file


def test_a_script_on_the_path_goes_by_its_name(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", str(script), "run", "r.json", "logging.every=1 step"])
    assert command_line(ALONE) == "trainer run r.json 'logging.every=1 step'"


@pytest.mark.parametrize("other", [False, True], ids=["none on the path", "another on the path"])
def test_any_other_script_goes_by_its_path(
    script: Path, other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if other:
        (elsewhere / "trainer").write_bytes(script.read_bytes())
        (elsewhere / "trainer").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(elsewhere))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", ["python", "bin/trainer", "run", "r.json"])
    assert command_line(ALONE) == "bin/trainer run r.json"


def test_a_module_keeps_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "trainer", "run", "r.json"])
    assert command_line(ALONE) == "python3 -m trainer run r.json"


def test_secrets_of_sudo_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables before the program are words of the command line under sudo, which other users see in `/proc`."""

    class Parent:
        def cmdline(self) -> list[str]:
            return ["sudo", "WANDB_API_KEY=abc", "torchrun", "--no-python", "trainer", "run", "r.json", "HF_TOKEN=hf_x"]

        def parents(self) -> list[Parent]:
            return [self]

    monkeypatch.setattr("trainer.ranks.command.psutil.Process", Parent)
    shown = command_line(LaunchEnvironment("torchrun"))
    assert shown == "sudo WANDB_API_KEY=*** torchrun --no-python trainer run r.json HF_TOKEN=***"
