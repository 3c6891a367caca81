"""The counters of a run, which a checkpoint saves beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.observe.records import BestMetric


@dataclass
class Progress:
    """Counters over all ranks since the start of the training, resumed parts included."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # rows consumed: the position in the data
    tokens: int = 0  # likewise, without padding
    best: BestMetric | None = None
    evaluations_since_best: int = 0
    bad_steps: int = 0  # steps that were not taken because they were not finite
    best_rows: str | None = None  # the hash of the validation rows that gave `best`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Progress:
        best = values["best"]
        return cls(**{**values, "best": BestMetric(**best) if best else None})
