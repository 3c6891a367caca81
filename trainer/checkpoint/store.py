"""Checkpoints in a run's folder: `checkpoints/step-00000120/` holds the tensors, the facts and their SHA-256 sums.

A checkpoint is written to a temporary folder, synced, and renamed, so that a kill at any moment leaves a complete one
or none. The sums lie in a file that `sha256sum --check` reads, so that damage is found when a checkpoint is read, by us
or by hand. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.checkpoint.progress import Progress
from trainer.errors import TrainerError

_FORMAT = 1
_TENSORS, _FACTS, _SUMS = "state.safetensors", "state.json", "SHA256SUMS"
_FOLDER_NAME = re.compile(r"step-([0-9]{8,})")
_UNFINISHED = ".saving-"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint in memory.

    `identity` says what is learned, from which data; a run only goes on from a checkpoint whose identity is its own.
    """

    tensors: Mapping[str, Tensor]
    progress: Progress
    identity: Mapping[str, Any]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sums(folder: Path) -> str:
    return "".join(f"{_digest(folder / name)}  {name}\n" for name in (_TENSORS, _FACTS))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointStore:
    """The checkpoints of one run; only rank 0 writes.

    Args:
        folder: of the run.
        keep: how many checkpoints stay; the oldest go first.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder / "checkpoints"
        self._keep = keep

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        matches = (_FOLDER_NAME.fullmatch(path.name) for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes one checkpoint, then removes those that are no longer needed.

        These are the oldest beyond `keep`, and any of a later step: the run went on from before it, because it was
        damaged, so it would now belong to another past.

        Raises:
            TrainerError: the folder cannot be written (full, or no permission); earlier checkpoints are as they were.
        """
        step = checkpoint.progress.step
        final = self.path(step)
        temporary = self.folder / f"{_UNFINISHED}{final.name}"
        try:
            self._remove_unfinished()
            temporary.mkdir(parents=True)
            _write(temporary, checkpoint)
            if final.exists():  # left by an earlier run that was resumed from before this step
                shutil.rmtree(final)
            temporary.rename(final)
            _sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise TrainerError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}; the last whole one is"
                f" {self._name_of_last()}. Make room or restore the permission, then start the run again"
            ) from error
        steps = self.steps()
        kept = [other for other in steps if other <= step][-self._keep :]
        for other in set(steps).difference(kept):
            shutil.rmtree(self.path(other), ignore_errors=True)
        return final

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and a note on each newer one that had to be passed over."""
        notes: list[str] = []
        for step in reversed(self.steps()):
            try:
                return _read(self.path(step)), notes
            except (OSError, ValueError, SafetensorError) as error:
                notes.append(f"passed over the checkpoint {self.path(step)}: {error}")
        return None, notes

    def _remove_unfinished(self) -> None:
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path)

    def _name_of_last(self) -> str:
        steps = self.steps()
        return f"that of step {steps[-1]}" if steps else "none"


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}, folder / _TENSORS)
    facts = {
        "format": _FORMAT,
        "progress": checkpoint.progress.to_json(),
        "identity": dict(checkpoint.identity),
    }
    (folder / _FACTS).write_text(json.dumps(facts, indent=2), encoding="utf-8")
    (folder / _SUMS).write_text(_sums(folder), encoding="ascii")
    for path in (folder / _TENSORS, folder / _FACTS, folder / _SUMS, folder):
        _sync(path)


def _read(folder: Path) -> Checkpoint:
    """Reads one checkpoint.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: it is damaged, or of another format.
    """
    if (folder / _SUMS).read_bytes() != _sums(folder).encode():
        raise ValueError(f"it is damaged: a file does not match its sum in {_SUMS}")
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    if facts["format"] != _FORMAT:
        raise ValueError(f"its format is {facts['format']}, this version reads {_FORMAT}")
    return Checkpoint(load_file(folder / _TENSORS), Progress.from_json(facts["progress"]), facts["identity"])
