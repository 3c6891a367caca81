"""Trainings that nodes join and leave under torchrun: some ranks train, and spare ones wait for them.

torchrun starts all ranks again when the nodes change, and they resume.
"""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.base.errors import ExitCode, LostPeerError, RecipeError
from trainer.base.terminal import say
from trainer.checkpoint.registered import registered_tiers
from trainer.features.elastic.layouts import plan_elastic
from trainer.features.elastic.spares import dismiss, dismissed, meeting_of_first
from trainer.observe.observer import NO_CALLBACKS, Callbacks
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.stopping import StopRequest
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.schema import Recipe
from trainer.training.process_group import collective_timeout, meet_ranks
from trainer.training.run import train

if TYPE_CHECKING:
    from trainer.ranks.joining import Rendezvous
    from trainer.recipe.reading.loading import ResolvedRecipe

_AGENT_SECONDS = 5.0  # until the agent of this node sees the change that others have seen; it looks ten times a second


def run_elastic(resolved: ResolvedRecipe, everyone: LaunchEnvironment, callbacks: Callbacks = NO_CALLBACKS) -> int:
    """Train on the most ranks that the recipe fits, while the others wait; return the exit code of the training.

    Args:
        everyone: this rank among all.

    Raises:
        TrainerError: a user error, ranks are missing, or they have exited.
    """
    plan = plan_elastic(resolved.recipe, everyone.world_size, everyone.local_world_size)
    size = plan.layout.world_size
    # The first ranks train and the last ones are spare, so that ranks of a training have no gaps.
    if everyone.rank >= size:
        meeting = _meet(resolved, plan, everyone, callbacks)
        assert meeting is not None, "others train"
        return wait_as_spare(resolved.recipe, plan, everyone, meeting)
    environment = replace(everyone, world_size=size, local_world_size=min(size, everyone.local_world_size))
    spares = everyone.world_size - size
    with StopRequest() as stop:
        try:
            meeting = _meet(resolved, plan, everyone, callbacks)
            # The ranks that train need a meeting of their own: spare ranks answer none of its collectives.
            own = meeting_of_first(meeting, environment) if meeting is not None and spares else meeting
            code = train(resolved, environment, stop, own, callbacks=callbacks).exit_code
            if meeting is not None and spares and everyone.rank == 0:
                # Spare ranks wait for this code, and exit with it.
                dismiss(meeting, spares, code)
        except LostPeerError:
            stop.wait(_AGENT_SECONDS)
            raise
        if code == ExitCode.STOPPED:
            # Nodes see a change one after another. An agent that sees the exit of its ranks before the change counts a
            # failure, so they wait for its signal.
            stop.wait(_AGENT_SECONDS)
    return code


def _meet(
    resolved: ResolvedRecipe, plan: RunPlan, everyone: LaunchEnvironment, callbacks: Callbacks
) -> Rendezvous | None:
    """Meet all ranks, and move the checkpoints in the memory of spare ranks to those that train."""
    recipe, size = resolved.recipe, plan.layout.world_size
    meeting = meet_ranks(resolved, plan, everyone, callbacks=callbacks)
    if meeting is None or everyone.world_size == size:
        return meeting
    notes = [_spare_note(recipe, everyone, size)]
    seconds = collective_timeout(recipe).total_seconds()
    for tier in registered_tiers(recipe):
        notes += tier.hand_over(recipe, meeting, everyone, size, seconds)
    if everyone.rank == 0:
        say(*notes, err=True)
    return meeting


def _spare_note(recipe: Recipe, everyone: LaunchEnvironment, size: int) -> str:
    try:
        plan_run(recipe, everyone.world_size, everyone.local_world_size)
    except RecipeError as error:
        return f"{size} of {everyone.world_size} processes train, and the others wait until the nodes change: {error}"
    raise AssertionError("a plan on all ranks is preferred")


def wait_as_spare(recipe: Recipe, plan: RunPlan, environment: LaunchEnvironment, meeting: Rendezvous) -> int:
    """Wait for the end of a training on the other ranks, and return its exit code.

    Raises:
        LostPeerError: the training has failed.
    """
    say(
        f"rank {environment.rank} on {socket.gethostname()} waits as a spare: the recipe uses"
        f" {plan.layout.world_size} of the {environment.world_size} processes",
        err=True,
    )
    code: int = ExitCode.FAILED
    try:
        code = dismissed(meeting)
        if code in (ExitCode.DONE, ExitCode.STOPPED) and environment.local_rank == 0:
            for tier in registered_tiers(recipe):
                tier.free(recipe)
    finally:
        if code:
            time.sleep(_AGENT_SECONDS)  # for the agent, as above; a signal ends this process at once
    return code
