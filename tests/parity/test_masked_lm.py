"""Parity of a task with token labels: tied weights, a sharded vocabulary, and ranks without masked tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import Curve, sgd_sections, tiny_recipe, train_tiny
from tests.parity.cases import TOLERANCES, assert_same_curve, largest_difference
from trainer.recipe.schema import Recipe

STEPS = 10  # two epochs, each with an incomplete last batch
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"parallel": {"strategy": "ddp"}}),
    "fsdp-accumulated": (3, {"parallel": {"strategy": "fsdp"}, "training": {"micro_batch_size": 1}}),
    "zero3": (2, {"parallel": {"strategy": "zero3"}}),
    "ddp-tensor-sequence-accumulated": (
        2,
        {
            "parallel": {"strategy": "ddp", "tensor": 2, "sequence": True},
            "training": {"micro_batch_size": 4},
            "activation_checkpointing": "full",
        },
    ),
}


def recipe_of(sgd: bool = False, training: dict[str, Any] | None = None, **keys: Any) -> Recipe:
    """Return a recipe. With rows of 3 to 17 tokens, many rows and some microbatches have no masked token."""
    sections = {"task": {"type": "masked_lm"}, "model": {"dropout": 0.1}, **keys}
    steps: dict[str, Any] = {"max_steps": 1, "max_grad_norm": None} if sgd else {"max_steps": STEPS}
    return tiny_recipe(**sections, **(sgd_sections() if sgd else {}), training={**steps, **(training or {})})


def train(keys: dict[str, Any]) -> tuple[Curve, Curve]:
    """Train on this rank: steps of AdamW, and one step of gradient descent, which shows the gradient's scale."""
    return train_tiny(recipe_of(**keys)), train_tiny(recipe_of(sgd=True, **keys))


@cache
def reference() -> tuple[Curve, Curve]:
    return train({})


def test_accumulation_on_one_process_changes_nothing():
    assert_same_curve(train_tiny(recipe_of(training={"micro_batch_size": 5})), reference()[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_one_process(ranks: RankPools, layout: str):
    world_size, keys = LAYOUTS[layout]
    expected, expected_sgd = reference()
    for curve, sgd in ranks(world_size).run(train, keys):
        assert_same_curve(curve, expected)
        assert_same_curve(sgd, expected_sgd)
        assert largest_difference(sgd, expected_sgd) <= TOLERANCES["fp32"].sgd_weights
