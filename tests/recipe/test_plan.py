from __future__ import annotations

import pytest

from trainer.errors import RecipeError
from trainer.recipe.loading import load_recipe
from trainer.recipe.plan import Layout, plan_run


@pytest.mark.parametrize(
    ("ranks", "micro", "expected"),
    [
        (1, 8, (8, 4)),
        (4, 8, (8, 1)),
        (2, 100, (16, 1)),  # no more rows than a rank has
        (1, 5, (5, 7)),
        (2, 5, (4, 4)),  # as even as the most rows allow
    ],
)
def test_the_batch_follows_from_ranks_and_microbatch(ranks: int, micro: int, expected: tuple[int, int]) -> None:
    recipe = load_recipe("bert_base_mrpc", [f"training.micro_batch_size={micro}"]).recipe
    batch = plan_run(recipe, ranks).batch
    assert (batch.micro_batch_size, batch.num_microbatches) == expected
    assert batch.micro_batch_size <= micro
    assert batch.rank_batch_size * ranks == 32
    assert batch.num_microbatches * batch.micro_batch_size >= batch.rank_batch_size


def test_a_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    recipe = load_recipe("bert_base_mrpc").recipe
    with pytest.raises(RecipeError) as caught:
        plan_run(recipe, 5)
    assert str(caught.value) == (
        "`training.global_batch_size` must be divisible by the data-parallel size 5, but is 32; use 30 or 35,"
        " or a number of processes that divides 32"
    )
    with pytest.raises(RecipeError, match="use 64, or"):
        plan_run(recipe, 64)


def test_steps_count_the_ragged_last_batch() -> None:
    plan = plan_run(load_recipe("bert_base_mrpc").recipe, 1)
    assert (plan.steps_per_epoch(64), plan.steps_per_epoch(65)) == (2, 3)
    assert plan.total_steps(65) == 9
    assert plan_run(load_recipe("bert_base_mrpc", ["training.max_steps=4"]).recipe, 1).total_steps(65) == 4


def test_plans_read_as_sentences() -> None:
    plan = plan_run(load_recipe("bert_base_mrpc").recipe, 4)
    assert str(plan.batch) == "32 rows a step = 4 data-parallel ranks x 1 microbatch of at most 8 rows"
    assert str(Layout()) == "one process"
    assert str(Layout(dp_replicate=2, tp=4)) == "dp_replicate 2 x tp 4"
    assert Layout(dp_replicate=2, dp_shard=3, tp=4, pp=5).world_size == 120


@pytest.mark.parametrize(
    ("keys", "world_size", "local", "expected"),
    [
        (["strategy=ddp"], 4, 4, Layout(dp_replicate=4)),
        (["strategy=fsdp"], 4, 2, Layout(dp_shard=4)),
        (["strategy=zero2"], 3, 3, Layout(dp_shard=3)),
        (["strategy=hsdp"], 4, 2, Layout(dp_replicate=2, dp_shard=2)),  # auto: the ranks of a node
        (["strategy=hsdp"], 4, 4, Layout(dp_shard=4)),
        (["strategy=hsdp", "shard=4"], 8, 2, Layout(dp_replicate=2, dp_shard=4)),
        (["strategy=hsdp", "shard=1"], 2, 2, Layout(dp_replicate=2)),
        (["strategy=dp"], 1, 1, Layout()),
    ],
)
def test_the_layout_follows_from_strategy_and_ranks(keys, world_size, local, expected) -> None:
    overrides = [f"parallel.{key}" for key in keys] + ["training.global_batch_size=24"]
    plan = plan_run(load_recipe("bert_base_mrpc", overrides).recipe, world_size, local)
    assert plan.layout == expected
    assert plan.batch.data_parallel_size == world_size


def test_a_shard_group_that_does_not_divide_names_those_that_do() -> None:
    recipe = load_recipe("bert_base_mrpc", ["parallel.strategy=hsdp", "parallel.shard=3"]).recipe
    with pytest.raises(RecipeError) as caught:
        plan_run(recipe, 4)
    assert str(caught.value) == "`parallel.shard` must divide the 4 processes, but is 3; use one of 1, 2, 4"
