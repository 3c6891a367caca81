"""The error of a rank, in a file that `trainer run` reads when all ranks have ended."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from trainer.base.disk import UNFINISHED, replace_text
from trainer.base.errors import ExitCode

Kind = Literal["error", "consequence", "stall"]


@dataclass(frozen=True)
class Report:
    """The error that ended a rank.

    A `consequence` follows from the end of another rank; a `stall` concerns all ranks.
    """

    rank: int
    exit_code: ExitCode
    message: str
    kind: Kind = "error"
    plan_command: Sequence[str] = ()  # of `OutOfMemoryError`
    time_ns: int = field(default_factory=time.time_ns)

    def write(self, file: Path) -> None:
        """Write the report as JSON, whole or not at all: this rank may be killed meanwhile."""
        replace_text(file, json.dumps(asdict(self)))


def read_reports(folder: Path) -> list[Report]:
    """Return the reports in the folder, earliest first; consequences come last."""
    files = [file for file in folder.glob("*.json") if not file.name.startswith(UNFINISHED)]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    reports = [Report(**{**values, "plan_command": tuple(values["plan_command"])}) for values in found]
    return sorted(reports, key=lambda report: (report.kind == "consequence", report.time_ns))
