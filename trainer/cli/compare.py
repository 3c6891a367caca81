"""`trainer compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say
from trainer.cli.options import RanksOption, RecipeArgument, count, output_option, value


def compare(
    recipe: RecipeArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=V1,V2",
            help="Overrides; several values of a key are compared, each with all others.",
            show_default=False,
        ),
    ] = None,
    layouts: Annotated[Path | None, value("Layouts to compare, as overrides, a layout a line.", "FILE")] = None,
    processes: RanksOption = None,
    steps: Annotated[int, count("Steps of each of the two turns of a layout.", least=2)] = 30,
    seeds: Annotated[
        int | None, count("Train each to its end with N seeds, and compare the metrics of the last evaluation.")
    ] = None,
    output: Annotated[Path | None, output_option("For the results; default: runs/NAME-compare.", "FOLDER")] = None,
    hardware: Annotated[
        str | None, value("Device as in `trainer plan --gpus`, to plan the time of a step.", "NAME")
    ] = None,
) -> None:
    """Train a recipe under several layouts on this machine, and show the costs of each and whether it learns the same.

    Without other values or a file, these are the recipe's layout, every strategy that combines, two tensor ranks, two
    stages, recomputation and each precision. After Ctrl-C, the same command continues.
    """
    from trainer.tools.compare.compare import CompareRequest
    from trainer.tools.compare.compare import compare as compare_layouts

    request = CompareRequest(recipe, overrides or (), layouts, processes, steps, output, hardware, seeds)
    raise typer.Exit(compare_layouts(request, say))
