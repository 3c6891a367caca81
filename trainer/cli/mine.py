"""`trainer mine`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.cli.options import (
    ModelArgument,
    ModelRecipeOption,
    OverridesArgument,
    count,
    flag,
    output_option,
    trained_recipe,
    value,
)

_READ = ("task.texts", "data.map", "data.encoding", "data.delimiter", "data.quotes")


def mine(
    run: ModelArgument,
    input_: Annotated[str, value("Pairs: JSON Lines, CSV or Parquet, or - for stdin.", "FILE", "--input")],
    output: Annotated[str, output_option("The file to write.")],
    overrides: OverridesArgument = None,
    recipe: ModelRecipeOption = None,
    processes: Annotated[int | None, count("Processes that embed; default: one for each GPU, or one.")] = None,
    number: Annotated[int, count("Negatives of each query.")] = 3,
    range_min: Annotated[int, count("Most similar documents to leave out.", least=0)] = 0,
    range_max: Annotated[int | None, count("Most similar documents to choose from.")] = None,
    margin: Annotated[float | None, value("Least distance to the similarity of the right document.", "X")] = None,
    relative_margin: Annotated[float | None, value("The same, as a share of that similarity.", "X")] = None,
    max_score: Annotated[float | None, value("Largest similarity of a negative.", "X")] = None,
    min_score: Annotated[float | None, value("Least similarity of a negative.", "X")] = None,
    form: Annotated[
        Literal["columns", "list"],
        typer.Option("--format", help="One column for each negative, or lists of documents with labels."),
    ] = "columns",
    batch_size: Annotated[int | None, count("Texts of one forward pass; default: evaluation.batch_size.")] = None,
    overwrite: Annotated[bool, flag("Replace an output that exists.", "--overwrite")] = False,
) -> None:
    """Find hard negatives of pairs of texts by a trained embedding, with sentence-transformers.

    The columns are the first two of `task.texts`. Candidates are the distinct texts of the second column. Overrides may
    set `task.texts`, `data.map` and how text files are read; the exported folder decides the rest.
    """
    from trainer.launch.local import number_of_ranks
    from trainer.ranks.environment import detect
    from trainer.tools.mine import Limits
    from trainer.tools.mine import mine as mine_negatives
    from trainer.tools.predict.prediction_files import STANDARD, Request, spooled

    if detect().has_ranks:
        raise UsageError("`trainer mine` starts its own processes; run it without a launcher")
    for word in overrides or ():
        if not word.startswith(_READ):
            raise UsageError(f"`{word}` has no effect on `trainer mine`, which reads {listed(_READ, 9)}; remove it")
    sizes = [] if batch_size is None else [f"evaluation.batch_size={batch_size}"]
    trained = trained_recipe(run, recipe, [*(overrides or ()), *sizes], 1, evaluates=False)
    with spooled(input_) as file:
        request = Request(file, "stdin" if input_ == STANDARD else input_, output, 10_000, overwrite=overwrite)
        limits = Limits(number, range_min, range_max, margin, relative_margin, max_score, min_score)
        mine_negatives(trained, request, limits, form, number_of_ranks(processes))
