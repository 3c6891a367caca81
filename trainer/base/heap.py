"""The memory that this process has freed."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt(3)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory. Otherwise, each step on a CPU faults in the pages that the last one returned.

    Peaks stay the same. A given threshold of trimming ends glibc's own choice of the threshold of mappings, so this is
    the largest one that it chooses. Other C libraries do nothing.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # 32 MiB, the most on systems of 64 bits (`DEFAULT_MMAP_THRESHOLD_MAX` in mallopt(3)).
        libc.mallopt(_MMAP_THRESHOLD, 2**25)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
