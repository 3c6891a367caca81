"""The keys of tasks on images, with those of other sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Minimal = dict[str, Any]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["task.type=image_classification", "task.label=image"],
            '`task.label` is "image", which is also `task.image`; name another column',
        ),
        (
            ["task.type=image_classification", "model.tokenizer=x/y"],
            "`model.tokenizer` applies to texts, but `task.type` is image_classification; remove it",
        ),
        (
            ["task.type=image_classification", "data.max_length=64"],
            "`data.max_length` applies to texts, but `task.type` is image_classification; remove it",
        ),
        (
            ["task.type=image_classification", "data.group_by_length=true"],
            "`data.group_by_length` applies to texts, but `task.type` is image_classification; remove it",
        ),
        (
            ["task.type=image_classification", 'task.labels=["a", "b", "c"]', 'task.metrics=["f1"]'],
            '`task.metrics` has "f1", which needs two classes, but `task.labels` has 3; use "f1_macro"',
        ),
    ],
)
def test_keys_that_do_not_go_together(
    problems: Callable[..., list[str]], minimal: Minimal, overrides: list[str], message: str
) -> None:
    assert [problem.partition(": ")[2] for problem in problems(minimal, *overrides)] == [message]
