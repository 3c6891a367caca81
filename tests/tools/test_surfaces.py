"""The lines that a first hour shows, counted on the samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.processes import finish
from trainer.cli import main

SAMPLES = ["bert_sample", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo_sample", "choice_sample"))]


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_preview_has_25_lines_and_a_check_ends_with_the_unchecked_parts(
    capsys: pytest.CaptureFixture[str], sample: str, processes: str
):
    assert main(["preview", sample, "--processes", processes]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") <= 25
    assert "lengths of training rows: " in shown
    assert "lengths of validation rows: " in shown
    assert main(["check", sample, "--processes", processes]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("unchecked memory and time of a step")


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_banner_of_a_run_has_eight_lines(tmp_path: Path, sample: str, processes: str):
    keys = [
        "training.max_steps=1",
        "data.validation=null",
        "evaluation.every=null",
        f"checkpoint.folder={tmp_path}/run",
    ]
    done = finish(warm.start(["run", sample, *keys, "--processes", processes]))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    banner = lines[: lines.index("")]
    assert (banner[0], len(banner)) == (sample, 8)


def test_rows_on_request_are_whole(capsys: pytest.CaptureFixture[str]):
    assert main(["preview", "choice_sample", "--rows", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" text 3, ") == 6
    assert "left out" not in shown
