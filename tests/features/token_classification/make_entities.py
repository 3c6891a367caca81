"""Makes the rows of `ner_sample`: `train.jsonl` and `validation.jsonl` beside that recipe.

Each row is a sentence from a documentation string of Python's standard library, as words. The tags (IOB2) mark names of
modules, classes and exceptions that the library defines, and other identifiers. A dictionary of names is not enough:

- Each sentence comes with other names of the library in place of its own, of the same type and form. In the training
  rows there are three such sentences for each, with half of the names; in the validation rows one, with all names.
- The sentences without a name have words that are names of the library too, such as `read` or `socket`.

The files are the same whenever it is run, given Python 3.11.7:

    python tests/features/token_classification/make_entities.py
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "trainer" / "features" / "token_classification" / "recipes"
sys.path.insert(0, str(ROOT / "recipes" / "sample"))

from make_sample import PYTHON, VALIDATION_SHARE, Row, _draw, _paths, _rows, _without_near_copies  # noqa: E402

COPIES = 3  # of a training sentence, with other names
HELD_OUT = 0.5  # share of the names that the training rows do not have
MOST_PLAIN = 1500  # rows without a name
MOST_COMMON = 150  # a word that occurs more often does not make a sentence ambiguous
LONGEST_ROW = 40  # words

_WORD = re.compile(r"\w+(?:\.\w+)*|[^\w\s]")
_CAMEL = re.compile(r"[A-Z]+[a-z0-9]+[A-Z]\w*|[A-Z][a-z0-9]*[A-Z]\w*[a-z]\w*")
_EXCEPTION = re.compile(r"\w+(Error|Exception|Warning)")


@dataclass
class Names:
    """The names that the standard library defines."""

    modules: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)

    @cached_property
    def forms(self) -> dict[str, list[str]]:
        """The names in order by form: by label, and those of functions without and with an underscore."""
        low = [name for name in self.functions if name.islower()]
        exceptions = list(filter(_EXCEPTION.fullmatch, self.classes))
        return {
            "MODULE": sorted(name for name in self.modules if name.islower() and not name.startswith("_")),
            "EXCEPTION": sorted(exceptions),
            "CLASS": sorted(set(filter(_CAMEL.fullmatch, self.classes)) - set(exceptions)),
            "function": sorted(name for name in low if "_" not in name),
            "underscored": sorted(name for name in low if "_" in name.strip("_") and not name.startswith("_")),
        }


@dataclass
class Sentence:
    """A sentence with its words and tags."""

    row: Row
    words: list[str]
    tags: list[str]

    @property
    def entities(self) -> list[tuple[int, int, str]]:
        """The first word of each name, the word behind it, and its label."""
        starts = [index for index, tag in enumerate(self.tags) if tag.startswith("B-")]
        return [
            (start, start + 1 + len(list(takewhile(lambda tag: tag.startswith("I-"), self.tags[start + 1 :]))), tag[2:])
            for start, tag in ((start, self.tags[start]) for start in starts)
        ]

    @property
    def is_held_out(self) -> bool:
        return _draw(self.row.docstring) < VALIDATION_SHARE

    @property
    def split(self) -> str:
        return "validation" if self.is_held_out else "train"


def main() -> None:
    if sys.version_info[:3] != PYTHON:
        sys.exit(f"this script reads the standard library of Python {'.'.join(map(str, PYTHON))}, not {sys.version}")
    names = _names()
    sentences = [Sentence(row, *_tags(row.text, names)) for row in _without_near_copies(_rows(sentences=1))]
    sentences = [sentence for sentence in sentences if len(sentence.words) <= LONGEST_ROW]
    counts = Counter(word.lower() for sentence in sentences for word in sentence.words)
    ambiguous = {name for form in ("function", "MODULE") for name in names.forms[form] if counts[name] <= MOST_COMMON}
    plain = [
        sentence
        for sentence in sentences
        if not sentence.entities and any(word.lower() in ambiguous for word in sentence.words)
    ]
    splits: dict[str, list[tuple[float, str]]] = {"train": [], "validation": []}
    for sentence in sentences:
        for copy in range((1 if sentence.is_held_out else COPIES) if sentence.entities else 0):
            splits[sentence.split].append(
                (_draw(f"{copy} {sentence.row.text}"), _line(*_renamed(sentence, copy, names)))
            )
    for sentence in sorted(plain, key=lambda sentence: _draw(sentence.row.text))[:MOST_PLAIN]:
        splits[sentence.split].append((_draw(sentence.row.text), _line(sentence.words, sentence.tags)))
    for name, rows in splits.items():
        lines = [line for _, line in sorted(rows)]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _renamed(sentence: Sentence, copy: int, names: Names) -> tuple[list[str], list[str]]:
    """The words and tags of a sentence with another name in the place of the last word of each of its names."""
    words = list(sentence.words)
    for start, stop, label in sentence.entities:
        last = words[stop - 1]
        form = label if label != "IDENTIFIER" else "underscored" if "_" in last.strip("_") else "function"
        known = [n for n in names.forms[form] if sentence.is_held_out or _draw(f"name {n}") >= HELD_OUT]
        words[stop - 1] = known[int(_draw(f"{copy} {start} {sentence.row.text}") * len(known))]
    return words, sentence.tags


def _line(words: list[str], tags: list[str]) -> str:
    return json.dumps({"words": words, "tags": tags}, ensure_ascii=False, separators=(",", ":"))


def _names() -> Names:
    names = Names(modules=set(sys.stdlib_module_names))
    for path, _ in _paths():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                names.classes.add(node.name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.functions.add(node.name)
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
