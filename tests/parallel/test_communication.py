"""The conjugate pairs: each right by gradcheck where it belongs, and wrong where the other does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck

from tests.helpers.collectives import counted_collectives
from tests.helpers.ranks import RankPools
from trainer.models.checkpointing import checkpoint_layers
from trainer.parallel.communication import (
    copy_to_group,
    gather_sequence,
    join_sequence,
    reduce_from_group,
    reduce_in_place,
    scatter_sum_sequence,
    split_sequence,
)
from trainer.parallel.shards.slices import bounds_of_part
from trainer.tools.plan.ledger import Ledger


def own_work(x: Tensor) -> Tensor:
    """Work that is shared out: each rank's is another, and their sum is what one process would have."""
    return torch.sin(x * (dist.get_rank() + 1))


def all_work(x: Tensor) -> Tensor:
    return sum(torch.sin(x * (rank + 1)) for rank in range(dist.get_world_size()))


def whole_input(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype).requires_grad_()


# Each takes a whole tensor that all ranks have and gives one that all ranks have; the second entry is the same on one
# process.
def tensor_pair(x: Tensor, group: Any) -> Tensor:
    return reduce_from_group(own_work(copy_to_group(x, group)), group).cos()


def sequence_pair(x: Tensor, group: Any) -> Tensor:
    total = x.shape[1]
    part = split_sequence(x, group, 1).exp()
    part = scatter_sum_sequence(own_work(gather_sequence(part, group, 1, total)), group, 1)
    return join_sequence(part.cos(), group, 1, total).square()


def split_and_join(x: Tensor, group: Any) -> Tensor:
    return join_sequence(split_sequence(x, group, -2).sin(), group, -2, x.shape[-2])


def gather_and_reduce(x: Tensor, group: Any) -> Tensor:
    return reduce_from_group(own_work(gather_sequence(split_sequence(x, group, 1), group, 1, x.shape[1])), group)


def copy_and_scatter(x: Tensor, group: Any) -> Tensor:
    return join_sequence(scatter_sum_sequence(own_work(copy_to_group(x, group)), group, 1), group, 1, x.shape[1])


def gathered_before_repeated_work(x: Tensor, group: Any) -> Tensor:
    """Wrong: the reduce-scatter makes the gradient grow by the degree."""
    return gather_sequence(split_sequence(x, group, 1), group, 1, x.shape[1]).sin()


def without_f(x: Tensor, group: Any) -> Tensor:
    """Wrong: each rank keeps its own part of the gradient."""
    return reduce_from_group(own_work(x), group)


RIGHT = {
    tensor_pair: lambda x: all_work(x).cos(),
    sequence_pair: lambda x: all_work(x.exp()).cos().square(),
    split_and_join: lambda x: x.sin(),
    gather_and_reduce: all_work,
    copy_and_scatter: all_work,
}


def check_gradient(function: Callable[[Tensor, Any], Tensor], *lengths: int) -> None:
    for length in lengths:
        x = whole_input(2, length, 2)
        found = function(x, dist.group.WORLD)
        torch.testing.assert_close(found, RIGHT.get(function, torch.zeros_like)(x))
        assert gradcheck(lambda x: function(x, dist.group.WORLD), x)


def check_wrong_gradient(function: Callable[[Tensor, Any], Tensor]) -> float:
    """The factor between the gradient found and the true one, by finite differences."""
    x = whole_input(2, 4, 2)
    assert not gradcheck(lambda x: function(x, dist.group.WORLD), x, raise_exception=False)
    (found,) = torch.autograd.grad(function(x, dist.group.WORLD).sum(), x)
    return (found / x.cos()).mean().item()


@pytest.mark.parametrize("function", [tensor_pair, gather_and_reduce, copy_and_scatter, split_and_join, sequence_pair])
def test_gradients_on_two_ranks(ranks: RankPools, function):
    ranks(2).run(check_gradient, function, 7, 4)


@pytest.mark.parametrize("world_size", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_gradients_of_sequences_with_ranks_that_have_fewer_positions_or_none(ranks: RankPools, world_size):
    ranks(world_size).run(check_gradient, sequence_pair, 5, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("function", [tensor_pair, gather_and_reduce, copy_and_scatter, split_and_join, sequence_pair])
def test_gradients_on_three_ranks(ranks: RankPools, function):
    ranks(3).run(check_gradient, function, 7, 13)


def test_gathering_before_repeated_work_is_found_wrong(ranks: RankPools):
    assert ranks(2).run(check_wrong_gradient, gathered_before_repeated_work) == pytest.approx([2.0, 2.0])


def test_forgetting_f_is_found_wrong(ranks: RankPools):
    ranks(2).run(check_wrong_gradient, without_f)


def forward_and_backward(length: int, dim: int) -> None:
    """Each function alone against what its line of the table says, with another input and gradient on each rank."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    shape = [2, 3, 2]
    shape[dim] = length
    bounds = [bounds_of_part(length, index, size) for index in range(size)]
    wholes = [torch.randn(shape, generator=torch.Generator().manual_seed(index)) for index in range(size)]
    parts = [whole.narrow(dim, start, stop - start) for whole, (start, stop) in zip(wholes, bounds, strict=True)]
    start, stop = bounds[rank]
    whole, part, summed, joined = wholes[rank], parts[rank], sum(wholes), torch.cat(parts, dim)
    part_of_sum = summed.narrow(dim, start, stop - start)
    # input, output; the gradient of the output, and that of the input
    check_one(lambda x: copy_to_group(x, group), (whole, whole), (whole, summed))
    check_one(lambda x: reduce_from_group(x, group), (whole, summed), (whole, whole))
    check_one(lambda x: reduce_in_place(x * 1.0, group), (whole, summed), (whole, whole))
    check_one(lambda x: gather_sequence(x, group, dim, length), (part, joined), (whole, part_of_sum))
    check_one(lambda x: scatter_sum_sequence(x, group, dim), (whole, part_of_sum), (part, joined))
    check_one(lambda x: split_sequence(x, group, dim), (whole, part), (part, joined))
    check_one(lambda x: join_sequence(x, group, dim, length), (part, joined), (whole, part))


def check_one(
    function: Callable[[Tensor], Tensor], values: tuple[Tensor, Tensor], slopes: tuple[Tensor, Tensor]
) -> None:
    leaf = values[0].mT.contiguous().mT.detach().requires_grad_()  # not contiguous, as activations often are
    written = leaf.detach().clone(), slopes[0].clone()
    found = function(leaf)
    torch.testing.assert_close(found, values[1])
    (slope,) = torch.autograd.grad(found, leaf, slopes[0])
    torch.testing.assert_close(slope, slopes[1])
    assert torch.equal(leaf, written[0])
    assert torch.equal(slopes[0], written[1])


def every_length_and_dimension() -> None:
    for length in (7, 13, 3, 8, 1):
        for dim in (0, 1, -1):
            forward_and_backward(length, dim)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_function_forward_and_backward(ranks: RankPools, world_size):
    ranks(world_size).run(every_length_and_dimension)


def gradients_that_share_memory() -> tuple[list[float], list[float]]:
    """The gradient of a sum is expanded from one number: an all-reduce in place would add in the same place."""
    x = torch.ones(2, 4, requires_grad=True)
    copied = copy_to_group(x, dist.group.WORLD)
    (copied.sum() + copied.sum()).backward()
    y = torch.ones(2, 4, requires_grad=True)
    (split_sequence(y, dist.group.WORLD, 1) * 3.0).sum().backward()
    return x.grad.unique().tolist(), y.grad.unique().tolist()


def test_gradients_that_share_memory(ranks: RankPools):
    assert ranks(2).run(gradients_that_share_memory) == [([4.0], [3.0])] * 2


def types_that_travel() -> list[tuple[torch.dtype, float]]:
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.ones(3, 2, dtype=dtype)
        for y in (
            reduce_from_group(x, dist.group.WORLD),
            join_sequence(scatter_sum_sequence(x, dist.group.WORLD, 0), dist.group.WORLD, 0, 3),
        ):
            found.append((y.dtype, y.unique().item()))
    return found


def test_a_tensor_travels_in_its_own_type(ranks: RankPools):
    expected = [(dtype, 2.0) for dtype in (torch.float16, torch.bfloat16, torch.float64) for _ in range(2)]
    assert ranks(2).run(types_that_travel) == [expected] * 2


def communications(function: Callable[[Tensor, Any], Tensor]) -> tuple[dict[str, int], dict[str, int]]:
    x = whole_input(2, 5, 2)
    with counted_collectives() as counted:
        y = function(x, dist.group.WORLD)
        forward = dict(counted)
        counted.clear()
        y.sum().backward()
    return forward, dict(counted)


def test_the_collectives_of_a_pass(ranks: RankPools):
    assert ranks(2).run(communications, tensor_pair)[0] == ({"all_reduce": 1}, {"all_reduce": 1})
    gathers_scatters = {"all_gather": 2, "reduce_scatter": 1}
    assert ranks(2).run(communications, sequence_pair)[0] == (gathers_scatters, gathers_scatters)


def copies(batch: int, length: int) -> tuple[Counter[str], Counter[str]]:
    """Our operations that copy in a gather and in a scattered sum, forward and backward each."""
    group = dist.group.WORLD
    own = len(range(*bounds_of_part(length, dist.get_rank(), dist.get_world_size())))
    found = []
    for function, positions in (
        (lambda x: gather_sequence(x, group, 1, length), own),
        (lambda x: scatter_sum_sequence(x, group, 1), length),
    ):
        x = torch.ones(batch, positions, 2, requires_grad=True)
        slope = torch.ones_like(function(x))
        with Ledger() as ledger:
            torch.autograd.grad(function(x), x, slope)
        names = Counter({kind.name: amount.number for kind, amount in ledger.totals.work.items()})
        found.append(Counter({name: names[name] for name in ("cat", "clone") if names[name]}))
    return found[0], found[1]


def test_parts_of_a_single_row_are_not_copied_and_others_once(ranks: RankPools):
    for gather, scatter in ranks(2).run(copies, 1, 6):
        assert gather == scatter == {}
    for gather, scatter in ranks(2).run(copies, 3, 6):
        assert gather == scatter == {"cat": 1, "clone": 1}
    for gather, _ in ranks(2).run(copies, 1, 5):  # the padding of the last rank
        assert gather["cat"] == gather["clone"] == 0


def test_many_parts_take_no_more_copies(ranks: RankPools):
    for gather, scatter in ranks(4).run(copies, 3, 8):
        assert gather == scatter == {"cat": 1, "clone": 1}


class SummedProduct(torch.nn.Module):
    """A product that ranks sum in place, and a function that needs the sum in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3, 2), 0.1 * (dist.get_rank() + 1)))

    def forward(self, x: Tensor) -> Tensor:
        return reduce_in_place(torch.nn.functional.linear(x, self.weight), dist.group.WORLD).sin()


def recomputed(how: Any) -> tuple[Tensor, Tensor]:
    layer = SummedProduct()
    checkpoint_layers([layer], how, None)
    y = layer(torch.ones(4, 2))
    y.sum().backward()
    return y.detach(), layer.weight.grad


@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_product_that_is_kept_is_not_summed_again(ranks: RankPools, how: str):
    for found, expected in zip(ranks(2).run(recomputed, how), ranks(2).run(recomputed, "none"), strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def refusals() -> list[str]:
    found = []
    with pytest.raises(AssertionError) as wrong_length:
        gather_sequence(torch.zeros(2, 3), dist.group.WORLD, 1, 9)
    found.append(str(wrong_length.value))
    x = whole_input(2, 2)
    (slope,) = torch.autograd.grad(tensor_pair(x, dist.group.WORLD).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as second_derivative:
        slope.sum().backward()
    return [*found, str(second_derivative.value)]


def test_a_part_of_the_wrong_length_and_second_derivatives_are_refused(ranks: RankPools):
    for wrong_length, second_derivative in ranks(2).run(refusals):
        assert "this rank holds 3 of 9 positions" in wrong_length
        assert "once_differentiable" in second_derivative


def test_one_rank_copies_and_communicates_nothing():
    assert not dist.is_initialized()
    x = torch.ones(2, 3)
    assert copy_to_group(x, None) is x
    assert reduce_from_group(x, None) is x
    assert gather_sequence(x, None, 1, 3) is x
    assert scatter_sum_sequence(x, None, 1) is x
    assert split_sequence(x, None, 1) is x
    assert join_sequence(x, None, 1, 3) is x
