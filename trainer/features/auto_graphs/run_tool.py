"""The tool of each run, which does nothing on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from trainer.observe.meter import Meter
from trainer.observe.records import StepRecord
from trainer.training.run_tool import Elapsed, RunTool

if TYPE_CHECKING:
    from trainer.features.auto_graphs.choice import Choice
    from trainer.training.assembly import Assembly


class AutoGraphs(RunTool):
    """The choice of a run on GPUs with `cuda_graphs: auto`."""

    _choice: Choice | None = None

    def begin(self, parts: Assembly, meter: Meter, saves: bool) -> None:
        if parts.recipe.cuda_graphs == "auto" and parts.mesh.device.type == "cuda":
            from trainer.features.auto_graphs.choice import Choice

            self._choice = Choice(parts)

    def around_step(self) -> AbstractContextManager[object]:
        return self._choice.measured() if self._choice else nullcontext()

    def seconds(self) -> tuple[float, ...]:
        return self._choice.vote() if self._choice else ()

    def completed(self, record: StepRecord, ranks: Sequence[Sequence[float]], elapsed: Elapsed) -> StepRecord:
        if self._choice:
            self._choice.choose(record.step, ranks, elapsed.steps)
        return record

    def news(self) -> list[str]:
        return self._choice.news() if self._choice else []
