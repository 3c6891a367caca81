"""Column- and row-parallel layers against the layers that they are parts of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.helpers.collectives import counted_collectives
from tests.helpers.ranks import RankPools
from trainer.parallel.communication import (
    copy_to_group,
    gather_sequence,
    join_sequence,
    reduce_from_group,
    split_sequence,
)
from trainer.parallel.placement import Placements, Split, whole
from trainer.parallel.shards.slices import join_parts, part_of
from trainer.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

HIDDEN = 24
DEGREES = pytest.mark.parametrize("degree", [2, pytest.param(3, marks=pytest.mark.slow), 4])


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conv1d(in_features: int, out_features: int) -> Conv1D:
    layer = Conv1D(out_features, in_features)
    nn.init.normal_(layer.bias)
    return layer


class Wide(nn.Module):
    """A column-parallel layer followed by a row-parallel one, as in every MLP."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Causal attention with q, k and v in one projection; the heads are counted from the sizes that it finds."""

    head_size = 2

    def __init__(self, qkv: nn.Module, out: nn.Module, group: Any = None) -> None:
        super().__init__()
        self.qkv, self.out, self.group = qkv, out, group

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(copy_to_group(x, self.group))
        q, k, v = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in fused.split(fused.shape[-1] // 3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class SequenceParallel(nn.Module):
    """A norm on this rank's positions, then the two layers; the result is joined again."""

    def __init__(self, norm: nn.Module, wide: Wide, group: Any = None) -> None:
        super().__init__()
        self.norm, self.wide, self.group = norm, wide, group

    def forward(self, x: Tensor) -> Tensor:
        total = x.shape[1]
        normed = self.norm(split_sequence(x, self.group, 1))
        return join_sequence(self.wide(gather_sequence(normed, self.group, 1, total)), self.group, 1, total)


def whole_model(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "attention":
        return Attention(nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    if kind == "attention of GPT-2":
        return Attention(conv1d(HIDDEN, 3 * HIDDEN), conv1d(HIDDEN, HIDDEN))
    if kind == "conv1d":
        return Wide(conv1d(HIDDEN, 48), conv1d(48, HIDDEN))
    if kind == "no biases":
        return Wide(nn.Linear(HIDDEN, 48, bias=False), nn.Linear(48, HIDDEN, bias=False))
    wide = Wide(nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN))
    return SequenceParallel(nn.LayerNorm(HIDDEN), wide) if kind == "sequence parallel" else wide


def parallel_model(kind: str, model: nn.Module, group: Any) -> tuple[nn.Module, Placements]:
    model = copy.deepcopy(model)
    options: dict[str, Any] = {"transposed": kind in ("conv1d", "attention of GPT-2")}
    if isinstance(model, Attention):
        model.group = group
        model.qkv = ColumnParallelLinear(model.qkv, group, blocks=3, **options)
        model.out = RowParallelLinear(model.out, group, **options)
        return model, model.qkv.placements("qkv.") | model.out.placements("out.")
    along = isinstance(model, SequenceParallel)
    wide = model.wide if along else model
    wide.up = ColumnParallelLinear(wide.up, group, copies_input=not along, **options)
    wide.down = RowParallelLinear(wide.down, group, sequence_parallel=along, **options)
    if not along:
        return model, wide.up.placements("up.") | wide.down.placements("down.")
    model.group = group
    return model, wide.up.placements("wide.up.") | wide.down.placements("wide.down.")


def gathered(tensor: Tensor, split: Split | None, whole_shape: tuple[int, ...]) -> Tensor:
    if split is None:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    assert split.dim is not None
    return join_parts(parts, split, whole_shape[split.dim])


def compare(kind: str, length: int = 5) -> None:
    """Outputs, the input's gradient and the parameters' gradients, put together as the placements say."""
    model = whole_model(kind)
    group = dist.group.WORLD
    parallel, placements = parallel_model(kind, model, group)
    assert [*parallel.state_dict()] == [*model.state_dict()]
    x, slope = random(2, length, HIDDEN).requires_grad_(), random(2, length, HIDDEN, seed=2)
    expected, found = model(x), parallel(x)
    torch.testing.assert_close(found, expected)
    (expected_slope,) = torch.autograd.grad(expected, x, slope, retain_graph=True)
    (found_slope,) = torch.autograd.grad(found, x, slope, retain_graph=True)
    torch.testing.assert_close(found_slope, expected_slope)
    expected.backward(slope)
    found.backward(slope)
    for name, parameter in model.named_parameters():
        local = parallel.get_parameter(name)
        if name.startswith("norm."):
            dist.all_reduce(local.grad)
            torch.testing.assert_close(local.grad, parameter.grad)
            continue
        placement = placements[name]
        assert placement.shape == tuple(parameter.shape)
        assert placement.num_elements({"tp": dist.get_world_size()}) == local.numel()
        split = placement.splits[0] if placement.splits else None
        assert torch.equal(gathered(local.detach(), split, placement.shape), parameter)
        gradient = local.grad.clone()
        if "tp" in placement.partial_over:
            dist.all_reduce(gradient)
        torch.testing.assert_close(gathered(gradient, split, placement.shape), parameter.grad)


KINDS = ("plain", "no biases", "conv1d", "attention", "attention of GPT-2", "sequence parallel")


def compare_all() -> None:
    for kind in KINDS:
        compare(kind)
    for length in (7, 13, 3):
        compare("sequence parallel", length)


@DEGREES
def test_outputs_and_gradients_equal_the_whole_layer(ranks: RankPools, degree):
    ranks(degree).run(compare_all)


def gradients_in_fp64() -> None:
    model = whole_model("plain").double()
    parallel, _ = parallel_model("plain", model, dist.group.WORLD)
    x = random(2, 2, HIDDEN).double().requires_grad_()
    assert torch.autograd.gradcheck(parallel, x)
    parallel.up.shared_input = None
    assert not torch.autograd.gradcheck(parallel, x, raise_exception=False)


def test_gradcheck_passes_with_f_and_fails_without(ranks: RankPools):
    ranks(2).run(gradients_in_fp64)


def without_blocks() -> float:
    model = whole_model("attention")
    parallel, _ = parallel_model("attention", model, dist.group.WORLD)
    parallel.qkv = ColumnParallelLinear(model.qkv, dist.group.WORLD)
    x = random(2, 5, HIDDEN)
    return (parallel(x) - model(x)).abs().max().item()


def test_a_fused_projection_cut_without_blocks_is_found_wrong(ranks: RankPools):
    assert min(ranks(2).run(without_blocks)) > 0.01


def in_autocast(dtype: torch.dtype, kind: str) -> None:
    model = whole_model(kind)
    parallel, placements = parallel_model(kind, model, dist.group.WORLD)
    x, slope = random(2, 5, HIDDEN).requires_grad_(), random(2, 5, HIDDEN, seed=2)
    outputs, slopes = [], []
    for each in (model, parallel):
        with torch.autocast("cpu", dtype):
            y = each(x)
        outputs.append(y)
        slopes.append(torch.autograd.grad(y, x, slope.to(y.dtype), retain_graph=True)[0])
        y.backward(slope.to(y.dtype))
    tolerance = 4 * torch.finfo(dtype).eps
    assert [y.dtype for y in outputs] == [dtype, dtype]
    torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*slopes, rtol=tolerance, atol=tolerance)
    for name, placement in placements.items():
        local, expected = parallel.get_parameter(name).grad, model.get_parameter(name).grad
        assert local.dtype == torch.float32
        if "tp" in placement.partial_over:
            dist.all_reduce(local)
        local = gathered(local, placement.splits[0] if placement.splits else None, placement.shape)
        scale = expected.abs().max().item()
        torch.testing.assert_close(local, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("kind", ["plain", "conv1d", "sequence parallel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(ranks: RankPools, dtype, kind):
    ranks(2).run(in_autocast, dtype, kind)


def communications(kind: str) -> list[dict[str, int]]:
    parallel, _ = parallel_model(kind, whole_model(kind), dist.group.WORLD)
    found = []
    with counted_collectives() as counted:
        y = parallel(random(2, 5, HIDDEN).requires_grad_())
        found.append(dict(counted))
        counted.clear()
        y.sum().backward()
        found.append(dict(counted))
    return found


def test_one_all_reduce_forward_and_one_backward(ranks: RankPools):
    for kind in ("plain", "attention"):
        assert ranks(2).run(communications, kind) == [[{"all_reduce": 1}, {"all_reduce": 1}]] * 2
    # split: gathered backward; gather_sequence; the row layer's scatter; join: gathered forward
    both = {"all_gather": 2, "reduce_scatter": 1}
    assert ranks(2).run(communications, "sequence parallel") == [[both, both]] * 2


def padded_head() -> None:
    """7 outputs on the ranks: zero rows follow, whose outputs are zero."""
    model = nn.Linear(HIDDEN, 7)
    head = ColumnParallelLinear(model, dist.group.WORLD, pads=True, copies_input=True)
    x = random(2, HIDDEN)
    outputs = gathered(head(x).detach().mT.contiguous(), Split(0, "tp"), (7,)).mT
    torch.testing.assert_close(outputs, model(x))
    assert head.out_features == 2
    if dist.get_rank() == 3:
        assert head(x)[:, 1].tolist() == [0.0, 0.0]
    with pytest.raises(AssertionError, match="7 features do not divide by the tensor degree 4"):
        ColumnParallelLinear(model, dist.group.WORLD)
    with pytest.raises(AssertionError, match="7 features do not divide by the tensor degree 4"):
        RowParallelLinear(nn.Linear(7, 4), dist.group.WORLD)


def test_outputs_that_do_not_divide_are_padded_on_request_only(ranks: RankPools):
    ranks(4).run(padded_head)


def build_on_meta_and_fill() -> None:
    model = whole_model("attention of GPT-2")
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    empty = copy.deepcopy(model).to("meta")
    shapes = Attention(
        ColumnParallelLinear(empty.qkv, group, blocks=3, transposed=True),
        RowParallelLinear(empty.out, group, transposed=True),
        group,
    )
    placements = shapes.qkv.placements("qkv.") | shapes.out.placements("out.")
    shapes.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in shapes.named_parameters():
            tensor = model.get_parameter(name)
            splits = placements[name].splits
            parameter.copy_(part_of(tensor, splits[0], rank, size) if splits else tensor)
    x = random(2, 5, HIDDEN)
    torch.testing.assert_close(shapes(x), model(x))
    assert (shapes.qkv.in_features, shapes.qkv.out_features) == (HIDDEN, 3 * HIDDEN // size)
    assert (shapes.out.in_features, shapes.out.out_features) == (HIDDEN // size, HIDDEN)


def test_shapes_on_meta_are_filled_later(ranks: RankPools):
    ranks(2).run(build_on_meta_and_fill)


class TestOneRank:
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_the_plain_layer_to_the_last_bit(self, kind):
        assert not dist.is_initialized()  # so nothing can be communicated
        model = whole_model(kind)
        parallel, placements = parallel_model(kind, model, None)
        found = []
        for each in (model, parallel):
            x = random(2, 5, HIDDEN).requires_grad_()
            y = each(x)
            y.backward(random(2, 5, HIDDEN, seed=2))
            found.append([y, x.grad, *(parameter.grad for parameter in each.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        for name, placement in placements.items():
            assert placement.shape == whole(model)[name].shape

    def test_parameters_lie_by_their_placements(self):
        column = ColumnParallelLinear(nn.Linear(4, 6), None, blocks=3).placements("q.")
        assert column["q.weight"].splits == column["q.bias"].splits == (Split(0, "tp", 3),)
        assert (column["q.weight"].shape, column["q.bias"].shape) == ((6, 4), (6,))
        transposed = ColumnParallelLinear(nn.Linear(6, 4, bias=False), None, transposed=True).placements()
        assert [*transposed] == ["weight"]
        assert (transposed["weight"].splits, transposed["weight"].shape) == ((Split(1, "tp"),), (4, 6))
        row = RowParallelLinear(nn.Linear(4, 6), None).placements()
        assert (row["weight"].splits, row["bias"].splits) == ((Split(1, "tp"),), ())
        assert row["bias"].partial_over == ("dp",)
        along = RowParallelLinear(nn.Linear(6, 4), None, transposed=True, sequence_parallel=True).placements()
        assert (along["weight"].splits, along["weight"].partial_over) == ((Split(0, "tp"),), ("dp",))
        assert along["bias"].partial_over == ("dp", "tp")

    def test_parts_are_as_trainable_as_the_whole_and_in_its_type(self):
        layer = nn.Linear(4, 6, dtype=torch.bfloat16).eval()
        layer.bias.requires_grad_(False)
        makers: tuple[Callable[..., nn.Module], ...] = (ColumnParallelLinear, RowParallelLinear)
        for make in makers:
            part = make(layer, None)
            assert (part.weight.requires_grad, part.bias.requires_grad, part.training) == (True, False, False)
            assert not part.placements()["bias"].trainable
            assert part.weight.dtype == torch.bfloat16
            assert part.weight.data_ptr() != layer.weight.data_ptr()


def bias_added_before_the_sum() -> None:
    """What the bias must not be: added by every rank."""
    model = whole_model("plain")
    parallel, _ = parallel_model("plain", model, dist.group.WORLD)
    x = random(2, 5, HIDDEN)
    hidden = F.gelu(parallel.up(x))
    wrong = reduce_from_group(F.linear(hidden, parallel.down.weight, parallel.down.bias), dist.group.WORLD)
    torch.testing.assert_close(wrong - model(x), model.down.bias.expand(2, 5, HIDDEN))


def test_a_bias_added_by_every_rank_is_detected(ranks: RankPools):
    ranks(2).run(bias_added_before_the_sum)
