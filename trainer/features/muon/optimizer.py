"""Muon: orthogonalised momentum for matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr, _zeropower_via_newtonschulz

from trainer.engine.optimizers.adamw import PartlyAdamW, adamw_options
from trainer.engine.optimizers.parameters import Groups, TrainedParameters
from trainer.engine.optimizers.skipping import write_unless
from trainer.engine.optimizers.tensor_batches import stack_of
from trainer.engine.optimizers.whole_access import WholeAccess, gradients_of
from trainer.features.muon import section as schema
from trainer.parallel.shards.gathering import local_part


class Muon(PartlyAdamW):
    """Momentum orthogonalised by Newton-Schulz iterations, for matrices (Jordan et al. 2024); AdamW for the rest.

    Updates have the root mean square of AdamW's (Liu et al. 2025, arXiv:2502.16982), so both share the learning rate
    and the weight decay. Momentum is sharded as the weights. Ranks gather updates in bf16, the type of the iterations.

    Args:
        groups: parameter groups; those with `momentum` hold matrices.
    """

    key = "momentum"
    updates_in_batches = True

    def __init__(self, groups: Groups, whole: WholeAccess, **options: Any) -> None:
        super().__init__(groups, **options)
        self._whole = whole
        self._matrices = {parameter for group in groups if self.key in group for parameter in group["params"]}

    @classmethod
    def build(cls, section: schema.Muon, trained: TrainedParameters) -> Muon:
        names = trained.matrices()
        groups = trained.groups(section, trained.trainable.keys() - names)
        of_matrices = {key: getattr(section, key) for key in ("momentum", "iterations")}
        groups += [{**group, **of_matrices} for group in trained.groups(section, names)]
        return cls(groups, trained.whole, **adamw_options(section, trained))

    def state_shapes(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        if parameter in self._matrices:
            return {"momentum_buffer": shape}
        return super().state_shapes(parameter, shape)

    def update(self, groups: Groups) -> None:
        for group in groups:
            for batch in self._whole.batches(group["params"]):
                self._update(batch, group)

    def _update(self, batch: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        for parameter in batch:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        flag = self.found_inf
        momenta = [local_part(self.state[parameter]["momentum_buffer"]) for parameter in batch]
        gradient, old = stack_of(gradients_of(batch)), stack_of(momenta)
        momentum = old.lerp(gradient, 1 - group["momentum"])
        # Rounded to bf16 before ranks gather it: half of the bytes, and the iterations round to bf16 anyway.
        update = gradient.lerp(momentum, group["momentum"]).bfloat16()  # Nesterov's
        write_unless(flag, momenta, old, momentum)
        del gradient, old, momentum
        whole = self._whole.gather(batch, update)
        # Of the whole shape: torch's factor is 0.2 * sqrt(max(rows, columns)), and a part would give each layout
        # another one.
        rate = _adjust_lr(group["lr"], "match_rms_adamw", whole.shape[1:])
        update = self._whole.parts(batch, orthogonalised(whole, group["iterations"]))
        weights = [local_part(parameter.detach()) for parameter in batch]
        old = stack_of(weights)
        write_unless(flag, weights, old, (old * (1 - group["lr"] * group["weight_decay"])).add_(update, alpha=-rate))


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """Return matrices with singular values near 1, by the Newton-Schulz iterations of torch's Muon in batched products.

    `torch.func.vmap` of torch's own function would round to bf16 between a product and its sum, with twice the error.

    Args:
        matrices: the matrices, bf16 `[n, rows, columns]`, which may be overwritten.
    """
    if len(matrices) == 1:  # batched products of one matrix are slower on a CPU
        return _zeropower_via_newtonschulz(matrices[0], (DEFAULT_A, DEFAULT_B, DEFAULT_C), iterations, EPS).unsqueeze(0)
    is_tall = matrices.size(-2) > matrices.size(-1)
    # The product of a matrix with its transpose is smaller for the shorter side.
    found = matrices.mT if is_tall else matrices
    # Singular values are 1 at most.
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=EPS)
    for _ in range(iterations):
        gram = found @ found.mT
        found = torch.baddbmm(
            found, torch.baddbmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C), found, beta=DEFAULT_A
        )
    return found.mT if is_tall else found
