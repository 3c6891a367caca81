"""`trainer reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say
from trainer.cli.options import OverridesArgument, RanksOption, RecipeArgument, count, output_option


def reproduce(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    seeds: Annotated[int | None, count("Seeds to train; default: those of `expects`, or 3.")] = None,
    processes: RanksOption = None,
    output: Annotated[Path | None, output_option("For the results; default: runs/NAME-reproduce.", "FOLDER")] = None,
) -> None:
    """Train a recipe with several seeds, and compare its metrics with those that it expects.

    The exit code is 1 if the mean of a metric is outside of its interval in `expects`. After Ctrl-C or a failure, the
    same command continues.
    """
    from trainer.tools.reproduce.reproduce import ReproduceRequest
    from trainer.tools.reproduce.reproduce import reproduce as reproduce_recipe

    raise typer.Exit(reproduce_recipe(ReproduceRequest(recipe, overrides or (), seeds, processes, output), say))
