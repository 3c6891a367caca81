"""The installed package deepspeed: its import, and the operations that it compiles on first use."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from trainer.ranks.environment import extensions_folder

CPU_OPERATION = "deepspeed_shm_comm"
"""The operation that DeepSpeed compiles for CPUs; on GPUs the trainer needs none."""

_TOOLS = ("g++", "ninja")
_LONGEST_BUILD_MINUTES = 15  # it takes one or two; a busy machine needs more


def import_deepspeed() -> Any:
    """Return the package, without the lines that its import prints.

    Raises:
        ImportError: it is not installed.
    """
    with redirect_stdout(io.StringIO()):
        import deepspeed
    return deepspeed


def prebuilt_operations(deepspeed: Any) -> frozenset[str]:
    """Return the operations that were compiled at installation (`DS_BUILD_*`)."""
    return frozenset(name for name, is_built in deepspeed.git_version_info.installed_ops.items() if is_built)


def build_root() -> Path:
    """Return the folder in which torch compiles extensions."""
    from torch.utils.cpp_extension import get_default_build_root  # imports setuptools, which only a build needs

    return extensions_folder() or Path(get_default_build_root())


def missing_tools(path: str | None = None) -> list[str]:
    """Return the build tools that are not on `path` (None: the PATH of this process)."""
    return [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]


def abandoned_locks(root: Path) -> Iterator[tuple[Path, float]]:
    """Yield locks of killed builds of the CPU operation under `root`, each with its age in minutes.

    Torch waits for such a lock without a time limit and without a message.
    """
    for lock in root.glob(f"**/{CPU_OPERATION}/lock"):
        with suppress(FileNotFoundError):  # the build has just ended
            minutes = (time.time() - lock.stat().st_mtime) / 60
            if minutes > _LONGEST_BUILD_MINUTES:
                yield lock, minutes
