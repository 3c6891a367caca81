"""The boxes of all ranks are the whole tensor, each element once, however it was cut."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.parallel.placement import ParameterPlacement, Split
from trainer.parallel.shards.boxes import TensorPart, flat_part, own_share, tensor_part, whole_part
from trainer.parallel.shards.slices import bounds_of_part, part_of


class FakeMesh:
    """The place of one rank, without ranks."""

    def __init__(self, sizes: dict[str, int], indices: dict[str, int]) -> None:
        self._sizes, self._indices = sizes, indices

    def size(self, axis: str) -> int:
        return self._sizes[axis]

    def index(self, axis: str) -> int:
        return self._indices[axis]


def meshes(**sizes: int) -> list[Any]:
    """Of all ranks."""
    sizes = {"dp_replicate": 1, "dp_shard": 1, "ep": 1, "cp": 1, "tp": 1} | sizes
    places = product(*(range(size) for size in sizes.values()))
    return [FakeMesh(sizes, dict(zip(sizes, place, strict=True))) for place in places]


def put_together(shape: tuple[int, ...], parts: list[list[TensorPart]], small_bytes: int) -> list[Tensor]:
    """The tensors that all ranks write together; every element must be written once."""
    wholes, counts = {}, {}
    for of_rank in parts:
        for part, box in own_share(of_rank, small_bytes):
            assert part.shape == shape
            place = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
            wholes.setdefault(part.name, torch.full(shape, -1.0))[place] = box.view
            counts.setdefault(part.name, torch.zeros(shape))[place] += 1
    assert all(bool((count == 1).all()) for count in counts.values())
    return list(wholes.values())


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(prod(shape))).view(shape)


sizes = st.integers(1, 4)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
small = st.sampled_from([0, 16, 1 << 16])


@given(shapes, sizes, sizes, sizes, st.data(), small)
def test_columns_or_rows_that_are_sharded_too(shape, replicas, shards, tensor, data, small_bytes):
    """As FSDP shards what tensor ranks hold: the first dimension, without padding."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    blocks = data.draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
    split = Split(dim, "tp", blocks)
    placement = ParameterPlacement("w", shape, (split, Split(0, "dp_shard")))
    parts = []
    for mesh in meshes(dp_replicate=replicas, dp_shard=shards, tp=tensor):
        local = part_of(numbered(shape), split, mesh.index("tp"), tensor)
        start, stop = bounds_of_part(local.shape[0], mesh.index("dp_shard"), shards)
        parts.append([tensor_part("w", local[start:stop], placement, mesh)])
    (whole,) = put_together(shape, parts, small_bytes)
    assert torch.equal(whole, numbered(shape))


@given(shapes, sizes, sizes, st.data(), small)
def test_flat_partitions_of_columns_or_rows(shape, shards, tensor, data, small_bytes):
    """As DeepSpeed partitions: a range of the elements, its bounds anywhere."""
    split = Split(data.draw(st.integers(0, len(shape) - 1)), "tp")
    placement = ParameterPlacement("w", shape, (split, Split(None, "dp_shard")))
    parts = []
    for mesh in meshes(dp_shard=shards, tp=tensor):
        flat = part_of(numbered(shape), split, mesh.index("tp"), tensor).flatten()
        start, stop = bounds_of_part(flat.numel(), mesh.index("dp_shard"), shards)
        parts.append([flat_part("w", flat[start:stop], start, placement, mesh, ("dp_replicate", "dp_shard"))])
    (whole,) = put_together(shape, parts, small_bytes)
    assert torch.equal(whole, numbered(shape))


@given(st.lists(st.booleans(), min_size=1, max_size=9), sizes, sizes, sizes)
def test_small_ones_are_written_in_turns_and_once(cut, replicas, shards, tensor):
    """Some are cut over the tensor ranks, some not, and the ranks of one group must agree on whose turn it is."""
    parts = []
    for mesh in meshes(dp_replicate=replicas, dp_shard=shards, tp=tensor):
        own = []
        for number, is_cut in enumerate(cut):
            split = (Split(0, "tp"),) if is_cut else ()
            local = part_of(numbered((5,)), split[0], mesh.index("tp"), tensor) if is_cut else numbered((5,))
            own.append(tensor_part(f"w{number}", local, ParameterPlacement(f"w{number}", (5,), split), mesh))
        parts.append(own)
    for whole in put_together((5,), parts, 1 << 16):
        assert torch.equal(whole, numbered((5,)))


def test_replicas_share_the_bytes():
    tensors = {f"w{number}": torch.zeros(300, 100) for number in range(4)} | {"b": torch.zeros(3)}
    parts = [[whole_part(name, t, mesh) for name, t in tensors.items()] for mesh in meshes(dp_replicate=4)]
    written = [sum(box.view.nbytes for _, box in own_share(own)) for own in parts]
    assert sum(written) == sum(t.nbytes for t in tensors.values())
    assert max(written) - min(written) <= 12


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_box_is_the_memory_that_it_describes(shape):
    tensor = torch.zeros(shape)
    (box,) = tensor_part("w", tensor, ParameterPlacement("w", shape), meshes()[0]).boxes
    box.view.fill_(1.0)
    assert bool((tensor == 1).all())
