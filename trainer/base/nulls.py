"""Values without the nulls that Arrow writes for keys that an object lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def item_of(feature: Any) -> Any:
    """Return the type of the items of a column of lists; None for other columns."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)


def given(value: Any, feature: Any) -> Any:
    """Return a value without the nulls of structs, which Arrow writes for absent keys; JSON keeps its own nulls."""
    if isinstance(value, dict) and isinstance(feature, Mapping):
        return {key: given(inner, feature[key]) for key, inner in value.items() if inner is not None}
    if (item := item_of(feature)) is not None and value is not None:
        return [given(inner, item) for inner in value]
    return value
