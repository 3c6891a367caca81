"""The values of a folder of PEFT, with which the products of an adapter begin; PEFT is not needed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.features.peft_start.section import FolderKeys
from trainer.models.adapter_starts import Start
from trainer.models.adapters import PartsAdder
from trainer.models.merged_weights import parts_of_products
from trainer.recipe.schema import Adapter
from trainer.use.export.peft_folder import PREFIX, layer_of_peft

_KEY = "model.adapter.start_folder"
_FACTORS = {"A": "lora_A.weight", "B": "lora_B.weight", "magnitude.weight": "lora_magnitude_vector"}


def starts_of_folder(model: nn.Module, adapter: Adapter) -> dict[str, Start]:
    """Return the functions to the factors in the folder, by the names of the weights; none without a folder.

    Raises:
        UsageError: the folder cannot be read, or holds other products than the recipe.
    """
    place = cast(FolderKeys, adapter).start_folder
    if place is None:
        return {}
    if adapter.start is not None:
        raise UsageError(f"`model.adapter.start` must be null with `{_KEY}`, but is {adapter.start}; remove one")
    file = Path(place) / "adapter_model.safetensors"
    try:
        config = json.loads((Path(place) / "adapter_config.json").read_text(encoding="utf-8"))
        with safe_open(file, framework="pt") as opened:
            shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"`{_KEY}` must be a folder of PEFT, but {place} cannot be read: {error}; name another"
        ) from error
    starts: dict[str, Start] = {}
    expected: dict[str, tuple[int, ...]] = {}
    products = parts_of_products(name for name, _ in model.named_parameters())
    for weight, parts in products.items():
        layer = layer_of_peft(weight, list(products))
        keys = {part: f"{PREFIX}{layer}.{_FACTORS[part]}" for part in parts}
        whole = {part: tuple(model.get_parameter(name).shape) for part, name in parts.items()}
        expected |= {keys[part]: _in_peft(part, shape) for part, shape in whole.items()}
        _require_scaling(weight.removesuffix(".weight"), adapter, config)
        starts[weight] = partial(_read, file, {parts[part]: (keys[part], part, whole[part]) for part in parts})
    if other := next((key for key in (*expected, *shapes) if expected.get(key) != shapes.get(key)), None):
        found, needed = (values.get(other, "missing") for values in (shapes, expected))
        raise UsageError(
            f"`{_KEY}` must hold the products of `model.adapter` and no others, but {other} of {place} is {found} there"
            f" and {needed} in the recipe; set rank and targets to those of the folder"
        )
    return starts


def _in_peft(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a factor in PEFT, which joins those of experts."""
    if len(shape) < 3:
        return shape
    experts, rows, columns = shape
    return (experts * rows, columns) if part == "A" else (rows, columns * experts)


def _read(file: Path, factors: Mapping[str, tuple[str, str, tuple[int, ...]]], *_: Tensor) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: _own(opened.get_tensor(key).float(), part, shape) for name, (key, part, shape) in factors.items()}


def _own(value: Tensor, part: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) < 3 or part == "A":
        return value.view(shape)
    experts, rows, columns = shape
    return value.view(rows, columns, experts).permute(2, 0, 1).contiguous()


def _require_scaling(name: str, adapter: Adapter, config: Mapping[str, Any]) -> None:
    rank, alpha = (_of_pattern(config, key, name) for key in ("r", "lora_alpha"))
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if not math.isclose(scaling, adapter.scaling_of(name), rel_tol=1e-6):
        raise UsageError(
            f"`{_KEY}` must have the scaling of the recipe, but multiplies the product of {name} by {scaling:g}, and"
            f" `model.adapter` by {adapter.scaling_of(name):g}; set alpha to that of the folder"
        )


def _of_pattern(config: Mapping[str, Any], key: str, name: str) -> float:
    patterns = config.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
    # PEFT names the weight of a layer that it adapts as a parameter.
    for pattern, value in patterns.items():
        if any(re.match(rf"(.*\.)?({pattern})$", one) for one in (name, f"{name}.weight")):
            return float(value)
    return float(config[key])


OF_FOLDER = PartsAdder(lambda *_: (), starts=starts_of_folder)
