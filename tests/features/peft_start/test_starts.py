"""Adapters that begin with a folder that PEFT has written: the same outputs, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.features.experts.tiny_experts import build_experts
from tests.helpers.families import EXPERTS, VOCABULARY
from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_TASKS, tiny_recipe, tiny_training, weights_of
from trainer.base.errors import UsageError
from trainer.engine.state import MODEL_PREFIX
from trainer.models.freezing import adapt
from trainer.recipe.schema import Model

EXPERTS_KEYS = {"target_parameters": "all-experts", "rank_pattern": {"experts.down_proj": 2}, "rank_stabilised": True}
EXPERTS_ARGUMENTS = {
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "rank_pattern": {"experts.down_proj": 2},
    "use_rslora": True,
}


def write(folder: Path, family: str = "mixtral", **arguments: Any) -> Any:
    """Write an adapter of PEFT with random factors, and return its model."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **EXPERTS_ARGUMENTS, **arguments})
    model: Any = get_peft_model(build_experts(family), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def recipe_of(folder: Path, family: str = "mixtral", **keys: Any) -> Model:
    adapter = {"type": "lora", "rank": 4, "alpha": 8.0, "targets": ["q_proj"], **EXPERTS_KEYS, **keys}
    config = {"model_type": family, **EXPERTS[family]}
    model = {"config": config, "tokenizer": "none", "adapter": {**adapter, "start_folder": str(folder)}}
    return Model.model_validate(model)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_model_begins_with_the_outputs_of_peft(tmp_path: Path, family: str):
    reference = write(tmp_path, family)
    model: Any = build_experts(family)
    adapt(model, recipe_of(tmp_path, family), seed=0)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found, expected = model(input_ids=ids).logits, reference(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert (found - build_experts(family)(input_ids=ids).logits).abs().max() > 0.01


@pytest.mark.parametrize(
    ("arguments", "keys", "words"),
    [
        ({}, {"rank": 3}, r"but multiplies the product of .*q_proj by 4, and `model.adapter` by"),
        ({}, {"alpha": 9.0}, r"by 4, and `model.adapter` by 4.5; set alpha to that of the folder"),
        ({}, {"targets": ["k_proj"]}, r"k_proj.lora_A.weight of .* is missing there and \(4, 32\) in the recipe"),
        ({"modules_to_save": ["lm_head"]}, {}, r"lm_head.weight of .* and missing in the recipe"),
        ({}, {"start": "pissa", "target_parameters": None, "rank_pattern": {}}, r"start` must be null with"),
    ],
)
def test_other_products_than_those_of_the_recipe_are_refused(
    tmp_path: Path, arguments: dict[str, Any], keys: dict[str, Any], words: str
):
    write(tmp_path, **arguments)
    with pytest.raises(UsageError, match=words):
        adapt(build_experts("mixtral"), recipe_of(tmp_path, **keys), seed=0)


def test_a_missing_folder_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"start_folder` must be a folder of PEFT, but .* cannot be read"):
        adapt(build_experts("mixtral"), recipe_of(tmp_path), seed=0)


def first_weights(folder: Path, keys: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = recipe_of(folder).model_dump(exclude_unset=True)
    model["config"]["vocab_size"] = 211
    with tiny_training(tiny_recipe(task=TINY_TASKS["causal_lm"].keys, model=model, **keys)) as training:
        return weights_of(training.engine, training.mesh)


@pytest.mark.slow
def test_sharded_ranks_begin_with_the_folder(ranks: RankPools, tmp_path: Path):
    expected = {name: p for name, p in write(tmp_path).named_parameters() if "lora_" in name}
    for found in ranks(2).run(first_weights, tmp_path, {"parallel": {"strategy": "fsdp"}}):
        name = "model.layers.1.self_attn.q_proj"
        factor = found[f"{MODEL_PREFIX if f'{MODEL_PREFIX}{name}.lora.B' in found else ''}{name}.lora.B"]
        assert torch.equal(factor, expected[f"base_model.model.{name}.lora_B.default.weight"])
        assert len(found) == len(expected)
