from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.recipes import write_anew
from trainer.tools.convert.convert import Conversion, convert
from trainer.tools.convert.foreign.tables import TRAINING_ARGUMENTS, Counterpart
from trainer.tools.convert.sources import Tool

Write = Callable[..., Path]


def own_rows(tool: Tool) -> dict[str, Counterpart]:
    """Return the rows of a tool without those that a program takes from TrainingArguments as they are."""
    inherited = {key for key in TRAINING_ARGUMENTS if tool.table.get(key, TRAINING_ARGUMENTS[key]).argument == key}
    return {key: row for key, row in tool.table.items() if key not in inherited}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file, as text or as an object, into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write_file(content: Any, name: str = "args.json") -> Path:
        write_anew(Path(name), content if isinstance(content, str) else json.dumps(content))
        return Path(name)

    return write_file


@pytest.fixture
def of_arguments(write: Write) -> Callable[..., Conversion]:
    """Convert TrainingArguments with these keys, and with the model and data of an example script."""

    def converted(processes: int | None = 1, **keys: Any) -> Conversion:
        named = {"output_dir": "runs/x", "model_name_or_path": "bert", "task_name": "sst2"}
        return convert([write(named | keys)], None, processes)

    return converted
