"""A defect that is planted into a copy of the source, and the tests that must catch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Defect:
    """One replacement in one file of `trainer/`."""

    name: str
    sentence: str
    file: str  # below `trainer/`
    old: str  # code that occurs once in the file
    new: str
    tests: tuple[str, ...]  # files or node ids below `tests/`

    @property
    def package(self) -> str:
        return self.file.partition("/")[0].removesuffix(".py")

    @property
    def module(self) -> str | None:
        """The changed module; None for a file of data."""
        return f"trainer.{self.file[:-3].replace('/', '.')}" if self.file.endswith(".py") else None

    def occurrences(self, tree: Path = ROOT) -> int:
        file = tree / "trainer" / self.file
        return file.read_text(encoding="utf-8").count(self.old) if file.is_file() else 0

    def planted(self, text: str) -> str:
        """Return the source with the defect."""
        assert text.count(self.old) == 1, f"{self.name}: {self.file} holds the anchor {text.count(self.old)} times"
        return text.replace(self.old, self.new)
