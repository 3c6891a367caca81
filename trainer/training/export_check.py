"""Checks of an exported folder before it is kept, and the certificate of equal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Certificate:
    """The result of a comparison in which both models were equal.

    Attributes:
        by: the program that opened the folder, as the subject of a sentence.
        rows: the rows of the comparison, for people.
        difference: the largest difference of an output.
        largest: the largest output.
        metrics: for each metric, the value of the exported model and that of the trained model.
        num_texts: the texts with the same tokens as in the training.
        versions: the versions of packages by their names.
        command: the command that repeats the comparison; empty: there is none.
    """

    by: str
    rows: str
    difference: float
    largest: float
    metrics: Mapping[str, tuple[float, float]]
    num_texts: int
    versions: Mapping[str, str]
    command: str = ""

    def lines(self) -> list[str]:
        """Return the lines of the section in the model card, without its title."""
        lines = [f"{self.by} opened this folder. It computed the outputs of the trained model for {self.rows}.", ""]
        lines.append(f"- largest difference of an output: {self.difference:.2g} (largest output: {self.largest:.4g})")
        lines += [f"- {name}: {here:.6g} (trained model: {there:.6g})" for name, (here, there) in self.metrics.items()]
        if self.num_texts:
            lines.append(f"- tokens: those of the training, for {self.num_texts:,} texts")
        if self.versions:
            lines.append("- versions: " + ", ".join(f"{name} {value}" for name, value in self.versions.items()))
        return lines + ([f"- command: `{self.command}`"] if self.command else [])


class ExportCheck(Protocol):
    """A comparison of the exported folder with the trained model."""

    def compare(self, folder: Path) -> Certificate | None:
        """Compare the unfinished folder on rank 0; None: nothing was compared.

        Raises:
            TrainerError: it is another model, and is not kept.
        """
