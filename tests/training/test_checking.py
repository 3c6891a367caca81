"""`trainer check` takes the steps of a run: both give the same answers for every family under every key of a layout."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.helpers.families import CONFIGS, EXPERTS, SCALED, SHIPPED
from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_RESNET, build_tiny, check_model, tiny_recipe
from trainer.base.errors import RecipeError, TrainerError
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe

_DECODER = {**CONFIGS["llama"], "bos_token_id": 1, "eos_token_id": 2}
_SEQ2SEQ = {**CONFIGS["bart"], "decoder_start_token_id": 0, "forced_eos_token_id": 1}
# Model types outside of the table, beside those whose plan of transformers can be used.
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neox": {**CONFIGS["bert"], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "phi3": _DECODER,
    "glm4": {**_DECODER, "head_dim": 8},
    "olmo2": _DECODER,
    "phimoe": {**_DECODER, "num_local_experts": 2},
    **{name: EXPERTS[name] for name in ("mixtral", "gpt_oss", "deepseek_v3")},
    "opt": {"vocab_size": 211, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 32},
    "mbart": _SEQ2SEQ,
    "mpnet": CONFIGS["bert"],
}
MODELS = {**CONFIGS, **SHIPPED, **SCALED, **OTHERS, "resnet": TINY_RESNET}
AXES: dict[str, dict[str, Any]] = {
    "none": {},
    "tensor": {"parallel": {"tensor": 2}},
    "sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "context": {"parallel": {"context": 2}},
    "stages": {"parallel": {"pipeline": {"stages": 2}}},
    "zero_bubble": {"parallel": {"pipeline": {"stages": 2, "schedule": "zero_bubble", "stages_per_rank": 1}}},
    "fsdp": {"parallel": {"strategy": "fsdp"}},
    "recomputed": {"activation_checkpointing": "full"},
    "compiled": {"compile": True},
    "muon": {"optimizer": {"name": "muon"}},
    "decayed": {"optimizer": {"layer_decay": 0.9}},
    "adapted": {"model": {"adapter": {"type": "lora", "rank": 2}}},
    "zero1": {"parallel": {"strategy": "zero1"}},
    "zero3": {"parallel": {"strategy": "zero3"}},
    "zero of tensor ranks": {"parallel": {"strategy": "zero1", "tensor": 2}},
    "nf4": {"model": {"adapter": {"type": "lora", "rank": 2}, "quantization": "nf4"}},
    "nf4 of stages": {
        "model": {"adapter": {"type": "lora", "rank": 2}, "quantization": "nf4"},
        "parallel": {"pipeline": {"stages": 2}},
    },
    "unpadded": {"data": {"padding_free": True}},
    "unpadded over tensor ranks": {"data": {"padding_free": True}, "parallel": {"tensor": 2}},
    "frozen": {"model": {"freeze": ["*layer*.0", "*layers*.0", "*embed*"]}, "parallel": {"pipeline": {"stages": 2}}},
}
QUICK = {("gemma2", "tensor"), ("phi3", "stages"), ("gpt_neox", "context"), ("opt", "none"), ("opt", "fsdp")}


def recipe_of(model_type: str, keys: dict[str, Any]) -> Recipe:
    config = {**MODELS[model_type], "model_type": model_type}
    task = {"task": {"type": "image_classification"}} if model_type in ("vit", "resnet") else {}
    short = {"max_length": 16, **keys.get("data", {})}
    sections = {**keys, "data": short, "model": {"config": config, **keys.get("model", {})}, **task}
    if "muon" in str(keys):
        sections["optimizer"] = {"name": "muon", "learning_rate": 1e-3, "weight_decay": 0.0}
    return tiny_recipe(**sections)


def problems_of(error: TrainerError) -> tuple[str, ...]:
    return tuple(error.problems) if isinstance(error, RecipeError) else (str(error),)


def answer_of_run(model_type: str, keys: dict[str, Any]) -> tuple[str, ...]:
    try:
        build_tiny(recipe_of(model_type, keys)).close()
    except TrainerError as error:
        return problems_of(error)
    return ()


def answer_of_check(model_type: str, keys: dict[str, Any]) -> tuple[str, ...]:
    try:
        check_model(plan_run(recipe_of(model_type, keys), 2))
    except TrainerError as error:
        return problems_of(error)
    return ()


@pytest.mark.parametrize(
    ("model_type", "axis"),
    [
        pytest.param(model_type, axis, marks=() if (model_type, axis) in QUICK else pytest.mark.nightly)
        for model_type in MODELS
        for axis in AXES
    ],
)
def test_check_and_run_give_one_answer(ranks: RankPools, model_type: str, axis: str):
    keys = AXES[axis]
    found = answer_of_check(model_type, keys)
    for expected in ranks(2).run(answer_of_run, model_type, keys):
        assert bool(found) == bool(expected), (found, expected)
        assert set(expected) <= set(found)


@pytest.mark.parametrize(
    ("model_type", "axis", "words"),
    [
        ("phi3", "stages", r"`parallel.pipeline.stages` is above 1, but the family phi3 cannot be cut .*; set it to 1"),
        ("gpt_neox", "context", r"`parallel.context` must be 1: the family gpt_neox has no context parallelism"),
        ("opt", "fsdp", r"`parallel.strategy` fsdp or hsdp needs to find the layers .*'opt'"),
        ("mbart", "none", r"model type 'mbart' calls torch's dropout directly.*layout_invariant_dropout` to false"),
        ("opt", "adapted", r"targets` must be set for a model of type 'opt'.*; use \"all-linear\", or \[\"k_proj\", "),
        ("phimoe", "tensor", r"`parallel.tensor`"),
    ],
)
def test_the_answer_names_the_key_and_the_model(model_type: str, axis: str, words: str):
    problems = answer_of_check(model_type, AXES[axis])
    assert any(re.search(words, problem) for problem in problems), problems
