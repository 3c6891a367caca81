"""Messages for validation errors of pydantic: the key path, the rule, the value, the fix.

The rule derives from the JSON Schema of the key.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trainer.base.extensions import consume
from trainer.base.file_formats import formats_by_ending
from trainer.base.text import listed
from trainer.recipe.paths import KeyPath, dotted, shown_value
from trainer.recipe.reading.keys import find_node, is_named, kinds, nearest_node, section_models
from trainer.recipe.reading.parser import Node, Problem
from trainer.recipe.reading.suggesting import unknown_key
from trainer.recipe.registered import task_sections
from trainer.recipe.schema import Recipe, Section
from trainer.recipe.schema.fields import is_unset, names_no_place
from trainer.recipe.strategies import STRATEGIES

Schema = Mapping[str, Any]

_MANY, _SHOWN = 20, 6  # values of a key; more are listed in part, behind the suggestion
_BLANK_KEY = "blank_key"
"""The type of error of a `NameKey`."""


@dataclass(frozen=True)
class Finding:
    """An error of pydantic, with its place in the schema and in the recipe."""

    error: str  # pydantic's error type
    path: KeyPath  # of the key or list item, without pydantic's steps for unions
    section: type[Section]  # the section of the key
    field: FieldInfo | None  # None for an unknown key
    key: int  # the place of the key of `field` in `path`
    within: KeyPath | None = None  # the named value that holds the key


def findings(error: ValidationError) -> list[Finding]:
    """Return one finding for each key or item; pydantic reports one for each branch of a union."""
    by_key: dict[KeyPath, Finding] = {}
    for details in error.errors(include_url=False, include_context=False, include_input=False):
        # Pydantic ends the place of an invalid key of an object with "[key]".
        *place, last = details["loc"]
        finding = _placed(_BLANK_KEY, (*place[:-1],)) if last == "[key]" else _placed(details["type"], details["loc"])
        if finding.error == _BLANK_KEY or finding.path not in by_key:  # a branch of a union without names is no rule
            by_key[finding.path] = finding
    # An invalid item is more precise than an invalid list, and a part of a named value than the value.
    outer = {path[:end] for path, finding in by_key.items() for end in range(finding.key + 1, len(path))}
    outer |= {finding.within for finding in by_key.values() if finding.within is not None}
    return [finding for path, finding in by_key.items() if path not in outer]


def _placed(error: str, location: KeyPath) -> Finding:
    """Follow pydantic's location, which includes kinds and branches of unions, through the schema."""
    section: type[Section] = Recipe
    path: KeyPath = ()
    within: KeyPath | None = None
    parts = list(location)
    while True:
        name = str(parts.pop(0))
        path, key = (*path, name), len(path)
        field = section.model_fields.get(name)
        if field is None or not parts:
            return Finding(error, path, section, field, key, within)
        inner = section_models(field.annotation)
        if not inner:  # a plain value; of the rest, only list indices are part of the path
            path += tuple(part for part in parts if isinstance(part, int))
            return Finding(error, path, section, field, key, within)
        if is_named(field):  # a name, and the branch of its value
            path = within = (*path, parts.pop(0))
            branch, parts = str(next(iter(parts), "")), parts[1:]
            inner = tuple(model for model in inner if model.__name__ in branch)
            if not inner:
                return Finding(error, path, section, field, key)
        if parts and isinstance(parts[0], int):  # an item of a list of sections
            path += (parts.pop(0),)
        if not parts:
            return Finding(error, path, section, field, key)
        section = kinds(field)[str(parts.pop(0))] if field.discriminator else inner[0]


def correct(issues: Sequence[Finding], root: Node) -> bool:
    """Replace values with one meaning in the recipe, and return whether there was any.

    These are lists as a shell passes them, "a,b" and "[a, b]", and tasks by the name of a pipeline.
    """
    corrections = [_correction(finding, root) for finding in issues]
    for path, value in filter(None, corrections):
        parent, before = find_node(root, path[:-1]), find_node(root, path)
        if parent is not None and before is not None:
            parent.members[str(path[-1])] = Node(value, before.origin)
    return any(corrections)


def _correction(finding: Finding, root: Node) -> tuple[KeyPath, Any] | None:
    """Return the path and the meant value of a finding; None if it could mean several, or none."""
    path = (*finding.path, "type") if finding.error.startswith("union_tag") else finding.path
    node = find_node(root, path)
    if node is None or not isinstance(node.value, str) or finding.field is None:
        return None
    if path == ("task", "type"):
        return (path, task) if (task := _task_of_pipeline(node.value)) else None
    if node.origin.line or len(finding.path) != finding.key + 1:  # files are strict
        return None
    for branch in _branches(_schema_at(finding)):
        if items := _items_in(node.value, branch):
            rules = _branches(branch["items"])
            # A misspelled item has a suggestion instead.
            if (choices := _choices(rules)) and not {*items} <= {*choices}:
                return None
            return path, [Node(json.loads(item) if _is_number(item, rules) else item, node.origin) for item in items]
    return None


def _task_of_pipeline(name: str) -> str | None:
    name = re.sub(r"[\s-]+", "_", name.strip().lower())
    return next((task for task, keys in task_sections().items() if name in (task, *keys.pipelines)), None)


def explain(finding: Finding, root: Node) -> list[Problem]:
    """Return the problems of a finding; none if the parser already reported the value."""
    node = nearest_node(root, finding.path)
    if finding.field is None:
        return unknown_key(finding.path, finding.section, node)
    if finding.error.startswith("union_tag"):
        return [_wrong_kind(finding.path, finding.field, node)]
    if finding.error == _BLANK_KEY:
        text = "must have names that are not blank; write them, or set the variable that was empty"
        return [Problem(node.origin, f"`{dotted(finding.path)}` {text}")]
    rule = _schema_at(finding)
    if finding.error == "missing":
        return [_missing(finding.path, finding.field, rule, node)]
    if isinstance(node.value, float) and not math.isfinite(node.value):
        return []
    return [_must_be(finding.path, rule, node)]


def _must_be(path: KeyPath, rule: Schema, node: Node) -> Problem:
    value = node.plain()
    remedy = _remedy(value, rule)
    if remedy.startswith("; write [") and not node.origin.line and isinstance(path[-1], str):  # for the shell
        remedy = f"; write {shlex.quote(dotted(path) + '=' + remedy.removeprefix('; write '))}"
    text = f"`{dotted(path)}` must be {_rule_in_words(rule)}, but is {shown_value(value)}{remedy}"
    if remedy.startswith("; did you mean") and len(choices := _choices(_branches(rule))) > _MANY:
        text = f"`{dotted(path)}` is {shown_value(value)}{remedy} Values are {listed(choices, _SHOWN)}"
    return Problem(node.origin, text)


def _missing(path: KeyPath, field: FieldInfo, rule: Schema, node: Node) -> Problem:
    words = _rule_in_words(rule)
    if field.discriminator:
        words = f"an object with `{field.discriminator}` {_rule_in_words(_tag_rule(field))}"
    description = rule.get("description", "").rstrip(".")
    meaning = f" ({description[:1].lower()}{description[1:]})" if description else ""
    return Problem(node.origin, f"`{dotted(path)}` is missing; it must be {words}{meaning}")


def _wrong_kind(path: KeyPath, field: FieldInfo, node: Node) -> Problem:
    path = (*path, str(field.discriminator))
    tag = node.members.get(str(field.discriminator))
    if tag is None:
        return Problem(node.origin, f"`{dotted(path)}` is missing; it must be {_rule_in_words(_tag_rule(field))}")
    return _must_be(path, _tag_rule(field), tag)


def _tag_rule(field: FieldInfo) -> Schema:
    return {"enum": list(kinds(field))}


_WORDS = {"integer": "an integer", "number": "a number", "boolean": "true or false", "null": "null"}


def _rule_in_words(schema: Schema) -> str:
    """Return the rule of a JSON Schema in words that follow "must be"."""
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return ", or ".join(dict.fromkeys(_rule_in_words(branch) for branch in branches))
    if "const" in schema:
        return shown_value(schema["const"])
    if "enum" in schema:
        values = [shown_value(value) for value in schema["enum"]]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if "patternErrorMessage" in schema:
        return str(schema["patternErrorMessage"])
    match schema.get("type"):
        case "integer" | "number" | "boolean" | "null" as kind:
            return _WORDS[kind] + _bounds(schema)
        case "string":
            return "non-empty text" if schema.get("minLength") else "text"
        case "array":
            return f"a list of {_item_count(schema)}, each {_rule_in_words(schema['items'])}"
        case "object" if isinstance(schema.get("additionalProperties"), Mapping):
            return f"an object of names, each with {_rule_in_words(schema['additionalProperties'])}"
    return "an object"


def _bounds(schema: Schema) -> str:
    words = {
        "minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below",
    }  # fmt: skip
    bounds = [f"{word} {shown_value(schema[key])}" for key, word in words.items() if key in schema]
    return f" {' and '.join(bounds)}".replace(" and of ", " and ") if bounds else ""


def _item_count(schema: Schema) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if least == most:
        return f"{least} items"
    if most is not None:
        return f"{least} to {most} items"
    return f"at least {least} item{'s' if least != 1 else ''}" if least else "items"


@cache
def _schema_of(section: type[Section]) -> Schema:
    return section.model_json_schema()


# Registrations change the values that a key may have, so cached schemas are dropped.
consume("metric", lambda _: _schema_of.cache_clear())
consume("format", lambda _: _schema_of.cache_clear())
consume("logging", lambda _: _schema_of.cache_clear())
consume("strategy", lambda _: _schema_of.cache_clear())


def _schema_at(finding: Finding) -> Schema:
    key, *inner = finding.path[finding.key :]
    schema: Schema = _schema_of(finding.section)["properties"][key]
    for part in inner:
        step = "items" if isinstance(part, int) else "additionalProperties"
        schema = next(branch[step] for branch in _branches(schema) if step in branch)
    return schema


def _branches(schema: Schema) -> list[Schema]:
    return [inner for branch in schema.get("anyOf", ()) for inner in _branches(branch)] or [schema]


_OTHER_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "no": "fp32",
    "dataparallel": "dp", "distributeddataparallel": "ddp", "fsdp2": "fsdp",
    "acc": "accuracy", "macro_f1": "f1_macro", "micro_f1": "f1_micro", "mcc": "matthews",
    "matthews_correlation": "matthews", "pearsonr": "pearson", "spearmanr": "spearman", "sacrebleu": "bleu",
    "adam": "adamw", "wsd": "warmup_stable_decay", "json_lines": "json",
}  # fmt: skip
"""Values of other tools and ours for them, with underscores; tasks and strategies have more in `also_called`."""

_LITERALS = {
    "true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false", "null": "null",
    "none": "null", "never": "null",
}  # fmt: skip


def _remedy(value: object, schema: Schema) -> str:
    """Return the fix of a value that is close to a valid one; empty if there is none."""
    branches = _branches(schema)
    if isinstance(value, str):
        return _remedy_for_text(value, branches)
    # A truth value is an integer in Python, and no number in a recipe.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    types = {branch.get("type") for branch in branches}
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return f"; write {int(value)}"
    if types & {"integer", "number"}:
        return ""  # a text of digits would have another meaning
    texts = [one for one in branches if one.get("type") == "string" and not one.keys() & {"const", "enum"}]
    for text in (str(value), f"{value} {'step' if value == 1 else 'steps'}"):
        if any(re.search(branch.get("pattern", ""), text) for branch in texts):
            return f'; write "{text}"'
    return ""


def _remedy_for_text(value: str, branches: list[Schema]) -> str:
    types = {branch.get("type") for branch in branches}
    if not value.strip():
        return "; write null, or set the variable that was empty" if "null" in types else ""
    if any(branch.get("format") == "path" for branch in branches) and (remedy := _remedy_for_path(value)):
        return remedy
    if near := _meant(value, _choices(branches)):
        return f"; did you mean {shown_value(near)}?"
    literal = _LITERALS.get(value.lower())
    if literal and ("null" if literal == "null" else "boolean") in types:
        return f"; write {literal} without quotes"
    if _is_number(value, branches):
        return f"; write {value} without quotes"
    return next((f"; write {written}" for branch in branches if (written := _list_in(value, branch))), "")


def _remedy_for_path(value: str) -> str:
    if "$" in value:
        return "; write its value, or set the key on the command line, where the shell fills it"
    if names_no_place(value) and "://" not in value:
        return "; write two slashes behind the protocol, as in s3://bucket/run"
    if names_no_place(value):
        return "; name a place behind the protocol, or set the variable that had no value"
    return f"; set the variable that had no value, or write ./{value} for this very name" if is_unset(value) else ""


def _meant(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that a text means by the name of another tool, or nearly spells."""
    text = re.sub(r"[\s-]+", "_", text.strip().lower())
    of_tasks = {other: name for name, keys in task_sections().items() for other in (*keys.pipelines, *keys.also_called)}
    of_strategies = {other: name for name, row in STRATEGIES.items() for other in row.also_called}
    of_formats = {end.removeprefix("."): name for end, name in formats_by_ending().items()}
    other = (_OTHER_NAMES | of_tasks | of_strategies | of_formats).get(text)
    return other if other in choices else next(iter(get_close_matches(text, choices, n=1, cutoff=0.8)), None)


def _items_in(text: str, schema: Schema) -> list[str]:
    """Return the items of the list that a text such as "a, b" or "[a, b]" means; none if their number is another.

    A shell removes the quotes of a list without quotes around it.
    """
    if schema.get("type") != "array":
        return []
    text = text.strip()
    inner = text[1:-1] if text[:1] + text[-1:] in ("[]", "()", "{}") else text
    # Inner brackets have a meaning of their own, so the text is one item.
    items = [inner] if set("[](){}") & set(inner) else [part.strip().strip("'\"") for part in inner.split(",")]
    is_whole = schema.get("minItems", 0) <= len(items) <= schema.get("maxItems", len(items)) and all(items)
    return items if is_whole else []


def _list_in(text: str, schema: Schema) -> str:
    """Return the list that a text means as JSON, with the choices that its items nearly spell; empty: it means none."""
    if not (items := _items_in(text, schema)):
        return ""
    branches = _branches(schema["items"])
    choices = _choices(branches)
    shown = [item if _is_number(item, branches) else json.dumps(_meant(item, choices) or item) for item in items]
    return f"[{', '.join(shown)}]"


def _choices(branches: Sequence[Schema]) -> list[str]:
    values = [value for branch in branches for value in (*branch.get("enum", ()), branch.get("const"))]
    return [value for value in values if isinstance(value, str)]


def _is_number(text: str, branches: Sequence[Schema]) -> bool:
    """Return whether a text is a number in JSON that one of the rules allows; an integer is a number too."""
    try:
        kind = type(json.loads(text))
    except (ValueError, RecursionError):
        return False
    allowed = {int: {"integer", "number"}, float: {"number"}}.get(kind, set())
    return not allowed.isdisjoint(branch.get("type") for branch in branches)
