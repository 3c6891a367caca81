"""Files of rows in the current folder of a test, and their splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.data.sources import Splits, load_splits
from trainer.recipe.schema import FileData


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(folder: Path, name: str, content: str | bytes) -> str:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def load_files(
    train: str | list[str], validation: Any = None, file_format: str | None = None, **options: Any
) -> Splits:
    return load_splits(FileData(source="files", train=train, validation=validation, format=file_format, **options))
