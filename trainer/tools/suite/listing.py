"""The list of a suite: a file of recipes with overrides, or a shipped one by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.base.errors import UsageError
from trainer.recipe.reading.files import read_file, recipe_endings, shown_path
from trainer.recipe.schema.fields import Name, NameKey

_SHIPPED = Path(__file__).parent / "suites"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Entry(_Strict):
    """A recipe of a suite.

    `recipe` is a shipped name, or a file relative to that of the suite. The score is the mean of `metrics`; null: the
    metric that selects the best model. `scale` is a factor of the score, such as 0.01 for metrics from 0 to 100.
    """

    recipe: Name
    name: Name | None = None
    overrides: dict[NameKey, Any] = {}
    metrics: list[Name] | None = Field(None, min_length=1)
    scale: float = Field(1.0, gt=0)

    @property
    def words(self) -> list[str]:
        """The overrides as texts."""
        return [f"{key}={json.dumps(value)}" for key, value in self.overrides.items()]


class Suite(_Strict):
    """A list of recipes, with a `note` on the mean."""

    name: Name
    note: str | None = None
    recipes: list[Name | Entry] = Field(min_length=1)

    @property
    def entries(self) -> list[Entry]:
        """The recipes; a text is one without overrides."""
        return [Entry(recipe=one) if isinstance(one, str) else one for one in self.recipes]


def shipped_suites() -> list[str]:
    """Return the names of the shipped lists."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def read_suite(source: str) -> tuple[Suite, Path]:
    """Return a list, and the folder of its file.

    Raises:
        UsageError: there is no such file, or it holds no list of recipes.
    """
    file = Path(source).expanduser()
    if not file.is_file():
        file = _SHIPPED / f"{source}.json"
        if source not in shipped_suites():
            raise UsageError(
                f"`SUITE` is {source!r}, which is no file; name a file ({' or '.join(recipe_endings())}), or one of"
                f" {', '.join(shipped_suites())}"
            )
    node, problems = read_file(file)
    if problems:
        raise UsageError("; ".join(map(str, problems)))
    try:
        return Suite.model_validate(node.plain()), file.parent
    except ValidationError as error:
        raise UsageError(f"{shown_path(file)}: {_in_words(error)}") from error


def _in_words(error: ValidationError) -> str:
    """Return the first problem of a list with its place."""
    # An entry that is no text is one with keys.
    found = error.errors(include_url=False)
    fitting = (one for one in found if one["loc"][-1:] != ("constrained-str",) or isinstance(one["input"], str))
    first = next(fitting, found[0])
    path: Sequence[Any] = [part for part in first["loc"] if part not in ("Entry", "constrained-str")]
    return (
        f"`{'.'.join(map(str, path)) or 'SUITE'}`: {first['msg'].lower()}; write"
        ' {"name": "mine", "recipes": ["ner_sample", {"recipe": "bert_sample", "overrides": {"training.epochs": 4}}]}'
    )
