"""The tool of a run that notes its planned memory, and explains a full device.

`advice.py` is imported only by a run that plans, or that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from trainer.base.errors import OutOfMemoryError
from trainer.base.terminal import say
from trainer.ranks.environment import LaunchEnvironment
from trainer.training.run_tool import RunTool

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe
    from trainer.tools.advice import PlannedMemory

_FULL = "can't allocate memory"  # of torch's allocator for CPUs, which raises a plain RuntimeError


class MemoryAdvice(RunTool):
    """The planned memory of a run, and the explanation of a full device.

    Only rank 0 of a run on GPUs plans, beside its preparation. On CPUs, the plan would take its time from the training.
    """

    def __init__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> None:
        super().__init__(resolved, environment)
        self._planned: PlannedMemory | None = None

    def __enter__(self) -> MemoryAdvice:
        if self.environment.rank == 0 and torch.cuda.device_count():
            from trainer.tools.advice import PlannedMemory

            self._planned = PlannedMemory(self.resolved, self.environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the plan, and explain the error of a full device.

        Raises:
            OutOfMemoryError: torch could not allocate a tensor.
        """
        if self._planned is not None:
            self._planned.stop()
        if isinstance(error, RuntimeError) and (isinstance(error, torch.OutOfMemoryError) or _FULL in str(error)):
            from trainer.tools.advice import explained

            raise explained(error, self.resolved, self.environment) from error

    def notes(self) -> list[str]:
        """Return a note on the planned memory; none if this rank plans nothing. Wait for two seconds at most."""
        return [] if self._planned is None else self._planned.notes()


@contextmanager
def adds_changes_that_fit() -> Iterator[None]:
    """Add the advice of a plan to the error of a full device, after all ranks have ended.

    Raises:
        OutOfMemoryError: the error, with the advice.
    """
    try:
        yield
    except OutOfMemoryError as error:
        if error.plan_command:
            say("the memory is full; planning changes that fit takes a minute at most", err=True)
            from trainer.tools.advice import advice

            if found := advice(error.plan_command):
                error.args = (f"{error}\n{found}",)
                error.has_lines = True
        raise
