"""Adapters and frozen weights: against PEFT's own layers and loop, and the errors of patterns."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.families import CONFIGS
from tests.helpers.training import NUM_CLASSES, TINY_BERT, tiny_recipe, tiny_training, weights_of
from trainer.base.errors import UsageError
from trainer.engine.state import MODEL_PREFIX
from trainer.models.adapters import adapt
from trainer.models.place import ModelCut, StageChoice, place
from trainer.recipe.schema import Model, Recipe

BERT = {**TINY_BERT, "initializer_range": 0.2}
GPT2 = {"model_type": "gpt2", **CONFIGS["gpt2"], "pad_token_id": 0, "vocab_size": TINY_BERT["vocab_size"]}
# Their own names, and targets as PEFT must be given them.
MODELS = {
    "bert": (BERT, ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]),
    "gpt2": (GPT2, ["c_attn", "c_proj", "c_fc"]),
}


def recipe_of(config: dict[str, Any], **keys: Any) -> Recipe:
    model = {"config": config, "dropout": 0.0, "adapter": {"type": "lora", "rank": 4, "alpha": 16.0}}
    return tiny_recipe(model=model, training={"max_steps": 6}, **keys)


def peft_model(config: dict[str, Any], targets: list[str], start: dict[str, torch.Tensor]) -> Any:
    """Return PEFT's model with the same weights."""
    described = {key: value for key, value in config.items() if key != "model_type"}
    described = AutoConfig.for_model(config["model_type"], **described, num_labels=NUM_CLASSES)
    model = AutoModelForSequenceClassification.from_config(described)
    with warnings.catch_warnings(action="ignore"):  # PEFT sets `fan_in_fan_out` for GPT-2 itself
        peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type=TaskType.SEQ_CLS))
    peft.load_state_dict({_name_in_peft(peft, name): tensor for name, tensor in start.items()}, strict=False)
    loaded = {_name_in_peft(peft, name) for name in start}
    assert all(name in loaded for name, p in peft.named_parameters() if p.requires_grad)
    return peft.eval()  # all dropout is off


def _name_in_peft(peft: Any, name: str) -> str:
    layer, _, last = name.rpartition(".")
    if layer.endswith(".lora"):
        return f"base_model.model.{layer.removesuffix('.lora')}.lora_{last}.default.weight"
    names = peft.state_dict()
    candidates = (f"{layer}.{last}", f"{layer}.base_layer.{last}", f"{layer}.modules_to_save.default.{last}")
    return next(full for one in candidates[::-1] if (full := f"base_model.model.{one}") in names)


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_with_peft_has_the_same_losses(name: str, tmp_path: Path):
    config, targets = MODELS[name]
    with tiny_training(recipe_of(config)) as training:
        state = training.engine.state()
        start = {p.name.removeprefix(MODEL_PREFIX): p.boxes[0].view.clone() for p in (*state.parts, *state.frozen)}
        results, batches = [], []
        for batch in training.loader:
            batches.append(batch)
            results.append(training.engine.train_step(batch))
        end = weights_of(training.engine, training.mesh)  # those of a checkpoint
        training.engine.export(tmp_path / "merged")

    reference = peft_model(config, targets, start)
    decayed = [p for n, p in reference.named_parameters() if p.requires_grad and not n.endswith("bias")]
    biases = [p for n, p in reference.named_parameters() if p.requires_grad and n.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": biases, "weight_decay": 0.0}], weight_decay=0.01)
    for batch, result in zip(batches, results, strict=True):
        (microbatch,) = batch.microbatches
        output = reference(**microbatch.inputs, labels=microbatch.labels)
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*decayed, *biases], 1.0)
        assert result.loss == pytest.approx(output.loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = result.learning_rate
        optimizer.step()
        optimizer.zero_grad()

    assert all(".lora." in key or key.startswith(("classifier", "score")) for key in end)
    assert not any(torch.equal(start[key], tensor) for key, tensor in end.items())
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    inputs = batches[0].microbatches[0].inputs
    with torch.no_grad():
        assert (merged(**inputs).logits - reference(**inputs).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"freeze": ["embedings"]}, r"`model.freeze` must match.*'embedings'.*embeddings"),
        ({"freeze": ["*"]}, r"`model.freeze` must leave a parameter to train"),
        ({"adapter": {"type": "lora", "targets": ["q_proj"]}}, r"`model.adapter.targets` must match.*'q_proj'.*query"),
        ({"adapter": {"type": "lora", "targets": ["embeddings"]}}, r"must name linear layers.*BertEmbeddings"),
        ({"adapter": {"type": "lora", "modules_to_save": ["clasifier"]}}, r"modules_to_save` must match.*classifier"),
    ],
)
def test_a_pattern_that_fits_nothing_is_an_error(keys: dict[str, Any], words: str):
    described = {key: value for key, value in BERT.items() if key != "model_type"}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **described))
    with pytest.raises(UsageError, match=words):
        adapt(model, Model.model_validate({"config": BERT, "tokenizer": "none", **keys}), seed=0)


def test_a_frozen_pipeline_stage_is_refused():
    described = {key: value for key, value in BERT.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **described))
    adapt(model, Model.model_validate({"config": BERT, "freeze": ["embeddings", "layer.0"]}), seed=0)
    with pytest.raises(UsageError, match=r"all parameters of stage 0 \(encoder.layer.0\) are frozen"):
        place(model, ModelCut(choice=StageChoice(1, num_stages=2)))
