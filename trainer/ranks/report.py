"""What a rank that ends badly leaves for the agent that started it: one file, read when all ranks have ended."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from trainer.base.errors import ExitCode

Kind = Literal["error", "consequence", "stall"]


@dataclass(frozen=True)
class Report:
    """The error that ended a rank.

    A `consequence` is of another rank's end, and tells nothing of its own; a `stall` tells of all ranks.
    """

    rank: int
    exit_code: ExitCode
    message: str
    kind: Kind = "error"
    time_ns: int = field(default_factory=time.time_ns)

    def write(self, file: Path) -> None:
        """Writes what the elastic agent reads as a worker's error too."""
        error = {"message": self.message, "extraInfo": {"timestamp": str(self.time_ns // 10**9)}}
        file.write_text(json.dumps({"message": error, "report": asdict(self)}), encoding="utf-8")


def read_reports(folder: Path) -> list[Report]:
    """The reports below the agent's folder: those that tell a cause first, of these the earliest."""
    contents = (json.loads(file.read_text(encoding="utf-8")) for file in folder.rglob("error.json"))
    reports = [Report(**content["report"]) for content in contents if "report" in content]
    return sorted(reports, key=lambda report: (report.kind == "consequence", report.time_ns))
