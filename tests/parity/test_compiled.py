"""Parity of compiled layers: every layout is the uncompiled process, to rounding."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.ranks import RankPools
from tests.helpers.training import Curve, train_tiny
from tests.parity import test_adapters, test_learning
from tests.parity.cases import TOLERANCES, Case, assert_same_curve, reference
from trainer.models import compiled
from trainer.models.compiled import compilations
from trainer.recipe.schema import Recipe

STEPS = 4
CASES = (
    Case("ddp", 2, False, "fp32", "none", 0.1, model_type="modernbert"),
    Case("zero2", 2, False, "fp32", "full", 0.1),
    Case("ddp", 2, False, "fp32", "selective", 0.1, tensor=2, sequence=True, num_layers=1),
    Case("fsdp", 2, False, "fp32", "full", 0.1, stages=2),
    Case("hsdp", 4, False, "bf16", "full", 0.1),
    Case("zero1", 2, False, "bf16", "none", 0.1),
    Case("fsdp", 2, False, "fp16", "none", 0.1, num_layers=1),
)


LONG = (CASES[1], *CASES[3:6])
FLAT = (CASES[0], CASES[-1])  # they train without padding, in microbatches with several numbers of rows
BY_TOKENS = {"micro_batch_size": None, "micro_batch_tokens": 60}


def train_compiled(recipe: Recipe) -> tuple[Curve, int]:
    """Train some steps with compiled layers on this rank, and return the number of graph breaks, too."""
    breaks = compilations()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "BACKEND", "eager")
        curve = train_tiny(recipe.model_copy(update={"compile": True}), num_steps=STEPS)
    torch._dynamo.reset()
    return curve, compilations()[1] - breaks


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=pytest.mark.nightly if case in LONG else pytest.mark.slow)
        for case in CASES
    ],
)
def test_compiled_layers_train_as_one_process(ranks: RankPools, case: Case):
    expected = reference(case.precision, case.dropout, case.model_type, num_layers=case.num_layers).curve
    recipe = case.recipe()
    if case in FLAT:
        data, training = recipe.data, recipe.training
        recipe = recipe.model_copy(
            update={
                "data": data.model_copy(update={"padding_free": True}),
                "training": training.model_copy(update=BY_TOKENS),
            }
        )
    for curve, breaks in ranks(case.world_size).run(train_compiled, recipe):
        assert breaks == 0
        assert len(curve.losses) == STEPS
        assert_same_curve(curve, expected, TOLERANCES[case.precision])


@pytest.mark.nightly
@pytest.mark.parametrize("feature", ["dora", "tokens", "adamw", "unfrozen", "neftune"])
def test_compiled_adapters_and_groups_train_as_eager_layers(feature: str):
    is_adapter = feature in test_adapters.CASES
    recipe = test_adapters.recipe_of(feature, False, {}) if is_adapter else test_learning.recipe_of(feature, {})
    curve, breaks = train_compiled(recipe)
    assert breaks == 0
    assert_same_curve(curve, train_tiny(recipe), TOLERANCES["fp32"])
