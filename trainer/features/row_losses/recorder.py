"""The record of a run's rows: files in its folder `rows`, one for each rank that computes losses and each start.

A file is a line of JSON, which names the fields of a record and the classes, and then records of fixed size. The name
of a file has the step of the start. Steps from a later start on are not read from files of earlier starts.
A record names step and place in the global batch, and seed and step give the row, as for the training itself.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.engine.forward import ModelForward
from trainer.features.row_losses.measures import Kind, kind_of, measured
from trainer.models.place import PlacedModel
from trainer.parallel.copying import begin_to_host
from trainer.parallel.microbatch import Microbatch
from trainer.recipe.schema import Recipe

_TYPES = {"label": "<i4", "believed": "<i4", "position": "<i4", "probabilities": "<f2"}  # others: <f4
_MOST_BEGUN = 16  # copies from a GPU that are not read yet
_FILE = re.compile(r"from-(\d+)-rank-(\d+)\.rows")


def record(built: PlacedModel, recipe: Recipe) -> None:
    """Let the forward passes of a model record the rows."""
    built.watchers.append(RowRecorder)


class RowRecorder:
    """The record of the rows of this rank; see `RowWatcher`.

    Tensor ranks of the same rows compute the same, and the first of them writes.
    """

    def __init__(self, forward: ModelForward) -> None:
        self._forward = forward
        self._folder = Path(forward.plan.recipe.checkpoint.folder) / "rows"
        self._begun: list[tuple[int, Callable[[], dict[str, Tensor]]]] = []
        self._records: list[NDArray[Any]] = []
        self._kind: Kind | None = None
        self._first: int | None = None  # the number of steps before the first one that is recorded here
        self._file: Path | None = None
        self._is_begun, self._fails = False, False

    def watch(self, step: int, microbatch: Microbatch, scores: Tensor) -> None:
        task = self._forward.eval_task
        if task.rows_depend:
            raise UsageError(
                "`logging.rows` must be false for a loss of rows that depends on the other rows of a batch, but is"
                " true; set it to false"
            )
        if type(scores) is not Tensor:  # a plan has tensors of another class, without values
            return
        labels = microbatch.labels.to(scores.device)
        self._kind = self._kind or kind_of(task, scores, labels)
        self._first = step if self._first is None else self._first
        found = measured(self._kind, task, scores, labels)
        if self._forward.mesh.index("tp") == 0:
            self._begun.append((step, begin_to_host({"place": microbatch.rows, **found})))
        while len(self._begun) > _MOST_BEGUN:
            self._read()

    def store(self) -> None:
        mesh = self._forward.mesh
        if self._file is None:
            # A collective: ranks of other pipeline stages have no rows.
            first = mesh.agree_max(-1 if self._first is None else self._first)
            if first < 0:
                return
            self._file = self._folder / f"from-{first:09d}-rank-{mesh.rank:05d}.rows"
            if mesh.rank == 0:
                self._remove_later(first)
        while self._begun:
            self._read()
        records, self._records = self._records, []
        if not records or self._fails:
            return
        try:
            self._write(self._file, np.concatenate(records))
        except OSError as error:
            self._fails = True
            warnings.warn(f"`logging.rows` ends, because {self._file} cannot be written: {error}", stacklevel=1)

    def _read(self) -> None:
        step, read = self._begun.pop(0)
        found = {name: tensor.numpy() for name, tensor in read().items()}
        others = [name for name in found if name not in ("place", "loss")]
        types = [(name, _TYPES.get(name, "<f4"), found[name].shape[1:]) for name in others]
        dtype: Any = [("step", "<u4"), ("place", "<u4"), ("loss", "<f4"), *types]
        records: NDArray[Any] = np.empty(len(found["place"]), dtype)
        records["step"] = step
        for name, values in found.items():
            records[name] = values
        self._records.append(records)

    def _write(self, file: Path, records: NDArray[Any]) -> None:
        if not self._is_begun:
            header = {
                "version": 1,
                "kind": self._kind,
                "fields": records.dtype.descr,
                "classes": list(self._forward.eval_task.class_names or ()),
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # it may be a link
            file.write_bytes(json.dumps(header).encode() + b"\n")
            self._is_begun = True
        with file.open("ab") as out:
            out.write(records.tobytes())
            out.flush()
            os.fsync(out.fileno())

    def _remove_later(self, first: int) -> None:
        """Remove files of an earlier training in this folder, from later starts or of further ranks."""
        size = self._forward.plan.layout.world_size
        for path in self._folder.glob("*.rows"):
            name = _FILE.fullmatch(path.name)
            if name and (int(name[1]) > first or (int(name[1]) == first and int(name[2]) >= size)):
                path.unlink(missing_ok=True)
