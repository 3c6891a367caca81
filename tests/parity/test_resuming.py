"""A training that is taken up again, by the same layout or by another, goes on as if it had not been interrupted."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    NUM_ROWS,
    RANK_STRATEGIES,
    Curve,
    MemorySource,
    TinyTraining,
    parallel_keys,
    tiny_recipe,
    tiny_training,
    weights_of,
    whole_state,
)
from tests.parity.cases import GLOBAL_BATCH_SIZE, assert_same_curve, largest_difference, reference
from trainer.engine.engine import OPTIMIZER_PREFIX
from trainer.recipe.schema import Recipe

DONE_STEPS = 7
DONE_SAMPLES = NUM_ROWS + 2 * GLOBAL_BATCH_SIZE  # one epoch of five batches, and two of the second


def recipe_of(strategy: str, world_size: int, precision: str = "fp32") -> Recipe:
    return tiny_recipe(
        model={"dropout": 0.1},
        training={"micro_batch_size": GLOBAL_BATCH_SIZE // world_size},
        parallel=parallel_keys(strategy, world_size),
        precision=precision,
    )


def first_steps(recipe: Recipe) -> MemorySource:
    """The state after them."""
    with tiny_training(recipe) as training:
        training.steps(DONE_STEPS)
        return whole_state(training.engine, training.mesh)


def last_steps(recipe: Recipe, state: MemorySource) -> Curve:
    with tiny_training(recipe, start_sample=DONE_SAMPLES) as training:
        training.engine.load_state(state, DONE_STEPS)
        return curve_of(training, training.total_steps - DONE_STEPS)


def all_steps(recipe: Recipe) -> Curve:
    with tiny_training(recipe) as training:
        return curve_of(training, training.total_steps)


def curve_of(training: TinyTraining, number: int) -> Curve:
    results = training.steps(number)
    return Curve(
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        weights=weights_of(training.engine, training.mesh),
    )


def tail(curve: Curve) -> Curve:
    """What an uninterrupted training did after the steps that another takes over."""
    return Curve(losses=curve.losses[DONE_STEPS:], grad_norms=curve.grad_norms[DONE_STEPS:], weights=curve.weights)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", RANK_STRATEGIES)
def test_the_same_layout_goes_on_bit_for_bit(ranks: RankPools, strategy, precision):
    recipe = recipe_of(strategy, 2, precision)
    expected = tail(ranks(2).run(all_steps, recipe)[0])
    state = ranks(2).run(first_steps, recipe)[0]
    for curve in ranks(2).run(last_steps, recipe, state):
        assert (curve.losses, curve.grad_norms) == (expected.losses, expected.grad_norms)
        assert largest_difference(curve, expected) == 0.0


@pytest.mark.parametrize(
    ("world_size", "strategy", "next_world_size", "next_strategy"),
    [
        *[(2, strategy, 1, "ddp") for strategy in RANK_STRATEGIES],
        *[(1, "ddp", 2, strategy) for strategy in RANK_STRATEGIES],
        *[
            pytest.param(2, one, 3, other, marks=pytest.mark.slow)
            for one, other in zip(RANK_STRATEGIES, [*RANK_STRATEGIES[1:], RANK_STRATEGIES[0]], strict=True)
        ],
    ],
)
def test_another_layout_goes_on(ranks: RankPools, world_size, strategy, next_world_size, next_strategy):
    def on(number: int):
        return ranks(number).run if number > 1 else lambda function, *args: [function(*args)]

    state = on(world_size)(first_steps, recipe_of(strategy, world_size))[0]
    for curve in on(next_world_size)(last_steps, recipe_of(next_strategy, next_world_size), state):
        assert_same_curve(curve, tail(reference("fp32", 0.1).curve))


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "step"])
def test_a_lost_moment_would_be_seen(lost):
    """The test above can fail: the moments matter."""
    recipe = recipe_of("ddp", 1)
    state = first_steps(recipe)
    for name, tensor in state.tensors.items():
        if name.startswith(OPTIMIZER_PREFIX) and name.endswith(f".{lost}"):
            tensor.zero_()
    with pytest.raises(AssertionError):
        assert_same_curve(last_steps(recipe, state), tail(reference("fp32", 0.1).curve))
