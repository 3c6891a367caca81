"""Makes `train.jsonl` and `validation.jsonl` beside this file: names and descriptions from Python's standard library.

Each row is the name of a function or class with that of its module, as words, and the first sentence of its
documentation string. The files are the same whenever it is run, given Python 3.11.7:

    python trainer/features/embeddings/recipes/pairs/make_pairs.py
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PYTHON = (3, 11, 7)
FOLDER = Path(__file__).parent

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "ensurepip", "distutils", "turtledemo"}
VALIDATION_SHARE = 0.12
SHORTEST, LONGEST = 30, 160  # characters of a description

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])")
_PROSE = re.compile(r"[A-Z][\w'`\"-]*[ ,].*[.!?]")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def main() -> None:
    if sys.version_info[:3] != PYTHON:
        sys.exit(f"make_pairs.py reads the standard library of Python {'.'.join(map(str, PYTHON))}, not {sys.version}")
    splits: dict[str, list[dict[str, str]]] = {"train": [], "validation": []}
    for name, description in sorted(_pairs(), key=lambda pair: _draw("".join(pair))):
        # The name decides, so a name that several classes share is in one split.
        split = "validation" if _draw(name) < VALIDATION_SHARE else "train"
        splits[split].append({"name": name, "description": description})
    for split, rows in splits.items():
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (FOLDER / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _draw(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _pairs() -> Iterator[tuple[str, str]]:
    """Pairs without a name or a description that was there before."""
    library = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library).with_suffix("")
        if LEFT_OUT & set(place.parts):
            continue
        module = [part for part in place.parts if part != "__init__"][-1:]
        for names, docstring in _documented(ast.parse(path.read_bytes()), module):
            description = _SENTENCE_END.split(" ".join(docstring.split("\n\n")[0].split()))[0]
            name = " ".join(word.lower() for part in names for word in _WORD.findall(part))
            is_prose = _PROSE.fullmatch(description) and SHORTEST <= len(description) <= LONGEST
            if is_prose and not {name, description.lower()} & seen:
                seen |= {name, description.lower()}
                yield name, description


def _documented(node: ast.AST, names: list[str]) -> Iterator[tuple[list[str], str]]:
    """The names and the documentation string of each function and class, from outside to inside."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [*names, child.name]
            if docstring := ast.get_docstring(child):
                yield inner, docstring
            yield from _documented(child, inner)


if __name__ == "__main__":
    main()
