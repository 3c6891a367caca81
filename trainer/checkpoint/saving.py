"""Checkpoints of a run: saving the state, and resuming from it."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from trainer.base.errors import TrainerError, UsageError, storage_error
from trainer.base.text import dotted_leaves, listed
from trainer.checkpoint.background import FAILED, WRITING, Background
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.format import (
    MODEL_FOLDER,
    Facts,
    SavedBoxes,
    WrittenFile,
    open_verified,
    share_name,
    snapshot,
    write_bytes,
    write_share,
)
from trainer.checkpoint.host_memory import Found, HostMemory, MemoryState
from trainer.checkpoint.mirror import Mirror
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.engine import Engine
from trainer.engine.state import MODEL_PREFIX, EngineState
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.shards.boxes import own_share
from trainer.parallel.shards.digest import joined, own_digest
from trainer.recipe.schema import Recipe

# Keys that do not change the training: a run may resume with other values.
_HOW = (
    "name", "parallel", "activation_checkpointing", "compile", "cuda_graphs", "evaluation", "checkpoint", "logging",
    "data",
)  # fmt: skip
_HOW_TRAINING = ("micro_batch_size", "micro_batch_tokens", "stop_at_step", "check_replicas", "max_bad_steps")
_WHERE_MODEL = ("name_or_path", "tokenizer", "revision")  # the weights are the checkpoint's
_MEASURED = ("metrics",)
_MOST, _LONGEST = 20, 200  # differences in a message, and characters of one of their values
_ROWS = "data.train"  # the key of the hash of rows in an identity
FROZEN_WEIGHTS = "frozen_weights"
"""The key of the digest of frozen weights in `model` of an identity, if the recipe freezes weights."""


def identity(
    recipe: Recipe, content_hash: str, beside: Mapping[str, str | None] | None = None, teacher: str | None = None
) -> dict[str, Any]:
    """Return the facts that define a training; they are equal for two runs that may share a checkpoint.

    Args:
        recipe: the recipe of the run.
        content_hash: the hash of the prepared training split.
        beside: further facts of the model by name, outside of training and checkpoints; None for a missing one.
        teacher: the digest of the weights of `distillation.teacher`, which stands for its place.
    """
    sections = recipe.model_dump(mode="json", exclude=set(_HOW))
    for section, keys in (("training", _HOW_TRAINING), ("model", _WHERE_MODEL), ("task", _MEASURED)):
        for key in keys:
            del sections[section][key]
    if teacher is not None:
        sections["distillation"] |= {"teacher": teacher, "revision": None}
    sections["model"] |= {name: fact for name, fact in (beside or {}).items() if fact is not None}
    data: dict[str, Any] = {"group_by_length": recipe.data.group_by_length, "train": content_hash}
    if weights := recipe.data.source_weights:
        data["mixture"] = weights
    return {**sections, "data": data}


@dataclass(frozen=True)
class Saved:
    """The contents of every checkpoint of a run, except its state.

    `identity` is the result of the function of that name. `origin` describes the run that saves it, for information.
    `model_files` are the configuration and the tokenizer by file name, for an export without the original model.
    """

    identity: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)
    model_files: Mapping[str, bytes] = field(default_factory=dict)


class Saver:
    """The saver of the engine's state and the run's progress, which also restores them.

    Args:
        store: the checkpoints of the run's folder.
        engine: the engine to save and restore.
        mesh: the ranks.
        saved: the rest of each checkpoint.
        asynchronous: whether the training continues while a thread writes a copy in CPU memory.
        check_owner: raises an error on rank 0 if the folder no longer belongs to this run.
        mirror: the URL of copies; None: there are none.
        memory: the checkpoints in the memory of the hosts; None: there are none.
        note: shows a note on rank 0.
        progress: the counters of the run; `resume` sets them.

    Raises:
        TrainerError: `mirror` cannot be opened; on every rank.
    """

    def __init__(
        self,
        store: CheckpointStore,
        engine: Engine,
        mesh: ParallelMesh,
        saved: Saved,
        asynchronous: bool = True,
        check_owner: Callable[[], None] = lambda: None,
        mirror: str | None = None,
        memory: HostMemory | None = None,
        note: Callable[[str], None] = warnings.warn,
        progress: Progress | None = None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._mesh = mesh
        self._saved = saved
        self._asynchronous = asynchronous
        self._check_owner = check_owner
        self._is_mirrored = bool(mirror)
        self._mirror: Mirror | None = None
        if mirror:
            mesh.on_rank_zero(lambda: self._open_mirror(mirror))
        self.note = note
        self._memory = memory
        self._facts: Facts | None = None  # of the checkpoint that is being written
        self._share: Background[list[WrittenFile]] | None = None
        self._frozen: str | None = None  # the digest, computed once
        self.progress = Progress() if progress is None else progress
        self._num_failed = 0  # checkpoints that could not be written to memory
        self._is_saved = False  # whether this run has loaded or saved a checkpoint
        self._is_in_memory_only = False  # whether the state that was loaded is in memory, but not on the disk

    @property
    def has_checkpoint(self) -> bool:
        """Whether a complete checkpoint of this run exists, on the disk or in memory."""
        return self._is_saved or (self._memory is not None and not self._memory.is_empty)

    def _open_mirror(self, url: str) -> None:
        self._mirror = Mirror(url, self._store)
        self._store.needed = self._mirror.needed

    def resume(self, mode: Literal["auto", "never"], is_stopped: Callable[[], bool] = lambda: False) -> list[str]:
        """Resume from the newest complete checkpoint, if there is one, of any layout.

        Args:
            mode: whether to resume.
            is_stopped: returns whether rank 0 has to stop, while it waits for the place of the copies.

        Returns:
            Notes for the user on the checkpoints that were skipped.

        Raises:
            StoppedError: `is_stopped` has returned true.
            UsageError: the checkpoint is of another training or model, `mode` is "never" and a checkpoint exists, or
                the folder cannot be written.
        """
        if self._mirror is not None:
            self._mirror.is_stopped = is_stopped
        marker, key, notes = self._mesh.on_rank_zero(lambda: self._open_store(mode == "auto"))
        self._refuse_other_folders(marker)
        on_disk: list[tuple[int, Found | None]] = [(step, None) for step in self._mesh.share(self._store.steps())]
        in_memory: list[tuple[int, Found | None]] = []
        if self._memory is not None:
            self._memory.open(key)
            in_memory = [(found.step, found) for found in self._memory.found()]
        resumed: Found | None = None
        for step, found in sorted([*on_disk, *in_memory], key=lambda one: (one[0], one[1] is not None), reverse=True):
            name = f"the checkpoint of step {step} in memory" if found else f"the checkpoint {self._store.path(step)}"
            state, problems = self._open(step) if found is None else self._open_in_memory(found)
            if state is None:
                notes.append(f"passed over {name}: {problems[0]}")
                continue
            notes += [f"passed over a part of {name}: {problem}" for problem in problems]
            if mode == "never":
                raise UsageError(
                    f"`checkpoint.resume` is never, but {name} exists; name another `checkpoint.folder`, or remove"
                    " `checkpoints` there"
                )
            self._refuse_another_training(state)
            self._refuse_another_model(state)
            with self._memory.serving(state) if self._memory and isinstance(state, MemoryState) else nullcontext():
                self._engine.load_state(state, step)
            self.progress.become(state.facts.progress)
            self._is_saved = True
            resumed = found
            break
        if self._memory is not None:
            self._is_in_memory_only = resumed is not None
            self._memory.keep(resumed.step if resumed else None)
            self._memory.require_room(self._share_bytes())
            if self.has_checkpoint:
                place = "in memory" if resumed else "on the disk; memory holds no newer one that is complete"
                notes.append(
                    f"resumed from the checkpoint of step {self.progress.step} {place}; the newest on the disk is"
                    f" {self._store.name_of_last()}"
                )
        if self.has_checkpoint:
            self._on_mirror(lambda mirror: notes.extend(self._send_newest(mirror)))
        return notes

    def _send_newest(self, mirror: Mirror) -> list[str]:
        """Upload the newest whole checkpoint on the disk up to this step, also if the run goes on from memory."""
        steps = [step for step in self._store.steps() if step <= self.progress.step]
        return mirror.send_missing(steps, None if self._is_in_memory_only else self.progress.step)

    def clear_memory(self) -> None:
        """Free the memory of the hosts at the end of a run, with its state on the disk; all ranks must call it."""
        if self._memory is not None:
            if self._is_in_memory_only:
                self.save()
            self.finish()
            self._memory.clear()
            if self._num_failed > 1:
                self.note(f"{self._num_failed} checkpoints in all could not be written to the memory of the hosts")

    def finish_mirror(self, model: Path | None) -> None:
        """Wait until all copies are uploaded, with the final model if there is one; all ranks must call it.

        Raises:
            TrainerError: they could not be uploaded.
        """
        self._on_mirror(lambda mirror: mirror.finish(model))

    def _on_mirror(self, action: Callable[[Mirror], None]) -> None:
        """Run `action` on rank 0 if there is a mirror; its error ends all ranks together."""
        if self._is_mirrored:
            self._mesh.on_rank_zero(lambda: action(self._mirror) if self._mirror is not None else None)

    def save(self) -> None:
        """Copy the state and start to write it, after the previous checkpoint is complete.

        Raises:
            TrainerError: this checkpoint or the previous one cannot be written.
        """
        self.finish()
        self._is_in_memory_only = False
        step = self.progress.step
        self._mesh.on_rank_zero(lambda: self._or_fail(step, lambda: self._store.begin(step)))
        self._facts, tensors = self._snapshot(self._saved.origin)
        self._share = Background(partial(self._write, self._store.unfinished_path(step), tensors))
        if not self._asynchronous:
            self.finish()

    def save_in_memory(self) -> None:
        """Copy the state and start to write it to the memory of the hosts; a failed write is a note.

        Raises:
            UsageError: a host has too little memory.
        """
        assert self._memory is not None
        self._tell(self._memory.finish())  # first, so that no two copies of the state are held
        facts, tensors = self._snapshot({})
        self._tell(self._memory.save(facts, tensors))

    def _snapshot(self, origin: Mapping[str, Any]) -> tuple[Facts, dict[str, Tensor]]:
        """Return copies of this rank's part of the state. All ranks must call it."""
        state = self._engine.state()
        shapes = {part.name: part.shape for part in state.parts}
        progress = Progress.from_json(self.progress.to_json())
        return Facts(progress, self._identity(state), origin, shapes, state.scalars), snapshot(state.parts)

    def _share_bytes(self) -> int:
        return sum(box.view.nbytes for _, box in own_share(self._engine.state().parts))

    def _tell(self, note: str | None) -> None:
        """Show the first failure of a checkpoint in memory; `clear_memory` shows their number."""
        if note is not None:
            self._num_failed += 1
            if self._num_failed == 1:
                self.note(note)

    def begin_poll(self) -> Callable[[], None]:
        """Start to compare the status of all ranks, and return a function that completes a written checkpoint.

        Call this before a step and the function after it, on all ranks; then no rank waits.
        """
        settle_memory = self._memory.begin_poll() if self._memory is not None else _nothing
        answer = self._mesh.begin_agree_max(self._share.status) if self._share is not None else None

        def settle() -> None:
            self._tell(settle_memory())
            if answer is not None and (status := answer()) != WRITING:
                self._settle(status)

        return settle

    def finish(self) -> None:
        """Wait until the current checkpoint is complete; all ranks must call it.

        Raises:
            TrainerError: the checkpoint cannot be written.
        """
        if self._share is not None:
            self._share.wait()
            self._settle(self._mesh.agree_max(self._share.status))
        if self._memory is not None:
            self._tell(self._memory.finish())

    def _write(self, folder: Path, tensors: Mapping[str, Tensor]) -> list[WrittenFile]:
        files = [write_share(folder, share_name(self._mesh.rank, self._mesh.world_size), tensors)]
        if self._mesh.rank == 0:
            files += [
                write_bytes(folder, f"{MODEL_FOLDER}/{name}", content)
                for name, content in self._saved.model_files.items()
            ]
        return files

    def _settle(self, status: int) -> None:
        """Complete the checkpoint, or raise the error of one rank on all."""
        share, self._share = self._share, None
        facts = self._facts
        assert share is not None
        assert facts is not None
        step = facts.progress.step
        if status == FAILED:
            failure = f"rank {self._mesh.rank}: {share.error}" if share.error else None
            failures = [one for one in self._mesh.gather(failure) or [] if one]
            self._mesh.on_rank_zero(lambda: self._fail(step, failures[0], share.error))
        gathered = self._mesh.gather([asdict(file) for file in share.result or []])
        distinct = self._mesh.gather_distinct(dict(facts.shapes))

        def complete() -> None:
            files = [WrittenFile(**file) for files in gathered or [] for file in files]
            shapes = {name: shape for shapes in distinct or [] for name, shape in shapes.items()}
            self._store.complete(replace(facts, shapes=shapes), files)

        self._mesh.on_rank_zero(lambda: self._or_fail(step, complete))
        self._is_saved = True
        if self._mirror is not None:
            if problem := self._mirror.problem():
                self.note(f"{problem}; the training goes on, and the next checkpoint is tried")
            self._mirror.send(step)

    def _or_fail(self, step: int, action: Callable[[], object]) -> None:
        self._check_owner()
        try:
            action()
        except OSError as error:
            self._fail(step, f"rank 0: {error}", error)

    def _fail(self, step: int, why: str, error: Exception | None) -> None:
        self._store.discard(step)
        raise TrainerError(
            f"the checkpoint of step {step} could not be written to {self._store.folder}: {why}; the last whole one is"
            f" {self._store.name_of_last()}. Make room or restore the folder and its permissions, then start the run"
            " again"
        ) from error

    def _refuse_other_folders(self, marker: str) -> None:
        """Compare folders by a file of rank 0, since two empty folders have the same checkpoints.

        Raises:
            UsageError: some ranks have another folder than rank 0 at the same path.
        """
        sees = self._store.sees(marker)
        hosts = self._mesh.share(self._mesh.gather(None if sees else socket.gethostname()))
        if self._mesh.rank == 0:
            self._store.remove_marker(marker)
        if others := [rank for rank, host in enumerate(hosts) if host is not None]:
            names = ", ".join(dict.fromkeys(hosts[rank] for rank in others))
            raise UsageError(
                f"`checkpoint.folder` must be one folder for all ranks, but {self._store.folder} is another one"
                f" for rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} on {names} than for rank 0: a"
                " file that rank 0 made there is not seen; use a file system that the nodes share"
            )

    def _open_store(self, fetches: bool) -> tuple[str, str, list[str]]:
        """Open the store, and fetch a copy into an empty one; return a marker in it, the key of memory, and notes."""
        try:
            self._store.open()
            notes: list[str] = []
            if self._mirror is not None and not self._store.steps():
                notes = self._mirror.fetch() if fetches else self._mirror.refuse_copies()
            key, more_notes = self._store.memory_key() if self._memory else ("", [])
            return self._store.make_marker(), key, [*notes, *more_notes]
        except OSError as error:
            raise storage_error(
                f"`checkpoint.folder` must be a folder that can be written, but {self._store.folder} is not: {error};"
                " make room, restore its permissions or name another",
                error,
            ) from error

    def _open(self, step: int) -> tuple[SavedBoxes | None, list[str]]:
        """Return the checkpoint of a step, or the problem of a damaged one; each rank verifies its share."""
        state, problem = None, ""
        try:
            state = open_verified(self._store.path(step), self._mesh.rank, self._mesh.world_size, step)
        except (OSError, ValueError) as error:
            problem = str(error)
        problems = self._mesh.share(self._mesh.gather(problem))
        found = [one for one in problems if one]
        return (None, found) if found else (state, [])

    def _open_in_memory(self, found: Found) -> tuple[SavedBoxes | None, list[str]]:
        """Return a checkpoint in memory, with the problems of its shares; None if it is damaged or of another training.

        Nothing is lost if memory is passed over, so another training is no error here.
        """
        assert self._memory is not None
        state, problems = self._memory.read(found)
        if state is not None and (differences := self._differences(state)):
            return None, [f"it is of another training: {listed(differences, _MOST, '; ')}"]
        return state, problems

    def _is_partly_frozen(self) -> bool:
        model = self._saved.identity.get("model")
        return isinstance(model, Mapping) and bool(model.get("adapter") or model.get("freeze"))

    def _identity(self, state: EngineState | None = None) -> Mapping[str, Any]:
        """Return the identity, with a digest of frozen weights that the state leaves out. All ranks must call it."""
        if not self._is_partly_frozen():
            return self._saved.identity
        if self._frozen is None:
            frozen = (state or self._engine.state()).frozen
            self._frozen = joined(self._mesh.share(self._mesh.gather(own_digest(frozen))))
        return {**self._saved.identity, "model": {**self._saved.identity["model"], FROZEN_WEIGHTS: self._frozen}}

    def _refuse_another_model(self, state: SavedBoxes) -> None:
        """Compare names and shapes, since `model.name_or_path` is not part of the identity."""
        saved = {
            name.removeprefix(MODEL_PREFIX): shape
            for name, shape in state.shapes.items()
            if name.startswith(MODEL_PREFIX)
        }
        own = {
            placement.name: placement.shape
            for placement in self._engine.placements.values()
            if placement.trainable or not self._is_partly_frozen()
        }
        distinct = self._mesh.gather_distinct(own)

        def compare() -> None:
            placed = {name: shape for one in distinct or [] for name, shape in one.items()}
            for name in sorted(saved.keys() | placed.keys()):
                if saved.get(name) != placed.get(name):
                    raise UsageError(
                        f"{state.folder} holds another model than `model` describes: {name} has the shape"
                        f" {saved.get(name)} there and {placed.get(name)} here (None: it is missing). Name another"
                        " `checkpoint.folder`, or restore `model`"
                    )

        self._mesh.on_rank_zero(compare)

    def _differences(self, state: SavedBoxes) -> list[str]:
        """Return the differences between the identity of a checkpoint and that of this run."""
        was, now = dotted_leaves(state.facts.identity), dotted_leaves(self._identity())
        return [
            "the prepared training rows differ (data, tokenizer or `data.max_length`)"
            if key == _ROWS
            else f"`{key[:_LONGEST]}` was {was.get(key)!r:.{_LONGEST}} and is {now.get(key)!r:.{_LONGEST}}"
            for key in sorted(was.keys() | now.keys())
            if was.get(key) != now.get(key)
        ]

    def _refuse_another_training(self, state: SavedBoxes) -> None:
        differences = self._differences(state)
        if not differences:
            return
        was, now = dotted_leaves(state.facts.identity), dotted_leaves(self._identity())
        remedy = "Name another `checkpoint.folder`, or restore the values"
        if any(was.get(key) != now.get(key) for key in ("training.epochs", "training.max_steps")):
            remedy += (
                ". The learning-rate schedule spans the whole training, so a longer one is a new run: set"
                " `model.name_or_path` to the model of this run and name another folder"
            )
        raise UsageError(f"{state.folder} is of another training: {listed(differences, _MOST, '; ')}. {remedy}")


class IdleSaver(Saver):
    """A saver that writes no checkpoint, for measurements."""

    def save(self) -> None:
        pass

    def save_in_memory(self) -> None:
        pass


def _nothing() -> None:
    pass
