"""Question answering in the preview and in the baselines of a run."""

from __future__ import annotations

from pathlib import Path

import trainer
from tests.tasks.test_split_baselines import assert_baseline
from tests.tools.test_preview import assert_previewed
from trainer.recipe.reading.loading import load_recipe


def test_the_preview():
    answer = "true if the module specified by fullname is a package"
    assert_previewed("qa_sample", ["text"], "tokens 22 to 32", answer)


def test_the_preview_counts_windows():
    found = trainer.preview(load_recipe("qa_sample", ["data.max_length=48", "task.stride=8"]), rows=6)
    assert [row.window for row in found.rows if row.window][:2] == ["window 1 of 2 of row 1", "window 2 of 2 of row 1"]


def test_the_baseline_of_the_sample(tmp_path: Path):
    assert_baseline(tmp_path, "qa_sample", "f1", 100 * 7 / 60, 1e-9)  # 7 rows have no answer
