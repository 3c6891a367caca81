"""`trainer`: one JSON recipe, any layout, the same training.

Importing the package imports no torch: each name below is imported at its first use. See `docs/python.md`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trainer.api import (
        RunResult,
        assemble,
        audit,
        certify,
        check,
        compare,
        evaluate,
        export,
        load_recipe,
        plan,
        predict,
        preview,
        register_family,
        register_format,
        register_logging,
        register_metric,
        register_optimizer,
        register_recipes,
        register_schedule,
        register_strategy,
        register_task,
        reproduce,
        run,
        search,
        suite,
    )
    from trainer.base.errors import (
        DataError,
        LaunchError,
        LostPeerError,
        NonFiniteError,
        OutOfMemoryError,
        RecipeError,
        TrainerError,
        UsageError,
    )
    from trainer.features.callbacks.callbacks import Callback
    from trainer.features.vision.section import ImageKeys
    from trainer.observe.observer import Request
    from trainer.recipe.reading.loading import ResolvedRecipe
    from trainer.recipe.schema import ClassificationKeys, OptimizerKeys, ScheduleKeys, TextKeys, Traits
    from trainer.recipe.strategies import Strategy

__all__ = [
    "Callback",
    "ClassificationKeys",
    "DataError",
    "ImageKeys",
    "LaunchError",
    "LostPeerError",
    "NonFiniteError",
    "OptimizerKeys",
    "OutOfMemoryError",
    "RecipeError",
    "Request",
    "ResolvedRecipe",
    "RunResult",
    "ScheduleKeys",
    "Strategy",
    "TextKeys",
    "TrainerError",
    "Traits",
    "UsageError",
    "__version__",
    "assemble",
    "audit",
    "certify",
    "check",
    "compare",
    "evaluate",
    "export",
    "load_recipe",
    "plan",
    "predict",
    "preview",
    "register_family",
    "register_format",
    "register_logging",
    "register_metric",
    "register_optimizer",
    "register_recipes",
    "register_schedule",
    "register_strategy",
    "register_task",
    "reproduce",
    "run",
    "search",
    "suite",
]

_HOMES = {
    "Callback": "features.callbacks.callbacks",
    "ImageKeys": "features.vision.section",
    "Request": "observe.observer",
    "ResolvedRecipe": "recipe.reading.loading",
    "Strategy": "recipe.strategies",
} | dict.fromkeys(("ClassificationKeys", "OptimizerKeys", "ScheduleKeys", "TextKeys", "Traits"), "recipe.schema")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "base.errors" if name.endswith("Error") else "api")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
