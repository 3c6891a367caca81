"""Counter of the collectives that a rank calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

# torch 2.13 renamed some of its functions.
_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count the calls of torch's collectives within the context, by kind."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counted[_NAMES[name]] += 1
            return original(*args, **kwargs)

        return patch.object(dist, name, call)

    with ExitStack() as patches:
        for name in _NAMES:
            if hasattr(dist, name):
                patches.enter_context(counting(name))
        yield counted
