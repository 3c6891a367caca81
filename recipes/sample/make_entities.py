"""Makes the sample of entities: `entities_train.jsonl` and `entities_validation.jsonl` beside this file.

Each row is a sentence from a documentation string of Python's standard library, as words. The tags (IOB2) mark names of
modules, classes and exceptions that the library defines, and other identifiers. The files are the same whenever it is
run, given Python 3.11.7:

    python recipes/sample/make_entities.py
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from dataclasses import dataclass, field

from make_sample import FOLDER, PYTHON, VALIDATION_SHARE, _draw, _paths, _rows, _without_near_copies

PLAIN_SHARE = 0.25  # rows without an entity, for each row with one
LONGEST_ROW = 40  # words

_WORD = re.compile(r"\w+(?:\.\w+)*|[^\w\s]")
_CAMEL = re.compile(r"[A-Z]+[a-z0-9]+[A-Z]\w*|[A-Z][a-z0-9]*[A-Z]\w*[a-z]\w*")
_EXCEPTION = re.compile(r"\w+(Error|Exception|Warning)")


@dataclass
class Names:
    """The names that the standard library defines."""

    modules: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)


def main() -> None:
    if sys.version_info[:3] != PYTHON:
        sys.exit(f"this script reads the standard library of Python {'.'.join(map(str, PYTHON))}, not {sys.version}")
    names = _names()
    tagged, plain = [], []
    for row in _without_near_copies(_rows(sentences=1)):
        words, tags = _tags(row.text, names)
        if len(words) <= LONGEST_ROW:
            (plain if set(tags) == {"O"} else tagged).append((row, words, tags))
    rows = sorted(tagged + plain[: int(len(tagged) * PLAIN_SHARE)], key=lambda row: _draw(row[0].text))
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for row, words, tags in rows:
        split = "validation" if _draw(row.docstring) < VALIDATION_SHARE else "train"
        splits[split].append(_line(words, tags))
    for name, lines in splits.items():
        (FOLDER / f"entities_{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(words: list[str], tags: list[str]) -> str:
    return json.dumps({"words": words, "tags": tags}, ensure_ascii=False, separators=(",", ":"))


def _names() -> Names:
    names = Names(modules=set(sys.stdlib_module_names))
    for path, _ in _paths():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                names.classes.add(node.name)
    names.classes.update(name for name, value in vars(builtins).items() if isinstance(value, type))
    return names


def _tags(text: str, names: Names) -> tuple[list[str], list[str]]:
    """The words of a sentence, without white space, and their tags."""
    words: list[str] = []
    tags: list[str] = []
    for match in _WORD.finditer(text):
        label = _label(match, names)
        parts = re.findall(r"\w+|[^\w\s]", match[0])
        words.extend(parts)
        tags.extend(["O"] * len(parts) if label is None else [f"B-{label}", *[f"I-{label}"] * (len(parts) - 1)])
    return words, tags


def _label(match: re.Match[str], names: Names) -> str | None:
    """The type of a name, if its form or its neighbours show that it is one; many names are words of English too."""
    name, last = match[0], match[0].rpartition(".")[2]
    before, after = match.string[: match.start()], match.string[match.end() :]
    if last in names.classes and _EXCEPTION.fullmatch(last):
        return "EXCEPTION"
    if last in names.classes and _CAMEL.fullmatch(last):
        return "CLASS"
    if last.islower() and (after.startswith("(") or "_" in last.strip("_")):
        return "IDENTIFIER"  # of a function, method, attribute or argument
    near = re.match(r"[`'\"]? (module|package)\b", after) or re.search(r"\b(module|package) [`'\"]?$", before)
    if name in names.modules and near and name.islower():
        return "MODULE"
    return None


if __name__ == "__main__":
    main()
