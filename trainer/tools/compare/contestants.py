"""The recipes of a comparison: the layouts that make sense on this machine, a file of them, or a grid of overrides."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.base.errors import TrainerError, UsageError
from trainer.base.extensions import registered
from trainer.base.text import dotted_leaves
from trainer.checkpoint.identity import identity
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe
from trainer.recipe.strategies import STRATEGIES, Strategy
from trainer.tools.plan.searching import changing, layouts
from trainer.training.checking import require_described

Kind = Literal["layout", "precision", "training"]
"""The keys in which two recipes differ: of the layout alone; of layout, precision and weights; of the training."""

_OUTSIDE_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|.', re.DOTALL)
_UNREAD_DATA = {"cache", "num_workers", "pad_to", "padding_free"}  # which change no training


@dataclass(frozen=True)
class Contestant:
    """Overrides of the recipe, and the number of ranks that train it."""

    overrides: tuple[str, ...]
    processes: int

    @property
    def name(self) -> str:
        """The overrides without their sections, or `recipe`."""
        return " ".join(
            word.partition("=")[0].rpartition(".")[2] + word[word.index("=") :] for word in self.overrides
        ) or ("recipe")


def contestants(
    recipe: str, words: Sequence[str], file: Path | None, processes: int, gpus: int
) -> tuple[list[str], list[Contestant]]:
    """Return the overrides of all contestants, and the contestants; the first is the reference.

    `key=a,b` among the words is an axis of a grid. Each line of the file is a layout, as overrides. Without both, they
    are layouts that make sense, and that the recipe and its model allow.

    Raises:
        UsageError: the file cannot be read, or a line of it is not of overrides.
        RecipeError: the recipe is wrong with its common overrides.
    """
    common, axes = _with_axes(words)
    own = load_recipe(recipe, common).recipe
    if axes or file is not None:
        lines = [()] if file is None else list(_lines(file))
        found = [(*line, *point) for line in lines for point in itertools.product(*axes)]
        # Differences of losses need a reference that is always there.
        found = found if file is None else [(), *found]  # the recipe as it is, the reference
    else:
        given = {word.partition("=")[0] for word in common}
        keys = own.model_dump(mode="json")
        found = [changing(layout, keys, given) for layout in _sensible(processes, gpus)]
    made = [Contestant(layout, _ranks(recipe, common, layout, processes)) for layout in dict.fromkeys(found)]
    is_named = file is not None or axes
    return common, [one for one in made if is_named or not one.overrides or _is_allowed(recipe, common, one)]


def _with_axes(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the words with one value, and the values of each other one as overrides."""
    read = [(word, *values_of(word)) for word in words]
    axes = [[f"{key}={value}" for value in values] for _, key, values in read if len(values) > 1]
    return [word for word, _, values in read if len(values) < 2], axes


def _is_allowed(recipe: str, common: Sequence[str], one: Contestant) -> bool:
    """Return whether a recipe and its model allow a layout that the user has not named."""
    try:
        own = load_recipe(recipe, [*common, *one.overrides]).recipe
        require_described(plan_run(own, one.processes))
    except TrainerError:
        return False
    return True


def _ranks(recipe: str, common: Sequence[str], layout: tuple[str, ...], processes: int) -> int:
    """Return the ranks of a contestant; a recipe that cannot be read fails in its turn."""
    try:
        strategy = load_recipe(recipe, [*common, *layout]).recipe.parallel.strategy
    except TrainerError:
        return processes
    return 1 if STRATEGIES[strategy].single_process else processes


def values_of(word: str) -> tuple[str, list[str]]:
    """Return the key and the values of `key=a,b`; commas inside of JSON strings, lists and objects separate nothing."""
    key, _, text = word.partition("=")
    depth, values = 0, [""]
    for token in _OUTSIDE_STRINGS.findall(text):
        # A JSON string is one token of the pattern, so brackets inside of it do not count.
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        if token == "," and depth == 0:
            values.append("")
        else:
            values[-1] += token
    return key, values


def _lines(file: Path) -> Iterator[tuple[str, ...]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`--layouts` is {file}, which cannot be read ({error}); name a text file") from error
    found = False
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = tuple(shlex.split(line, comments=True))
        except ValueError as error:
            raise UsageError(f"line {number} of {file} is {line!r} ({error}); close the quotation mark") from error
        if wrong := [word for word in words if "=" not in word and word != "recipe"]:
            raise UsageError(
                f"line {number} of {file} holds {wrong[0]!r}; write overrides, such as parallel.strategy=fsdp, or"
                " `recipe` for none"
            )
        if words:
            found = True
            yield tuple(word for word in words if word != "recipe")
    if not found:
        raise UsageError(f"`--layouts` is {file}, which names no layout; write overrides, a layout a line")


def _sensible(processes: int, gpus: int) -> Iterator[tuple[str, ...]]:
    """Yield layouts: the recipe's, each strategy, two ranks of each axis, two stages, recomputation, precisions."""
    yield ()
    for row, tensor, stages, words in layouts(processes, processes):
        if _is_compared(row, processes, tensor * stages):
            yield words
    yield from ((f"{one.name}=2",) for one in registered("experts"))
    for axis in registered("axis"):
        if processes % 2 == 0:
            yield ("parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline.stages=1", f"{axis.name}=2")
        if processes % 4 == 0:
            yield ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline.stages=1", f"{axis.name}=2")
    if gpus > 1:
        yield ("parallel.strategy=dp",)
    yield ("activation_checkpointing=full",)
    for precision in ("fp32", "bf16", "fp16"):
        yield (f"precision={precision}",)


def _is_compared(row: Strategy, processes: int, cut: int) -> bool:
    """Return whether a strategy is compared with a model that is cut over `cut` ranks; hsdp is fsdp on one machine."""
    if row.single_process or row.groups or cut > 2:
        return False
    return row.name == "ddp" or (processes > cut and (cut == 1 or row.name == "fsdp"))


def kind_of(recipe: Recipe, first: Recipe) -> Kind:
    """Return in which keys two recipes differ."""
    own, other = (
        # The identity of a checkpoint: keys outside of it, such as the layout, change rounding only.
        dotted_leaves(identity(one, json.dumps(one.data.model_dump(mode="json", exclude=_UNREAD_DATA))))
        for one in (recipe, first)
    )
    differing = {key for key in own.keys() | other.keys() if own.get(key) != other.get(key)}
    return "layout" if not differing else "precision" if differing <= {"precision", "weights"} else "training"
