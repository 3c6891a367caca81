"""A run from its recipe to its results: open the mesh, assemble, resume, loop, finish."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from trainer.base import extensions
from trainer.base.errors import ExitCode, LostPeerError, StoppedError
from trainer.base.text import without_secrets
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.owner import FolderOwner
from trainer.engine.optimizers.build import optimizer_notes
from trainer.models.attention import attention_notes
from trainer.models.compiled import compilations, compile_cache
from trainer.models.dropout import dropout_notes
from trainer.models.tensor_split import context_notes
from trainer.observe.meter import Meter
from trainer.observe.observer import Observer
from trainer.observe.records import Compilation, EndRecord
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.stopping import StopRequest
from trainer.recipe.plan import RunPlan
from trainer.training.assembly import assemble
from trainer.training.checking import prepare_checked
from trainer.training.elastic import (
    among_training,
    hand_over_shares,
    outlast_agent,
    plan_on_ranks,
    spare_note,
    wait_as_spare,
)
from trainer.training.loop import Ending, Loop
from trainer.training.process_group import meet_ranks, open_device, open_mesh, process_group, together
from trainer.training.run_data import PreparedData
from trainer.training.run_info import model_size, total_peak_flops
from trainer.training.session import Session, is_complete, open_session

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe
    from trainer.recipe.schema import Recipe


def run(resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
    """Train the recipe as the rank of `environment`, and return the exit code; the errors are those of `train`."""
    plan = plan_on_ranks(resolved.recipe, environment)
    if environment.rank >= plan.layout.world_size:
        return wait_as_spare(resolved, plan, environment)
    return train(resolved, environment).exit_code


def train(
    resolved: ResolvedRecipe, environment: LaunchEnvironment, saves: bool = True, observer: Observer | None = None
) -> EndRecord:
    """Train the recipe as the rank of `environment`, and return how it ended.

    Args:
        resolved: the recipe.
        environment: this rank.
        saves: whether to write checkpoints and the model; a measurement does not need them.
        observer: an observer of this rank, beside the recipe's.

    Raises:
        TrainerError: the user can mend the cause; the observers have shown the end.
    """
    plan = plan_on_ranks(resolved.recipe, environment)
    with StopRequest() as stop:
        try:
            record = _train_and_report(resolved, plan, environment, stop, saves, observer)
        except LostPeerError:
            outlast_agent(environment, stop)
            raise
        if record.exit_code == ExitCode.STOPPED:
            outlast_agent(environment, stop)
        return record


def _train_and_report(
    resolved: ResolvedRecipe,
    plan: RunPlan,
    everyone: LaunchEnvironment,
    stop: StopRequest,
    saves: bool,
    observer: Observer | None,
) -> EndRecord:
    """Train as one of the ranks that train, of `everyone`."""
    recipe, environment = resolved.recipe, among_training(everyone, plan)
    session = open_session(recipe, environment, observer)
    with (
        FolderOwner(session.folder) as owner,
        closing(session.observers),
        session.reports_failures(),
        extensions.around("run", resolved, environment) as tools,
    ):
        if everyone.world_size > 1:
            session.observers.preparing(f"waiting for {everyone.world_size} ranks")
        meeting = whole_meeting = meet_ranks(resolved, plan, everyone)
        spares = everyone.world_size - environment.world_size
        notes: list[str] = []
        if whole_meeting is not None and spares:
            meeting = whole_meeting.of_first(environment)
            notes = [*spare_note(recipe, everyone, plan), *hand_over_shares(recipe, plan, everyone, whole_meeting)]
        session.observers.preparing("checking the model")
        data = together(meeting, recipe, lambda: prepare_checked(plan, session.observers))
        device = open_device(environment, recipe.tf32)
        if plan.strategy.zero_stage:
            session.observers.preparing("compiling operations of DeepSpeed")
        with process_group(plan, environment, device, meeting):
            stop.listen(speaks=environment.rank == 0)
            ending = _train(plan, environment, data, device, session, stop, owner, saves, tools, notes)
        record = session.ended(ending, everyone.elastic_nodes is not None)
        if whole_meeting is not None and spares and environment.rank == 0:
            whole_meeting.dismiss(spares, record.exit_code)
        return record


def _train(
    plan: RunPlan,
    environment: LaunchEnvironment,
    data: PreparedData,
    device: torch.device,
    session: Session,
    stop: StopRequest,
    owner: FolderOwner,
    saves: bool,
    tools: Sequence[Any],
    more_notes: Sequence[str],
) -> Ending:
    """Train on the joined ranks; all that holds the process group is gone when this returns."""
    recipe, observers, folder = plan.recipe, session.observers, session.folder
    mesh = open_mesh(plan.layout, device)
    unprotected = mesh.on_rank_zero(owner.take)
    observers.preparing("building the model")
    parts = assemble(plan, mesh, data)
    meter = Meter(model_size(parts.models, parts.placements, mesh), total_peak_flops(recipe, mesh))

    saver = session.saver = parts.saver(owner.check, saves)
    try:
        resumed = saver.resume(recipe.checkpoint.resume, lambda: bool(stop.received))
    except StoppedError:
        return "signal"
    parts.progress = session.progress = saver.progress
    validation = data.validation.content_hash if data.validation is not None else None
    notes = [
        *([unprotected] if unprotected else []),
        *more_notes,
        *([] if saver.progress.step else parts.built[0].notes),  # a checkpoint has replaced the weights
        *data.notes(recipe.data.max_length),
        *resumed,
        *_passed_stop(recipe, saver.progress.step),
        *_other_rows(saver.progress, validation),
        *(note for tool in tools for note in tool.notes()),
        *context_notes(parts.models[0].config, recipe.parallel.context),
        *attention_notes(parts.models[0], device),
        *dropout_notes(parts.models[0], device),
        *optimizer_notes(recipe.optimizer, device),
        *(["each shape of microbatches is captured as a CUDA graph when it comes again"] * recipe.cuda_graphs),
        *([f"layers are compiled after the first microbatch; the code is kept in {compile_cache()}"] * recipe.compile),
    ]

    saver.note = observers.note
    info = parts.info(environment)
    mesh.on_rank_zero(lambda: session.start(info))
    session.begin_steps()
    if mesh.rank == 0:
        stop.watch(folder)
    for note in notes:
        observers.note(note)

    if mesh.agree_max(stop.received):  # it came while the model was built, and there is no new step to save
        saver.clear_memory()
        return "signal"
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
        validation=validation,
    ).run()
    saver.clear_memory()  # the checkpoint of the end is on the disk

    session.idling = parts.idling()
    if recipe.compile:
        session.compilation = Compilation(*compilations())
    if saves and is_complete(ending):
        observers.doing(saver.progress.step, "exporting the model")
        parts.export(folder / "model")
        session.model_folder = folder / "model"
    if saves and recipe.checkpoint.mirror:
        observers.doing(saver.progress.step, f"uploading to {without_secrets(recipe.checkpoint.mirror)}")
        saver.finish_mirror(session.model_folder)
    return ending


def _other_rows(progress: Progress, validation: str | None) -> list[str]:
    """Return a note if the best evaluation before a resumed run was that of other validation rows."""
    if progress.best is None or validation in (None, progress.best_rows):
        return []
    return ["the validation rows are others than before, so the best evaluation is looked for anew"]


def _passed_stop(recipe: Recipe, step: int) -> list[str]:
    stop = recipe.training.stop_at_step
    if stop is None or step < stop:
        return []
    return [f"`training.stop_at_step` is {stop}, but the training stands at step {step}: it goes on to its end"]
