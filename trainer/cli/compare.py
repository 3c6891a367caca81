"""`trainer compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.cli.options import RanksOption, RecipeArgument


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
    layouts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Layouts to compare, as overrides, a layout a line.")
    ] = None,
    processes: RanksOption = None,
    steps: Annotated[int, typer.Option(min=2, metavar="N", help="Steps of each of the two turns of a layout.")] = 30,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="For the results; default: runs/NAME-compare."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device as in `trainer plan --gpus`, to plan the time of a step."),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="PEER",
            help="Train the same batches by `pytorch`, a plain loop, `transformers`, `accelerate`, `accelerate_fsdp2`"
            " or `deepspeed`.",
        ),
    ] = None,
) -> None:
    """Train a recipe under several layouts on this machine, and show the costs of each and whether it learns the same.

    Without other values or a file, these are the recipe's layout, every strategy that combines, two tensor ranks, two
    stages, recomputation and each precision. After Ctrl-C, the same command goes on.
    """
    from trainer.tools.compare.compare import CompareRequest
    from trainer.tools.compare.compare import compare as compare_layouts

    request = CompareRequest(recipe, overrides or (), layouts, processes, steps, output, hardware, peers or ())
    raise typer.Exit(compare_layouts(request, typer.echo))
