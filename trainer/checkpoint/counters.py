"""The counters of a run, which a checkpoint saves beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from trainer.observe.records import BestMetric

Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass
class Progress:
    """Counters over all ranks since the start of the training, resumed parts included."""

    step: Count = 0  # optimizer steps done
    samples: Count = 0  # rows consumed: the position in the data
    tokens: Count = 0  # likewise, without padding
    best: BestMetric | None = None
    evaluations_since_best: Count = 0
    bad_steps: Count = 0  # steps that were not taken because they were not finite
    place: tuple[Count, Count, Count] | None = None  # of the next row, if `samples` does not give it
    best_rows: str | None = None  # the hash of the validation rows that gave `best`
    of_tools: dict[str, list[float]] = field(default_factory=dict)  # numbers of tools that change the training

    def become(self, other: Progress) -> None:
        """Take over the values of another progress."""
        vars(self).update(vars(other))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress of the values that `to_json` gave, which may come from anyone. Later keys may be missing.

        Raises:
            ValueError: a value is missing or unknown, or is no number that a run can count.
        """
        if {*values, "place", "of_tools"} != (names := {field.name for field in fields(cls)}):
            raise ValueError(f"`progress` must have the keys {', '.join(sorted(names))}")
        return TypeAdapter(cls).validate_python(values)
