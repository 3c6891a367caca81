from __future__ import annotations

import pytest

from trainer.recipe.reading.keys import known_keys
from trainer.tools.convert.foreign.tables import (
    ACCELERATE,
    DEEPSPEED,
    LORA_CONFIG,
    MEGATRON,
    PROGRAMS,
    TRAINING_ARGUMENTS,
    counterpart,
    offload_note,
)

TABLES = {
    "TrainingArguments": TRAINING_ARGUMENTS,
    "DeepSpeed": DEEPSPEED,
    "Megatron": MEGATRON,
    "accelerate": ACCELERATE,
    "PEFT": LORA_CONFIG,
}


@pytest.mark.parametrize("tool", [*TABLES, *PROGRAMS])
def test_every_row_has_a_key_or_a_reason(tool: str) -> None:
    for spelling, row in (TABLES | PROGRAMS)[tool].items():
        if row.key is None:
            assert row.note, spelling
        else:
            known = row.key in known_keys() or row.key.startswith("parallel.deepspeed.")
            assert known, (spelling, row.key)


@pytest.mark.parametrize("tool", TABLES)
def test_every_spelling_is_recognised(tool: str) -> None:
    assert [spelling for spelling in TABLES[tool] if counterpart(spelling) is None] == []


def test_a_shared_spelling_of_tools_maps_to_one_key() -> None:
    keys: dict[str, set[str | None]] = {}
    for table in TABLES.values():
        for spelling, row in table.items():
            keys.setdefault(spelling.lstrip("-").replace("-", "_"), set()).add(row.key)
    # a section of one tool, a switch or a word of another
    assert {spelling for spelling, found in keys.items() if len(found) > 1} == {
        "activation_checkpointing",
        "optimizer",
        "parallelism_config",
    }


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
        ("expert-model-parallel-size", "is `parallel.expert` here"),
        ("--tensor_model_parallel_size", "is `parallel.tensor` here"),
        ("--lr-warmup-iters", "is `schedule.warmup` here"),
        ("fsdp_config", "is `parallel.strategy` here"),
        ("mixed_precision", "is `precision` here"),
        ("training.seed_everything.seed", "is `training.seed` here"),
        ("num_processes", "has no counterpart here: the launcher sets"),
    ],
)
def test_spellings_are_recognised_however_they_are_written(spelling: str, words: str) -> None:
    assert str(counterpart(spelling)).startswith(words)


def test_unknown_spellings_are_not_recognised() -> None:
    assert counterpart("stage") is None
    assert counterpart("enabled") is None
    assert counterpart("") is None


def test_the_note_on_offload_names_strategies_or_says_that_there_is_none() -> None:
    assert offload_note(["zero1", "zero2"]) == '"optimizer", under zero1, zero2'
    assert offload_note([]) == '"optimizer", which no registered strategy supports'
