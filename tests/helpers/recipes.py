"""Recipes that tests modify and write into files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from trainer.base.errors import RecipeError
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import SequenceClassification

CLASS_METRICS = ", ".join(
    f'"{name}"'
    for (words,) in [get_args(SequenceClassification.model_fields["metrics"].annotation)]
    for name in get_args(words)
)
"""The metrics of classes, also those of features, as messages list them."""

MINIMAL: dict[str, Any] = {
    "name": "minimal",
    "task": {"type": "sequence_classification", "text": "sentence"},
    "model": {"name_or_path": "google-bert/bert-base-uncased"},
    "data": {"source": "hub", "name": "nyu-mll/glue", "subset": "sst2"},
}


def write_anew(path: Path, content: str | bytes) -> None:
    """Write a file, also over an older one. ext4 would flush a file that is truncated to the disk, some 5 ms each."""
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def minimal() -> dict[str, Any]:
    """A valid recipe with the required keys only. A test may modify it."""
    return copy.deepcopy(MINIMAL)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that writes a recipe, as text or as an object, into the current folder and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_recipe(content: object, name: str = "r.json") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_anew(path, content if isinstance(content, str) else json.dumps(content))
        return name

    return write_recipe


@pytest.fixture
def problems(write: Callable[..., str]) -> Callable[..., list[str]]:
    """A function that returns the problems of a recipe with overrides."""

    def problems_of(content: object, *overrides: str) -> list[str]:
        with pytest.raises(RecipeError) as caught:
            load_recipe(write(content), overrides)
        return list(caught.value.problems)

    return problems_of
