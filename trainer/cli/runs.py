"""`trainer runs`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say, say_json
from trainer.cli.options import flag


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder above the runs.")] = Path("runs"),
    as_json: Annotated[bool, flag("Print one JSON object for each run.", "--json")] = False,
) -> None:
    """List the runs in a folder: state, step, last checkpoint, best evaluation, time and size on disk."""
    from trainer.tools.report.listing import find_runs, listing

    found = find_runs(folder)
    for one in found if as_json else ():
        say_json(json.dumps(asdict(one)))
    for line in () if as_json else listing(found):
        say(line)
