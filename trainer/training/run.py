"""A run from its recipe to its results: open the mesh, assemble, resume, loop, finish."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import torch

from trainer.checkpoint.owner import FolderOwner
from trainer.observe.meter import Meter
from trainer.observe.records import EndRecord
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.stopping import StopRequest
from trainer.recipe.plan import RunPlan, plan_run
from trainer.training.assembly import PreparedData, assemble, prepare_data
from trainer.training.loop import Ending, Loop
from trainer.training.process_group import meet_ranks, open_device, open_mesh, process_group, together
from trainer.training.run_info import model_size, total_peak_flops
from trainer.training.session import Session, is_complete, open_session

if TYPE_CHECKING:
    from trainer.reading.loading import ResolvedRecipe
    from trainer.recipe.schema import Recipe


def run(resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
    """Train the recipe as the rank of `environment`, and return the exit code; the errors are those of `train`."""
    return train(resolved, environment).exit_code


def train(resolved: ResolvedRecipe, environment: LaunchEnvironment) -> EndRecord:
    """Train the recipe as the rank of `environment`, and return how it ended.

    Raises:
        TrainerError: the user can mend the cause; the observers have shown the end.
    """
    recipe = resolved.recipe
    plan = plan_run(recipe, environment.world_size, environment.local_world_size)
    session = open_session(recipe, environment)
    with (
        StopRequest() as stop,
        FolderOwner(session.folder) as owner,
        closing(session.observers),
        session.reports_failures(),
    ):
        meeting = meet_ranks(resolved, plan, environment)
        data = together(meeting, recipe, lambda: prepare_data(recipe))
        device = open_device(environment)
        with process_group(plan, environment, device, meeting):
            stop.listen()
            ending = _train(plan, environment, data, device, session, stop, owner)
        return session.ended(ending)


def _train(
    plan: RunPlan,
    environment: LaunchEnvironment,
    data: PreparedData,
    device: torch.device,
    session: Session,
    stop: StopRequest,
    owner: FolderOwner,
) -> Ending:
    """Train on the joined ranks; all that holds the process group is gone when this returns."""
    recipe, observers, folder = plan.recipe, session.observers, session.folder
    mesh = open_mesh(plan.layout, device)
    unprotected = mesh.on_rank_zero(owner.take)
    parts = assemble(plan, mesh, data)
    meter = Meter(model_size(parts.models, parts.placements, mesh), total_peak_flops(recipe, mesh))

    saver = parts.saver()
    resumed = saver.resume(recipe.checkpoint.resume)
    parts.progress = session.progress = saver.progress
    notes = [
        *([unprotected] if unprotected else []),
        *([] if saver.progress.step else parts.built[0].notes),  # a checkpoint has replaced the weights
        *data.notes(recipe.data.max_length),
        *resumed,
        *_passed_stop(recipe, saver.progress.step),
    ]

    info = parts.info(environment)
    mesh.on_rank_zero(lambda: session.start(info))
    session.begin_steps()
    if mesh.rank == 0:
        stop.watch(folder)
    for note in notes:
        observers.note(note)

    ending = Loop(
        recipe=recipe,
        engine=parts.engine,
        loader=parts.train_loader,
        evaluator=parts.evaluator(observers) if recipe.evaluation.every else None,
        mesh=mesh,
        observers=observers,
        meter=meter,
        saver=saver,
        keep_best=lambda: parts.export(folder / "best"),
        steps_per_epoch=parts.steps_per_epoch,
        stop=stop,
    ).run()

    session.idling = parts.idling()
    if is_complete(ending):
        observers.doing(saver.progress.step, "exporting the model")
        parts.export(folder / "model")
        session.model_folder = folder / "model"
    return ending


def _passed_stop(recipe: Recipe, step: int) -> list[str]:
    stop = recipe.training.stop_at_step
    if stop is None or step < stop:
        return []
    return [f"`training.stop_at_step` is {stop}, but the training stands at step {step}: it goes on to its end"]
