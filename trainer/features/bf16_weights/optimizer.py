"""AdamW with weights of matrix products in bf16.

They have no fp32 masters. Autocast reads these weights in bf16 only, so the passes are
those of fp32 masters. Updates are computed in fp32, and most are smaller than the distance of two bf16 numbers. Either
the optimizer keeps the 16 bits that rounding cuts off, as a compensated sum does (Kahan 1965,
doi:10.1145/363707.363723), but exactly. Or updates are rounded at random, so that their mean is right (Gupta et al.
2015, arXiv:1502.02551). Gradients are fp32, since each layout adds them in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from trainer.base.batches import batches
from trainer.engine.optimizers.adamw import PartlyAdamW, adamw_options
from trainer.engine.optimizers.base import OptimizerUpdate
from trainer.engine.optimizers.parameters import Groups, TrainedParameters, divided
from trainer.engine.optimizers.tensor_batches import most_elements, stepped
from trainer.features.bf16_weights.rounding import KeyedRounding, Piece
from trainer.features.bf16_weights.section import WeightKeys
from trainer.parallel.shards.gathering import local_part
from trainer.recipe import schema

COMPENSATION = "compensation"
"""The key of the optimizer's state under which the rest of a rounded weight is kept, in units of fp32's last bit."""
IN_BF16 = "in_bf16"
"""The key of a parameter group: whether its weights are in bf16."""


class RoundedUpdate(OptimizerUpdate, PartlyAdamW):
    """AdamW with weights in bf16 and in fp32; its arithmetic is that of torch's in fp32.

    In steps with the flag `found_inf`, no bit changes: numbers that did not change are rounded as before.

    Args:
        groups: parameter groups; those with `in_bf16` hold weights in bf16.
        rounding: the stochastic rounding; None: weights have a compensation.
    """

    weights_dtype = torch.bfloat16
    key = IN_BF16
    state_dtypes = MappingProxyType({COMPENSATION: torch.int16})

    def __init__(self, groups: Groups, rounding: KeyedRounding | None, **options: Any) -> None:
        super().__init__(groups, **options)
        self._rounding = rounding

    @classmethod
    def build(cls, section: schema.AdamW, trained: TrainedParameters) -> RoundedUpdate:
        rounding = None
        if _weights(cls.recipe) == "bf16_stochastic":
            assert trained.whole.mesh is not None, "random bits depend on the place of an element in its parameter"
            rounding = KeyedRounding(trained.whole.placements, trained.whole.mesh, cls.recipe.training.seed)
        groups = divided(trained.groups(section), IN_BF16, _is_in_bf16)
        return cls(groups, rounding, **adamw_options(section, trained))

    @classmethod
    def masters(cls, recipe: schema.Recipe) -> str:
        return "16 bits in the optimizer" if _weights(recipe) == "bf16_compensated" else "none, rounded at random"

    def state_shapes(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        has_compensation = _is_in_bf16(parameter) and self._rounding is None
        return super().state_shapes(parameter, shape) | ({COMPENSATION: shape} if has_compensation else {})

    def update(self, groups: Groups) -> None:
        for group in groups:
            parameters = stepped(group["params"])
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter].update(self._first_state(parameter))
            if parameters:
                counts = torch.stack([self.state[parameter]["step"] for parameter in parameters])
                before = dict(zip(parameters, counts.unbind(), strict=True))
                most = most_elements(counts.device)
                for batch in batches(_pieces(parameters, most), lambda piece: piece.stop - piece.start, most):
                    # Each piece begins with the count before the step, because its update raises it.
                    steps = torch.stack([before[piece.parameter] for piece in batch])
                    self._update(batch, list(steps.unbind()), group)

    def _update(self, batch: Sequence[Piece], steps: list[Tensor], group: Mapping[str, Any]) -> None:
        def all_of(key: str) -> list[Tensor]:
            return [_flat(self.state[piece.parameter][key], piece) for piece in batch]

        weights = [_flat(piece.parameter.detach(), piece) for piece in batch]
        exact = torch.cat(weights).float()
        if self._rounding is None:
            # As integers, the bits of neighbouring fp32 numbers are neighbours, so this sum is the exact weight.
            exact.view(torch.int32).add_(torch.cat(all_of(COMPENSATION)))
        adamw(
            _split_like(weights, exact),
            # A gradient may have other strides than its weights, and a piece must hold the same elements of both.
            [_flat(cast(Tensor, piece.parameter.grad).contiguous(), piece) for piece in batch],
            all_of("exp_avg"),
            all_of("exp_avg_sq"),
            [],
            steps,
            fused=bool(group["fused"]),
            foreach=False,
            grad_scale=None,
            found_inf=self.found_inf,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        torch._foreach_copy_([self.state[piece.parameter]["step"] for piece in batch], steps)
        if self._rounding is None:
            _write(all_of(COMPENSATION), _cut_off(exact))
            _write(weights, exact.bfloat16())
        else:
            _write(weights, self._rounding.round_(batch, exact, self.num_steps))

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=local_part(parameter).device),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
        }
        if self._rounding is None:
            state[COMPENSATION] = torch.zeros_like(parameter, dtype=torch.int16)
        return state


def _weights(recipe: schema.Recipe) -> str:
    return cast(WeightKeys, recipe).weights


def _is_in_bf16(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.bfloat16


def _pieces(parameters: Iterable[nn.Parameter], most: int) -> Iterator[Piece]:
    """Yield pieces of at most `most` elements of this rank's parts; an empty part has one, which counts the step."""
    for parameter in parameters:
        size = local_part(parameter).numel()
        for start in range(0, max(size, 1), most):
            yield Piece(parameter, start, min(start + most, size))


def _flat(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a view of the elements of a piece in a contiguous tensor with the layout of its parameter."""
    return local_part(tensor).view(-1)[piece.start : piece.stop]


def _write(tensors: list[Tensor], values: Tensor) -> None:
    torch._foreach_copy_(tensors, _split_like(tensors, values))


def _split_like(tensors: list[Tensor], values: Tensor) -> list[Tensor]:
    return list(torch.split(values, [len(tensor) for tensor in tensors]))


def _cut_off(exact: Tensor) -> Tensor:
    """Return the bits that rounding to bf16 takes from fp32 numbers, as a signed number of their last bit.

    The rest of a number in the middle of two, if it is rounded down, would need 17 bits, and loses the last one.
    """
    rounded = exact.bfloat16().float().view(torch.int32)
    return (exact.view(torch.int32) - rounded).clamp_(max=torch.iinfo(torch.int16).max).short()
