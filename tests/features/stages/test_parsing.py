"""The stages of a recipe file: their recipes, overrides, problems, and commands that take one training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import RecipeError
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe

ENCODER = {
    "model_type": "modernbert", "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "global_rope_theta": 10000,
}  # fmt: skip
STAGES = [
    {"name": "short", "training": {"max_steps": 3}},
    {"name": "long", "start": "continued", "model": {"config": {"global_rope_theta": 160000}}},
    {"name": "one", "task": {"type": "sequence_classification", "text": "text"}, "model": {"dropout": 0.1}},
    {"name": "two", "from": "long", "extends": "bert_sample", "data": {"train": "train.jsonl"}, "processes": 1},
]


@pytest.fixture
def chain(tmp_path: Path):
    def write(stages=STAGES, **sections) -> str:
        sections = {"model": {"config": ENCODER, "new_head": False}, **sections}
        task = {"type": "masked_lm", "text": "text", "metrics": ["accuracy"]}
        return str(write_tiny_run(tmp_path, task=task, stages=stages, **sections))

    return write


def problems_of(file: str, *words: str, **keys) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, words, **keys)
    return list(caught.value.problems)


def test_each_stage_is_a_recipe_over_the_common_keys(chain, tmp_path):
    stages = load_recipe(chain(), is_whole=True).chain.stages
    assert [one.recipe.training.max_steps for one in stages.values()] == [3, 8, 8, None]
    assert [one.recipe.name for one in stages.values()] == ["tiny-short", "tiny-long", "tiny-one", "tiny-two"]
    assert [one.recipe.checkpoint.continues for one in stages.values()] == [
        None,
        f"{tmp_path}/run/01-short",
        None,
        None,
    ]
    assert stages["one"].recipe.task.type == stages["two"].recipe.task.type == "sequence_classification"
    assert stages["two"].recipe.optimizer.learning_rate == 1e-3
    assert stages["two"].recipe.data.train == f"{tmp_path}/train.jsonl"
    assert Path(stages["two"].recipe.data.validation).name == "validation.jsonl"
    assert stages["two"].recipe.checkpoint.folder == f"{tmp_path}/run/04-two"


def test_a_model_that_is_not_trained_has_a_stand_in_with_the_changes_of_its_configuration(chain, tmp_path):
    stages = load_recipe(chain(), is_whole=True).chain.stages
    assert stages["short"].recipe.model.config["global_rope_theta"] == 10000
    assert stages["one"].recipe.model.config == {**ENCODER, "global_rope_theta": 160000}
    for name in ("01-short", "02-long"):
        (tmp_path / "run" / name / "model").mkdir(parents=True)
        (tmp_path / "run" / name / "model" / "config.json").write_text("{}")
    stages = load_recipe(chain(), is_whole=True).chain.stages
    assert stages["long"].recipe.model.config == {"global_rope_theta": 160000}
    one = stages["one"].recipe.model
    assert (one.name_or_path, one.config, one.tokenizer) == (f"{tmp_path}/run/02-long/model", None, None)
    assert stages["two"].recipe.model.name_or_path == one.name_or_path


def test_the_shipped_chain_takes_lengths_rotary_bases_and_steps_of_the_recipes_that_its_stages_extend():
    stages = load_recipe("modernbert_base_stages", is_whole=True).chain.stages
    recipes = [one.recipe for one in stages.values()]
    assert [one.data.max_length for one in recipes] == [128, 1024, 8192, 8192, 128, 256, 384]
    rotary = [one.model.config["rope_parameters"]["full_attention"]["rope_theta"] for one in recipes]
    assert rotary == [1e4, 1e4, 1.6e5, 1.6e5, 1.6e5, 1.6e5, 1.6e5]
    paper = load_recipe("modernbert_base_pretraining").recipe
    assert recipes[0].training.max_steps + recipes[1].training.max_steps == paper.training.max_steps
    assert [one.schedule.name for one in recipes[:4]] == ["constant"] * 3 + ["warmup_stable_decay"]
    assert [bool(one.checkpoint.continues) for one in recipes] == [False, True, True, True, False, False, False]
    assert [one.task.type for one in recipes[4:]] == [
        "sequence_classification", "token_classification", "question_answering"
    ]  # fmt: skip


def test_overrides_change_the_common_keys_or_a_stage(chain):
    words = ["training.max_steps=5", "stages.long.training.max_steps=6", "stages.two.from=one"]
    chain_of = load_recipe(chain(), words, is_whole=True).chain
    assert [one.recipe.training.max_steps for one in chain_of.stages.values()] == [3, 6, 5, None]
    assert chain_of.unchecked("two") == ("weights and tokenizer of the stage one, which is not done yet",)
    assert load_recipe(chain(), ["stages=null"]).recipe.training.max_steps == 8


def test_a_recipe_that_extends_a_chain_changes_its_stages_by_name(chain, tmp_path):
    chain()
    over = tmp_path / "over.json"
    over.write_text(
        '{"extends": "recipe.json", "stages": {"long": {"training": {"max_steps": 6}}, "two": null,'
        ' "*": {"training": {"max_steps": 4}, "precision": "bf16"}}}'
    )
    top = tmp_path / "top.json"
    top.write_text('{"extends": "over.json", "name": "top", "stages": {"one": {"start": "continued"}}}')
    stages = load_recipe(str(top), ["stages.short.precision=fp32"], is_whole=True).chain.stages
    found = {name: (one.recipe.training.max_steps, one.recipe.precision) for name, one in stages.items()}
    assert found == {"short": (4, "fp32"), "long": (6, "bf16"), "one": (4, "bf16")}
    assert stages["long"].recipe.model.config["global_rope_theta"] == 160000
    assert stages["one"].recipe.checkpoint.continues == f"{tmp_path}/run/02-long"
    assert stages["one"].recipe.name == "top-one"
    top.write_text('{"extends": "over.json", "stages": {"two": {}, "one": 3}}')
    two, one = problems_of(str(top), is_whole=True)
    assert "`stages.two` is no stage; the stages are short, long, one" in two
    assert "`stages.one` must be an object with keys of the stage, but is 3; null removes the stage" in one
    top.write_text('{"extends": "over.json", "stages": [{"name": "only"}]}')
    assert list(load_recipe(str(top), is_whole=True).chain.stages) == ["only"]
    assert "`stages` must keep a stage, but all are removed" in problems_of(chain(), "stages.*=null", is_whole=True)[0]
    assert "must be a list of stages" in problems_of(chain({"short": {}}), is_whole=True)[0]


def test_a_recipe_of_the_resolved_values_has_the_same_stages(chain, tmp_path):
    whole = load_recipe(chain(), ["stages.long.training.max_steps=6"], is_whole=True)
    (tmp_path / "else").mkdir()
    again = write_tiny_run(tmp_path / "else", **whole.recipe.model_dump(mode="json", exclude_unset=True))
    for name, stage in load_recipe(str(again), is_whole=True).chain.stages.items():
        assert stage.recipe == whole.chain.stages[name].recipe, name


def test_problems_are_reported_together_with_their_stages(chain):
    stages = [{"name": "a", "training": {"max_step": 3}}, {"name": "b", "training": {"epochs": -1}}]
    first, second = problems_of(chain(stages), is_whole=True)
    assert "`training.max_step` is" in first or "max_steps" in first
    assert first.endswith("(stage `a`)")
    assert second.endswith("(stage `b`)")


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ({"name": "a b"}, "`stages[1].name` must be 1 to 50 letters, digits, `.`, `_` and `-`"),
        ({"name": "short"}, "as that of another stage; rename one"),
        ({"name": "x", "from": "y"}, '`stages.x.from` must be an earlier training (short), but is "y"'),
        ({"name": "x", "start": "warm"}, '`stages.x.start` must be fresh or continued, but is "warm"'),
        ({"name": "x", "processes": 0}, "`stages.x.processes` must be a number from 1 on, but is 0"),
        ({"name": "x", "checkpoint": {"folder": "y"}}, "`stages.x.checkpoint.folder` follows from the stage before"),
        ({"name": "x", "model": {"name_or_path": "y"}}, "`stages.x.model.name_or_path` follows from the stage before"),
        ({"name": "x", "stages": []}, "`stages.x.stages` would be stages of a stage"),
    ],
)
def test_a_wrong_stage(chain, stage, problem):
    (found,) = problems_of(chain([STAGES[0], stage]), is_whole=True)
    assert problem in found


def test_the_first_stage_has_none_to_continue(chain):
    (found,) = problems_of(chain([{"name": "a", "start": "continued"}]), is_whole=True)
    assert "`stages.a.start` is continued, but no stage comes before it; use fresh" in found


def test_a_command_for_one_training_takes_a_stage(chain):
    file = chain()
    assert load_recipe(file, ["stage=short"]).recipe.name == "tiny-short"
    assert problems_of(file) == [
        "`stages` has the trainings short, long, one, two, but this command takes one; choose it, as in stage=short"
    ]
    (found,) = problems_of(file, "stage=long")
    assert found.startswith("`stages`: long starts from the model of short, but")
    assert load_recipe(file, ["stage=long"], needs_data=False).recipe.name == "tiny-long"
    assert problems_of(file, "stage=x")[0] == '`stage` must be one of short, long, one, two, but is "x"'
    assert "`stages.x` is no stage; the stages are short, long, one, two" in problems_of(file, "stages.x.name=y")[0]
    with pytest.raises(RecipeError, match=r"`stages` are several trainings, but this takes one"):
        plan_run(load_recipe(file, is_whole=True).recipe, 1)
