"""A run's way to its checkpoints: what is saved beside the tensors, and what a run may go on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from trainer.checkpoint.progress import Progress
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.engine.engine import MODEL_PREFIX, Engine
from trainer.errors import UsageError
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.schema import Recipe

# What says how, not what is learned: a run may go on with other values.
_HOW = ("name", "parallel", "evaluation", "checkpoint", "logging", "data")
_HOW_TRAINING = ("micro_batch_size", "stop_at_step", "max_bad_steps")
_WHERE_MODEL = ("name_or_path", "tokenizer", "revision")  # the weights are the checkpoint's
_MEASURED = ("metrics",)


def identity(recipe: Recipe, content_hash: str, beside: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """What is learned, from which data: equal for two runs that may share a checkpoint.

    Args:
        recipe: of the run.
        content_hash: of the prepared training split.
        beside: what else the model brings that no training changes and no checkpoint holds, by name; None where it
            does not.
    """
    sections = recipe.model_dump(mode="json", exclude=set(_HOW))
    for section, keys in (("training", _HOW_TRAINING), ("model", _WHERE_MODEL), ("task", _MEASURED)):
        for key in keys:
            del sections[section][key]
    sections["model"] |= {name: fact for name, fact in (beside or {}).items() if fact is not None}
    return {**sections, "data": {"group_by_length": recipe.data.group_by_length, "train": content_hash}}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    else:
        yield path, value


class Saver:
    """Saves the engine's state and the run's progress, and brings both back.

    Args:
        store: of the run's folder.
        engine: whose state is saved.
        mesh: the ranks.
        identity: of the run, from `identity`.
    """

    def __init__(self, store: CheckpointStore, engine: Engine, mesh: ParallelMesh, identity: Mapping[str, Any]) -> None:
        self._store = store
        self._engine = engine
        self._mesh = mesh
        self._identity = identity
        self.progress = Progress()

    def resume(self, mode: Literal["auto", "never"]) -> list[str]:
        """Goes on from the newest whole checkpoint, if there is one.

        Returns:
            Notes for the user: which checkpoints were passed over.

        Raises:
            UsageError: the checkpoint is of another training or model, or `mode` is "never" and there is one.
        """
        checkpoint, notes = self._store.newest()
        step = checkpoint.progress.step if checkpoint else 0
        if self._mesh.agree_max(self._mesh.share(step) != step):
            raise UsageError(
                "`checkpoint.folder` must be one folder for all ranks, but not all of them find the same newest"
                f" checkpoint in {self._store.folder}; use a file system that the nodes share"
            )
        if checkpoint is None:
            return notes
        if mode == "never":
            raise UsageError(
                f"`checkpoint.resume` is never, but {self._store.path(step)} exists; name another `checkpoint.folder`,"
                " or remove it"
            )
        self._refuse_another_training(checkpoint)
        self._refuse_another_model(checkpoint)
        self._engine.load_state(checkpoint.tensors, step)
        self.progress = checkpoint.progress
        return notes

    def save(self) -> None:
        """Writes a checkpoint of this moment; returns when it is complete.

        Raises:
            TrainerError: it could not be written.
        """
        checkpoint = Checkpoint(self._engine.state(), self.progress, self._identity)
        self._mesh.on_rank_zero(lambda: self._store.save(checkpoint))

    def _refuse_another_model(self, checkpoint: Checkpoint) -> None:
        """Names and shapes, since weights from elsewhere (`model.name_or_path`) are no part of the identity."""
        saved = {
            name.removeprefix(MODEL_PREFIX): tuple(tensor.shape)
            for name, tensor in checkpoint.tensors.items()
            if name.startswith(MODEL_PREFIX)
        }
        placed = {name: placement.shape for name, placement in self._engine.placements.items()}
        for name in sorted(saved.keys() | placed.keys()):
            if saved.get(name) != placed.get(name):
                raise UsageError(
                    f"{self._store.path(checkpoint.progress.step)} holds another model than `model` describes: {name}"
                    f" has the shape {saved.get(name)} there and {placed.get(name)} here (None: it is missing)."
                    " Name another `checkpoint.folder`, or restore `model`"
                )

    def _refuse_another_training(self, checkpoint: Checkpoint) -> None:
        was, now = dict(_leaves(checkpoint.identity)), dict(_leaves(self._identity))
        differences = [
            f"`{key}` was {was.get(key)!r} and is {now.get(key)!r}"
            for key in sorted(was.keys() | now.keys())
            if was.get(key) != now.get(key)
        ]
        if differences:
            raise UsageError(
                f"{self._store.path(checkpoint.progress.step)} is of another training: {'; '.join(differences)}."
                " Name another `checkpoint.folder`, or restore the values"
            )
