"""Peak memory of this rank."""

from __future__ import annotations

import resource
import sys

import torch

# getrusage(2) counts in KiB on Linux and in bytes on macOS.
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes since the process started: of tensors on CUDA, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
