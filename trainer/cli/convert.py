"""`trainer convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say, say_json, say_text
from trainer.cli.options import count, flag, output_option, print_json


def convert(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="The file of another tool, as YAML or JSON, or a shell script."),
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", help="Tool that the file belongs to; default: its keys decide. A wrong name lists all."),
    ] = None,
    output: Annotated[Path | None, output_option("The recipe to write; it must be new.")] = None,
    processes: Annotated[int | None, count("Ranks of that training; their batches together make a step.")] = None,
    everything: Annotated[bool, flag("Report also keys without an effect, such as defaults.", "--all")] = False,
    as_json: Annotated[bool, flag("Print recipe and report as one JSON object.", "--json")] = False,
) -> None:
    """Turn the files of other tools into a recipe.

    The recipe goes to the standard output or a new file, a report on each key to the standard error.
    """
    from trainer.tools.convert.convert import convert as convert_files
    from trainer.tools.convert.sources import tool_of
    from trainer.tools.writing import require_new_recipe, write_new

    if output is not None:
        require_new_recipe(output, "--output", (".json",))
    done = convert_files(files, tool_of(source), processes, output.parent if output else Path())
    if output is not None:
        write_new(output, done.text(), "--output")
    if as_json:
        print_json(done.as_json())
        return
    if output is None:
        say_json(done.text(), end="")
    say_text(done.report(everything), err=True)
    say(f"next: trainer check {output or 'RECIPE'}", err=True)
