"""Tests in Triton's interpreter, which Triton chooses when it is imported: they run in a process of their own."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import processes

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(file: Path, timeout_seconds: float = 300, marks: str = "not nightly") -> None:
    """Run the tests of a file with these marks in Triton's interpreter, and require that they pass."""
    command = [sys.executable, "-m", "pytest", file, "-q", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = processes.run(command, timeout_seconds, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def round_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to bf16 as torch and GPUs do; it cuts digits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(numbers: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if target != tl.bfloat16:
            return convert(numbers, source, target, mode)
        exact = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
        return exact.bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
