"""Types of values that several sections share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema


@dataclass(frozen=True)
class Interval:
    """A period of `count` optimizer steps or epochs."""

    count: int
    unit: Literal["steps", "epochs"]

    def __str__(self) -> str:
        return f"{self.count} {self.unit if self.count != 1 else self.unit[:-1]}"


@dataclass(frozen=True)
class Duration:
    """A time, in the unit of the recipe."""

    count: int
    unit: Literal["second", "minute", "hour"]

    @property
    def seconds(self) -> int:
        return self.count * {"second": 1, "minute": 60, "hour": 3600}[self.unit]

    def __str__(self) -> str:
        return f"{self.count} {self.unit}{'s' if self.count != 1 else ''}"


_INTERVAL = re.compile(r"([1-9][0-9]{0,11}) (step|epoch)s?")
_DURATION = re.compile(r"([1-9][0-9]{0,8}) (second|minute|hour)s?")


def _reader(pattern: re.Pattern[str], kind: type, plural: str) -> BeforeValidator:
    """Return the validator of a text such as "10 minutes"; units have the suffix `plural` in `kind`."""

    def read(value: object) -> Any:
        match = pattern.fullmatch(value) if isinstance(value, str) else None
        if match is None and not isinstance(value, kind):
            raise ValueError(f"not of the form {pattern.pattern}")
        return kind(int(match[1]), match[2] + plural) if match else value

    return BeforeValidator(read)


def _text_schema(pattern: re.Pattern[str], rule: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern.pattern}$", "patternErrorMessage": rule})


IntervalField = Annotated[
    Interval,
    _reader(_INTERVAL, Interval, "s"),
    PlainSerializer(str, return_type=str),
    _text_schema(_INTERVAL, 'an interval such as "100 steps" or "1 epoch"'),
]
DurationField = Annotated[
    Duration,
    _reader(_DURATION, Duration, ""),
    PlainSerializer(str, return_type=str),
    _text_schema(_DURATION, 'a time such as "30 seconds" or "10 minutes"'),
]


def text_pattern(pattern: str, rule: str, **keys: str) -> Any:
    return Field(pattern=pattern, json_schema_extra={"patternErrorMessage": rule, **keys})


NOT_BLANK = r"\S"
"""The pattern of a `Name`."""
_RULE = "text that is not blank"

Name = Annotated[str, text_pattern(NOT_BLANK, _RULE)]
"""The name of a place, a column, a class or another thing: an unset variable of a shell names none."""


def _not_blank(key: str) -> str:
    if not key.strip():
        raise ValueError(_RULE)
    return key


NameKey = Annotated[str, AfterValidator(_not_blank)]
"""A `Name` as a key of an object; a pattern of keys would change the form of the JSON Schema."""


class PathBase(Enum):
    """The base of relative paths in a key."""

    RECIPE = auto()  # the folder of the recipe file; on the command line, the current folder
    RECIPE_OR_HUB = auto()  # the same if the folder exists or the text looks like a path; else a name on the hub
    RUN = auto()  # the current folder


_UNSET = ("None", "null", "undefined")


def is_unset(path: str) -> bool:
    """Return whether a path starts with the text that programs write for a variable without a value."""
    return path.split("/")[0] in _UNSET


_OF_SERVERS = frozenset(
    ("abfs", "abfss", "adl", "az", "ftp", "gcs", "gs", "hf", "http", "https", "oci", "oss", "s3", "s3a", "sftp")
)
"""Protocols with a bucket, a container or a server first; others may have one by default."""


def names_no_place(path: str) -> bool:
    """Return whether a URL names nothing behind its protocol, or has lost a slash.

    An unset variable leaves `file://` or `s3:///run`; `pathlib` makes `s3:/bucket` of `s3://bucket`.
    """
    protocol, separator, behind = path.rpartition("::")[2].partition("://")  # `simplecache::s3://bucket`
    if not separator:
        protocol, separator, _ = protocol.partition(":")
        return bool(separator) and protocol in _OF_SERVERS | {"file"}
    first = behind.strip().split("/")[0].rpartition("@")[2].partition(":")[0]
    is_empty = not (first if protocol in _OF_SERVERS else behind.strip().strip("/"))
    return is_empty or first in _UNSET


def _require_set(path: str) -> str:
    if is_unset(path) or names_no_place(path):
        raise ValueError(_RULE)
    return path


_NO_VARIABLE = r"([^$]|\$([^{A-Z]|$))"
PathOrUrl = Annotated[
    str,
    text_pattern(
        rf"^{_NO_VARIABLE}*[^$\s]{_NO_VARIABLE}*$", f"{_RULE}, without a variable such as ${{HOME}}", format="path"
    ),
    AfterValidator(_require_set),
]
"""A place on this machine or elsewhere; `${SCRATCH}/runs` and `None/runs` would be folders of these very names, and
`file://` the current folder."""

PathField = Annotated[PathOrUrl, PathBase.RECIPE]


HubOrPathField = Annotated[Name, PathBase.RECIPE_OR_HUB]


RunPathField = Annotated[PathOrUrl, PathBase.RUN]


Revision = Annotated[Name | None, Field(description="Branch, tag or commit of the hub repository.")]


Share = Annotated[float, Field(gt=0, lt=1)]


Patterns = Annotated[list[Name], Field(min_length=1)]


HeldOut = Annotated[float, Field(gt=0, lt=1)]
"""A share of the training split that is held out for validation, the same rows in every run."""
