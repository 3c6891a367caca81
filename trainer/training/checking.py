"""Checks of a recipe's data and model before a run: those of data are its preparation; the model is on `meta`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import nn

from trainer.base.errors import Problems
from trainer.checkpoint.registered import registered_tiers
from trainer.data.loader import require_fitting_rows
from trainer.engine.builders import head_notes, require_trainable
from trainer.engine.optimizers.table import optimizer_class
from trainer.models.describe import ModelDescription
from trainer.models.families.table import FAMILIES
from trainer.models.parameter_rules import ParameterGroups
from trainer.models.place import every_cut, place
from trainer.models.sequence_axis import axis_notes
from trainer.observe.observer import Observer
from trainer.recipe.drawing import StageContents
from trainer.recipe.local_parts import LocalParts
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task
from trainer.training.describing import DescribedModels, describe_model
from trainer.training.row_encoding import model_folder, require_fit
from trainer.training.run_data import PreparedData, prepare_data
from trainer.training.second_model import second_model


@dataclass(frozen=True)
class CheckedModel:
    """A whole model on `meta`, the contents of its pipeline stages, notes for the user, and groups of parameters.

    `described` is None if there is no such model, `whole` if it cannot be built, `stages` without a pipeline.
    """

    described: ModelDescription | None = None
    whole: nn.Module | None = None
    stages: list[StageContents] | None = None
    notes: tuple[str, ...] = ()
    groups: ParameterGroups = field(default_factory=ParameterGroups)


@dataclass(frozen=True)
class CheckedParts:
    """The data and the models of a recipe, with their problems and notes for the user.

    A part is None if it is not on this machine, or has a problem.
    """

    local: LocalParts
    problems: Problems
    notes: tuple[str, ...]
    data: PreparedData | None
    model: CheckedModel
    second: ModelDescription | None


def prepare_checked(
    plan: RunPlan, observer: Observer | None = None, day: str | None = None
) -> tuple[PreparedData, DescribedModels]:
    """Return the prepared data of a run and the descriptions of its models, after a check of these.

    The problems of all are reported together. A model of an unknown family is checked when it is built, because it may
    need real weights for this.

    Args:
        day: see `prepare_data`.

    Raises:
        TrainerError: the data cannot be prepared, or the model cannot be built.
        RecipeError: there are several problems.
    """
    observer = observer or Observer()

    def prepare(problems: Problems) -> PreparedData:
        check_places(plan.recipe, problems)
        return prepare_data(plan.recipe, observer=observer, day=day)

    checked = check_parts(plan, prepare, observer)
    checked.problems.raise_all()
    assert checked.data is not None
    assert checked.model.described is not None
    return checked.data, DescribedModels(checked.model.described, checked.second)


def require_described(plan: RunPlan) -> None:
    """Check the packages and the models of a plan as far as they are here, without data and places of checkpoints.

    The configuration of a model is enough: files of weights may be missing.

    Raises:
        TrainerError: the problems of `check_parts`.
    """
    check_parts(plan, lambda _: None, needs_weights=False).problems.raise_all()


def check_places(recipe: Recipe, problems: Problems) -> None:
    """Collect the problems of places of checkpoints beside the folder of the run."""
    for tier in registered_tiers(recipe):
        with problems.collect():
            tier.check(recipe)


def check_parts(
    plan: RunPlan,
    prepare: Callable[[Problems], PreparedData | None],
    run: Observer | None = None,
    needs_weights: bool = True,
) -> CheckedParts:
    """Prepare and check the data and the models of a plan.

    Args:
        prepare: prepares the data, and may collect problems; None: they are not on this machine.
        run: the observer of a run, which fetches models that are not here, and checks the model again when it builds
            it; None: it is a check, which takes all steps with models that are here.
        needs_weights: whether a folder of a pretrained model must have its weights.
    """
    recipe, problems = plan.recipe, Problems()
    notes: tuple[str, ...] = ()
    data = described = None
    model = CheckedModel()
    _check_packages(recipe, problems)
    with problems.collect():
        data = prepare(problems)
    if data is not None:
        notes = data.data_notes
        if data.preparation.counts_tokens:
            with problems.collect():
                require_fitting_rows(data.train, plan.batch)
    if run is not None:
        run.preparing("checking the model")
    # After the preparation, which fetches the configuration in a run.
    local = LocalParts.of(recipe)
    # Without data the task is unresolved, but a local model can be described by transformers' number of classes.
    task = build_task(recipe.task) if data is None else data.task
    if local.has_model or (run is not None and data is not None):
        with problems.collect():
            model = _check_model(plan, task, data, local, problems, run is not None, needs_weights)
    if (second := second_model(recipe)) and (local.has_second_model if run is None else data is not None):
        is_real = data is not None and (run is not None or local.has_preparation)
        with problems.collect():
            described = second.check(plan, task, data.preparation if data is not None and is_real else None)
    return CheckedParts(local, problems, (*notes, *model.notes), data, model, described)


def _check_model(
    plan: RunPlan, task: Task, data: PreparedData | None, local: LocalParts, problems: Problems, is_run: bool,
    needs_weights: bool,
) -> CheckedModel:  # fmt: skip
    """Check the model of a plan, without its weights, and collect its problems; see `check_parts`."""
    recipe, folder = plan.recipe, None
    with problems.collect():
        folder = model_folder(recipe)
    task = folder.completed(task) if folder else task
    described = describe_model(recipe, task, data.preparation.padding_token if data and is_run else None)
    if is_run and not (local.has_model and described.config.model_type in FAMILIES):
        return CheckedModel(described)
    if recipe.task.other_inputs is None:
        with problems.collect():
            require_fit(recipe, described.config)
    before = len(problems.messages)
    compares_sizes = data is not None and not is_run if needs_weights else None
    checked = _check_layout(plan, described, problems, compares_sizes)
    notes = [*(folder.notes if folder else ()), *checked.notes]
    if checked.whole is not None and not is_run:
        notes += _rehearse(plan, described, checked.whole, task, problems, len(problems.messages) == before)
    return replace(checked, notes=tuple(notes))


def _check_packages(recipe: Recipe, problems: Problems) -> None:
    """Collect the problems of the packages of the optimizer and the adapter."""
    with problems.collect():
        optimizer_class(recipe.optimizer).require_package()
    if recipe.model.adapter is not None:
        with problems.collect():
            from trainer.models.adapter_starts import require_package

            require_package(recipe.model.adapter)


def _check_layout(
    plan: RunPlan, described: ModelDescription, problems: Problems, compares_sizes: bool | None
) -> CheckedModel:
    """Check a described model, and collect its problems.

    Args:
        compares_sizes: whether to compare the sizes of weights in the files with the model, as the load does; None:
            there may be no files.
    """
    recipe, parallel, step = plan.recipe, plan.recipe.parallel, plan.recipe.model.unfreeze_at_step
    stages = model = None
    lacking: list[str] = []
    notes: list[str] = []
    groups = ParameterGroups()
    with problems.collect():
        if compares_sizes is not None and not recipe.model.is_random:
            from trainer.models.matching import check_weights

            lacking = check_weights(described, compares_sizes)
    with problems.collect():
        model = described.on_meta()
    if model is None:
        return CheckedModel(described)
    with problems.collect():
        # Before the cuts, which apply to the parameters of adapters too.
        described.adapt(model, lacking)
        notes += axis_notes(described.config, plan.layout)
        notes += _trained_notes(model) if recipe.model.is_partly_frozen else []
        notes += described.adapter_notes(model)
        groups = described.groups(model)
        late = sum(model.get_parameter(name).numel() for name in groups.late)
        notes += [f"{late:,} parameters of `model.freeze` are trained after step {step:,}"] if late and step else []
    if recipe.data.padding_free:
        with problems.collect():
            from trainer.models.layer_hooks import require_padding_free

            require_padding_free(model)
    if plan.layout.ranks_per_row > 1:
        from trainer.models.tensor_split import require_split

        with problems.collect():
            require_split(model, plan.layout.tp, plan.layout.cp, parallel.sequence)
    if plan.pipeline is not None:
        from trainer.models.stage_split import split_stages, stage_sizes

        with problems.collect():
            split = split_stages(model, plan.pipeline.num_stages, parallel.pipeline.split, parallel.pipeline.schedule)
            stages = [
                StageContents(split.layers_of(stage), size) for stage, size in enumerate(stage_sizes(model, split))
            ]
    return CheckedModel(described, model, stages, tuple(notes), groups)


def _rehearse(
    plan: RunPlan, described: ModelDescription, model: nn.Module, task: Task, problems: Problems, is_sound: bool
) -> list[str]:
    """Take the further steps with which a run builds a model, on `meta`, and return notes; collect the problems.

    A run takes them on all ranks: keyed dropout, the cut, the layers that keys need, and a comparison of rows.

    Args:
        is_sound: whether the checks before found no problem; else the model is not cut.
    """
    notes: list[str] = []
    keys = described.new_keys()
    with problems.collect(), described.explained():
        described.make_invariant(model, keys)
        with problems.collect():
            notes += described.check_sample(keys)
        if is_sound:
            # A copy for each cut, because `place` cuts in place.
            built = [place(copy.deepcopy(model), cut, keys) for cut in every_cut(plan)]
            require_trainable(built, task, plan)
            notes += head_notes(built, task, plan)
    return notes


def _trained_notes(model: nn.Module) -> list[str]:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    return [f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})"]
