"""The shapes of what travels between pipeline stages, and what the layers of a model of images cost.

Where layers change the shape of what passes through them, the model's own forward tells it, on the meta device: nothing
is computed, and every rank finds the same without asking another.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.models.families.table import layers_of

Shape = tuple[int, ...]

_IMAGE_SIZE = 224
"""Height and width of the image that layers are weighed by: those that ResNets are usually trained with. Which layer is
whose must follow from the recipe alone, before any image was seen."""


class CrossingShapes:
    """The shape of what goes from each stage to the next.

    Args:
        model: whole, perhaps on the meta device; left as it is.
        starts: the first layer of each stage but the first, by name.
        traced: whether layers change the shape of what passes through them.
    """

    def __init__(self, model: nn.Module, starts: Sequence[str], traced: bool) -> None:
        self._config: Any = model.config
        self._starts = tuple(starts)
        self._traced = cache(partial(_layer_inputs, _meta_copy(model))) if traced else None

    def of(self, inputs: Mapping[str, Tensor], num_rows: int) -> tuple[Shape, ...]:
        """For one microbatch, from each stage but the last.

        Args:
            inputs: the model's, of any number of rows.
            num_rows: of the microbatch.
        """
        if self._traced is None:
            return ((num_rows, *_hidden_shape(self._config, inputs)),) * len(self._starts)
        shapes = self._traced(tuple(inputs["pixel_values"].shape[1:]))
        return tuple((num_rows, *shapes[layer]) for layer in self._starts)


def multiplications(model: nn.Module) -> dict[str, int]:
    """Those of each module of a model of images, its parts included, for one image in a forward pass.

    Args:
        model: whole, perhaps on the meta device; left as it is.
    """
    config: Any = model.config
    with FlopCounterMode(display=False) as counter:
        _run(_meta_copy(model), (config.num_channels, _IMAGE_SIZE, _IMAGE_SIZE))
    prefix = f"{type(model).__name__}."
    # The counter takes a multiplication and the addition that follows for two.
    return {name.removeprefix(prefix): sum(of.values()) // 2 for name, of in counter.get_flop_counts().items()}


def _layer_inputs(model: nn.Module, image: Shape) -> dict[str, Shape]:
    """The shape of what each layer is given, without the rows.

    Args:
        model: on the meta device.
        image: `[channels, height, width]`.
    """
    shapes: dict[str, Shape] = {}

    def note(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        shapes[name] = tuple(args[0].shape[1:])

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers_of(model).items()]
    _run(model, image)
    for hook in hooks:
        hook.remove()
    return shapes


def _meta_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to("meta").eval()


@torch.no_grad()
def _run(model: nn.Module, image: Shape) -> None:
    model(pixel_values=torch.empty(1, *image, device="meta"))


def _hidden_shape(config: Any, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
    """Positions and features of the hidden states of a transformer, which are the same between all layers.

    Args:
        config: of transformers.
        inputs: `input_ids` `[batch, positions]`, or `pixel_values` `[batch, channels, height, width]`.
    """
    if "input_ids" in inputs:
        return inputs["input_ids"].shape[1], config.hidden_size
    size = config.patch_size
    rows, columns = (size, size) if isinstance(size, int) else size
    height, width = inputs["pixel_values"].shape[2:]
    return (height // rows) * (width // columns) + 1, config.hidden_size  # and the class token
