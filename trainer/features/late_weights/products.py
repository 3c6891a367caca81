"""Gradients of weights that are computed while tensor ranks sum the gradient of an input.

The gradient of a weight needs the gradient of its layer's output, but not that sum, so the sum need not be waited for.
Megatron-LM computes so (`LinearWithGradAccumulationAndAsyncCommunication`). The products and their operands are those
of torch, so the numbers are the same, bit for bit.

A node of autograd before the message has the input and the weights of the layers behind it. Its backward pass comes
after that of the message has begun: it computes the gradients of the weights, and then waits for the sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.models.forward_context import with_method
from trainer.models.place import PlacedModel
from trainer.parallel.communication import Begun, in_product_type
from trainer.parallel.device_traits import traits_of
from trainer.parallel.tensor.kinds import JOINT, PLAIN, MatrixProduct, ShardedLinear
from trainer.parallel.tensor.linear import SHARED_INPUT
from trainer.recipe.schedules import SCHEDULES
from trainer.recipe.schema import Recipe
from trainer.recipe.strategies import STRATEGIES

_USE = "late_use"
_LEAST_BYTES = 12 * 2**20
"""A shorter message takes less time of a GPU than these functions take of its host."""


def hide_sums(built: PlacedModel, recipe: Recipe) -> None:
    """Compute the gradients of weights of sharded layers behind the sums of gradients of their inputs.

    Layers that a backward pass recomputes, and those with products of another kind, stay as they are.
    """
    if traits_of(next(built.model.parameters()).device).is_cpu:
        return  # messages and products take turns there
    if recipe.activation_checkpointing != "none":
        return  # the gradient would keep its input, which the recomputation is there to free
    strategy = STRATEGIES[recipe.parallel.strategy]
    if strategy.package and strategy.cuts_parameters:
        return  # a product with a part of autograd's graph would keep the gathered weight, which ZeRO-3 frees
    if SCHEDULES[recipe.parallel.pipeline.schedule].splits_backward:
        return  # the schedule asks for the gradients of inputs and those of weights apart
    behind: list[ShardedLinear] = []
    for module in built.model.modules():
        if shared := vars(module).get(SHARED_INPUT):
            behind = []
            shared.prepared = partial(_prepared, behind)
        if isinstance(module, ShardedLinear) and not module.pads and type(module).multiply is MatrixProduct.multiply:
            # A row-parallel layer comes after the columns that share an input, and its product fits behind their sum.
            behind.append(module)
            module.__class__ = with_method(type(module), "multiply", _multiply)  # type: ignore[arg-type, assignment]


class _Use:
    """A weight in one forward pass, and the operands of its gradient."""

    def __init__(self, weight: Tensor, transposed: bool) -> None:
        self.weight = weight
        self.x: Tensor | None = None  # the input `[..., in]`, until the gradient is computed
        self._transposed = transposed
        self._gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        """Keep the gradient of the output, `[..., out]`."""
        self._gradient = gradient

    def gradient(self) -> Tensor | None:
        """Return the gradient of the weight; None: no layer has used it."""
        if self._gradient is None:
            return None
        assert self.x is not None, "a graph of late gradients has one backward pass"
        x, gradient = self.x.flatten(0, -2), self._gradient.flatten(0, -2)
        self.x = self._gradient = None
        return x.t() @ gradient if self._transposed else gradient.t() @ x


def _prepared(layers: list[ShardedLinear], x: Tensor, num_bytes: int) -> tuple[Tensor, Begun | None]:
    """Return the input of a message, and the list for the wait for its gradient; None: it is waited for at once."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad) or num_bytes < _LEAST_BYTES:
        return x, None
    late = [layer for layer in layers if _may_be_late(layer)]
    if not late:
        return x, None
    begun: Begun = []
    uses = [_Use(cast(Tensor, vars(layer).get(JOINT, layer.weight)), bool(layer.transposed)) for layer in late]
    for layer, use in zip(late, uses, strict=True):
        vars(layer)[_USE] = use
    prepared: Tensor = _Late.apply(x, begun, uses, *(use.weight for use in uses))  # type: ignore[no-untyped-call]
    return prepared, begun


def _may_be_late(layer: ShardedLinear) -> bool:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.requires_grad and type(layer).multiply is _multiply  # a class of fp16 multiplies in its own way


def _multiply(
    layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """Return `MatrixProduct.multiply`; the gradient of a prepared weight comes from its use."""
    matrix = weight
    use: _Use | None = None if torch.compiler.is_compiling() else vars(layer).pop(_USE, None)
    # A layer may multiply several times; only the first product is prepared.
    if use is not None and use.weight is weight and torch.is_grad_enabled():
        x, matrix = in_product_type(x), weight.detach()
    else:
        use = None
    output = F.linear(x, matrix.t() if transposed else matrix, bias)
    if use is not None and output.requires_grad:
        # Detached, since the graph of `x` leads to the node that holds the use.
        use.x = x.detach()
        output.register_hook(use.keep)  # type: ignore[no-untyped-call]
    return output


PLAIN.add(_multiply)


class _Late(torch.autograd.Function):
    """The input before its message, with weights that are used behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begun: Begun, uses: list[_Use], *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.begun, ctx.uses = begun, uses
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        of_weights = [use.gradient() for use in ctx.uses]
        while ctx.begun:
            ctx.begun.pop()()
        return gradient, None, None, *of_weights
