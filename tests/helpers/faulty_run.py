"""`trainer`, with one fault put in: what `test_run.py` starts as ranks.

`python faulty_run.py FAULT RANK STEP run RECIPE ...`: the fault happens on RANK in the optimizer step STEP.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import torch

from trainer.cli import main
from trainer.engine.native import NativeEngine


def _raise() -> NoReturn:
    raise RuntimeError("the fault")


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


FAULTS = {"raise": _raise, "die": _die, "terminate": _terminate, "nan": None}


def put_in(fault: str, step: int) -> None:
    """Makes the fault happen before step `step` is computed; `nan` poisons the weights."""
    train_step = NativeEngine.train_step

    def faulty(self: NativeEngine, batch: Any) -> Any:
        if self._step + 1 == step:
            action = FAULTS[fault]
            if action is None:
                with torch.no_grad():
                    next(iter(self._parameters.values())).fill_(float("nan"))
            else:
                action()
        return train_step(self, batch)

    NativeEngine.train_step = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    fault, rank, step, *argv = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        put_in(fault, int(step))
    sys.exit(main(argv))
