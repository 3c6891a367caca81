"""The comparison from its command to its results."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from trainer.base.distribution import versions
from trainer.base.errors import INTERRUPTED, ExitCode, UsageError
from trainer.launch.local import number_of_ranks
from trainer.ranks.environment import detect
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.compare.comparison_page import write_page
from trainer.tools.compare.contestants import contestants
from trainer.tools.compare.outcomes import compare_outcomes
from trainer.tools.compare.result_table import table, write
from trainer.tools.compare.trial_results import results, with_plan
from trainer.tools.compare.turns import TURNS, Comparison
from trainer.tools.plan.hardware import parse_devices

_WIDE = 1000  # characters of a line where the output is no terminal


@dataclass(frozen=True)
class CompareRequest:
    """The options of `trainer compare`."""

    recipe: str  # the name or path of the recipe
    words: Sequence[str]  # overrides, perhaps with several values
    layouts: Path | None  # a file of layouts; None: `words` or the layouts that make sense here
    processes: int | None  # the number of ranks; None: one for each GPU, or one
    steps: int  # the steps of each turn
    output: Path | None  # the folder of the results; None: `runs/NAME-compare`
    hardware: str | None  # a device as in `trainer plan --gpus`, for planned times
    seeds: int | None = None  # with so many seeds to the end, for their metrics; None: turns for costs


def compare(request: CompareRequest, echo: Callable[[str], None]) -> int:
    """Compare layouts or recipes, write the results, and return the exit code; `echo` shows a line.

    Raises:
        TrainerError: no layout can start, or the results cannot be written.
    """
    # Each turn starts fresh ranks, which a launcher around this command would multiply.
    if detect().has_ranks:
        raise UsageError("`trainer compare` starts its own ranks; run it without a launcher")
    if request.hardware is not None:
        parse_devices(f"1x{request.hardware}")
    gpus, ranks = torch.cuda.device_count(), number_of_ranks(request.processes)
    common, found = contestants(request.recipe, request.words, request.layouts, ranks, gpus)
    folder = request.output or Path("runs") / f"{load_recipe(request.recipe, common).recipe.name}-compare"
    facts: dict[str, Any] = {
        "recipe": request.recipe,
        "overrides": common,
        "processes": ranks,
        "device": torch.cuda.get_device_name(0) if gpus else f"cpu, {platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
    }
    if request.seeds is not None:
        return compare_outcomes(request.recipe, common, found, request.seeds, folder, facts, echo)
    comparison = Comparison(request.recipe, common, found, request.steps, folder)
    echo(f"{len(found)} layouts, {TURNS} turns of {request.steps} steps each on {ranks} processes, in {folder}")
    is_interrupted = False

    try:
        comparison.run(echo)
    except KeyboardInterrupt:
        is_interrupted = True
        echo("interrupted; these are the complete turns, and the same command continues")
    made = results(comparison.trials)
    if not is_interrupted:
        echo("planning the layouts")
        # Plans only complete the table; the measured turns are on the disk already.
        with suppress(KeyboardInterrupt):
            made = [
                with_plan(result, trial, request.hardware)
                for result, trial in zip(made, comparison.trials, strict=True)
            ]
    facts["steps"] = request.steps
    facts["written"] = datetime.now().astimezone().isoformat(" ", "minutes")
    write(made, folder, facts)
    write_page(made, folder, facts, is_cpu=gpus == 0)
    echo("")
    for line in table(made, gpus == 0, shutil.get_terminal_size((_WIDE, 0)).columns):
        echo(line)
    echo(f"wrote     {folder / 'compare.html'}, compare.json and compare.csv")
    if is_interrupted:
        return INTERRUPTED
    return ExitCode.DONE if any(result.is_complete for result in made) else ExitCode.FAILED
