"""CONTRIBUTING names files, functions and tables that exist: those of the walks, and of the table of changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
_FILE = re.compile(r"[\w./*-]+(?:/|\.(?:py|json|md|toml|yml|txt))|Makefile")


def parts() -> list[str]:
    """Return the lists of steps and of interfaces, and the rows of the table of changes."""
    walks = re.findall(r"^1\. .*\n(?:\d+\. .*\n| {3,4}.*\n)*", TEXT, re.MULTILINE)
    rows = re.findall(
        r"^\| .*`.* \|$", TEXT.partition("## Where a change goes")[2].partition("## Habits")[0], re.MULTILINE
    )
    return [*walks, *rows]


def files_of(part: str) -> dict[str, list[Path]]:
    """Return the files of each path in a part; a bare name lies in `trainer/` or in a folder that the part names."""
    names = [name for name in re.findall(r"`([^`]+)`", part) if _FILE.fullmatch(name)]
    folders = [ROOT / "trainer", ROOT]
    found: dict[str, list[Path]] = {}
    for name in names:
        found[name] = [path for folder in folders for path in sorted(folder.glob(name))]
        folders += [path if path.is_dir() else path.parent for path in found[name]]
    for name in [name for name in names if not found[name]]:  # a folder that is named after its file
        found[name] = [path for folder in folders for path in sorted(folder.glob(name))]
    return found


@pytest.mark.parametrize("part", parts(), ids=lambda part: part[:60].replace("\n", " "))
def test_its_names_exist(part: str):
    found = files_of(part)
    assert [name for name, paths in found.items() if not paths] == []
    files = [
        file for paths in found.values() for path in paths for file in (path.rglob("*.*") if path.is_dir() else [path])
    ]
    text = "\n".join(
        file.read_text(encoding="utf-8", errors="ignore") for file in files if "__pycache__" not in file.parts
    )
    names = {word.rpartition(".")[2] for word in re.findall(r"`([\w.]+)`", part) if word not in found}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


def test_there_are_three_walks_and_a_table():
    assert [len(re.findall(r"^\d+\. ", part, re.MULTILINE)) for part in parts() if part[0] == "1"] == [5, 5, 5, 2]
    assert len(parts()) > 40
