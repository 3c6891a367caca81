"""The package deepspeed as it is installed: its quiet import, and what it compiles on first use."""

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
"""The operation that it needs on CPUs; on GPUs, what the trainer asks of it needs none."""

_TOOLS = ("g++", "ninja")
_LONGEST_BUILD_MINUTES = 15  # it takes one or two; a busy machine needs more


def import_deepspeed() -> Any:
    """The package, which prints when it is imported.

    Raises:
        ImportError: it is not installed.
    """
    with redirect_stdout(io.StringIO()):
        import deepspeed
    return deepspeed


def prebuilt_operations(deepspeed: Any) -> frozenset[str]:
    """What was compiled when the package was installed (`DS_BUILD_*`), so that nothing is on first use."""
    return frozenset(name for name, is_built in deepspeed.git_version_info.installed_ops.items() if is_built)


def build_root() -> Path:
    """Where torch compiles extensions, in folders by version."""
    from torch.utils.cpp_extension import get_default_build_root  # brings setuptools, which only a build needs

    return extensions_folder() or Path(get_default_build_root())


def missing_tools(path: str | None = None) -> list[str]:
    """What is not on the PATH (None: that of this process), of what compiling takes, and loading what was compiled."""
    return [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]


def abandoned_locks(root: Path) -> Iterator[tuple[Path, float]]:
    """Locks of builds of the CPU operation under `root`, so old that nobody can be building, with their age in minutes.

    Torch waits for such a lock without end, and in silence.
    """
    for lock in root.glob(f"**/{CPU_OPERATION}/lock"):
        with suppress(FileNotFoundError):  # whoever built has just ended
            minutes = (time.time() - lock.stat().st_mtime) / 60
            if minutes > _LONGEST_BUILD_MINUTES:
                yield lock, minutes
