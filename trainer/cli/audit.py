"""`trainer audit`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say
from trainer.cli.options import JsonOption, OverridesArgument, output_option, print_json, value


def audit(
    source: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or the folder of a run with logging.rows.")
    ],
    overrides: OverridesArgument = None,
    write: Annotated[
        Path | None, value("Write a CSV file of the rows, which data.leave_out takes.", "FILE", "--write")
    ] = None,
    output: Annotated[Path | None, output_option("Write an HTML page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the rows of a recipe that are repeated, damaged or of no use, or the rows of a run that are likely wrong.

    It needs no GPU. A run must have been trained with logging.rows=true.
    """
    from trainer.base.collector import importing

    with importing():
        from trainer.tools.audit.audit import audit as audit_rows
        from trainer.tools.audit.findings import lines, write_page, write_rows

    found = audit_rows(source, overrides or (), write)
    written = []
    if write is not None:
        write_rows(found, write)
        written.append(f"wrote     {write}")
    if output is not None:
        write_page(found, output)
        written.append(f"wrote     {output}")
    if as_json:
        print_json(found.as_object())
        return
    for line in lines(replace(found, written=written)):
        say(line)
