"""A process that saves checkpoints until it is killed, which `test_store.py` starts."""

from __future__ import annotations

from multiprocessing.synchronize import Event
from pathlib import Path

from tests.checkpoint.samples import LARGE, newest, save
from trainer.checkpoint.store import CheckpointStore


def save_without_end(folder: Path, keep: int, ready: Event) -> None:
    store = CheckpointStore(folder, keep)
    store.open()
    state, _ = newest(store)
    step = state.facts.progress.step if state else 0
    ready.set()
    while True:
        step += 1
        save(store, step, num_elements=LARGE)
