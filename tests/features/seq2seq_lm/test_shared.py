"""Sequence-to-sequence language modelling in the preview, and in the tasks that `trainer init` proposes."""

from __future__ import annotations

import datasets

from tests.tools.init.test_shapes import rows_of
from tests.tools.test_preview import assert_previewed
from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import shapes


def test_the_preview():
    assert_previewed("t5_sample", ["text", "target"], "", "graphics [SEP]")


def test_a_source_and_its_target_are_proposed_first():
    rows = rows_of(3, article="a" * 99, highlights="b" * 50)
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))[0].task
    assert found.items() >= {"type": "seq2seq_lm", "target": "highlights"}.items()
