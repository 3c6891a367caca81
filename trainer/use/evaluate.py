"""The work of `trainer evaluate`: the metrics of a trained model over a split."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from trainer.base.drawn import SafeConsole
from trainer.base.errors import ExitCode, UsageError
from trainer.base.terminal import say, say_json
from trainer.models.configuration import load_config
from trainer.observe.metrics_file import encode_numbers
from trainer.observe.observer import Observer
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.schema import Model, Recipe
from trainer.training.assembly import assemble
from trainer.training.process_group import joined_ranks, open_mesh
from trainer.training.run_data import PreparedData, prepare_data

if TYPE_CHECKING:
    import torch

    from trainer.recipe.reading.loading import ResolvedRecipe


@dataclass(frozen=True)
class Evaluation:
    """The job that evaluates the model of a recipe on its validation split, and prints the metrics on rank 0."""

    as_json: bool  # whether to print one JSON object instead of a table
    start: Model  # the model at the start of the training, for a loss that compares with it

    def __call__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
        """Evaluate as the rank of `environment`, and return the exit code.

        Raises:
            TrainerError: a user error.
        """
        recipe = resolved.recipe
        if recipe.data.validation is None:
            raise UsageError("`data.validation` must name rows to evaluate on, but is null; set data.validation=FILE")
        plan = plan_run(recipe, environment.world_size, environment.local_world_size)
        prepare = partial(prepare_data, with_class_names(recipe))
        with joined_ranks(resolved, plan, environment, prepare) as (device, data):
            # A function of its own, so that model and engine are freed before the process group closes.
            metrics = _evaluate(plan, self.start, data, device, environment.rank == 0)
        if environment.rank == 0:
            self._print(recipe, data, metrics)
        return ExitCode.DONE

    def _print(self, recipe: Recipe, data: PreparedData, metrics: dict[str, float]) -> None:
        assert data.evaluated is not None
        facts = {"model": recipe.model.name_or_path, "data": data.evaluated.where, "rows": len(data.evaluated.rows)}
        if self.as_json:
            say_json(json.dumps({**facts, "metrics": encode_numbers(metrics)}, allow_nan=False))
        else:
            shown = facts | {name: f"{value:.6g}".replace("nan", "nan (undefined)") for name, value in metrics.items()}
            width = max(map(len, shown))
            say(*(f"{name:<{width}}  {value}" for name, value in shown.items()))


def with_class_names(recipe: Recipe) -> Recipe:
    """Return the recipe with the classes of the trained model, so that no training split is needed.

    It has no class weights, because evaluations have none, and `balanced` ones need the training split.
    """
    keys = type(recipe.task).model_fields
    update: dict[str, Any] = {"class_weights": None} if "class_weights" in keys else {}
    if "labels" in keys and getattr(recipe.task, "labels", None) is None:
        names = getattr(load_config(recipe.model, {}), "id2label", None) or {}
        # By id, which is the order of the logits of the head.
        update["labels"] = [str(names[index]) for index in sorted(names)]
    return recipe.model_copy(update={"task": recipe.task.model_copy(update=update)})


def _evaluate(plan: RunPlan, start: Model, data: PreparedData, device: torch.device, shows: bool) -> dict[str, float]:
    """Evaluate on the joined ranks; all that holds the process group is gone when this returns."""
    mesh = open_mesh(plan.layout, device)
    if data.task.inputs_of_start is not None:  # the first model is freed before the trained one is loaded
        assert data.validation is not None, "it was checked before"
        first = replace(plan, recipe=plan.recipe.model_copy(update={"model": start}))
        # `assemble` computes the inputs of its training split, so the validation split stands in for it.
        data = assemble(first, mesh, replace(data, train=data.validation)).data
    parts = assemble(plan, mesh, data)
    with progress_bar(shows) as bar:
        evaluator = parts.evaluator(_Shown(bar))
        assert evaluator is not None, "there is a validation split"
        metrics = evaluator.evaluate().metrics
    return metrics


def progress_bar(shows: bool) -> Progress:
    """Return a bar on the terminal of the standard error; it draws nothing on other ranks and into files."""
    console = SafeConsole(stderr=True)
    return Progress(console=console, transient=True, disable=not shows or not console.is_terminal)


class _Shown(Observer):
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("evaluating", total=None)

    def evaluation_progress(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
