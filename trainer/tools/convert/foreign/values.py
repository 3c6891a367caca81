"""Values of other tools' keys as values of a recipe, for the rows of the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.base.extensions import registered, resolved

Value = Callable[[Any], Any]
"""From a value of the tool to a value of the recipe, a `Converted` or a `Todo`; `...`: other keys decide.

It raises `WrongValueError`.
"""


class WrongValueError(ValueError):
    """The tool does not accept the value; the message is the rule, such as "a number"."""


@dataclass(frozen=True)
class Todo:
    """A value that the files do not have; in the recipe, a text that validation refuses."""

    text: str

    def __str__(self) -> str:
        return f"TODO: {self.text}"


@dataclass(frozen=True)
class Converted:
    """A value with a remark for the report."""

    value: Any
    note: str = ""
    differs: bool = False  # whether the remark describes different behaviour


def number(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise WrongValueError("a number")


def whole(value: object) -> int:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value == int(value):
        return int(value)
    raise WrongValueError("an integer")


def positive(value: object) -> int:
    try:
        count = whole(value)
    except WrongValueError:
        count = 0
    if count < 1:
        raise WrongValueError("an integer of at least 1")
    return count


def flag(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):  # as `accelerate config` writes
        return value.lower() == "true"
    raise WrongValueError("true or false")


def text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise WrongValueError("text")


def names(value: object) -> list[str]:
    found = value.split(",") if isinstance(value, str) else value
    if isinstance(found, list) and all(isinstance(name, str) for name in found):
        return [name.strip() for name in found if name.strip()]
    raise WrongValueError("a list of names, or a text with commas")


def switch(on: str) -> Value:
    """Return the conversion of true to `on`, and of false to "none"."""
    return lambda value: on if flag(value) else "none"


def above_zero(value: object) -> float | None:
    """Return a number above 0; None for any other, which turns the feature off."""
    found = 0 if value is None else number(value)
    return found if found > 0 else None


def router_loss(value: object) -> Converted | None:
    coefficient = above_zero(value)
    note = "balances the experts over the global batch, not within each microbatch"
    return Converted(coefficient, note, differs=True) if coefficient else None


def device(offloaded: str) -> Value:
    """Return the conversion of DeepSpeed's device for the state that `offloaded` names."""

    def converted(value: object) -> str | Todo:
        match "none" if value is None else text(value):
            case "none":
                return "none"
            case "cpu":
                return offloaded
            case "nvme":
                return Todo("{key} nvme has no counterpart: offload uses CPU memory")
            case other:
                return Todo(f"{{key}} {other} is unknown")

    return converted


_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw", "adam"), "adamw"),
    "sgd": "sgd",
}


def optimizer_names() -> str:
    """Return the names of all optimizers, for messages."""
    *names, last = dict.fromkeys((*_OPTIMIZERS.values(), *(row.name for row in registered("optimizer"))))
    return f"{', '.join(names)} or {last}"


def optimizer(value: object) -> Converted | Todo:
    name = text(value)
    if name in _OPTIMIZERS:
        return Converted(_OPTIMIZERS[name])
    for row in registered("optimizer"):
        section = resolved(row.value)
        if name in (section.foreign_names or (row.name,)):
            note = section.difference + "; nothing is paged" * name.startswith("paged_")
            return Converted(row.name, note, bool(note))
    return Todo(f"{name} has no counterpart: {optimizer_names()}")


def optimizer_of_deepspeed(value: object) -> Converted | Todo:
    return optimizer(text(value).lower())


def _above_zero_unless_auto(value: object) -> Any:
    return ... if value == "auto" else above_zero(value)  # TrainingArguments replace "auto"


_CONVERSIONS: Mapping[str, Value] = {
    "number": number,
    "positive": positive,
    "text": text,
    "above_zero": above_zero,
    "above_zero_unless_auto": _above_zero_unless_auto,
    "router_loss": router_loss,
    "optimizer": optimizer,
    "optimizer_of_deepspeed": optimizer_of_deepspeed,
}
_CONVERSIONS_TO: Mapping[str, Callable[[str], Value]] = {"switch": switch, "device": device}


def named(words: str) -> Value:
    """Return a conversion by its name in the tables, perhaps with an argument: `number`, `switch full`."""
    name, _, argument = words.partition(" ")
    return _CONVERSIONS_TO[name](argument) if argument else _CONVERSIONS[name]
