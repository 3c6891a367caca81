"""A run from its recipe to its results: open the session, meet, prepare, open the mesh, assemble, resume, loop, finish.

An `ElasticLaunch` surrounds it if nodes may join and leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer.base import extensions
from trainer.base.errors import StoppedError
from trainer.observe.observer import NO_CALLBACKS, Callbacks, Observer
from trainer.observe.records import Compilation, EndRecord
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.stopping import StopRequest
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.registered import asked_for
from trainer.training.assembly import Assembly, assemble
from trainer.training.checking import prepare_checked
from trainer.training.describing import DescribedModels
from trainer.training.first_day import first_day
from trainer.training.loop import Ending, Loop
from trainer.training.process_group import meet_ranks, open_device, open_mesh, process_group, together
from trainer.training.run_data import PreparedData
from trainer.training.run_parts import best_evaluation, facts_of, idling_of, meter_of, notes_of
from trainer.training.run_tool import RunTools
from trainer.training.session import Results, Session, is_complete, open_session

if TYPE_CHECKING:
    from trainer.ranks.joining import Rendezvous
    from trainer.recipe.reading.loading import ResolvedRecipe


def run(resolved: ResolvedRecipe, environment: LaunchEnvironment, callbacks: Callbacks = NO_CALLBACKS) -> int:
    """Train the recipe as the rank of `environment`, and return the exit code; the errors are those of `train`."""
    with StopRequest() as stop:
        return train(resolved, environment, stop, callbacks=callbacks).exit_code


def train(
    resolved: ResolvedRecipe,
    environment: LaunchEnvironment,
    stop: StopRequest,
    meeting: Rendezvous | None = None,
    saves: bool = True,
    observer: Observer | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> EndRecord:
    """Train the recipe as the rank of `environment`, and return how it ended.

    Args:
        stop: the requests to stop; its handlers stay until the caller leaves it.
        meeting: the rendezvous of the ranks; None: they meet here.
        saves: whether to write checkpoints and the model; a measurement does not need them.
        observer: an observer of this rank, beside the recipe's.

    Raises:
        TrainerError: a user error; the observers have shown the end.
    """
    plan = plan_run(resolved.recipe, environment.world_size, environment.local_world_size)
    recipe = plan.recipe
    with (
        open_session(recipe, environment, observer, callbacks) as session,
        extensions.around("run", resolved, environment, asked=asked_for("run", recipe)) as tools,
    ):
        # The order matters. Ranks agree before anything slow, read data before the process group exists, and take the
        # folder once all of them are there.
        meeting = meeting or meet_ranks(resolved, plan, environment, session.observers, callbacks)
        day = first_day(recipe, environment.rank, meeting)
        # Together: an error of data on one rank ends all of them, with its message.
        data, models = together(meeting, recipe, lambda: prepare_checked(plan, session.observers, day))
        device = open_device(environment, recipe.tf32)
        if package := plan.strategy.package:
            session.observers.preparing(f"compiling operations of {package}")
        with process_group(plan, environment, device, meeting):
            # Not before: ranks that still prepare have nothing to save, so a signal may end them at once.
            stop.listen(speaks=environment.rank == 0)
            results = _train(plan, data, models, device, session, stop, RunTools(tools), saves)
        # Behind the process group: a rank that cannot leave it has not finished.
        return session.finish(results)


def _train(
    plan: RunPlan,
    data: PreparedData,
    models: DescribedModels,
    device: torch.device,
    session: Session,
    stop: StopRequest,
    tools: RunTools,
    saves: bool,
) -> Results:
    recipe, observers = plan.recipe, session.observers
    mesh = open_mesh(plan.layout, device)
    session.take_folder(mesh)
    observers.preparing("building the model")
    parts = assemble(plan, mesh, data, models=models)
    meter = meter_of(parts)
    saver = parts.saver(observers.note, session.owner.check, lambda: bool(stop.received), saves)
    try:
        # Before the loader and the loop are made, which begin at `parts.progress`.
        resumed = saver.resume(recipe.checkpoint.resume)
    except StoppedError:
        return Results("signal")
    loop = Loop(
        recipe=recipe,
        engine=parts.engine,
        loader=parts.train_loader,
        validation=best_evaluation(parts, observers, lambda: parts.export(session.folder / "best")),
        mesh=mesh,
        observers=observers,
        meter=meter,
        saver=saver,
        steps_per_epoch=parts.steps_per_epoch,
        stop=stop,
        tools=tools,
        has_callbacks=session.has_callbacks,
        rows_per_epoch=data.num_train_rows if plan.batch.warmup else None,
    )
    tools.begin(parts, meter, saves)
    notes = [*notes_of(parts), *resumed, *loop.notes(), *tools.notes()]
    session.start(facts_of(parts, session.environment, tools.preview(parts)), saver, mesh, notes)
    if mesh.rank == 0:
        stop.watch(session.folder)
    if mesh.agree_max(stop.received):  # it came while the model was built, and there is no new step to save
        saver.close()
        return Results("signal")
    return _finish(parts, loop, loop.run(), session, saves)


def _finish(parts: Assembly, loop: Loop, ending: Ending, session: Session, saves: bool) -> Results:
    """Export and upload the model of a training that is over, and return the results."""
    saver, seconds = loop.saver, loop.meter.parts()
    saver.close()  # the checkpoint of the end is on the disk
    recipe, step, folder = parts.recipe, saver.progress.step, None
    idling = idling_of(parts)
    compilation = None
    if recipe.compile:
        from trainer.models.compiled import compilations

        compilation = Compilation(*compilations())
    if saves and is_complete(ending):
        folder = session.folder / "model"
        session.observers.doing(step, "exporting the model")
        parts.export(folder, loop.tools.export_checks(parts))
    if destinations := saver.destinations:
        session.observers.doing(step, f"uploading to {' and '.join(destinations)}")
        saver.deliver(folder)
    return Results(ending, folder, idling, compilation, seconds)
