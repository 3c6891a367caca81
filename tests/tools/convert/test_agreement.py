"""For each key of each tool, the report and the recipe agree."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.convert.conftest import own_rows
from trainer.base.errors import RecipeError, TrainerError, UsageError
from trainer.recipe.schema import Recipe
from trainer.tools.convert.convert import Conversion, convert
from trainer.tools.convert.draft import Outcome
from trainer.tools.convert.foreign.tables import Kind
from trainer.tools.convert.sources import Tool

Write = Callable[..., Path]

VALUES = [True, 3, "bf16", "epoch", "cpu", "full", ["tensorboard"]]
KINDS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
IN_RECIPE = (Outcome.CONVERTED, Outcome.DIFFERS)


def around(tool: Tool, key: str) -> dict[str, Any]:
    """Return the keys with which a tool reads this key."""
    if tool is Tool.ACCELERATE:
        return {"main_training_function": "main", "distributed_type": KINDS.get(key.split(".")[0], "MULTI_GPU")}
    if tool is Tool.DEEPSPEED:
        return {"train_batch_size": 12, "zero_optimization": {"stage": 2}}
    if tool.is_program:
        return {"output_dir": "runs/x", "max_steps": 9}
    fsdp = {"fsdp": "full_shard"} if key.startswith("fsdp_config") else {}
    return {"output_dir": "runs/x", "max_steps": 9, "eval_strategy": "steps", **fsdp}


def with_key(keys: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    inner = keys.get(name)
    return {**keys, name: with_key(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def at(recipe: Any, path: str) -> Any:
    """Return the value of a key of the recipe, else its default."""
    model: Any = Recipe
    for part in path.split("."):
        recipe = recipe.get(part, ...) if isinstance(recipe, dict) else ...
        if recipe is ... and part in getattr(model, "model_fields", {}):
            default = model.model_fields[part].get_default(call_default_factory=True)
            recipe = default.model_dump(mode="json") if hasattr(default, "model_dump") else default
        model = getattr(model, "model_fields", {}).get(part)
        model = getattr(model, "annotation", None)
    return recipe


def shown_values(text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of the recipe in a line of the report, with the values that it shows."""
    for part in text.split("; "):
        if found := re.fullmatch(r"`([a-z_0-9.]+)` (.+?)(?: \(.*)?", part):
            yield found[1], found[2].strip('"')


def conversions(tool: Tool, write: Write) -> Iterator[tuple[str, Any, Conversion, Conversion]]:
    """Yield each key with each value that it accepts, and the conversions without and with it."""
    for key in own_rows(tool):
        keys = around(tool, key)
        without = {name: value for name, value in keys.items() if name != key}
        plain = convert([write(without)], tool, 2)
        for value in VALUES:
            try:
                yield key, value, plain, convert([write(with_key(without, key, value))], tool, 2)
            except TrainerError:
                continue


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(tool, marks=pytest.mark.slow if tool.is_program or tool is Tool.TRAINING_ARGUMENTS else ())
        for tool in Tool
    ],
)
def test_converted_keys_are_in_the_recipe_and_others_are_not(tool: Tool, write: Write):
    wrong = []
    for key, value, plain, conversion in conversions(tool, write):
        for line in conversion.lines:
            if line.item.origin is None or line.item.name != key or line.outcome is Outcome.TODO:
                continue
            if line.outcome not in IN_RECIPE and conversion.recipe != plain.recipe:
                wrong.append((key, value, line.outcome.value, "changes the recipe"))
            if line.outcome in IN_RECIPE:
                for path, shown in shown_values(line.text):
                    written = at(conversion.recipe, path)
                    if shown not in (str(written), json.dumps(written, default=str)):
                        wrong.append((key, value, path, shown, written))
    assert wrong == []


def test_workers_and_smoothing_are_written_without_data_and_task(write: Write):
    keys = {"dataloader_num_workers": 4, "preprocessing_num_workers": 3, "group_by_length": True, "max_seq_length": 64}
    conversion = convert([write({"output_dir": "x", "label_smoothing_factor": 0.1, **keys})], None, 1)
    assert conversion.recipe["data"] == {
        "max_length": 64,
        "group_by_length": True,
        "num_workers": 4,
        "preparation_processes": 3,
    }
    assert conversion.recipe["task"] == {"label_smoothing": 0.1}
    assert conversion.todo.keys() == {"task", "model", "data"}


@pytest.mark.parametrize("tool", Tool)
def test_an_unsupported_key_of_the_training_refuses_the_file(tool: Tool, write: Write):
    refused = [key for key, row in own_rows(tool).items() if row.kind is Kind.REFUSED]
    assert refused or tool is Tool.SETFIT
    for key in refused:
        off = tool.table[key].is_default(True)
        value = not off if off or tool.table[key].is_default(False) else 0.5
        with pytest.raises(RecipeError, match=rf"args.json:1:\d+: `{re.escape(key)}` decides what is learned"):
            convert([write(with_key(around(tool, key), key, value))], tool, 2)
        assert convert([write(with_key(around(tool, key), key, off))], tool, 2)


@pytest.mark.parametrize(("enabled", "is_refused"), [(True, True), (False, False)])
def test_a_section_that_is_switched_off_decides_nothing(write: Write, enabled: bool, is_refused: bool):
    file = write({"train_batch_size": 8, "elasticity": {"enabled": enabled, "max_train_batch_size": 64}})
    if is_refused:
        with pytest.raises(RecipeError, match="`elasticity` decides what is learned, and has no counterpart"):
            convert([file])
    else:
        assert convert([file]).recipe["training"] == {"global_batch_size": 8}


def test_smoothed_labels_of_a_task_without_them_refuse_the_file(write: Write):
    with pytest.raises(RecipeError, match=r"`label_smoothing_factor` decides .* but `task.type` is masked_lm; remove"):
        convert([write({"output_dir": "x", "mlm_probability": 0.2, "label_smoothing_factor": 0.1})])


def test_a_file_of_llama_factory_never_becomes_a_training_of_all_weights(write: Write):
    lora = {"output_dir": "x", "learning_rate": 1e-4, "finetuning_type": "lora"}
    with pytest.raises(RecipeError, match="`finetuning_type` is not known as a key of TrainingArguments"):
        convert([write(lora)], Tool.TRAINING_ARGUMENTS)


def test_a_program_is_answered_with_the_way_to_save_its_arguments(write: Write):
    with pytest.raises(UsageError, match=r'args.py: is not JSON or YAML.*open\("args.json", "w"\)'):
        convert([write("from transformers import TrainingArguments", "args.py")])
