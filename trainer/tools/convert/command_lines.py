"""Shell scripts with a command of another tool, such as `trl sft --learning_rate 1e-4`, as trees of its arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.base.errors import RecipeError, UsageError
from trainer.recipe.paths import shown_value
from trainer.recipe.reading.files import read_text, shown_path
from trainer.recipe.reading.parser import Node, Origin

ENDINGS = (".sh", ".bash")
_METHODS = {"sft": "trl-sft", "dpo": "trl-dpo", "kto": "trl-kto", "reward": "trl-reward"}
_WITH_FILE = {"llamafactory-cli": "llama-factory", "axolotl": "axolotl"}  # PROGRAM train FILE
_RANKS = ("num_processes", "nproc_per_node", "num_gpus")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True)
class Token:
    text: str
    origin: Origin


@dataclass(frozen=True)
class Command:
    """A command of a training.

    Attributes:
        tool: the tool, as in `--from`; None: the keys decide.
        arguments: the options and their values.
        file: the file of arguments that the command names.
        launcher: the words before the program, such as `accelerate launch`.
        ranks: the number of ranks that the launcher has; None: it has none.
        accelerate: accelerate's file that the launcher names.
    """

    tool: str | None
    arguments: Node
    file: Path | None
    launcher: list[Token] = field(default_factory=list)
    ranks: int | None = None
    accelerate: Path | None = None


def read_command(file: Path) -> Command:
    """Read the one command of a training in a shell script.

    Raises:
        UsageError: the script has no such command, or several.
        RecipeError: a value is a variable of the shell, or quotes are not closed.
    """
    found = [command for words in _commands(file) if (command := _command(words, file))]
    if len(found) == 1:
        return found[0]
    count = f"has {len(found)} commands" if found else "has no command"
    raise UsageError(
        f"{shown_path(file)}: {count} of a training, such as `trl sft ...`, `python dpo.py ...` or"
        " `axolotl train FILE`; give a script with one"
    )


def _commands(file: Path) -> list[list[Token]]:
    """Return the words of each command; a backslash at the end of a line continues it."""
    commands: list[list[Token]] = [[]]
    for number, line in enumerate(read_text(file).splitlines(), 1):
        origin = Origin(shown_path(file), number, 1, file.absolute().parent)
        goes_on = line.rstrip().endswith("\\")
        try:
            words = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError as error:
            raise RecipeError(f"{origin}: {error}; write each quoted value on one line") from error
        commands[-1] += [Token(word, origin) for word in words]
        if not goes_on:
            commands.append([])
    return [words for words in commands if words]


def _command(words: Sequence[Token], file: Path) -> Command | None:
    texts = [word.text for word in words]
    for place, text in enumerate(texts):
        name, following = Path(text).name, texts[place + 1] if place + 1 < len(texts) else ""
        if name == "trl" and following in _METHODS:
            return _made(_METHODS[following], words[:place], words[place + 2 :], file)
        if name in _WITH_FILE and following == "train":
            return _made(_WITH_FILE[name], words[:place], words[place + 2 :], file)
        if name.endswith(".py") and not (place and texts[place - 1].startswith("--")):
            return _made(_METHODS.get(name.removesuffix(".py")), words[:place], words[place + 1 :], file)
    return None


def _made(tool: str | None, launcher: Sequence[Token], words: Sequence[Token], file: Path) -> Command:
    for word in (*launcher, *words):
        if re.search(r"(?<!\\)\$|`", word.text):
            raise RecipeError(f"{word.origin}: `{word.text}` has a variable of the shell; write its value")
    options, rest = _options(words)
    path = _path("config", options.pop("config", None)) if tool is not None else None
    for word in rest:
        if path is None and word.text.endswith((".yaml", ".yml", ".json")):
            path = word.text
        elif word.text not in ("&", "&&", ";", "|"):
            raise RecipeError(f"{word.origin}: `{word.text}` belongs to no option; remove it")
    of_launcher, _ = _options(launcher)
    ranks = next((node.plain() for key in _RANKS if (node := of_launcher.get(key))), None)
    config = _path("config_file", of_launcher.get("config_file"))
    return Command(
        tool,
        Node(options, Origin(shown_path(file), folder=file.absolute().parent)),
        _beside(path, file) if path else None,
        [word for word in launcher if word.text not in ("python", "python3")],
        ranks if isinstance(ranks, int) else None,
        _beside(config, file) if config else None,
    )


def _path(option: str, node: Node | None) -> str | None:
    if node is None:
        return None
    if isinstance(node.value, str):
        return node.value
    raise RecipeError(f"{node.origin}: `--{option}` must be the path of one file, but is {shown_value(node.plain())}")


def _beside(path: str, file: Path) -> Path:
    """Return the file of a path relative to the current folder, or to that of the script."""
    return Path(path) if Path(path).is_file() else file.parent / path


def _options(words: Sequence[Token]) -> tuple[dict[str, Node], list[Token]]:
    """Return the options with their values, and the other words before the first option.

    `KEY=VALUE` is an option too, as in `llamafactory-cli train FILE learning_rate=1e-5`.
    """
    options: dict[str, Node] = {}
    assigned: dict[str, Node] = {}
    values: dict[str, list[Token]] = {}
    rest: list[Token] = []
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            key, equals, value = word.text[2:].partition("=")
            key = key.replace("-", "_")
            if key in values:
                raise RecipeError(f"{word.origin}: `--{key}` is there twice; remove one")
            values[key] = [Token(value, word.origin)] if equals else []
            options[key] = Node(None, word.origin, word.origin)
        elif "=" in word.text:
            key, _, value = word.text.partition("=")
            assigned[key] = Node(_value(value), word.origin, word.origin)
        elif values:
            values[next(reversed(values))].append(word)
        else:
            rest.append(word)
    for key, tokens in values.items():
        found = [_value(token.text) for token in tokens]
        origin = options[key].origin
        several = [Node(item, origin) for item in found]
        options[key] = Node(several if len(found) > 1 else found[0] if found else True, origin, origin)
    return options | assigned, rest


def _value(text: str) -> bool | int | float | str | None:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return text
