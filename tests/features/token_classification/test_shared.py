"""Token classification in the preview and in the baselines of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trainer
from tests.data.test_keys import assert_each_field_has_a_key
from tests.tasks.test_split_baselines import assert_baseline
from tests.training.test_odd_rows import assert_odd_rows_train
from trainer.features.token_classification.section import TokenClassification
from trainer.observe.preview_records import Piece


def test_words_of_entities_have_their_tags():
    (row,) = trainer.preview("ner_sample", rows=1).rows
    assert Piece("trained", " json", "B-CLASS") in row.texts[0].pieces


def test_the_baseline_of_the_sample(tmp_path: Path):
    assert_baseline(tmp_path, "ner_sample", "f1", 0.0, 0.0)


def test_odd_rows(tmp_path: Path):
    def row(text: str, number: int) -> dict[str, Any]:
        words = text.replace("[CLS] [SEP]", "word9 [SEP] word9").split()  # special tokens at the ends are refused
        return {"words": words, "tags": ["B-X" if "word" in word else "O" for word in words]}

    task = {"type": "token_classification", "words": "words", "tags": "tags", "metrics": ["f1"]}
    assert_odd_rows_train(tmp_path, row, task)


def test_each_field_has_a_key(tmp_path: Path):
    assert_each_field_has_a_key(tmp_path, TokenClassification(type="token_classification", words="words", tags="tags"))
