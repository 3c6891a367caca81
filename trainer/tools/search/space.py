"""The values that a search tries: ranges and lists of keys among overrides."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.base.errors import UsageError
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.compare.contestants import kind_of, values_of
from trainer.tools.compare.turns import require_one_training

if TYPE_CHECKING:
    from optuna.trial import Trial

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(,log)?")


@dataclass(frozen=True)
class Axis:
    """A key and its values: a list, or a range of whole numbers or of floats; one of the two is empty."""

    key: str
    values: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_log: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """The values of a list, or the ends of a range."""
        return self.values or self.ends

    @property
    def is_whole(self) -> bool:
        """Whether the range is of whole numbers: neither end has a point or an exponent."""
        return all(re.fullmatch(r"[+-]?\d+", end) for end in self.ends)

    def propose(self, trial: Trial) -> str:
        """Return the override of a trial."""
        if self.values:
            return f"{self.key}={trial.suggest_categorical(self.key, self.values)}"
        if self.is_whole:
            return f"{self.key}={trial.suggest_int(self.key, *map(int, self.ends), log=self.is_log)}"
        return f"{self.key}={trial.suggest_float(self.key, *map(float, self.ends), log=self.is_log):.6g}"


def read_space(recipe: str, words: Sequence[str]) -> tuple[list[str], list[Axis]]:
    """Return the overrides of all trials, and the axes of a search.

    Among the words, `key=low..high`, `key=low..high,log` and `key=a,b` are axes.

    Raises:
        UsageError: no word is an axis, an axis is empty, or it changes only how the recipe trains; or the recipe has
            several trainings.
        RecipeError: the recipe is wrong with an end or a value of an axis.
    """
    common, axes = [], []
    for word in words:
        key, values = values_of(word)
        if found := _RANGE.fullmatch(word[len(key) + 1 :]):
            axes.append(Axis(key, ends=(found[1], found[2]), is_log=found[3] is not None))
        elif len(values) > 1:
            axes.append(Axis(key, values=tuple(dict.fromkeys(values))))
        else:
            common.append(word)
    if not axes:
        raise UsageError(
            "a search needs a key with several values, but there is none; add one, such as"
            " optimizer.learning_rate=1e-5..1e-3,log or model.dropout=0,0.1"
        )
    require_one_training(recipe, common)
    for axis in axes:
        _check(recipe, common, axes, axis)
    return common, axes


def _check(recipe: str, common: Sequence[str], axes: Sequence[Axis], axis: Axis) -> None:
    """Require an axis of several values, all of them right, that change what is learned."""
    if axis.ends and not float(axis.ends[0]) < float(axis.ends[1]):
        raise UsageError(f"`{axis.key}` must be a range low..high, but is {'..'.join(axis.ends)}; raise its end")
    if axis.is_log and float(axis.ends[0]) <= 0:
        raise UsageError(f"`{axis.key}` begins at {axis.ends[0]}, but a logarithm needs numbers above 0; raise it")
    others = [f"{one.key}={one.texts[0]}" for one in axes if one is not axis]
    tried = [load_recipe(recipe, [*common, *others, f"{axis.key}={text}"]) for text in axis.texts]
    if len(tried) < 2 or any(one.recipe == two.recipe for one, two in itertools.combinations(tried, 2)):
        raise UsageError(f"`{axis.key}` has equal values in {', '.join(axis.texts)}; name others")
    if kind_of(tried[0].recipe, tried[1].recipe) == "layout":
        raise UsageError(
            f"`{axis.key}` changes how a recipe trains and not what it learns, so a search cannot rank its values;"
            " `trainer plan --search` and `trainer compare` do"
        )
