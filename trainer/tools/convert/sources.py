"""Files of other tools: reading, recognition of the tool, and their keys."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from trainer.base.errors import RecipeError, UsageError
from trainer.recipe.paths import shown_value
from trainer.recipe.reading.files import read_file, shown_path
from trainer.recipe.reading.parser import Node, Origin
from trainer.tools.convert.foreign.tables import ACCELERATE, DEEPSPEED, FORMATS, TRAINING_ARGUMENTS, Counterpart


class Tool(Enum):
    """The tool of a file; the values are those of `--from`."""

    TRAINING_ARGUMENTS = "training-arguments"
    DEEPSPEED = "deepspeed"
    ACCELERATE = "accelerate"

    @property
    def title(self) -> str:
        return _TOOLS[self][0]

    @property
    def table(self) -> Mapping[str, Counterpart]:
        return _TOOLS[self][1]


_TOOLS: Mapping[Tool, tuple[str, Mapping[str, Counterpart]]] = {
    Tool.TRAINING_ARGUMENTS: ("TrainingArguments", TRAINING_ARGUMENTS),
    Tool.DEEPSPEED: ("DeepSpeed", DEEPSPEED),
    Tool.ACCELERATE: ("accelerate", ACCELERATE),
}
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

    @property
    def row(self) -> Counterpart | None:
        """The row of the key; None if the tool has no such key."""
        return self.tool.table.get(self.key)

    @property
    def is_default(self) -> bool:
        """Whether the key has the same effect as leaving it out."""
        return self.origin is None or (self.row is not None and self.row.is_default(self.value))

    @property
    def is_auto(self) -> bool:
        """Whether TrainingArguments determine the value in DeepSpeed's file."""
        return self.tool is Tool.DEEPSPEED and self.value == "auto"

    def __str__(self) -> str:
        where = str(self.origin) if self.origin else f"default of {self.tool.title}"
        return f"{self.key} {shown_value(self.value)} ({where})"


@dataclass
class Sources:
    """All keys of all files."""

    files: dict[Tool, str] = field(default_factory=dict)  # paths for messages
    items: dict[Tool, dict[str, Item]] = field(default_factory=dict)

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
        row = tool.table[key]
        if item is not None or not self.has(tool) or not row.defaults:
            return item
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
        tree, name = _read(file), shown_path(file)
        _refuse_others(tree, name)
        read.add(os.path.realpath(file))
        _add(sources, tool or _recognised(tree, name), tree, name)
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
    sources.files[tool] = name
    if tool is Tool.TRAINING_ARGUMENTS:
        tree = replace(tree, value={key: _with_object(key, node) for key, node in tree.members.items()})
    _add_items(sources, tool, tree, "")
    inner = tree.members.get("deepspeed")
    if tool is Tool.TRAINING_ARGUMENTS and inner is not None and inner.members:
        _add(sources, Tool.DEEPSPEED, inner, f"{name}, `deepspeed`")


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
    found = {}
    for tool in Tool:
        own = {key for key in tree.members if _is_of_one(key, tree.members[key], tool)}
        if own:
            found[tool] = sorted(own)
    if len(found) == 1:
        return next(iter(found))
    choices = ", ".join(f"--from {tool.value}" for tool in found or Tool)
    if not found:
        raise UsageError(f"{name}: has no key that only TrainingArguments, DeepSpeed or accelerate have; use {choices}")
    clash = " and ".join(f"{tool.title} (`{keys[0]}`)" for tool, keys in found.items())
    raise UsageError(f"{name}: has keys of {clash}; select the tool with one of {choices}")


def _refuse_others(tree: Node, name: str) -> None:
    """Refuse a file of a tool that is not read, with the counterpart of each key that decides what it trains."""
    known = [key for key in tree.members if not any(key in tool.table for tool in Tool)]
    found = {title: [key for key in known if key in table] for title, table in FORMATS.items()}
    title, keys = max(found.items(), key=lambda entry: len(entry[1]))
    if keys:
        raise RecipeError(
            f"{name}: is a file of {title}, which `trainer convert` does not read: its other keys and their defaults"
            " decide what is learned too; write a recipe by hand. Keys that show the tool:",
            *(f"{tree.members[key].key_origin or name}: `{key}` {FORMATS[title][key]}" for key in keys),
        )


def _is_of_one(key: str, node: Node, tool: Tool) -> bool:
    """Return whether only this tool has the key; an object belongs to the tool that has keys in it."""
    owners = [other for other in Tool if key in other.table]
    if len(owners) > 1:
        owners = [other for other in owners if bool(node.members) == any(k.startswith(f"{key}.") for k in other.table)]
    return owners == [tool]


def _read(file: Path) -> Node:
    if file.suffix.lower() in _PYTHON:
        raise UsageError(
            f"{shown_path(file)}: is not JSON or YAML, and `trainer convert` runs no code; save the TrainingArguments"
            ' in the program: `open("args.json", "w").write(args.to_json_string())`, and convert args.json'
        )
    node, problems = read_file(file, _as_accelerate)
    if problems:
        raise RecipeError(*map(str, problems))
    if not node.members:
        raise UsageError(f"{shown_path(file)}: must be an object with keys, but is {shown_value(node.plain())}")
    return node


def _as_accelerate(node: yaml.ScalarNode) -> bool | int | float | str | None:
    """Return the value of a scalar by YAML 1.1, as accelerate reads its file; a date is text."""
    # Of PyYAML, only the types of plain scalars are used; no tag makes an object.
    loader = yaml.SafeLoader("")
    tag = loader.resolve(yaml.ScalarNode, node.value, (node.style is None, True))
    value = loader.construct_object(yaml.ScalarNode(tag, node.value))
    return value if value is None or isinstance(value, bool | int | float | str) else str(node.value)
