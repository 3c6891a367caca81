"""Saves one checkpoint after the other until it is killed: what `test_store.py` starts.

`python endless_saver.py FOLDER KEEP`: every tensor of the checkpoint of step N is filled with N, so that a mixture
shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from trainer.checkpoint.progress import Progress
from trainer.checkpoint.store import Checkpoint, CheckpointStore


def checkpoint(step: int) -> Checkpoint:
    tensors = {f"tensor{index}": torch.full((20_000,), float(step)) for index in range(10)}
    return Checkpoint(tensors, Progress(step=step, samples=8 * step), {"seed": 1})


def main() -> None:
    store = CheckpointStore(Path(sys.argv[1]), keep=int(sys.argv[2]))
    newest, _ = store.newest()
    step = newest.progress.step if newest else 0
    print("ready", flush=True)
    while True:
        step += 1
        store.save(checkpoint(step))


if __name__ == "__main__":
    main()
