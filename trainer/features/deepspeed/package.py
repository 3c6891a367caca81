"""The import of the package deepspeed."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any

from trainer.base.collector import importing
from trainer.base.distribution import install_command
from trainer.base.errors import UsageError

_UNUSED = "deepspeed_shm_comm"
"""The operation that DeepSpeed compiles on CPUs when ranks meet; only its inference calls it."""


def import_deepspeed() -> Any:
    """Return the package, without the lines that it prints and logs.

    Raises:
        ImportError: it is not installed.
    """
    with redirect_stdout(io.StringIO()), _without_mlflow(), importing():
        import deepspeed
    deepspeed.ops.__compatible_ops__[_UNUSED] = False  # a build takes minutes, a compiler and a writable cache
    deepspeed.utils.nvtx.enable_nvtx = False  # stage 3 opens thousands of ranges for NVIDIA's profiler in each step
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # the import resets the level
    # DeepSpeed calls collectives by deprecated names; a user cannot change that.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


@contextmanager
def _without_mlflow() -> Iterator[None]:
    """Let an import of mlflow fail: DeepSpeed's autotuner tries one, which takes longer than DeepSpeed itself."""
    if "mlflow" in sys.modules:
        yield
        return
    # Python raises ImportError for a module that is None in this table.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mlflow"]


@contextmanager
def linear_restored() -> Iterator[None]:
    """Give back torch's linear function after the block, which stage 3 of ZeRO replaces in the whole process."""
    from torch.nn import functional

    linear = functional.linear
    try:
        yield
    finally:
        functional.linear = linear


def set_variables(number: int | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that DeepSpeed reads, one of them to the number of this rank's GPU; None: it has none."""
    # Unless it is set, ZeRO-3 on CPUs starts `numactl` in each microbatch. Only quantised messages use the number.
    environ.setdefault("LOCAL_SIZE", environ.get("LOCAL_WORLD_SIZE", "1"))
    if number is None:
        environ.setdefault("LOCAL_RANK", "0")
    else:
        environ["LOCAL_RANK"] = str(number)


def ready(number: int) -> AbstractContextManager[None]:
    """Import DeepSpeed, and return the context of a training; see `ready_deepspeed`."""
    ready_deepspeed(number)
    return linear_restored()


def ready_deepspeed(number: int | None) -> Any:
    """Return DeepSpeed, with the variables that it reads set.

    Raises:
        UsageError: it is not installed.
    """
    set_variables(number)
    try:
        return import_deepspeed()
    except ImportError as error:
        raise UsageError(
            "`parallel.strategy` zero1, zero2 and zero3 need the package deepspeed; install it"
            f" ({install_command('deepspeed')}) or use fsdp ({error})"
        ) from error
