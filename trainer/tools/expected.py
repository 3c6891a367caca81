"""The rule on the key `expects` of a recipe: its form, and the metrics that it may name. Every run imports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from trainer.recipe.paths import shown_value
from trainer.recipe.schema import TaskKeys
from trainer.recipe.schema.section import Contradiction

SOURCE, SEEDS = "source", "seeds"
"""The keys that name no metric."""


def contradictions(expects: Mapping[str, Any], task: TaskKeys) -> Iterator[Contradiction]:
    known = (*get_args(get_args(type(task).model_fields["metrics"].annotation)[0]), "loss")
    metrics = expects.keys() - {SOURCE, SEEDS}
    if not metrics:
        yield Contradiction((("expects",),), f"names no metric; the metrics are {', '.join(known)}")
    if SOURCE not in expects:
        yield Contradiction((("expects",),), "has no `source`; name a table of a paper, or the machine that measured")
    for key, value in expects.items():
        text = None
        if key in metrics and key not in known:
            type_ = getattr(task, "type", "")
            text = f"is no metric of the task {type_}; its metrics are {', '.join(known)}"
        elif key in metrics and not _is_interval(value):
            text = f"must be two numbers, the lower one first, but is {shown_value(value)}; write [0.9, 0.93]"
        elif key == SOURCE and not (isinstance(value, str) and value.strip()):
            text = f"must be a text that is not blank, but is {shown_value(value)}"
        elif key == SEEDS and (type(value) is not int or value < 1):
            text = f"must be a whole number of at least 1, but is {shown_value(value)}"
        if text is not None:
            yield Contradiction((("expects", key),), text)


def _is_interval(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(one) in (int, float) for one in value)
        and value[0] <= value[1]
    )
