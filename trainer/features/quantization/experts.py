"""Frozen matrices of experts in 4 or 8 bits: each matrix is quantised by itself, as that of a linear layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.features.quantization.linear import FORMATS, Format, QuantizedWeight


class QuantizedExperts(QuantizedWeight):
    """The frozen matrices of experts, `[experts, out, in]` or transposed, held as the tensors of a format.

    Each tensor has the experts as its first dimension, so that ranks can divide them.
    """

    @torch.no_grad()
    def encoded(self, weight: Tensor) -> Mapping[str, Tensor]:
        quantize = FORMATS[self.kind].quantize
        if weight.is_meta:  # a plan of many experts needs the shapes of one
            return {name: part.new_empty(len(weight), *part.shape) for name, part in quantize(weight[0]).items()}
        experts = [quantize(matrix.contiguous()) for matrix in weight.detach()]
        return {name: torch.stack([parts[name] for parts in experts]) for name in experts[0]}

    @torch.no_grad()
    def rounded(self, weight: Tensor) -> Tensor:
        return decoded_experts(FORMATS[self.kind], self.encoded(weight), self.shape, torch.float32)

    def decoded(self, dtype: torch.dtype, parts: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the matrices of all experts, or those of the experts in `parts`."""
        return decoded_experts(FORMATS[self.kind], parts or dict(self.named_parameters()), self.shape, dtype)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.shape}"


def decoded_experts(form: Format, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the matrices `[experts, *shape[1:]]` of the experts in `parts`."""
    experts = (dict(zip(parts, tensors, strict=True)) for tensors in zip(*parts.values(), strict=True))
    return torch.stack([form.dequantize(expert, shape[1:], dtype) for expert in experts])
