"""Checkpoints on the disk, read and verified: sizes, checksums, and any part of their tensors."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.base.digests import file_digest
from trainer.base.text import is_shallow
from trainer.checkpoint.format import FACTS, FORMAT, MODEL_FOLDER, SUMS, Facts
from trainer.parallel.shards.boxes import Box, TensorPart

_SUM_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")
# A checkpoint may come from anyone. These are all names that it may list, and none leads out of its folder.
_SHARE_NAME = re.compile(r"state-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_MODEL_FILE_NAME = re.compile(rf"{MODEL_FOLDER}(/[A-Za-z0-9_-][A-Za-z0-9_.-]*){{1,2}}")
LARGEST_FACTS_BYTES = 1 << 30
_LONGEST_REASON = 200


def read_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file that `state.json` and `SHA256SUMS` name, without these two.

    Raises:
        OSError: one of the two is missing or cannot be read.
        ValueError: the checkpoint is damaged, or has another format.
    """
    sizes = _read_json(folder).get("files")
    if not isinstance(sizes, dict) or _read_sums(folder).keys() != {*sizes, FACTS}:
        raise ValueError(f"it is damaged: {FACTS} and {SUMS} name different files")
    if not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise ValueError(f"it is damaged: {FACTS} holds a wrong file size")
    return sizes


def verify(folder: Path, turn: int = 0, num_turns: int = 1) -> list[str]:
    """Verify sizes and checksums; the ranks share the large files, so every rank must succeed.

    Args:
        turn: the index of this rank; it reads every `num_turns`-th file.

    Returns:
        The names of the files, without `state.json` and `SHA256SUMS`.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: the checkpoint is damaged, or has another format.
    """
    sums, sizes = _read_sums(folder), read_sizes(folder)
    for name, size in sizes.items():
        num_bytes = _regular(folder / name).st_size
        if num_bytes != size:
            raise ValueError(f"it is damaged: {name} has {num_bytes} bytes and should have {size}")
    # All ranks must divide the same list.
    names = sorted(sizes)
    # Every rank uses `state.json`, so each verifies it; they share the other files.
    for name in (FACTS, *names[turn::num_turns]):
        if file_digest(folder / name) != sums[name]:
            raise ValueError(f"it is damaged: {name} does not match its checksum in {SUMS}")
    return names


BlockReader = Callable[[str, Sequence[Sequence[int]]], Tensor]
"""Reads the elements of the tensor with a key between two bounds along each dimension."""


@contextmanager
def open_blocks(file: Path) -> Iterator[BlockReader]:
    """Open a file of tensors for reading."""
    # The file is mapped, so a slice reads its own bytes only.
    with safe_open(file, framework="pt") as opened:

        def read(key: str, bounds: Sequence[Sequence[int]]) -> Tensor:
            places = tuple(slice(start, stop) for start, stop in bounds)
            # A scalar has no dimension to slice.
            block: Tensor = opened.get_slice(key)[places] if places else opened.get_tensor(key)
            return block

        yield read


@dataclass(frozen=True)
class SavedBox:
    """A block of a whole tensor in a file, named by `key` there."""

    file: Path
    key: str
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of_key(cls, file: Path, key: str, shape: tuple[int, ...]) -> SavedBox:
        """Return the block that a key describes.

        Raises:
            ValueError: the key describes none.
        """
        name, _, corner = key.rpartition("@")
        start = tuple(int(number) for number in corner.split(",") if number)
        if len(start) != len(shape) or any(number < 0 for number in start):
            raise ValueError(f"it is damaged: {key} is not a part of a tensor")
        return cls(file, key, name, start, shape)


class SavedBoxes:
    """A `StateSource` of saved blocks of tensors.

    Args:
        boxes: the blocks; together they are the whole tensors, each element once.

    Raises:
        ValueError: elements are missing or saved twice.
    """

    def __init__(self, folder: Path, facts: Facts, boxes: Iterable[SavedBox]) -> None:
        self.folder = folder
        self.facts = facts
        self._boxes: dict[str, list[SavedBox]] = {}
        for box in boxes:
            self._boxes.setdefault(box.name, []).append(box)
        self._refuse_incomplete()

    @property
    def files(self) -> set[Path]:
        """The files of the blocks."""
        return {box.file for boxes in self._boxes.values() for box in boxes}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.facts.shapes

    @property
    def scalars(self) -> Mapping[str, float]:
        return self.facts.scalars

    def fill(self, parts: Iterable[TensorPart]) -> None:
        """See `StateSource`. One file is open at a time; only the elements of `parts` are read.

        Raises:
            OSError, SafetensorError: a file cannot be read.
            ValueError: a tensor is missing, or has another type.
        """
        wanted: dict[Path, list[tuple[SavedBox, Box]]] = {}
        for part in parts:
            for box in part.boxes:
                num_elements = 0
                # The run may have another layout than the one that saved, so boxes overlap in any way.
                for saved in self._boxes.get(part.name, ()):
                    if number := prod(stop - start for start, stop in _overlap(saved, box)):
                        wanted.setdefault(saved.file, []).append((saved, box))
                        num_elements += number
                if num_elements != box.view.numel():
                    raise ValueError(f"{self.folder} lacks elements of {part.name}")
        # Each file is opened once for all boxes that need it.
        for file in sorted(wanted):
            with self.open_file(file) as read:
                for saved, box in wanted[file]:
                    _copy(read, saved, box)

    def read(self, name: str) -> Tensor:
        """Return one whole tensor in its saved type.

        Raises:
            OSError, SafetensorError: a file cannot be read.
        """
        shape = self.shapes[name]
        whole = torch.empty(shape, dtype=self._dtype(name))
        self.fill([TensorPart(name, shape, (Box((0,) * len(shape), whole),))])
        return whole

    def open_file(self, file: Path) -> AbstractContextManager[BlockReader]:
        """Open one of `files` for reading."""
        return open_blocks(file)

    def _dtype(self, name: str) -> torch.dtype:
        first = self._boxes[name][0]
        with self.open_file(first.file) as read:
            # A slice without elements has the type of the tensor.
            return read(first.key, [[0, 0], *([0, size] for size in first.shape[1:])][: len(first.shape)]).dtype

    def _refuse_incomplete(self) -> None:
        for name, shape in self.facts.shapes.items():
            boxes = self._boxes.get(name, [])
            for box in boxes:
                ends = [start + size for start, size in zip(box.start, box.shape, strict=False)]
                if len(box.start) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
                    raise ValueError(f"it is damaged: {box.key} lies outside of {name}")
            # The boxes of one save do not overlap, so the number of their elements tells whether any is missing.
            if sum(prod(box.shape) for box in boxes) != prod(shape):
                raise ValueError(f"it is damaged: the parts of {name} do not cover it")


class SavedState(SavedBoxes):
    """A `StateSource` that reads any part of a checkpoint from the disk.

    Args:
        folder: the folder of a verified checkpoint.
        step: its step; None: any.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: the files do not match `state.json`.
    """

    def __init__(self, folder: Path, step: int | None = None) -> None:
        described = _read_json(folder)
        self.file_names = sorted(described["files"])  # without `state.json` and `SHA256SUMS`
        super().__init__(folder, _facts_of(described, step), saved_boxes(folder, self.file_names))


def read_facts(folder: Path, step: int) -> Facts:
    """Return everything but the tensors of a verified checkpoint of a step.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: `state.json` is damaged.
    """
    return _facts_of(_read_json(folder), step)


def _facts_of(described: Mapping[str, Any], step: int | None) -> Facts:
    try:
        facts = Facts.from_json(described)
    except ValueError as error:
        raise ValueError(f"it is damaged: {FACTS} holds a wrong value: {_reason(error)}") from error
    if step not in (None, facts.progress.step):
        raise ValueError(f"it is damaged: {FACTS} is that of step {facts.progress.step}")
    return facts


def _reason(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'a group'}: {first['msg']}"[:_LONGEST_REASON]
    return str(error)


def saved_boxes(folder: Path, file_names: Iterable[str]) -> Iterator[SavedBox]:
    """Yield the blocks in the files of ranks in a folder.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a file is damaged.
    """
    for file in filter(_SHARE_NAME.fullmatch, file_names):
        try:
            yield from _boxes_of(folder / file)
        except SafetensorError as error:
            raise ValueError(f"it is damaged: {file}: {error}") from error


def open_verified(folder: Path, turn: int = 0, num_turns: int = 1, step: int | None = None) -> SavedState:
    """Return a checkpoint of a step after `verify`, with its arguments and errors; step None: of any step."""
    verify(folder, turn, num_turns)
    return SavedState(folder, step)


def _boxes_of(file: Path) -> Iterator[SavedBox]:
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118  # not a mapping
            yield SavedBox.of_key(file, key, tuple(opened.get_slice(key).get_shape()))


def _overlap(saved: SavedBox, box: Box) -> list[tuple[int, int]]:
    """Return start and stop of the overlap of two boxes along each dimension; equal if they do not overlap."""
    bounds = []
    for first, size, other_first, other_size in zip(saved.start, saved.shape, box.start, box.shape, strict=True):
        start = max(first, other_first)
        bounds.append((start, max(start, min(first + size, other_first + other_size))))
    return bounds


def _copy(read: BlockReader, saved: SavedBox, box: Box) -> None:
    bounds = _overlap(saved, box)
    target = box.view
    for dim, ((start, stop), first) in enumerate(zip(bounds, box.start, strict=True)):
        target = target.narrow(dim, start - first, stop - start)
    # The overlap, counted from the first element of the saved box.
    places = [[start - first, stop - first] for (start, stop), first in zip(bounds, saved.start, strict=True)]
    block = read(saved.key, places)
    # `copy_` would convert the numbers without a word.
    if block.dtype != target.dtype:
        raise ValueError(f"{saved.key} in {saved.file.name} has the type {block.dtype}, and must have {target.dtype}")
    target.copy_(block)


def _regular(path: Path) -> os.stat_result:
    """Return the status of a regular file; a pipe or a link in its place is damage, and a read could block."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"it is damaged: {path.name} is not a regular file")
    return status


def _read_json(folder: Path) -> dict[str, Any]:
    # Before it is read, since the checkpoint may come from anyone.
    if _regular(folder / FACTS).st_size > LARGEST_FACTS_BYTES:
        raise ValueError(f"it is damaged: {FACTS} is too long")
    try:
        described = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is damaged: {FACTS} is not JSON ({error})") from error
    # Readers descend into these values by recursion.
    if not is_shallow(described):
        raise ValueError(f"it is damaged: {FACTS} is nested too deeply")
    if not isinstance(described, dict) or "format" not in described:
        raise ValueError(f"it is damaged: {FACTS} has no format")
    if described["format"] != FORMAT:
        raise ValueError(f"its format is {described['format']}, but this version reads {FORMAT}")
    return described


def _read_sums(folder: Path) -> dict[str, str]:
    """Return the checksums by file name; a name outside of the checkpoint is damage."""
    _regular(folder / SUMS)
    sums = {}
    for line in (folder / SUMS).read_bytes().decode("ascii", "replace").splitlines(keepends=True):
        # The last line of a file that was cut has no line break.
        match = _SUM_LINE.fullmatch(line.removesuffix("\n"))
        name = match[2] if match else ""
        if not match or not line.endswith("\n") or not _is_summed(name) or name in sums:
            raise ValueError(f"it is damaged: {SUMS} holds a line that is not a checksum")
        sums[name] = match[1]
    return sums


def _is_summed(name: str) -> bool:
    return name == FACTS or bool(_SHARE_NAME.fullmatch(name) or _MODEL_FILE_NAME.fullmatch(name))
