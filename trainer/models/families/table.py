"""The table of model families, and the lookup of a model's family; matching is strict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from trainer.base.errors import UsageError
from trainer.base.extensions import Registration, Table, consume
from trainer.models.families.family import ModelFamily, matches, relative_name

Value = TypeVar("Value")

CHECKPOINTING, COMPILE, SHARDING = "`activation_checkpointing`", "`compile`", "`parallel.strategy` fsdp or hsdp"
"""Keys that need the layers of a model, for messages."""

FAMILIES = Table[ModelFamily](
    {
        name: f"trainer.models.families.{row}"
        for name, row in {
            "bert": "bert:BERT", "roberta": "bert:ROBERTA", "xlm-roberta": "bert:XLM_ROBERTA",
            "electra": "bert:ELECTRA", "albert": "albert:ALBERT", "deberta-v2": "deberta:DEBERTA_V2",
            "distilbert": "distilbert:DISTILBERT", "modernbert": "modernbert:MODERNBERT", "gpt2": "gpt2:GPT2",
            "llama": "llama:LLAMA", "mistral": "llama:MISTRAL", "qwen2": "llama:QWEN2", "qwen3": "llama:QWEN3",
            "t5": "t5:T5", "bart": "bart:BART",
        }.items()
    }
)  # fmt: skip
"""The families by model type; a run imports its own."""

# Taken before extensions add their rows.
_SHIPPED = frozenset(FAMILIES)


def _add(row: Registration) -> None:
    if row.name in _SHIPPED:
        raise UsageError(f"the model family {row.name!r} ships with trainer; register another model type")
    if isinstance(row.value, str):  # of a folder
        FAMILIES[row.name] = row.value
        return
    family: ModelFamily = row.value
    if family.model_type != row.name:
        raise UsageError(f"the model family {row.name!r} must be of that model type, but is of {family.model_type!r}")
    FAMILIES[row.name] = family


consume("family", _add)


def family_of(model: nn.Module) -> ModelFamily:
    """Return the family of a transformers model, from the table or from transformers' own plan.

    Raises:
        UsageError: the model is in no family of the table, and transformers has no plan for it, or one that cannot be
            used.
    """
    from trainer.models.families.shipped import shipped_family

    config: Any = model.config
    family = FAMILIES.get(config.model_type) or shipped_family(model)
    if family is None:
        raise _of_no_family(config, "`parallel.tensor`")
    return family


def _of_no_family(config: Any, needed_by: str) -> UsageError:
    return UsageError(
        f"{needed_by} needs to find the layers of the model, but model type {config.model_type!r} is in no family of"
        f" models; known are {', '.join(sorted(FAMILIES))}, and those for which transformers ships a plan"
        " (`base_model_tp_plan`); add a file to `trainer/models/families/` and its row to `table.py`"
    )


def layers_pattern(config: Any) -> str | None:
    """Return the pattern of the repeated layers of a model type; None if they are unknown."""
    family = FAMILIES.get(config.model_type)
    if family:
        return family.layers
    from trainer.models.families.shipped import shipped_layers

    # A plan of transformers gives the layers, even if tensor ranks cannot use it.
    return shipped_layers(config)


def layers_of(model: nn.Module, needed_by: str = "this recipe") -> dict[str, nn.Module]:
    """Return the repeated layers of a model in order, by name.

    Args:
        needed_by: the subject of the message, such as a key.

    Raises:
        UsageError: the model is in no family, or its family's pattern matches nothing.
    """
    config: Any = model.config
    pattern = layers_pattern(config)
    if pattern is None:
        raise _of_no_family(config, needed_by)
    from trainer.parallel.pipeline.stand_ins import Absent

    base: Any = model.base_model
    layers = {
        name: module
        for name, module in base.named_modules()
        if matches(pattern, name) and not isinstance(module, Absent)  # `Absent`: of another pipeline stage
    }
    if not layers:
        raise UsageError(
            f"the family {config.model_type} must name the layers of this model, but `{pattern}` matches no module;"
            " correct `layers` of the family"
        )
    return layers


def in_table(model: Any) -> ModelFamily | None:
    """Return the family of a model in the table; None: there is none."""
    return FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))


def _matches_any(patterns: Iterable[str], model: nn.Module, name: str) -> bool:
    return any(matches(pattern, relative_name(model, name)) for pattern in patterns)


def _first_match(values: Mapping[str, Value], model: nn.Module, name: str) -> Value | None:
    return next((value for pattern, value in values.items() if _matches_any((pattern,), model, name)), None)


def called_dropouts(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return names for the dropouts that the module `name` calls as functions, by the model's family, in order."""
    called = family.called_dropouts if (family := in_table(model)) else {}
    return _first_match(called, model, name) or ()


def shared_product(model: nn.Module, name: str) -> str | None:
    """Return the method of the module `name` that multiplies a tensor that all rows share, by the model's family."""
    return _first_match(family.shared_products if (family := in_table(model)) else {}, model, name)


def residual_output(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return the forward function of the module `name` if it drops and adds a residual, by the model's family."""
    outputs = family.residual_outputs if (family := in_table(model)) else {}
    return _first_match(outputs, model, name)


def first_shared_call(model: nn.Module, name: str) -> int | None:
    """Return the first call of a dropout on a tensor that all rows share, by the model's family; None: none."""
    family = in_table(model)
    calls = (family.shared_dropouts, family.shared_second_calls) if family else ()
    return next((call for call, patterns in enumerate(calls) if _matches_any(patterns, model, name)), None)
