"""Layers of an unmodified Hugging Face encoder that process tokens without padding.

The first layer gets the tokens of all rows of a microbatch as one sequence `[1, tokens, hidden]`, and the last layer
returns padded rows. Embeddings and heads are those of padded rows, so positions, token types and pooling stay as they
are. The attention function finds the rows for itself, since tokens see their own row only.
transformers passes the argument `PACKED` of the model on to each layer and to the attention function.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.models.attention import PACKED, PACKED_ATTENTION, RING_ATTENTION
from trainer.models.families.table import FAMILIES, layers_of
from trainer.parallel.dropout import KeyedDropout
from trainer.parallel.joined_rows import PackedTokens

_ROTATIONS = "position_embeddings"  # the layers' argument with cosines and sines `[batch, positions, head_dim]`


def check_packing(model: Any) -> None:
    """Refuse a model whose layers cannot work without padding.

    Raises:
        UsageError: the family of the model has no unpadded layers.
    """
    model_type = model.config.model_type
    family = FAMILIES.get(model_type)
    if family is None or not family.packs:
        able = ", ".join(sorted(name for name, family in FAMILIES.items() if family.packs))
        raise UsageError(
            f"`data.packing` is true, which works for the model types {able}, but the model is of type {model_type};"
            " set it to false, and `data.group_by_length` to true, which needs less padding"
        )


def pack_layers(model: Any) -> None:
    """Make the layers of a model process tokens without padding, whenever it is called with `PACKED`.

    The model is cut over tensor ranks before, and no strategy has wrapped it.

    Raises:
        UsageError: `check_packing` refuses the model.
    """
    check_packing(model)
    if model.config._attn_implementation != RING_ATTENTION:
        model.config._attn_implementation = PACKED_ATTENTION
    layers = list(layers_of(model).values())
    for layer in layers:
        layer.register_forward_pre_hook(_pack_rotations, with_kwargs=True)
        for module in layer.modules():
            if isinstance(module, KeyedDropout):
                module.site = replace(module.site, packed=True)
    # The input is packed before it is split over tensor or context ranks, and unpacked after the parts are joined.
    layers[0].register_forward_pre_hook(_pack_input, with_kwargs=True, prepend=True)
    layers[-1].register_forward_hook(_unpack_output, with_kwargs=True)


def _pack_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    packed: PackedTokens | None = kwargs.get(PACKED)
    return (packed.pack(args[0]), *args[1:]) if packed else args, kwargs


def _pack_rotations(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    packed: PackedTokens | None = kwargs.get(PACKED)
    if packed and _ROTATIONS in kwargs:
        kwargs = {**kwargs, _ROTATIONS: tuple(packed.pack(of_rows) for of_rows in kwargs[_ROTATIONS])}
    return args, kwargs


def _unpack_output(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
    packed: PackedTokens | None = kwargs.get(PACKED)
    return packed.unpack(output) if packed else output
