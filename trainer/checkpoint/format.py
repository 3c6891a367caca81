"""The files of one checkpoint: names, contents and writing. Nothing is pickled; `reading.py` reads them.

- `state-00001-of-00004.safetensors`: the boxes of rank 1 of 4, each named by its tensor and its first element in it.
- `state.json`: everything but tensors.
- `model/`: the configuration and the tokenizer.
- `SHA256SUMS`: the checksums of all files, in the format of `sha256sum --check`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from trainer.base.digests import file_digest
from trainer.base.disk import save_tensors, sync
from trainer.checkpoint.counters import Count, Progress
from trainer.parallel.shards.boxes import TensorPart, own_share

FORMAT = 2
FACTS, SUMS, MODEL_FOLDER = "state.json", "SHA256SUMS", "model"


@dataclass(frozen=True)
class WrittenFile:
    """A written and synced file of a checkpoint; `name` is relative to the checkpoint's folder."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Facts:
    """The contents of a checkpoint except its tensors.

    `identity` defines the training: a run resumes only from a checkpoint with its own identity. `shapes` are the
    shapes of the whole tensors. `origin` has the recipe, layout and versions of the run that saved it, for information.
    """

    progress: Progress
    identity: Mapping[str, Any]
    origin: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    scalars: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "progress": self.progress.to_json(),
            "identity": dict(self.identity),
            "origin": dict(self.origin),
            "scalars": dict(self.scalars),
            "tensors": {name: list(shape) for name, shape in sorted(self.shapes.items())},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Facts:
        """Return the facts of the values that `to_json` gave, which may come from anyone.

        Raises:
            ValueError: a value is missing, or has another type than a checkpoint's.
        """
        read = {name: kind.validate_python(values.get(name)) for name, kind in _KINDS.items()}
        progress = Progress.from_json(read["progress"])
        return cls(progress, read["identity"], read["origin"], read["tensors"], read["scalars"])


_OBJECT = TypeAdapter(dict[str, Any])
_KINDS: Mapping[str, TypeAdapter[Any]] = {
    "progress": _OBJECT,
    "identity": _OBJECT,
    "origin": _OBJECT,
    "scalars": TypeAdapter(dict[str, float]),
    "tensors": TypeAdapter(dict[str, tuple[Count, ...]]),
}


def share_name(rank: int, world_size: int) -> str:
    """Return the name of the file that one rank writes."""
    return f"state-{rank:05d}-of-{world_size:05d}.safetensors"


def snapshot(parts: Sequence[TensorPart]) -> dict[str, Tensor]:
    """Return CPU copies of the boxes that this rank saves, by the keys of its file."""
    return {
        # A copy, so that training goes on while it is written; safetensors takes contiguous tensors only.
        _key(part.name, box.start): box.view.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for part, box in own_share(parts)
    }


def write_share(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write and sync the file of one rank.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    save_tensors(tensors, folder / name)
    return written(folder, name)


def write_bytes(folder: Path, name: str, content: bytes) -> WrittenFile:
    """Write and sync a small file.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return written(folder, name)


def written(folder: Path, name: str) -> WrittenFile:
    """Sync a file and read it again, so its checksum is that of the bytes on the disk."""
    sync(folder / name)
    return WrittenFile(name, (folder / name).stat().st_size, file_digest(folder / name))


def seal(folder: Path, facts: Facts, files: Iterable[WrittenFile]) -> None:
    """Write `state.json`, with the sizes of all files, and `SHA256SUMS`, which complete a checkpoint.

    Raises:
        OSError: a file cannot be written.
    """
    files = sorted(files, key=lambda file: file.name)
    described = {**facts.to_json(), "files": {file.name: file.num_bytes for file in files}}
    files.append(write_bytes(folder, FACTS, json.dumps(described, indent=1).encode()))
    # Written last, since the sums cover `state.json` too.
    (folder / SUMS).write_text("".join(f"{file.sha256}  {file.name}\n" for file in files), encoding="ascii")
    # A synced file may still lack its entry in its folder, so the folders are synced too.
    for place in {folder / SUMS, *((folder / file.name).parent for file in files)}:
        sync(place)


def _key(name: str, start: tuple[int, ...]) -> str:
    return f"{name}@{','.join(map(str, start))}"
