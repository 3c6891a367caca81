"""Plans of deep models that were shortened, against plans of the whole models."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.helpers.training import TINY_TASKS
from tests.tools.plan.measured import LENGTH, SMALL_BERT, recipe_of
from trainer.engine.optimizers import tensor_batches
from trainer.recipe.plan import plan_run
from trainer.tools.plan import shortening
from trainer.tools.plan.ledger import Place
from trainer.tools.plan.recipe_plan import traffic_by_axis
from trainer.tools.plan.simulated_step import plan_step
from trainer.tools.plan.step_plan import StepPlan
from trainer.tools.plan.work import OPTIMIZER_STEP

MOST = 3  # layers of a stack that stays whole, so that few are shortened
DEEP_BERT: dict[str, Any] = {"config": {**SMALL_BERT, "num_hidden_layers": 5}, "tokenizer": "none"}
FEW_ROWS = {"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 4}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "fsdp x tensor x sequence": ({"parallel": {"strategy": "fsdp", "tensor": 2, "sequence": True}}, 4),
    "encoder and decoder": (
        {
            "task": TINY_TASKS["seq2seq_lm"].keys,
            "model": {
                "config": {**TINY_TASKS["seq2seq_lm"].model["config"], "num_layers": 4, "num_decoder_layers": 4},
                "tokenizer": "none",
            },
        },
        1,
    ),
    "a stage of 4 layers": (
        {
            "model": {"config": {**SMALL_BERT, "num_hidden_layers": 8}, "tokenizer": "none"},
            "parallel": {"strategy": "ddp", "pipeline": {"stages": 2}},
        },
        2,
    ),
    # With two layers, gradients after the passes are larger than activations at the loss; with three, smaller.
    "one microbatch": (
        {
            "model": {"config": {**DEEP_BERT["config"], "vocab_size": 6000}, "tokenizer": "none"},
            "training": {**FEW_ROWS, "micro_batch_size": 8},
        },
        1,
    ),
    "layers that are unfrozen": (
        {
            "model": {
                "config": {**SMALL_BERT, "num_hidden_layers": 7},
                "tokenizer": "none",
                "freeze": ["layer.0", "layer.1"],
                "unfreeze_at_step": 2,
            },
            "optimizer": {"layer_decay": 0.5},
        },
        1,
    ),
    "recomputed in bf16": ({"precision": "bf16", "activation_checkpointing": "full"}, 1),
}
NIGHTLY = ("fsdp x tensor x sequence", "one microbatch", "recomputed in bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "world_size"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.nightly if name in NIGHTLY else ())
        for name, case in CASES.items()
    ],
)
def test_a_shortened_model_gives_the_plan_of_the_whole_model(keys: dict[str, Any], world_size: int):
    def planned() -> StepPlan:
        recipe = recipe_of({"model": DEEP_BERT, "training": FEW_ROWS, **keys})
        return plan_step(plan_run(recipe, world_size), world_size - 1, LENGTH)

    with mock.patch.object(shortening, "_MOST", MOST):
        short = planned()
    with mock.patch.object(shortening, "_MOST", 99):
        whole = planned()
    for one, other in ((short, whole), (short.early, whole.early)):
        if one is not None and other is not None:
            assert one.peak.num_bytes == other.peak.num_bytes
            assert one.peak.place == other.peak.place
            assert one.resident == other.resident
    assert (short.early is None) == ("freeze" not in keys.get("model", {}))
    assert traffic_by_axis(short) == traffic_by_axis(whole)
    assert short.totals.flops == whole.totals.flops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("muon", 2),
        pytest.param("adafactor", 1, marks=pytest.mark.nightly),
        pytest.param("schedule_free_adamw", 1, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_batches_of_tensors_cover_all_layers(name: str, world_size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_batches, "MOST", 3 * SMALL_BERT["hidden_size"] ** 2)  # fewer than the layers have
    optimizer = {"name": name, "learning_rate": 0.1}
    model = {**DEEP_BERT, "freeze": ["layer.0"], "unfreeze_at_step": 2}
    keys = {"optimizer": optimizer, "schedule": {"name": "constant"}, "model": model}
    plan = plan_run(recipe_of({"training": FEW_ROWS, **keys}), world_size)
    monkeypatch.setattr(shortening, "_MOST", MOST)
    short = plan_step(plan, 0, LENGTH, cuda=True)
    monkeypatch.setattr(shortening, "_MOST", 99)
    whole = plan_step(plan, 0, LENGTH, cuda=True)
    update = Place("", backward=False, update=True)
    assert short.peaks[update].num_bytes == pytest.approx(whole.peaks[update].num_bytes, abs=256)  # some scalars
    assert short.early is not None
    assert whole.early is not None
    early, expected_early = (plan.early.peaks[update].num_bytes for plan in (short, whole))
    assert early == pytest.approx(expected_early, abs=256)
    found, expected = (
        {
            kind: amount
            for kind, amount in run.totals.work.items()
            if kind.phase == OPTIMIZER_STEP and kind.name and amount.number
        }
        for run in (short, whole)
    )
    assert found == expected
