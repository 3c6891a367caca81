"""Write an adapter in the format of PEFT, beside the model that it was trained on; does not import PEFT."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import ADAPTER_CONFIG_NAME, GENERATION_CONFIG_NAME

from trainer.base.disk import save_tensors
from trainer.base.errors import UsageError
from trainer.models.merged_weights import is_fused, parts_of_products
from trainer.models.names import aliases, owner_of, parts_of_layers, prefixes
from trainer.models.weight_files import transformers_class
from trainer.parallel.tensor.kinds import ROWS
from trainer.recipe.schema import Adapter, Model
from trainer.tasks.exported import CardForm

_WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's wrapper
# PEFT converts these names in models with fused experts (`utils/transformers_weight_conversion.py`).
_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
Number = TypeVar("Number", int, float)


def write_adapter(
    model: nn.Module,
    recipe: Model,
    task_type: str | None,
    available: Collection[str],
    lacking: Set[str],
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
        lacking: the names of the weights that the base does not hold: trained whole, or drawn from the seed.
        read: the function that returns a tensor by its name; a weight with a product and in `lacking` is merged.
        folder: the existing folder to write to.

    Returns:
        The file of weights.

    Raises:
        UsageError: PEFT has no place for a weight.
        OSError, SafetensorError: a file cannot be written.
    """
    products, rows = parts_of_products(available), parts_of_layers(available, ROWS)
    # PEFT has no trained rows over a product, so such a layer is written whole.
    lacking = lacking | {f"{layer}.weight" for layer in rows if f"{layer}.weight" in products}
    # `read` merges products and rows into weights that are written whole.
    whole = {name.removesuffix(".weight") for name in lacking}
    layers = {name.removesuffix(".weight"): parts for name, parts in products.items() if name not in lacking}
    if not layers:
        raise UsageError(
            "`--adapter` needs a product beside frozen weights, because PEFT has no adapter without one, but"
            " `model.adapter.targets` matches none; export the merged model, without --adapter"
        )
    tied = aliases(model)
    adapted = [name for name, _ in model.named_parameters(remove_duplicate=False) if name in products.keys() - lacking]
    saved = _whole_modules(model, lacking, layers)
    tensors: dict[str, Tensor] = {}
    for layer, parts in sorted(layers.items()):
        place = layer_of_peft(f"{layer}.weight" if f"{layer}.weight" in products else layer, adapted)
        tensors |= {f"{place}.{name}": tensor for name, tensor in _in_peft(parts, read).items()}
    tokens: dict[str, list[int]] = {}
    for layer in sorted(rows.keys() - whole):
        if "rows" in rows[layer]:  # a tied head shares those of the embedding
            tokens[layer] = read(rows[layer]["ids"]).tolist()
            tensors[f"{layer}.token_adapter.trainable_tokens_delta"] = read(rows[layer]["rows"])
    if tokens:
        _refuse_lost_bias(model, lacking)
    for module in saved:
        for name, parameter in model.get_submodule(module).named_parameters(remove_duplicate=False):
            tensors[f"{module}.{name}"] = read(next(alias for alias in tied[parameter] if alias in available))
    # A copy, because two tensors of a file may not share memory.
    copies = {f"{PREFIX}{name}": tensor.to(dtype, copy=True) for name, tensor in tensors.items()}
    save_tensors(copies, folder / _WEIGHTS_NAME, {"format": "pt"})
    config = _config(model, recipe, layers, saved, task_type) | {"trainable_token_indices": tokens or None}
    (folder / ADAPTER_CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return folder / _WEIGHTS_NAME


def layer_of_peft(weight: str, adapted: Sequence[str]) -> str:
    """Return the name of PEFT's layer with the product of a weight.

    Layers of later parameters of a module lie around it. `adapted` are all weights with products, in the model's order.
    """
    owner = owner_of(weight)
    later = [name for name in adapted[adapted.index(weight) + 1 :] if owner_of(name) == owner]
    return owner + ".base_layer" * len(later)


def _refuse_lost_bias(model: Any, lacking: Set[str]) -> None:
    """Refuse trained rows in a head with a bias, which PEFT leaves out, unless the head is written whole."""
    head = model.get_output_embeddings()
    is_whole = any(module is head and f"{name}.weight" in lacking for name, module in model.named_modules())
    if getattr(head, "bias", None) is not None and not is_whole:
        raise UsageError(
            "`--adapter` needs a head without a bias for `model.adapter.trainable_tokens`, because PEFT computes its"
            f" logits without one, but the head of {type(model).__name__} has it; export the merged model, without"
            " --adapter"
        )


def _in_peft(parts: Mapping[str, str], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a product by PEFT's names; `parts` are the names of its tensors.

    A product that began with a part of the weight is written as its difference to this part, of twice the rank. It so
    applies to the unchanged weight, as in `LoraModel.subtract_mutated_init` of PEFT.
    """
    product = {part: read(name) for part, name in parts.items()}
    first, second = product["A"], product["B"]
    if "start_A" in product:
        # [A; A0] and [B, -B0]: their product is B A - B0 A0.
        first = torch.cat([first, product["start_A"]])
        second = torch.cat([second, -product["start_B"]], dim=1)
    if first.dim() == 3:
        # Of experts: [experts * rank, in], and [out, rank * experts], as `ParamWrapper` of PEFT has them.
        first, second = first.flatten(0, 1), second.permute(1, 2, 0).flatten(1)
    factors = {"lora_A.weight": first, "lora_B.weight": second}
    return factors | ({"lora_magnitude_vector": product["magnitude.weight"]} if "magnitude.weight" in product else {})


def _config(
    model: nn.Module, recipe: Model, layers: Collection[str], saved: list[str], task_type: str | None
) -> dict[str, Any]:
    class_, adapter = transformers_class(model), recipe.adapter
    assert adapter is not None, "the caller has checked it"
    # A product that began with a part of the weight has twice the rank; `alpha` keeps its scaling.
    doubled = 1 if adapter.start in (None, "loftq") else 2
    targets = {_target(model, adapter, layer): layer for layer in sorted(layers)}
    ranks = {target: doubled * adapter.rank_of(layer) for target, layer in targets.items()}
    # Alpha such that PEFT's scaling, alpha / rank or alpha / sqrt(rank), equals ours.
    alphas = {
        target: adapter.scaling_of(targets[target]) * (math.sqrt(rank) if adapter.rank_stabilised else rank)
        for target, rank in ranks.items()
    }
    rank, alpha = _most_frequent(ranks.values()), _most_frequent(alphas.values())
    parameters = {name for name, _ in model.named_parameters()}
    modules, others = {name for name, _ in model.named_modules() if name}, parameters.intersection(targets)
    auto = {"base_model_class": class_.__name__, "parent_library": class_.__module__}
    return {
        "auto_mapping": None if task_type else auto,
        "base_model_name_or_path": recipe.name_or_path,
        "bias": "none",
        "fan_in_fan_out": any(isinstance(model.get_submodule(layer), Conv1D) for layer in modules.intersection(layers)),
        "inference_mode": True,
        # Not the recipe's start, by which PEFT would change the base when it loads the adapter.
        "init_lora_weights": True,
        # PEFT reads the names in both patterns as regular expressions.
        "alpha_pattern": {re.escape(layer): of_layer for layer, of_layer in alphas.items() if of_layer != alpha},
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "modules_to_save": saved or None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {re.escape(layer): of_layer for layer, of_layer in ranks.items() if of_layer != rank},
        "revision": recipe.revision,
        "target_modules": _shortest(modules, modules.intersection(targets)),
        "target_parameters": sorted(_shortest(parameters, others)) if others else None,
        "task_type": task_type,
        "use_dora": adapter.type == "dora",
        "use_rslora": adapter.rank_stabilised,
    }


def _target(model: nn.Module, adapter: Adapter, layer: str) -> str:
    """Return the name of a layer, or that of its weight if PEFT would take the layer for older, separate experts."""
    is_linear = layer in dict(model.named_modules())
    if not is_linear or layer.rpartition(".")[2] not in _OF_EXPERTS or not any(map(is_fused, model.modules())):
        return layer
    if adapter.dropout > 0 or adapter.type != "lora":
        raise UsageError(
            f"`--adapter` needs LoRA without dropout for {layer}, because PEFT takes its name for that of experts, and"
            " so adapts its weight as a parameter; export the merged model, without --adapter"
        )
    return f"{layer}.weight"


def card_form(folder: Path) -> CardForm:
    """Return the texts of the model card for the folder of an adapter."""
    generates = (folder / GENERATION_CONFIG_NAME).is_file()
    usage = [
        "from peft import PeftModel",
        f"from transformers import AutoConfig, {'GenerationConfig, ' if generates else ''}ARCHITECTURE",
        "",
        'folder = "path/to/this/folder"',
        "base = ARCHITECTURE.from_pretrained(BASE, config=AutoConfig.from_pretrained(folder))",
        "model = PeftModel.from_pretrained(base, folder)",
    ]
    if generates:
        ends = "  # with the tokens that end a text"
        usage.insert(-1, f"base.generation_config = GenerationConfig.from_pretrained(folder){ends}")
    title = "A LoRA adapter of PEFT in `DTYPE` for the `ARCHITECTURE` of its base model"
    return CardForm(title, "\n".join(usage), "peft")


def _most_frequent(values: Iterable[Number]) -> Number:
    return Counter(values).most_common(1)[0][0]


def _whole_modules(model: nn.Module, lacking: Set[str], layers: Collection[str]) -> list[str]:
    """Return the largest modules with weights of their own only, or else the modules that hold such a weight."""
    trained, frozen = list[str](), list[str]()
    for names in aliases(model).values():
        # A tied weight is trained by each of its names.
        (frozen if lacking.isdisjoint(names) else trained).extend(names)
    # Modules that hold a frozen weight, and those that hold a product.
    mixed, adapted = set(chain.from_iterable(map(prefixes, frozen))), set(chain.from_iterable(map(prefixes, layers)))
    wholes: set[str] = set()
    for name in sorted(trained):
        module = next((prefix for prefix in prefixes(name)[:-1] if prefix not in mixed), owner_of(name))
        if not module or module in adapted:
            raise UsageError(
                f"`--adapter` needs trained weights in modules of their own, but PEFT cannot save {name} without"
                f" {module or 'the whole model'}; export the merged model, without --adapter"
            )
        wholes.add(module)
    # A module inside of another one is saved with it.
    wholes -= {path for path in wholes if not wholes.isdisjoint(prefixes(path)[:-1])}
    _require_own_ends(model, wholes)
    return sorted(wholes)


def _require_own_ends(model: nn.Module, wholes: Set[str]) -> None:
    """Refuse a module that other modules end like, because PEFT takes each name as the end of a name."""
    others = [name for name, _ in model.named_modules() if name not in wholes]
    for module in wholes:
        if other := next((name for name in others if name.endswith(module)), None):
            raise UsageError(
                f"`--adapter` needs names of trained modules that PEFT can tell apart, but it would take {other} for"
                f" {module}; export the merged model, without --adapter"
            )


def _shortest(names: Collection[str], layers: Collection[str]) -> list[str] | str:
    """Return the shortest ends of `names` that match these layers and no other name.

    If the name of a layer ends another name, return a regular expression of the whole names.
    """
    others = [f".{name}" for name in names if name not in layers]
    ends: set[str] = set()
    for layer in layers:
        parts = layer.split(".")
        candidates = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        end = next((end for end in candidates if not any(name.endswith(f".{end}") for name in others)), None)
        if end is None:
            return "|".join(map(re.escape, sorted(layers)))
        ends.add(end)
    return sorted(ends)
