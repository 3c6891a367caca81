"""`trainer predict`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trainer.base.file_formats import file_formats, shown_names
from trainer.cli.options import (
    ModelArgument,
    ModelRecipeOption,
    OverridesArgument,
    RanksOption,
    count,
    flag,
    output_option,
    trained_recipe,
    value,
)

_INPUTS = shown_names(row for row in file_formats().values() if row.in_chunks)


def predict(
    run: ModelArgument,
    input_: Annotated[
        str,
        value(f"Rows: {_INPUTS} by the ending, or - for JSON Lines on stdin.", "FILE", "--input"),
    ],
    output: Annotated[str, output_option("The file to write, or - for JSON Lines on stdout.")],
    overrides: OverridesArgument = None,
    recipe: ModelRecipeOption = None,
    processes: RanksOption = None,
    batch_size: Annotated[int | None, count("Rows of one forward pass; default: evaluation.batch_size.")] = None,
    chunk_rows: Annotated[int, count("Rows in memory at once; a kill loses the work on one chunk.")] = 10_000,
    keep: Annotated[
        Literal["all", "none"], typer.Option(help="Columns of the input that the output has, beside the predictions.")
    ] = "all",
    top: Annotated[
        int | None, count("Write the probabilities of the N most probable classes; default: of all.")
    ] = None,
    column: Annotated[
        list[str] | None, value("Column of texts to embed, perhaps several times; default: the first one.", "NAME")
    ] = None,
    skip_bad_rows: Annotated[
        bool, flag("Write the error of a bad row in its place, and continue.", "--skip-bad-rows")
    ] = False,
    escape_formulas: Annotated[
        bool, flag("Put an apostrophe before texts in CSV that a spreadsheet takes for formulas.", "--escape-formulas")
    ] = False,
    overwrite: Annotated[bool, flag("Replace an output that exists.", "--overwrite")] = False,
) -> None:
    """Write the predictions of a trained model, one row for each row of a file.

    After a kill, the same command continues where it stopped. The columns are those of the recipe's task; it needs no
    labels.
    """
    from trainer.tools.predict.predict import Prediction
    from trainer.tools.predict.prediction_files import STANDARD, Request, spooled

    sizes = [] if batch_size is None else [f"evaluation.batch_size={batch_size}"]
    resolved = trained_recipe(run, recipe, [*(overrides or ()), *sizes], processes, evaluates=False).resolved

    from trainer.launch.local import run_or_join

    with spooled(input_) as file:
        shown = "stdin" if input_ == STANDARD else input_
        request = Request(
            file, shown, output, chunk_rows, keep, top, overwrite, skip_bad_rows, tuple(column or ()), escape_formulas
        )
        job = Prediction(request)
        code = run_or_join(resolved, processes, job=job)
    raise typer.Exit(code)
