"""The parts of a training, built from plan, mesh and data: model, engine, loaders, task.

`trainer run`, the Python interface and the parity tests all build them here.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer.base.disk import UNFINISHED, remove
from trainer.base.distribution import versions
from trainer.base.errors import TrainerError
from trainer.base.extensions import resolved
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.identity import identity
from trainer.checkpoint.registered import TierParts, registered_tiers
from trainer.checkpoint.saving import IdleSaver, Saved, Saver
from trainer.checkpoint.store import FOLDER_SECONDS, CheckpointStore
from trainer.checkpoint.tier import Tier
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.engine.builders import build_engine
from trainer.engine.engine import Engine
from trainer.models.configuration import computed_facts
from trainer.models.fill import build_model
from trainer.models.place import PlacedModel, planned_cuts
from trainer.models.save import save_configuration
from trainer.models.statistics import buffers_hash
from trainer.observe.observer import Observer
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import Placements
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.training.describing import DescribedModels, describe_models
from trainer.training.export_check import ExportCheck
from trainer.training.model_card import complete_folder
from trainer.training.run_data import PreparedData
from trainer.training.second_model import LoadedModel, second_model
from trainer.training.whole_split import Evaluator

if TYPE_CHECKING:
    from trainer.parallel.node import NodeRanks


@dataclass(frozen=True)
class Assembly:
    """All parts of a training on this rank.

    `built` holds the model, or this rank's pipeline stages of it. `progress` has the counters of the run, which a
    saver sets when it resumes; the loader of the training split starts there.
    """

    plan: RunPlan
    mesh: ParallelMesh
    data: PreparedData
    built: list[PlacedModel]
    engine: Engine
    saved: Saved
    progress: Progress

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.plan.recipe

    @property
    def task(self) -> Task:
        """The task, which knows its labels."""
        return self.data.task

    @property
    def models(self) -> list[nn.Module]:
        """The model, or this rank's stages of it, as the engine placed them."""
        return [part.model for part in self.built]

    @property
    def placements(self) -> Placements:
        """How each parameter lies over the mesh."""
        return self.engine.placements

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the training split."""
        return self.plan.steps_per_epoch(self.data.num_train_rows)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.plan.total_steps(self.data.num_train_rows)

    @property
    def train_loader(self) -> TrainLoader:
        """This rank's part of each global batch that `progress` has not passed yet; new at each access."""
        return train_batches(self.plan, self.mesh, self.data, self.progress)

    @property
    def eval_loaders(self) -> dict[str, EvalLoader]:
        """This rank's part of each split to evaluate on, by name: `validation`, or none."""
        if self.data.validation is None:
            return {}
        return {
            "validation": EvalLoader(
                self.data.validation,
                self.recipe.evaluation.batch_size,
                self.mesh.index("dp"),
                self.mesh.size("dp"),
                self.data.preparation.batching,
                num_workers=self.recipe.data.num_workers,
                pin_memory=self.mesh.device.type == "cuda",
                masking=self.data.masking,
            )
        }

    def evaluator(self, observers: Observer) -> Evaluator | None:
        """Return the evaluator of the validation split; None without such a split."""
        loader = self.eval_loaders.get("validation")
        if loader is None or self.data.validation is None:
            return None
        rows = self.data.evaluated
        return Evaluator(self.engine, loader, len(self.data.validation), self.task, self.mesh, observers, rows)

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the task's metrics over the validation split. All ranks must call it.

        Raises:
            TrainerError: the data has no validation split.
        """
        evaluator = self.evaluator(Observer())
        if evaluator is None:
            raise TrainerError("`data.validation` is null, so there is nothing to evaluate on; name a split")
        return evaluator.evaluate().metrics

    def saver(
        self,
        note: Callable[[str], None] = warnings.warn,
        check_owner: Callable[[], None] = lambda: None,
        is_stopped: Callable[[], bool] = lambda: False,
        saves: bool = True,
    ) -> Saver:
        """Return the saver of checkpoints in the run's folder, which also resumes from them.

        Args:
            check_owner: raises an error on rank 0 if the folder no longer belongs to this run.
            is_stopped: returns whether rank 0 has to stop, while a tier waits.
            saves: whether to write checkpoints.
        """
        keys = self.recipe.checkpoint
        patience = min(FOLDER_SECONDS, self.recipe.parallel.join_timeout.seconds)
        store = CheckpointStore(Path(keys.folder), keys.keep, patience)
        disk = Disk(store, self.mesh, self.saved.model_files, keys.asynchronous, check_owner)
        parts = TierParts(self.recipe, disk, self.mesh, note, is_stopped)
        others = [tier.build(parts) for tier in registered_tiers(self.recipe)] if saves else []
        # The fastest first: memory, the disk, copies elsewhere.
        fast, slow = ([tier for tier in others if tier.is_lasting == lasts] for lasts in (False, True))
        tiers: list[Tier] = [*fast, disk, *slow]
        return (Saver if saves else IdleSaver)(tiers, self.engine, self.mesh, self.saved, self.progress)

    def export(self, place: Path | str, checks: Sequence[ExportCheck] = ()) -> None:
        """Write a Hugging Face folder with its model card, whole or not at all. All ranks must call it.

        Args:
            checks: Comparisons of the folder with the trained model; their certificate stands in the card.

        Raises:
            TrainerError: It cannot be written, or a check refuses it; on every rank.
        """
        folder = Path(place)
        temporary = folder.with_name(f"{UNFINISHED}{folder.name}")

        def complete() -> None:
            try:
                _save_preparation(self.data, self.recipe, self.models[0], temporary)
                certificate = next((result for check in checks if (result := check.compare(temporary))), None)
                complete_folder(temporary, folder, self.saved.origin, self.progress, certificate)
            # A refused model must not stay, not even under its temporary name.
            except TrainerError:
                remove(temporary)
                raise
            except OSError as error:
                raise TrainerError(f"the model could not be written to {folder}: {error}") from error

        # Rank 0 makes the folder before the others write into it.
        self.mesh.on_rank_zero(lambda: _begin(temporary))
        self.engine.export(temporary)
        self.mesh.on_rank_zero(complete)


def train_batches(
    plan: RunPlan, mesh: ParallelMesh, data: PreparedData, progress: Progress | None = None
) -> TrainLoader:
    """Return this rank's part of each global batch that `progress` has not passed yet; None: of all."""
    on_gpu = mesh.device.type == "cuda"
    ahead_to = mesh.device if on_gpu and plan.copies_ahead else None
    return batches_of(plan, data, mesh.index("dp"), progress, pin_memory=on_gpu, ahead_to=ahead_to)


def batches_of(
    plan: RunPlan, data: PreparedData, data_rank: int, progress: Progress | None = None, **options: Any
) -> TrainLoader:
    """Return the part of a data-parallel rank of each global batch; `options` are those of `TrainLoader`."""
    recipe = plan.recipe
    return TrainLoader(
        data.training_rows(recipe, progress or Progress()),
        plan.batch,
        data_rank,
        data.preparation.batching,
        plan.total_steps(data.num_train_rows),
        num_workers=recipe.data.num_workers,
        masking=data.masking,
        **options,
    )


def assemble(
    plan: RunPlan,
    mesh: ParallelMesh,
    data: PreparedData,
    adapt: Callable[[nn.Module], None] | None = None,
    models: DescribedModels | None = None,
) -> Assembly:
    """Build the model and the engine. All ranks must call it.

    Args:
        adapt: changes a built model in place before the engine takes it, for example to freeze parameters. It gets
            each pipeline stage by itself, and must do the same on every rank.
        models: those of a check; None: they are described here.

    Raises:
        UsageError: the model cannot be reached, or cannot be laid out like this.
    """
    # Before the model is described: checkpoints take their recipe from this plan.
    if data.day is not None:  # checkpoints and exported folders keep it
        dated = plan.recipe.data.model_copy(update={"date": data.day})
        plan = replace(plan, recipe=plan.recipe.model_copy(update={"data": dated}))
    recipe, task = plan.recipe, data.task
    models = models or describe_models(recipe, task, data.preparation.padding_token)
    described = models.model
    reading: AbstractContextManager[NodeRanks | None] = nullcontext()
    if recipe.parallel.load == "broadcast":
        from trainer.parallel.node import ranks_of_node

        reading = ranks_of_node(mesh)
    with reading as node:
        cuts = planned_cuts(plan, mesh, loads_shards=adapt is None)  # `adapt` may change weights
        built = [build_model(described, cut, node) for cut in cuts]
    if adapt is not None:
        # Weights that `adapt` changes can no longer be read from their files.
        built = [replace(part, origin=None) for part in built]
    second = second_model(recipe)
    loaded = second.load(plan, mesh, task, models.second) if second and models.second else LoadedModel()
    modules = [part.model for part in built]
    for model in modules:
        transformer: Any = model
        if transformer.can_generate():
            from trainer.tasks.generated import text_generator

            if generator := text_generator():
                generator.configure(model, task, data.preparation.text_tokenizer)
        if adapt is not None:
            adapt(model)
    # Before `build_engine`, which changes the modules of the model.
    model_files = _files_beside_weights(data, recipe, modules[0]) if mesh.rank == 0 else {}
    beside = {
        "buffers": buffers_hash(modules, mesh),
        "normalisation": data.preparation.normalisation,
        "config": computed_facts(described.config),
    }
    saved = Saved(
        identity(recipe, data.train_hash, beside, loaded.facts),
        {"recipe": recipe.model_dump(mode="json"), "layout": plan.layout.sizes, "versions": versions()},
        model_files,
        partial(plan.total_steps, data.num_train_rows),
    )
    # After `identity`, which hashes the buffers as they were built.
    engine = build_engine(built, task, mesh, plan, plan.total_steps(data.num_train_rows), loaded.loss)
    # After the engine and before a checkpoint is loaded: these inputs are those of the first weights.
    if task.inputs_of_start is not None:
        data = resolved(task.inputs_of_start)(recipe, data, engine, mesh, saved.identity["model"])
    return Assembly(plan, mesh, data, built, engine, saved, Progress())


def _files_beside_weights(data: PreparedData, recipe: Recipe, model: nn.Module) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="trainer-") as name:
        folder = Path(name)
        save_configuration(model, folder)
        _save_preparation(data, recipe, model, folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def _begin(temporary: Path) -> None:
    """Create a temporary folder; it may be there from a run that was killed."""
    try:
        remove(temporary)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise TrainerError(f"the model could not be written to {temporary}: {error}") from error


def _save_preparation(data: PreparedData, recipe: Recipe, model: nn.Module, folder: Path) -> None:
    """Write the files of the preparation, such as a tokenizer, and those of the task."""
    data.preparation.save(folder)
    hidden_size = getattr(model.config, "hidden_size", None)
    for name, content in data.task.exported.files(recipe.data.max_length, hidden_size).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
