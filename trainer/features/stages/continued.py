"""The start of a training with the weights and the state of the optimizer of another run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from trainer.base.errors import UsageError
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.store import CheckpointStore
from trainer.features.stages.section import StartKeys
from trainer.observe.meter import Meter
from trainer.training.run_tool import RunTool

if TYPE_CHECKING:
    from trainer.training.assembly import Assembly

_KEY = "checkpoint.continues"


class ContinuedState(RunTool):
    """Loads the newest checkpoint of the run that `checkpoint.continues` names, before the first step."""

    _notes: tuple[str, ...] = ()

    def begin(self, parts: Assembly, meter: Meter, saves: bool) -> None:
        """Load weights and state; a resumed run has its own.

        Raises:
            UsageError: there is no whole checkpoint, or it is one of other parameters or of another optimizer.
        """
        if parts.progress.step:
            return
        recipe = parts.recipe
        folder = Path(str(cast(StartKeys, recipe.checkpoint).continues))
        if recipe.model.is_partly_frozen:
            raise UsageError(
                f"`{_KEY}` needs a checkpoint with all weights, but `model` freezes some; set it to null, or train all"
                " weights"
            )
        place = Disk(CheckpointStore(folder, keep=1), parts.mesh)
        found = next(reversed(place.checkpoints()), None)
        if found is None:
            raise UsageError(
                f"`{_KEY}` must be the folder of a run with a checkpoint, but {folder} has none; name another"
            )
        state, problems = place.read(found)
        if state is None:
            raise UsageError(f"`{_KEY}`: {found.name} cannot be read: {problems[0]}; restore its files")
        before = (state.facts.identity.get("task") or {}).get("type"), state.facts.identity["optimizer"]["name"]
        if before != (recipe.task.type, recipe.optimizer.name):
            raise UsageError(
                f"`{_KEY}` needs the same task and optimizer, but {folder} has {before[0]} and {before[1]}, and this"
                f" training {recipe.task.type} and {recipe.optimizer.name}; set it to null"
            )
        try:
            parts.engine.load_state(state, 0)
        except ValueError as error:
            raise UsageError(f"`{_KEY}`: {found.name} is of other parameters: {error}; set it to null") from error
        self._notes = (f"weights and the state of the optimizer are those of {found.name}; the schedule begins anew",)

    def notes(self) -> list[str]:
        return list(self._notes)
