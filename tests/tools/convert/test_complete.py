"""The tables have every key of the pinned versions of the other tools, with its default.

An upgrade that adds a key or changes a default fails here, with the name of the key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar

import pytest

from trainer.tools.convert.foreign.tables import (
    ACCELERATE,
    DEEPSPEED,
    FIELDS,
    FSDP,
    OLD_NAMES,
    TRAINING_ARGUMENTS,
    Counterpart,
)


def test_every_field_of_training_arguments_has_its_row_and_no_row_is_left_over():
    from transformers import TrainingArguments

    fields = {field.name: field for field in dataclasses.fields(TrainingArguments) if field.init}
    rows = {key for key in FIELDS if "." not in key}
    assert fields.keys() - rows == set(), "new fields"
    assert rows - fields.keys() == set(), "fields that are gone: they belong to OLD_NAMES"
    assert fields.keys() & OLD_NAMES.keys() == set()
    wrong = {name: default for name, default in defaults(fields) if not FIELDS[name].is_default(default)}
    assert wrong == {}, "defaults that are not in our table"
    first = {name: default for name, default in defaults(fields) if FIELDS[name].defaults[0] != default}
    assert first == {}, "the default comes first"


def defaults(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, field in fields.items():
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        yield name, value.value if isinstance(value, Enum) else value


def test_every_key_of_the_accelerator_config_has_its_row():
    from transformers.trainer_pt_utils import AcceleratorConfig

    inner = {field.name for field in dataclasses.fields(AcceleratorConfig)}
    assert {key.removeprefix("accelerator_config.") for key in FIELDS if key.startswith("accelerator_config.")} == inner
    for field in dataclasses.fields(AcceleratorConfig):
        assert FIELDS[f"accelerator_config.{field.name}"].is_default(field.default), field.name


def test_unchanged_training_arguments_are_all_defaults(tmp_path):
    """`to_dict` resolves some fields; each of its values must count as a default."""
    from transformers import TrainingArguments

    written = TrainingArguments(output_dir=str(tmp_path)).to_dict()
    written |= {f"accelerator_config.{key}": value for key, value in written.pop("accelerator_config").items()}
    changed = {key for key, value in written.items() if not TRAINING_ARGUMENTS[key].is_default(value)}
    assert changed - {"output_dir"} == set()


class Asked(dict[str, Any]):
    """A DeepSpeed configuration that records the keys that were read."""

    seen: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def test_every_key_that_deepspeed_reads_has_its_row():
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    Asked.seen.clear()
    DeepSpeedConfig(Asked(train_batch_size=1))
    assert len(Asked.seen) > 30, "the trick works no more: DeepSpeed reads its configuration in another way"
    assert Asked.seen - DEEPSPEED.keys() == set()


def test_every_key_of_deepspeeds_sections_has_its_row():
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    for section, model in {
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    }.items():
        for name, field in model.model_fields.items():
            key = f"{section}.{field.alias or name}"
            assert key in DEEPSPEED, key
            row = DEEPSPEED[key]
            if row.defaults and row.key is None and isinstance(field.default, (bool, int, float, type(None))):
                assert row.is_default(field.default), (key, field.default)
    assert {f"activation_checkpointing.{key}" for key in ACT_CHKPT_DEFAULT} - DEEPSPEED.keys() == set()


def test_every_field_of_accelerates_file_has_its_row():
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    for config in (ClusterConfig, SageMakerConfig):
        assert {field.name for field in dataclasses.fields(config)} - ACCELERATE.keys() == set()
    for field in dataclasses.fields(ClusterConfig):
        if field.default is not dataclasses.MISSING:
            assert ACCELERATE[field.name].is_default(field.default), field.name


def test_every_option_of_accelerates_launcher_that_a_section_may_hold_has_its_row():
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    options = {action.dest for action in parser._actions}
    for prefix, section in (
        ("fsdp_", "fsdp_config"),
        ("megatron_lm_", "megatron_lm_config"),
        ("parallelism_config_", "parallelism_config"),
        ("dynamo_", "dynamo_config"),
    ):
        names = {option for option in options if option.startswith(prefix)}
        assert len(names) > 4, prefix
        assert {f"{section}.{name}" for name in names} - ACCELERATE.keys() == set()
    (group,) = (group for group in parser._action_groups if group.title == "DeepSpeed Arguments")
    names = {action.dest for action in group._group_actions}
    assert {f"deepspeed_config.{name}" for name in names} - ACCELERATE.keys() == set()


def test_both_spellings_of_fsdp_have_the_same_rows():
    for name, row in FSDP.items():
        assert ACCELERATE[f"fsdp_config.fsdp_{name}"] == TRAINING_ARGUMENTS[f"fsdp_config.{name}"] == row


@pytest.mark.parametrize("table", [TRAINING_ARGUMENTS, DEEPSPEED, ACCELERATE])
def test_a_key_without_counterpart_has_a_reason(table: Mapping[str, Counterpart]):
    assert [key for key, row in table.items() if row.key is None and not row.note] == []
