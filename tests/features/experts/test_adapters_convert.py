"""Adapters of experts in files of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.features.experts.test_router_convert import converted
from trainer.tools.convert.foreign.tables import LORA_CONFIG

NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TOOLS: dict[str, dict[str, Any]] = {
    "trl": {"use_peft": True, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"]},
    "axolotl": {"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("tool", TOOLS)
def test_names_of_parameters_are_matrices_of_experts(tmp_path: Path, tool: str) -> None:
    def adapter(parameters: Any) -> dict[str, Any]:
        keys = TOOLS[tool] | {"lora_target_parameters": parameters}
        return dict(converted(tmp_path, tool, **keys).recipe["model"]["adapter"])

    assert adapter(NAMES)["target_parameters"] == NAMES
    assert adapter(NAMES[0])["target_parameters"] == NAMES[:1]
    assert "target_parameters" not in adapter(None) | adapter([])
    assert adapter(["q_proj.weight"])["target_parameters"].startswith("TODO: q_proj.weight is no matrix of experts")


def test_without_an_adapter_the_names_are_not_read(tmp_path: Path) -> None:
    found = converted(tmp_path, "trl", lora_target_parameters=NAMES)
    assert "adapter" not in found.recipe["model"]
    assert "use_peft is not set" in next(line.text for line in found.lines if line.item.key == "lora_target_parameters")


def test_a_configuration_of_peft_names_the_key() -> None:
    assert LORA_CONFIG["target_parameters"].key == "model.adapter.target_parameters"
