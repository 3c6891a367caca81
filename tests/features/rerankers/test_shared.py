"""Rerankers in the preview, the warnings of a run, its baselines, and the check of an exported folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_run import write_tiny_run
from tests.observe.test_outcome import assert_warned
from tests.tasks.test_split_baselines import assert_baseline, harmonic
from tests.tools.certify.test_verifying import answered_here, assert_certified
from tests.tools.test_preview import assert_previewed
from trainer.tools.certify import verifying

TASK = {"type": "reranker", "query": "text", "documents": ["other", "label"], "metrics": ["map"]}


def test_the_preview():
    assert_previewed("reranker_sample", [f"text {number}" for number in range(4)], "1, 0, 0, 0", "")


def test_the_baseline_of_the_sample(tmp_path: Path):
    assert_baseline(tmp_path, "reranker_sample", "mrr_at_10", harmonic(4), 0.1)


def test_a_whole_run_that_teaches_nothing_ends_in_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert_warned(tmp_path, capsys, TASK, 1e-9, 1)


def test_a_sound_folder_has_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifying, "_answered", answered_here)
    assert_certified(tmp_path, write_tiny_run, TASK, "`CrossEncoder`")
