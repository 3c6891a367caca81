"""Write an adapter in the format of PEFT, beside the model that it was trained on; does not import PEFT."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.base.disk import save_tensors
from trainer.base.errors import UsageError
from trainer.models.names import aliases, owner_of, prefixes
from trainer.models.weight_files import transformers_class
from trainer.parallel.tensor.low_rank import ATTRIBUTE
from trainer.parallel.tensor.trained_rows import ROWS
from trainer.recipe.schema import Adapter, Model

ADAPTER_CONFIG_NAME = "adapter_config.json"
_WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of PEFT's wrapper
Number = TypeVar("Number", int, float)


def write_adapter(
    model: nn.Module,
    recipe: Model,
    task_type: str | None,
    available: Collection[str],
    own: Set[str],
    read: Callable[[str], Tensor],
    folder: Path,
    dtype: torch.dtype,
) -> Path:
    """Write `adapter_config.json` and the weights of an adapter.

    Args:
        model: the model without products, on `meta`.
        recipe: the recipe's `model`, with an adapter and `name_or_path`.
        task_type: PEFT's name of the task; None if it has none.
        available: the names of all tensors; of tied tensors, one name.
        own: the names of the weights that the base does not hold: trained whole, or drawn from the seed.
        read: the function that returns a tensor by its name; a weight with a product and in `own` is merged.
        folder: the existing folder to write to.

    Returns:
        The file of weights.

    Raises:
        UsageError: PEFT has no place for a weight.
        OSError, SafetensorError: a file cannot be written.
    """
    assert recipe.adapter is not None, "the caller has checked it"
    layers, with_rows = _layers_with(f".{ATTRIBUTE}.A", available), _layers_with(f".{ROWS}.rows", available)
    # PEFT has no trained rows over a product, so such a layer is written whole.
    own = own | {f"{layer}.weight" for layer in layers & with_rows}
    # `read` merges the product into weights that are written whole.
    layers -= {name.removesuffix(".weight") for name in own}
    if not layers:
        raise UsageError(
            "`--adapter` needs a product beside frozen weights, because PEFT has no adapter without one, but"
            " `model.adapter.targets` matches none; export the merged model, without --adapter"
        )
    tied = list(aliases(model).values())
    saved = _whole_modules(model, {name for names in tied for name in names if not own.isdisjoint(names)}, layers)
    tensors: dict[str, Tensor] = {}
    for layer in sorted(layers):
        product = {
            name.removeprefix(f"{layer}.{ATTRIBUTE}."): read(name)
            for name in available
            if name.startswith(f"{layer}.{ATTRIBUTE}.")
        }
        tensors |= {f"{_PREFIX}{layer}.{name}": tensor for name, tensor in _in_peft(product).items()}
    tokens: dict[str, list[int]] = {}
    for layer in sorted(layer for layer in with_rows if f"{layer}.weight" not in own):
        tokens[layer] = read(f"{layer}.{ROWS}.ids").tolist()
        tensors[f"{_PREFIX}{layer}.token_adapter.trainable_tokens_delta"] = read(f"{layer}.{ROWS}.rows")
    if tokens:
        _refuse_lost_bias(model, own)
    sources = {
        name: next(one for one in group if one in available) for group in aliases(model).values() for name in group
    }
    for module in saved:
        for name, _ in model.get_submodule(module).named_parameters(remove_duplicate=False):
            tensors[f"{_PREFIX}{module}.{name}"] = read(sources[f"{module}.{name}"])
    # A copy, because two tensors of a file may not share memory.
    save_tensors(
        {name: one.to(dtype, copy=True) for name, one in tensors.items()}, folder / _WEIGHTS_NAME, {"format": "pt"}
    )
    config = _config(model, recipe, recipe.adapter, layers, saved, task_type)
    config["trainable_token_indices"] = tokens or None
    (folder / ADAPTER_CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return folder / _WEIGHTS_NAME


def _layers_with(end: str, available: Collection[str]) -> set[str]:
    return {name.removesuffix(end) for name in available if name.endswith(end)}


def _refuse_lost_bias(model: Any, own: Set[str]) -> None:
    """Refuse trained rows in a head with a bias, which PEFT leaves out, unless the head is written whole."""
    head = model.get_output_embeddings()
    is_whole = any(module is head and f"{name}.weight" in own for name, module in model.named_modules())
    if getattr(head, "bias", None) is not None and not is_whole:
        raise UsageError(
            "`--adapter` needs a head without a bias for `model.adapter.trainable_tokens`, because PEFT computes its"
            f" logits without one, but the head of {type(model).__name__} has it; export the merged model, without"
            " --adapter"
        )


def _in_peft(product: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a product by PEFT's names.

    A product that began with a part of the weight is written as its difference to this part, of twice the rank. It so
    applies to the unchanged weight, as in `LoraModel.subtract_mutated_init` of PEFT.
    """
    first, second = product["A"], product["B"]
    if "start_A" in product:
        # [A; A0] and [B, -B0]: their product is B A - B0 A0.
        first = torch.cat([first, product["start_A"]])
        second = torch.cat([second, -product["start_B"]], dim=1)
    found = {"lora_A.weight": first, "lora_B.weight": second}
    return found | ({"lora_magnitude_vector": product["magnitude.weight"]} if "magnitude.weight" in product else {})


def _config(
    model: nn.Module, recipe: Model, adapter: Adapter, layers: Collection[str], saved: list[str], task_type: str | None
) -> dict[str, Any]:
    class_ = transformers_class(model)
    # A product that began with a part of the weight has twice the rank; `alpha` keeps its scaling.
    doubled = 1 if adapter.start in (None, "loftq") else 2
    ranks = {layer: doubled * adapter.rank_of(layer) for layer in sorted(layers)}
    # Alpha such that PEFT's scaling, alpha / rank or alpha / sqrt(rank), equals ours.
    alphas = {
        layer: adapter.scaling_of(layer) * (math.sqrt(rank) if adapter.rank_stabilised else rank)
        for layer, rank in ranks.items()
    }
    rank, alpha = _most_frequent(ranks.values()), _most_frequent(alphas.values())
    auto = {"base_model_class": class_.__name__, "parent_library": class_.__module__}
    return {
        "auto_mapping": None if task_type else auto,
        "base_model_name_or_path": recipe.name_or_path,
        "bias": "none",
        "fan_in_fan_out": any(isinstance(model.get_submodule(layer), Conv1D) for layer in layers),
        "inference_mode": True,
        "init_lora_weights": True,
        "alpha_pattern": {re.escape(layer): own for layer, own in alphas.items() if own != alpha},
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "modules_to_save": saved or None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {re.escape(layer): own for layer, own in ranks.items() if own != rank},
        "revision": recipe.revision,
        "target_modules": _shortest(model, layers),
        "task_type": task_type,
        "use_dora": adapter.type == "dora",
        "use_rslora": adapter.rank_stabilised,
    }


def _most_frequent(values: Iterable[Number]) -> Number:
    return Counter(values).most_common(1)[0][0]


def _whole_modules(model: nn.Module, own: Collection[str], layers: Collection[str]) -> list[str]:
    """Return the largest modules with weights of their own only, or else the modules that hold such a weight."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: set[str] = set()
    for name in sorted(own):
        holders = prefixes(name)[:-1]
        whole = [one for one in holders if all(p in own for p in parameters if p.startswith(f"{one}."))]
        module = whole[0] if whole else owner_of(name)
        if not module or any(f"{layer}.".startswith(f"{module}.") for layer in layers):
            raise UsageError(
                f"`--adapter` needs trained weights in modules of their own, but PEFT cannot save {name} without"
                f" {module or 'the whole model'}; export the merged model, without --adapter"
            )
        found.add(module)
    # A module inside of another one is saved with it.
    found -= {one for one in found for other in found if one.startswith(f"{other}.")}
    names = [name for name, _ in model.named_modules()]
    for module in found:  # PEFT takes each name as the end of a name
        if other := next((name for name in names if name.endswith(module) and name not in found), None):
            raise UsageError(
                f"`--adapter` needs names of trained modules that PEFT can tell apart, but it would take {other} for"
                f" {module}; export the merged model, without --adapter"
            )
    return sorted(found)


def _shortest(model: nn.Module, layers: Collection[str]) -> list[str]:
    """Return the shortest ends of names that match these layers and no other module."""
    others = [f".{name}" for name, _ in model.named_modules() if name and name not in layers]
    ends: set[str] = set()
    for layer in layers:
        parts = layer.split(".")
        candidates = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        ends.add(next(end for end in candidates if not any(name.endswith(f".{end}") for name in others)))
    return sorted(ends)
