"""`trainer evaluate`."""

from __future__ import annotations

import typer

from trainer.cli.options import (
    JsonOption,
    ModelArgument,
    ModelRecipeOption,
    OverridesArgument,
    RanksOption,
    trained_recipe,
)


def evaluate(
    run: ModelArgument,
    overrides: OverridesArgument = None,
    recipe: ModelRecipeOption = None,
    processes: RanksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the metrics of a trained model.

    The rows are those of `data.validation`; set data.validation=FILE for others. The layout is that of the training,
    or ddp on one process and after DeepSpeed; keys of `parallel` set another.
    """
    trained = trained_recipe(run, recipe, overrides or (), processes, evaluates=True)

    from trainer.launch.local import run_or_join
    from trainer.use.evaluate import Evaluation

    raise typer.Exit(run_or_join(trained.resolved, processes, job=Evaluation(as_json, trained.start)))
