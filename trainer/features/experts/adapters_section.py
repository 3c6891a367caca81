"""The key `model.adapter.target_parameters` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

from trainer.recipe.paths import shown_value
from trainer.recipe.schema import Adapter, Model
from trainer.recipe.schema.fields import Patterns
from trainer.recipe.schema.section import Contradiction, clash


class ExpertAdapterKeys(Adapter):
    """The matrices of experts to adapt."""

    target_parameters: Patterns | Literal["all-experts"] | None = None
    """Matrices of experts with a product for each expert, by names or patterns such as `experts.down_proj`;
    `all-experts`: all of them; null: none."""


def contradictions(model: Model) -> Iterator[Contradiction]:
    """Yield the keys of an adapter that PEFT does not have for experts."""
    adapter, key = model.adapter, "model.adapter.target_parameters"
    if adapter is None or cast(ExpertAdapterKeys, adapter).target_parameters is None:
        return
    for name, plain in (("dropout", 0.0), ("type", "lora"), ("start", None)):
        if (value := getattr(adapter, name)) != plain:
            text = f"must be {shown_value(plain)} with `{key}`, as in PEFT, but is {shown_value(value)}; change one"
            yield clash(text, f"model.adapter.{name}", key)
