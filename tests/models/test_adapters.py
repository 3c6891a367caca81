"""Adapters and frozen weights: against PEFT's own layers and loop, and the errors of patterns."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.helpers.families import CONFIGS
from tests.helpers.training import NUM_CLASSES, TINY_BERT, tiny_recipe, tiny_training, weights_of
from trainer.base.errors import UsageError
from trainer.engine.state import MODEL_PREFIX
from trainer.models.adapter_starts import require_package
from trainer.models.adapters import reach_note
from trainer.models.freezing import adapt
from trainer.models.place import ModelCut, StageChoice, place
from trainer.models.registered_forms import form_of
from trainer.parallel.tensor.kinds import ROWS, is_start
from trainer.recipe.schema import Adapter, Model, Recipe

BERT = {**TINY_BERT, "initializer_range": 0.2}
GPT2 = {"model_type": "gpt2", **CONFIGS["gpt2"], "pad_token_id": 0, "vocab_size": TINY_BERT["vocab_size"]}
LINEAR = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
PATTERNS = {"rank_pattern": {"intermediate.dense": 2}, "alpha_pattern": {"query": 8.0}}
# The model, keys of the adapter, and the arguments of PEFT for the same training.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "bert": (BERT, {}, {"target_modules": LINEAR}),
    "gpt2": (GPT2, {"targets": "all-linear"}, {"target_modules": "all-linear"}),
    "patterns": (
        BERT,
        {**PATTERNS, "rank_stabilised": True},
        {**PATTERNS, "use_rslora": True, "target_modules": LINEAR},
    ),
    "tokens": (
        BERT,
        {"trainable_tokens": [0, 7, 9, 30]},
        {"trainable_token_indices": {"word_embeddings": [0, 7, 9, 30]}, "target_modules": LINEAR},
    ),
    "dora": (BERT, {"type": "dora"}, {"use_dora": True, "target_modules": LINEAR}),
    "dora-gpt2": (GPT2, {"type": "dora"}, {"use_dora": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "pissa": (
        BERT,
        {"start": "pissa", **PATTERNS},
        {"init_lora_weights": "pissa", **PATTERNS, "target_modules": LINEAR},
    ),
    "pissa-dora-gpt2": (
        GPT2,
        {"type": "dora", "start": "pissa"},
        {"use_dora": True, "init_lora_weights": "pissa", "target_modules": ["c_attn", "c_proj", "c_fc"]},
    ),
}


def recipe_of(config: dict[str, Any], adapter: dict[str, Any]) -> Recipe:
    model = {"config": config, "dropout": 0.0, "adapter": {"type": "lora", "rank": 4, "alpha": 16.0, **adapter}}
    return tiny_recipe(model=model, training={"max_steps": 6})


def peft_model(config: dict[str, Any], arguments: dict[str, Any], start: dict[str, torch.Tensor]) -> Any:
    """Return PEFT's model over the same weights; it begins with the same factors, if these are drawn."""
    described = {key: value for key, value in config.items() if key != "model_type"}
    described = AutoConfig.for_model(config["model_type"], **described, num_labels=NUM_CLASSES)
    model = AutoModelForSequenceClassification.from_config(described)
    base = {name: tensor for name, tensor in start.items() if ".lora." not in name and ROWS not in name}
    assert not model.load_state_dict(base, strict=False).unexpected_keys
    with warnings.catch_warnings(action="ignore"):  # PEFT sets `fan_in_fan_out` for GPT-2 itself
        peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, task_type=TaskType.SEQ_CLS, **arguments))
    if "init_lora_weights" not in arguments:
        drawn = {_name_in_peft(name): tensor for name, tensor in start.items() if name.endswith((".A", ".B"))}
        assert not peft.load_state_dict(drawn, strict=False).unexpected_keys
    return peft.eval()  # all dropout is off


def _name_in_peft(name: str) -> str:
    layer, _, factor = name.partition(".lora.")
    if factor == "magnitude.weight":
        factor = "magnitude_vector"
    return f"base_model.model.{layer}.lora_{factor}.default.weight"


@pytest.mark.parametrize("name", KINDS)
def test_a_loop_with_peft_has_the_same_losses(name: str, tmp_path: Path):
    config, keys, arguments = KINDS[name]
    with tiny_training(recipe_of(config, keys)) as training:
        state = training.engine.state()
        start = {p.name.removeprefix(MODEL_PREFIX): p.boxes[0].view.clone() for p in (*state.parts, *state.frozen())}
        results, batches = [], []
        for batch in training.loader:
            batches.append(batch)
            results.append(training.engine.train_step(batch))
        end = weights_of(training.engine, training.mesh)  # those of a checkpoint
        training.engine.export(tmp_path / "merged")

    reference = peft_model(config, arguments, start)
    decayed = [p for n, p in reference.named_parameters() if p.requires_grad and not n.endswith("bias")]
    biases = [p for n, p in reference.named_parameters() if p.requires_grad and n.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": biases, "weight_decay": 0.0}], weight_decay=0.01)
    for batch, result in zip(batches, results, strict=True):
        (microbatch,) = batch.microbatches
        output = reference(**microbatch.inputs, labels=microbatch.labels)
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*decayed, *biases], 1.0)
        assert result.loss == pytest.approx(output.loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = result.learning_rate
        optimizer.step()
        optimizer.zero_grad()

    assert all(".lora." in key or ROWS in key or key.startswith(("classifier", "score")) for key in end)
    assert all(torch.equal(start[key], tensor) == is_start(key) for key, tensor in end.items())
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
        (
            {"adapter": {"type": "lora", "targets": ["query"], "rank_pattern": {"layer.1.*.query": 2, "key": 4}}},
            r"`model.adapter.rank_pattern` must match adapted layers, but 'key' matches none",
        ),
        ({"adapter": {"type": "dora", "rank": 40, "start": "pissa"}}, r"rank` must be at most 32 with `start` pissa"),
        ({"adapter": {"type": "lora", "rank": 2**31 - 1}}, r"rank` must be at most 32, because"),
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


def test_a_start_without_peft_is_refused_with_the_command_that_installs_it():
    missing = mock.patch("trainer.models.adapter_starts.find_spec", return_value=None)
    with missing, pytest.raises(UsageError, match=r'needs the package `peft`; install it .*"recipe-trainer\[lora\]"'):
        require_package(Adapter(type="lora", start="pissa"))


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_experts_that_an_adapter_does_not_reach_are_named_with_their_share(quantization: str | None):
    described = {**CONFIGS["llama"], "vocab_size": 20, "num_local_experts": 8}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **described))
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name or "gate." in name)
    reached = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name and "experts" not in name)
    keys = {"config": {"model_type": "mixtral"}, "tokenizer": "none", "quantization": quantization}
    recipe = Model.model_validate({**keys, "adapter": {"type": "lora", "targets": "all-linear"}})
    adapt(model, recipe, 0)
    note = reach_note(model, form_of(recipe))
    assert note.startswith(
        f"`model.adapter` reaches layers with {reached:,} of {total:,} parameters ({reached / total:.1%});"
        f" {experts / total:.1%} are no linear layers, such as model.layers.0.mlp.experts (MixtralExperts)"
    )
    assert note.endswith(": `model.adapter.target_parameters` adds them")  # nf4 does not leave them whole
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIGS["llama"]))
    total, reached = 0, 0
    adapt(plain, Model.model_validate({**keys, "quantization": None, "adapter": {"type": "lora"}}), 0)
    for name, parameter in plain.named_parameters():
        total += parameter.numel() * (".lora." not in name)
        reached += parameter.numel() * ("_proj.weight" in name)
    assert reach_note(plain, None) == (
        f"`model.adapter` reaches layers with {reached:,} of {total:,} parameters ({reached / total:.1%})"
    )
