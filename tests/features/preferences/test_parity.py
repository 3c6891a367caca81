"""Parity of preferences: the same training under every layout as on one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_TASKS, Curve
from tests.helpers.turns import once
from tests.parity.test_tasks import (
    CUTS,
    LAYOUTS,
    assert_accumulation_changes_nothing,
    assert_layout_is_one_process,
    assert_same_training,
    marks_of,
    reference,
    train,
)

QUICK = {"preference": ("fsdp-accumulated",), "reward_model": ()}
VARIANTS = ("preference_orpo", "preference_kto")
TASKS = (*QUICK, *VARIANTS)


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.slow if task in VARIANTS else ()) for task in TASKS]
)
def test_accumulation_on_one_process_changes_nothing(task: str):
    assert_accumulation_changes_nothing(task)


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        pytest.param(task, name, marks=marks_of(name, QUICK.get(task, ()), CUTS[:1] if task in VARIANTS else CUTS))
        for task in TASKS
        for name in LAYOUTS
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, task: str, layout: str):
    assert_layout_is_one_process(ranks, task, layout)


LORA = {"config": TINY_TASKS["preference"].model["config"], "tokenizer": "none", "dropout": 0.1,
        "adapter": {"type": "lora", "rank": 2, "alpha": 4.0, "dropout": 0.1}}  # fmt: skip
FLAT = {"data": {"padding_free": True}}
PREFERENCES: dict[str, tuple[int, dict[str, Any]]] = {
    "hsdp-flat": (2, {**FLAT, "parallel": {"strategy": "hsdp", "shard": 1}}),
    "zero1-flat": (2, {**FLAT, "parallel": {"strategy": "zero1"}, "training": {"micro_batch_size": 2}}),
    "zero2": (2, {"parallel": {"strategy": "zero2"}}),
    "zero3-flat": (2, {**FLAT, "parallel": {"strategy": "zero3"}}),
    "context-flat": (2, {**FLAT, "parallel": {"context": 2}}),
    "ring-flat": (3, {**FLAT, "parallel": {"context": 3}, "training": {"micro_batch_size": 5}}),
    "tensor-flat-adapter": (2, {**FLAT, "model": LORA, "parallel": {"tensor": 2, "sequence": True}}),
    "zero3-adapter": (2, {"model": LORA, "parallel": {"strategy": "zero3"}}),
    "stages-adapter": (2, {"model": LORA, "parallel": {"pipeline": {"stages": 2}}}),
}
"""Layouts of preferences that `LAYOUTS` has not; with an adapter, the reference has the weights beneath it."""
RARE = ("zero2", "ring-flat", "zero3-adapter")


def adapter_reference() -> tuple[Curve, Curve]:
    return once("parity of preferences with an adapter", lambda: train("preference", {"model": LORA}))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.nightly if name in RARE else pytest.mark.slow) for name in PREFERENCES],
)
def test_preferences_without_padding_and_with_an_adapter(ranks: RankPools, layout: str):
    world_size, keys = PREFERENCES[layout]
    expected = adapter_reference() if "model" in keys else reference("preference")
    for found in ranks(world_size).run(train, "preference", keys):
        assert_same_training(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["reward_model", "preference_orpo", "preference_kto"])
@pytest.mark.parametrize("layout", ["hsdp-flat", "zero1-flat", "zero2", "zero3-flat"])
def test_rewards_and_other_losses_of_preferences(ranks: RankPools, layout: str, task: str):
    for found in ranks(2).run(train, task, PREFERENCES[layout][1]):
        assert_same_training(found, reference(task))
