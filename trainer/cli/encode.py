"""`trainer encode`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.base.terminal import say
from trainer.cli.options import JsonOption, OverridesArgument, RecipeArgument, count, print_json


def encode(
    recipe: RecipeArgument,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of shards: new, or begun by this verb.")],
    overrides: OverridesArgument = None,
    to: Annotated[Literal["parquet", "arrow", "megatron"], typer.Option(help="Format of the shards.")] = "parquet",
    processes: Annotated[int | None, count("Processes that tokenise; default: one for each core.")] = None,
    shard_rows: Annotated[int, count("Most rows of a shard.")] = 100_000,
    as_json: JsonOption = False,
) -> None:
    """Tokenise the texts of a recipe once, and write files of token ids with a recipe that trains from them.

    A call that was killed goes on with the same command: finished shards are verified, the others written.
    """
    from trainer.base.collector import importing
    from trainer.recipe.reading.loading import load_recipe

    resolved = load_recipe(recipe, overrides or ())
    with importing():
        from trainer.tools.encode.encoding import EncodeRequest, encode_recipe, lines

    request = EncodeRequest(output, to, processes, shard_rows)
    found = encode_recipe(resolved, request)
    if as_json:
        print_json(found)
    else:
        say(*lines(found, request))
