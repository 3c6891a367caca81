"""`trainer report`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say
from trainer.cli.options import flag, output_option


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
    output: Annotated[Path | None, output_option("The page; default: report.html in the first folder.")] = None,
    plain: Annotated[bool, flag("Draw curves in the terminal, and write no page.", "--plain")] = False,
) -> None:
    """Write one HTML page with the curves of runs, the differences of their recipes, and the facts of each.

    Runs may still train, or may have been killed.
    """
    from trainer.tools.report.report import write_report
    from trainer.tools.report.runs import read_runs

    if not plain:
        from trainer.tools.plan.calibrating import planned_runs

        say(str(write_report(runs, output, planned=planned_runs(runs))))
        return
    from trainer.tools.report.plain import plain_lines

    for line in plain_lines(read_runs(runs), shutil.get_terminal_size().columns):
        say(line)
