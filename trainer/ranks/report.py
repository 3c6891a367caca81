"""The error of a rank, in a file that `trainer run` reads when all ranks have ended."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainer.base.disk import UNFINISHED, replace_text
from trainer.base.errors import LostPeerError, TrainerError, error_of_values, error_to_values


@dataclass(frozen=True)
class Report:
    """The error that ended a rank."""

    rank: int
    error: TrainerError
    is_of_all: bool = False  # whether the error concerns all ranks, such as a stall
    time_ns: int = field(default_factory=time.time_ns)

    def write(self, file: Path) -> None:
        """Write the report as JSON, whole or not at all: this rank may be killed meanwhile."""
        replace_text(file, json.dumps([self.rank, error_to_values(self.error), self.is_of_all, self.time_ns]))


def read_reports(folder: Path) -> list[Report]:
    """Return the reports in the folder, earliest first; those of lost peers come last."""
    files = [file for file in folder.glob("*.json") if not file.name.startswith(UNFINISHED)]
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    reports = [Report(rank, error_of_values(values), *rest) for rank, values, *rest in contents]
    return sorted(reports, key=lambda report: (isinstance(report.error, LostPeerError), report.time_ns))
