"""Copies between the host and a GPU, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, copied from pinned memory, so that the host does not wait."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def begin_to_host(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Begin to copy tensors to the host, and return a function that waits for them, but not for later work."""
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return lambda: dict(tensors)
    # Torch allocates pinned memory for such a copy, so the host goes on at once.
    copied = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def read() -> dict[str, Tensor]:
        event.synchronize()
        return {name: tensor.clone() for name, tensor in copied.items()}  # the next copies reuse the pinned memory

    return read


def is_busy(device: torch.device) -> bool:
    """Return whether a GPU has queued work on its current stream; a CPU has none."""
    return device.type == "cuda" and not torch.cuda.current_stream(device).query()


def one_behind(begun: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Yield the result of each function after the next one was made, so that the device has work meanwhile."""
    read: Callable[[], Result] | None = None
    for following in begun:
        if read is not None:
            yield read()
        read = following
    if read is not None:
        yield read()
