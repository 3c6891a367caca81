"""The loss of each task is the one that transformers' own head computes from its labels, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from tests.helpers.families import CONFIGS, SHIPPED, has_head, inputs_of
from tests.helpers.training import tiny_recipe
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task

NAMES = ["a", "b", "c"]
TASKS: dict[str, dict[str, Any]] = {
    "classes": {"type": "sequence_classification", "text": "text", "labels": NAMES},
    "labels": {"type": "sequence_classification", "text": "text", "labels": NAMES, "multi_label": True},
    "number": {"type": "sequence_regression", "text": "text"},
    "tags": {"type": "token_classification", "words": "words", "tags": "tags", "labels": NAMES},
    "answer": {"type": "question_answering"},
    "choice": {"type": "multiple_choice"},
    "hidden": {"type": "masked_lm", "text": "text"},
    "next": {"type": "causal_lm", "text": "text"},
    "target": {"type": "seq2seq_lm"},
    "image": {"type": "image_classification", "labels": NAMES},
}


def task_of(name: str) -> Task:
    return build_task(tiny_recipe(task=TASKS[name]).task)


def labels_of(name: str, ids: Tensor) -> Tensor:
    """Return labels in transformers' form, some of them ignored."""
    rows = torch.arange(len(ids))
    if name in ("hidden", "next", "target"):
        return torch.where(ids % 3 == 0, IGNORED_LABEL, ids)
    if name == "tags":
        return torch.where(ids % 4 == 3, IGNORED_LABEL, ids % 4)
    return {"labels": torch.eye(3)[rows], "number": rows.float(), "answer": torch.stack([rows, rows + 2], -1)}.get(
        name, rows % 3
    )


@pytest.mark.parametrize("model_type", [*CONFIGS, *SHIPPED])
def test_the_loss_is_that_of_transformers(model_type):
    compared = 0
    for name in TASKS:
        task = task_of(name)
        if not has_head(model_type, task.auto_class_name):
            continue
        config = AutoConfig.for_model(model_type, **(CONFIGS | SHIPPED)[model_type], **task.model_options())
        torch.manual_seed(0)
        model = getattr(transformers, task.auto_class_name).from_config(config).eval()
        inputs = {k: v for k, v in inputs_of(model_type, task.auto_class_name).items() if k != "decoder_input_ids"}
        if "attention_mask" in inputs:  # without padding: only the answer's loss leaves it out
            inputs["input_ids"] = inputs["input_ids"].clamp(min=5).masked_fill(inputs["input_ids"] == 1, 1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        labels = labels_of(name, next(iter(inputs.values())))
        if name == "choice":
            inputs = {key: value.repeat(1, 3, 1) for key, value in inputs.items()}
            inputs["input_ids"][:, 1:] = inputs["input_ids"][:, 1:].roll(1, -1)
        own = (
            {"start_positions": labels[:, 0], "end_positions": labels[:, 1]} if name == "answer" else {"labels": labels}
        )
        output = model(**inputs, **own)
        if name == "next":
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        scores = task.scores(output, {**inputs, "num_choices": torch.full((len(labels),), 3)})
        loss = task.loss_sum(scores, labels) / task.num_valid(labels)
        torch.testing.assert_close(loss, output.loss, msg=lambda text, name=name: f"{name}: {text}")
        compared += 1
    assert compared
