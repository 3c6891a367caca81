from __future__ import annotations

from typing import get_args

import pytest
from transformers.pipelines import SUPPORTED_TASKS

from trainer.recipe.registered import task_sections
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task, card_of
from trainer.tasks.task import Task, TextTask

SECTIONS = get_args(Recipe.model_fields["task"].annotation)
INPUTS = {
    "text": ["first", "second"],
    "texts": ["first", "second"],
    "image": "first",
    "source": "first",
    "target": "second",
    "question": "first",
    "answers": "second",
}
COLUMNS = {  # instead of those of `INPUTS`
    "token_classification": {"words": "first", "tags": "second"},
    "causal_lm": {"prompt": "first", "completion": "second"},
    "multiple_choice": {"context": "first"},
    "reward_model": {"prompt": "first", "chosen": "other", "rejected": "second"},
    "preference": {"prompt": "first", "chosen": "other", "rejected": "second"},
    "reranker": {"query": "first", "label": "label"},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_task_of_the_schema_is_built_and_keeps_the_protocol(section):
    (name,) = get_args(section.model_fields["type"].annotation)
    inputs = COLUMNS.get(name) or {key: value for key, value in INPUTS.items() if key in section.model_fields}
    task = build_task(section(type=name, **inputs))
    assert task.columns[:1] == ("first",)
    assert task.columns[-1] == ("label" if "label" in section.model_fields and name != "preference" else "second")
    assert isinstance(task, TextTask) == (section.other_inputs is None)
    for member in (member for member in vars(Task) if not member.startswith("_")):
        assert hasattr(task, member), f"{type(task).__name__} lacks {member}"
    assert task.metric_names == tuple(section.model_fields["metrics"].default)


def test_every_task_has_a_card_with_a_pipeline_of_transformers():
    cards = {name: card_of(name) for name in task_sections()}
    assert {card.has_pipeline for card in cards.values() if card} == {True, False}
    for name, card in cards.items():
        assert card, name
        assert card.has_pipeline == (card.pipeline_tag in SUPPORTED_TASKS), name
    assert card_of("unknown") is None
