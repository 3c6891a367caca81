"""`trainer doctor`."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from trainer.base.errors import ExitCode
from trainer.base.terminal import say_styled
from trainer.cli.options import JsonOption, flag, print_json


def doctor(
    verbose: Annotated[bool, flag("Show the groups of checks, and long values whole.", "--verbose")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check whether this machine is fit to train, and name the fix of each problem.

    This changes nothing. The exit code is 1 if there is a problem, else 0. `trainer check` checks a recipe.
    """
    from trainer.tools.doctor.examining import examine_this_machine
    from trainer.tools.doctor.finding import as_object, lines

    results = examine_this_machine()
    if as_json:
        print_json(as_object(results))
    else:
        say_styled("\n".join(lines(results, shutil.get_terminal_size((120, 24)).columns, verbose)))
    if any(result.status == "problem" for result in results):
        raise typer.Exit(ExitCode.FAILED)
