"""`trainer doctor`."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from trainer.base.errors import ExitCode
from trainer.base.terminal import say_styled
from trainer.cli.options import JsonOption, OverridesArgument, count, flag, print_json


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Also check the needs of this recipe.", show_default=False)
    ] = None,
    overrides: OverridesArgument = None,
    processes: Annotated[int | None, count("Ranks of the recipe; default: those that `run` would start.")] = None,
    deep: Annotated[
        bool, flag("Also compute on every GPU, and sum over them by NCCL; takes memory there.", "--deep")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check whether this machine is fit to train, and name the fix of each problem.

    This changes nothing. The exit code is 1 if there is a problem, else 0.
    """
    resolved = None
    if recipe is not None:
        from trainer.recipe.reading.loading import load_recipe

        resolved = load_recipe(recipe, overrides or ()).recipe

    from trainer.tools.doctor.examining import examine_this_machine
    from trainer.tools.doctor.finding import as_object, lines

    results = examine_this_machine(resolved, processes, deep)
    if as_json:
        print_json(as_object(results))
    else:
        say_styled("\n".join(lines(results, shutil.get_terminal_size((120, 24)).columns)))
    if any(result.status == "problem" for result in results):
        raise typer.Exit(ExitCode.FAILED)
