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

from torch import Tensor, nn

from trainer.parallel.communication import Begun, copy_to_group, in_product_type, reduce_in_place, scatter_sum_sequence
from trainer.parallel.dropout import KeyedDropout
from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.mesh import JOINT_AXES
from trainer.parallel.placement import ROWS_AXIS, TENSOR_AXIS, ParameterPlacement, Placements, Split
from trainer.parallel.sharded_sequence import SEQUENCE_DIM, SequenceCut
from trainer.parallel.shards.slices import part_of
from trainer.parallel.tensor.kinds import ShardedLinear
from trainer.parallel.tensor.low_rank import Base, LowRank, Magnitude, product_of
from trainer.parallel.tensor.trained_rows import rows_of

SHARED_INPUT = "shared_input"
"""The attribute of modules with a `SharedInput`: of those around layers that share one, or of a layer."""


class SharedInput:
    """The input of column-parallel layers on all ranks; its gradient is summed over them (`f`, `g`).

    Args:
        cut: the cut that gathers hidden states; None: every rank has all positions.
    """

    def __init__(self, group: Group, cut: SequenceCut | None = None) -> None:
        self._group = group
        self._cut = cut

    def prepared(self, x: Tensor, num_bytes: int) -> tuple[Tensor, Begun | None]:
        """Return the input and the argument `begun` of `copy_to_group`, for features that replace this function.

        Args:
            num_bytes: the bytes of the input on all ranks, equal on each.
        """
        return x, None

    def __call__(self, x: Tensor, is_hidden: bool = True) -> Tensor:
        """Return `x`, equal on all ranks; `is_hidden`: it is cut as hidden states are."""
        # Rounded before it is sent, since the products would round it anyway. Its gradient has half of the bytes, too.
        x, cut = in_product_type(x), self._cut if is_hidden else None
        # Not `nbytes`, which torch's compiler does not know.
        x, begun = self.prepared(x, cut.num_bytes(x) if cut else x.numel() * x.element_size())
        return cut.gather(x, begun) if cut else copy_to_group(x, self._group, begun)


class _ParallelLinear(ShardedLinear):
    """This rank's part of a whole layer, with copies of its parameters.

    `in_features` and `out_features` are local sizes, those of this rank's `weight`. The copies keep `requires_grad`.
    The caller must tie a tied weight again.

    Args:
        whole: a layer with a `weight` `[out, in]`, or `[in, out]` if `transposed`, and a `bias` `[out]` or None.
        transposed: whether the weight is `[in, out]`, as in GPT-2's Conv1D.
        blocks: the number of equal blocks in the sharded features, such as 3 for fused q, k and v; each is sharded by
            itself.
        pads: whether to pad with zeros if the degree does not divide the features; else this fails an assertion.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    cuts_inputs = False  # else outputs

    def __init__(
        self, whole: nn.Module, group: Group, *, transposed: bool = False, blocks: int = 1, pads: bool = False
    ) -> None:
        super().__init__()
        weight, bias = whole.weight, whole.bias
        assert isinstance(weight, Tensor)
        assert weight.dim() == 2, f"a linear layer's weight has two dimensions, not {weight.dim()}"
        assert bias is None or isinstance(bias, Tensor)
        self.group = group
        self.transposed = transposed
        self.pads = pads
        self.whole_shape = tuple(weight.shape)
        # The inputs are dimension 1 of `[out, in]`, and dimension 0 of `[in, out]`.
        dim = int(self.cuts_inputs != transposed)
        self.axis = ROWS_AXIS if pads else TENSOR_AXIS  # a vocabulary is cut over context ranks, too
        self.weight_split = Split(dim, self.axis, blocks)
        self.bias_split = None if self.cuts_inputs else Split(0, self.axis, blocks)
        features, size = self.whole_shape[dim], group_size(group)
        assert features % blocks == 0, f"{features} features are not {blocks} equal blocks"
        block = features // blocks
        assert pads or block % size == 0, f"{block} features do not divide by the tensor degree {size}"
        self.weight = self._part_of(weight, self.weight_split)
        self.register_parameter("bias", None if bias is None else self._part_of(bias, self.bias_split))
        self.in_features, self.out_features = self.weight.shape if transposed else reversed(self.weight.shape)
        product = product_of(whole)
        self.lora = None if product is None else self._part_of_product(product)
        # The dropout of an adapter follows the mode of the whole layer.
        self.train(whole.training)

    @property
    def whole_out_features(self) -> int:
        return self.whole_shape[1 if self.transposed else 0]

    def placements(self, prefix: str = "") -> Placements:
        """Return the placements of the parameters by their names after `prefix`, which is empty or ends in a dot."""
        placed = [self._placement(f"{prefix}weight", self.weight, self.whole_shape, self.weight_split)]
        if self.bias is not None:
            name, bias_shape = f"{prefix}bias", (self.whole_out_features,)
            placed.append(self._placement(name, self.bias, bias_shape, self.bias_split, self._has_partial_bias))
        for factor, parameter in self.lora.named_parameters() if self.lora else ():
            # The gradient of a whole factor is a partial sum on each rank.
            split, shape = self._factor_split(factor), self._factor_shapes[factor]
            placed.append(self._placement(f"{prefix}lora.{factor}", parameter, shape, split, is_partial=split is None))
        return {placement.name: placement for placement in placed}

    _has_partial_bias = False

    def _part_of_product(self, whole: LowRank) -> LowRank:
        """Return this rank's part of a product: its tensors are cut as the outputs of the layer, or as its inputs."""
        # A row-parallel layer gets its part of the features, so its mask is this part of the whole mask.
        dropout = copy.copy(whole.dropout)
        if self.cuts_inputs and isinstance(dropout, KeyedDropout):
            dropout.site = replace(dropout.site, cut_dim=-1, part=index_in_group(self.group))
        tensors = dict(whole.named_parameters())
        self._factor_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        parts = {name: self._part_of(tensor, self._factor_split(name)) for name, tensor in tensors.items()}
        magnitude = Magnitude(parts["magnitude.weight"]) if whole.magnitude else None
        start = (parts["start_A"], parts["start_B"]) if whole.start else None
        # The norms of rows are sums over the inputs, which a column-parallel layer has whole.
        group = self.group if self.cuts_inputs else None
        part = LowRank(parts["A"], parts["B"], whole.scaling, dropout, magnitude, start, group)
        for name, factor in part.named_parameters():
            factor.requires_grad_(tensors[name].requires_grad)
        return part

    def _factor_split(self, name: str) -> Split | None:
        # The columns of A are inputs, so a row-parallel layer cuts it. The other tensors have outputs.
        has_inputs = name.endswith("A")
        if has_inputs != self.cuts_inputs:
            return None
        return Split(1, self.axis) if has_inputs else Split(0, self.axis, self.weight_split.blocks)

    def _part_of(self, whole: Tensor, split: Split | None) -> nn.Parameter:
        part = whole.detach()
        if split is None:
            # A copy, so that the memory of the whole tensor can go.
            part = part.clone()
        else:
            part = part_of(part, split, index_in_group(self.group), group_size(self.group))
        return nn.Parameter(part, requires_grad=whole.requires_grad)

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        output = self.multiply(x, self.weight, bias, self.transposed)
        if self.lora is None:
            return output
        adapted: Tensor = self.lora(x, output, Base.of(self.weight.t() if self.transposed else self.weight, bias))
        return adapted

    def _placement(
        self, name: str, parameter: nn.Parameter, shape: tuple[int, ...], split: Split | None, is_partial: bool = False
    ) -> ParameterPlacement:
        partial_over = ("dp", *JOINT_AXES.get(self.axis, (self.axis,))) if is_partial else ("dp",)
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
        whole, group, transposed, blocks, pads: see `_ParallelLinear`. A head over a vocabulary is padded; the loss must
            ignore the padding.
        copies_input: whether to sum the gradient of the input over the group.
    """

    def __init__(
        self,
        whole: nn.Module,
        group: Group,
        *,
        transposed: bool = False,
        blocks: int = 1,
        pads: bool = False,
        copies_input: bool = False,
    ) -> None:
        super().__init__(whole, group, transposed=transposed, blocks=blocks, pads=pads)
        self.shared_input = SharedInput(group) if copies_input else None
        rows = rows_of(whole)
        self.trained_rows = None if rows is None else rows.copy(group, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs `[..., out / tp]` for `x` `[..., in]`, which is equal on all ranks."""
        x = self.received(x)
        output = self._linear(x, self.bias)
        return output if self.trained_rows is None else self.trained_rows(x, output, self.bias)

    def received(self, x: Tensor) -> Tensor:
        """Return `x` with `f` applied to it, if this layer applies it."""
        return x if self.shared_input is None else self.shared_input(x)


class RowParallelLinear(_ParallelLinear):
    """A linear layer sharded over its inputs, `[..., in / tp] -> [..., out]`.

    The products of the ranks are summed (`g`), in the type of the products. The bias is replicated and added once,
    after the sum. With `sequence_parallel`, each rank gets only its positions of the sum. The gradient of the bias is
    then partial, as `placements` states.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.

    Args:
        whole, group, transposed: see `_ParallelLinear`.
        sequence_parallel: whether to return this rank's positions of the output only.
    """

    cuts_inputs = True

    def __init__(
        self, whole: nn.Module, group: Group, *, transposed: bool = False, sequence_parallel: bool = False
    ) -> None:
        super().__init__(whole, group, transposed=transposed)
        self._has_partial_bias = self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[..., out]`, or this rank's positions of it, for inputs `x` `[..., in / tp]`."""
        if group_size(self.group) == 1:
            return self._linear(x, self.bias)  # in one kernel: bit-identical to the unsharded layer
        # With the bias, the sum would add it once for each rank.
        product = self._linear(x, None)
        if self.sequence_parallel:
            total = scatter_sum_sequence(product, self.group, SEQUENCE_DIM)
        else:
            total = reduce_in_place(product, self.group)
        # Under autocast, only the product has the low precision; without the cast, the sum would have another type.
        return total if self.bias is None else self.add_bias(total, self.bias)
