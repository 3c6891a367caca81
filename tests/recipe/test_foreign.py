from __future__ import annotations

import pytest

from trainer.recipe.foreign import ACCELERATE, DEEPSPEED, MEGATRON, TRAINING_ARGUMENTS, counterpart
from trainer.recipe.keys import known_keys

TABLES = {
    "TrainingArguments": TRAINING_ARGUMENTS,
    "DeepSpeed": DEEPSPEED,
    "Megatron": MEGATRON,
    "accelerate": ACCELERATE,
}
ROWS = [(spelling, row) for table in TABLES.values() for spelling, row in table.items()]


@pytest.mark.parametrize(("spelling", "row"), ROWS, ids=[spelling for spelling, _ in ROWS])
def test_every_row_leads_to_a_key_or_says_why_not(spelling: str, row: object) -> None:
    found = counterpart(spelling)
    assert found == row
    assert found.key in known_keys() if found.key else found.note
    assert spelling not in known_keys()


def test_no_spelling_stands_twice() -> None:
    spellings = [spelling.lstrip("-").replace("-", "_") for spelling, _ in ROWS]
    assert len(spellings) == len(set(spellings))


def test_each_tool_is_covered() -> None:
    assert {tool: len(table) >= 10 for tool, table in TABLES.items()} == dict.fromkeys(TABLES, True)
    assert len(ROWS) >= 40


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("per_device_train_batch_size", "is `training.micro_batch_size` here (the step's total is"),
        ("gradient_accumulation_steps", "has no counterpart here: accumulation follows from"),
        ("training.gradient_accumulation_steps", "has no counterpart here: accumulation follows from"),
        ("zero_optimization.stage", "is `parallel.strategy` here"),
        ("parallel.zero_optimization.stage", "is `parallel.strategy` here"),
        ("tensor-model-parallel-size", "is `parallel.tensor` here"),
        ("pipeline-model-parallel-size", "is `parallel.pipeline.stages` here"),
        ("context-parallel-size", "has no counterpart here"),
        ("--tensor_model_parallel_size", "is `parallel.tensor` here"),
        ("--lr-warmup-iters", "is `schedule.warmup` here"),
        ("fsdp_config", "is `parallel.strategy` here"),
        ("mixed_precision", "is `precision` here"),
    ],
)
def test_spellings_are_recognised_however_they_are_written(spelling: str, words: str) -> None:
    assert str(counterpart(spelling)).startswith(words)


def test_what_no_tool_says_is_not_recognised() -> None:
    assert counterpart("stage") is None
    assert counterpart("enabled") is None
    assert counterpart("") is None
