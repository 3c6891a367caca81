"""Parity of adapters of experts: every layout gives the same training as one process, and resumes any other."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import EXPERTS
from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    TINY_BERT,
    TINY_TASKS,
    Curve,
    TinyTraining,
    sgd_sections,
    tiny_recipe,
    tiny_training,
    train_tiny,
)
from tests.helpers.turns import once
from tests.parity.cases import FEW_ROWS, FEW_STEPS, GLOBAL_BATCH_SIZE, TOLERANCES, assert_same_curve
from tests.parity.test_adapters import ADAPTER_LAYOUTS
from tests.parity.test_tasks import assert_same_training
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.reading import SavedState
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.state import MODEL_PREFIX
from trainer.recipe.schema import Recipe

RECOMPUTED = {"activation_checkpointing": "full"}
DONE_STEPS = FEW_STEPS - 2  # before a checkpoint
ADAPTER = {"type": "lora", "rank": 2, "alpha": 4.0, "target_parameters": "all-experts"}


def model_of(family: str, **keys: Any) -> dict[str, Any]:
    sizes = {"vocab_size": TINY_BERT["vocab_size"], "initializer_range": 0.2, "pad_token_id": 0}
    config = {"model_type": family, **EXPERTS[family], **sizes}
    return {"config": config, "tokenizer": "none", "dropout": 0.0, "adapter": ADAPTER, **keys}


CASES = {
    "mixtral": model_of("mixtral"),
    "qwen2_moe": model_of("qwen2_moe", adapter={**ADAPTER, "targets": "all-linear"}),
    "nf4": model_of("mixtral", quantization="nf4"),
    "int8": model_of("mixtral", quantization="int8"),
    "deepseek_v3": model_of("deepseek_v3", adapter={**ADAPTER, "targets": "all-linear"}),
    "gpt_oss": model_of("gpt_oss", adapter={**ADAPTER, "target_parameters": ["experts.down_proj"]}),
    "deep": model_of("qwen3_moe"),
}
CASES["deep"]["config"]["num_hidden_layers"] = 4  # for two stages on each rank


def recipe_of(case: str, sgd: bool, keys: dict[str, Any]) -> Recipe:
    # With `B` zero, the gradient of `A` is zero in the first step, so gradient descent takes two.
    steps: dict[str, Any] = {"max_steps": 2, "max_grad_norm": None} if sgd else {"max_steps": FEW_STEPS}
    sections = {"task": TINY_TASKS["causal_lm"].keys, "model": CASES[case], **keys}
    training = {**steps, **keys.get("training", {})}
    return tiny_recipe(**{**sections, **(sgd_sections(0.5) if sgd else {}), "training": training})


def train(case: str, keys: dict[str, Any]) -> tuple[Curve, Curve]:
    curve, sgd = (train_tiny(recipe_of(case, sgd, keys), num_rows=FEW_ROWS) for sgd in (False, True))
    return curve, sgd


@cache
def reference(case: str) -> tuple[Curve, Curve]:
    return once(f"parity of the adapter of experts {case}", lambda: train(case, {}))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **ADAPTER_LAYOUTS,
    "tensor-accumulated": (
        2,
        {"parallel": {"strategy": "ddp", "tensor": 2}, "training": {"micro_batch_size": 4}, **RECOMPUTED},
    ),
    "expert": (2, {"parallel": {"strategy": "ddp", "expert": 2}}),
    "fsdp-expert-accumulated": (
        4,
        {"parallel": {"strategy": "fsdp", "expert": 2}, "training": {"micro_batch_size": 1}, **RECOMPUTED},
    ),
    "hsdp-expert": (
        4,
        {"parallel": {"strategy": "hsdp", "shard": 2, "expert": 2}, "training": {"micro_batch_size": 1}},
    ),
    "expert-interleaved": (
        4,
        {
            "parallel": {
                "strategy": "ddp",
                "expert": 2,
                "pipeline": {"stages": 2, "schedule": "interleaved_1f1b"},
            }
        },
    ),
    "expert-tensor-pipeline": (
        8,
        {"parallel": {"strategy": "ddp", "expert": 2, "tensor": 2, "pipeline": {"stages": 2}}},
    ),
}
PAIRS = [
    pytest.param("mixtral", "expert", marks=pytest.mark.slow),
    *(
        pytest.param(case, "fsdp-expert-accumulated", marks=pytest.mark.slow if case == "nf4" else pytest.mark.nightly)
        for case in ("mixtral", "nf4", "gpt_oss", "int8")
    ),
    pytest.param("qwen2_moe", "expert-tensor-pipeline", marks=pytest.mark.slow),
    *(pytest.param("nf4", layout, marks=pytest.mark.nightly) for layout in ("expert", "fsdp-accumulated", "pipeline")),
    ("mixtral", "fsdp-accumulated"),
    *(
        pytest.param("mixtral", layout, marks=pytest.mark.slow if layout == "zero3" else pytest.mark.nightly)
        for layout in ("ddp", "tensor-accumulated", "fsdp-offload-recomputed", "pipeline", "zero3")
    ),
    *(pytest.param("gpt_oss", layout, marks=pytest.mark.nightly) for layout in ("fsdp-accumulated", "pipeline")),
    pytest.param("qwen2_moe", "fsdp-tensor-pipeline", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "tensor-accumulated", marks=pytest.mark.nightly),
    pytest.param("mixtral", "hsdp-expert", marks=pytest.mark.nightly),
    pytest.param("deep", "expert-interleaved", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_any_layout_is_one_process(ranks: RankPools, case: str, layout: str):
    world_size, keys = LAYOUTS[layout]
    for found in ranks(world_size).run(train, case, keys):
        assert_same_training(found, reference(case))


def in_precision(precision: str, keys: dict[str, Any]) -> Curve:
    return train_tiny(recipe_of("mixtral", False, {**keys, "precision": precision}), num_rows=FEW_ROWS)


IN_16_BITS = [("bf16", "expert"), ("fp16", "fsdp-accumulated")]
"""The quick cases of low precision."""


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        *(
            pytest.param(one, layout, marks=pytest.mark.slow if (one, layout) in IN_16_BITS else pytest.mark.nightly)
            for one in ("bf16", "fp16")
            for layout in ("fsdp-accumulated", "expert", "fsdp-expert-accumulated", "hsdp-expert")
        ),
    ],
)
def test_low_precision_is_that_of_one_process(ranks: RankPools, precision: str, layout: str):
    world_size, keys = LAYOUTS[layout]
    expected = once(f"the adapter of experts in {precision}", lambda: in_precision(precision, {}))
    assert expected.losses != reference("mixtral")[0].losses
    for found in ranks(world_size).run(in_precision, precision, keys):
        assert_same_curve(found, expected, TOLERANCES[precision])


def saver_of(case: str, training: TinyTraining, folder: Path) -> Saver:
    disk = Disk(CheckpointStore(folder, 1), training.mesh)
    return Saver([disk], training.engine, training.mesh, Saved({"model": {"adapter": CASES[case]["adapter"]}}))


def save(case: str, keys: dict[str, Any], folder: Path) -> None:
    with tiny_training(recipe_of(case, False, keys), num_rows=FEW_ROWS) as training:
        training.steps(DONE_STEPS)
        saver = saver_of(case, training, folder)
        training.mesh.on_rank_zero(CheckpointStore(folder, 1).open)
        saver.progress = Progress(DONE_STEPS, DONE_STEPS * GLOBAL_BATCH_SIZE)
        saver.save()
        saver.finish()


def resume(case: str, keys: dict[str, Any], folder: Path) -> list[float]:
    done = {"num_rows": FEW_ROWS, "start_sample": DONE_STEPS * GLOBAL_BATCH_SIZE}
    with tiny_training(recipe_of(case, False, keys), **done) as training:
        assert saver_of(case, training, folder).resume("auto") == []
        return [result.loss for result in training.steps(2)]


@pytest.mark.parametrize(
    ("case", "saved", "resumed"),
    [("mixtral", "fsdp-accumulated", "pipeline"), ("nf4", "fsdp-expert-accumulated", "expert")],
)
@pytest.mark.slow
def test_a_checkpoint_holds_the_factors_and_resumes_anywhere(
    ranks: RankPools, tmp_path: Path, case: str, saved: str, resumed: str
):
    (world_size, keys), (other_size, other_keys) = LAYOUTS[saved], LAYOUTS[resumed]
    ranks(world_size).run(save, case, keys, tmp_path)
    (checkpoint,) = tmp_path.rglob("step-*")
    shapes = {name: shape for name, shape in SavedState(checkpoint).shapes.items() if name.startswith(MODEL_PREFIX)}
    assert all(".lora." in name for name in shapes)
    assert shapes["model.model.layers.0.mlp.experts.lora.gate_up_proj.B"] == (4, 128, 2)
    for losses in ranks(other_size).run(resume, case, other_keys, tmp_path):
        assert losses == pytest.approx(reference(case)[0].losses[-2:], rel=TOLERANCES["fp32"].loss)
