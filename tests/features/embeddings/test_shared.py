"""Embeddings in the preview, the warnings of a run, its baselines, and the check of an exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.test_keys import assert_each_field_has_a_key
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_TASKS
from tests.observe.test_outcome import assert_warned
from tests.tasks.test_split_baselines import assert_baseline, harmonic
from tests.tools.certify.test_verifying import answered_here, assert_adapters_are_refused, assert_certified, train
from tests.tools.plan.test_truth import assert_planned_peak
from tests.tools.test_preview import assert_previewed
from tests.training.test_odd_rows import assert_odd_rows_train
from trainer.features.embeddings.section import Embedding
from trainer.tools.certify import verifying

TASK = {"type": "embedding", "texts": ["text", "label"], "metrics": ["mrr"], "query_prompt": "word1 "}


def test_the_preview():
    assert_previewed("embedding_sample", ["anchor", "positive"], "", "")


def test_the_baseline_of_the_sample(tmp_path: Path):
    assert_baseline(tmp_path, "embedding_sample", "mrr", harmonic(60), 0.05)


def test_a_whole_run_that_teaches_nothing_ends_in_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    task = {"type": "embedding", "texts": ["text", "other"], "metrics": ["mrr"]}
    assert_warned(tmp_path, capsys, task, 1e-9, 1)


def test_a_sound_folder_has_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifying, "_answered", answered_here)
    assert_certified(tmp_path, write_tiny_run, TASK, "`SentenceTransformer`")


def test_odd_rows(tmp_path: Path):
    task = {"type": "embedding", "texts": ["a", "b"]}
    assert_odd_rows_train(tmp_path, lambda text, number: {"a": text or "word4", "b": f"word{number}"}, task)


def test_adapters_under_a_learned_temperature_are_not_verified_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train(write_tiny_run(tmp_path / "base"))
    message = r"PEFT, which has no dense layers and no temperature of emb"
    task = {**TASK, "learn_temperature": True}
    (tmp_path / "test").mkdir()
    assert_adapters_are_refused(tmp_path / "test", monkeypatch, tmp_path / "base" / "run", task, {}, message)


@pytest.mark.parametrize("keys", [{"mask_duplicates": True}, {"score": "number", "loss": "cosine"}], ids=str)
def test_each_field_has_a_key(tmp_path: Path, keys: dict[str, Any]):
    assert_each_field_has_a_key(tmp_path, Embedding(type="embedding", texts=["text", "other"], **keys))


@pytest.mark.nightly
def test_the_planned_peak():
    assert_planned_peak({"task": TINY_TASKS["embedding"].keys})
