"""Parity of controls of the learning: groups of parameters, and parameters that are frozen at first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, tiny_recipe, train_tiny
from tests.helpers.turns import once
from tests.parity.cases import TOLERANCES, WIDE, Tolerance, assert_same_curve, largest_difference
from tests.parity.test_tasks import LAYOUTS
from trainer.recipe.schema import Recipe

STEPS = 4
GROUPS = {
    "groups": [{"match": "classifier", "learning_rate": 0.02}, {"match": ["pooler", "layer.1"], "weight_decay": 0.5}],
    "layer_decay": 0.5,
    "learning_rate": 0.01,
}
BERT = {**TINY_BERT, "initializer_range": 0.2, **WIDE["bert"]}
UNFROZEN = {
    "model": {"freeze": ["embeddings", "*.bias", "layer.0"], "unfreeze_at_step": 2},
    "optimizer": GROUPS,
}
_STABLE = {"name": "warmup_stable_decay", "warmup": 1, "decay": 2, "min_rate": 0.1}


def of_optimizer(name: str) -> dict[str, Any]:
    """Return sections with groups of parameters for an optimizer."""
    return {"optimizer": {"name": name, **GROUPS}, "schedule": {"name": "constant"}}


CONTROLS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": GROUPS, "schedule": _STABLE},
    "sgd": of_optimizer("sgd"),
    "unfrozen": UNFROZEN,
}
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    **{name: (2, {"parallel": {"strategy": name}}) for name in ("zero1", "zero2", "zero3")},
    "zero2-accumulated": (2, {"parallel": {"strategy": "zero2"}, "training": {"micro_batch_size": 2}}),
}
QUICK = (("adamw", "fsdp-accumulated"),)
SLOW = (
    ("adamw", "pipeline"),
    ("unfrozen", "fsdp-accumulated"),
    *(("adamw", layout) for layout in ("zero2-accumulated", "tensor-sequence-accumulated")),
    ("sgd", "zero3-tensor"),
    ("unfrozen", "pipeline"),
)
NIGHTLY = (
    *(("adamw", layout) for layout in ("ddp", "zero1", "zero3")),
    *(("unfrozen", layout) for layout in ("ddp", "tensor-sequence-accumulated")),
)


def recipe_of(sections: dict[str, Any], keys: dict[str, Any]) -> Recipe:
    model = {"config": BERT, "dropout": 0.1, **sections.get("model", {})}
    training = {"max_steps": STEPS, **sections.get("training", {}), **keys.get("training", {})}
    return tiny_recipe(**{**sections, **keys, "model": model, "training": training})


in_some_layouts = pytest.mark.parametrize(
    "layout",
    [
        "tensor-sequence-accumulated",
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("ddp", "fsdp-accumulated", "pipeline")),
        pytest.param("context", marks=pytest.mark.nightly),
    ],
)
"""For features that change the layers of a model."""


def assert_any_layout_is_one_process(
    ranks: RankPools, layout: str, sections: dict[str, Any], tolerance: Tolerance = TOLERANCES["fp32"]
) -> None:
    """Train a recipe with these sections in a layout, and compare it with one process."""
    world_size, keys = MORE_LAYOUTS[layout]
    recipe = recipe_of(sections, {})
    expected = once(f"parity of {recipe.model_dump_json()}", lambda: train_tiny(recipe))
    for curve in ranks(world_size).run(train_tiny, recipe_of(sections, keys)):
        assert_same_curve(curve, expected, tolerance)
    # Adam turns gradients near 0 into whole steps of either sign.
    most = 1e-4 if "sgd" in str(sections) else 5e-3
    assert largest_difference(curve, expected) < most


@pytest.mark.parametrize(
    ("control", "layout"),
    [
        *QUICK,
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW),
        *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in NIGHTLY),
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, control: str, layout: str):
    assert_any_layout_is_one_process(ranks, layout, CONTROLS[control])
