"""Every key that `parallel.deepspeed` allows: it must not change the training, the exported model or a resumed run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe, tiny_training, weights_of, whole_state
from trainer.features.deepspeed.keys import FREE_KEYS, FREE_ZERO_KEYS
from trainer.recipe.schema import Recipe

STEPS = 3
# For each key a value other than DeepSpeed's default; sizes are small.
VALUES: dict[str, Any] = {
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
    "dump_state": True,
    "flops_profiler": {"enabled": True, "profile_step": 1},
    "memory_breakdown": True,
    "steps_per_print": 1,
    "timers": {"throughput": {"enabled": False}},
    "wall_clock_breakdown": True,
}
ZERO_VALUES: dict[str, Any] = {
    "allgather_bucket_size": 1000,
    "allgather_partitions": False,
    "contiguous_gradients": False,
    "log_trace_cache_warnings": True,
    "overlap_comm": True,
    "reduce_bucket_size": 1000,
    "reduce_scatter": False,
    "stage3_max_live_parameters": 1000,
    "stage3_max_reuse_distance": 1000,
    "stage3_model_persistence_threshold": 1000,
    "stage3_param_persistence_threshold": 1000,
    "stage3_prefetch_bucket_size": 1000,
    "sub_group_size": 1000,
    "use_all_reduce_for_fetch_params": True,
    "use_multi_rank_bucket_allreduce": False,
}
QUICK = [("zero1", "reduce_scatter")]
SLOW = [
    ("zero3", "stage3_param_persistence_threshold"),
    ("zero2", "overlap_comm"),
    ("zero2", "contiguous_gradients"),
]


def strategies_of(key: str) -> tuple[str, ...]:
    if key in VALUES:
        return ("zero2",)
    if key.startswith(("stage3_", "use_all_reduce", "log_trace", "sub_group")):
        return ("zero3",)
    return ("zero1", "zero2", "zero3")


CASES = [
    pytest.param(
        strategy,
        key,
        marks=() if (strategy, key) in QUICK else pytest.mark.slow if (strategy, key) in SLOW else pytest.mark.nightly,
    )
    for key in (*VALUES, *ZERO_VALUES)
    for strategy in strategies_of(key)
]


def recipe_of(world_size: int, **parallel: Any) -> Recipe:
    return tiny_recipe(
        model={"dropout": 0.1},
        training={"max_steps": STEPS, "micro_batch_size": 6 // world_size},
        parallel=parallel,
    )


def train_export_and_resume(recipe: Recipe, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of an uninterrupted run, and those of a run that is resumed before its last step."""
    with tiny_training(recipe) as training:
        training.steps(STEPS - 1)
        state = whole_state(training.engine, training.mesh)
    with tiny_training(recipe) as training:
        training.steps(STEPS)
        training.engine.export(folder)
        whole = weights_of(training.engine, training.mesh)
    with tiny_training(recipe, start_sample=(STEPS - 1) * recipe.training.global_batch_size) as training:
        training.engine.load_state(state, STEPS - 1)
        training.steps(1)
        return whole, weights_of(training.engine, training.mesh)


@cache
def of_one_process() -> dict[str, Tensor]:
    with tiny_training(recipe_of(1)) as training:
        training.steps(STEPS)
        return weights_of(training.engine, training.mesh)


def test_every_key_is_tried():
    assert {*VALUES, "zero_optimization"} == set(FREE_KEYS)
    assert set(ZERO_VALUES) == set(FREE_ZERO_KEYS)


@pytest.mark.parametrize(("strategy", "key"), CASES)
def test_the_key_changes_no_number(ranks: RankPools, tmp_path, strategy, key):
    extra = {key: VALUES[key]} if key in VALUES else {"zero_optimization": {key: ZERO_VALUES[key]}}
    recipe = recipe_of(2, strategy=strategy, deepspeed=extra)
    whole, resumed = ranks(2).run(train_export_and_resume, recipe, tmp_path)[0]
    exported = dict(AutoModelForSequenceClassification.from_pretrained(tmp_path).named_parameters())
    assert exported.keys() == whole.keys() == resumed.keys()
    for name, expected in of_one_process().items():
        assert torch.equal(exported[name], whole[name]), name
        assert torch.equal(resumed[name], whole[name]), name
        torch.testing.assert_close(
            whole[name], expected, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
