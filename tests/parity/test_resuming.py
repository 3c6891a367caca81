"""A resumed training, with the same layout or another, continues as if it had not been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    RANK_STRATEGIES,
    Curve,
    TinyTraining,
    parallel_keys,
    tiny_recipe,
    tiny_training,
    weights_of,
    whole_state,
)
from tests.helpers.turns import once
from tests.parity.cases import FEW_ROWS, GLOBAL_BATCH_SIZE, assert_same_curve, largest_difference
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.state import OPTIMIZER_PREFIX
from trainer.recipe.schema import Recipe

DONE_STEPS = 4
MORE_STEPS = 3  # past the second epoch's incomplete last batch, into the third epoch
DONE_SAMPLES = FEW_ROWS + GLOBAL_BATCH_SIZE  # one epoch of three batches, and one of the second


def recipe_of(strategy: str, world_size: int, precision: str = "fp32") -> Recipe:
    return tiny_recipe(
        model={"dropout": 0.1},
        training={"micro_batch_size": GLOBAL_BATCH_SIZE // world_size},
        parallel=parallel_keys(strategy, world_size),
        precision=precision,
    )


def first_steps(recipe: Recipe, folder: Path) -> None:
    """Train the first steps and save a checkpoint."""
    with tiny_training(recipe, num_rows=FEW_ROWS) as training:
        training.steps(DONE_STEPS)
        saver = saver_of(training, folder)
        training.mesh.on_rank_zero(CheckpointStore(folder, 1).open)
        saver.progress = Progress(DONE_STEPS, DONE_SAMPLES)
        saver.save()
        saver.finish()


def last_steps(recipe: Recipe, folder: Path) -> Curve:
    with tiny_training(recipe, num_rows=FEW_ROWS, start_sample=DONE_SAMPLES) as training:
        saver = saver_of(training, folder)
        assert saver.resume("auto") == []
        assert saver.progress.step == DONE_STEPS
        return curve_of(training, MORE_STEPS)


def saver_of(training: TinyTraining, folder: Path) -> Saver:
    disk = Disk(CheckpointStore(folder, 1), training.mesh)
    return Saver([disk], training.engine, training.mesh, Saved({}))


def all_steps(recipe: Recipe) -> Curve:
    with tiny_training(recipe, num_rows=FEW_ROWS) as training:
        return curve_of(training, DONE_STEPS + MORE_STEPS)


def of_one_process() -> Curve:
    return once("parity of resuming", lambda: all_steps(recipe_of("ddp", 1)))


def curve_of(training: TinyTraining, number: int) -> Curve:
    results = training.steps(number)
    return Curve(
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        weights=weights_of(training.engine, training.mesh),
    )


def tail(curve: Curve) -> Curve:
    """Return the part of an uninterrupted training that a resumed one repeats."""
    return Curve(losses=curve.losses[DONE_STEPS:], grad_norms=curve.grad_norms[DONE_STEPS:], weights=curve.weights)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        *(
            pytest.param(strategy, "fp32", marks=() if strategy == "fsdp" else pytest.mark.slow)
            for strategy in RANK_STRATEGIES
            if strategy != "zero1"
        ),
        pytest.param("zero1", "fp32", marks=pytest.mark.nightly),
        pytest.param("zero3", "fp16", marks=pytest.mark.slow),
        *(pytest.param(strategy, "fp16", marks=pytest.mark.nightly) for strategy in ("fsdp", "zero2")),
    ],
)
def test_the_same_layout_goes_on_bit_for_bit(ranks: RankPools, tmp_path, strategy, precision):
    assert_goes_on_bit_for_bit(ranks, tmp_path, recipe_of(strategy, 2, precision))


def assert_goes_on_bit_for_bit(ranks: RankPools, tmp_path: Path, recipe: Recipe) -> None:
    """Stop and resume a training of two ranks in the same layout."""
    expected = tail(ranks(2).run(all_steps, recipe)[0])
    ranks(2).run(first_steps, recipe, tmp_path)
    for curve in ranks(2).run(last_steps, recipe, tmp_path):
        assert (curve.losses, curve.grad_norms) == (expected.losses, expected.grad_norms)
        assert largest_difference(curve, expected) == 0.0


def pipeline(stages: int, **keys: Any) -> dict[str, Any]:
    return {"pipeline": {"stages": stages, **keys}}


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"strategy": "ddp"}),
    (2, {"strategy": "zero3"}),
    (3, {"strategy": "fsdp"}),
    (2, {"strategy": "zero1"}),
    (2, {"tensor": 2, "sequence": True}),
    (2, pipeline(2)),
    (4, {"strategy": "hsdp", "shard": 2}),
    (4, {"strategy": "fsdp", "tensor": 2}),
    (2, {"strategy": "fsdp"}),
    (4, {"strategy": "zero2", "tensor": 2}),
    (4, {"tensor": 2, **pipeline(2)}),
    (8, {"strategy": "fsdp", "tensor": 2, **pipeline(2)}),
    (4, {"strategy": "fsdp", **pipeline(2, schedule="gpipe", microbatches=1)}),
    (4, {"strategy": "zero3", "tensor": 4}),
    (8, {"strategy": "hsdp", "shard": 2, "tensor": 2, **pipeline(2)}),
    (4, {"strategy": "zero3", "tensor": 2}),
    (8, {"tensor": 2, **pipeline(2)}),
    (4, {"tensor": 2, "context": 2}),
    (2, {"context": 2}),
]
"""Each layout saves for the next one, and the last for the first: each saves once and resumes once."""

_QUICK, _SLOW = (2, 5), (0, 3, 6, 7, 10, 13, 18)  # the others cut as one of these


def change_of_layout(index: int) -> Any:
    (number, saving), (next_number, going_on) = LAYOUTS[index], LAYOUTS[(index + 1) % len(LAYOUTS)]
    name = f"{number} {saving} -> {next_number} {going_on}"
    marks = () if index in _QUICK else (pytest.mark.slow if index in _SLOW else pytest.mark.nightly,)
    return pytest.param(number, saving, next_number, going_on, marks=marks, id=name.replace("'", ""))


@pytest.mark.parametrize(
    ("number", "saving", "next_number", "going_on"), [change_of_layout(index) for index in range(len(LAYOUTS))]
)
def test_another_layout_goes_on(ranks: RankPools, tmp_path, number, saving, next_number, going_on):
    def on(world_size: int) -> Any:
        return ranks(world_size).run if world_size > 1 else lambda function, *args: [function(*args)]

    one, other = (tiny_recipe(model={"dropout": 0.1}, parallel=keys) for keys in (saving, going_on))
    on(number)(first_steps, one, tmp_path)
    assert len(list((tmp_path / "checkpoints" / f"step-{DONE_STEPS:08}").glob("*.safetensors"))) == number
    for curve in on(next_number)(last_steps, other, tmp_path):
        assert_same_curve(curve, tail(of_one_process()))


def assert_resumes_in_another_layout(ranks: RankPools, tmp_path: Path, **sections: Any) -> None:
    """Save under FSDP, and go on with tensor ranks, as one process does."""
    one, fsdp, tensor = (tiny_recipe(**sections, parallel=keys) for keys in ({}, {"strategy": "fsdp"}, {"tensor": 2}))
    ranks(2).run(first_steps, fsdp, tmp_path)
    expected = tail(all_steps(one))
    for curve in ranks(2).run(last_steps, tensor, tmp_path):
        assert_same_curve(curve, expected)


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "step"])
def test_a_lost_moment_would_be_seen(lost):
    """Without an optimizer state the test above fails."""
    recipe = recipe_of("ddp", 1)
    with tiny_training(recipe, num_rows=FEW_ROWS) as training:
        training.steps(DONE_STEPS)
        state = whole_state(training.engine, training.mesh)
    for name, tensor in state.tensors.items():
        if name.startswith(OPTIMIZER_PREFIX) and name.endswith(f".{lost}"):
            tensor.zero_()
    with tiny_training(recipe, num_rows=FEW_ROWS, start_sample=DONE_SAMPLES) as training:
        training.engine.load_state(state, DONE_STEPS)
        curve = curve_of(training, MORE_STEPS)
    with pytest.raises(AssertionError):
        assert_same_curve(curve, tail(of_one_process()))
