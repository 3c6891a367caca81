"""`trainer preview`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.base.terminal import say
from trainer.cli.options import JsonOption, OverridesArgument, RecipeArgument, count, output_option, print_json


def preview(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int | None, count("Rows to show whole; default: 3 or fewer, shortened.")] = None,
    split: Annotated[Literal["training", "validation"], typer.Option(help="The split of the rows.")] = "training",
    processes: Annotated[int, count("Ranks of the layout; none is started.")] = 1,
    rank: Annotated[int, typer.Option(min=0, metavar="R", help="Data-parallel rank of the microbatch.")] = 0,
    output: Annotated[Path | None, output_option("Write an HTML page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the model will see: rows and the first microbatch, with marks for trained and other tokens.

    Also show lengths, classes with their weights, and the types of the parameters. It needs no weights and no GPU.
    """
    from trainer.base.collector import importing
    from trainer.recipe.plan import plan_run
    from trainer.recipe.reading.loading import load_recipe

    plan = plan_run(load_recipe(recipe, overrides or ()).recipe, processes)
    with importing():
        from trainer.base.drawn import SafeConsole
        from trainer.tools.preview import preview_lines, preview_recipe, write_preview

    found = preview_recipe(plan, rows or 3, split, rank)
    if output is not None:
        write_preview(found, output)
    if as_json:
        print_json(asdict(found))
    else:
        console = SafeConsole()
        for line in preview_lines(found, brief=rows is None):
            console.print(line, soft_wrap=True)
        if output is not None:
            say(f"wrote     {output}")
