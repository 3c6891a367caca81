"""`trainer init`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from trainer.base.errors import RecipeError, UsageError
from trainer.base.file_formats import file_formats, shown_names
from trainer.base.terminal import say
from trainer.base.text import one_line
from trainer.cli.options import OverridesArgument, devices, flag, output_option, value


def init(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help=f"A file of rows ({shown_names(file_formats().values())}), a folder of images or of a data set.",
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    output: Annotated[Path | None, output_option("The recipe; default: the name of the data.", "FILE.yaml")] = None,
    model: Annotated[
        str | None, value("A folder, a name on the hub, or `sample`: small, with random weights.", "NAME")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="NxMEMORY", help="The devices, as `trainer plan` takes them.", autocompletion=devices
        ),
    ] = None,
    yes: Annotated[bool, flag("Take all proposals, and ask nothing.", "--yes", "-y")] = False,
    overwrite: Annotated[bool, flag("Replace a recipe that exists.", "--overwrite")] = False,
) -> None:
    """Write a first recipe for a file or a folder of data.

    Rows, model and a plan for the device give task, columns, length and batch. Keys that are given are not asked for.
    """
    if not yes and not sys.stdin.isatty():
        raise UsageError("`trainer init` asks questions, but there is no terminal; add --yes to take its proposals")
    from trainer.base.collector import importing
    from trainer.tools.init.draft import InitRequest, recipe_place

    place = recipe_place(source, output, overwrite)
    with importing():
        from trainer.tools.init.proposal import propose, take_default
    from trainer.tools.writing import write_new, write_over

    proposal = propose(InitRequest(source, place, tuple(overrides or ()), model, gpus), take_default if yes else _ask)
    (write_over if overwrite else write_new)(place, proposal.text, "--output")
    for line in proposal.lines:
        say(line)
    name = shlex.quote(str(place))
    if proposal.problems:
        say(
            f"wrote     {place}, which cannot train before the errors below are mended",
            f"next      trainer check {name}",
        )
        raise RecipeError(*proposal.problems)
    say(f"wrote     {place}", f"next      trainer run {name}")


def _ask(question: str, default: str, choices: Sequence[str] = ()) -> str:
    asked = f"{question} ({', '.join(choices)})" if choices else question
    while True:
        answer = str(typer.prompt(one_line(f"{asked} [{default}]"), default, show_default=False))
        if not choices or answer in choices:
            return answer
        say(f"choose one of {', '.join(choices)}")
