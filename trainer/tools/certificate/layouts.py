"""The layouts of a certificate, from texts such as "fsdp; tensor=2; zero3 processes=4"."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from trainer.base.errors import TrainerError, UsageError
from trainer.base.extensions import registered
from trainer.recipe.reading.keys import known_keys
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.registered import value_at
from trainer.recipe.schema import Recipe
from trainer.recipe.strategies import STRATEGIES
from trainer.tools.compare.contestants import Contestant, contestants
from trainer.tools.plan.searching import changing

_CUTS: tuple[Literal["axis"], Literal["experts"]] = ("axis", "experts")
_PROCESSES = "processes"
_RANKS = 2  # of a layout that names no degree
_ONE_PROCESS = (
    "parallel.strategy=ddp", "parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline.stages=1",
    "parallel.shard=auto",
)  # fmt: skip


def named_layouts(
    text: str, recipe: str, common: Sequence[str], processes: int | None, world: int | None = None
) -> list[Contestant]:
    """Return the layouts of a text; `;` separates them.

    A word is a strategy, an override, or the last part of a key, such as `tensor=2`. `processes=N` sets the ranks;
    without it, a layout has as many as its degrees need, or `processes`, and two at least. In a job of `world` ranks,
    it has the most of them that its degrees divide.

    Raises:
        UsageError: a word is none of these.
    """
    found = []
    for layout in filter(None, map(str.strip, text.split(";"))):
        words, number = [], processes
        for word in layout.split():
            if word.startswith(f"{_PROCESSES}="):
                number = _number(word)
            else:
                words.append(_override(word))
        found.append(Contestant(tuple(words), _ranks(recipe, [*common, *words], number, world)))
    if not found:
        raise UsageError(f"`--layouts` is {text!r}, which names no layout; name some, as in 'fsdp; tensor=2'")
    return found


def usual_layouts(recipe: str, common: Sequence[str], processes: int, gpus: int) -> list[Contestant]:
    """Return the layouts that `trainer compare` chooses, without other precisions."""
    _, found = contestants(recipe, common, None, processes, gpus)
    return [one for one in found if not any(word.startswith("precision=") for word in one.overrides)]


def one_process(recipe: str, common: Sequence[str]) -> Contestant:
    """Return the recipe on one process, without cuts."""
    own = load_recipe(recipe, common).recipe
    words = [*_ONE_PROCESS, *(f"{one.name}=1" for kind in _CUTS for one in registered(kind))]
    return Contestant(changing(words, own.model_dump(mode="json"), ()), 1)


def _override(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals:
        if key in STRATEGIES:
            return f"parallel.strategy={key}"
        key, value = word, "true"  # a switch, such as `sequence`
    if "." not in key:
        keys = [name for name in known_keys() if name.rpartition(".")[2] == key]
        within = [name for name in keys if name.startswith("parallel.")] or keys
        if len(within) != 1:
            why = f"is a part of {', '.join(within)}" if within else "is neither a strategy nor a key"
            raise UsageError(
                f"`--layouts` holds {word!r}, which {why}; use fsdp, tensor=2 or SECTION.KEY=VALUE, for example"
            )
        (key,) = within
    return f"{key}={value}"


def _number(word: str) -> int:
    text = word.partition("=")[2]
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"`--layouts` holds {word!r}, which must be a number of processes, as in processes=2")
    return int(text)


def _ranks(recipe: str, words: Sequence[str], processes: int | None, world: int | None) -> int:
    try:
        loaded = load_recipe(recipe, words).recipe
    except TrainerError:  # it fails in its turn, with its message
        return processes or world or _RANKS
    if STRATEGIES[loaded.parallel.strategy].single_process:
        return 1
    needed = _degrees(loaded)
    if world and not processes:
        return max(needed, world // needed * needed)
    return processes or (needed if needed > 1 else _RANKS)


def _degrees(recipe: Recipe) -> int:
    # Experts are divided over data ranks, which tensor ranks and stages are not.
    axes: list[int] = [value_at(recipe, one.name) or 1 for kind in _CUTS for one in registered(kind)]
    return prod([recipe.parallel.tensor, recipe.parallel.pipeline.stages, *axes])
