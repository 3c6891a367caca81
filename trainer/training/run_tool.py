"""The interface of a tool that takes part in each run; a folder registers it under `run` in its `extension.json`."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from trainer.observe.preview_records import Preview
from trainer.ranks.environment import LaunchEnvironment

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe
    from trainer.training.assembly import Assembly


class RunTool:
    """A context manager around the run of a rank. A subclass overrides the methods that it needs."""

    def __init__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> None:
        self.resolved = resolved
        self.environment = environment

    def __enter__(self) -> RunTool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the tool; `error` is that of the run."""

    def preview(self, parts: Assembly) -> Preview | None:
        """Describe the first step for the observers of this rank; called before it."""
        return None

    def notes(self) -> list[str]:
        """Return notes for the user; called before the first step, on every rank."""
        return []
