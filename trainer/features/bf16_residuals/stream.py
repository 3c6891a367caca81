"""Hidden states in bf16 from the entry of the first layer of a stack to the exit of its last.

Under autocast, embeddings and layer norms return fp32, and so do the sums of a residual connection. Here each layer
rounds its input, and its layer norms return the type of their input, so that the sums are those of bf16. A layer norm
computes in fp32, with its weights rounded to bf16, as those of matrix products are. Behind the last layer, the hidden
states are in fp32 again: final norms, poolers, heads and losses are those of other trainings. Root mean square norms
return fp32, which the next products round.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.engine.products import IS_WIDE
from trainer.models.families.table import layers_of
from trainer.models.forward_context import with_method
from trainer.models.layer_hooks import change_inputs
from trainer.models.names import owner_of
from trainer.models.place import PlacedModel
from trainer.recipe.schema import Recipe


def use_bf16(built: PlacedModel, recipe: Recipe) -> None:
    """Let the layers of a model, or of a pipeline stage, pass hidden states in bf16.

    Raises:
        UsageError: the layers of the model are unknown.
    """
    base: Any = built.model.base_model
    layers = layers_of(built.model, '`residuals` "bf16"')
    for name, layer in layers.items():
        change_inputs(layer, _rounded)
        for module in layer.modules():
            if type(module).forward is nn.LayerNorm.forward:
                # The class changes and the object stays, so that names, hooks and placements remain valid.
                module.__class__ = _keeping_type(type(module))  # type: ignore[arg-type]  # a class is hashable
        # A stage has stand-ins for the layers of others, so its last layer need not be that of the model.
        if layer is base.get_submodule(owner_of(name) or "")[-1]:
            layer.register_forward_hook(_exact)


def _rounded(_: str, hidden: Tensor) -> Tensor:
    return hidden.to(torch.bfloat16)


def _exact(layer: nn.Module, arguments: Any, output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) else (output[0].float(), *output[1:])


@cache
def _keeping_type(kind: type[nn.LayerNorm]) -> type[nn.Module]:
    derived = with_method(kind, "forward", _normalised)  # type: ignore[arg-type]
    setattr(derived, IS_WIDE, True)  # its weights are rounded once a step, with those of products
    return derived


def _normalised(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    weight, bias = (None if p is None else p.to(x.dtype) for p in (norm.weight, norm.bias))
    # Autocast would return fp32 on a GPU.
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
