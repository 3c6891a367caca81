"""`trainer suite`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer.base.terminal import say
from trainer.cli.options import OverridesArgument, RanksOption, count, output_option, value


def suite(
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="A file of recipes, or `glue`, `ner`, `squad`, `sample`.")
    ],
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None,
        value("A run, a folder of a model, or a name on the hub; default: the models of the recipes.", "MODEL"),
    ] = None,
    seeds: Annotated[int, count("Seeds of each recipe.")] = 3,
    processes: RanksOption = None,
    output: Annotated[Path | None, output_option("For the results; default: runs/SUITE-MODEL.", "FOLDER")] = None,
) -> None:
    """Train a list of recipes over one model with several seeds, and show their metrics and the mean.

    Each recipe trains on all ranks. After Ctrl-C or a failure, the same command continues.
    """
    from trainer.tools.suite.suite import SuiteRequest, run_suite

    request = SuiteRequest(suite, overrides or (), model, seeds, processes, output)
    raise typer.Exit(run_suite(request, say))
