"""The tier of checkpoints in the run's folder, from which every run can resume."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from trainer.base.errors import TrainerError, UsageError
from trainer.checkpoint.format import MODEL_FOLDER, Facts, WrittenFile, share_name, write_bytes, write_share
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tier import Background, Found, Snapshot, WritingTier, gather_shapes
from trainer.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from trainer.checkpoint.reading import SavedBoxes


class Disk(WritingTier[list[WrittenFile]]):
    """The checkpoints in a run's folder.

    Args:
        model_files: the configuration and the tokenizer by file name, for an export without the original model.
        asynchronous: whether the training continues while a thread writes a copy in CPU memory.
        check_owner: raises an error on rank 0 if the folder no longer belongs to this run.
    """

    def __init__(
        self,
        store: CheckpointStore,
        mesh: ParallelMesh,
        model_files: Mapping[str, bytes] | None = None,
        asynchronous: bool = True,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(mesh)
        self.store = store
        self._model_files = model_files or {}
        self._asynchronous = asynchronous
        self._check_owner = check_owner

    def open(self, resumes: bool) -> list[str]:
        """See `Tier`. The ranks compare folders by a file of rank 0: two empty folders have the same checkpoints.

        Raises:
            UsageError: the folder cannot be written, or is another one on some ranks.
        """
        marker = self._mesh.on_rank_zero(self._open)
        sees = self.store.sees(marker)
        hosts = self._mesh.all_gather(None if sees else socket.gethostname())
        # The gathering has shown that all ranks have looked.
        if self._mesh.rank == 0:
            self.store.remove_marker(marker)
        if others := [rank for rank, host in enumerate(hosts) if host is not None]:
            names = ", ".join(dict.fromkeys(hosts[rank] for rank in others))
            raise UsageError(
                f"`checkpoint.folder` must be one folder for all ranks, but {self.store.folder} is another one"
                f" for rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} on {names} than for rank 0:"
                " they do not see a file that rank 0 created; use a file system that the nodes share"
            )
        return []

    def _open(self) -> str:
        with self.store.must_be_writable():
            self.store.open()
            return self.store.make_marker()

    def checkpoints(self) -> list[Found]:
        return [Found(step, f"the checkpoint {self.store.path(step)}") for step in self._mesh.share(self.store.steps())]

    def read(self, checkpoint: Found) -> tuple[SavedBoxes | None, list[str]]:
        """See `Tier`; each rank verifies its part of the files."""
        from trainer.checkpoint.reading import open_verified

        state, problem = None, ""
        try:
            state = open_verified(
                self.store.path(checkpoint.step), self._mesh.rank, self._mesh.world_size, checkpoint.step
            )
        except (OSError, ValueError) as error:
            problem = str(error)
        # One damaged file spoils the checkpoint, which all ranks must skip together.
        problems = [message for message in self._mesh.all_gather(problem) if message]
        return (None, problems) if problems else (state, [])

    def save(self, step: int, snapshot: Snapshot) -> None:
        """See `Tier`.

        Raises:
            TrainerError: this checkpoint or the previous one cannot be written.
        """
        # One checkpoint is written at a time, so that a rank holds one copy of its state at most.
        self.finish()
        # All ranks write into this folder, so it must be there before any of them starts a thread.
        self._mesh.on_rank_zero(lambda: self._or_fail(step, lambda: self.store.begin(step)))
        facts, tensors = snapshot()
        folder = self.store.unfinished_path(step)
        self._writing = facts, Background(lambda: self._write(folder, tensors))
        if not self._asynchronous:
            self.finish()

    def _write(self, folder: Path, tensors: Mapping[str, Tensor]) -> list[WrittenFile]:
        files = [write_share(folder, share_name(self._mesh.rank, self._mesh.world_size), tensors)]
        if self._mesh.rank == 0:
            for name, content in self._model_files.items():
                files.append(write_bytes(folder, f"{MODEL_FOLDER}/{name}", content))
        return files

    def _complete(self, facts: Facts, writing: Background[list[WrittenFile]]) -> None:
        # Rank 0 seals the checkpoint, for which it needs the checksums of all files.
        gathered = self._mesh.gather([asdict(file) for file in writing.result or []])
        shapes = gather_shapes(self._mesh, facts.shapes)

        def complete() -> None:
            files = [WrittenFile(**file) for files in gathered or [] for file in files]
            self.store.complete(replace(facts, shapes=shapes), files)

        self._mesh.on_rank_zero(lambda: self._or_fail(facts.progress.step, complete))

    def _fail(self, step: int, writing: Background[list[WrittenFile]]) -> None:
        failure = f"rank {self._mesh.rank}: {writing.error}" if writing.error else None
        failures = [message for message in self._mesh.gather(failure) or [] if message]
        self._mesh.on_rank_zero(lambda: self._refuse(step, failures[0], writing.error))

    def _or_fail(self, step: int, action: Callable[[], object]) -> None:
        # Before each write, because another run may have taken over the folder meanwhile.
        self._check_owner()
        try:
            action()
        except OSError as error:
            self._refuse(step, f"rank 0: {error}", error)

    def _refuse(self, step: int, why: str, error: Exception | None) -> None:
        self.store.discard(step)
        raise TrainerError(
            f"the checkpoint of step {step} could not be written to {self.store.folder}: {why}; the last complete"
            f" one is {self.store.name_of_last()}. Make room or restore the folder and its permissions, then start the"
            " run again"
        ) from error
