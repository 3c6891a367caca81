"""Sizes of models for pretraining: the table of `docs/sizes.md`, and its planned speeds.

`python -m docs.sizes` plans each size again on one H100, and stores the figures in `docs/sizes.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("sizes.json")
TOKENS = 10e9
_DEVICE = "1xH100"
_ROW_TOKENS = 98_304  # of a microbatch, as of 96 rows of 1,024 tokens


def sizes() -> dict[str, dict[str, Any]]:
    """Return the stored sizes by name: configuration, source, counted parameters and planned speed."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["sizes"]
    return found


def recipe_of(size: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe whose plan gives the speed of a size: masked rows in bf16, or a causal language model."""
    is_encoder = size["objective"] == "masked_lm"
    length = size["length"]
    rows = _ROW_TOKENS // length // (1 if is_encoder else 4)
    task = {"type": size["objective"], "text": "text"} | ({"mask_probability": 0.3} if is_encoder else {})
    return {
        "name": "size",
        "task": task,
        "model": {"config": size["config"], "tokenizer": "none", "dropout": 0.0},
        "data": {"source": "files", "train": "none", "max_length": length, "padding_free": is_encoder},
        "training": {"max_steps": 1000, "global_batch_size": rows, "micro_batch_size": rows},
        "precision": "bf16",
    }


def counted(size: Mapping[str, Any]) -> tuple[int, int]:
    """Return the parameters of transformers' class of a size, and those without the embeddings of tokens."""
    import torch
    import transformers

    values = dict(size["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind = "AutoModelForMaskedLM" if size["objective"] == "masked_lm" else "AutoModelForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, kind).from_config(config)
    whole = sum(parameter.numel() for parameter in model.parameters())
    return whole, whole - model.get_input_embeddings().weight.numel()


def planned(size: Mapping[str, Any]) -> int:
    """Return the planned tokens a second on one H100."""
    from trainer.recipe.plan import plan_run
    from trainer.recipe.schema import Recipe
    from trainer.tools.plan.hardware import parse_devices
    from trainer.tools.plan.pipeline_plan import plan_steps
    from trainer.tools.plan.recipe_plan import RecipePlan

    plan, length = plan_run(Recipe.model_validate(recipe_of(size)), 1), size["length"]
    time = RecipePlan(plan, parse_devices(_DEVICE), length, plan_steps(plan, length, True, True)).time
    assert time is not None
    return round(time.tokens_per_second)


def table() -> str:
    """Return the table of sizes."""
    header = (
        "size", "`model_type`", "`hidden_size`", "`num_hidden_layers`", "`num_attention_heads`", "`intermediate_size`",
        "`vocab_size`", "parameters", "without embeddings", "planned tokens/s", "hours for 10B tokens",
        "hours for 20 tokens a parameter",
    )  # fmt: skip
    rows = [header, ("---",) * len(header), *(_row(name, size) for name, size in sizes().items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, size: Mapping[str, Any]) -> tuple[str, ...]:
    config, speed = size["config"], size["tokens_per_second"]
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    hours = [tokens / speed / 3600 for tokens in (TOKENS, 20 * size["parameters"])]
    return (
        f"[{name}]({size['source']})", config["model_type"], *(f"{config[key]:,}" for key in shape),
        f"{size['parameters']:,}", f"{size['without_embeddings']:,}", f"{speed:,}",
        *(f"{value:,.1f}" if value >= 1 else f"{value:.2f}" for value in hours),
    )  # fmt: skip


def main() -> None:
    found = json.loads(FILE.read_text(encoding="utf-8"))
    for size in found["sizes"].values():
        size["parameters"], size["without_embeddings"] = counted(size)
        size["tokens_per_second"] = planned(size)
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
