"""`trainer` with one injected fault, which tests start as a rank or as the parent of local ranks.

`python faulty_run.py FAULT RANK STEP run RECIPE ...`: the fault happens on RANK in the optimizer step STEP. If the
environment variable FAULT_ONCE names a file, the fault creates it, and does not happen if it exists.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainer.cli import main
from trainer.engine.forward import ModelForward
from trainer.engine.native import NativeEngine
from trainer.features.deepspeed.engine import ZeroEngine
from trainer.training import agreement


def _raise(engine: Any) -> NoReturn:
    raise RuntimeError("the fault")


def _die(engine: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _terminate(engine: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _warn(engine: Any) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def _stop(engine: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _loop(engine: Any) -> NoReturn:
    def endless_loop() -> NoReturn:
        while True:
            time.sleep(0.001)

    endless_loop()


def _nan(engine: Any) -> None:
    with torch.no_grad():
        next(iter(engine.parameters.values())).fill_(float("nan"))


def _fill_the_disk(engine: Any) -> None:
    """Make every further write to `metrics.jsonl` fail as on a full disk."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and os.readlink(link).endswith("metrics.jsonl"):
            os.dup2(os.open("/dev/full", os.O_WRONLY), int(link.name))


def _fill_the_disk_of_events(engine: Any) -> None:
    """Make further TensorBoard events fail as on a full disk. TensorBoard opens its file again for each flush."""
    for file in (Path(sys.argv[5]).parent / "run" / "tensorboard").iterdir():
        file.unlink()
        file.symlink_to("/dev/full")


def _delete_the_folder(engine: Any) -> None:
    shutil.rmtree(Path(sys.argv[5]).parent / "run")


FAULTS: dict[str, Callable[[Any], None]] = {
    "raise": _raise,
    "die": _die,
    "terminate": _terminate,
    "warn": _warn,
    "stop": _stop,
    "loop": _loop,
    "nan": _nan,
    "full": _fill_the_disk,
    "full_events": _fill_the_disk_of_events,
    "gone": _delete_the_folder,
}


def _is_due(rank: str) -> bool:
    if os.environ.get("RANK", "0") != rank:
        return False
    once = os.environ.get("FAULT_ONCE")
    if once is None:
        return True
    if Path(once).exists():
        return False
    Path(once).touch()
    return True


def put_in(fault: str, rank: str, step: int) -> None:
    """Inject the fault on `rank` before step `step` is computed. `nan` fills one parameter with NaN."""
    for engine in (NativeEngine, ZeroEngine):
        _before_step(engine, FAULTS[fault], rank, step)


def _before_step(engine: Any, action: Callable[[Any], None], rank: str, step: int) -> None:
    begin_step = engine.begin_step

    def faulty(self: Any, *args: Any) -> Any:
        if self._step + 1 == step and _is_due(rank):
            action(self)
        return begin_step(self, *args)

    engine.begin_step = faulty


def put_in_bad_rows(rank: str, step: int) -> None:
    """Make the loss of the first microbatch of `rank` NaN, in training and when it is computed again."""
    loss_sum, begin_eval = ModelForward.loss_sum, ModelForward.begin_eval
    bad: list[Any] = []  # the tokens of the microbatch; other steps have rows of the same numbers

    def is_bad(self: ModelForward, microbatch: Any) -> bool:
        if os.environ.get("RANK", "0") != rank or self._step + 1 != step:
            return False
        tokens = microbatch.inputs["input_ids"]
        if not bad:
            bad.append(tokens)
        return torch.equal(tokens, bad[0])

    def faulty_loss_sum(self: ModelForward, microbatch: Any) -> Any:
        return loss_sum(self, microbatch) * (float("nan") if is_bad(self, microbatch) else 1.0)

    def faulty_begin_eval(self: ModelForward, microbatch: Any) -> Any:
        read = begin_eval(self, microbatch)
        return (lambda: replace(read(), loss_sum=float("nan"))) if is_bad(self, microbatch) else read

    ModelForward.loss_sum = faulty_loss_sum  # type: ignore[method-assign]
    ModelForward.begin_eval = faulty_begin_eval  # type: ignore[method-assign]


def put_in_other_code(rank: str) -> None:
    """Make `rank` report a different digest of its source files."""
    if os.environ.get("RANK", "0") == rank:
        agreement.source_digest = lambda: "0123456789ab"


def main_with_fault(words: Sequence[str]) -> int:
    """Run the program with the arguments `words`."""
    fault, rank, step, *argv = words
    if fault == "nan_loss":
        put_in_bad_rows(rank, int(step))
    elif fault == "other_code":
        put_in_other_code(rank)
    else:
        put_in(fault, rank, int(step))
    return main(argv)


if __name__ == "__main__":
    sys.exit(main_with_fault(sys.argv[1:]))
