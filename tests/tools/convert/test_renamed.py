"""Keys and values that have another name: each is converted to the key or value of the same meaning."""

from __future__ import annotations

import json

import pytest

from trainer.recipe.schema import Linear
from trainer.tools.convert.convert import convert
from trainer.tools.convert.foreign.tables import counterpart


def test_deepspeeds_numbers_of_the_optimizer(write):
    params = {"lr": 3e-5, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.02}
    file = write({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": params}}, "ds.json")
    optimizer = convert([file], None, 1).recipe["optimizer"]
    assert {key: optimizer[key] for key in ("learning_rate", "betas", "epsilon", "weight_decay")} == {
        "learning_rate": 3e-5,
        "betas": [0.8, 0.95],
        "epsilon": 1e-7,
        "weight_decay": 0.02,
    }


def test_numbers_of_training_arguments(write):
    keys = {"learning_rate": 3e-5, "weight_decay": 0.02, "seed": 7}
    recipe = convert([write({"output_dir": "x"} | keys)], None, 1).recipe
    assert (recipe["optimizer"]["learning_rate"], recipe["optimizer"]["weight_decay"]) == (3e-5, 0.02)
    assert recipe["training"]["seed"] == 7


def test_degrees_of_megatron_in_an_accelerate_file(write):
    section = {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 4}
    keys = {"distributed_type": "MEGATRON_LM", "num_processes": 8, "megatron_lm_config": section}
    parallel = convert([write(json.dumps({"compute_environment": "LOCAL_MACHINE"} | keys), "a.yaml")]).recipe[
        "parallel"
    ]
    assert (parallel["tensor"], parallel["pipeline"]["stages"]) == (2, 4)


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("optimizer.params.eps", "optimizer.epsilon"),
        ("optimizer.params.lr", "optimizer.learning_rate"),
        ("megatron_lm_config.megatron_lm_tp_degree", "parallel.tensor"),
        ("megatron_lm_config.megatron_lm_pp_degree", "parallel.pipeline.stages"),
        ("--adam-eps", "optimizer.epsilon"),
        ("--weight-decay", "optimizer.weight_decay"),
        ("--pipeline-model-parallel-size", "parallel.pipeline.stages"),
    ],
)
def test_a_spelling_leads_to_the_key_of_its_meaning(spelling, key):
    assert str(counterpart(spelling)).startswith(f"is `{key}` here")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant"), ("constant_with_warmup", "constant")],
)
def test_schedules_of_training_arguments(write, theirs, ours):
    recipe = convert([write({"output_dir": "x", "lr_scheduler_type": theirs})], None, 1).recipe
    assert recipe.get("schedule", {}).get("name", Linear().name) == ours


@pytest.mark.parametrize(
    ("theirs", "ours"), [("WarmupLR", "constant"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")]
)
def test_schedules_of_deepspeed(write, theirs, ours):
    params = {"warmup_num_steps": 10, "total_num_steps": 100}
    file = write({"train_batch_size": 8, "scheduler": {"type": theirs, "params": params}}, "ds.json")
    assert convert([file], None, 1).recipe.get("schedule", {}).get("name", Linear().name) == ours
