"""Sequence-to-sequence language modelling in the preview, CUDA graphs, and the tasks that `trainer init` proposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers

from tests.data.test_keys import assert_each_attribute_has_a_key, assert_each_field_has_a_key, resolved
from tests.helpers.seq2seq import tiny_tokenizer
from tests.helpers.training import TINY_BART, TINY_TASKS
from tests.parity.test_graphs import assert_is_captured
from tests.tools.init.test_shapes import rows_of
from tests.tools.plan.test_truth import assert_planned_peak
from tests.tools.test_preview import assert_previewed
from tests.training.test_odd_rows import assert_odd_rows_train
from trainer.features.seq2seq_lm.section import Seq2SeqLM
from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import shapes


def test_the_preview():
    assert_previewed("t5_sample", ["text", "target"], "", "graphics [SEP]")


def test_a_source_and_its_target_are_proposed_first():
    rows = rows_of(3, article="a" * 99, highlights="b" * 50)
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))[0].task
    assert found.items() >= {"type": "seq2seq_lm", "target": "highlights"}.items()


def test_passes_are_captured():
    assert_is_captured("seq2seq_lm")


@pytest.mark.nightly
def test_odd_rows(tmp_path: Path):
    def row(text: str, number: int) -> dict[str, Any]:
        return {"source": text if "word" in text else "word4", "target": ["", "word1"][number % 2]}

    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    task = {"type": "seq2seq_lm", "metrics": ["perplexity"], "max_target_length": 8}
    model = {"config": TINY_BART, "tokenizer": str(tmp_path / "tokenizer")}
    assert_odd_rows_train(tmp_path, row, task, model=model)


SECTION = Seq2SeqLM(type="seq2seq_lm", source="text", target="other")
T5 = transformers.T5Config(decoder_start_token_id=0)


def test_each_field_has_a_key(tmp_path: Path):
    assert_each_field_has_a_key(tmp_path, SECTION, T5)


@pytest.mark.slow
def test_each_attribute_of_the_tokenizer_has_a_key(tmp_path: Path):
    assert_each_attribute_has_a_key(tmp_path, resolved(SECTION, T5))


@pytest.mark.nightly
def test_the_planned_peak():
    tiny = TINY_TASKS["seq2seq_lm"]
    assert_planned_peak({"task": tiny.keys, "model": tiny.model})
