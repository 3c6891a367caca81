"""Numbers that every rank has of its own, for the record of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class RankNumbers:
    """The numbers of a rank, or of a GPU of one process with several, since the last record."""

    memory_bytes: int  # the peak
    waited_seconds: float  # for rows
    hidden: int  # positions of texts
    positions: int  # with the hidden ones
    trained_seconds: float  # since the start of the run
    of_tools: Sequence[Sequence[float]] = ()  # the seconds of each tool

    def of_every_rank(self, mesh: ParallelMesh) -> list[RankNumbers]:
        """Return the numbers of all ranks, in order of rank. All ranks must call it, with equally many seconds."""
        of_tools = [seconds for tool in self.of_tools for seconds in tool]
        numbers = [self.memory_bytes, self.waited_seconds, self.hidden, self.positions, self.trained_seconds, *of_tools]
        return [self._with(*row) for row in mesh.agree_table(numbers)]

    def _with(
        self, memory: float, waited: float, hidden: float, positions: float, trained: float, *of_tools: float
    ) -> RankNumbers:
        left = iter(of_tools)
        divided = [[next(left) for _ in tool] for tool in self.of_tools]
        return RankNumbers(int(memory), waited, int(hidden), int(positions), trained, divided)
