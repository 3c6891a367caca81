"""Freed memory stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_step_on_a_cpu_faults_no_pages_in_again():
    """A step allocates 64 MiB and frees it; after the first one, the pages stay."""
    steps = """if True:
        import ctypes, resource, sys
        if sys.argv[1:]:
            from trainer.base.heap import keep_freed_memory
            keep_freed_memory()
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        for step in range(3):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            blocks = [libc.malloc(2**20) for _ in range(64)]
            for block in blocks:
                ctypes.memset(block, 1, 2**20)
            for block in reversed(blocks):
                libc.free(block)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """

    def faults(*arguments: str) -> int:
        command = [sys.executable, "-c", steps, *arguments]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)

    assert faults("kept") < faults() / 10  # the size of a page depends on the machine
