"""The installed package deepspeed: its import, and the operations that it compiles on first use."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from trainer.base.collector import importing
from trainer.base.distribution import install_command
from trainer.base.errors import TrainerError, UsageError, storage_error
from trainer.base.owned_lock import UNSUPPORTED, OwnedLock
from trainer.ranks.environment import extensions_folder, own_programs_first, set_local_rank

CPU_OPERATION = "deepspeed_shm_comm"
"""The operation that DeepSpeed compiles for CPUs; on GPUs the trainer needs none."""

_TOOLS = ("g++", "ninja")
_QUIET_SECONDS = 2.0  # a rank that only loads the operation has the lock for less
_POLL_SECONDS = 0.1


def import_deepspeed() -> Any:
    """Return the package, without the lines that it prints and logs.

    Raises:
        ImportError: it is not installed.
    """
    with redirect_stdout(io.StringIO()), _without_mlflow(), importing():
        import deepspeed
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
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mlflow"]


@contextmanager
def linear_restored() -> Iterator[None]:
    """Give back torch's linear function after the block, which stage 3 of ZeRO replaces in the whole process."""
    from torch.nn import functional  # the module serves `trainer doctor` too, which works without torch

    linear = functional.linear
    try:
        yield
    finally:
        functional.linear = linear


def ready_deepspeed(local_rank: int, on_cpu: bool) -> Any:
    """Return DeepSpeed, with its operation for CPUs compiled and loaded.

    Call it before the ranks join a process group, because a build may take minutes, and a signal may then end it.

    Raises:
        UsageError: it is not installed, or the build tools are missing.
        TrainerError: the operation cannot be compiled.
    """
    set_local_rank(local_rank)
    try:
        deepspeed = import_deepspeed()
    except ImportError as error:
        raise UsageError(
            "`parallel.strategy` zero1, zero2 and zero3 need the package deepspeed; install it"
            f" ({install_command('deepspeed')}) or use fsdp ({error})"
        ) from error
    if on_cpu and CPU_OPERATION not in prebuilt_operations(deepspeed) and sys.platform == "linux":
        for tool in missing_tools():
            raise UsageError(
                f"DeepSpeed compiles an operation for the CPU on first use, but {tool} is not on the PATH; install"
                " it, or use `parallel.strategy` fsdp"
            )
        _load_operation(speaks=local_rank == 0)
    return deepspeed


def prebuilt_operations(deepspeed: Any) -> frozenset[str]:
    """Return the operations that were compiled at installation (`DS_BUILD_*`)."""
    return frozenset(name for name, is_built in deepspeed.git_version_info.installed_ops.items() if is_built)


def build_root() -> Path:
    """Return the folder in which torch compiles extensions."""
    from torch.utils.cpp_extension import get_default_build_root  # imports setuptools, which only a build needs

    return extensions_folder() or Path(get_default_build_root())


def missing_tools(path: str | None = None) -> list[str]:
    """Return the build tools that are neither on `path` (None: the PATH of this process) nor beside this Python."""
    beside = str(Path(sys.executable).parent)  # the build finds them there: `own_programs_first`
    return [tool for tool in _TOOLS if not (shutil.which(tool, path=path) or shutil.which(tool, path=beside))]


def build_lock(root: Path) -> OwnedLock:
    """Return the trainer's lock on builds under `root`; its record names the process that compiles."""
    return OwnedLock(root / f".{CPU_OPERATION}.owner.json")


def torch_locks(root: Path) -> Iterator[tuple[Path, int | None]]:
    """Yield torch's locks of the CPU operation under `root`, each with the process of this machine that has it open.

    Torch keeps the file open while it compiles. It waits for a file without a process, too: without a time limit and
    without a message.
    """
    for lock in root.glob(f"**/{CPU_OPERATION}/lock"):
        yield lock, _process_that_opened(lock)


def _load_operation(speaks: bool) -> None:
    """Compile the CPU operation if that is needed, and load it; one process at a time.

    Args:
        speaks: whether this process tells of its wait for another; the ranks of a machine wait for the same one.
    """
    root = build_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(build_lock(root), speaks) as is_alone:
            for lock, process in torch_locks(root):
                if process is None:
                    _remove(lock, is_alone)
                else:
                    _await_process(lock, process)
            if not any(root.glob(f"**/{CPU_OPERATION}/{CPU_OPERATION}.so")):
                _say(f"DeepSpeed compiles {CPU_OPERATION} on first use; this takes a minute or two")
            _load()
    except OSError as error:
        raise storage_error(
            f"DeepSpeed compiles an operation for the CPU in {root}, but that folder cannot be used"
            f" ({error.strerror}); make room there, or set TORCH_EXTENSIONS_DIR to a writable folder",
            error,
        ) from error


def _load() -> None:
    from deepspeed.accelerator import get_accelerator

    try:
        # Two versions of ninja would each compile again what the other has built.
        with redirect_stdout(io.StringIO()), own_programs_first():
            get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    except (RuntimeError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainerError(
            f"DeepSpeed could not compile {CPU_OPERATION} in {build_root()}: {' '.join(lines[:8])}; see"
            " `trainer doctor`, or use `parallel.strategy` fsdp"
        ) from error


@contextmanager
def _alone(lock: OwnedLock, speaks: bool) -> Iterator[bool]:
    """Hold the lock in the block, and yield whether the file system has locks at all."""
    quiet_until = time.monotonic() + _QUIET_SECONDS
    try:
        while not lock.try_take():
            if speaks and time.monotonic() > quiet_until:
                _say(f"waiting for {lock.owner() or 'another process'}, which compiles {CPU_OPERATION}")
                speaks = False
            time.sleep(_POLL_SECONDS)
        has_locks = True
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        has_locks = False
    try:
        yield has_locks
    finally:
        lock.release()


def _remove(lock: Path, is_alone: bool) -> None:
    """Remove the torch lock of a killed build."""
    if not is_alone:
        raise TrainerError(
            f"DeepSpeed would wait for {lock}, which no process of this machine has open; if no other machine"
            " compiles there, delete the file"
        )
    with suppress(FileNotFoundError):  # the build has just ended
        lock.unlink()
        _say(f"removed {lock}: the build that held it was killed")


def _await_process(lock: Path, process: int) -> None:
    """Wait for the build of a program that does not take the trainer's lock."""
    _say(f"waiting for process {process} on this machine, which compiles {CPU_OPERATION}")
    while lock.exists() and _process_that_opened(lock) is not None:
        time.sleep(_POLL_SECONDS)
    with suppress(FileNotFoundError):  # that process was killed
        lock.unlink()


def _process_that_opened(file: Path) -> int | None:
    """Return a process of this machine and user that has the file open."""
    name = str(file.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) == name:
                        return int(process.name)
    return None


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
