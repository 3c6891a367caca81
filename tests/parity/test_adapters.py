"""Parity of adapters and frozen weights: every layout gives the same training as one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, Curve, TinyTraining, sgd_sections, tiny_recipe, tiny_training, train_tiny
from tests.parity.cases import TOLERANCES, assert_same_curve, largest_difference
from tests.parity.test_tasks import LAYOUTS
from trainer.base.errors import UsageError
from trainer.checkpoint.files import SavedState
from trainer.checkpoint.progress import Progress
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.engine import MODEL_PREFIX
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


# The first case runs under every layout, the others where a layer is cut or gathered.
PAIRS = [
    pytest.param(case, layout, marks=pytest.mark.slow if ADAPTER_LAYOUTS[layout][0] > 3 else ())
    for number, case in enumerate(CASES)
    for layout in ADAPTER_LAYOUTS
    if number == 0 or layout in ("zero3", "tensor-sequence-accumulated", "pipeline", "fsdp-tensor-pipeline")
]


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_any_layout_is_one_process(ranks: RankPools, case: str, layout: str):
    world_size, keys = ADAPTER_LAYOUTS[layout]
    expected, expected_sgd = reference(case)
    for curve, sgd in ranks(world_size).run(train, case, keys):
        assert_same_curve(curve, expected)
        assert_same_curve(sgd, expected_sgd)
        assert largest_difference(sgd, expected_sgd) <= TOLERANCES["fp32"].sgd_weights


RESUMED = [("fsdp-accumulated", "zero3"), ("zero2-accumulated", "tensor-sequence-accumulated"), ("pipeline", "ddp")]


def save(keys: dict[str, Any], folder: Path) -> None:
    with tiny_training(recipe_of("bert", False, keys)) as training:
        training.steps(STEPS - 2)
        saver = saver_of(training, folder)
        training.mesh.on_rank_zero(saver._store.open)
        saver.progress = Progress(STEPS - 2, 4 * 12)
        saver.save()
        saver.finish()


def resume(keys: dict[str, Any], folder: Path, shift: float = 0.0) -> list[float]:
    with tiny_training(recipe_of("bert", False, keys), start_sample=4 * 12) as training:
        for parameter in training.model.parameters():
            if not parameter.requires_grad:
                parameter.detach().add_(shift)
        assert saver_of(training, folder).resume("auto") == []
        return [result.loss for result in training.steps(2)]


def saver_of(training: TinyTraining, folder: Path) -> Saver:
    identity = {"model": {"adapter": LORA}}
    return Saver(CheckpointStore(folder, 1), training.engine, training.mesh, Saved(identity))


@pytest.mark.parametrize(("saved", "resumed"), RESUMED)
def test_a_checkpoint_holds_the_adapter_and_resumes_anywhere(
    ranks: RankPools, tmp_path: Path, saved: str, resumed: str
):
    (world_size, keys), (other_size, other_keys) = ADAPTER_LAYOUTS[saved], ADAPTER_LAYOUTS[resumed]
    ranks(world_size).run(save, keys, tmp_path)
    (checkpoint,) = tmp_path.rglob("step-*")
    weights = [name for name in SavedState(checkpoint).shapes if name.startswith(MODEL_PREFIX)]
    assert all(".lora." in name or name.startswith("model.classifier") for name in weights)
    for losses in ranks(other_size).run(resume, other_keys, tmp_path):
        assert losses == pytest.approx(reference("bert")[0].losses[-2:], rel=TOLERANCES["fp32"].loss)


def test_other_frozen_weights_are_refused(tmp_path: Path):
    save({}, tmp_path)
    with pytest.raises(UsageError, match=r"`model.frozen_weights` was '\w{16}' and is '\w{16}'"):
        resume({}, tmp_path, shift=1e-6)
