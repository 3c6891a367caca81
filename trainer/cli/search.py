"""`trainer search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.cli.options import RanksOption, RecipeArgument


def search(
    recipe: RecipeArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUES",
            help="Keys to search: KEY=low..high, KEY=low..high,log or KEY=a,b; and overrides of all trials.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, metavar="N", help="Trials, those of earlier starts included.")] = 20,
    processes: RanksOption = None,
    at_once: Annotated[int, typer.Option(min=1, metavar="N", help="Trials that train at the same time.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, metavar="K", help="Seeds of the three best trials, for intervals.")] = 1,
    sampler: Annotated[str, typer.Option(metavar="NAME", help="`tpe`, `random` or `grid`.")] = "tpe",
    pruner: Annotated[
        str, typer.Option(metavar="NAME", help="Gives up poor trials: `median`, `hyperband` or `none`.")
    ] = "median",
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A database for several machines; default: a file in the folder."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="For the trials; default: runs/NAME-search."),
    ] = None,
    test: Annotated[
        str | None, typer.Option(metavar="SPLIT", help="A third split, on which the best trial is scored once.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a recipe that extends this one with the best values.")
    ] = None,
) -> None:
    """Search for better values of keys; the validation split decides.

    Optuna proposes the values. After Ctrl-C, the same command goes on, and other processes may join it.
    """
    from trainer.tools.search.search import SearchRequest
    from trainer.tools.search.search import search as search_values

    request = SearchRequest(
        recipe, overrides or (), trials, processes, at_once, seeds, sampler, pruner, storage, output, test, write
    )
    raise typer.Exit(search_values(request, typer.echo))
