"""Parts of a whole tensor, and the whole of its parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.placement import ParameterPlacement, Split
from trainer.parallel.shards.slices import bounds_of_part, join_parts, part_of, ranges_of_part


def parts_of(whole: torch.Tensor, split: Split, size: int) -> list[torch.Tensor]:
    return [part_of(whole, split, index, size) for index in range(size)]


@pytest.mark.parametrize(
    ("total", "size", "lengths"),
    [(8, 2, [4, 4]), (7, 2, [4, 3]), (5, 4, [2, 2, 1, 0]), (9, 4, [3, 3, 3, 0]), (3, 4, [1, 1, 1, 0]), (0, 2, [0, 0])],
)
def test_bounds(total, size, lengths):
    bounds = [bounds_of_part(total, index, size) for index in range(size)]
    assert [stop - start for start, stop in bounds] == lengths
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == total


def test_parts_are_padded_with_zeros():
    vocabulary = torch.arange(1.0, 6.0).unsqueeze(1)
    found = [part.flatten().tolist() for part in parts_of(vocabulary, Split(0, "tp"), 4)]
    assert found == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_every_rank_gets_its_share_of_every_block():
    """The columns of q, k and v laid one after the other, as GPT-2 does: [in, 3 * hidden]."""
    q, k, v = (torch.arange(4.0) + start for start in (10, 20, 30))
    fused = torch.cat([q, k, v]).expand(2, 12)
    first, second = parts_of(fused, Split(1, "tp", blocks=3), 2)
    assert first[0].tolist() == [10, 11, 20, 21, 30, 31]
    assert second[1].tolist() == [12, 13, 22, 23, 32, 33]
    without_blocks = part_of(fused, Split(1, "tp"), 0, 2)
    assert without_blocks[0].tolist() == [10, 11, 12, 13, 20, 21]


@given(st.data())
def test_joining_undoes_cutting(data):
    blocks, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = blocks * data.draw(st.integers(1, 11))
    split = Split(dim, "tp", blocks)
    whole = torch.randn(shape)
    parts = parts_of(whole, split, size)
    assert torch.equal(join_parts(parts, split, shape[dim]), whole)
    placement = ParameterPlacement("p", tuple(shape), (split,))
    for index, part in enumerate(parts):
        assert part.is_contiguous()
        assert part.numel() == placement.num_elements({"tp": size})
        cut_again = part_of(join_parts(parts, split, shape[dim]), split, index, size)
        assert torch.equal(part, cut_again)
    assert sum(part.count_nonzero() for part in parts) == whole.count_nonzero()


@given(st.data())
def test_ranges_cover_the_part(data):
    blocks, block, size = (data.draw(st.integers(1, most)) for most in (3, 9, 5))
    index = data.draw(st.integers(0, size - 1))
    whole, split = torch.arange(1, blocks * block + 1), Split(0, "tp", blocks)
    width, ranges = ranges_of_part(len(whole), split, index, size)
    part = torch.zeros(blocks * width, dtype=whole.dtype)
    for number, (start, stop) in enumerate(ranges):
        part[number * width : number * width + stop - start] = whole[start:stop]
    assert len(ranges) == blocks
    assert torch.equal(part, part_of(whole, split, index, size))


def test_a_part_shares_no_memory_with_the_whole():
    whole = torch.zeros(4, 2)
    for split, size in ((Split(0, "tp"), 1), (Split(0, "tp"), 2), (Split(0, "tp", 2), 2)):
        part_of(whole, split, 0, size).fill_(1.0)
    assert not whole.any()


def test_meta_tensors_have_parts():
    part = part_of(torch.empty(30522, 8, device="meta", dtype=torch.bfloat16), Split(0, "tp"), 3, 4)
    assert (part.shape, part.dtype, part.device.type) == ((7631, 8), torch.bfloat16, "meta")


def test_unequal_blocks_are_an_assertion():
    with pytest.raises(AssertionError, match="7 is not 3 equal blocks"):
        part_of(torch.zeros(7), Split(0, "tp", 3), 0, 2)
    with pytest.raises(AssertionError, match="flattened"):
        part_of(torch.zeros(7), Split(None, "tp"), 0, 2)
