"""Registered tasks, metrics, strategies, optimizers, schedules and keys in the schema of recipes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import getitem, or_
from typing import Any, Literal, get_args

from trainer.base.errors import UsageError
from trainer.base.extensions import Kind, Registration, consume, registered, resolved
from trainer.base.file_formats import FileFormat, file_formats, formats_by_ending
from trainer.recipe.schema import (
    FileData,
    Logging,
    OptimizerKeys,
    Parallel,
    Recipe,
    ScheduleKeys,
    Section,
    TaskKeys,
    file_schema,
)
from trainer.recipe.schema.section import descriptions
from trainer.recipe.strategies import STRATEGIES, Strategy

__all__ = [
    "all_of",
    "asked_for",
    "file_schema",
    "optimizer_name",
    "optimizer_sections",
    "schedule_name",
    "schedule_sections",
    "strategy_name",
    "task_name",
    "task_sections",
]


def task_name(keys: type[Section]) -> str:
    """Return the `task.type` of a task's keys.

    Raises:
        UsageError: The keys do not follow the rules for tasks.
    """
    name = _literal(keys, "type", "a task", TaskKeys, "TextKeys, or of another class of TaskKeys")
    metrics = keys.model_fields.get("metrics")
    if metrics is None or not metrics.get_default(call_default_factory=True):
        raise UsageError(f"{keys.__name__} must have the key `metrics`, a list with at least one metric as default")
    return name


def optimizer_name(keys: type[OptimizerKeys]) -> str:
    """Return the `optimizer.name` of an optimizer's keys.

    Raises:
        UsageError: The keys do not follow the rules for optimizers.
    """
    name = _literal(keys, "name", "an optimizer", OptimizerKeys)
    if not getattr(keys, "implementation", None):
        raise UsageError(f'{keys.__name__} must have `implementation`, the text "module:class" of its EngineOptimizer')
    return name


def schedule_name(keys: type[ScheduleKeys]) -> str:
    """Return the `schedule.name` of a schedule's keys.

    Raises:
        UsageError: The keys do not follow the rules for schedules.
    """
    return _literal(keys, "name", "a schedule", ScheduleKeys)


def strategy_name(strategy: Strategy) -> str:
    """Return the `parallel.strategy` of a row.

    Raises:
        UsageError: It is no row, or has the name of a strategy that ships with trainer.
    """
    if not isinstance(strategy, Strategy):
        raise UsageError(f"a strategy must be a Strategy, but is {strategy!r}")
    if strategy.name in _SHIPPED_STRATEGIES:
        raise UsageError(f"the strategy {strategy.name!r} ships with trainer; register yours under another name")
    return strategy.name


def _literal(keys: type[Section], key: str, kind: str, base: type[Section], bases: str = "") -> str:
    """Return the only value of the key that names a kind of section, such as "a task"; `bases` names its bases."""
    if not (isinstance(keys, type) and issubclass(keys, base)):
        raise UsageError(f"the keys of {kind} must be a subclass of {bases or base.__name__}, but are {keys!r}")
    names = get_args(keys.model_fields[key].annotation) if key in keys.model_fields else ()
    if len(names) != 1 or not isinstance(names[0], str):
        raise UsageError(f'`{key}` of {keys.__name__} must be Literal["NAME"], with the name of {kind}')
    return names[0]


def task_sections() -> dict[str, type[TaskKeys]]:
    """Return the sections of shipped and registered tasks, by their types."""
    return _sections("task")


def optimizer_sections() -> dict[str, type[OptimizerKeys]]:
    """Return the sections of all optimizers, shipped and registered, by name."""
    return _sections("optimizer")


def schedule_sections() -> dict[str, type[ScheduleKeys]]:
    """Return the sections of all schedules of the learning rate, shipped and registered, by name."""
    return _sections("schedule")


def _sections(name: str) -> dict[str, Any]:
    """Return the kinds of a section of the recipe, by the value of their discriminator."""
    field = Recipe.model_fields[name]
    key = str(field.discriminator)
    return {get_args(kind.model_fields[key].annotation)[0]: kind for kind in get_args(field.annotation)}


def _add_section(name: str, registration: Registration, kind: type[Section]) -> None:
    """Add a kind to a section of the recipe, or replace one that was registered before."""
    if registration.name in _SHIPPED[name]:
        raise UsageError(f"the {name} {registration.name!r} ships with trainer; register yours under another name")
    Recipe.model_fields[name].annotation = reduce(or_, {**_sections(name), registration.name: kind}.values())


def _words(section: type[Section], key: str) -> tuple[str, ...]:
    (literal,) = get_args(section.model_fields[key].annotation)
    return get_args(literal)


# Read before any registration reaches the schema, which happens at the end of this module.
_SHIPPED = {name: tuple(_sections(name)) for name in ("task", "optimizer", "schedule")}
_SHIPPED_METRICS = frozenset(name for section in task_sections().values() for name in _words(section, "metrics"))
_SHIPPED_STRATEGIES = frozenset(STRATEGIES)
_SHIPPED_LOGGING = _words(Logging, "to")
_SHIPPED_FORMAT = str(FileData.model_fields["format"].description)


def _add_task(registration: Registration) -> None:
    row = resolved(registration.value)
    _add_section("task", registration, row if isinstance(row, type) else row.keys)


def _add_strategy(registration: Registration) -> None:
    # `STRATEGIES` has the row already: its own consumer was the first.
    names: Any = getitem(Literal, tuple(STRATEGIES))
    if Parallel.model_fields["strategy"].annotation != names:
        Parallel.model_fields["strategy"].annotation = names
        _rebuild(Parallel)


def _add_precision(registration: Registration) -> None:
    field = Recipe.model_fields["precision"]
    field.annotation = getitem(Literal, (*get_args(field.annotation), registration.name))  # type: ignore[assignment]


def _add_optimizer(registration: Registration) -> None:
    _add_section("optimizer", registration, resolved(registration.value))


def _add_schedule(registration: Registration) -> None:
    _add_section("schedule", registration, resolved(registration.value))


def _add_keys(registration: Registration) -> None:
    """Add the fields of a section to the recipe, or to the section of it, that the registered key names.

    A section with several kinds gets them in the kinds that are, or derive from, the base of the fields.
    """
    keys: type[Section] = resolved(registration.value)
    name, section = registration.name.rpartition(".")[0], extended(registration)
    outer = name.partition(".")[0]
    whole: Any = Recipe.model_fields[outer].annotation if name else None
    kinds = get_args(whole)
    sections = [kind for kind in kinds if issubclass(kind, section)] or [section]
    for key, field in keys.model_fields.items():
        if key in keys.__annotations__:
            field.description = descriptions(keys)[key]
            for kind in sections:
                kind.model_fields[key] = field
    if name:
        # A section inside of another one is compiled with it.
        for kind in sections if name == outer else [*sections, whole]:
            _rebuild(kind)
        if name == outer and not Recipe.model_fields[name].is_required():
            # The default was made before the section had the new keys.
            Recipe.model_fields[name].default = section()


def extended(registration: Registration) -> type[Section]:
    """Return the section that gets the keys of a registration."""
    base = resolved(registration.value).__base__
    name = registration.name.rpartition(".")[0]
    section = base if base is not Section else Recipe.model_fields[name].annotation if name else Recipe
    assert isinstance(section, type)
    assert issubclass(section, Section)
    return section


def _add_metric(registration: Registration) -> None:
    sections = task_sections()
    if registration.name in _SHIPPED_METRICS:
        raise UsageError(f"the metric {registration.name!r} ships with trainer; register yours under another name")
    row = registration.value
    if isinstance(row, Mapping):  # of a folder; texts are metrics that the sections of their folder name themselves
        base = resolved(row["keys"])
        for group in row.get("groups", ()):
            getattr(base, group).add(registration.name)
        for section in [base, *(kind for kind in sections.values() if issubclass(kind, base))]:
            _add_word(section, "metrics", registration.name)
    reads = getattr(row, "reads", None) == "probabilities"
    known = [name for name, section in sections.items() if section.has_probabilities or not reads]
    for name in getattr(row, "tasks", ()):
        if name not in known:
            problem = "has no probabilities" if name in sections else "is unknown"
            raise UsageError(
                f"the metric {registration.name!r} is for the task {name!r}, which {problem}; tasks are"
                f" {', '.join(known)}"
            )
        _add_word(sections[name], "metrics", registration.name)


def _add_word(section: type[Section], key: str, word: str) -> None:
    """Allow a further word in a list of words."""
    words = _words(section, key)
    if word not in words:
        # `Literal[...]` with names that only a running program knows.
        item: Any = getitem(Literal, (*words, word))
        section.model_fields[key].annotation = list[item]
        _rebuild(section)


def _add_format(registration: Registration) -> None:
    """Allow a further format of files.

    Raises:
        UsageError: another format has an ending of it.
    """
    name, formats = registration.name, file_formats()
    if isinstance(registration.value, FileFormat):  # it is stored after this
        formats[name] = registration.value
    for end in formats[name].endings:
        if (other := formats_by_ending().get(end, name)) != name:
            raise UsageError(f"the ending {end} is that of the format {other!r}; register {name!r} without it")
    # `Literal[...]` with names that only a running program knows.
    names: Any = getitem(Literal, tuple(formats))
    field = FileData.model_fields["format"]
    if field.annotation != names | None:
        field.annotation = names | None
        field.description = " ".join([_SHIPPED_FORMAT, *(row.note for row in formats.values() if row.note)])
        _rebuild(FileData)


def _add_logging_target(registration: Registration) -> None:
    if registration.name in _SHIPPED_LOGGING:
        raise UsageError(f"the logging {registration.name!r} ships with trainer; register yours under another name")
    _add_word(Logging, "to", registration.name)


def asked_for(kind: Kind, recipe: Recipe) -> list[Any]:
    """Return the values of a kind that are registered under keys of the recipe with another value than by default."""
    return [resolved(row.value) for row in registered(kind) if _is_set(recipe, row.name)]


def all_of(kind: Kind) -> dict[str, Any]:
    """Return the registered values of a kind by name."""
    return {row.name: resolved(row.value) for row in registered(kind)}


def value_at(recipe: Recipe, name: str) -> Any:
    """Return the value of a key of a recipe, such as "logging.profile"; None: a section before it is null."""
    value: Any = recipe
    for key in name.split("."):
        value = getattr(value, key, None)
    return value


def _is_set(recipe: Recipe, name: str) -> bool:
    sections, _, key = name.rpartition(".")
    section: Section | None = value_at(recipe, sections) if sections else recipe
    # Other kinds of the section may lack the key.
    return section is not None and key in type(section).model_fields and bool(section.changed(key))


def _rebuild(section: type[Section]) -> None:
    """Compile a section again, if it is compiled; others wait for their first use."""
    if section.__pydantic_complete__:
        section.model_rebuild(force=True)


def _compile() -> None:
    """Compile the recipe, which pydantic did when the class was made."""
    Recipe.model_rebuild(force=True)


consume("task", _add_task, _compile)
consume("strategy", _add_strategy, _compile)
consume("precision", _add_precision, _compile)
consume("optimizer", _add_optimizer, _compile)
consume("schedule", _add_schedule, _compile)
consume("keys", _add_keys, _compile)
consume("metric", _add_metric, _compile)
consume("logging", _add_logging_target, _compile)
consume("format", _add_format, _compile)
_compile()
