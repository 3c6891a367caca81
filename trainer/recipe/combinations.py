"""The table of pairs of keys that exclude each other, with reasons; read by `trainer check` and the documentation.

Reasons against a strategy are in `strategies.py`, those against an optimizer in its section, those against the key of
a feature in its `extension.json`. The other rows are in `exclusions.json`: a first condition, and for each other one a
reason and a remedy, in which `{able}`, `{one}` and `{all}` are the other strategies or schedules. A group with `torch`
is for these versions of it only.
Rules with more than two conditions are in `recipe/reading/rules.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from trainer.base.distribution import version
from trainer.base.extensions import Registration, consume, registered, resolved
from trainer.recipe.schedules import SCHEDULES, PipelineSchedule
from trainer.recipe.strategies import STRATEGIES, Strategy

_FORMS = {
    "usual": "is {value}, which does not combine with `{key}` {other}: {reason}; {remedy}",
    "needs": "is {value}, which needs `{key}`: {reason}; {remedy}",
    "must": "must be {reason} for `{key}` {other}, but is {value}; {remedy}",
    "support": "is {value}, which `{key}` {other} does not support; {remedy}",
    "only": "applies only to {all}, but `{key}` is {other}; {remedy}",
    "but": "is {value}, but `{key}` is {other}: {reason}; {remedy}",
}
"""The forms of messages after the first key; each names both keys, and both values unless the other is false."""
_STRATEGY, _STAGES = "parallel.strategy", "parallel.pipeline.stages"


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
        """Return the value of the key; None if no folder registers it."""
        return reduce(lambda part, key: getattr(part, key, None), self.key.split(".")[1:], sections[self.section])


@dataclass(frozen=True)
class Exclusion:
    """Two conditions that must not hold together; reported at the first key."""

    first: Condition
    second: Condition
    reason: str
    remedy: str
    form: str = _FORMS["usual"]  # of the message after the first key

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
        texts = {"reason": self.reason, "remedy": self.remedy}
        return self.form.format(value=json.dumps(value), key=self.second.key, other=other, **texts)


def _is(key: str, *values: Any) -> Condition:
    return Condition(key, ", ".join(f"`{json.dumps(value)}`" for value in values), lambda value: value in values)


def _strategies(test: Callable[[Strategy], bool]) -> tuple[str, ...]:
    return tuple(name for name, row in STRATEGIES.items() if test(row))


def _schedules(test: Callable[[PipelineSchedule], bool]) -> tuple[str, ...]:
    return tuple(name for name, row in SCHEDULES.items() if test(row))


def _of_strategies(described: Mapping[str, Any], reason_of: Callable[[Strategy], str]) -> Iterator[Exclusion]:
    """Yield a row for each reason against a condition under some strategies."""
    first = _condition(described)
    able = _strategies(lambda row: not reason_of(row))
    for reason in dict.fromkeys(filter(None, map(reason_of, STRATEGIES.values()))):
        unable = _strategies(lambda row, reason=reason: reason_of(row) == reason)  # type: ignore[misc]
        yield Exclusion(first, _is(_STRATEGY, *unable), reason, f"use {', '.join(able)}")


def _condition(described: Mapping[str, Any]) -> Condition:
    """Return the condition of an object with one key: a list of values, the name of strategies, or a word."""
    ((key, values),) = described.items()
    if isinstance(values, list):
        return _is(key, *values)
    if values in _NAMED:
        return _is(key, *_NAMED[values]())
    name = values.removeprefix("other than ")
    return Condition(key, values, _WORDS[values] if name == values else lambda value: value != name)


def _of_groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[Exclusion]:
    for group in groups:
        if "torch" in group and version("torch") not in SpecifierSet(group["torch"], prereleases=True):
            continue
        first = _condition(group["first"])
        for described, *texts in group["others"]:
            second = _condition(described)
            form = _FORMS[group.get("form", "usual")]
            able = [name for name in _NAMES.get(second.key, ()) if not second.holds(name)]
            both = [*([", ".join(able[:-1])] if able[1:] else []), *able[-1:]]
            words = {"{able}": ", ".join(able), "{one}": " or ".join(able), "{all}": " and ".join(both)}
            words = words if able else {"{able}, or ": ""} | words
            if "torch" in group:
                words["{torch}"] = version("torch")
            for word, names in words.items():
                *texts, form = (text.replace(word, names) for text in (*texts, form))
            reason, remedy = texts
            yield Exclusion(first, second, reason, remedy, form)


_NAMES: Mapping[str, Iterable[str]] = {_STRATEGY: STRATEGIES, "parallel.pipeline.schedule": SCHEDULES}
_NAMED: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "another engine": lambda: _strategies(lambda row: bool(row.package)),
    "own engine": lambda: _strategies(lambda row: not row.package),
    "not ddp": lambda: _strategies(lambda row: row.name != "ddp"),
    "without groups": lambda: _strategies(lambda row: not row.groups),
    "without native shards of parameters": lambda: _strategies(
        lambda row: not row.cuts_parameters or bool(row.package)
    ),
    "with shards of parameters and stages": lambda: _strategies(
        lambda row: row.cuts_parameters and not row.no_pipeline
    ),
    "without offload of the optimizer": lambda: _strategies(lambda row: "optimizer" not in row.offloads),
    "without offload of parameters": lambda: _strategies(lambda row: "parameters" not in row.offloads),
    "one stage a rank": lambda: _schedules(lambda row: not row.several_stages),
    "several stages a rank": lambda: _schedules(lambda row: row.several_stages),
    "split backward passes": lambda: _schedules(lambda row: row.splits_backward),
}
"""Names of strategies and schedules, by words of the file."""

_WORDS: Mapping[str, Callable[[Any], bool]] = {
    "above 1": lambda value: value is not None and value > 1,
    "a number": lambda value: value not in (None, "auto"),
    "a share": lambda value: value is not None,
    "any keys": bool,
}


def _of_tables() -> Iterator[Exclusion]:
    yield from _of_strategies({_STAGES: "above 1"}, lambda row: row.no_pipeline)
    for key in ("parallel.tensor", *(row.name for row in registered("axis"))):
        yield from _of_strategies({key: "above 1"}, lambda row: row.no_tensor)
    yield from _of_strategies({"parallel.load": ["broadcast"]}, lambda row: row.no_broadcast)
    yield from _of_strategies({"compile": [True]}, lambda row: row.no_compile)
    for group in json.loads((Path(__file__).parent / "exclusions.json").read_text(encoding="utf-8")):
        yield from _of_groups([group])


def _of_optimizer(row: Registration) -> Iterator[Exclusion]:
    if others := resolved(row.value).exclusions:
        yield from _of_groups([{"first": {"optimizer.name": [row.name]}, "others": others}])


EXCLUSIONS = [*_of_tables()]
"""Every pair that is refused for any model, data and number of ranks."""


def _after_strategy() -> None:
    """Make all rows again, since they name the strategies that combine."""
    # In place, because other modules hold the list.
    EXCLUSIONS[:] = _of_tables()
    for row in registered("optimizer"):
        EXCLUSIONS.extend(_of_optimizer(row))
    EXCLUSIONS.extend(_of_groups(row.value for row in registered("exclusions")))


consume("optimizer", lambda row: EXCLUSIONS.extend(_of_optimizer(row)))
consume("exclusions", lambda row: EXCLUSIONS.extend(_of_groups([row.value])))
consume("strategy", lambda _: None, _after_strategy)
