"""Sizes and rows of global batches that grow, beside plain loops over all steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.tiny_run import NUM_TRAIN_ROWS, write_tiny_run
from tests.helpers.training import tiny_split
from tests.training.test_run import assert_same_run, metrics, train
from trainer.base.errors import ExitCode, RecipeError, UsageError
from trainer.data.order import GlobalOrder
from trainer.features.batch_warmup.sizes import GrowingSizes
from trainer.recipe.plan import batch_sizes, plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe

KEY = "training.batch_size_warmup"


def recipe_of(*overrides: str, full: int = 12) -> Recipe:
    return load_recipe(
        "bert_sample", ["data.group_by_length=false", f"training.global_batch_size={full}", *overrides]
    ).recipe


def growing(*keys: str, full: int = 12, more: tuple[str, ...] = ()) -> GrowingSizes:
    found = batch_sizes(recipe_of(*(f"{KEY}.{key}" for key in keys), *more, full=full))
    assert isinstance(found, GrowingSizes)
    return found


def test_each_size_has_as_many_steps_or_samples():
    assert growing("start=4", "steps=5").phases == [(4, 3), (8, 2), (12, None)]
    assert growing("start=4", "increment=3", "steps=3").phases == [(4, 1), (7, 1), (10, 1), (12, None)]
    # Megatron's ramp: 48 samples are 24 of each size
    assert growing("start=4", "samples=48").phases == [(4, 6), (8, 3), (12, None)]
    sizes = growing("start=4", "steps=5")
    assert [sizes.of_step(step) for step in range(7)] == [4, 4, 4, 8, 8, 12, 12]
    assert sizes.full_steps(7) == pytest.approx((3 * 4 + 2 * 8 + 2 * 12) / 12)
    assert sizes.full_steps(2) == pytest.approx(8 / 12)


@pytest.mark.parametrize("num_rows", [10, 11, 23, 64])
def test_steps_and_rows_are_those_of_a_loop(num_rows: int):
    """Epochs end with the rows that remain."""
    sizes = growing("start=4", "steps=5", more=("training.epochs=2.5",))
    split = tiny_split(num_rows)
    order = GlobalOrder(num_rows, None, num_rows, sizes._seed)
    rows = sizes.rows(split, None, 0)
    samples = 0
    for step in range(30):
        assert sizes.samples_at(step, num_rows) == samples
        assert sizes.steps_to(samples, num_rows) == step
        assert sizes.rows(split, None, samples).first_step() == step
        epoch, start = divmod(samples, num_rows)
        stop = min(start + sizes.of_step(step), num_rows)
        found = rows.of_step(step)
        assert found.row_ids.tolist() == order.batch(epoch, 0)[start:stop].tolist()
        assert found.draw == epoch
        if samples < math.ceil(2.5 * num_rows):
            assert sizes.total_steps(num_rows) > step
        else:
            assert sizes.total_steps(num_rows) <= step
        samples += stop - start
    places = sorted({sizes.samples_at(step, num_rows) for step in range(30)})
    inside = next(number for number in range(places[-1]) if number not in places)
    with pytest.raises(UsageError, match=f"`{KEY}` gives no batch that starts after the {inside} samples"):
        sizes.rows(split, None, inside)


def test_every_row_comes_once_in_an_epoch():
    sizes, split = growing("start=4", "steps=5"), tiny_split(31)
    rows = sizes.rows(split, None, 0)
    steps = range(sizes.steps_to(31, 31))
    assert np.sort(np.concatenate([rows.row_ids(step) for step in steps])).tolist() == list(range(31))


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        (["start=4"], 1, "needs either `steps` or `samples`"),
        (["start=4", "steps=2", "samples=9"], 1, "needs either `steps` or `samples`"),
        (["start=12", "steps=2"], 1, "`.*start` must be below `training.global_batch_size` 12, but is 12"),
        (["start=2", "steps=4"], 1, "`.*steps` must be at least 5, one for each smaller batch, but is 4"),
        (["start=4", "steps=5"], 3, "`.*start` must be divisible by the data-parallel size 3, but is 4; use 3 or 6"),
        (["start=6", "increment=2", "steps=5"], 3, "`.*increment` must be .* size 3, but is 2; use 3"),
    ],
)
def test_refusals(keys: list[str], ranks: int, message: str):
    with pytest.raises(RecipeError, match=message):
        plan_run(recipe_of(*(f"{KEY}.{key}" for key in keys)), ranks)


def test_groups_of_lengths_are_refused():
    words = [f"{KEY}.start=4", f"{KEY}.steps=5", "data.group_by_length=true", "training.global_batch_size=12"]
    recipe = load_recipe("bert_sample", words).recipe
    with pytest.raises(RecipeError, match=r"`data.group_by_length` is true, .* `training.batch_size_warmup` is set"):
        plan_run(recipe, 1)


def test_a_plan_names_the_sizes():
    plan = plan_run(recipe_of(f"{KEY}.start=4", f"{KEY}.steps=5"), 2)
    assert str(plan.batch).endswith("; from 4 rows in the first 5 steps")
    assert plan.batch.rank_batch_size == 6


def test_a_run_grows_and_resumes(tmp_path: Path):
    """Epochs of 40 rows: 4 + 4 + 6 + 6 + 8 + 8 + 4, and then 8 in each step."""
    keys = {
        "training": {
            "max_steps": 12, "global_batch_size": 8, "micro_batch_size": 4,
            "batch_size_warmup": {"start": 4, "increment": 2, "steps": 4},
        },
        "data": {"group_by_length": False},
        "evaluation": {"every": "1 epoch", "verify_export": 0},
    }  # fmt: skip
    whole, stopped = (write_tiny_run(tmp_path / name, **keys) for name in ("whole", "stopped"))
    assert train(whole) == ExitCode.DONE
    read = metrics(whole)
    rows = [4, 4, 6, 6, 8, 8, 4, 8, 8, 8, 8, 8]
    assert [step.samples for step in read.steps] == np.cumsum(rows).tolist()
    assert [step.epoch for step in read.steps] == pytest.approx((np.cumsum(rows) / NUM_TRAIN_ROWS).tolist())
    assert [record.step for record in read.evaluations] == [7, 12], "an epoch ends after the seventh step"
    assert train(stopped, "training.stop_at_step=3") == ExitCode.STOPPED
    assert train(stopped, "training.stop_at_step=9") == ExitCode.STOPPED
    assert train(stopped, "training.stop_at_step=null") == ExitCode.DONE
    assert_same_run(whole, stopped)
