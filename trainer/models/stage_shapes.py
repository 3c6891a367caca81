"""Shapes of the tensors between pipeline stages, and costs of layers that change shapes.

If layers change the shape of their input, the model's forward pass on the meta device finds the shapes. It computes no
values, and every rank gets the same result without communication.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.models.families.family import StagePlan
from trainer.models.families.table import layers_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Crossing:
    """The tensors that one stage sends to the next."""

    hidden: bool  # hidden states between two layers of a stack
    result: bool  # the output of an earlier stack, which later layers use


class CrossingShapes:
    """The shapes of the tensors that each stage sends to the next.

    Args:
        model: the whole model, on any device including meta; it is not changed.
        starts: the names of the first layers of all stages but the first.
        crossings: the tensors that the stage before each of these layers sends.
        plan: the stages of the model's family.
    """

    def __init__(self, model: Any, starts: Sequence[str], crossings: Sequence[Crossing], plan: StagePlan) -> None:
        self._config = model.config
        self._main_input = model.main_input_name
        self._positions = plan.positions
        self._starts = tuple(starts)
        self._crossings = tuple(crossings)
        # A pass on `meta` for each shape of rows, and not for each step.
        self._traced = cache(partial(_layer_inputs, _meta_copy(model))) if plan.costed_row else None

    def of(self, inputs: Mapping[str, Tensor], num_rows: int) -> tuple[tuple[Shape, ...], ...]:
        """Return the shapes for one microbatch, those of each stage but the last.

        Args:
            inputs: the inputs of the model, with any number of rows.
        """
        if self._traced is None:
            # Multiple choice has several texts in a row, which the model joins into the batch.
            num_texts = inputs["input_ids"][0].numel() // inputs["input_ids"].shape[-1] if "input_ids" in inputs else 1
            length = self._positions(self._config, inputs) if self._positions else inputs["input_ids"].shape[-1]
            result = (num_rows * num_texts, length, self._config.hidden_size)
            # Layers that use the result of an earlier stack are of a decoder, with positions of its own.
            positions = inputs["decoder_input_ids"].shape[-1] if "decoder_input_ids" in inputs else result[1]
            decoded = (result[0], positions, result[2])
            return tuple(
                (decoded if crossing.result else result,) * crossing.hidden + (result,) * crossing.result
                for crossing in self._crossings
            )
        shapes = self._traced(tuple(inputs[self._main_input].shape[1:]))
        return tuple(((num_rows, *shapes[layer]),) for layer in self._starts)


def multiplications(model: nn.Module, row: Shape) -> dict[str, int]:
    """Return the multiplications of each module and its submodules in a forward pass of one row.

    Args:
        model: the whole model, on any device including meta; it is not changed.
        row: the shape of its main input, without the row dimension.
    """
    with FlopCounterMode(display=False) as counter:
        _run(_meta_copy(model), row)
    prefix = f"{type(model).__name__}."
    # The counter counts a multiplication and its addition as two.
    return {name.removeprefix(prefix): sum(of.values()) // 2 for name, of in counter.get_flop_counts().items()}


def _layer_inputs(model: nn.Module, row: Shape) -> dict[str, Shape]:
    """Return the shape of the input of each layer, without the row dimension, as that of the main input."""
    shapes: dict[str, Shape] = {}

    def note(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        shapes[name] = tuple(args[0].shape[1:])

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers_of(model).items()]
    _run(model, row)
    for hook in hooks:
        hook.remove()
    return shapes


def _meta_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to("meta").eval()


@torch.no_grad()
def _run(model: Any, row: Shape) -> None:
    model(**{model.main_input_name: torch.empty(1, *row, device="meta")})
