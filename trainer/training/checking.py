"""Checks of a recipe's data and model before a run: those of data are its preparation; the model is on `meta`."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

from torch import nn

from trainer.base.errors import Problems
from trainer.checkpoint.registered import registered_tiers
from trainer.data.loader import require_fitting_rows
from trainer.engine.builders import check_built
from trainer.engine.optimizers.table import optimizer_class
from trainer.models.context_split import context_notes
from trainer.models.describe import ModelDescription
from trainer.models.families.table import FAMILIES
from trainer.models.fill import check_weights
from trainer.models.parameter_rules import ParameterGroups
from trainer.models.place import every_cut, place
from trainer.observe.observer import Observer
from trainer.recipe.drawing import StageContents
from trainer.recipe.local_parts import LocalParts
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task
from trainer.training.describing import DescribedModels, describe_model
from trainer.training.row_encoding import require_fit, with_folder
from trainer.training.run_data import PreparedData, prepare_data
from trainer.training.second_model import second_model


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
    recipe = plan.recipe
    observer = observer or Observer()
    problems = Problems()
    data = described = checked = None
    check_needs(recipe, problems)
    with problems.collect():
        data = prepare_data(recipe, observer=observer, day=day)
        require_fitting_rows(data.train, plan.batch)
    observer.preparing("checking the model")
    # Without data the task is unresolved, but a local model can be described by transformers' number of classes.
    is_here = LocalParts.of(recipe).has_model
    if data is not None or is_here:
        with problems.collect():
            task = with_folder(build_task(recipe.task), recipe) if data is None else data.task
            described = describe_model(recipe, task, None if data is None else data.preparation.padding_token)
            if is_here and described.config.model_type in FAMILIES:
                _check(plan, described, problems)
    if data is not None and (second := second_model(recipe)):
        with problems.collect():
            checked = second.check(plan, data.task, data.preparation)
    problems.raise_all()
    assert data is not None
    assert described is not None
    return data, DescribedModels(described, checked)


def check_needs(recipe: Recipe, problems: Problems) -> None:
    """Collect the problems of the packages of the optimizer and the adapter, and of places of checkpoints."""
    with problems.collect():
        optimizer_class(recipe.optimizer).require_package()
    if recipe.model.adapter is not None:
        with problems.collect():
            from trainer.models.adapter_starts import require_package

            require_package(recipe.model.adapter)
    for tier in registered_tiers(recipe):
        with problems.collect():
            tier.check(recipe)


@dataclass(frozen=True)
class CheckedModel:
    """A whole model on `meta`, the contents of its pipeline stages, notes for the user, and groups of parameters.

    `whole` is None if it cannot be built, `stages` without a pipeline.
    """

    whole: nn.Module | None = None
    stages: list[StageContents] | None = None
    notes: tuple[str, ...] = ()
    groups: ParameterGroups = field(default_factory=ParameterGroups)


def check_model(plan: RunPlan, task: Task | None = None, found: Problems | None = None) -> CheckedModel:
    """Check the model of a plan, without its weights.

    Args:
        task: the resolved task; None: only the data knows it.
        found: collects the problems; None: they are raised.

    Raises:
        UsageError: there is no such model, its weights do not fit, an adapter's target or a group's parameter is
            missing, or the model cannot be cut over the plan's tensor ranks or stages.
        RecipeError: several of these hold.
    """
    recipe, problems, checked = plan.recipe, found or Problems(), CheckedModel()
    with problems.collect():
        described = describe_model(recipe, with_folder(task or build_task(recipe.task), recipe))
        if recipe.task.other_inputs is None:
            with problems.collect():
                require_fit(recipe, described.config)
        before = len(problems.messages)
        checked = _check(plan, described, problems, compares_sizes=task is not None)
        if checked.whole is not None:
            is_sound = len(problems.messages) == before
            notes = _rehearse(plan, described, checked.whole, task or build_task(recipe.task), problems, is_sound)
            checked = replace(checked, notes=(*checked.notes, *notes))
    if found is None:
        problems.raise_all()
    return checked


def _check(
    plan: RunPlan, described: ModelDescription, problems: Problems, compares_sizes: bool = False
) -> CheckedModel:
    """Check a described model, and collect its problems.

    Args:
        compares_sizes: whether to compare the sizes of weights in the files with the model, as the load does.
    """
    recipe, parallel, step = plan.recipe, plan.recipe.parallel, plan.recipe.model.unfreeze_at_step
    stages = model = None
    lacking: list[str] = []
    notes: list[str] = []
    groups = ParameterGroups()
    with problems.collect():
        lacking = check_weights(described, compares_sizes)
    with problems.collect():
        model = described.on_meta()
    if model is None:
        return CheckedModel()
    with problems.collect():
        # Before the cuts, which apply to the parameters of adapters too.
        described.adapt(model, lacking)
        notes += context_notes(described.config, parallel)
        notes += _trained_notes(model) if recipe.model.is_partly_frozen else []
        notes += described.adapter_notes(model)
        groups = described.groups(model)
        late = sum(model.get_parameter(name).numel() for name in groups.late)
        notes += [f"{late:,} parameters of `model.freeze` are trained after step {step:,}"] if late and step else []
    if recipe.data.padding_free:
        with problems.collect():
            from trainer.models.layer_hooks import check_padding_free

            check_padding_free(model)
    if plan.layout.ranks_per_row > 1:
        from trainer.models.tensor_split import check_split

        with problems.collect():
            check_split(model, parallel.tensor, parallel.context, parallel.sequence)
    if plan.pipeline is not None:
        from trainer.models.stage_split import split_stages, stage_sizes

        with problems.collect():
            split = split_stages(model, plan.pipeline.num_stages, parallel.pipeline.split, parallel.pipeline.schedule)
            stages = [
                StageContents(split.layers_of(stage), size) for stage, size in enumerate(stage_sizes(model, split))
            ]
    return CheckedModel(model, stages, tuple(notes), groups)


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
            check_built([place(copy.deepcopy(model), cut, keys) for cut in every_cut(plan)], task, plan)
    return notes


def _trained_notes(model: nn.Module) -> list[str]:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    return [f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})"]
