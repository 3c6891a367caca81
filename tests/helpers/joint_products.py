"""Joint products of queries, keys and values on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from trainer.features.shared_casts import joint_products, weights
from trainer.features.shared_casts.joint_products import Joint
from trainer.parallel.device_traits import DeviceTraits


@contextmanager
def joined(is_joined: bool = True) -> Iterator[list[Joint]]:
    """Join products on a CPU too, and yield them."""
    found: list[Joint] = []

    class Counted(Joint):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    with (
        mock.patch.object(weights, "traits_of", return_value=DeviceTraits(is_cpu=not is_joined)),
        mock.patch.object(joint_products, "Joint", Counted),
    ):
        yield found
