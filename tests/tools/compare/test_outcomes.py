"""Recipes that train to their end with several seeds: the metrics of the runs, and the interval of the differences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

import trainer
from trainer.base.errors import UsageError
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.compare.outcomes import paired
from trainer.tools.run_metrics import read_metrics


def test_the_interval_is_that_of_a_paired_t_test():
    first, second = {1: 0.5, 2: 0.7, 3: 0.6, 4: 0.65}, {1: 0.55, 2: 0.71, 3: 0.68, 5: 0.1}
    found = paired(second, first)
    differences = np.array([0.05, 0.01, 0.08])
    interval = ttest_1samp(differences, 0).confidence_interval(0.95)
    assert found[0] == pytest.approx(differences.mean())
    assert found[1] == pytest.approx(interval.high - differences.mean())
    assert paired({1: 0.6}, first) == (pytest.approx(0.1), None)
    assert paired({9: 0.6}, first) == (None, None)


@pytest.mark.usefixtures("warm_python")
def test_without_validation_rows_there_is_no_metric(tmp_path: Path):
    keys = ["data.validation=null", "evaluation.every=null", "optimizer.learning_rate=1e-3,2e-3"]
    with pytest.raises(UsageError, match=r"`data.validation` of learning_rate=1e-3 is null"):
        trainer.compare("bert_sample", keys, seeds=2, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_each_run_has_the_metric_of_a_run_of_its_own(tmp_path: Path):
    lines = [json.dumps({"text": f"{'good' if n % 2 else 'bad'} word {n}", "label": "ab"[n % 2]}) for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "out.csv").write_text("row\n" + "".join(f"{row}\n" for row in range(1, 20, 2)))
    common = [f"data.train={tmp_path}/rows.jsonl", f"data.validation={tmp_path}/rows.jsonl", "training.max_steps=3"]
    common += ["optimizer.learning_rate=2e-4"]
    axis = f'data.leave_out=null,["{tmp_path}/out.csv"]'
    found = trainer.compare("bert_sample", [*common, axis], seeds=2, folder=tmp_path / "both")
    assert (found["metric"], [len(one["seeds"]) for one in found["results"]]) == ("accuracy", [2, 2])
    seed, value = list(found["results"][1]["seeds"].items())[1]
    own = [*common, f"data.leave_out={tmp_path}/out.csv", f"training.seed={seed}"]
    trainer.run(load_recipe("bert_sample", [*own, f"checkpoint.folder={tmp_path / 'own'}"]))
    assert read_metrics(tmp_path / "own" / "metrics.jsonl").evaluations[-1].metrics["accuracy"] == value
    whole, without = (one["seeds"] for one in found["results"])
    assert found["results"][1]["difference"] == pytest.approx(np.mean([without[one] - whole[one] for one in whole]))
    # A second start trains nothing, and another list of rows does.
    written = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("complete.json")}
    assert (
        trainer.compare("bert_sample", [*common, axis], seeds=2, folder=tmp_path / "both")["results"]
        == found["results"]
    )
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("complete.json")} == written
    (tmp_path / "out.csv").write_text("row\n1\n")
    trainer.compare("bert_sample", [*common, axis], seeds=1, folder=tmp_path / "both")
    assert len([*tmp_path.rglob("complete.json")]) == len(written) + 1
