"""A search from its command to its page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.base.disk import replace_text
from trainer.base.distribution import install_command
from trainer.base.errors import ExitCode, TrainerError, UsageError, storage_error
from trainer.ranks.environment import detect
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe
from trainer.tasks.metrics.table import greater_is_better
from trainer.tools.plan.searching import write_extending
from trainer.tools.search.space import read_space
from trainer.tools.writing import recipe_name, require_new_recipe


@dataclass(frozen=True)
class SearchRequest:
    """The options of `trainer search`."""

    recipe: str  # the name or path of the recipe
    words: Sequence[str]  # overrides, at least one of them an axis
    trials: int  # the number of trials, those of other processes and of earlier starts included
    processes: int | None  # the ranks of a trial; None: one, or an equal share of the GPUs
    at_once: int  # the trials that train at the same time
    seeds: int  # the seeds of the best trials; 1: no other than the recipe's
    sampler: str
    pruner: str
    storage: str | None  # the address of a database; None: a file in the folder
    output: Path | None  # the folder; None: `runs/NAME-search`
    test: str | None  # a split that the best trial is scored on
    write: Path | None  # a file for the recipe with the best values


def search(request: SearchRequest, echo: Callable[[str], None]) -> int:
    """Search, write the results, and return the exit code; `echo` shows a line.

    Raises:
        TrainerError: a wrong argument, or the folder or the storage cannot be used.
    """
    if detect().has_ranks:
        raise UsageError("`trainer search` starts its own ranks; run it without a launcher")
    if request.write is not None:
        require_new_recipe(request.write, "--write")
    if find_spec("optuna") is None:
        raise UsageError(f"`trainer search` needs the package optuna; install it ({install_command('search')})")
    from optuna.exceptions import StorageInternalError

    from trainer.tools.search.search_result import lines, result_of, write_page
    from trainer.tools.search.study import Rules, Study
    from trainer.tools.search.workers import Crew, Workers

    common, axes = read_space(request.recipe, request.words)
    recipe = load_recipe(request.recipe, [*common, *(f"{one.key}={one.texts[0]}" for one in axes)]).recipe
    metric = _checked_metric(recipe)
    rules = Rules(
        axes, _facts(recipe, [one.key for one in axes]), greater_is_better(metric), request.sampler, request.pruner,
        recipe.training.seed,
    )  # fmt: skip
    folder = request.output or Path("runs") / f"{recipe.name}-search"
    study = Study(folder, request.storage, rules)
    crew = Crew(request.recipe, common, metric, request.processes, request.at_once)
    workers = Workers(crew, study, echo)
    try:
        code = workers.work(request.trials, request.seeds, request.test)
        ranked = workers.ranked(request.seeds)
        result = result_of(ranked, study, metric, workers.yardsticks(ranked))
        replace_text(folder / "search.json", json.dumps(result, indent=2) + "\n", alone=False)
        write_page(result, folder)
    except BrokenPipeError:  # of the terminal
        raise
    except (OSError, StorageInternalError) as error:
        problem = (
            f"the search in {folder} or its storage cannot be written ({error.__cause__ or error}); make room, or"
            " change its permissions, and start the same command again: it continues"
        )
        raise (storage_error(problem, error) if isinstance(error, OSError) else TrainerError(problem)) from error
    for line in lines(result):
        echo(line)
    echo(f"wrote     {folder / 'search.html'} and search.json")
    if request.write is not None and result["best"] is not None and code == ExitCode.DONE:
        name = _name(common, request.write, recipe.name)
        write_extending(request.write, request.recipe, [*name, *common, *result["best"]["overrides"]])
        echo(f"wrote     {request.write}; next: trainer run {shlex.quote(str(request.write))}")
    return code


def _name(words: Sequence[str], file: Path, base: str) -> list[str]:
    """Return the override of the name of a written recipe, by its file, unless words name it.

    The run of the recipe so does not take the folder of another one.
    """
    if any(word.startswith("name=") for word in words):
        return []
    own = recipe_name(file)
    return [f"name={json.dumps(own if own != base else f'{own[:95]}-best')}"]


def _checked_metric(recipe: Recipe) -> str:
    if recipe.data.validation is None:
        raise UsageError("`data.validation` decides between trials, but is null; name a split")
    if recipe.training.stop_at_step is not None:
        raise UsageError("`training.stop_at_step` is set, but trials train to their end; set training.max_steps")
    return recipe.evaluation.best or recipe.task.selecting[0]


def _facts(recipe: Recipe, keys: Sequence[str]) -> dict[str, Any]:
    facts = recipe.model_dump(mode="json", exclude={"checkpoint", "logging", "parallel", "name"})
    for key in keys:
        *sections, last = key.split(".")
        place: Any = facts
        for section in sections:
            place = place.get(section) or {}
        # Trials differ in the keys of the axes, so these are no facts of the search.
        place.pop(last, None)
    return facts
