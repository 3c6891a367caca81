"""Parity of adapters and frozen weights: every layout gives the same training as one process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM

from tests.helpers.ranks import RankError, RankPools
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
from tests.parity.test_tasks import LAYOUTS, assert_same_training
from trainer.base.errors import UsageError
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.reading import SavedState
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.state import MODEL_PREFIX
from trainer.recipe.schema import Recipe
from trainer.use.export.exporting import export

DONE_STEPS = FEW_STEPS - 2  # before a checkpoint
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
DEBERTA = {
    **BERT,
    "model_type": "deberta-v2",
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "bert": {"model": {"config": BERT, "dropout": 0.1, "adapter": LORA}},
    "masked-lm": {
        "task": {"type": "masked_lm", "text": "text"},
        "model": {
            "config": BERT,
            "dropout": 0.1,
            # The rows of a head with a bias, tied to those of the embedding. Each of two tensor ranks has some of them.
            "adapter": {**LORA, "modules_to_save": ["cls.predictions.transform"], "trainable_tokens": [7, 30, 190]},
        },
    },
    "tokens": {
        "task": TINY_TASKS["causal_lm"].keys,
        # A product of the head, which the rows replace. Each of two tensor ranks has some of them.
        "model": {
            "config": {**LLAMA, "tie_word_embeddings": False},
            "adapter": {**LORA, "targets": ["q_proj", "lm_head"], "trainable_tokens": [5, 7, 8, 190]},
        },
    },
    # Norms of rows that ranks share, and starts from weights of which a rank holds a part.
    "dora": {
        "model": {
            "config": BERT,
            "dropout": 0.1,
            "adapter": {**LORA, "type": "dora", "rank_stabilised": True, "rank_pattern": {"intermediate.dense": 3}},
        }
    },
    "started": {
        "model": {"config": LLAMA, "adapter": {**LORA, "type": "dora", "start": "pissa", "targets": "all-linear"}},
    },
    "llama": {"model": {"config": LLAMA, "adapter": {**LORA, "targets": ["q_proj", "*.down_proj"]}}},
    # Projections of queries and keys that relative positions share, and own ones.
    **{
        f"deberta-{kind}": {"model": {"config": {**DEBERTA, "share_att_key": kind == "shared"}, "adapter": LORA}}
        for kind in ("shared", "own")
    },
    "deep": {"model": {"config": {**BERT, "num_hidden_layers": 4}, "dropout": 0.1, "adapter": LORA}},
    "nf4": {
        "model": {"config": {**BERT, "num_hidden_layers": 4}, "dropout": 0.1, "adapter": LORA, "quantization": "nf4"}
    },
    "int8": {"model": {"config": LLAMA, "adapter": {**LORA, "type": "dora", "start": "loftq"}, "quantization": "int8"}},
    "frozen": {
        "model": {"config": BERT, "dropout": 0.1, "freeze": ["embeddings", "layer.0.attention", "*.key.weight"]}
    },
}
ADAPTER_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    "zero3": (2, {"parallel": {"strategy": "zero3"}}),
    "zero1": (2, {"parallel": {"strategy": "zero1"}}),
    "zero2-accumulated": (2, {"parallel": {"strategy": "zero2"}, "training": {"micro_batch_size": 2}}),
    "fsdp-offload-recomputed": (
        2,
        {"parallel": {"strategy": "fsdp", "offload": "parameters"}, "activation_checkpointing": "selective"},
    ),
    "zero-bubble": (
        2,
        {"parallel": {"strategy": "ddp", "pipeline": {"stages": 2, "schedule": "zero_bubble", "stages_per_rank": 1}}},
    ),
    "hsdp-pipeline": (8, {"parallel": {"strategy": "hsdp", "shard": 2, "pipeline": {"stages": 2}}}),
    "interleaved": (2, {"parallel": {"pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "microbatches": 4}}}),
}


def recipe_of(case: str, sgd: bool, keys: dict[str, Any]) -> Recipe:
    steps: dict[str, Any] = {"max_steps": 1, "max_grad_norm": None} if sgd else {"max_steps": FEW_STEPS}
    training = {**steps, **keys.get("training", {})}
    # With `B` zero, the gradient of `A` is zero in the first step, so gradient descent takes two.
    if sgd:
        training["max_steps"] = 2
    return tiny_recipe(**{**CASES[case], **keys, **(sgd_sections(0.5) if sgd else {}), "training": training})


def train(case: str, keys: dict[str, Any]) -> tuple[Curve, Curve]:
    recipes = (recipe_of(case, sgd, keys) for sgd in (False, True))
    curve, sgd = (train_tiny(recipe, num_rows=FEW_ROWS) for recipe in recipes)
    return curve, sgd


@cache
def reference(case: str) -> tuple[Curve, Curve]:
    return once(f"parity of the adapter {case}", lambda: train(case, {}))


QUANTIZED = {
    "nf4": ("ddp", "fsdp-accumulated", "hsdp-pipeline", "fsdp-offload-recomputed", "zero1", "interleaved", "ring"),
    "int8": ("fsdp-accumulated", "zero2-accumulated", "zero-bubble", "context"),
}
QUICK = {("bert", "fsdp-accumulated"), ("masked-lm", "tensor-sequence-accumulated")}
# The first case runs under every layout that takes two layers, the others where a layer is cut or gathered.
CUTS = ("fsdp-accumulated", "zero3", "tensor-sequence-accumulated", "pipeline", "fsdp-tensor-pipeline")
NIGHTLY = {
    "bert": ("ddp", "zero1", "zero3-tensor", "context", "tensor-context", "zero-bubble", "fsdp-tensor-pipeline"),
    "masked-lm": ("fsdp-accumulated", "zero3", "fsdp-tensor-pipeline"),
    "tokens": ("zero3", "pipeline", "fsdp-tensor-pipeline"),
    "dora": ("fsdp-accumulated", "pipeline", "fsdp-tensor-pipeline"),
    "started": ("fsdp-accumulated", "zero3", "pipeline", "fsdp-tensor-pipeline"),  # `RESUMED` begins with FSDP
    "llama": ("fsdp-accumulated", "zero3", "pipeline", "fsdp-tensor-pipeline"),
    "deberta-shared": ("fsdp-accumulated",),
    "deberta-own": ("fsdp-accumulated", "zero3-tensor"),
    "frozen": ("fsdp-accumulated", "tensor-sequence-accumulated", "fsdp-tensor-pipeline"),
    "nf4": ("ddp", "hsdp-pipeline", "fsdp-offload-recomputed", "zero1", "interleaved", "ring"),
    "int8": ("zero-bubble", "context"),
}
"""Layouts that cut a case as another layout does, or another case with the same modules."""


def _layouts(case: str) -> Iterable[str]:
    if case.startswith("deberta"):
        return ("fsdp-accumulated", "zero3-tensor")
    if case == "deep":
        return ("interleaved",)
    if case in QUANTIZED:
        return QUANTIZED[case]
    if case == "bert":
        return (layout for layout in ADAPTER_LAYOUTS if layout not in ("interleaved", "hsdp-pipeline"))
    return (*CUTS, "context") if case == "tokens" else CUTS


def _marks(case: str, layout: str) -> tuple[pytest.MarkDecorator, ...]:
    if layout in NIGHTLY.get(case, ()):
        return (pytest.mark.nightly,)
    return () if (case, layout) in QUICK else (pytest.mark.slow,)


PAIRS = [pytest.param(case, layout, marks=_marks(case, layout)) for case in CASES for layout in _layouts(case)]


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_any_layout_is_one_process(ranks: RankPools, case: str, layout: str):
    world_size, keys = ADAPTER_LAYOUTS[layout]
    for found in ranks(world_size).run(train, case, keys):
        assert_same_training(found, reference(case))


@cache
def low_precision_reference(precision: str, num_layers: int) -> Curve:
    return train_tiny(low_precision_recipe(precision, num_layers, {}), num_rows=FEW_ROWS)


def low_precision_recipe(precision: str, num_layers: int, keys: dict[str, Any]) -> Recipe:
    """Return a recipe with weights of the usual size, for which the tolerances of low precision were measured."""
    config = {**TINY_BERT, "num_hidden_layers": num_layers}
    model = {"config": config, "dropout": 0.1, "adapter": {**LORA, "alpha": 64.0}}
    return recipe_of("bert", False, {**keys, "model": model, "precision": precision})


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("bf16", "fsdp-accumulated"),
        pytest.param("bf16", "interleaved", marks=pytest.mark.nightly),
        ("fp16", "tensor-sequence-accumulated"),
        ("fp16", "zero2-accumulated"),
    ],
)
@pytest.mark.slow
def test_low_precision_is_that_of_one_process(ranks: RankPools, precision: str, layout: str):
    world_size, keys = ADAPTER_LAYOUTS[layout]
    num_layers = 4 if layout == "interleaved" else 2
    recipe = low_precision_recipe(precision, num_layers, keys)
    for found in ranks(world_size).run(train_tiny, recipe, num_rows=FEW_ROWS):
        assert_same_curve(found, low_precision_reference(precision, num_layers), TOLERANCES[precision])


@pytest.mark.parametrize("layers", [2, 9])  # the sample of a sharded model has eight
def test_a_dropout_on_positions_of_a_model_outside_of_the_table_is_refused(ranks: RankPools, layers: int):
    """DeBERTa v1 projects embeddings of positions `[1, positions, hidden]`; a microbatch of one row looks alike."""
    config = {**BERT, "model_type": "deberta", "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    config |= {"num_hidden_layers": layers}
    adapter = {**LORA, "targets": [f"layer.{layers - 1}.attention.self.pos_proj"]}
    keys = {"model": {"config": config, "dropout": 0.0, "adapter": adapter}, "training": {"micro_batch_size": 1}}
    with pytest.raises(
        UsageError, match=r"dropout at .*pos_proj\.lora\.dropout must work on .*would depend on the layout"
    ):
        train_tiny(recipe_of("bert", False, keys))
    with pytest.raises(
        RankError, match=r"dropout at .*pos_proj\.lora\.dropout must work on .*would depend on the layout"
    ):
        ranks(2).run(train_tiny, recipe_of("bert", False, {**keys, "parallel": {"strategy": "fsdp"}}))


RESUMED = [
    ("bert", "fsdp-accumulated", "zero3"),
    pytest.param("bert", "zero2-accumulated", "tensor-sequence-accumulated", marks=pytest.mark.nightly),
    pytest.param("bert", "pipeline", "ddp", marks=pytest.mark.nightly),
    ("nf4", "fsdp-accumulated", "interleaved"),
    ("started", "fsdp-accumulated", "tensor-sequence-accumulated"),
    ("frozen", "zero3", "tensor-sequence-accumulated"),
    pytest.param("frozen", "pipeline", "zero2-accumulated", marks=pytest.mark.nightly),
]


def save(case: str, keys: dict[str, Any], folder: Path) -> None:
    with tiny_training(recipe_of(case, False, keys), num_rows=FEW_ROWS) as training:
        training.steps(DONE_STEPS)
        saver = saver_of(case, training, folder)
        training.mesh.on_rank_zero(CheckpointStore(folder, 1).open)
        saver.progress = Progress(DONE_STEPS, DONE_STEPS * GLOBAL_BATCH_SIZE)
        saver.save()
        saver.finish()


def resume(case: str, keys: dict[str, Any], folder: Path, shift: float = 0.0) -> list[float]:
    done = {"num_rows": FEW_ROWS, "start_sample": DONE_STEPS * GLOBAL_BATCH_SIZE}
    with tiny_training(recipe_of(case, False, keys), **done) as training:
        for parameter in training.model.parameters():
            if shift and not parameter.requires_grad:
                parameter.detach().add_(shift)
        assert saver_of(case, training, folder).resume("auto") == []
        return [result.loss for result in training.steps(2)]


def saver_of(case: str, training: TinyTraining, folder: Path) -> Saver:
    identity = {"model": {key: CASES[case]["model"].get(key) for key in ("adapter", "freeze")}}
    disk = Disk(CheckpointStore(folder, 1), training.mesh)
    return Saver([disk], training.engine, training.mesh, Saved(identity))


@pytest.mark.parametrize(("case", "saved", "resumed"), RESUMED)
@pytest.mark.slow
def test_a_checkpoint_holds_the_trained_weights_and_resumes_anywhere(
    ranks: RankPools, tmp_path: Path, case: str, saved: str, resumed: str
):
    (world_size, keys), (other_size, other_keys) = ADAPTER_LAYOUTS[saved], ADAPTER_LAYOUTS[resumed]
    ranks(world_size).run(save, case, keys, tmp_path)
    (checkpoint,) = tmp_path.rglob("step-*")
    weights = [name for name in SavedState(checkpoint).shapes if name.startswith(MODEL_PREFIX)]
    if case != "frozen":
        assert all(".lora." in name or name.startswith(("model.classifier", "model.score")) for name in weights)
    else:
        assert not [name for name in weights if "embeddings" in name or "layer.0.attention" in name]
        assert not [name for name in weights if name.endswith("key.weight")]
        assert "model.bert.encoder.layer.1.attention.self.key.bias" in weights
    for losses in ranks(other_size).run(resume, case, other_keys, tmp_path):
        assert losses == pytest.approx(reference(case)[0].losses[-2:], rel=TOLERANCES["fp32"].loss)


def test_other_frozen_weights_are_refused(tmp_path: Path):
    save("bert", {}, tmp_path)
    with pytest.raises(UsageError, match=r"`model.frozen_weights` was '\w{16}' and is '\w{16}'"):
        resume("bert", {}, tmp_path, shift=1e-6)


def save_run(base: Path, folder: Path, keys: dict[str, Any]) -> None:
    """Train two steps of an adapter beside pretrained weights without a pooler, and save a checkpoint in `folder`."""
    model = {"config": None, "name_or_path": str(base), "adapter": LORA}
    recipe = recipe_of("bert", True, {**keys, "model": model, "checkpoint": {"folder": str(folder)}})
    with tiny_training(recipe) as training:
        training.steps(2)
        saver = training.parts.saver()
        training.mesh.on_rank_zero(CheckpointStore(folder, 1).open)
        saver.progress = Progress(2, 2 * 12)
        saver.save()
        saver.finish()


@pytest.mark.slow
def test_any_layout_exports_the_adapter_of_one_process(ranks: RankPools, tmp_path: Path):
    described = {key: value for key, value in BERT.items() if key != "model_type"}
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**{**described, "num_hidden_layers": 4})).save_pretrained(tmp_path / "base")
    exported, configs = {}, {}
    for layout in ("one", "zero3", "tensor-sequence-accumulated", "interleaved"):
        world_size, keys = ADAPTER_LAYOUTS.get(layout, (1, {}))
        ranks(world_size).run(save_run, tmp_path / "base", tmp_path / layout, keys)
        export(tmp_path / layout, tmp_path / f"{layout}-adapter", adapter=True)
        exported[layout] = load_file(tmp_path / f"{layout}-adapter" / "adapter_model.safetensors")
        configs[layout] = json.loads((tmp_path / f"{layout}-adapter" / "adapter_config.json").read_text())
    expected = exported.pop("one")
    assert configs["one"]["modules_to_save"] == ["bert.pooler", "classifier"]
    assert all(expected[name].abs().max() > 0 for name in expected if name.endswith("lora_B.weight"))
    for layout, tensors in exported.items():
        assert configs[layout] == configs["one"]
        assert tensors.keys() == expected.keys()
        difference = max((tensors[name] - expected[name]).abs().max().item() for name in expected)
        assert difference <= TOLERANCES["fp32"].sgd_weights, layout
