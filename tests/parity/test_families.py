"""Every family under pairs of keys that combine: what `trainer check` accepts trains as one process does."""

from __future__ import annotations

import math

import pytest

from tests.helpers.families import SCALED
from tests.helpers.ranks import RankPools
from tests.helpers.training import check_model, tiny_recipe, train_tiny
from tests.parity.cases import DROPOUT_FAMILIES, SHORT, Case, assert_same_curve
from tests.parity.fuzz import FIRST_LOSS, FIRST_NORM, LIMITS
from trainer.base.errors import UsageError
from trainer.models.families.table import FAMILIES
from trainer.recipe.plan import plan_run

# Strategy, precision, recomputation, tensor degree, stages and schedule, on two ranks.
LAYOUTS = [
    ("ddp", "bf16", "selective", 2, 1, "1f1b"),
    ("zero1", "fp16", "full", 2, 1, "1f1b"),
    ("zero3", "fp32", "selective", 1, 1, "1f1b"),
    ("fsdp", "fp16", "selective", 1, 1, "1f1b"),
    ("ddp", "fp32", "full", 1, 2, "zero_bubble"),
    ("ddp", "bf16", "selective", 1, 2, "gpipe"),
]
SLOW = ("gpt2",)  # with q, k and v in one matrix


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(one, marks=pytest.mark.slow if one in SLOW else pytest.mark.nightly) for one in FAMILIES],
)
def test_layouts_that_check_accepts_train_as_one_process(ranks: RankPools, model_type: str):
    trained = 0
    dropout = 0.1 if model_type in DROPOUT_FAMILIES else 0.0
    for strategy, precision, how, tensor, stages, schedule in LAYOUTS:
        layout = {"tensor": tensor, "stages": stages, "schedule": schedule, "model_type": model_type}
        case = Case(strategy, 2, False, precision, how, dropout, **layout)
        try:
            recipe = case.recipe()
            short = recipe.data.model_copy(update={"max_length": 16})  # the tiny models have few positions
            check_model(plan_run(recipe.model_copy(update={"data": short}), 2))
        except UsageError:
            continue
        one = Case("ddp", 1, False, precision, "none", dropout, model_type=model_type)
        expected = train_tiny(one.recipe(), num_steps=1)
        loss, norm = (FIRST_LOSS, FIRST_NORM) if precision == "fp32" else LIMITS[precision][:2]
        for curve in ranks(2).run(train_tiny, case.recipe(), num_steps=1):
            assert curve.losses == pytest.approx(expected.losses, rel=loss), (strategy, precision, how)
            if math.isfinite(expected.grad_norms[0]):
                assert curve.grad_norms == pytest.approx(expected.grad_norms, rel=norm), (strategy, precision, how)
            else:  # fp16 skips the first step of ModernBERT
                assert not math.isfinite(curve.grad_norms[0])
        trained += 1
    assert trained >= 3  # families without a tensor plan or stages


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SCALED)
def test_an_embedding_with_a_factor_trains_as_on_one_process(ranks: RankPools, model_type: str):
    softcap = {"attn_logit_softcapping": 5.0} if model_type == "gemma2" else {}
    config = {"model_type": model_type, **SCALED[model_type], "initializer_range": 0.2, **softcap}
    recipe, cut = (
        tiny_recipe(
            task={"type": "causal_lm"}, model={"config": config, "tokenizer": "none"}, parallel={"tensor": tensor}
        )
        for tensor in (1, 2)
    )
    expected = train_tiny(recipe, num_steps=SHORT)
    for curve in ranks(2).run(train_tiny, cut, num_steps=SHORT):
        assert_same_curve(curve, expected)
