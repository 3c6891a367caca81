"""The composition root: recipe and environment become mesh, data, model, engine and loop. Only this room knows all."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import nn

from trainer.base.disk import UNFINISHED, replace_folder
from trainer.base.errors import ExitCode, LostPeerError, TrainerError
from trainer.checkpoint.progress import Progress
from trainer.checkpoint.saving import Saved, Saver, identity
from trainer.checkpoint.store import FOLDER_SECONDS, CheckpointStore
from trainer.data.collate import TokenMasking
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.data.order import GlobalOrder
from trainer.data.sources import load_splits
from trainer.data.split import EncodedSplit
from trainer.engine.building import build_engine, partitioned_loading, planned_cuts
from trainer.engine.engine import Engine
from trainer.models.building import BuiltModel, build_model, save_configuration
from trainer.models.statistics import buffers_hash
from trainer.observe.build import build_observers
from trainer.observe.heartbeat import Heartbeat, forget_statuses
from trainer.observe.memory import peak_memory_bytes
from trainer.observe.meter import Meter
from trainer.observe.observer import Observers
from trainer.observe.records import EndRecord, Idling, RunInfo
from trainer.observe.watchdog import Watchdog
from trainer.parallel.mesh import ParallelMesh, init_process_group
from trainer.ranks.command import command_line
from trainer.ranks.environment import LaunchEnvironment, cache_folder
from trainer.ranks.joining import Meeting, meet
from trainer.ranks.stopping import StopRequest
from trainer.recipe.drawing import layers_text
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.schema import Recipe
from trainer.tasks.metrics import greater_is_better
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task
from trainer.training.agreement import check_agreement, run_facts
from trainer.training.evaluation import Evaluator
from trainer.training.loop import Ending, Loop
from trainer.training.model_card import write_card
from trainer.training.preparing import Preparation, load_preparation
from trainer.training.run_info import model_size, run_info, total_peak_flops, versions

if TYPE_CHECKING:
    from trainer.reading.loading import ResolvedRecipe

_LEAST_COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # before the first step, ranks may wait for one that still reads
_AFTER_WATCHDOG = timedelta(minutes=1)  # which tells more than a collective does, so it speaks first
_ENDINGS: dict[Ending, tuple[ExitCode, str | None]] = {
    "finished": (ExitCode.DONE, None),
    "patience": (ExitCode.DONE, "no better evaluation within `evaluation.patience`"),
    "stop_at_step": (ExitCode.STOPPED, "`training.stop_at_step` is reached"),
    "signal": (ExitCode.STOPPED, "stopped by a signal"),
    "stop_file": (ExitCode.STOPPED, "stopped by the file `stop` in the folder, which is removed"),
}
_OUTCOMES: dict[ExitCode, Literal["finished", "stopped"]] = {ExitCode.DONE: "finished", ExitCode.STOPPED: "stopped"}


@dataclass
class _Session:
    """What an end, good or bad, has to tell, as far as the run has come."""

    folder: Path
    observers: Observers
    command: str
    heartbeat: Heartbeat
    watchdog: Watchdog
    started: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)
    model_folder: Path | None = None
    idling: Idling | None = None

    def start(self, info: RunInfo) -> None:
        """Tells the observers that the run is built."""
        self.observers.start(info)
        forget_statuses(self.folder)

    def end(self, code: ExitCode, message: str | None) -> int:
        """Tells the observers how it ended and gives the exit code."""
        self.observers.end(
            EndRecord(
                outcome=_OUTCOMES.get(code, "failed"),
                exit_code=int(code),
                folder=self.folder,
                model_folder=self.model_folder,
                best=self.progress.best,
                step=self.progress.step,
                seconds=time.monotonic() - self.started,
                resume_command=self.command,
                message=message,
                pipeline=self.idling,
            )
        )
        return int(code)


@dataclass(frozen=True)
class _Data:
    """The prepared splits, the task that knows their labels or what makes them, and what prepared them."""

    task: Task
    masking: TokenMasking | None
    preparation: Preparation
    train: EncodedSplit
    validation: EncodedSplit | None


def run(resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
    """Trains the recipe as the rank that `environment` says, and returns the exit code.

    Raises:
        TrainerError: what the user can mend; the end summary has been shown.
    """
    recipe = resolved.recipe
    plan = plan_run(recipe, environment.world_size, environment.local_world_size)
    session = _session(recipe, environment)
    with StopRequest() as stop, closing(session.observers):
        try:
            meeting = _met(resolved, plan, environment) if environment.world_size > 1 else None
            # Ranks share the cache of the data through file locks; its errors need no process group to be told.
            data = (
                _prepare_data(recipe)
                if meeting is None
                else meeting.together(lambda: _prepare_data(recipe), _collective_timeout(recipe).total_seconds())
            )
            device = _device(environment)
            with _process_group(plan, environment, device, meeting):
                stop.listen()
                ending = _train(plan, environment, data, device, session, stop)
            return session.end(*_ENDINGS[ending])
        except TrainerError as error:
            session.end(error.exit_code, str(error))
            raise
        except BaseException as error:
            session.end(ExitCode.FAILED, f"{type(error).__name__}: {error}")
            raise


def _met(resolved: ResolvedRecipe, plan: RunPlan, environment: LaunchEnvironment) -> Meeting:
    """The meeting of all ranks, which have found that they run the same thing and reach each other.

    Before anything that takes long, so that what is wrong with the cluster shows at once.
    """
    timeout = plan.recipe.parallel.join_timeout.seconds
    meeting = meet(environment, timeout)
    check_agreement(run_facts(resolved.values, plan, _device_type()), lambda value: meeting.gather(value, timeout))
    meeting.check_network(timeout)
    return meeting


def _session(recipe: Recipe, environment: LaunchEnvironment) -> _Session:
    """What tells of this rank: rank 0 alone to the user, each to the others."""
    heartbeat = Heartbeat(environment.rank)
    seconds = recipe.parallel.stall_timeout.seconds
    watchdog = Watchdog(heartbeat, seconds, environment.error_file, lambda reason: session.end(ExitCode.FAILED, reason))
    shown = [build_observers(recipe.logging, sys.stdout)] if environment.rank == 0 else []
    # The watchdog is closed first: what follows would be no sign of life.
    observers = Observers([*shown, heartbeat, watchdog])
    session = _Session(Path(recipe.checkpoint.folder), observers, command_line(environment), heartbeat, watchdog)
    return session


def _prepare_data(recipe: Recipe) -> _Data:
    preparation = load_preparation(recipe)
    splits = load_splits(recipe.data)
    task = build_task(recipe.task).resolve(splits.train.rows, splits.train.where)
    masking = preparation.masking(task, recipe.training.seed)
    cache = Path(recipe.data.cache) if recipe.data.cache else cache_folder()
    train = preparation.encode(splits.train, task, cache)
    validation = None
    if splits.validation is not None:
        validation = preparation.encode(splits.validation, task, cache)
    return _Data(task, masking, preparation, train, validation)


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device(environment: LaunchEnvironment) -> torch.device:
    if _device_type() == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def _collective_timeout(recipe: Recipe) -> timedelta:
    stall = timedelta(seconds=recipe.parallel.stall_timeout.seconds)
    return max(stall, _LEAST_COLLECTIVE_TIMEOUT) + _AFTER_WATCHDOG


@contextmanager
def _process_group(
    plan: RunPlan, environment: LaunchEnvironment, device: torch.device, meeting: Meeting | None
) -> Iterator[None]:
    """Joins the other ranks for as long as the training lasts."""
    if meeting is None and not plan.strategy.cuts_anything:
        yield
        return
    store = dist.HashStore() if meeting is None else meeting.store  # type: ignore[attr-defined]
    init_process_group(device, environment.rank, environment.world_size, store, _collective_timeout(plan.recipe))
    try:
        yield
        _let_go()
        dist.barrier()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their variables hold model and engine
        _let_go()
        if _is_lost_peer(error):
            raise LostPeerError(
                "another rank failed or was killed, so this one cannot go on; what that rank says tells why"
            ) from error
        raise
    finally:
        dist.destroy_process_group()


def _is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because of another rank; gloo says so by a plain `RuntimeError` of its transport."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _let_go() -> None:
    """Frees what still holds the process group: on gloo, the interpreter aborts at exit where something does."""
    gc.collect()


def _train(
    plan: RunPlan,
    environment: LaunchEnvironment,
    data: _Data,
    device: torch.device,
    session: _Session,
    stop: StopRequest,
) -> Ending:
    """Builds everything on the joined ranks, runs the loop, and exports what it learned."""
    recipe, layout, task = plan.recipe, plan.layout, data.task
    mesh = ParallelMesh(device, pp=layout.pp, dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard, tp=layout.tp)
    with partitioned_loading(plan, device) as gather:
        built = [
            build_model(recipe.model, recipe.training, task.auto_class_name, task.model_options(), gather, cut)
            for cut in planned_cuts(plan, mesh)
        ]
    models = [part.model for part in built]
    model_files = _files_beside_weights(models[0], data.preparation) if mesh.rank == 0 else {}
    beside = {"buffers": buffers_hash(models, mesh), "normalisation": data.preparation.normalisation}
    total_steps = plan.total_steps(len(data.train))
    engine = build_engine(built, task, mesh, plan, total_steps)
    meter = Meter(model_size(models, engine.placements, mesh), total_peak_flops(recipe, mesh))

    patience = min(FOLDER_SECONDS, recipe.parallel.join_timeout.seconds)
    store = CheckpointStore(session.folder, recipe.checkpoint.keep, patience)
    saved = Saved(
        identity(recipe, data.train.content_hash, beside),
        {"recipe": recipe.model_dump(mode="json"), "layout": asdict(layout), "versions": versions()},
        model_files,
    )
    saver = Saver(store, engine, mesh, saved, recipe.checkpoint.asynchronous)
    notes = [*built[0].notes, *_cut_notes(data, recipe.data.max_length), *saver.resume(recipe.checkpoint.resume)]
    progress = session.progress = saver.progress
    card = partial(write_card, origin=saved.origin, progress=progress)
    info = run_info(
        plan,
        environment,
        task,
        data.train,
        data.validation,
        models,
        engine.placements,
        mesh,
        progress.step or None,
        _stage_texts(plan, built, mesh),
    )
    mesh.on_rank_zero(lambda: session.start(info))
    session.heartbeat.begin(session.folder, progress.step)
    session.watchdog.begin()
    if mesh.rank == 0:
        stop.watch(session.folder)
    for note in notes:
        session.observers.note(note)

    best_metric = recipe.evaluation.best or task.metric_names[0]
    batches = _train_batches(plan, data, mesh, total_steps, progress)
    ending = Loop(
        recipe=recipe,
        engine=engine,
        batches=batches,
        evaluator=_evaluator(recipe, engine, data, mesh, session.observers),
        best_metric=best_metric,
        greater_is_better=greater_is_better(best_metric),
        mesh=mesh,
        observers=session.observers,
        meter=meter,
        progress=progress,
        steps_per_epoch=info.steps_per_epoch,
        total_steps=total_steps,
        row_ids=batches.row_ids,
        saver=saver,
        keep_best=lambda: _export(engine, data.preparation, card, mesh, session.folder / "best"),
        peak_memory=lambda: peak_memory_bytes(device),
        stop=stop,
    ).run()
    session.idling = _idling(plan, engine, mesh)
    if _ENDINGS[ending][0] == ExitCode.DONE:
        session.observers.doing(progress.step, "exporting the model")
        folder = session.folder / "model"
        _export(engine, data.preparation, card, mesh, folder)
        session.model_folder = folder
    return ending


def _stage_texts(plan: RunPlan, built: Sequence[BuiltModel], mesh: ParallelMesh) -> tuple[str, ...]:
    """How the pipeline runs, and what each of its stages has; on rank 0, and empty without one. All must call it."""
    if plan.pipeline is None:
        return ()
    stages = plan.pipeline.stages_of(mesh.index("pp"))
    sizes = [sum(p.numel() for p in part.model.parameters()) for part in built]
    layers = [part.part.layers if part.part else () for part in built]
    gathered = mesh.gather(list(zip(stages, layers, sizes, strict=True)) if mesh.is_first_replica else [])
    texts = [str(plan.pipeline)]
    for stage, names, size in sorted(part for parts in gathered or [] for part in parts):
        rank = plan.pipeline.rank_of(stage)
        texts.append(f"stage {stage} on pipeline rank {rank}: {layers_text(names)}; {size:,} parameters a rank")
    return tuple(texts)


def _idling(plan: RunPlan, engine: Engine, mesh: ParallelMesh) -> Idling | None:
    """What the pipeline ranks waited, on rank 0. All must call it."""
    if plan.pipeline is None:
        return None
    gathered = mesh.gather((mesh.index("pp"), engine.idle_share()))
    measured: dict[int, list[float]] = {}
    for rank, share in gathered or []:
        if share is not None:
            measured.setdefault(rank, []).append(share)
    if not measured:
        return None
    means = tuple(sum(measured[rank]) / len(measured[rank]) for rank in sorted(measured))
    return Idling(means, plan.pipeline.bubble)


def _train_batches(plan: RunPlan, data: _Data, mesh: ParallelMesh, total_steps: int, progress: Progress) -> TrainLoader:
    recipe = plan.recipe
    lengths = data.train.lengths if recipe.data.group_by_length else None
    return TrainLoader(
        data.train,
        GlobalOrder(len(data.train), lengths, plan.batch.global_batch_size, recipe.training.seed),
        plan.batch,
        mesh.index("dp"),
        data.preparation.batching,
        total_steps,
        start_sample=progress.samples,
        num_workers=recipe.data.num_workers,
        pin_memory=mesh.device.type == "cuda",
        masking=data.masking,
    )


def _evaluator(
    recipe: Recipe, engine: Engine, data: _Data, mesh: ParallelMesh, observers: Observers
) -> Evaluator | None:
    if data.validation is None or recipe.evaluation.every is None:
        return None
    batches = EvalLoader(
        data.validation,
        recipe.evaluation.batch_size,
        mesh.index("dp"),
        mesh.size("dp"),
        data.preparation.batching,
        num_workers=recipe.data.num_workers,
        pin_memory=mesh.device.type == "cuda",
        masking=data.masking,
    )
    return Evaluator(engine, batches, len(data.validation), data.task, mesh, observers)


def _cut_notes(data: _Data, max_length: int) -> list[str]:
    return [
        f"cut to `data.max_length` ({max_length} tokens): {split.num_cut:,} of {len(split):,} {name} rows"
        for name, split in (("training", data.train), ("validation", data.validation))
        if split is not None and split.num_cut
    ]


def _files_beside_weights(model: nn.Module, preparation: Preparation) -> dict[str, bytes]:
    """What a Hugging Face folder holds beside the weights, by name: configurations, tokenizer or image processor."""
    with tempfile.TemporaryDirectory(prefix="trainer-") as name:
        save_configuration(model, Path(name))
        preparation.save(Path(name))
        return {file.name: file.read_bytes() for file in sorted(Path(name).iterdir())}


def _export(
    engine: Engine, preparation: Preparation, card: Callable[[Path], None], mesh: ParallelMesh, folder: Path
) -> None:
    """Writes a Hugging Face folder, whole or not at all: beside its place first, then into it.

    Raises:
        TrainerError: it cannot be written.
    """
    temporary = folder.with_name(f"{UNFINISHED}{folder.name}")

    def complete() -> None:
        try:
            preparation.save(temporary)
            card(temporary)
            replace_folder(temporary, folder)
        except OSError as error:
            raise TrainerError(f"the model could not be written to {folder}: {error}") from error

    if mesh.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed here
    engine.export(temporary)
    mesh.on_rank_zero(complete)
