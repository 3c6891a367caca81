"""`trainer why`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say, say_json
from trainer.cli.options import JsonOption, count, flag, value


def why(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, which may still train.")],
    verify: Annotated[bool, flag("Train the recipe and its changes in turns on this machine.", "--verify")] = False,
    steps: Annotated[int, count("Steps of each of the two turns of --verify.", least=2)] = 30,
    hardware: Annotated[
        str | None, value("Device as in `trainer plan --gpus`; default: that of the run, if known.", "NAME")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the time of a run went, and at most three changes of one key with the gain that is planned for each.

    The changes do not change the training. One that changes the rounding is marked.
    """
    from trainer.tools.why import explain, lines

    found = explain(run, hardware, steps if verify else None, lambda line: say(line, err=True))
    if as_json:
        say_json(json.dumps(found.as_object(), allow_nan=False))
        return
    for line in lines(found):
        say(line)
