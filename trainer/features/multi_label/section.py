"""The keys of several labels for each row in the section `task` of sequence classification, and their rules."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.recipe.schema import SequenceClassification
from trainer.recipe.schema.fields import NameKey, Share
from trainer.recipe.schema.section import Contradiction, clash

_KEY = "task.multi_label"


class LabelKeys(SequenceClassification):
    """Any number of labels, and the probabilities above which they are predicted."""

    multi_label: bool = False
    """Any number of labels a row: `label` holds lists of names, or of 0 and 1 for each of `labels`. `accuracy` counts
    rows with all labels right."""
    threshold: Share | dict[NameKey, Share] = 0.5
    """With `multi_label`: probability above which a label is predicted; an object: by name."""

    def contradictions(self) -> Iterator[Contradiction]:
        one_class = f"applies to one class for each row, but `{_KEY}` is true"
        if self.multi_label:
            for metric in self.metrics:
                if metric in (*self.of_one_class, "matthews"):
                    score = "f1" if metric == "matthews" else metric
                    text = f'has "{metric}", which {one_class}; use "{score}_micro" or "{score}_macro"'
                    yield clash(text, "task.metrics", _KEY)
            for key in self.changed("class_weights", "label_smoothing"):
                yield clash(f"{one_class}; remove it", f"task.{key}", _KEY)
        elif self.changed("threshold"):
            problem = f"applies to several labels for each row, but `{_KEY}` is false"
            yield clash(f"{problem}; remove it, or set that to true", "task.threshold", _KEY)
