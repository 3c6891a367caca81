"""The losses of routers in files of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.tools.convert.convert import Conversion, convert
from trainer.tools.convert.foreign.tables import MEGATRON

_FILES: dict[str, dict[str, Any]] = {
    "trl": {"model_name_or_path": "m", "dataset_name": "d", "dataset_text_field": "text", "packing": False},
    "llama_factory": {"model_name_or_path": "m", "stage": "sft", "dataset": "d", "dataset_dir": "ONLINE"},
    "axolotl": {"base_model": "m", "datasets": [{"path": "a.jsonl", "type": "completion"}], "micro_batch_size": 2},
}


def converted(folder: Path, tool: str, **keys: Any) -> Conversion:
    path = folder / "a.yaml"
    path.write_text(json.dumps({**_FILES[tool], "output_dir": "runs/x", **keys}))
    return convert([path], None, 1)


@pytest.mark.parametrize(
    ("tool", "keys"),
    [
        ("trl", {"router_aux_loss_coef": 0.02}),
        ("llama_factory", {"moe_aux_loss_coef": 0.02}),
        ("axolotl", {"overrides_of_model_config": {"output_router_logits": True, "router_aux_loss_coef": 0.02}}),
    ],
)
def test_the_coefficient_becomes_that_of_the_global_batch(tmp_path: Path, tool: str, keys: dict[str, Any]) -> None:
    found = converted(tmp_path, tool, **keys)
    assert found.recipe["task"]["router_loss"] == 0.02
    assert "output_router_logits" not in json.dumps(found.recipe)
    assert "config" not in found.recipe["model"]
    assert any("over the global batch, not within each microbatch" in line.text for line in found.lines)


def test_no_coefficient_is_no_loss(tmp_path: Path) -> None:
    for tool, key in (("trl", "router_aux_loss_coef"), ("llama_factory", "moe_aux_loss_coef")):
        assert "router_loss" not in converted(tmp_path, tool, **{key: None}).recipe["task"]
        assert converted(tmp_path, tool, **{key: 0.0}).recipe["task"].get("router_loss") is None
    kept = {"overrides_of_model_config": {"router_aux_loss_coef": 0.02}}  # the loss is computed with the logits only
    assert converted(tmp_path, "axolotl", **kept).recipe["model"]["config"] == kept["overrides_of_model_config"]
    missing = converted(tmp_path, "axolotl", overrides_of_model_config={"output_router_logits": True})
    assert missing.recipe["task"]["router_loss"].startswith("TODO: the coefficient router_aux_loss_coef")


def test_flags_of_megatron_name_the_keys() -> None:
    assert MEGATRON["--moe-aux-loss-coeff"].key == "task.router_loss"
    assert MEGATRON["--moe-z-loss-coeff"].key == "task.router_z_loss"
    assert MEGATRON["--moe-router-bias-update-rate"].key == "task.router_bias_rate"
