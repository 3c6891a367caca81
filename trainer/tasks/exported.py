"""The exported folder of a task: its model card, its files beside the weights, and how other programs compute it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.recipe.schema import Recipe
from trainer.tasks.types import Dataset

OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
"""The outputs of models of transformers that tasks read."""


@dataclass(frozen=True)
class Program:
    """Another program that opens an exported folder.

    Attributes:
        name: its name for people.
        packages: its packages beside transformers.
        opener: the module that opens the folder in a process without this project: `open_folder` gets the request of a
            comparison, and returns a function from arrays to outputs, both by name. None: transformers does.
        reads_texts: whether it takes all rows as texts (`ExportedFolder.inputs`), and not the inputs of the model.
    """

    name: str = "transformers"
    packages: tuple[str, ...] = ()
    opener: str | None = None
    reads_texts: bool = False


@dataclass(frozen=True)
class Card:
    """The facts of a task for model cards and adapters; the defaults suit a head of transformers.

    In `usage` and `graph`, ARCHITECTURE, DTYPE, PROMPT, FIRST_TOKEN and BASE stand for the class of the model, the type
    of its weights, an example of its input, the first token of a decoder, and arguments that load the first model.

    Attributes:
        pipeline_tag: the name of the task on the hub; None: it has none.
        has_pipeline: whether transformers 5 has a pipeline of this name.
        peft_type: the type of the task in PEFT; None: PEFT has none.
        program: the program that opens the folder.
        processor: the class of transformers that prepares rows, and `rows`, an example of its arguments.
        usage: lines of Python that use the folder; empty: a pipeline, or else the class of the model.
        graph: lines of Python that complete the inputs of a graph.
    """

    pipeline_tag: str | None = None
    has_pipeline: bool = True
    peft_type: str | None = None
    program: Program = Program()
    processor: str = "AutoTokenizer"
    rows: str = '["..."]'
    usage: str = ""
    graph: str = ""

    @property
    def library(self) -> str:
        return next(iter(self.program.packages), "transformers")


@dataclass(frozen=True)
class CardForm:
    """The texts of a model card for a folder without the whole weights; names stand for facts as in `Card`."""

    title: str  # "A `ARCHITECTURE` as a graph in `DTYPE`"
    usage: str  # lines of Python that use the folder
    library: str | None = None  # on the hub; None: that of the task


GENERATION = Card("text-generation", peft_type="CAUSAL_LM")
TEXT_CLASSIFICATION = Card("text-classification", peft_type="SEQ_CLS")


class ExportedFolder:
    """The folder of a task in other programs; the default is one that transformers computes whole."""

    def files(self, max_length: int, hidden_size: int | None) -> dict[str, Any]:
        """Return the contents of further JSON files, by their path in the folder.

        Args:
            hidden_size: the size of the model's hidden states; None if its configuration does not name it.
        """
        return {}

    def graph_head(self) -> tuple[nn.Module, tuple[str, ...]] | None:
        """Return the module that a graph computes from the last hidden states, and the columns that it gets.

        None: a graph has the outputs of the model.
        """
        return None

    def inputs(self, rows: Dataset) -> dict[str, Any]:
        """Return the texts of rows, as JSON, for the program of the card, if that is not transformers."""
        return {}

    def scores(self, outputs: Tensor, rows: Dataset) -> Tensor:
        """Return the scores `[rows, ...]` from the outputs of that program for all rows."""
        return outputs

    def completed(self, scores: Tensor, trained: Tensor) -> Tensor:
        """Return the scores of another program, with those of the trained model that no other program computes."""
        return scores


class ExportFormat(ABC):
    """A format of exported models beside weights; registered under `export`, by its name for `trainer export --to`."""

    program: Program

    @abstractmethod
    def require(self, dtype: str, adapter: bool) -> None:
        """Refuse an export with weights of this type, or of an adapter alone, that is not possible.

        Raises:
            UsageError: a package is missing, or the format cannot hold such a model.
        """

    @abstractmethod
    def convert(self, folder: Path, model_class: type[Any], recipe: Recipe | None) -> Path:
        """Replace the weights of an exported folder by a file of this format, and return it.

        Args:
            recipe: the recipe of the training; None: it is unknown, and of a task without a head of its own.

        Raises:
            TrainerError: the model is not supported.
        """

    @abstractmethod
    def card_form(self, card: Card) -> CardForm:
        """Return the texts of the model card for a task."""
