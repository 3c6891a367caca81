"""Linear layers sharded over the tensor axis by their outputs (column) or by their inputs (row).

A column-parallel layer followed by a row-parallel one needs one sum in the forward pass and one in the backward pass
(Shoeybi et al. 2019, arXiv:1909.08053). The parameters are plain local tensors. Their names are `weight` and `bias`, as
in the unsharded layer, so the names of a state dict do not depend on the degree.

A layer knows the placement of its own parameters (`placements`) and nothing of the model around it. The caller must
ensure that the degree divides the attention heads and that `f` is applied.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.parallel.communication import (
    Group,
    copy_to_group,
    group_size,
    in_product_type,
    index_in_group,
    reduce_from_group,
    scatter_sum_sequence,
)
from trainer.parallel.dropout import KeyedDropout
from trainer.parallel.placement import TENSOR_AXIS, ParameterPlacement, Placements, Split
from trainer.parallel.shards.slices import part_of
from trainer.parallel.tensor.low_rank import LowRank, product_of


class _ParallelLinear(nn.Module):
    """The common part of both layers: a local weight, an optional bias, and their splits.

    `in_features` and `out_features` are local sizes, those of this rank's `weight`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    cuts_inputs = False  # else outputs

    def __init__(
        self,
        whole_shape: tuple[int, int],
        weight_split: Split,
        bias_split: Split | None,
        group: Group,
        *,
        bias: bool,
        transposed: bool,
        pads: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        size = group_size(group)
        assert weight_split.dim is not None
        cut = whole_shape[weight_split.dim]
        assert cut % weight_split.blocks == 0, f"{cut} features are not {weight_split.blocks} equal blocks"
        block = cut // weight_split.blocks
        assert pads or block % size == 0, f"{block} features do not divide by the tensor degree {size}"
        local_shape = list(whole_shape)
        local_shape[weight_split.dim] = weight_split.blocks * -(-block // size)
        self.group = group
        self.lora: LowRank | None = None
        self.transposed = transposed
        self.weight_split = weight_split
        self.bias_split = bias_split
        self.whole_shape = whole_shape
        self.in_features, self.out_features = local_shape if transposed else reversed(local_shape)
        self.weight = nn.Parameter(torch.empty(local_shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    @torch.no_grad()
    def _take_part_of(self, whole: nn.Module) -> None:
        """Replace the parameters by this rank's part of those of `whole`, on the device of `whole`."""
        for name, split in (("weight", self.weight_split), ("bias", self.bias_split)):
            tensor = getattr(whole, name)
            if tensor is not None:
                part = self._part_of(tensor, split)
                setattr(self, name, nn.Parameter(part, requires_grad=tensor.requires_grad))
        if (product := product_of(whole)) is not None:
            self._take_product(product)
        self.train(whole.training)

    def _take_product(self, whole: LowRank) -> None:
        """Take this rank's part of a product: `B` is cut as the outputs of the layer, or `A` as its inputs."""
        dropout = copy.copy(whole.dropout)
        if self.cuts_inputs and isinstance(dropout, KeyedDropout):
            dropout.site = replace(dropout.site, cut_dim=-1, part=index_in_group(self.group))
        self.lora = LowRank(
            self._part_of(whole.A, self._factor_split("A")),
            self._part_of(whole.B, self._factor_split("B")),
            whole.scaling,
            dropout,
        )
        self._factor_shapes = {"A": tuple(whole.A.shape), "B": tuple(whole.B.shape)}
        for name in ("A", "B"):
            getattr(self.lora, name).requires_grad_(getattr(whole, name).requires_grad)

    def _factor_split(self, name: str) -> Split | None:
        if self.cuts_inputs:
            return Split(1, TENSOR_AXIS) if name == "A" else None
        return Split(0, TENSOR_AXIS, self.weight_split.blocks) if name == "B" else None

    def _product_placements(self, prefix: str) -> Placements:
        """Return the placements of the factors; the gradient of the whole factor is a partial sum on each rank."""
        if self.lora is None:
            return {}
        placed = {}
        for factor, parameter in self.lora.named_parameters():
            name, split = f"{prefix}lora.{factor}", self._factor_split(factor)
            shape = self._factor_shapes[factor]
            placed[name] = self._placement(name, parameter, shape, split, partial=split is None)
        return placed

    def _part_of(self, whole: Tensor, split: Split | None) -> Tensor:
        if split is None:
            return whole.detach().clone()
        return part_of(whole.detach(), split, index_in_group(self.group), group_size(self.group))

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        output = F.linear(x, self.weight.t() if self.transposed else self.weight, bias)
        return output if self.lora is None else output + self.lora(x)

    def _placement(
        self, name: str, parameter: nn.Parameter, shape: tuple[int, ...], split: Split | None, *, partial: bool = False
    ) -> ParameterPlacement:
        partial_over = ("dp", TENSOR_AXIS) if partial else ("dp",)
        splits = () if split is None else (split,)
        return ParameterPlacement(name, shape, splits, partial_over, parameter.requires_grad)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" degree={group_size(self.group)}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer sharded over its outputs, `[..., in] -> [..., out / tp]`.

    The gradient of its input is a partial sum, which `f` sums. The caller applies `f`, once for all layers with the
    same input (q, k and v). With `copies_input`, the layer applies it. With sequence parallelism, `gather_sequence` in
    the caller replaces `f`.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.

    Args:
        in_features: the input size of the whole layer.
        out_features: the output size of the whole layer.
        group: the tensor axis.
        bias: whether the layer has a bias, sharded like the outputs.
        blocks: the number of equal blocks in the outputs, such as 3 for fused q, k and v; each is sharded by itself.
        transposed: whether the weight is `[in, out]`, as in GPT-2's Conv1D, and not `[out, in]`.
        copies_input: whether to sum the gradient of the input over the group.
        pads: whether to pad with zero rows if the degree does not divide the outputs, as for a head over a vocabulary.
            The loss must ignore the padding. If false, such a layer fails an assertion.
        device: the device of the parameters; on `meta` they are filled later, by `slicing.part_of` and `placements`.
        dtype: the type of the parameters, which are not initialised.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool = True,
        blocks: int = 1,
        transposed: bool = False,
        copies_input: bool = False,
        pads: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            (in_features, out_features) if transposed else (out_features, in_features),
            Split(1 if transposed else 0, TENSOR_AXIS, blocks),
            Split(0, TENSOR_AXIS, blocks),
            group,
            bias=bias,
            transposed=transposed,
            pads=pads,
            device=device,
            dtype=dtype,
        )
        self.copies_input = copies_input
        self.pads = pads

    @property
    def whole_out_features(self) -> int:
        """The output size of the whole layer, without padding."""
        return self.whole_shape[1 if self.transposed else 0]

    @classmethod
    def from_whole(
        cls,
        linear: nn.Module,
        group: Group,
        *,
        blocks: int = 1,
        transposed: bool = False,
        copies_input: bool = False,
        pads: bool = False,
    ) -> ColumnParallelLinear:
        """Return this rank's part of `linear`, with copies of the parameters.

        `linear` has a `weight` `[out, in]` (`[in, out]` if `transposed`) and a `bias`. The copies keep `requires_grad`.
        The caller must tie a tied weight again.
        """
        out_features, in_features = _whole_features(linear, transposed)
        part = cls(
            in_features,
            out_features,
            group,
            bias=linear.bias is not None,
            blocks=blocks,
            transposed=transposed,
            copies_input=copies_input,
            pads=pads,
            device="meta",
        )
        part._take_part_of(linear)
        return part

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs `[..., out / tp]` for `x` `[..., in]`, which is equal on all ranks."""
        return self._linear(copy_to_group(in_product_type(x), self.group) if self.copies_input else x, self.bias)

    def placements(self, prefix: str = "") -> Placements:
        """Return the placements of the parameters by their names after `prefix`, which is empty or ends in a dot."""
        name = prefix + "weight"
        placed = {name: self._placement(name, self.weight, self.whole_shape, self.weight_split)}
        if self.bias is not None:
            name = prefix + "bias"
            placed[name] = self._placement(name, self.bias, (self.whole_out_features,), self.bias_split)
        return placed | self._product_placements(prefix)


class RowParallelLinear(_ParallelLinear):
    """A linear layer sharded over its inputs, `[..., in / tp] -> [..., out]`.

    The products of the ranks are summed (`g`), in the type of the products. The bias is replicated and added once,
    after the sum. With `sequence_parallel`, each rank gets only its positions of the sum. The gradient of the bias is
    then partial, as `placements` states.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.

    Args:
        in_features: the input size of the whole layer, which the degree must divide.
        out_features: the output size of the whole layer.
        group: the tensor axis.
        bias: whether the layer has a bias.
        transposed: whether the weight is `[in, out]`, as in GPT-2's Conv1D, and not `[out, in]`.
        sequence_parallel: whether to return this rank's positions of the output only.
        sequence_dim: the dimension of the positions in the output.
        device: the device of the parameters; on `meta` they are filled later, by `slicing.part_of` and `placements`.
        dtype: the type of the parameters, which are not initialised.
    """

    cuts_inputs = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool = True,
        transposed: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            (in_features, out_features) if transposed else (out_features, in_features),
            Split(0 if transposed else 1, TENSOR_AXIS),
            None,
            group,
            bias=bias,
            transposed=transposed,
            pads=False,
            device=device,
            dtype=dtype,
        )
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim

    @classmethod
    def from_whole(
        cls,
        linear: nn.Module,
        group: Group,
        *,
        transposed: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
    ) -> RowParallelLinear:
        """Return this rank's part of `linear`, with copies of the parameters.

        `linear` has a `weight` `[out, in]` (`[in, out]` if `transposed`) and a `bias`. The copies keep `requires_grad`.
        """
        out_features, in_features = _whole_features(linear, transposed)
        part = cls(
            in_features,
            out_features,
            group,
            bias=linear.bias is not None,
            transposed=transposed,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device="meta",
        )
        part._take_part_of(linear)
        return part

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[..., out]`, or this rank's positions of it, for inputs `x` `[..., in / tp]`."""
        if group_size(self.group) == 1:
            return self._linear(x, self.bias)  # in one kernel: bit-identical to the unsharded layer
        product = self._linear(x, None)
        if self.sequence_parallel:
            total = scatter_sum_sequence(product, self.group, self.sequence_dim)
        else:
            total = reduce_from_group(product, self.group)
        # Under autocast, only the product has the low precision; without the cast, the sum would have another type.
        return total if self.bias is None else total + self.bias.to(total.dtype)

    def placements(self, prefix: str = "") -> Placements:
        """Return the placements of the parameters by their names after `prefix`, which is empty or ends in a dot."""
        name = prefix + "weight"
        placed = {name: self._placement(name, self.weight, self.whole_shape, self.weight_split)}
        if self.bias is not None:
            name = prefix + "bias"
            shape = tuple(self.bias.shape)
            placed[name] = self._placement(name, self.bias, shape, None, partial=self.sequence_parallel)
        return placed | self._product_placements(prefix)


def _whole_features(linear: nn.Module, transposed: bool) -> tuple[int, int]:
    """Return the output and input sizes of a whole layer."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    assert weight.dim() == 2, f"a linear layer's weight has two dimensions, not {weight.dim()}"
    rows, columns = weight.shape
    return (columns, rows) if transposed else (rows, columns)
