"""The key of soft labels in the section `task` of sequence classification, and its rules."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.recipe.schema import SequenceClassification
from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, clash

_KEY = "task.probabilities"


class ProbabilityKeys(SequenceClassification):
    """Probabilities to learn."""

    probabilities: Name | None = None
    """Column of lists with a probability of each of `labels`, in order, to learn instead of `label`; or of objects with
    the probability of each class by its name, as `trainer predict` writes. Metrics take the most probable class. null:
    none."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.probabilities is None:
            return
        if self.labels is None:
            yield clash(f"must name the classes in order, because `{_KEY}` is set; set it", "task.labels", _KEY)
        others = (
            ("label", "class_weights", "multi_label") if hasattr(self, "multi_label") else ("label", "class_weights")
        )
        for key in self.changed(*others):
            text = f"applies to labels of one class, but `{_KEY}` names probabilities; remove it"
            yield clash(text, f"task.{key}", _KEY)
