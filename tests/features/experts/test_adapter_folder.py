"""`trainer export --adapter` with adapted experts: a folder that PEFT opens, with the logits of the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.features.experts.tiny_experts import build_experts
from tests.helpers.tiny_run import write_tiny_run
from tests.use.export.test_peft_folder import assert_same_logits, train
from trainer.base.errors import UsageError
from trainer.use.export.exporting import export

LORA = {"type": "lora", "rank": 4, "alpha": 64.0, "target_parameters": "all-experts"}
# Family, keys of the adapter, and the expected part of `adapter_config.json`.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (
        "mixtral",
        {"rank_stabilised": True, "rank_pattern": {"layers.1.*.down_proj": 3}, "alpha_pattern": {"gate_up_proj": 32.0}},
        {
            "target_parameters": ["down_proj", "gate_up_proj"],
            "target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"],
            "r": 4,
            "use_rslora": True,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {"target_parameters": ["layers.1.*.down_proj"], "targets": ["q_proj"]},
        {"target_parameters": ["1.mlp.experts.down_proj"], "target_modules": ["q_proj"]},
    ),
    # PEFT takes `down_proj` of other layers for that of experts.
    "shared": (
        "qwen2_moe",
        {"targets": ["q_proj", "shared_expert.*_proj"]},
        {
            "target_parameters": [
                "down_proj",
                "down_proj.weight",
                "gate_proj.weight",
                "gate_up_proj",
                "up_proj.weight",
            ],
            "target_modules": ["q_proj"],
        },
    ),
}


def tuned(folder: Path, family: str, adapter: dict[str, Any]) -> Path:
    """Train an adapter on the base `folder / "base"`, and return the folder of the run."""
    model: Any = build_experts(family, vocab_size=211, pad_token_id=0)
    model.save_pretrained(folder / "base")
    keys = {"config": None, "name_or_path": str(folder / "base"), "adapter": adapter}
    recipe = write_tiny_run(folder / "tuned", model=keys)
    task = {"type": "causal_lm", "text": "text", "metrics": ["perplexity"]}
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"task": task, "optimizer": {"learning_rate": 0.01}}))
    train(recipe)
    return folder / "tuned" / "run"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_peft_opens_the_folder_with_the_logits_of_the_merged_model(tmp_path: Path, name: str):
    family, keys, expected = CASES[name]
    run = tuned(tmp_path, family, {**LORA, **keys})
    export(run, tmp_path / "adapter", adapter=True)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {key: written[key] for key in expected} == expected
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    untrained = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = AutoModelForCausalLM.from_pretrained(run / "model")
    assert_same_logits(PeftModel.from_pretrained(base, tmp_path / "adapter"), merged)
    with torch.no_grad():
        tokens = torch.arange(5, 15).unsqueeze(0)
        assert (merged(tokens).logits - untrained(tokens).logits).abs().max() > 0.01
    experts = "model.layers.1.mlp.experts.down_proj"
    assert not torch.equal(merged.get_parameter(experts), untrained.get_parameter(experts))


@pytest.mark.slow
def test_a_layer_that_peft_would_take_for_experts_is_refused_with_dropout(tmp_path: Path):
    adapter = {"type": "lora", "rank": 2, "targets": ["layers.0.mlp.down_proj"], "dropout": 0.1}
    run = tuned(tmp_path, "deepseek_v3", adapter)
    with pytest.raises(UsageError, match=r"needs LoRA without dropout for model.layers.0.mlp.down_proj"):
        export(run, tmp_path / "adapter", adapter=True)
