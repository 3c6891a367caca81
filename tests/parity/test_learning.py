"""Parity of controls of the learning: groups and first steps of parameters, averages of the weights, and noise."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, TINY_TASKS, Curve, tiny_recipe, train_tiny
from tests.helpers.turns import once
from tests.parity.cases import TOLERANCES, WIDE, assert_same_curve, largest_difference
from tests.parity.test_tasks import LAYOUTS
from trainer.recipe.schema import Recipe

STEPS = 4
GROUPS = {
    "groups": [{"match": "classifier", "learning_rate": 0.02}, {"match": ["pooler", "layer.1"], "weight_decay": 0.5}],
    "layer_decay": 0.5,
    "learning_rate": 0.01,
}
BERT = {**TINY_BERT, "initializer_range": 0.2, **WIDE["bert"]}
_STABLE = {"name": "warmup_stable_decay", "warmup": 1, "decay": 2, "min_rate": 0.1}
_CONSTANT = {"name": "constant"}
FEATURES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": GROUPS, "schedule": _STABLE},
    **{
        name: {"optimizer": {"name": name, **GROUPS}, "schedule": _CONSTANT}
        for name in ("adamw_8bit", "muon", "adafactor", "sgd", "schedule_free_adamw")
    },
    "ema": {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "training": {"ema_decay": 0.7}},
    "unfrozen": {
        "model": {"freeze": ["embeddings", "*.bias", "layer.0"], "unfreeze_at_step": 2},
        "optimizer": GROUPS,
        "training": {"ema_decay": 0.7},
    },
    "neftune": {
        "task": TINY_TASKS["causal_lm"].keys,
        "model": {**TINY_TASKS["causal_lm"].model, "neftune_alpha": 5},
    },
    "neftune_packed": {
        "task": TINY_TASKS["causal_lm_packed"].keys,
        "model": {**TINY_TASKS["causal_lm_packed"].model, "neftune_alpha": 5},
    },
    "ema_adafactor": {"optimizer": {"name": "adafactor"}, "training": {"ema_decay": 0.7}},
}
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    **{name: (2, {"parallel": {"strategy": name}}) for name in ("zero1", "zero2", "zero3")},
    "zero2-accumulated": (2, {"parallel": {"strategy": "zero2"}, "training": {"micro_batch_size": 2}}),
}
QUICK = (
    ("adamw", "fsdp-accumulated"),
    ("ema", "fsdp-accumulated"),
    ("neftune", "pipeline"),
)
SLOW = (
    ("adamw", "pipeline"),
    ("unfrozen", "fsdp-accumulated"),
    *(("adamw", layout) for layout in ("zero2-accumulated", "tensor-sequence-accumulated")),
    ("adamw_8bit", "fsdp-accumulated"),
    ("muon", "fsdp-accumulated"),
    ("adafactor", "tensor-sequence-accumulated"),
    ("sgd", "zero3-tensor"),
    ("schedule_free_adamw", "pipeline"),
    *(("ema", layout) for layout in ("zero2-accumulated", "pipeline")),
    ("ema_adafactor", "fsdp-accumulated"),
    ("unfrozen", "pipeline"),
    *(("neftune", layout) for layout in ("zero3", "tensor-sequence-accumulated", "context")),
    ("neftune_packed", "zero2-accumulated"),
)
NIGHTLY = (
    *(("adamw", layout) for layout in ("ddp", "zero1", "zero3")),
    ("schedule_free_adamw", "zero2"),
    *(("ema", layout) for layout in ("zero1", "tensor-sequence-accumulated")),
    *(("unfrozen", layout) for layout in ("ddp", "tensor-sequence-accumulated")),
    ("neftune", "fsdp-accumulated"),
)


def recipe_of(feature: str, keys: dict[str, Any]) -> Recipe:
    model = {"config": BERT, "dropout": 0.1, **FEATURES[feature].get("model", {})}
    sections = {**FEATURES[feature], "model": model, **keys}
    training = {"max_steps": STEPS, **FEATURES[feature].get("training", {}), **keys.get("training", {})}
    return tiny_recipe(**{**sections, "training": training})


def train(feature: str, keys: dict[str, Any]) -> Curve:
    return train_tiny(recipe_of(feature, keys))


@cache
def reference(feature: str) -> Curve:
    return once(f"parity of {feature}", lambda: train(feature, {}))


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        *QUICK,
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW),
        *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in NIGHTLY),
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, feature: str, layout: str):
    world_size, keys = MORE_LAYOUTS[layout]
    expected = reference(feature)
    tolerance = TOLERANCES.get(feature, TOLERANCES["fp32"])
    for curve in ranks(world_size).run(train, feature, keys):
        assert_same_curve(curve, expected, tolerance)
    # Adam turns gradients near 0 into whole steps of either sign.
    most = 1e-4 if "sgd" in str(FEATURES[feature]) else 5e-3
    assert largest_difference(curve, expected) < most
