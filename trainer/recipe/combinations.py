"""The table of pairs of keys that exclude each other, with reasons; read by `trainer check` and the documentation.

Rows about a strategy or a schedule derive from the tables in `strategies.py` and `schedules.py`. The others are in
`exclusions.json`: a first condition, and for each other one a reason and a remedy. Rules with more than two conditions
are in `recipe/reading/rules.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from trainer.recipe.schedules import SCHEDULES, PipelineSchedule
from trainer.recipe.strategies import STRATEGIES, Strategy

_FORMS = {
    "value": "is {value}, which {other} does not combine with: {reason}; {remedy}",
    "key": "is {value}, which does not combine with `{key}` {other}: {reason}; {remedy}",
    "needs": "is {value}, which needs `{key}`: {reason}; {remedy}",
    "pipeline": "is {value}, which a pipeline does not combine with: {reason}; {remedy}",
}
_STRATEGY, _STAGES, _TENSOR = "parallel.strategy", "parallel.pipeline.stages", "parallel.tensor"
_CONTEXT, _LOAD = "parallel.context", "parallel.load"


@dataclass(frozen=True)
class Condition:
    """A condition on the value of one key."""

    key: str  # dotted
    values: str  # as the documentation shows them
    holds: Callable[[Any], bool]

    @property
    def section(self) -> str:
        """The top-level section of the key."""
        return self.key.partition(".")[0]

    def value(self, sections: Mapping[str, Any]) -> Any:
        value: Any = sections[self.section]
        for name in self.key.split(".")[1:]:
            value = getattr(value, name)
        return value


@dataclass(frozen=True)
class Exclusion:
    """Two conditions that must not hold together; reported at the first key."""

    first: Condition
    second: Condition
    reason: str
    remedy: str
    form: str = _FORMS["value"]  # of the message after the first key

    @property
    def sections(self) -> frozenset[str]:
        """The sections that `message` needs."""
        return frozenset((self.first.section, self.second.section))

    def message(self, sections: Mapping[str, Any]) -> str | None:
        """Return the error message after the first key, or None if the conditions do not both hold."""
        value, other = self.first.value(sections), self.second.value(sections)
        if not (self.first.holds(value) and self.second.holds(other)):
            return None
        other = other if isinstance(other, str) else json.dumps(other)
        return self.form.format(value=json.dumps(value), other=other, reason=self.reason, remedy=self.remedy)


def _is(key: str, *values: Any) -> Condition:
    return Condition(key, ", ".join(f"`{json.dumps(value)}`" for value in values), lambda value: value in values)


def _above_one(key: str) -> Condition:
    return Condition(key, "above 1", _WORDS["above 1"])


def _strategies(test: Callable[[Strategy], bool]) -> tuple[str, ...]:
    return tuple(name for name, row in STRATEGIES.items() if test(row))


def _strategy_not_in(able: tuple[str, ...]) -> Condition:
    return _is(_STRATEGY, *(name for name in STRATEGIES if name not in able))


def _schedules(test: Callable[[PipelineSchedule], bool]) -> tuple[str, ...]:
    return tuple(name for name, row in SCHEDULES.items() if test(row))


def _of_strategies(first: Condition, reason_of: Callable[[Strategy], str]) -> Iterator[Exclusion]:
    """Yield a row for each reason against a condition under some strategies."""
    able = _strategies(lambda row: not reason_of(row))
    for reason in dict.fromkeys(filter(None, map(reason_of, STRATEGIES.values()))):
        unable = _strategies(lambda row, reason=reason: reason_of(row) == reason)  # type: ignore[misc]
        yield Exclusion(first, _is(_STRATEGY, *unable), reason, f"use {', '.join(able)}")


def _of_offloads() -> Iterator[Exclusion]:
    for offload in ("optimizer", "parameters"):
        able = _strategies(lambda row, offload=offload: offload in row.offloads)  # type: ignore[misc]
        yield Exclusion(
            _is("parallel.offload", offload),
            _strategy_not_in(able),
            "the strategy does not support this offload",
            f'use {", ".join(able)}, or "none"',
            form="is {value}, which {other} does not support; {remedy}",
        )


def _of_old_torch(first: Condition, torch: str) -> Iterator[Exclusion]:
    if Version(torch) < Version("2.12"):
        reason = f"FSDP of torch {torch} asks for gradients of every tensor, and codes are integers"
        second, remedy = _is(_STRATEGY, "fsdp", "hsdp"), "install torch 2.12 or newer, or use ddp"
        yield Exclusion(first, second, reason, remedy, _FORMS["key"].replace("{key}", _STRATEGY))


def _of_others(first: Condition, able: tuple[str, ...]) -> Exclusion:
    names = f"{', '.join(able[:-1])} and {able[-1]}" if len(able) > 1 else able[0]
    return Exclusion(
        first,
        _strategy_not_in(able),
        f"the key applies only to {names}",
        f"remove it, or use {' or '.join(able)}",
        form=f"applies only to {names}, but `{_STRATEGY}` is {{other}}; {{remedy}}",
    )


def _of_schedules() -> Iterator[Exclusion]:
    single = _schedules(lambda row: not row.several_stages)
    several = _schedules(lambda row: row.several_stages)
    key, schedule = "parallel.pipeline.stages_per_rank", "parallel.pipeline.schedule"
    form = "must be {reason} for the schedule {other}, but is {value}"
    yield Exclusion(_above_one(key), _is(schedule, *single), "1", f"remove it, or use {' or '.join(several)}", form)
    yield Exclusion(
        _is(key, 1), _is(schedule, *several), "at least 2", f"remove it, or use {' or '.join(single)}", form
    )
    splitting = _schedules(lambda row: row.splits_backward)
    yield Exclusion(
        _is(schedule, *splitting),
        _is(_STRATEGY, *_strategies(lambda row: not row.no_pipeline and row.cuts_parameters)),
        "torch's split backward pass loses gradients of sharded parameters (measured)",
        "use ddp, or another schedule",
    )
    yield Exclusion(
        _is("activation_checkpointing", "selective"),
        _is(schedule, *splitting),
        "the split backward pass recomputes twice, but the kept activations can be read only once",
        "use none or full",
        form="is {value}, which the schedule {other} does not combine with: {reason}; {remedy}",
    )


def _condition(described: Mapping[str, Any]) -> Condition:
    """Return the condition of an object with one key: a list of values, the name of strategies, or a word."""
    ((key, values),) = described.items()
    if isinstance(values, list):
        return _is(key, *values)
    return _is(key, *_NAMED[values]) if values in _NAMED else Condition(key, values, _WORDS[values])


def _of_file() -> Iterator[Exclusion]:
    groups = json.loads((Path(__file__).parent / "exclusions.json").read_text(encoding="utf-8"))
    for group in groups:
        first = _condition(group["first"])
        for described, reason, remedy in group["others"]:
            second = _condition(described)
            usual = "pipeline" if second.key == _STAGES else "value"
            form = _FORMS[group.get("form", usual)].replace("{key}", second.key)
            yield Exclusion(first, second, reason, remedy, form)
        if "model.quantization" in group["first"]:
            yield from _of_old_torch(first, version("torch"))


_GROUPS = _strategies(lambda row: row.groups)
_ZERO = _strategies(lambda row: bool(row.zero_stage))
_NAMED = {"zero": _ZERO, "not ddp": _strategies(lambda row: row.name != "ddp")}
_WORDS: Mapping[str, Callable[[Any], bool]] = {
    "above 1": lambda value: value is not None and value > 1,
    "a number": lambda value: value is not None,
    "a share": lambda value: value is not None,
}

EXCLUSIONS: tuple[Exclusion, ...] = (
    *_of_strategies(_above_one(_STAGES), lambda row: row.no_pipeline),
    *_of_schedules(),
    *_of_strategies(_above_one(_TENSOR), lambda row: row.no_tensor),
    *_of_strategies(_above_one(_CONTEXT), lambda row: row.no_tensor),
    Exclusion(
        _is("parallel.sequence", True),
        _is(_TENSOR, 1),
        "sequence parallelism shards positions over tensor ranks",
        f"set `{_TENSOR}` above 1, or leave it false",
        form=f"is {{value}}, but `{_TENSOR}` is {{other}}: {{reason}}; {{remedy}}",
    ),
    *_of_offloads(),
    *_of_strategies(_is(_LOAD, "broadcast"), lambda row: row.no_broadcast),
    *_of_strategies(_is("compile", True), lambda row: row.no_compile),
    _of_others(Condition("parallel.shard", "a number", lambda value: value != "auto"), _GROUPS),
    _of_others(_is("parallel.elastic", "shards"), _GROUPS),
    _of_others(
        _is("parallel.reshard_after_forward", False),
        _strategies(lambda row: row.cuts_parameters and not row.zero_stage),
    ),
    _of_others(Condition("parallel.deepspeed", "any keys", bool), _ZERO),
    *_of_file(),
)
"""Every pair that is refused for any model, data and number of ranks."""
