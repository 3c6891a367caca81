"""Parity of adapters and frozen weights: every layout gives the same training as one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, Curve, sgd_sections, tiny_recipe, train_tiny
from tests.parity.cases import TOLERANCES, assert_same_curve, largest_difference
from tests.parity.test_tasks import LAYOUTS
from trainer.recipe.schema import Recipe

STEPS = 6
LORA = {"type": "lora", "rank": 2, "alpha": 4.0, "dropout": 0.1}
BERT = {**TINY_BERT, "initializer_range": 0.2}
LLAMA = {
    "model_type": "llama",
    "vocab_size": TINY_BERT["vocab_size"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "bert": {"model": {"config": BERT, "dropout": 0.1, "adapter": LORA}},
    "masked-lm": {
        "task": {"type": "masked_lm", "text": "text"},
        "model": {
            "config": BERT,
            "dropout": 0.1,
            "adapter": {**LORA, "modules_to_save": ["cls.predictions.transform"]},
        },
    },
    "llama": {"model": {"config": LLAMA, "adapter": {**LORA, "targets": ["q_proj", "*.down_proj"]}}},
    "frozen": {
        "model": {"config": BERT, "dropout": 0.1, "freeze": ["embeddings", "layer.0.attention", "*.key.weight"]}
    },
}
ADAPTER_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    "zero1": (2, {"parallel": {"strategy": "zero1"}}),
    "zero2-accumulated": (2, {"parallel": {"strategy": "zero2"}, "training": {"micro_batch_size": 2}}),
    "zero3-tensor": (4, {"parallel": {"strategy": "zero3", "tensor": 2}}),
}


def recipe_of(case: str, sgd: bool, keys: dict[str, Any]) -> Recipe:
    steps: dict[str, Any] = {"max_steps": 1, "max_grad_norm": None} if sgd else {"max_steps": STEPS}
    training = {**steps, **keys.get("training", {})}
    # With `B` zero, the gradient of `A` is zero in the first step, so gradient descent takes two.
    if sgd:
        training["max_steps"] = 2
    return tiny_recipe(**{**CASES[case], **keys, **(sgd_sections(0.5) if sgd else {}), "training": training})


def train(case: str, keys: dict[str, Any]) -> tuple[Curve, Curve]:
    return train_tiny(recipe_of(case, False, keys)), train_tiny(recipe_of(case, True, keys))


@cache
def reference(case: str) -> tuple[Curve, Curve]:
    return train(case, {})


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if ADAPTER_LAYOUTS[name][0] > 3 else ()) for name in ADAPTER_LAYOUTS],
)
@pytest.mark.parametrize("case", CASES)
def test_any_layout_is_one_process(ranks: RankPools, case: str, layout: str):
    world_size, keys = ADAPTER_LAYOUTS[layout]
    expected, expected_sgd = reference(case)
    for curve, sgd in ranks(world_size).run(train, case, keys):
        assert_same_curve(curve, expected)
        assert_same_curve(sgd, expected_sgd)
        assert largest_difference(sgd, expected_sgd) <= TOLERANCES["fp32"].sgd_weights
