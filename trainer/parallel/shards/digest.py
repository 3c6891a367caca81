"""A digest of tensors that does not depend on their layout, to compare weights that a checkpoint leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch

from trainer.parallel.random import derive_keys, stream_key
from trainer.parallel.shards.boxes import TensorPart, own_share, positions_of

_CHUNK_ELEMENTS = 1 << 22
_MODULUS = 1 << 64


def own_digest(parts: Iterable[TensorPart]) -> int:
    """Return this rank's summand of the digest of fp32 tensors; `joined` adds those of all ranks.

    The bits of each element are multiplied by a pseudorandom word of its name and position. The sum modulo 2**64
    therefore does not depend on the division of the elements among the ranks.
    """
    total = 0
    for part, box in own_share(parts):
        stream = torch.tensor(stream_key(part.name), device=box.view.device)
        rows = max(1, _CHUNK_ELEMENTS // max(1, prod(box.shape[1:])))
        for first in range(0, box.shape[0] if box.shape else 1, rows):
            piece = box.view[first : first + rows] if box.shape else box.view
            start = (box.start[0] + first, *box.start[1:]) if box.shape else ()
            words = derive_keys(stream, positions_of(start, piece.shape, part.shape, piece.device))
            bits = piece.detach().float().contiguous().view(torch.int32).reshape(-1).long()
            total += int((words * bits).sum())  # int64 wraps modulo 2**64, as the digest does
    return total % _MODULUS


def joined(digests: Sequence[int]) -> str:
    """Return the digest, 16 hexadecimal digits, from the summands of all ranks."""
    return f"{sum(digests) % _MODULUS:016x}"
