"""A save that is killed before each of its changes to the file system, each time in a new process.

`main([FOLDER, STEP])`: step 1 is saved, then the save of STEP is killed. Each change prints a line with
its number and the step of the newest complete checkpoint. `damaged` replaces the step if a checkpoint is damaged or
none is complete. The last line is `done`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import safetensors.torch

from tests.checkpoint.samples import LARGE, is_whole, newest, save
from trainer.checkpoint.store import CheckpointStore


def kill_before(call: int) -> None:
    """Let this process kill itself before its change number `call` to the file system, from any code."""
    calls = count(1)

    def counted(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return run

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    for name in ("write_bytes", "write_text"):
        setattr(Path, name, counted(getattr(Path, name)))
    safetensors.torch.save_file = counted(safetensors.torch.save_file)


def was_killed(store: CheckpointStore, step: int, call: int) -> bool:
    """Return whether a save of `step` was killed, which means that it makes at least `call` changes."""
    child = os.fork()
    if child == 0:
        kill_before(call)
        save(store, step, num_elements=LARGE)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main(words: Sequence[str]) -> None:
    folder, step = Path(words[0]), int(words[1])
    for call in count(1):
        store = CheckpointStore(folder / str(call), keep=1)
        store.open()
        save(store, 1, num_elements=LARGE)
        killed = was_killed(store, step, call)
        store.open()
        state, problems = newest(store)
        found = state.facts.progress.step if state else 0
        print(call, "damaged" if problems or not is_whole(state, found, LARGE) else found)
        save(store, 3, num_elements=LARGE)
        assert sorted(os.listdir(store.folder)) == ["latest", "step-00000003"], "the next save finds nothing in its way"
        if not killed:
            print("done")
            return
