"""Shipped recipes of large models pass `check` and `plan` without a network, and need the bytes of their comments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import trainer
from trainer.cli import main
from trainer.recipe.reading.shipped import shipped_recipes

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128009,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
QWEN = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
MODERNBERT = {
    "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 1024, "intermediate_size": 2624,
    "num_hidden_layers": 28, "num_attention_heads": 16, "classifier_pooling": "mean",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama_8b_qlora": LLAMA,
    "llama_8b_lora": LLAMA,
    "llama_8b_sft": LLAMA,
    "qwen3_8b_ultrachat": QWEN,
    "modernbert_large_mnli": MODERNBERT,
}
"""The recipes, and the configurations that their models have on the hub."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if "8b" in name else pytest.mark.slow) for name in MODELS],
)
def test_it_needs_the_bytes_of_its_comment(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    text = re.sub(r"\s*\n//\s*", " ", shipped_recipes()[name].read_text())
    found = re.search(r"`trainer plan (\w+) --gpus (\dx\S+)`, (?:the|a) GPU needs (\d+) GiB\.", text)
    assert found
    assert found[1] == name
    assert main(["check", name, "--processes", found[2].split("x")[0]]) == 0
    plan = trainer.plan(trainer.load_recipe(name, {"model.name_or_path": str(tmp_path)}), found[2])
    assert plan.fits
    assert round(plan.needed / 2**30) == int(found[3])
