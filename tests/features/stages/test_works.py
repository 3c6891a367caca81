"""Stages that train a tokenizer and write token ids: their keys, their results in later stages, and a run in ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.features.stages.test_chain import finished, in_ranks, write_chain
from tests.features.stages.test_parsing import problems_of
from trainer.cli import main
from trainer.recipe.reading.loading import load_recipe

STAGES = [
    {"name": "tokens", "tokenizer": {"min_frequency": 1}},
    {"name": "ids", "encode": {"shard_rows": 20}, "processes": 1},
    {"name": "one", "training": {"max_steps": 2}},
    {"name": "two", "extends": "bert_sample", "training": {"max_steps": 2}, "data": {"train": "train.jsonl"}},
]


def write_works(folder: Path, stages=STAGES, **sections) -> str:
    return str(write_chain(folder, stages, **{"data": {"format": "json"}, **sections}))


def finish_works(run: Path) -> None:
    """Write the folders of finished works without doing them."""
    for folder in ("01-tokens", "02-ids"):
        (run / folder).mkdir(parents=True)
        (run / folder / "stage.json").write_text(json.dumps({"began_from": {}, "run": folder}))
    (run / "01-tokens" / "tokenizer").mkdir()
    (shards := run / "02-ids" / "shards").mkdir()
    data = {"source": "files", "train": "a.jsonl", "max_length": 16, "num_workers": 0}
    (shards / "encoded.json").write_text(json.dumps({"made_by": {"data": {**data, "format": "json"}}}))
    (shards / "train-00-00000.parquet").touch()
    data["train"] = f"{shards}/train-00-*.parquet"
    (shards / "recipe.json").write_text(json.dumps({"data": data, "task": {"text": "input_ids"}}))


def test_the_stages_after_a_work_use_its_result(tmp_path):
    recipe = write_works(tmp_path)
    before = load_recipe(recipe, is_whole=True).chain
    assert before.works == {
        "tokens": f"trains a tokenizer of at most 211 tokens on `data.train`, in {tmp_path}/run/01-tokens",
        "ids": f"writes the token ids of `data.train` for masked_lm, as parquet, in {tmp_path}/run/02-ids",
    }
    assert list(before.stages) == ["one", "two"]
    assert before.stages["one"].recipe.model.tokenizer == "stages/01-tokens"
    assert before.unchecked("one") == (
        "the result of the stage tokens, which is not done yet",
        "the result of the stage ids, which is not done yet",
    )
    finish_works(tmp_path / "run")
    after = load_recipe(recipe, ["data.num_workers=2"], is_whole=True).chain
    one, two = (stage.recipe for stage in after.stages.values())
    assert one.model.tokenizer == two.model.tokenizer == f"{tmp_path}/run/01-tokens/tokenizer"
    assert one.data.train == f"{tmp_path}/run/02-ids/shards/train-00-*.parquet"
    assert (one.task.text, one.data.num_workers, one.data.format) == ("input_ids", 2, None)
    assert (two.task.text, two.data.train) == ("text", f"{tmp_path}/train.jsonl")
    assert after.unchecked("one") == ()


def test_a_later_work_of_a_kind_replaces_the_earlier_one_and_does_not_read_its_result(tmp_path):
    again = {"name": "again", "encode": {}, "data": {"max_length": 8}}
    recipe = write_works(tmp_path, [*STAGES[:3], again, {"name": "three", "data": {"max_length": 8}}])
    finish_works(tmp_path / "run")
    chain = load_recipe(recipe, is_whole=True).chain
    assert chain.stages["one"].recipe.task.text == "input_ids"
    assert chain.stages["three"].recipe.data.train == f"{tmp_path}/train.jsonl"  # until the work is done
    assert "the result of the stage again, which is not done yet" not in chain.unchecked("one")


@pytest.mark.parametrize(
    ("stage", "later", "problem"),
    [
        ({"name": "x", "tokenizer": {"sise": 3}}, {}, "`stages.x` has a wrong `tokenizer.sise`"),
        ({"name": "x", "tokenizer": 3}, {}, "`stages.x` must have an object in `tokenizer`, such as {}"),
        (
            {"name": "x", "tokenizer": {}, "encode": {}},
            {},
            "`stages.x` has `tokenizer` and `encode`, but a stage does one",
        ),
        ({"name": "x", "encode": {}, "from": "one"}, {}, "`stages.x.from` is one of trainings, but `encode` trains no"),
        (
            {"name": "x", "encode": {}},
            {"data": {"max_length": 8}},
            "`stages.one`: `data.max_length` must be 16, as in the stage that writes its token ids, but is 8",
        ),
        (
            {"name": "x", "encode": {}},
            {"task": {"text": "text"}},
            "`stages.one`: `task.text` follows from the stage that",
        ),
    ],
)
def test_a_wrong_work(tmp_path, stage, later, problem):
    found, *_ = problems_of(write_works(tmp_path, [stage, {"name": "one", **later}]), is_whole=True)
    assert problem in found


def test_a_tokenizer_needs_a_size(tmp_path):
    recipe = write_works(tmp_path, model={"config": None, "name_or_path": "google-bert/bert-base-uncased"})
    assert "`tokenizer.size` must be the tokens of the vocabulary" in problems_of(recipe, is_whole=True)[0]
    assert problems_of(recipe, "stages.tokens.tokenizer.size=99")[0].startswith(
        "`stages` has the trainings one, two, but this command takes one"
    )
    found = problems_of(recipe, "stages.tokens.tokenizer.size=99", "stage=ids")
    assert found == ["`stages`: ids is no training, and this command takes one; choose a training"]


def test_a_folder_with_other_runs_is_refused(tmp_path, capsys):
    recipe = write_works(tmp_path)
    finish_works(tmp_path / "run")
    assert main(["run", recipe, "stages.ids.name=other"]) == 2
    assert "where 02-ids is a stage that the recipe does not list" in capsys.readouterr().err
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert main(["run", recipe]) == 2
    assert "which holds a run of a recipe without `stages`" in capsys.readouterr().err


@pytest.mark.slow
def test_the_first_rank_works_and_a_finished_work_is_kept_while_its_texts_are_the_same(tmp_path):
    recipe = Path(write_works(tmp_path, STAGES[:3]))
    first, second = in_ranks(recipe)
    assert first.count("tokenizer wordpiece of") == first.count("encoded   57 rows") == 1
    assert "wordpiece" not in second
    words = (tmp_path / "run" / "01-tokens" / "tokenizer" / "tokenizer.json").read_text()
    assert words == (tmp_path / "run" / "03-one" / "model" / "tokenizer.json").read_text()
    assert json.loads((tmp_path / "run" / "02-ids" / "shards" / "encoded.json").read_text())["rows"] == 57
    assert "nothing to do" in finished(recipe)
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write('{"text": "word1 word2", "label": "a"}\n')
    text = finished(recipe, code=2)
    assert "the stage tokens is done, but its work has changed: `bytes.train.jsonl` was" in text
    assert f"remove {tmp_path}/run/01-tokens and the folders of the stages after it" in text
