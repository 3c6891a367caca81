from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer.parallel import flat_rows
from trainer.parallel.dropout import DropoutKeys, DropoutSite, MicrobatchKey
from trainer.parallel.flat_rows import FlatRows

CPU = torch.device("cpu")


def is_token(lengths: list[int], width: int) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("lengths", [[3, 7, 1, 6, 7], [1, 1], [4], [2, 0, 5]], ids=str)
def test_joining_keeps_every_token_and_no_padding(lengths: list[int]):
    flat = FlatRows.of(lengths, 8, CPU)
    x = torch.randn(len(lengths), 8, 3)
    joined = flat.join(x)
    assert joined.shape == (1, sum(lengths), 3)
    assert flat.rows.tolist() == [row for row in flat.order.tolist() for _ in range(lengths[row])]
    assert flat.lengths == tuple(lengths[row] for row in flat.order.tolist())
    expected = x * is_token(lengths, 8)[..., None]
    assert torch.equal(flat.pad(joined), expected)
    assert torch.equal(joined[0], x[flat.rows, flat.positions])
    rows = torch.zeros_like(x)
    for group in flat.groups:
        padded = group.pad(joined)
        rows[group.rows, : group.width] = padded
        assert torch.equal(group.join(padded), joined[0, group.tokens])
    assert torch.equal(rows, expected)


def test_groups_have_rows_of_similar_length():
    flat = FlatRows.of([8, 3, 8, 7, 4, 1], 8, CPU)
    assert [(group.rows.tolist(), group.width, group.places is None) for group in flat.groups] == [
        ([0, 2, 3], 8, False),
        ([4, 1], 4, False),
        ([5], 1, True),
    ]


@pytest.mark.parametrize("cut", [{}, {"cut_dim": -1, "part": 1}], ids=["whole", "features"])
def test_masks_equal_the_padded_rows(cut: dict[str, int]):
    lengths, key = [3, 7, 1], torch.tensor([5, 2, 9])
    flat = FlatRows.of(lengths, 8, CPU)
    site = DropoutSite(DropoutKeys(1), "site", **cut)
    x = torch.randn(3, 8, 16)
    with site.keys.use(MicrobatchKey(4, key)):
        padded = site.drop(x, 0.5)
    with site.keys.use(MicrobatchKey(4, key, flat)):
        joined = replace(site, flat=True).drop(flat.join(x), 0.5)
    assert torch.equal(joined, flat.join(padded))


def test_joined_rows_are_copied_to_the_device_once(monkeypatch: pytest.MonkeyPatch):
    """All layers read the same copies; more rows need no more copies."""
    copied: list[torch.Size] = []

    def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied.append(tensor.shape)
        return tensor

    monkeypatch.setattr(flat_rows, "to_device", to_device)
    flat = FlatRows.of([5] * 7 + [4] * 9, 8, CPU)
    x = torch.randn(16, 8, 3)
    for _ in range(3):  # layers
        joined = flat.join(x)
        flat.pad(joined)
        assert len(flat.starts) == 17
        (group,) = flat.groups
        group.join(group.pad(joined))
    # Rows, positions, places and order; starts; places and mask of the group.
    assert len(copied) == 4 + 1 + 2
