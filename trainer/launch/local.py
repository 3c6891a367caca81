"""Start of the local ranks of a run, and entry of a rank that a launcher has started.

Without GPUs, local ranks are forks of this process and need not import torch again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.base import extensions
from trainer.base.collector import importing
from trainer.base.errors import LaunchError
from trainer.launch.rank_job import Job, num_gpus, set_threads
from trainer.observe.observer import NO_CALLBACKS, Callbacks
from trainer.ranks.environment import LaunchEnvironment, detect
from trainer.ranks.stopping import stop_before_training
from trainer.recipe.plan import plan_run
from trainer.recipe.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from trainer.launch.processes import StartMethod
    from trainer.recipe.reading.loading import ResolvedRecipe


@dataclass(frozen=True)
class Training:
    """The job that trains, with the callbacks of all ranks."""

    callbacks: Callbacks = NO_CALLBACKS

    def __call__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
        """Train as this rank, and return the exit code."""
        if environment.elastic_nodes is not None:
            with importing():
                from trainer.recipe.elastic_launch import elastic_launch

                train = extensions.resolved(elastic_launch(environment.elastic_nodes).train)
            return int(train(resolved, environment, self.callbacks))
        with importing():
            from trainer.training.run import run

        return run(resolved, environment, self.callbacks)


_TRAINING = Training()


def run_or_join(resolved: ResolvedRecipe, processes: int | None, max_restarts: int = 0, job: Job = _TRAINING) -> int:
    """Run a recipe on `processes` ranks, or as a rank of the launcher that started this process.

    Args:
        processes: the number of ranks; None: one for each GPU, or one process without GPUs.

    Returns:
        The exit code.

    Raises:
        RecipeError: the recipe does not fit on that many ranks.
        LaunchError: the ranks contradict the request or the devices.
        TrainerError: a rank failed; the error is of the class that the rank raised.
    """
    if resolved.chain is not None:
        return resolved.chain.run(processes, max_restarts, job)
    with stop_before_training():
        # Errors of the recipe and the launch come before the first rank starts.
        environment, number = plan_start(resolved, processes, max_restarts)
        if environment.has_ranks:  # its launcher ends all ranks at the first error, and waits for no advice
            return join(resolved, environment, job)
        with extensions.around("launch"):
            if number is None:
                return join(resolved, environment, job)
            return _start(resolved, number, max_restarts, job)


def number_of_ranks(processes: int | None) -> int:
    """Return the number of ranks that `run_or_join` would use for a strategy of several ranks."""
    environment = detect()
    if environment.has_ranks:
        return environment.world_size
    return _number_of_processes(environment, processes, STRATEGIES["ddp"])


def plan_start(
    resolved: ResolvedRecipe, processes: int | None, max_restarts: int
) -> tuple[LaunchEnvironment, int | None]:
    """Return the environment of this process, and the number of ranks to start, None if it is a rank itself.

    Raises:
        RecipeError: the recipe does not fit on that many ranks.
        LaunchError: the ranks contradict the request or the devices.
    """
    environment = detect()
    recipe = resolved.recipe
    if environment.feature is not None:
        packages = {name: row.package for name, row in STRATEGIES.items()}
        environment.feature.check(recipe.precision, recipe.parallel.strategy, packages)
    if environment.has_ranks:
        if processes not in (None, environment.world_size):
            raise LaunchError(
                f"--processes is {processes}, but {environment.launcher} started {environment.world_size} ranks;"
                " drop --processes"
            )
        if max_restarts:
            raise LaunchError(
                f"--max-restarts is {max_restarts}, but {environment.launcher} started the ranks, and only their"
                " launcher can restart them; drop --max-restarts, and let the launcher or the batch system restart"
            )
        if environment.elastic_nodes is not None:
            from trainer.recipe.elastic_launch import elastic_launch

            elastic_launch(environment.elastic_nodes).check(recipe, environment)
        else:
            plan_run(recipe, environment.world_size, environment.local_world_size)
        if num_gpus() != 1:  # a batch system may show each rank only its own GPU; the ranks compare them
            _require_devices(environment.local_world_size)
        return environment, None
    number = _number_of_processes(environment, processes, STRATEGIES[recipe.parallel.strategy])
    # Planned here too, so that a recipe that does not fit fails once, and before any rank starts.
    plan_run(recipe, number)
    _require_devices(number)
    return environment, None if number == 1 and not max_restarts else number


def _number_of_processes(environment: LaunchEnvironment, processes: int | None, strategy: Strategy) -> int:
    if processes is not None:
        if processes < 1:
            raise LaunchError(f"--processes must be at least 1, but is {processes}")
        return processes
    if environment.is_alone and environment.feature is not None:
        return environment.feature.local_ranks(environment)
    return strategy.local_ranks(num_gpus())


def _require_devices(local_ranks: int) -> None:
    """Require one GPU for each rank if the machine has GPUs; ranks on the same GPU would wait for each other."""
    gpus = num_gpus()
    if 0 < gpus < local_ranks:
        raise LaunchError(
            f"{local_ranks} processes need {local_ranks} GPUs, but this machine shows {gpus};"
            f" use at most {gpus}, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
        )


def join(resolved: ResolvedRecipe, environment: LaunchEnvironment, job: Job = _TRAINING) -> int:
    """Run the rank of this process; return its exit code."""
    set_threads(environment)
    return job(resolved, environment)


def run_on_fresh_ranks(resolved: ResolvedRecipe, number: int, job: Job, rank: LaunchEnvironment | None = None) -> int:
    """Run a job on `number` new local processes, even if it is one, and return the exit code.

    With `rank`, run that rank alone in one new process; other processes run the other ranks.

    Raises:
        RecipeError: the recipe does not fit on that many ranks.
        LaunchError: there are too few GPUs.
        TrainerError: a rank failed; the error is of the class that the rank raised.
        StoppedError: a signal arrived before the first step.
    """
    local = rank.local_world_size if rank else number
    plan_run(resolved.recipe, number, local)
    if rank is None or num_gpus() != 1:  # see `plan_start`
        _require_devices(local)
    return _start(resolved, number, 0, job, rank)


def _start(
    resolved: ResolvedRecipe, number: int, max_restarts: int, job: Job, rank: LaunchEnvironment | None = None
) -> int:
    method = _start_method()
    from trainer.launch.attempts import run_ranks  # one process alone starts no other

    return run_ranks(resolved, number, max_restarts, job, rank, method)


def _start_method() -> StartMethod:
    """Return fork, which keeps torch imported, on Linux without GPUs: CUDA in use does not survive a fork."""
    return "spawn" if num_gpus() or sys.platform != "linux" else "fork"
