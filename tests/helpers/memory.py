"""The peak memory of this process, as Linux reports it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LARGE_BERT = {
    "model_type": "bert",
    "vocab_size": 4001,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "max_position_embeddings": 64,
}
"""47 MB in fp32, mostly in matrices that are sharded. The vocabulary does not divide evenly over ranks."""
LARGEST_BYTES = 4001 * 512 * 4  # its word embedding

_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 16  # an option of mallopt(3), and its value


def return_freed_memory() -> None:
    """Let blocks above 64 KiB return to the system once freed, so that peaks are those of live memory.

    With malloc's own, growing threshold, freed blocks below live ones count too.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
    libc.malloc_trim(0)


def status_bytes(key: str) -> int:
    """Return the bytes under `key` of `/proc/self/status`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024


def peak_growth(action: Callable[[], Any]) -> int:
    """Return by how many bytes the resident memory grew at its peak during `action`, mapped files included."""
    gc.collect()
    return_freed_memory()  # otherwise `action` would reuse freed memory, unseen in the growth
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    kept = action()
    growth = status_bytes("VmHWM") - before
    del kept
    return growth


def _can_measure() -> bool:
    try:
        peak_growth(lambda: None)
    except (OSError, StopIteration, AttributeError):
        return False
    return True


needs_peak = pytest.mark.skipif(not _can_measure(), reason="needs the peak of resident memory as Linux counts it")
