"""Runs that nodes join and leave under torchrun: the ranks that train, and the spare ones that wait.

torchrun starts all ranks again when the nodes change, and they resume. This module imports no torch.
"""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.errors import ExitCode, RecipeError, UsageError
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.stopping import StopRequest
from trainer.recipe.elastic import check_nodes, plan_elastic
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.schema import Recipe

if TYPE_CHECKING:
    from trainer.ranks.joining import Rendezvous
    from trainer.recipe.reading.loading import ResolvedRecipe

_AGENT_SECONDS = 5.0  # until the agent of this node sees the change that others have seen; it looks ten times a second


def plan_on_ranks(recipe: Recipe, environment: LaunchEnvironment) -> RunPlan:
    """Plan a recipe on the ranks that a launcher started; if nodes may join and leave, on the most ranks that fit.

    Raises:
        RecipeError: the recipe does not fit on that many ranks.
        UsageError: the recipe or torchrun is not ready for nodes that join and leave.
    """
    if environment.elastic_nodes is None:
        return plan_run(recipe, environment.world_size, environment.local_world_size)
    check_nodes(recipe, environment.elastic_nodes, environment.local_world_size)
    if environment.has_agent_store:
        raise UsageError(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE must be 1 under torchrun's --nnodes MIN:MAX, but is not: a node that"
            " joins later would wait for an address that torchrun does not publish again; export it on all nodes"
        )
    return plan_elastic(recipe, environment.world_size, environment.local_world_size)


def among_training(environment: LaunchEnvironment, plan: RunPlan) -> LaunchEnvironment:
    """Return the place of a rank among those that train."""
    size = plan.layout.world_size
    return replace(environment, world_size=size, local_world_size=min(size, environment.local_world_size))


def spare_note(recipe: Recipe, environment: LaunchEnvironment, plan: RunPlan) -> list[str]:
    """Return a note with the number of spare ranks and the reason, if there are any."""
    training, there = plan.layout.world_size, environment.world_size
    if training == there:
        return []
    try:
        plan_run(recipe, there, environment.local_world_size)
    except RecipeError as error:
        return [f"{training} of {there} processes train, and the others wait until the nodes change: {error}"]
    raise AssertionError("a plan on all ranks is preferred")


def wait_as_spare(resolved: ResolvedRecipe, plan: RunPlan, environment: LaunchEnvironment) -> int:
    """Wait for the end of a training on the other ranks, and return its exit code.

    Raises:
        TrainerError: ranks are missing, differ from this one, or have gone.
    """
    from trainer.training.process_group import meet_ranks  # brings torch

    rendezvous = meet_ranks(resolved, plan, environment)
    assert rendezvous is not None, "others train"
    hand_over_shares(resolved.recipe, plan, environment, rendezvous)
    sys.stderr.write(
        f"rank {environment.rank} on {socket.gethostname()} waits as a spare: the training fits"
        f" {plan.layout.world_size} of the {environment.world_size} processes\n"
    )
    code: int = ExitCode.FAILED
    try:
        code = rendezvous.dismissed()
        if code in (ExitCode.DONE, ExitCode.STOPPED):
            _free_shares(resolved.recipe, environment)
    finally:
        if code:
            time.sleep(_AGENT_SECONDS)  # as `outlast_agent`; a signal ends this process at once
    return code


def hand_over_shares(
    recipe: Recipe, plan: RunPlan, environment: LaunchEnvironment, rendezvous: Rendezvous
) -> list[str]:
    """Give the ranks that train the checkpoints in memory of the spare ones, and return notes; see `hand_over`."""
    kept = recipe.checkpoint.memory
    if kept is None:
        return []
    from trainer.checkpoint.handover import hand_over  # brings torch
    from trainer.training.process_group import collective_timeout

    seconds = collective_timeout(recipe).total_seconds()
    folders = Path(kept.folder), Path(recipe.checkpoint.folder)
    return hand_over(*folders, rendezvous, environment, plan.layout.world_size, seconds)


def _free_shares(recipe: Recipe, environment: LaunchEnvironment) -> None:
    """Free the memory of this host at the end of the run, as the ranks that train do; `hand_over` may have kept it."""
    kept = recipe.checkpoint.memory
    if kept is not None and environment.local_rank == 0:
        from trainer.checkpoint.handover import free  # brings torch

        free(Path(kept.folder), Path(recipe.checkpoint.folder))


def outlast_agent(environment: LaunchEnvironment, stop: StopRequest) -> None:
    """Wait for the signal of this node's agent, after the other ranks have ended the run.

    Nodes see a change one after another. An agent that sees the exit of its ranks before the change counts a failure.
    """
    if environment.elastic_nodes is not None:
        stop.wait(_AGENT_SECONDS)
