"""Floors that can be taken away: a run needs no tool."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, finish, start
from tests.house import reaches_up


def test_the_trunk_names_no_tool_and_no_feature():
    assert reaches_up() == []


@pytest.mark.slow
def test_the_sample_trains_without_the_tools(tmp_path: Path):
    for folder in ("trainer", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "trainer" / "tools")
    command = [sys.executable, "-m", "trainer", "run", "bert_sample", "training.max_steps=2", "--processes", "1"]

    ended = finish(start(command, tmp_path, PYTHONPATH=str(tmp_path)), 300)

    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.glob("runs/*/model/model.safetensors"))
