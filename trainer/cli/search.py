"""`trainer search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say
from trainer.cli.options import RanksOption, RecipeArgument, count, output_option, value


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
    trials: Annotated[int, count("Trials, those of earlier starts included.")] = 20,
    processes: RanksOption = None,
    at_once: Annotated[int, count("Trials that train at the same time.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, metavar="K", help="Seeds of the three best trials, for intervals.")] = 1,
    sampler: Annotated[str, value("`tpe`, `random` or `grid`.", "NAME")] = "tpe",
    pruner: Annotated[str, value("Gives up poor trials: `median`, `hyperband` or `none`.", "NAME")] = "median",
    storage: Annotated[
        str | None, value("A database for several machines; default: a file in the folder.", "URL")
    ] = None,
    output: Annotated[Path | None, output_option("For the trials; default: runs/NAME-search.", "FOLDER")] = None,
    test: Annotated[str | None, value("A third split, on which the best trial is scored once.", "SPLIT")] = None,
    write: Annotated[Path | None, value("Write a recipe that extends this one with the best values.", "FILE")] = None,
) -> None:
    """Search for better values of keys; the validation split decides.

    Optuna proposes the values. After Ctrl-C, the same command continues, and other processes may join it.
    """
    from trainer.tools.search.search import SearchRequest
    from trainer.tools.search.search import search as search_values

    request = SearchRequest(
        recipe, overrides or (), trials, processes, at_once, seeds, sampler, pruner, storage, output, test, write
    )
    raise typer.Exit(search_values(request, say))
