"""Errors that several ranks of a launcher find: `trainer.cli.once`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.processes import run
from trainer.base.errors import ExitCode, RecipeError, UsageError
from trainer.cli.once import show_error_once

RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {**RANK, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Show errors as ranks that a launcher started, and return the lines of all."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def shown(*errors: UsageError, **variables: str) -> list[str]:
        for name, value in {**TORCHRUN, **variables}.items():
            monkeypatch.setenv(name, value)
        for error in errors:
            show_error_once(error)
        return capsys.readouterr().err.splitlines()

    return shown


def test_only_the_first_rank_with_an_error_shows_it(launch, monkeypatch):
    wrong, missing = RecipeError("`a` is no key", "`b` is no key"), UsageError("there is no file")
    assert launch(wrong, missing, wrong, missing) == [
        "error: `a` is no key",
        "error: `b` is no key",
        "error: there is no file",
    ]
    assert launch(RecipeError("rank 2 on here: `c`"), RecipeError("rank 3 on here: `c`")) == [
        "error: rank 2 on here: `c`"
    ]
    assert launch(RecipeError("rank 2 on there: `c`")) == ["error: rank 2 on there: `c`"]
    parent = os.getppid()
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert launch(missing) == ["error: there is no file"], "another launch"
    monkeypatch.setattr(os, "getppid", lambda: parent)
    assert launch(missing) == []


def test_an_error_is_never_lost(launch, tmp_path, monkeypatch):
    error, twice = UsageError("wrong"), ["error: wrong"] * 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "getppid", lambda: 2**22 + 1)  # no process has it, as with a launcher outside of a container
        assert launch(error, error) == twice
    assert launch(error, error, LOCAL_WORLD_SIZE="x") == twice
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        assert launch(error, error) == twice
    monkeypatch.delitem(TORCHRUN, "TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # a shell starts the ranks, perhaps again with the same error
    assert launch(error, error) == twice


@pytest.mark.slow
def test_torchrun_shows_an_error_of_all_ranks_once_and_that_of_one_rank_too(tmp_path):
    (tmp_path / "both.json").write_text('{"extends": "bert_sample.json", "name": "both", "wrong": 1}')
    (tmp_path / "0.json").write_text('{"extends": "bert_sample.json", "name": "one"}')  # rank 1 has no such file
    for recipe, problem in (("both", "`wrong` is not a key"), ("$LOCAL_RANK", "1.json: no such file")):
        command = f"exec {sys.executable} -m trainer run {tmp_path}/{recipe}.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        ended = run([*torchrun, "bash", "-c", command], 100, TMPDIR=str(tmp_path))
        [error] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        assert problem in error
        assert f"exitcode  : {ExitCode.USER.value} " in ended.stderr
