"""The interface of a tool that takes part in each run; a folder registers it under `run` in its `extension.json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainer.observe.meter import Meter
from trainer.observe.preview_records import Preview
from trainer.observe.records import StepRecord
from trainer.ranks.environment import LaunchEnvironment
from trainer.training.export_check import ExportCheck

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe
    from trainer.training.assembly import Assembly


@dataclass(frozen=True)
class Elapsed:
    """The steps of a run until now, their seconds on the first rank, and the steps that are left."""

    steps: int
    seconds: float
    left: int


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

    def begin(self, parts: Assembly, meter: Meter, saves: bool) -> None:
        """Get the parts of the run before its first step.

        Args:
            saves: whether the run writes checkpoints and the model; a measurement does not.
        """

    def preview(self, parts: Assembly) -> Preview | None:
        """Describe the first step for the observers of this rank; called before it."""
        return None

    def notes(self) -> list[str]:
        """Return notes for the user; called before the first step, on every rank."""
        return []

    def around_step(self) -> AbstractContextManager[object]:
        """Return a context manager around the call that begins a step."""
        return nullcontext()

    def after_step(self, loop: Any) -> None:
        """Look at the step that a `Loop` has begun, on every rank; it counts, and is not yet logged or saved."""

    def seconds(self) -> tuple[float, ...]:
        """Return seconds of this rank since the last record; every rank returns equally many."""
        return ()

    def completed(self, record: StepRecord, ranks: Sequence[Sequence[float]], elapsed: Elapsed) -> StepRecord:
        """Return the record of a step with the numbers of this tool; `ranks` holds the `seconds` of every rank."""
        return record

    def news(self) -> list[str]:
        """Return notes for the user since the last call; called after each record, on every rank."""
        return []

    def export_check(self, parts: Assembly) -> ExportCheck | None:
        """Return a check of the model that the end of the run exports. All ranks call it."""
        return None


class RunTools:
    """The tools of a run."""

    def __init__(self, tools: Sequence[RunTool] = ()) -> None:
        self._tools = tools

    def begin(self, parts: Assembly, meter: Meter, saves: bool) -> None:
        for tool in self._tools:
            tool.begin(parts, meter, saves)

    def preview(self, parts: Assembly) -> Preview | None:
        return next((preview for tool in self._tools if (preview := tool.preview(parts))), None)

    def notes(self) -> list[str]:
        return [note for tool in self._tools for note in tool.notes()]

    def news(self) -> list[str]:
        return [note for tool in self._tools for note in tool.news()]

    @contextmanager
    def around_step(self) -> Iterator[None]:
        with ExitStack() as stack:
            for tool in self._tools:
                stack.enter_context(tool.around_step())
            yield

    def after_step(self, loop: Any) -> None:
        for tool in self._tools:
            tool.after_step(loop)

    def seconds(self) -> list[tuple[float, ...]]:
        """Return the seconds of each tool on this rank."""
        return [tool.seconds() for tool in self._tools]

    def completed(self, record: StepRecord, ranks: Sequence[Sequence[Sequence[float]]], elapsed: Elapsed) -> StepRecord:
        """Return the record with the numbers of all tools; `ranks` holds the result of `seconds` of every rank."""
        for number, tool in enumerate(self._tools):
            record = tool.completed(record, [of_rank[number] for of_rank in ranks], elapsed)
        return record

    def export_checks(self, parts: Assembly) -> list[ExportCheck]:
        return [check for tool in self._tools if (check := tool.export_check(parts))]
