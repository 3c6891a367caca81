"""Layouts of a run that nodes join and leave: the number of ranks that train, for any number that is there.

The global batch is the recipe's. `parallel.elastic` names the axis that follows the number of ranks; the others are
fixed.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod

from trainer.base.errors import RecipeError, UsageError
from trainer.features.elastic.section import axis_of
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.elastic_launch import ElasticLaunch
from trainer.recipe.plan import RunPlan, axis_degree, plan_run
from trainer.recipe.schema import Parallel, Recipe


class ElasticLayouts(ElasticLaunch):
    """The launches of `parallel.elastic`."""

    train = "trainer.features.elastic.run:run_elastic"

    def fitted(self, parallel: Parallel, num_ranks: int) -> Parallel:
        if axis_of(parallel) != "shards" or parallel.shard == "auto":
            return parallel
        ranks_per_row = prod(axis_degree(parallel).values()) * parallel.tensor
        num_data_ranks = max(1, num_ranks // (ranks_per_row * parallel.pipeline.stages))
        return parallel.model_copy(update={"shard": min(parallel.shard, num_data_ranks)})

    def summary(self, recipe: Recipe, num_ranks: int) -> str:
        most = max(16, num_ranks)
        sizes = ", ".join(map(str, fitting_sizes(recipe, most)))
        return f"{axis_of(recipe.parallel)}: of up to {most} processes, all train if there are {sizes}"

    def check(self, recipe: Recipe, environment: LaunchEnvironment) -> None:
        assert environment.elastic_nodes is not None
        require_nodes(recipe, environment.elastic_nodes, environment.local_world_size)
        if environment.has_agent_store:
            raise UsageError(
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE must be 1 under torchrun's --nnodes MIN:MAX, but is not: a node"
                " that joins later would wait for an address that torchrun does not publish again; export it on all"
                " nodes"
            )
        plan_elastic(recipe, environment.world_size, environment.local_world_size)


def plan_elastic(recipe: Recipe, world_size: int, local_world_size: int) -> RunPlan:
    """Plan on the most ranks that the recipe fits: whole nodes, or a part of one. The layout has their number.

    Args:
        recipe: A recipe with an axis in `parallel.elastic`.

    Raises:
        RecipeError: The recipe fits no number of ranks up to this one; it is the error for `world_size`.
    """
    whole_nodes = range(world_size, local_world_size, -local_world_size)
    problem: RecipeError | None = None
    # From the most ranks on, so the first plan that fits has the most.
    for size in (*whole_nodes, *range(min(world_size, local_world_size), 0, -1)):
        try:
            return plan_run(recipe, size, min(size, local_world_size))
        except RecipeError as error:
            problem = problem or error
    assert problem is not None, "there is at least one rank"
    raise problem


def require_nodes(recipe: Recipe, nodes: tuple[int, int], local_world_size: int) -> None:
    """Check that a recipe fits an elastic launch, so that no later change of the nodes can end the run.

    Raises:
        UsageError: `parallel.elastic` is none, the run may not resume, or the recipe does not fit the most or the
            least nodes.
    """
    least, most = nodes
    launch = f"torchrun's --nnodes {least}:{most}"
    if axis_of(recipe.parallel) == "none":
        raise UsageError(
            f"`parallel.elastic` must name the axis that follows the nodes under {launch}, but is none; set it to data,"
            f" or use --nnodes {most}"
        )
    if recipe.checkpoint.resume == "never":
        raise UsageError(
            f"`checkpoint.resume` must be auto under {launch}, because a change of the nodes starts the ranks again,"
            " but is never; set it to auto, and name an empty `checkpoint.folder`"
        )
    for number, plan, other in ((most, plan_run, "largest"), (least, plan_elastic, "smallest")):
        try:
            plan(recipe, number * local_world_size, local_world_size)
        except RecipeError as error:
            raise UsageError(f"with {number} nodes, the {other} number of {launch}: {error}") from error


def fitting_sizes(recipe: Recipe, most: int) -> list[int]:
    """Return the numbers of ranks up to `most`, on one machine, on which all ranks train."""
    fitting = []
    for size in range(1, most + 1):
        with suppress(RecipeError):
            plan_run(recipe, size)
            fitting.append(size)
    return fitting
