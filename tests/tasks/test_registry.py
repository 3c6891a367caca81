from __future__ import annotations

from typing import get_args

import pytest

from trainer.recipe.schema import Recipe
from trainer.tasks import Task, build_task

SECTIONS = get_args(Recipe.model_fields["task"].annotation)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_task_of_the_schema_is_built_and_keeps_the_protocol(section):
    (name,) = get_args(section.model_fields["type"].annotation)
    task = build_task(section(type=name, text=["first", "second"]))
    assert task.columns == ("first", "second", "label") or (name == "masked_lm" and task.columns == ("first", "second"))
    for member in (member for member in vars(Task) if not member.startswith("_")):
        assert hasattr(task, member), f"{type(task).__name__} lacks {member}"
    assert task.metric_names == tuple(section.model_fields["metrics"].default)
