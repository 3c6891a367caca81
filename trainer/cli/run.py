"""`trainer run`."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer.cli.options import OverridesArgument, RanksOption, RecipeArgument, count


def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    processes: RanksOption = None,
    max_restarts: Annotated[int, count("Restart failed ranks from the last checkpoint, N times at most.", least=0)] = 0,
) -> None:
    """Train a recipe.

    Under torchrun, accelerate, deepspeed or srun it joins the ranks that it is given; alone it starts its own.
    """
    from trainer.ranks.environment import problems_name_the_machine
    from trainer.recipe.reading.loading import load_recipe

    with problems_name_the_machine():
        resolved = load_recipe(recipe, overrides or (), is_whole=True)

    from trainer.launch.local import run_or_join

    raise typer.Exit(run_or_join(resolved, processes, max_restarts))
