"""The tables of other tools' keys, from the JSON files beside this module.

A file has sections of rows. The name of a row is one spelling, or several with spaces between; dots descend into
sections of the tool's file. A row has its kind, in small letters, with the key of the recipe (`*`: the whole name) or
the reason why there is none; `defaults`, the tool's own first; a `note`; and the function of `values.py` that converts
the value (`by`), with its argument. `$NAME` is a note of `notes.json`, or of `_NOTES`.

Messages of the core on unknown keys and on files of other tools come from here too: the module is registered as
`other_tools`.

Tests compare names and defaults with the pinned versions of transformers, accelerate, DeepSpeed and TRL, and with lists
of the keys of axolotl, LLaMA-Factory, sentence-transformers and SetFit. Megatron-LM is not a dependency, so no test
compares its flags. Programs around the Trainer have rows of the kind `argument`: the name of the field of
TrainingArguments, and the program's own default of it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import trainer.recipe.registered  # noqa: F401  # puts the keys of features into the schema
from trainer.base.extensions import registered
from trainer.recipe.reading.keys import known_keys
from trainer.recipe.strategies import STRATEGIES, Strategy
from trainer.tools.convert.foreign import values


class Kind(Enum):
    """Conversion of a key; the report and the documentation show the values. Rows of the tables have the names."""

    RENAMED = "a key with the same values"
    MAPPED = "a key with other values"  # or with one that depends on several keys
    NONE = "no counterpart"
    SAME = "same behaviour"  # if the value is one of the defaults
    LAUNCHER = "set by the launcher"
    REFUSED = "no counterpart, and decides the training: the file is refused"
    ARGUMENT = "an argument of the Trainer"


@dataclass(frozen=True)
class Counterpart:
    """The key of a recipe for a key of another tool; or none, and the reason."""

    key: str | None
    note: str
    kind: Kind
    defaults: tuple[Any, ...]  # values with the same effect as leaving the key out; the tool's default is first
    value: values.Value | None = None  # None: the value is the same, or depends on several keys
    argument: str = ""  # the field of TrainingArguments with this value

    def is_default(self, value: object) -> bool:
        """Return whether the value has the same effect as leaving the key out."""
        return any(
            value == default and isinstance(value, bool) == isinstance(default, bool) for default in self.defaults
        )

    def __str__(self) -> str:
        if self.key is None:
            return f"has no counterpart here: {self.note}"
        return f"is `{self.key}` here" + (f" ({self.note})" if self.note else "")


Table = dict[str, Counterpart]


def _read(name: str) -> dict[str, Any]:
    """Return the content of a file beside this module, or of a path relative to the package."""
    file = Path(__file__).parents[3] / name if name.endswith(".json") else Path(__file__).parent / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _with(test: Callable[[Strategy], bool]) -> list[str]:
    return [name for name, row in STRATEGIES.items() if test(row)]


def offload_note(strategies: Sequence[str]) -> str:
    """Return the note on offload of the optimizer, which these strategies support."""
    names = ", ".join(strategies)
    return f'"optimizer", under {names}' if names else '"optimizer", which no registered strategy supports'


_NOTES = _read("notes") | {
    "strategies": f"one of {', '.join(STRATEGIES)}",
    "cut_optimizer": ", or ".join(
        [*_with(lambda row: row.cuts_optimizer > row.cuts_gradients), "fsdp with a pipeline"]
    ),
    "optimizer_offload": offload_note(_with(lambda row: "optimizer" in row.offloads)),
    "optimizer_names": values.optimizer_names(),
}


def _row(fields: Mapping[str, Any]) -> Counterpart:
    kind = next(kind for kind in Kind if kind.name.lower() in fields)
    has_key = kind in (Kind.RENAMED, Kind.MAPPED)
    text = fields[kind.name.lower()]
    if kind is Kind.ARGUMENT:
        row = TRAINING_ARGUMENTS[text]
        return replace(row, kind=kind, argument=text, value=None, defaults=tuple(fields.get("defaults", row.defaults)))
    # A converted recipe must not name a key that no schema has.
    if has_key and "*" not in text and text not in known_keys():
        note = f"`{text}` is a key of a feature that is not installed"
        return Counterpart(None, note, Kind.REFUSED, tuple(fields.get("defaults", ())))
    note = fields.get("note", "") if has_key else text
    return Counterpart(
        text if has_key else None,
        str(_NOTES[note[1:]]) if note.startswith("$") else note,
        kind,
        tuple(fields.get("defaults", ())),
        values.named(fields["by"]) if "by" in fields else None,
    )


def _sections(name: str) -> dict[str, Table]:
    return {
        section: {key: row for keys, fields in rows.items() for row in [_row(fields)] for key in keys.split()}
        for section, rows in _read(name).items()
    }


def _prefixed(prefixes: str, rows: Mapping[str, Counterpart]) -> Table:
    names = ((f"{prefix}{key}", row) for prefix in prefixes.split() or [""] for key, row in rows.items())
    return {name: replace(row, key=row.key.replace("*", name)) if row.key else row for name, row in names}


def _flat(name: str) -> Table:
    """Return the rows of a file whose sections are prefixes, which apply to all their rows."""
    return {key: row for prefixes, rows in _sections(name).items() for key, row in _prefixed(prefixes, rows).items()}


def _of_features(tool: str) -> Table:
    """Return the rows that features add to the table of a tool."""
    files = (_sections(row.value) for row in registered("formats"))
    return _prefixed("", {key: row for tables in files for key, row in tables.get(tool, {}).items()})


FSDP = _flat("fsdp")
"""Keys of `fsdp_config`, which accelerate writes with the prefix `fsdp_` and TrainingArguments without."""

ACCELERATE = _flat("accelerate") | _prefixed("fsdp_config.fsdp_", FSDP) | _of_features("accelerate")
"""Keys of the YAML file of `accelerate config`."""

DEEPSPEED = _flat("deepspeed") | _of_features("deepspeed")
"""Keys of a DeepSpeed JSON."""

MEGATRON = _flat("megatron_lm") | _of_features("megatron_lm")
"""Flags of Megatron-LM."""

LORA_CONFIG = _flat("lora_config")
"""Keys of PEFT's `LoraConfig`."""

_ARGUMENTS = _sections("training_arguments")
FIELDS, OLD_NAMES = _ARGUMENTS["fields"], _ARGUMENTS["old_names"]
"""The fields of `transformers.TrainingArguments`; and those of earlier versions, with common misspellings."""

TRAINING_ARGUMENTS = {
    **FIELDS,
    **_prefixed("fsdp_config.", FSDP),
    **{key: row for section, rows in _ARGUMENTS.items() if section != "fields" for key, row in rows.items()},
    **_of_features("transformers"),
}
"""All of these, and arguments of the example scripts of transformers, such as run_glue.py and run_mlm.py."""


_INHERITED = FIELDS | {
    key: row for key, row in TRAINING_ARGUMENTS.items() if key.startswith("fsdp_config.") or key in OLD_NAMES
}


def _program(name: str, *sections: str, inherits: bool = True) -> Table:
    """Return the rows of a program around the Trainer.

    Args:
        sections: The sections of its file; none: all of them.
        inherits: Whether the program takes every field of TrainingArguments by its own name.
    """
    tables = _sections(name)
    rows = {key: row for section in sections or tables for key, row in tables[section].items()}
    if not inherits:
        return rows
    inherited = {key: replace(row, kind=Kind.ARGUMENT, argument=key, value=None) for key, row in _INHERITED.items()}
    return inherited | rows


PROGRAMS: dict[str, Table] = {
    "axolotl": _program("axolotl", inherits=False),
    "LLaMA-Factory": _program("llama_factory"),
    "TRL's SFT": _program("trl", "all", "sft"),
    "TRL's DPO": _program("trl", "all", "preferences", "dpo"),
    "TRL's KTO": _program("trl", "all", "preferences", "kto"),
    "TRL's reward modelling": _program("trl", "all", "preferences", "reward"),
    "SentenceTransformer": _program("sentence_transformers"),
    "CrossEncoder": _program("sentence_transformers"),
    "SetFit": _program("setfit", inherits=False),
}
"""Tables of programs around the Trainer, by their names in messages."""

SPELLINGS = _sections("spellings")["keys"] | _of_features("keys")
"""Keys that are no key of a tool, but that users write; `trainer convert` does not read them."""


def _normal(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


@cache
def _spellings() -> Table:
    tables = (
        SPELLINGS,
        LORA_CONFIG,
        ACCELERATE,
        MEGATRON,
        DEEPSPEED,
        TRAINING_ARGUMENTS,
    )  # the last one takes precedence
    return {_normal(spelling): row for table in tables for spelling, row in table.items()}


_OF_FILES = {"TrainingArguments": TRAINING_ARGUMENTS, "DeepSpeed": DEEPSPEED, "accelerate": ACCELERATE} | PROGRAMS
"""Tables of files that `trainer convert` reads."""


def counterpart(path: str, tool: str = "") -> Counterpart | None:
    """Return the row of another tool's key; None if no tool has it.

    Args:
        path: A dotted key path, with dashes or underscores. The longest known suffix counts, so that
            `parallel.zero_optimization.stage` gives the row of `zero_optimization.stage`.
        tool: the tool of the whole path; empty: any tool.
    """
    if tool:
        return _OF_FILES[tool].get(path)
    parts = _normal(path).split(".")
    return next((row for start in range(len(parts)) if (row := _spellings().get(".".join(parts[start:])))), None)


def file_problem(keys: Set[str], file: str) -> str | None:
    """Return the words on a file with these keys, which are not of a recipe; None: most are of no tool.

    Args:
        keys: the first parts of the keys, at least one.
        file: the path of the file, for a command.
    """
    known = {tool: len(keys & {key.partition(".")[0] for key in table}) for tool, table in _OF_FILES.items()}
    best = max(known, key=known.__getitem__)
    # Tools share names such as `seed`, so a few known keys prove nothing.
    if 2 * known[best] <= len(keys):
        return None
    command = f"trainer convert {shlex.quote(file)} --output recipe.json"
    return f"is a file of {best}, not a recipe; convert it with: {command}"
