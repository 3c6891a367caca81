"""Saves one checkpoint after the other until it is killed: what `test_store.py` starts.

`python endless_saver.py FOLDER KEEP`
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.checkpoint.samples import LARGE, newest, save
from trainer.checkpoint.store import CheckpointStore


def main() -> None:
    store = CheckpointStore(Path(sys.argv[1]), keep=int(sys.argv[2]))
    store.open()
    state, _ = newest(store)
    step = state.facts.progress.step if state else 0
    print("ready", flush=True)
    while True:
        step += 1
        save(store, step, num_elements=LARGE)


if __name__ == "__main__":
    main()
