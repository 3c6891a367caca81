"""Values of other tools in recipes; each key has an outcome, and conflicts are reported."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import ROOT
from tests.tools.convert.conftest import own_rows
from trainer.base.errors import ExitCode, RecipeError, TrainerError, UsageError
from trainer.cli import main
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.convert.convert import Conversion, convert
from trainer.tools.convert.draft import LEFT_OUT, Outcome
from trainer.tools.convert.foreign.tables import Kind
from trainer.tools.convert.sources import Tool

Write = Callable[..., Path]
OfArguments = Callable[..., Conversion]


def at(recipe: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; `...` if it is not written."""
    value: Any = recipe
    for part in path.split("."):
        value = value.get(part, ...) if isinstance(value, dict) else ...
    return value


def outcome(conversion: Conversion, key: str) -> Outcome:
    (found,) = [line.outcome for line in conversion.lines if line.item.key == key]
    return found


def text(conversion: Conversion, key: str) -> str:
    (found,) = [line.text for line in conversion.lines if line.item.key == key]
    return found


def accelerates(kind: str, **keys: Any) -> dict[str, Any]:
    return {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, **keys}


ARGUMENTS: list[tuple[dict[str, Any], str, Any]] = [
    ({"max_grad_norm": 0}, "training.max_grad_norm", None),
    ({"max_grad_norm": 0.5}, "training.max_grad_norm", 0.5),
    ({"max_steps": 100}, "training.max_steps", 100),
    ({"max_steps": 100, "num_train_epochs": 1.5}, "training.epochs", ...),
    ({"num_train_epochs": 2.0}, "training.epochs", 2),
    ({"num_train_epochs": 1.5}, "training.epochs", 1.5),
    ({"bf16": True}, "precision", "bf16"),
    ({"fp16": True}, "precision", "fp16"),
    ({"optim": "adamw_torch"}, "optimizer.name", ...),
    ({"optim": "sgd"}, "optimizer.name", "sgd"),
    (
        {"optim": "lomo"},
        "optimizer.name",
        "TODO: lomo has no counterpart: adamw, sgd, adafactor, adamw_8bit, muon, schedule_free_adamw or stable_adamw",
    ),
    ({"optim": "adamw_bnb_8bit"}, "optimizer.name", "adamw_8bit"),
    ({"optim": "paged_adamw_8bit"}, "optimizer.name", "adamw_8bit"),
    ({"optim": "schedule_free_adamw"}, "optimizer.name", "schedule_free_adamw"),
    ({"optim": "schedule_free_adamw"}, "schedule.name", "constant"),
    ({"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "warmup_steps": 10}, "schedule.warmup", 10),
    ({"adam_beta2": 0.98}, "optimizer.betas", [0.9, 0.98]),
    ({"lr_scheduler_type": "cosine"}, "schedule.name", "cosine"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 10}, "schedule.warmup", ...),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}, "schedule.warmup", 10),
    (
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        "schedule.name",
        "TODO: reduce_lr_on_plateau has no counterpart: linear, cosine, constant, warmup_stable_decay,"
        " cosine_with_restarts, polynomial, inverse_sqrt",
    ),
    ({"lr_scheduler_type": "polynomial"}, "schedule.min_rate", 1e-7 / 5e-5),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 5e-6}},
        "schedule",
        {"name": "cosine", "min_rate": 5e-6 / 5e-5},
    ),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 5e-6}'},
        "schedule",
        {"name": "cosine", "min_rate": 5e-6 / 5e-5},
    ),
    ({"deepspeed": '{"zero_optimization": {"stage": 2}}'}, "parallel.strategy", "zero2"),
    (
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
        "schedule",
        {"name": "cosine_with_restarts", "cycles": 2},
    ),
    (
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 5, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
        },
        "schedule",
        {"name": "warmup_stable_decay", "decay": 5, "decay_shape": "1-sqrt", "min_rate": 0.1},
    ),
    ({"warmup_steps": 0.05}, "schedule.warmup", 0.05),
    ({"warmup_steps": 0.05, "max_steps": 101}, "schedule.warmup", 6),
    ({"warmup_ratio": 0.1}, "schedule.warmup", 0.1),
    ({"warmup_ratio": 0.1, "warmup_steps": 7}, "schedule.warmup", 7),
    ({}, "evaluation.every", None),
    ({"eval_strategy": "epoch"}, "evaluation.every", "1 epoch"),
    ({"eval_strategy": "steps"}, "evaluation.every", "500 steps"),
    ({"eval_strategy": "steps", "logging_steps": 50}, "evaluation.every", "50 steps"),
    ({"eval_strategy": "steps", "eval_steps": 0.1, "max_steps": 95}, "evaluation.every", "10 steps"),
    ({"do_eval": True, "num_train_epochs": 2}, "evaluation.every", "2 epochs"),
    ({"evaluation_strategy": "steps", "eval_steps": 1}, "evaluation.every", "1 step"),
    ({"save_strategy": "no"}, "checkpoint.every", None),
    ({}, "checkpoint.every", "500 steps"),
    ({"save_strategy": "epoch"}, "checkpoint.every", "1 epoch"),
    ({"save_total_limit": 5}, "checkpoint.keep", 5),
    ({"logging_steps": 10}, "logging.every", "10 steps"),
    ({"logging_strategy": "epoch"}, "logging.every", "1 epoch"),
    ({"report_to": ["tensorboard"]}, "logging.to", ["console", "jsonl", "tensorboard"]),
    ({"eval_strategy": "epoch", "metric_for_best_model": "eval_accuracy"}, "evaluation.best", "accuracy"),
    ({"eval_strategy": "epoch", "load_best_model_at_end": True}, "evaluation.best", "loss"),
    ({"train_sampling_strategy": "group_by_length"}, "data.group_by_length", True),
    ({"task_name": None, "train_file": "a.csv", "validation_split_percentage": 10}, "data.validation", 0.1),
    ({"validation_split_percentage": 10}, "data.validation", "validation"),
    ({"group_by_length": True}, "data.group_by_length", True),
    ({"gradient_checkpointing": True}, "activation_checkpointing", "full"),
    ({"fsdp": "full_shard auto_wrap"}, "parallel.strategy", "fsdp"),
    ({"fsdp": "shard_grad_op offload"}, "parallel.reshard_after_forward", False),
    ({"fsdp": "shard_grad_op offload"}, "parallel.offload", "parameters"),
    ({"fsdp": "hybrid_shard"}, "parallel.strategy", "hsdp"),
    ({"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": False}}, "parallel.reshard_after_forward", False),
    ({"fsdp_config": {"activation_checkpointing": True}}, "activation_checkpointing", ...),  # fsdp is off
    ({"ddp_timeout": 60}, "parallel.stall_timeout", "60 seconds"),
    ({"run_name": "my run: 1"}, "name", "my-run-1"),
    ({"per_device_eval_batch_size": 8}, "evaluation.batch_size", 8),
    ({"seed": 7}, "training.seed", 7),
    ({"task_name": "stsb"}, "task.type", "sequence_regression"),
    ({"task_name": "mnli"}, "data.validation", "validation_matched"),
    (
        {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 64},
        "training.global_batch_size",
        64,
    ),
]


@pytest.mark.parametrize(("keys", "path", "value"), ARGUMENTS, ids=[f"{keys}-{path}" for keys, path, _ in ARGUMENTS])
def test_training_arguments(keys: dict[str, Any], path: str, value: Any, of_arguments: OfArguments):
    assert at(of_arguments(**keys).recipe, path) == value


STRATEGIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (accelerates("NO"), {"strategy": ...}),
    (accelerates("MULTI_GPU"), {"strategy": "ddp"}),
    (accelerates("FSDP", fsdp_config={"fsdp_version": 2}), {"strategy": "fsdp"}),
    (accelerates("FSDP", fsdp_config={"fsdp_sharding_strategy": 4}), {"strategy": "hsdp", "shard": ...}),
    (
        accelerates("FSDP", fsdp_config={"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}),
        {"strategy": "fsdp", "reshard_after_forward": False},
    ),
    (accelerates("FSDP", fsdp_config={"fsdp_sharding_strategy": "NO_SHARD"}), {"strategy": "ddp"}),
    (accelerates("FSDP", fsdp_config={"fsdp_offload_params": True}), {"strategy": "fsdp", "offload": "parameters"}),
    (
        accelerates(
            "FSDP",
            fsdp_config={"fsdp_version": 2},
            parallelism_config={
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2,
            },
        ),
        {"strategy": "hsdp", "shard": 2, "tensor": 2},
    ),
    (accelerates("DEEPSPEED", deepspeed_config={"zero_stage": 3}), {"strategy": "zero3"}),
    (
        accelerates(
            "DEEPSPEED",
            deepspeed_config={"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
        ),
        {"strategy": "zero3", "offload": "parameters"},
    ),
    (
        accelerates("DEEPSPEED", deepspeed_config={"zero_stage": 2, "offload_optimizer_device": "nvme"}),
        {"offload": "TODO: deepspeed_config.offload_optimizer_device nvme has no counterpart: offload uses CPU memory"},
    ),
    (
        accelerates(
            "MEGATRON_LM",
            megatron_lm_config={
                "megatron_lm_tp_degree": 2,
                "megatron_lm_pp_degree": 2,
                "megatron_lm_num_micro_batches": 4,
                "megatron_lm_sequence_parallelism": True,
                "megatron_lm_use_distributed_optimizer": True,
            },
        ),
        {
            "strategy": "fsdp",
            "tensor": 2,
            "sequence": True,
            "pipeline": {"stages": 2, "microbatches": 4},
        },
    ),
    (
        accelerates(
            "MEGATRON_LM",
            megatron_lm_config={"megatron_lm_tp_degree": 2, "megatron_lm_use_distributed_optimizer": True},
        ),
        {"strategy": "zero1", "tensor": 2},
    ),
    (accelerates("XLA"), {"strategy": "TODO: distributed_type XLA has no counterpart: CUDA GPUs and CPUs only"}),
]


@pytest.mark.parametrize(("keys", "expected"), STRATEGIES, ids=[str(keys) for keys, _ in STRATEGIES])
def test_layouts_of_accelerate(keys: dict[str, Any], expected: dict[str, Any], write: Write):
    conversion = convert([write(json.dumps({"mixed_precision": "bf16"} | keys), "a.yaml")])  # JSON is YAML
    assert {key: at(conversion.recipe, f"parallel.{key}") for key in expected} == expected
    assert conversion.recipe["precision"] == "bf16"


def test_yaml_reads_an_unquoted_no_as_false(write: Write):
    conversion = convert([write("distributed_type: NO\nmixed_precision: no\nnum_processes: 1\n", "a.yml")])
    assert conversion.recipe.get("precision", "fp32") == "fp32"
    assert outcome(conversion, "distributed_type") is Outcome.SAME


# Batch


@pytest.mark.parametrize(
    ("keys", "yaml", "processes", "size"),
    [
        ({"per_device_train_batch_size": 4}, None, 3, 12),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 5}, None, 2, 40),
        ({"accelerator_config": {"split_batches": True}}, None, 2, 8),
        ({"accelerator_config": {"split_batches": True}}, None, None, 8),
        ({}, accelerates("MULTI_GPU", num_processes=4), None, 32),
        ({}, accelerates("MULTI_GPU", num_processes=4), 2, 16),
        (
            {},
            accelerates("FSDP", num_processes=8, parallelism_config={"parallelism_config_tp_size": 2}, fsdp_config={}),
            None,
            32,
        ),
        (
            {"gradient_accumulation_steps": 4},
            accelerates(
                "MEGATRON_LM",
                num_processes=8,
                megatron_lm_config={
                    "megatron_lm_pp_degree": 2,
                    "megatron_lm_tp_degree": 2,
                    "megatron_lm_num_micro_batches": 4,
                },
            ),
            None,
            64,
        ),
        ({}, None, None, "TODO: 8 rows x 1 accumulated x the number of processes; give --processes N"),
    ],
)
def test_the_global_batch_counts_processes(keys, yaml, processes, size, write: Write):
    files = [write({"output_dir": "x"} | keys)]
    if yaml is not None:
        files.append(write(json.dumps(yaml), "a.yaml"))
    assert at(convert(files, None, processes).recipe, "training.global_batch_size") == (... if size == 32 else size)


def test_processes_that_no_layout_holds(write: Write):
    yaml = accelerates("MEGATRON_LM", megatron_lm_config={"megatron_lm_tp_degree": 2})
    with pytest.raises(RecipeError, match="multiple of the 2 ranks of one model, but is 3"):
        convert([write({"output_dir": "x"}), write(json.dumps(yaml), "a.yaml")], None, 3)


def test_deepspeeds_batch_that_contradicts_the_product_is_left_to_the_user(write: Write):
    files = [
        write({"output_dir": "x", "per_device_train_batch_size": 4}),
        write({"train_batch_size": 64, "zero_optimization": {"stage": 1}}, "ds.json"),
    ]
    todo = convert(files, None, 2).todo["training.global_batch_size"]
    assert "conflict: 64 from train_batch_size 64 (ds.json:1:2), or 8 from per_device" in todo


# Contradictions and defaults


def test_a_value_that_was_asked_for_wins_over_another_files_default(write: Write):
    dumped = {"output_dir": "x", "learning_rate": 5e-5, "bf16": False, "fp16": False}
    deepspeed = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
    }
    conversion = convert([write(dumped), write(deepspeed, "ds.json")], None, 1)
    assert (conversion.recipe["optimizer"]["learning_rate"], conversion.recipe["precision"]) == (1e-4, "bf16")
    assert outcome(conversion, "learning_rate") is Outcome.UNREAD
    assert "overrides the default" in text(conversion, "learning_rate")


def test_two_values_that_were_asked_for_are_a_contradiction(write: Write):
    files = [
        write({"output_dir": "x", "learning_rate": 2e-5, "bf16": True}),
        write({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "fp16": {"enabled": True}}, "ds.json"),
        write("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n", "a.yaml"),
    ]
    todo = convert(files, None, 1).todo
    assert {"optimizer.learning_rate", "precision"} <= todo.keys()
    assert "2e-05 from learning_rate 2e-05 (args.json:1:21)" in todo["optimizer.learning_rate"]


@pytest.mark.parametrize(
    ("key", "value", "strategy"),
    [("fsdp", "full_shard", "fsdp"), ("deepspeed", {"zero_optimization": {"stage": 3}}, "zero3")],
)
def test_plain_ranks_of_accelerate_leave_the_strategy_to_the_trainer(key, value, strategy, write: Write):
    yaml = write(json.dumps(accelerates("MULTI_GPU", num_processes=2)), "a.yaml")
    conversion = convert([write({"output_dir": "x", key: value}), yaml])
    assert conversion.recipe["parallel"]["strategy"] == strategy
    assert outcome(conversion, "distributed_type") is Outcome.SAME


def test_two_strategies_are_a_contradiction(write: Write):
    files = [
        write({"zero_optimization": {"stage": 3}}, "ds.json"),
        write("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n", "a.yaml"),
    ]
    assert "conflict" in convert(files).todo["parallel.strategy"]


def test_keys_of_another_meaning_are_reported(of_arguments: OfArguments):
    conversion = of_arguments(
        warmup_steps=10, seed=1, gradient_accumulation_steps=2, eval_strategy="epoch", load_best_model_at_end=True
    )
    for key in ("warmup_steps", "seed", "gradient_accumulation_steps", "load_best_model_at_end"):
        assert outcome(conversion, key) is Outcome.DIFFERS, key


def test_deepspeeds_schedules(write: Write):
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}}
    conversion = convert([write({"train_batch_size": 8, "scheduler": scheduler})])
    assert conversion.recipe["schedule"] == {"name": "cosine", "min_rate": 0.0001, "warmup": 10}
    assert conversion.recipe["training"]["max_steps"] == 100
    assert "logarithmic" in text(conversion, "scheduler.type")


def test_an_unknown_argument_of_a_schedule_refuses_the_file(of_arguments: OfArguments):
    with pytest.raises(
        RecipeError, match=r"`lr_scheduler_kwargs` decides what is learned.*no argument warmup_type here"
    ):
        of_arguments(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"warmup_type": "cosine"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": "num_cycles=2"}, "must be an object of arguments"),
        ({"accelerator_config": "{split_batches: true}"}, "`accelerator_config` must be an object in JSON, but Expect"),
    ],
)
def test_texts_in_place_of_objects_refuse_the_file(of_arguments: OfArguments, given: dict[str, Any], words: str):
    with pytest.raises(RecipeError, match=words):
        of_arguments(**given)


def test_a_todo_is_nothing_that_check_would_take(of_arguments: OfArguments):
    """A section that takes any text has a comment instead."""
    conversion = of_arguments(task_name="mrcp")
    assert "mrcp is not a task of GLUE: cola, " in conversion.todo["data"]
    assert "data" not in conversion.recipe
    conversion = of_arguments(task_name=None, mlm_probability=0.2, model_name="other", train_file="a.csv")
    assert conversion.todo["task"] == '"text": the column that holds the text'
    assert "conflict" in conversion.todo["model"]
    assert (conversion.recipe["task"], conversion.recipe.get("model")) == (
        {"type": "masked_lm", "mask_probability": 0.2},
        None,
    )


def test_values_of_defaults_are_reported(of_arguments: OfArguments):
    shown = of_arguments().report()
    words = 'default of TrainingArguments: logging_strategy "steps", logging_steps 500 -> `logging.every` "500 steps"'
    assert words in shown
    assert "save_total_limit null -> the Trainer keeps every checkpoint" in shown


def test_a_file_alone_lists_the_missing_files(write: Write):
    conversion = convert([write({"train_batch_size": "auto", "zero_optimization": {"stage": 2}})])
    assert conversion.todo.keys() == {"name", "task", "model", "data", "training", "optimizer"}
    assert '// TODO "task": the task and its columns' in conversion.text()
    assert outcome(conversion, "train_batch_size") is Outcome.TODO


# No key is swallowed


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("tool", Tool)
def test_no_key_is_swallowed_or_ends_in_a_crash(tool: Tool, write: Write):
    """Convert every key of each table with its default, and with a value of another type."""
    left_out = []
    others = itertools.cycle(["x", None, True, 2, 0.5, "auto", ["a"], {"a": 1}])
    for key, row in own_rows(tool).items():
        for value in [*row.defaults[:1], next(others)]:
            try:
                conversion = convert([write(nested(key, value))], tool, 2)
            except TrainerError:  # reported with its place
                continue
            assert [line for line in conversion.lines if line.item.name.startswith(key)], (key, value)
            conversion.report(everything=True)
            left_out += [(key, value) for line in conversion.lines if line.text.startswith(LEFT_OUT)]
    assert left_out == []


@pytest.mark.parametrize("file", sorted((ROOT / "launchers").glob("accelerate*.yaml")), ids=lambda file: file.name)
def test_files_of_our_own_launchers_hold_no_unknown_key(file: Path):
    conversion = convert([file])
    assert conversion.lines
    assert {line.outcome for line in conversion.lines} <= {
        Outcome.CONVERTED,
        Outcome.LAUNCHER,
        Outcome.DEFAULT,
        Outcome.SAME,
    }


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("lerning_rate", 1.0, "did you mean `learning_rate`? Or remove it to train without it"),
        ("dataset_fraction", 1.0, "correct its name, or remove it to train without it"),
        ("max_grad_nrom", 0, "did you mean `max_grad_norm`? Or remove it to train without it"),  # 0 turns clipping off
        ("ignore_pad_token_for_loss", False, "correct its name, or remove it to train without it"),
    ],
)
def test_an_unknown_key_refuses_the_file(of_arguments: OfArguments, key: str, value: object, fix: str):
    with pytest.raises(RecipeError) as caught:
        of_arguments(**{key: value})
    rule = f"`{key}` is not known as a key of TrainingArguments, and may decide what is learned"
    assert f"{rule}; {fix}" in str(caught.value)
    conversion = of_arguments(**{key: None})
    assert outcome(conversion, key) is Outcome.UNKNOWN
    assert key in conversion.report()


@pytest.mark.parametrize(
    ("key", "value", "usual"),
    [
        ("average_tokens_across_devices", False, True),
        ("dataloader_drop_last", True, False),
        ("line_by_line", False, True),
        ("train_sampling_strategy", "sequential", "random"),
    ],
)
def test_an_unsupported_key_of_the_training_refuses_the_file(of_arguments: OfArguments, key: str, value, usual):
    with pytest.raises(RecipeError, match=f"`{key}` decides what is learned"):
        of_arguments(**{key: value})
    assert of_arguments(**{key: usual}).lines


def test_the_report_lists_changes_and_with_all_every_key(of_arguments: OfArguments):
    conversion = of_arguments(torch_compile=True, neftune_noise_alpha=None, eval_delay=0, push_to_hub=True)
    short, long = conversion.report(), conversion.report(everything=True)
    assert "torch_compile" in short
    assert "push_to_hub" in short
    assert "neftune_noise_alpha" not in short
    assert "eval_delay" not in short
    assert all(line.item.key in long for line in conversion.lines)


def test_keys_without_counterpart_differ_from_keys_already_in_effect():
    kinds = {key: row.kind for key, row in Tool.TRAINING_ARGUMENTS.table.items()}
    assert kinds["torch_compile"] is Kind.NONE
    assert kinds["dataloader_pin_memory"] is Kind.SAME
    assert kinds["local_rank"] is Kind.LAUNCHER


# Whole recipes


def test_a_converted_recipe_passes_check(write: Write, tmp_path: Path):
    """Three files, one of them named in another, and a recipe in another folder."""
    write("sentence,label\nit was good,1\nit was bad,0\n", "train.csv")
    arguments = {
        "output_dir": "runs/x",
        "model_name_or_path": "google-bert/bert-base-uncased",
        "train_file": "train.csv",
        "validation_file": "train.csv",
        "text_column_names": "sentence",
        "label_column_name": "label",
        "metric_name": "f1",
        "eval_strategy": "epoch",
        "metric_for_best_model": "f1",
        "deepspeed": "ds.json",
        "gradient_accumulation_steps": 2,
        "bf16": True,
    }
    write(
        "{/* ZeRO */ 'x': 1}".replace("'x': 1", '"train_batch_size": "auto", "zero_optimization": {"stage": 3}'),
        "ds.json",
    )
    write(
        "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {deepspeed_config_file: ds.json}\n", "a.yaml"
    )
    write(arguments)
    (tmp_path / "there").mkdir()
    assert main(["convert", "args.json", "a.yaml", "--output", "there/recipe.json"]) == ExitCode.DONE
    resolved = load_recipe("there/recipe.json")
    plan = plan_run(resolved.recipe, 4)
    assert (plan.strategy.name, plan.batch.global_batch_size, plan.batch.num_microbatches) == ("zero3", 64, 2)
    assert resolved.values["data.train"] == str(tmp_path / "train.csv")
    assert resolved.values["task.metrics"] == ["f1"]
    assert resolved.values["precision"] == "bf16"


def test_a_recipe_that_lacks_something_does_not_pass_check(write: Write, capsys):
    write({"output_dir": "x", "num_train_epochs": 0})
    assert main(["convert", "args.json", "--output", "r.json", "--processes", "1"]) == ExitCode.DONE
    assert main(["check", "r.json"]) == ExitCode.USER
    shown = capsys.readouterr().err
    assert "`task` is missing" in shown
    assert "`training.max_steps` must be an integer" in shown


def test_the_outputs(write: Write, capsys):
    write({"output_dir": "x", "torch_compile": True})
    assert main(["convert", "args.json", "--processes", "2"]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert shown.out.startswith("{\n")
    assert "torch_compile true" in shown.err
    assert main(["convert", "args.json", "--processes", "2", "--json"]) == ExitCode.DONE
    whole = json.loads(capsys.readouterr().out)
    assert whole["recipe"]["training"] == {"global_batch_size": 16}
    assert whole["recipe"]["logging"] == {"every": "500 steps"}
    (row,) = [row for row in whole["report"] if row["key"] == "torch_compile"]
    assert (row["outcome"], row["place"]) == ("no counterpart", "args.json:1:21")
    assert whole["todo"].keys() == {"task", "model", "data"}


def test_nothing_is_overwritten(write: Write, capsys):
    write({"output_dir": "x"})
    Path("r.json").write_text("mine")
    assert main(["convert", "args.json", "--output", "r.json"]) == ExitCode.USER
    assert Path("r.json").read_text() == "mine"
    assert "--output must name a new file, but r.json exists" in capsys.readouterr().err
    assert main(["convert", "args.json", "--output", "r.yaml"]) == ExitCode.USER
    assert "`--output` must end with .json, but is r.yaml" in capsys.readouterr().err  # its comments are not YAML


# Files


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ("{", "a.json", "a.json:1:2: expected a key in double quotes"),
        ("a: [", "a.yaml", "a.yaml:1:5: a value is missing here; write it, or null"),
        (
            "num_machines: 1\nnum_machines: 2\n",
            "a.yaml",
            "a.yaml:2:1: `num_machines` is a duplicate key in one object; first at a.yaml:1:1",
        ),
        ("[]", "a.json", "must be an object with keys, but is []"),
        ('{"foo": 1}', "a.json", "has no key that only one tool has"),
        ('{"train_batch_size": 1, "num_machines": 1}', "a.json", "select the tool with one of --from deepspeed"),
        ('{"debug": true}', "a.json", "one of --from training-arguments, --from deepspeed, --from accelerate"),
    ],
)
def test_files_of_an_unknown_tool(content: str, name: str, words: str, write: Write):
    with pytest.raises(UsageError) as caught:
        convert([write(content, name)])
    assert words in str(caught.value)


def test_files_that_are_not_there_or_of_one_tool_twice(write: Write):
    with pytest.raises(UsageError, match=r"nowhere.json: cannot be read: No such file"):
        convert([Path("nowhere.json")])
    with pytest.raises(UsageError, match=r"b.json: is a second file of TrainingArguments, after a.json"):
        convert([write({"output_dir": "x"}, "a.json"), write({"output_dir": "x"}, "b.json")])


def test_values_that_cannot_be_are_refused_at_once_with_their_places(of_arguments: OfArguments):
    with pytest.raises(RecipeError) as caught:
        of_arguments(learning_rate="fast", max_steps=1.5, bf16="yes")
    assert [problem.partition(" must")[0].split(" ")[1] for problem in caught.value.problems] == [
        "`bf16`",
        "`max_steps`",
        "`learning_rate`",
    ]
    with pytest.raises(
        RecipeError, match=r"args.json:1:\d+: `optimizer.learning_rate` must be a number above 0, but is -1"
    ):
        of_arguments(learning_rate=-1)


def test_shared_sections_are_distinguished_by_their_form(write: Write):
    with pytest.raises(UsageError):
        convert([write({"fp16": 1})])
    assert convert([write({"bf16": {"enabled": True}})]).recipe["precision"] == "bf16"
