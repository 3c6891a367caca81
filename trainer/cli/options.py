"""Arguments and options that several verbs share, and their output."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.base.errors import RecipeError, TrainerError
from trainer.base.terminal import say, say_json
from trainer.base.text import without_secrets

if TYPE_CHECKING:
    from trainer.use.trained import Trained


def _recipes(incomplete: str) -> list[str]:
    """Return the shipped recipes and the files that complete a name, for shells."""
    from trainer.recipe.reading.files import recipe_endings
    from trainer.recipe.reading.shipped import shipped_recipes

    beside = glob(f"{escape(incomplete)}*")
    files = [f"{path}/" if os.path.isdir(path) else path for path in beside]
    files = [path for path in files if path.endswith(("/", *recipe_endings()))]
    return [name for name in shipped_recipes() if name.startswith(incomplete)] + sorted(files)


def _overrides(incomplete: str) -> list[str]:
    """Return the keys that complete an override, for shells."""
    from trainer.recipe.reading.keys import known_keys

    return [f"{key}=" for key in known_keys() if key.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    """Return the devices that complete those of `trainer plan`, for shells."""
    from trainer.tools.plan.hardware import known_devices

    match = re.match(r"(?:\d+x|autox)?", incomplete)
    before = match[0] if match else ""
    name = incomplete.removeprefix(before).lower()
    return [before + known for known in known_devices() if known.lower().startswith(name)]


def count(help_: str, *names: str, least: int = 1) -> Any:
    """Return an option of a whole number from `least` on."""
    return typer.Option(*names, min=least, metavar="N", help=help_)


def value(help_: str, metavar: str, *names: str) -> Any:
    """Return an option with a value."""
    return typer.Option(*names, metavar=metavar, help=help_)


def flag(help_: str, *names: str) -> Any:
    """Return an option without a value; with its names, it has no counterpart `--no-...`."""
    return typer.Option(*names, help=help_)


def output_option(help_: str, metavar: str = "FILE") -> Any:
    """Return the option of a file or folder to write."""
    return typer.Option("--output", "-o", metavar=metavar, help=help_)


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or the name of a shipped recipe.",
        show_default=False,
        autocompletion=_recipes,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Overrides, such as training.epochs=1.", show_default=False, autocompletion=_overrides
    ),
]
ModelArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The folder of a run or of an exported model; of a run, best/ or else model/."),
]
ModelRecipeOption = Annotated[
    str | None, value("The recipe of a model that trainer did not export.", "RECIPE", "--recipe")
]
RanksOption = Annotated[int | None, count("Ranks to start on this machine; default: one for each GPU, or one.")]
LengthOption = Annotated[int | None, count("Tokens of each text; default: data.max_length.")]
JsonOption = Annotated[bool, flag("Print one JSON object.", "--json")]


def show_error(error: TrainerError, place: str = "") -> None:
    """Write the problems of an error to stderr, each with `place` behind it."""
    problems = error.problems if isinstance(error, RecipeError) else [str(error)]
    for problem in without_repetitions([without_secrets(problem) + place for problem in problems]):
        say(*(f"error: {problem}".split("\n") if error.has_lines else [f"error: {problem}"]), err=True)


def print_json(value: Any) -> None:
    """Print one JSON value."""
    say_json(json.dumps(value, indent=2))


def trained_recipe(
    run: Path, recipe: str | None, overrides: Sequence[str], processes: int | None, evaluates: bool
) -> Trained:
    """Return a trained model with its recipe, and show the notes on it once."""
    from trainer.launch.local import number_of_ranks
    from trainer.ranks.environment import detect, problems_name_the_machine
    from trainer.use.trained import load_trained

    with problems_name_the_machine():
        trained = load_trained(run, recipe, overrides, number_of_ranks(processes), evaluates)
    if detect().rank == 0:
        for note in trained.notes:
            say(note, err=True)
    return trained


def without_repetitions(messages: Sequence[str], most: int = 2) -> list[str]:
    """Return messages; more than `most` that differ in quoted texts and numbers only become one with a count."""
    alike: dict[str, list[str]] = {}
    for message in messages:
        alike.setdefault(re.sub(r"'[^']*'|\d[\d,]*", "", message), []).append(message)
    return [
        message
        for group in alike.values()
        for message in (group if len(group) <= most else [f"{group[0]} (and {len(group) - 1:,} more like it)"])
    ]
