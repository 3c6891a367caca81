"""Inputs without data of models that read no texts: for plans, checks and graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.base.extensions import resolved
from trainer.recipe.registered import task_sections


class InputSamples(ABC):
    """The inputs, by name, of models with one kind of inputs."""

    @abstractmethod
    def blank(self, config: Any, num_rows: int) -> dict[str, Tensor]:
        """Return inputs of the shapes of a training, for the configuration of a model."""

    @abstractmethod
    def drawn(self, config: Any, seeds: Sequence[int]) -> dict[str, Tensor]:
        """Return one row for each seed, which decides its values."""

    @abstractmethod
    def of_graph(self, folder: Path, model: Any, num_rows: int) -> tuple[dict[str, Tensor], Sequence[int]]:
        """Return the inputs of an exported model, and the dimensions that its graph leaves free."""


def samples_of(main_input: str) -> InputSamples | None:
    """Return the samples for models with a main input of this name; None: it is not of a registered kind."""
    others = (section.other_inputs for section in task_sections().values())
    samples = next((resolved(other.samples) for other in others if other and other.name == main_input), None)
    return None if samples is None else samples()
