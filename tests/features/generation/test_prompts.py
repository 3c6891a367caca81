"""Prompts of generated texts, and tasks on generated texts without a generator."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import transformers

from trainer.base import extensions
from trainer.base.errors import UsageError
from trainer.features.generation.section import Generation
from trainer.recipe.schema import CausalLM
from trainer.tasks.registry import build_task


def task_of(**keys: Any) -> Any:
    return build_task(CausalLM(type="causal_lm", text="text", **keys))


@pytest.mark.parametrize(("max_length", "max_new_tokens", "kept"), [(4, 1, 4), (19, 15, 5)])
def test_a_prompt_keeps_its_end_and_room_for_the_generated_text(tokenizer, max_length, max_new_tokens, kept):
    text = "the name of a directory that holds many files"
    task = task_of(generation=Generation(max_new_tokens=max_new_tokens)).without_labels()
    task = task.for_configuration(transformers.AutoConfig.for_model("gpt2", n_positions=20))
    rows = datasets.Dataset.from_dict({"text": [text, ""]})
    found = task.encode(rows, tokenizer, max_length, "`rows.jsonl`", 0)
    assert found["input_ids"] == [tokenizer(text)["input_ids"][:-1][-kept:], [tokenizer.cls_token_id]]
    assert found["cut"] == [True, False]


def test_a_text_longer_than_the_positions_is_refused():
    task = task_of(generation=Generation(max_new_tokens=20)).without_labels()
    with pytest.raises(UsageError, match="max_new_tokens` must be below the 20 positions of the model"):
        task.for_configuration(transformers.AutoConfig.for_model("gpt2", n_positions=20))


def test_predictions_need_a_generator(monkeypatch):
    monkeypatch.delitem(extensions._registered, ("generator", "transformers"))
    with pytest.raises(UsageError, match="need generated texts, but no generator of texts is installed"):
        task_of().without_labels()
