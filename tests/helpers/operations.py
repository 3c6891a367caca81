"""DeepSpeed's compiled operation, built once in one folder for all workers of a test run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

OPERATION = "deepspeed_shm_comm"  # `deepspeed.init_distributed` loads it on machines without a GPU
_FOLDER_VARIABLE = "TORCH_EXTENSIONS_DIR"
_BUILD = f"from deepspeed.ops.op_builder.all_ops import ALL_OPS; ALL_OPS[{OPERATION!r}].load(verbose=False)"
_BUILD_SECONDS = 600.0


def build(config: pytest.Config) -> None:
    """Build the operation in a folder of this test run before its workers start, and let the workers use it.

    If a build is killed, its lock stays in this folder; in the user's folder it would block every later run. The
    user's folder is a cache: its build is copied, and ninja rebuilds only outdated objects.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return
    folder = Path(config._tmp_path_factory.getbasetemp()) / "extensions"  # type: ignore[attr-defined]
    cache = _cache()
    if cache is not None and _is_whole(cache):
        shutil.copytree(cache, folder / OPERATION)
    folder.mkdir(exist_ok=True)
    os.environ[_FOLDER_VARIABLE] = str(folder)
    nothing = subprocess.DEVNULL
    # A build that fails is reported by the tests that need it, and by `trainer doctor`.
    with suppress(subprocess.TimeoutExpired):
        command = [sys.executable, "-c", _BUILD]
        subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, timeout=_BUILD_SECONDS, check=False)
    if cache is not None and _is_whole(folder / OPERATION) and not _is_whole(cache):
        with suppress(OSError):  # another build exists or has begun, or the cache is not writable
            part = cache.with_name(f"{OPERATION}.{os.getpid()}")
            shutil.copytree(folder / OPERATION, part)
            part.rename(cache)


def _cache() -> Path | None:
    """Return the folder in which torch builds the operation by default, or None if it cannot be created."""
    from torch.utils.cpp_extension import _get_build_directory

    try:
        return Path(_get_build_directory(OPERATION, verbose=False))
    except OSError:
        return None


def _is_whole(built: Path) -> bool:
    return (built / f"{OPERATION}.so").exists() and not (built / "lock").exists()
