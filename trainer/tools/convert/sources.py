"""Files of other tools: reading, recognition of the tool, and their keys."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from trainer.base.errors import RecipeError, UsageError
from trainer.recipe.paths import shown_value
from trainer.recipe.reading.files import read_file, shown_path
from trainer.recipe.reading.parser import Node, Origin
from trainer.tools.convert.command_lines import ENDINGS, Command, read_command
from trainer.tools.convert.foreign.tables import (
    ACCELERATE,
    DEEPSPEED,
    PROGRAMS,
    TRAINING_ARGUMENTS,
    Counterpart,
    Kind,
)
from trainer.tools.convert.secrets import without_secrets


class Tool(Enum):
    """The tool of a file; the values are those of `--from`."""

    TRAINING_ARGUMENTS = "training-arguments"
    DEEPSPEED = "deepspeed"
    ACCELERATE = "accelerate"
    AXOLOTL = "axolotl"
    LLAMA_FACTORY = "llama-factory"
    TRL_SFT = "trl-sft"
    TRL_DPO = "trl-dpo"
    TRL_KTO = "trl-kto"
    TRL_REWARD = "trl-reward"
    SENTENCE_TRANSFORMER = "sentence-transformer"
    CROSS_ENCODER = "cross-encoder"
    SETFIT = "setfit"

    @property
    def title(self) -> str:
        return _TOOLS[self][0]

    @property
    def table(self) -> Mapping[str, Counterpart]:
        return _TOOLS[self][1]

    @property
    def is_program(self) -> bool:
        """Whether it is a program around the Trainer, with fields of TrainingArguments in its file."""
        return self.title in PROGRAMS


_TOOLS: Mapping[Tool, tuple[str, Mapping[str, Counterpart]]] = {
    Tool.TRAINING_ARGUMENTS: ("TrainingArguments", TRAINING_ARGUMENTS),
    Tool.DEEPSPEED: ("DeepSpeed", DEEPSPEED),
    Tool.ACCELERATE: ("accelerate", ACCELERATE),
    **dict(zip(list(Tool)[3:], PROGRAMS.items(), strict=True)),
}
_NO_PROGRAMS = [tool for tool in Tool if not tool.is_program]


def tool_of(name: str | None) -> Tool | None:
    """Return the tool of a name, as in `--from`.

    Raises:
        UsageError: there is no such tool.
    """
    if name is None or name in [tool.value for tool in Tool]:
        return Tool(name) if name else None
    raise UsageError(f"`--from` must be one of {', '.join(tool.value for tool in Tool)}, but is {name}")


_OBJECTS = (
    "accelerator_config", "activation_checkpointing_kwargs", "deepspeed", "fsdp_config",
    "gradient_checkpointing_kwargs", "lr_scheduler_kwargs",
)  # fmt: skip
"""Keys of TrainingArguments that may be objects in JSON text, as on a command line."""
_PYTHON = (".py", ".ipynb", ".bin")  # `training_args.bin` is a pickle


@dataclass(frozen=True)
class Item:
    """A key of a file, or a default of the tool."""

    tool: Tool
    key: str  # dotted, as in the table of the tool
    value: Any
    origin: Origin | None  # None if the key is not written
    program: Tool | None = None  # the program with this argument of the Trainer
    written: str = ""  # the key in the file, if it differs
    defaults: tuple[Any, ...] | None = None  # those of the program, if they differ

    @property
    def name(self) -> str:
        """The key as it is written."""
        return self.written or self.key

    @property
    def title(self) -> str:
        return (self.program or self.tool).title

    @property
    def row(self) -> Counterpart | None:
        """The row of the key; None if the tool has no such key."""
        row = self.tool.table.get(self.key)
        return row if row is None or self.defaults is None else replace(row, defaults=self.defaults)

    @property
    def is_default(self) -> bool:
        """Whether the key has the same effect as leaving it out."""
        return self.origin is None or (self.row is not None and self.row.is_default(self.value))

    @property
    def is_auto(self) -> bool:
        """Whether TrainingArguments determine the value in DeepSpeed's file."""
        return self.tool is Tool.DEEPSPEED and self.value == "auto"

    def __str__(self) -> str:
        where = str(self.origin) if self.origin else f"default of {self.title}"
        return f"{self.name} {shown_value(self.value)} ({where})"


@dataclass
class Sources:
    """All keys of all files."""

    files: dict[Tool, str] = field(default_factory=dict)  # paths for messages
    items: dict[Tool, dict[str, Item]] = field(default_factory=dict)
    arguments: dict[str, Item] = field(default_factory=dict)  # the program's defaults of TrainingArguments
    processes: int | None = None  # the ranks of a launcher's command
    launcher: Item | None = None

    @property
    def program(self) -> Tool | None:
        """The program around the Trainer with a file here."""
        return next((tool for tool in self.files if tool.is_program), None)

    def launched(self, command: Command) -> None:
        """Add the launcher of a command."""
        self.processes = command.ranks
        if command.launcher:
            text = " ".join(word.text for word in command.launcher)
            self.launcher = Item(Tool.TRAINING_ARGUMENTS, "launcher", text, command.launcher[0].origin)

    def set_argument(self, key: str, value: Any, item: Item | None = None, stays: bool = False) -> None:
        """Set the value of a field of TrainingArguments.

        Args:
            item: the written key that it comes from; None: it is the program's default.
            stays: whether that key has a further meaning.
        """
        tool = Tool.TRAINING_ARGUMENTS
        if item is None:
            self.arguments[key] = Item(tool, key, value, None, self.program, "", (value,))
        else:
            self.items[tool][key] = Item(tool, key, value, item.origin, self.program, item.name, item.defaults)
            if item.tool is not tool and not stays:  # else it has two lines in the report
                del self.items[item.tool][item.key]

    def has(self, tool: Tool) -> bool:
        return tool in self.files

    def written(self, tool: Tool, key: str) -> Item | None:
        """Return the key if it is written."""
        return self.items.get(tool, {}).get(key)

    def given(self, tool: Tool, key: str) -> Item | None:
        """Return the key if it is written with a value that is not empty."""
        item = self.written(tool, key)
        return item if item is not None and item.value else None

    def all_given(self, tool: Tool, *keys: str) -> list[Item]:
        """Return those of the keys that are `given`."""
        return [item for key in keys if (item := self.given(tool, key))]

    def get(self, tool: Tool, key: str) -> Item | None:
        """Return the key, or the default of the tool; None without a file of the tool or a default."""
        item = self.written(tool, key)
        row = tool.table.get(key)
        if item is not None or not self.has(tool):
            return item
        if tool is Tool.TRAINING_ARGUMENTS and key in self.arguments:
            return self.arguments[key]
        if row is None or not row.defaults:
            return None
        return Item(tool, key, row.defaults[0], None)

    def inside(self, tool: Tool, section: str) -> list[Item]:
        """Return the written keys of a section."""
        return [item for key, item in self.items.get(tool, {}).items() if key.split(".")[0] == section]

    def all(self) -> Iterator[Item]:
        """Yield every key that is written."""
        for items in self.items.values():
            yield from items.values()


def read_sources(files: Iterable[Path], tool: Tool | None) -> Sources:
    """Read files and the files that they name.

    Args:
        files: Files of different tools.
        tool: The tool of the files; None to recognise it from the keys.

    Raises:
        UsageError: a file cannot be read, its tool is unclear, or two files are of one tool.
    """
    sources = Sources()
    read = set()
    for file in files:
        given, tree, name = tool, None, shown_path(file)
        if file.suffix.lower() in ENDINGS:
            command = read_command(file)
            given = tool or (Tool(command.tool) if command.tool else None)
            base = _read(command.file).members if command.file else {}
            tree = _usable(replace(command.arguments, value={**base, **command.arguments.members}))
            sources.launched(command)
            if command.accelerate:
                _add(sources, Tool.ACCELERATE, _read(command.accelerate), shown_path(command.accelerate))
        tree = tree or _read(file)
        read.add(os.path.realpath(file))
        given = given or _recognised(tree, name)
        _add(sources, given, _without_variables(tree) if given.is_program else tree, name)
    for key, named in list(_named_files(sources)):
        if os.path.realpath(named) in read:
            continue
        read.add(os.path.realpath(named))
        if key == "fsdp_config":
            _add_items(sources, Tool.TRAINING_ARGUMENTS, _read(named), key)
        else:
            _add(sources, Tool.DEEPSPEED, _read(named), shown_path(named))
    return sources


def _add(sources: Sources, tool: Tool, tree: Node, name: str) -> None:
    if sources.has(tool):
        raise UsageError(f"{name}: is a second file of {tool.title}, after {sources.files[tool]}; give only one")
    if tool.is_program and sources.program:
        raise UsageError(f"{name}: is a file of {tool.title}, after one of {sources.program.title}; give only one")
    sources.files[tool] = name
    if tool.is_program:
        _add_program(sources, tool, tree, name)
        return
    if tool is Tool.TRAINING_ARGUMENTS:
        tree = replace(tree, value={key: _with_object(key, node) for key, node in tree.members.items()})
    _add_items(sources, tool, tree, "")
    inner = tree.members.get("deepspeed")
    if tool is Tool.TRAINING_ARGUMENTS and inner is not None and inner.members:
        _add(sources, Tool.DEEPSPEED, inner, f"{name}, `deepspeed`")


def _add_program(sources: Sources, tool: Tool, tree: Node, name: str) -> None:
    """Add the keys of a program: its own, and those of TrainingArguments under their names there."""
    own, arguments = _divided(tool, tree, name)
    _add_items(sources, tool, replace(tree, value=own), "")
    for key, row in tool.table.items():
        if row.kind is Kind.ARGUMENT and row.defaults and row.defaults != TRAINING_ARGUMENTS[row.argument].defaults:
            sources.arguments[row.argument] = Item(
                Tool.TRAINING_ARGUMENTS, row.argument, row.defaults[0], None, tool, key, row.defaults
            )
    _add(sources, Tool.TRAINING_ARGUMENTS, replace(tree, value=arguments), name)
    names = {row.argument: (key, row) for key, row in tool.table.items() if row.argument and key in tree.members}
    items = sources.items[Tool.TRAINING_ARGUMENTS]
    for key, item in items.items():
        root = key.partition(".")[0]
        if root in names:
            written, row = names[root]
            inner = key.removeprefix(root)
            items[key] = replace(item, program=tool, written=written + inner, defaults=None if inner else row.defaults)


def _divided(tool: Tool, tree: Node, name: str) -> tuple[dict[str, Node], dict[str, Node]]:
    """Return the keys of the program itself, and those of TrainingArguments under their names there."""
    own: dict[str, Node] = {}
    arguments: dict[str, Node] = {}
    for key, node in tree.members.items():
        row = tool.table.get(key)
        # A null is a key left out, as the programs read it; the Trainer has no value for it.
        if row is None or row.kind is not Kind.ARGUMENT or node.value is None:
            own[key] = node
        elif row.argument in arguments:
            raise RecipeError(f"{node.key_origin or name}: `{key}` is `{row.argument}` too, which is written; keep one")
        else:
            arguments[row.argument] = _as_number(node, row)
    return own, arguments


def _as_number(node: Node, row: Counterpart) -> Node:
    """Return the number in a text, for a key with a number as its default: the programs read both."""
    default = row.defaults[0] if row.defaults else None
    if isinstance(node.value, str) and isinstance(default, int | float) and not isinstance(default, bool):
        with suppress(ValueError):
            return replace(node, value=float(node.value) if not node.value.isdigit() else int(node.value))
    return node


def _with_object(key: str, node: Node) -> Node:
    """Return the value of a key of TrainingArguments, read as JSON if it is the text of an object."""
    if key not in _OBJECTS or not isinstance(node.value, str) or not node.value.startswith("{"):
        return node
    try:
        return replace(_node(json.loads(node.value), node.origin), key_origin=node.key_origin)
    except ValueError as error:
        raise RecipeError(f"{node.key_origin}: `{key}` must be an object in JSON, but {error}; correct it") from error


def _node(value: Any, origin: Origin) -> Node:
    if isinstance(value, dict):
        return Node({name: _node(inner, origin) for name, inner in value.items()}, origin)
    return Node([_node(inner, origin) for inner in value] if isinstance(value, list) else value, origin)


def _add_items(sources: Sources, tool: Tool, tree: Node, path: str) -> None:
    items = sources.items.setdefault(tool, {})
    for key, node in _leaves(tool, tree, path):
        # The first value stays, because files that a file names are read after it.
        items.setdefault(key, Item(tool, key, node.plain(), node.key_origin or node.origin))


def _leaves(tool: Tool, node: Node, path: str) -> Iterator[tuple[str, Node]]:
    descends = not path or any(key.startswith(f"{path}.") for key in tool.table)
    if not (descends and node.members):
        yield path, node
        return
    for name, member in node.members.items():
        if tool is Tool.TRAINING_ARGUMENTS and path == "fsdp_config":
            name = name.removeprefix("fsdp_")
        yield from _leaves(tool, member, f"{path}.{name}" if path else name)


def _named_files(sources: Sources) -> Iterator[tuple[str, Path]]:
    """Yield existing files that other files name; the report has the missing ones."""
    for tool, key in (
        (Tool.TRAINING_ARGUMENTS, "deepspeed"),
        (Tool.TRAINING_ARGUMENTS, "fsdp_config"),
        (Tool.ACCELERATE, "deepspeed_config.deepspeed_config_file"),
    ):
        item = sources.written(tool, key)
        if item is None or item.origin is None or not isinstance(item.value, str):
            continue
        for folder in (Path(), item.origin.folder):  # the tools use the current folder
            if (folder / item.value).is_file():
                yield key, folder / item.value
                break


def _recognised(tree: Node, name: str) -> Tool:
    """Return the tool of the file from keys that only this tool has."""
    programs = _likely_programs(set(tree.members))
    if len(programs) > 1:
        titles = " or ".join(tool.title for tool in programs)
        options = " or ".join(f"--from {tool.value}" for tool in programs)
        raise UsageError(f"{name}: may be a file of {titles}, which differ; select it with {options}")
    found = _own_keys(tree)
    if programs or len(found) == 1:
        return next(iter(programs or found))
    choices = ", ".join(f"--from {tool.value}" for tool in found or Tool)
    if not found:
        raise UsageError(f"{name}: has no key that only one tool has; select the tool with one of {choices}")
    clash = " and ".join(f"{tool.title} (`{key}`)" for tool, key in found.items())
    raise UsageError(f"{name}: has keys of {clash}; select the tool with one of {choices}")


def _likely_programs(keys: set[str]) -> list[Tool]:
    """Return the programs with most of the keys; none if another tool has all of them, or as many."""
    others = [tool.table for tool in _NO_PROGRAMS]
    marks = keys.difference(*others)
    scores = {tool: (len(marks & tool.table.keys()), len(keys & tool.table.keys())) for tool in Tool if tool.is_program}
    best = max(scores.values())
    # Arguments of the Trainer with one key of a program are a mistake of the key.
    if not best[0] or best[1] <= max(len(keys & table.keys()) for table in others):
        return []
    return [tool for tool, score in scores.items() if score == best]


def _own_keys(tree: Node) -> dict[Tool, str]:
    """Return the first key of each tool that no other one has; an object belongs to the tool that has keys in it."""
    found: dict[Tool, str] = {}
    for key in sorted(tree.members):
        owners = [tool for tool in _NO_PROGRAMS if key in tool.table]
        if len(owners) > 1:
            is_object = bool(tree.members[key].members)
            owners = [tool for tool in owners if is_object == any(name.startswith(f"{key}.") for name in tool.table)]
        if len(owners) == 1:
            found.setdefault(owners[0], key)
    return {tool: found[tool] for tool in _NO_PROGRAMS if tool in found}


def _read(file: Path) -> Node:
    if file.suffix.lower() in _PYTHON:
        raise UsageError(
            f"{shown_path(file)}: is not JSON or YAML, and `trainer convert` runs no code; save the TrainingArguments"
            ' in the program: `open("args.json", "w").write(args.to_json_string())`, and convert args.json'
        )
    node, problems = read_file(file, _as_accelerate)
    if problems:
        raise RecipeError(*map(str, problems))
    return _usable(node, shown_path(file))


def _usable(node: Node, name: str = "") -> Node:
    """Return the tree without secrets."""
    if not node.members:
        raise UsageError(f"{name or node.origin}: must be an object with keys, but is {shown_value(node.plain())}")
    return without_secrets(node)


def _without_variables(tree: Node) -> Node:
    """Return the tree of a program, unless a value is a variable, which the program replaces."""
    problems = [
        f"{node.key_origin or node.origin}: `{key}` has a variable, {shown_value(node.value)}; write its value"
        for key, node in _texts("", tree)
        if "${" in str(node.value)
    ]
    if problems:
        raise RecipeError(*problems)
    return tree


def _texts(path: str, node: Node) -> Iterator[tuple[str, Node]]:
    inner = node.value.items() if isinstance(node.value, dict) else []
    items = enumerate(node.value) if isinstance(node.value, list) else inner
    for key, member in items:
        yield from _texts(f"{path}.{key}" if path else str(key), member)
    if isinstance(node.value, str):
        yield path, node


_EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")


def _as_accelerate(node: yaml.ScalarNode) -> bool | int | float | str | None:
    """Return the value of a scalar by YAML 1.1, as the tools read their files; a date is text, 1e-4 a number."""
    if node.style is None and _EXPONENT.fullmatch(node.value):
        return float(node.value)
    # Of PyYAML, only the types of plain scalars are used; no tag makes an object.
    loader = yaml.SafeLoader("")
    tag = loader.resolve(yaml.ScalarNode, node.value, (node.style is None, True))
    value = loader.construct_object(yaml.ScalarNode(tag, node.value))
    return value if value is None or isinstance(value, bool | int | float | str) else str(node.value)
