"""The size of each global batch of a training with a warm-up, and the rows of each batch.

All numbers follow from the recipe and the step. An epoch ends with the rows that remain, as without a warm-up.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import cast

import numpy as np

from trainer.base.errors import RecipeError, UsageError
from trainer.data.loader import StepRows
from trainer.data.order import GlobalOrder, IndexArray, Mixture
from trainer.data.split import EncodedSplit
from trainer.features.batch_warmup.section import BatchSizeWarmup, WarmupKeys
from trainer.recipe.plan import BatchSizes
from trainer.recipe.schema import Recipe

_KEY = "training.batch_size_warmup"


class GrowingSizes(BatchSizes):
    """Sizes from `start` in increments to the recipe's batch size.

    With `steps`, each smaller size has the same number of steps, and the first sizes have the remainder. With
    `samples`, each has the steps that pass its equal part of the samples.

    Raises:
        RecipeError: the keys contradict each other, or other keys of the recipe.

    Attributes:
        phases: each size with its number of steps; None: all that follow.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        keys = cast(WarmupKeys, recipe.training).batch_size_warmup
        assert keys is not None
        _require_sense(recipe, keys)
        self._seed, self._keys = recipe.training.seed, keys
        self._full = recipe.training.global_batch_size
        sizes = range(keys.start, self._full, keys.increment or keys.start)
        if keys.steps is not None:
            each, more = divmod(keys.steps, len(sizes))
            steps = [each + (index < more) for index in range(len(sizes))]
        else:
            steps = [math.ceil(Fraction(keys.samples or 0, len(sizes)) / size) for size in sizes]
        self.phases: list[tuple[int, int | None]] = [*zip(sizes, steps, strict=True), (self._full, None)]
        self.num_steps = sum(steps)

    def of_step(self, step: int) -> int:
        for size, steps in self.phases:
            if steps is None or step < steps:
                return size
            step -= steps
        raise AssertionError("the last phase has no end")

    def total_steps(self, num_rows: int) -> int:
        if self.training.max_steps:
            return self.training.max_steps
        return self.steps_to(math.ceil(Fraction(str(self.training.epochs)) * num_rows), num_rows)

    def full_steps(self, steps: int) -> float:
        rows = 0
        for size, number in self.phases:
            taken = steps if number is None else min(steps, number)
            rows, steps = rows + taken * size, steps - taken
        return rows / self._full

    def checked(self, num_ranks: int) -> str:
        for key, size in (("start", self._keys.start), ("increment", self._keys.increment or self._keys.start)):
            if size % num_ranks:
                near = (size // num_ranks * num_ranks, -(-size // num_ranks) * num_ranks)
                raise RecipeError(
                    f"`{_KEY}.{key}` must be divisible by the data-parallel size {num_ranks}, but is {size}; use"
                    f" {' or '.join(str(count) for count in near if count)}"
                )
        return f"; from {self._keys.start} rows in the first {self.num_steps:,} steps"

    def samples_at(self, step: int, num_rows: int) -> int:
        """Return the rows of all steps before a step, over epochs of `num_rows` rows."""
        samples = 0
        for size, steps in self.phases:
            taken = step if steps is None else min(step, steps)
            samples, step = _after(samples, size, taken, num_rows), step - taken
        return samples

    def steps_to(self, samples: int, num_rows: int) -> int:
        """Return the number of steps until so many rows are passed."""
        start = total = 0
        for size, steps in self.phases:
            end = None if steps is None else _after(start, size, steps, num_rows)
            if end is None or samples <= end:
                return total + _steps_between(start, samples, size, num_rows)
            start, total = end, total + (steps or 0)
        raise AssertionError("the last phase has no end")

    def rows(self, split: EncodedSplit, mixture: Mixture | None, start_sample: int) -> WarmupRows:
        """Return the rows of the batches after the first `start_sample` rows."""
        unit = math.gcd(*(size for size, _ in self.phases))
        return WarmupRows(split, GlobalOrder(len(split), None, unit, self._seed, mixture), self, start_sample)


class WarmupRows:
    """The rows of all global batches of an encoded split; see `TrainingRows`.

    Args:
        order: batches of a common divisor of all sizes, of which a global batch has several.

    Raises:
        UsageError: no global batch starts at `start_sample`.
    """

    def __init__(self, split: EncodedSplit, order: GlobalOrder, sizes: GrowingSizes, start_sample: int) -> None:
        self._split, self._order, self._sizes = split, order, sizes
        self._first_step = sizes.steps_to(start_sample, order.num_rows)
        if sizes.samples_at(self._first_step, order.num_rows) != start_sample:
            raise UsageError(
                f"`{_KEY}` gives no batch that starts after the {start_sample} samples that the checkpoint has consumed"
                f" of {order.num_rows} rows an epoch; continue with the batch sizes and the data of the checkpoint, or"
                " start a new run in another `checkpoint.folder`"
            )

    def first_step(self) -> int:
        return self._first_step

    def row_ids(self, step: int) -> IndexArray:
        (epoch, start), unit = self._place(step), self._order.global_batch_size
        stop = min(start + self._sizes.of_step(step), self._order.num_rows)
        return np.concatenate([self._order.batch(epoch, index) for index in range(start // unit, -(-stop // unit))])

    def of_step(self, step: int) -> StepRows:
        return StepRows(self._split, self.row_ids(step), self._place(step)[0])

    def close(self) -> None:
        pass

    def _place(self, step: int) -> tuple[int, int]:
        return divmod(self._sizes.samples_at(step, self._order.num_rows), self._order.num_rows)


def _require_sense(recipe: Recipe, keys: BatchSizeWarmup) -> None:
    full, least = recipe.training.global_batch_size, recipe.task.fewest_rows
    if (keys.steps is None) == (keys.samples is None):
        raise RecipeError(f"`{_KEY}` needs either `steps` or `samples`, but has {keys}; set one of them")
    if keys.start >= full:
        raise RecipeError(f"`{_KEY}.start` must be below `training.global_batch_size` {full}, but is {keys.start}")
    if keys.start < least:
        raise RecipeError(f"`{_KEY}.start` must be at least {least} for {recipe.task.joint_loss}, but is {keys.start}")
    number = len(range(keys.start, full, keys.increment or keys.start))
    if keys.steps is not None and keys.steps < number:
        raise RecipeError(
            f"`{_KEY}.steps` must be at least {number}, one for each smaller batch, but is {keys.steps}; raise it, or"
            f" `{_KEY}.increment`"
        )
    if recipe.data.group_by_length:
        raise RecipeError(
            f"`data.group_by_length` is true, which groups rows for batches of one size, but `{_KEY}` is set; set one"
            " of them to false or null"
        )


def _after(start: int, size: int, steps: int, num_rows: int) -> int:
    """Return the rows that are passed after `steps` steps of one size from `start` rows on."""
    left = num_rows - start % num_rows
    ending = math.ceil(left / size)
    if steps < ending:
        return start + steps * size
    epochs, steps = divmod(steps - ending, math.ceil(num_rows / size))
    return start + left + epochs * num_rows + steps * size


def _steps_between(start: int, samples: int, size: int, num_rows: int) -> int:
    """Return the steps of one size from `start` rows until `samples` rows are passed."""
    left = num_rows - start % num_rows
    if samples <= start + left:
        return math.ceil((samples - start) / size)
    epochs, rest = divmod(samples - start - left, num_rows)
    return math.ceil(left / size) + epochs * math.ceil(num_rows / size) + math.ceil(rest / size)
