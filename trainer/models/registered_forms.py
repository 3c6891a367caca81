"""Forms of frozen weights beneath an adapter; a feature registers each under its key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from trainer.base.errors import UsageError
from trainer.base.extensions import registered, resolved
from trainer.parallel.stored_in_parts import CODES
from trainer.recipe.schema import Model

if TYPE_CHECKING:
    from trainer.models.weight_form import EncodedWeight, WeightForm


def form_of(recipe: Model) -> WeightForm | None:
    """Return the form of frozen weights that a recipe asks for, or None."""
    for row in registered("weight_form"):
        if (value := getattr(recipe, row.name.removeprefix("model."))) is not None:
            form: WeightForm = resolved(row.value)(row.name, value)
            return form
    return None


def without_form() -> dict[str, None]:
    """Return the values of the keys of forms in a recipe that asks for none."""
    return dict.fromkeys(row.name.removeprefix("model.") for row in registered("weight_form"))


def encoded_weights(names: Collection[str]) -> dict[str, EncodedWeight]:
    """Return the weights that tensors of a model stand for, by the names of the weights."""
    if not any(name.rpartition(".")[2] == CODES for name in names):
        return {}
    forms = [resolved(row.value) for row in registered("weight_form")]
    return {name: weight for form in forms for name, weight in form.weights_in(names).items()}


def require_readable(recipe: Model, place: str, described: object) -> None:
    """Refuse files of weights that no form reads, by the `quantization_config` of their configuration."""
    keys = described if isinstance(described, Mapping) else {}
    if not any(resolved(row.value).reads(recipe, place, keys) for row in registered("weight_form")):
        raise unreadable(place, str(keys.get("quant_method", "")))


def unreadable(place: str, kind: str) -> UsageError:
    """Return the error of quantised files that cannot be read."""
    use = "".join(f", and set `{row.name}`" for row in registered("weight_form"))
    return UsageError(
        f"{place} is that of quantised weights{f' ({kind})' if kind else ''}, which cannot be read; name the model that"
        f" they were made from{use}"
    )
