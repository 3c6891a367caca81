"""Token classification in the preview and in the baselines of a run."""

from __future__ import annotations

from pathlib import Path

import trainer
from tests.tasks.test_split_baselines import assert_baseline
from trainer.observe.preview_records import Piece


def test_words_of_entities_have_their_tags():
    (row,) = trainer.preview("ner_sample", rows=1).rows
    assert Piece("trained", " json", "B-CLASS") in row.texts[0].pieces


def test_the_baseline_of_the_sample(tmp_path: Path):
    assert_baseline(tmp_path, "ner_sample", "f1", 0.0, 0.0)
