"""Suites: their lists, the model of all recipes, the scores and the mean."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

import trainer
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import RecipeError, UsageError
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.suite.listing import read_suite, shipped_suites
from trainer.tools.suite.suite import SuiteRequest, _of_model, _row, run_suite


@pytest.mark.parametrize("name", shipped_suites())
def test_shipped_lists_have_valid_recipes(name: str):
    suite, place = read_suite(name)
    rows = [_row(entry, place, _of_model("google-bert/bert-base-uncased"), 1) for entry in suite.entries]
    models = {row.one.loaded.model.name_or_path for row in rows}
    assert models == {"google-bert/bert-base-uncased"}
    # Overrides of the command take precedence.
    rows = [_row(entry, place, ["expects=null", "training.max_steps=4"], 1) for entry in suite.entries]
    assert {row.one.loaded.training.max_steps for row in rows} == {4}
    assert suite.name == name


def test_glue_has_its_eight_tasks():
    suite, place = read_suite("glue")
    rows = [_row(entry, place, _of_model(None), 1) for entry in suite.entries]
    # The metrics of table 1 of Wang et al. (2018), arXiv:1804.07461; MNLI with one of its two splits.
    assert {row.one.loaded.data.subset: sorted(row.metrics) for row in rows} == {
        "cola": ["matthews"], "sst2": ["accuracy"], "mrpc": ["accuracy", "f1"], "stsb": ["pearson", "spearman"],
        "qqp": ["accuracy", "f1"], "mnli": ["accuracy"], "qnli": ["accuracy"], "rte": ["accuracy"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"name": "x", "recipes": []}', "recipes"),
        ('{"name": "x", "recipes": [{"recipe": "bert_sample", "override": {}}]}', "override"),
        ('{"name": "x", "recipes": [{"recipe": "bert_sample", "scale": 0}]}', "`recipes.0.scale`: .* greater than 0"),
        ('{"recipes": ["bert_sample"]}', "name"),
        ('["bert_sample"]', "SUITE"),
        ('{"name": "x", "recipes": ["bert_sample", "bert_sample"]}', "more than once; give each entry a `name`"),
        ('{"name": "x", "recipes": [{"recipe": "bert_sample", "metrics": ["mse"]}]}', "is not evaluated"),
        ('{"name": "x", "recipes": [{"recipe": "bert_sample", "metrics": ["loss"]}]}', "of which less is better"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path: Path, content: str, problem: str):
    (tmp_path / "list.json").write_text(content)
    with pytest.raises(UsageError, match=problem):
        run_suite(SuiteRequest(str(tmp_path / "list.json"), (), None, 1, 1, tmp_path / "out"), print)


def test_what_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"'glu', which is no file; .*glue, ner, sample, squad"):
        read_suite("glu")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        run_suite(SuiteRequest("ner", (), str(tmp_path), 1, 1, tmp_path / "out"), print)
    (tmp_path / "list.json").write_text('{"name": "x", "recipes": ["bert_smple"]}')
    with pytest.raises(RecipeError, match="bert_sample"):
        run_suite(SuiteRequest(str(tmp_path / "list.json"), (), None, 1, 1, tmp_path / "out"), print)


@pytest.mark.nightly
def test_the_sample_suite_trains_over_a_tiny_model(tmp_path: Path):
    trainer.run(load_recipe("bert_sample_mlm", ["training.max_steps=1", f"checkpoint.folder={tmp_path / 'tiny'}"]))
    found = trainer.suite("sample", tmp_path / "tiny", ["training.max_steps=4"], seeds=1, folder=tmp_path / "out")
    assert [one["name"] for one in found["results"]] == ["topics", "entities", "answers"]
    assert 0 < found["mean"]["score"] < 1, "answers have metrics from 0 to 100, which `scale` divides"
    assert found["mean"]["score"] == pytest.approx(fmean(one["score"] for one in found["results"]))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_recipes_train_over_one_model(tmp_path: Path):
    recipe = write_tiny_run(tmp_path)
    trainer.run(load_recipe(str(recipe), ["training.max_steps=1", f"checkpoint.folder={tmp_path / 'start'}"]))
    entries = ["recipe.json", {"recipe": "recipe.json", "name": "faster", "metrics": ["accuracy", "f1_macro"],
                               "overrides": {"optimizer.learning_rate": 1e-2}}]  # fmt: skip
    (tmp_path / "list.yaml").write_text(json.dumps({"name": "two", "recipes": entries}))
    asked = [tmp_path / "list.yaml", tmp_path / "start", ["model.dropout=0.0"]]
    found = trainer.suite(*asked, seeds=2, processes=2, folder=tmp_path / "out")
    # A run by hand from the same folder, with the tokenizer of that folder.
    words = [f"model.name_or_path={tmp_path / 'start' / 'model'}", "model.config=null", "model.tokenizer=null"]
    words += ["optimizer.learning_rate=0.01", "model.dropout=0.0", "evaluation.best=null"]
    own = trainer.run(load_recipe(str(recipe), [*words, f"checkpoint.folder={tmp_path / 'own'}"]), processes=2)
    first, second = found["results"]
    seed, metrics = next(iter(second["seeds"].items()))
    assert (int(seed), metrics) == (42, pytest.approx(own.metrics))
    assert second["score"] == pytest.approx(
        fmean(one[name] for one in second["seeds"].values() for name in ("accuracy", "f1_macro"))
    )
    assert found["mean"]["score"] == pytest.approx((first["score"] + second["score"]) / 2)
    # The same command trains nothing; a failed recipe is a row, and there is no mean.
    times = [file.stat().st_mtime_ns for file in tmp_path.rglob("complete.json")]
    again = trainer.suite(*asked, seeds=2, processes=2, folder=tmp_path / "out")
    assert again == found
    assert len(times) == 4
    assert times == [file.stat().st_mtime_ns for file in tmp_path.rglob("complete.json")]
    entries[1]["overrides"] = {"optimizer.learning_rate": 1e30, "training.max_bad_steps": 0}
    (tmp_path / "list.yaml").write_text(json.dumps({"name": "two", "recipes": entries}))
    broken = trainer.suite(*asked, seeds=2, processes=2, folder=tmp_path / "out")
    assert broken["results"][1]["reason"]
    assert broken["mean"]["score"] is None
    assert broken["results"][0] == first
