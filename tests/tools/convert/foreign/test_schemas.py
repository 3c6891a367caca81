"""Every key of the programs around the Trainer has a verdict, with the default of the program."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.tools.convert.foreign.list_keys import FILE, SCHEMAS, schemas
from trainer.tools.convert.foreign.tables import Kind
from trainer.tools.convert.sources import Tool

LISTED = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("tool", [tool for tool in Tool if tool.is_program])
def test_every_listed_key_has_its_row(tool: Tool):
    listed = LISTED[tool.value]["keys"]
    assert len(listed) > 5
    assert set(listed) - tool.table.keys() == set()


@pytest.mark.parametrize("tool", [tool for tool in Tool if tool.is_program])
def test_a_key_without_counterpart_has_a_reason(tool: Tool):
    assert [key for key, row in tool.table.items() if row.key is None and not row.note] == []


def test_the_lists_are_those_of_the_installed_packages():
    """An upgrade that adds a key fails here; `list_keys.py` writes the file anew."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("TRL is not installed")
    names = [tool for tool in SCHEMAS if tool.startswith("trl-")]
    folder = Path(found.origin).parents[1]
    now = {tool: schemas(folder, [tool])[tool] for tool in names}
    assert now == {tool: LISTED[tool] for tool in names}


@pytest.mark.parametrize(
    ("tool", "config"),
    [
        (Tool.TRL_SFT, "SFTConfig"),
        (Tool.TRL_DPO, "DPOConfig"),
        (Tool.TRL_KTO, "KTOConfig"),
        (Tool.TRL_REWARD, "RewardConfig"),
    ],
)
def test_defaults_are_those_of_trl(tool: Tool, config: str):
    trl = pytest.importorskip("trl")
    classes: list[Any] = [getattr(trl, config), trl.ModelConfig, trl.ScriptArguments]
    for fields in classes:
        for field in dataclasses.fields(fields):
            if not field.init or field.name == "datasets":
                continue
            default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]
            row = tool.table[field.name]
            if row.kind is Kind.LAUNCHER or not row.defaults:
                continue
            assert row.is_default(getattr(default, "value", default)), (field.name, default, row.defaults)


def test_defaults_are_those_of_sentence_transformers():
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.base.training_args import BaseTrainingArguments

    for field in dataclasses.fields(BaseTrainingArguments):
        row = Tool.SENTENCE_TRANSFORMER.table[field.name]
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]
        assert row.is_default(getattr(default, "value", default)), (field.name, default)
