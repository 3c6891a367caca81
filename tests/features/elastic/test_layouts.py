from __future__ import annotations

import pytest

from trainer.base.errors import RecipeError, UsageError
from trainer.features.elastic.layouts import fitting_sizes, plan_elastic, require_nodes
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe

HSDP = ("parallel.strategy=hsdp", "parallel.shard=4")


def recipe(*overrides: str, elastic: str = "data") -> Recipe:
    """Return a recipe with a global batch of 32 rows."""
    return load_recipe("bert_base_mrpc", [f"parallel.elastic={elastic}", *overrides]).recipe


@pytest.mark.parametrize(
    ("overrides", "layouts"),
    [
        ((), {1: "one process", 2: "dp_replicate 2", 3: "dp_replicate 2", 4: "dp_replicate 4", 7: "dp_replicate 4"}),
        (("parallel.strategy=fsdp",), {3: "dp_shard 2", 8: "dp_shard 8"}),
        (("parallel.tensor=2",), {2: "tp 2", 3: "tp 2", 5: "dp_replicate 2 x tp 2", 7: "dp_replicate 2 x tp 2"}),
        (("parallel.pipeline.stages=2",), {3: "pp 2", 5: "pp 2 x dp_replicate 2"}),
        (HSDP, {4: "dp_shard 4", 7: "dp_shard 4", 8: "dp_replicate 2 x dp_shard 4"}),
    ],
)
def test_the_most_ranks_that_fit_train(overrides: tuple[str, ...], layouts: dict[int, str]) -> None:
    for size, layout in layouts.items():
        plan = plan_elastic(recipe(*overrides), size, 1)
        assert str(plan.layout) == layout
        assert plan.batch.global_batch_size == 32


def test_a_last_shard_group_shrinks_if_shards_follow() -> None:
    shards = recipe(*HSDP, elastic="shards")
    found = {size: str(plan_elastic(shards, size, 1).layout) for size in (1, 2, 3, 5, 8)}
    assert found == {
        1: "one process",
        2: "dp_shard 2",
        3: "dp_shard 2",  # 3 ranks do not divide the batch
        5: "dp_shard 4",
        8: "dp_replicate 2 x dp_shard 4",
    }
    with pytest.raises(RecipeError, match="must divide the 2 processes, but is 4"):
        plan_elastic(recipe(*HSDP), 2, 1)


def test_whole_nodes_train_or_a_part_of_one() -> None:
    assert plan_elastic(recipe(), 18, 6).layout.world_size == 4  # neither 18 nor 12 nor 6 divides 32
    assert plan_elastic(recipe(), 24, 8).layout.world_size == 16
    nodes = recipe("parallel.strategy=hsdp")
    assert str(plan_elastic(nodes, 24, 8).layout) == "dp_replicate 2 x dp_shard 8"


def test_sizes_that_fit() -> None:
    assert fitting_sizes(recipe(), 16) == [1, 2, 4, 8, 16]


def test_a_launch_that_fits_is_not_refused() -> None:
    require_nodes(recipe(), (1, 4), 1)
    require_nodes(recipe("parallel.tensor=2"), (2, 4), 1)


@pytest.mark.parametrize(
    ("overrides", "elastic", "nodes", "message"),
    [
        (
            (),
            "none",
            (1, 4),
            "`parallel.elastic` must name the axis that follows the nodes under torchrun's --nnodes 1:4, but is none;"
            " set it to data, or use --nnodes 4",
        ),
        (("checkpoint.resume=never",), "data", (1, 4), "`checkpoint.resume` must be auto under .* but is never"),
        (
            (),
            "data",
            (1, 3),
            "with 3 nodes, the largest number of torchrun's --nnodes 1:3: .*data-parallel size 3, but is 32",
        ),
        (
            ("parallel.tensor=2",),
            "data",
            (1, 4),
            "with 1 nodes, the smallest number of .* --nnodes 1:4: .*must divide the 1 process",
        ),
        (("parallel.strategy=hsdp",), "data", (1, 4), "nothing would be sharded"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(
    overrides: tuple[str, ...], elastic: str, nodes: tuple[int, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        require_nodes(recipe(*overrides, elastic=elastic), nodes, 1)
