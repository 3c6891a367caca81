"""Keys and rules that several tasks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer.recipe.paths import shown_value
from trainer.recipe.schema.fields import Name, NameKey
from trainer.recipe.schema.section import Contradiction, Section, clash, repeated, shared

TextColumns = Annotated[
    Name | Annotated[list[Name], Field(min_length=1, max_length=2)],
    Field(description="The column that holds the text, or the two columns of a pair."),
]


@dataclass(frozen=True)
class Traits:
    """The parts of a recipe that a task can use.

    Attributes:
        streams: streams, because a row is encoded without the other rows of its split.
        teacher: a teacher, because each label has one distribution.
        chats: templates of chats.
        noise: noise on the embeddings of tokens.
    """

    streams: bool = False
    teacher: bool = False
    chats: bool = False
    noise: bool = False


@dataclass(frozen=True)
class OtherInputs:
    """Inputs of a model that are not texts, and the part of the model that prepares them.

    Attributes:
        name: the main input of such a model.
        part: the name of the part in messages; one of `files` holds it.
        most_checked: the rows of each split that `trainer check` prepares.
        preparation: the function from a recipe to its `Preparation`, as "module:function".
        samples: the `InputSamples` of such a model, as "module:class".
    """

    name: str
    part: str
    files: tuple[str, ...]
    most_checked: int
    preparation: str
    samples: str


@dataclass(frozen=True)
class Start:
    """The values of a first recipe: a shipped recipe with a small model, a model on the hub, and its learning rate."""

    sample: str = "bert_sample"
    model: str = "google-bert/bert-base-uncased"
    learning_rate: float = 2e-5


DECODER = Start("gpt2_sample", "Qwen/Qwen3-0.6B", 1e-5)


class TaskKeys(Section):
    """Rules and facts that all tasks share."""

    traits: ClassVar[Traits] = Traits()
    start: ClassVar[Start] = Start()
    other_inputs: ClassVar[OtherInputs | None] = None  # None: rows are texts
    # The class of the task, as "module:class"; empty: that of `tasks/` with the name of the section.
    implementation: ClassVar[str] = ""
    # The function that reads its parts in the folder of the model, as "module:function"; empty: it has none there.
    folder_reader: ClassVar[str] = ""
    has_probabilities: ClassVar[bool] = False  # whether metrics may read probabilities
    of_classes: ClassVar[set[str]] = set()  # metrics of features with a number for each class; they select no model
    pipelines: ClassVar[Sequence[str]] = ()  # names in pipelines of transformers, with underscores; they are taken
    also_called: ClassVar[Sequence[str]] = ()  # names of other tools; they are suggested

    @property
    def selecting(self) -> list[str]:
        """The metrics that may select a model, the default first."""
        return [*(name for name in getattr(self, "metrics", ()) if name not in self.of_classes), "loss"]

    @property
    def texts_per_row(self) -> int | None:
        """The number of texts of each row, of which 4 stand for those that only the data counts; None: one text."""
        return None

    @property
    def joint_loss(self) -> str | None:
        """The key and the name of a loss that compares the rows of a batch; None: each row has a loss of its own."""
        return None

    @property
    def fewest_rows(self) -> int:
        """The fewest rows of a batch that have a loss."""
        return 1

    @property
    def languages(self) -> tuple[str | None, str | None] | None:
        """The languages of sources and targets; None: the task has no such texts."""
        return None

    def contradictions(self) -> Iterator[Contradiction]:
        yield from repeated("task.metrics", getattr(self, "metrics", []))


class VocabularyKeys(TaskKeys):
    """Keys of tasks with a loss over the vocabulary; features add theirs."""


class GenerativeKeys(VocabularyKeys):
    """Keys of tasks with models that can generate texts; features add those of the generation."""


class TextKeys(TaskKeys):
    """Keys that all tasks on texts share."""

    type: str
    text: TextColumns

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        columns = [self.text] if isinstance(self.text, str) else self.text
        if len(set(columns)) < len(columns):
            yield clash(f"has the column {shown_value(columns[0])} twice; a pair needs two columns", "task.text")
        yield from shared({"text": columns, "label": getattr(self, "label", None)})


class ClassificationKeys(TaskKeys):
    """Keys that all classifications share."""

    has_probabilities = True
    of_one_class: ClassVar[set[str]] = {"f1", "precision", "recall"}  # those of `positive`; features add theirs
    label: Name = "label"
    """Column of the class: a name, an integer from 0, or one of `task.labels`."""
    labels: Annotated[list[Name], Field(min_length=2)] | None = None
    """Class names in order; null: those of the training split, in the order of a fine-tuned checkpoint or the data set,
    or sorted."""
    metrics: list[
        Literal[
            "accuracy", "f1", "f1_macro", "f1_micro", "f1_weighted", "matthews", "precision", "precision_macro",
            "precision_micro", "precision_weighted", "recall", "recall_macro", "recall_micro", "recall_weighted",
        ]
    ] = Field(default=["accuracy"], min_length=1)  # fmt: skip
    """`f1` is that of the class `positive` of two, `f1_macro` the mean over classes, `f1_micro` over all decisions
    together, `f1_weighted` the mean by rows; likewise the others."""
    positive: Name | None = None
    """Class that `f1`, `precision` and other metrics of one class count as positive; null: the second one."""
    class_weights: Literal["balanced"] | dict[NameKey, float] | None = None
    """Weights of classes in the training loss, by name; `balanced`: rows / (classes * rows of the class); null: 1."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that the training loss spreads over all classes."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        for name, weight in self.class_weights.items() if isinstance(self.class_weights, dict) else ():
            if weight <= 0:
                text = f"has the weight {weight} for {shown_value(name)}; use a number above 0"
                yield clash(text, "task.class_weights")
        of_one = [name for name in self.metrics if name in self.of_one_class]
        if self.positive is not None and not of_one:
            known = " or ".join(sorted(self.of_one_class))
            yield clash(f"needs a metric of one class; add {known} to `task.metrics`, or remove this", "task.positive")
        yield from repeated("task.labels", self.labels or [])
        one_class = not getattr(self, "multi_label", False)
        if self.labels is not None and one_class and of_one and len(self.labels) != 2:
            text = f'has "{of_one[0]}", which needs two classes, but `task.labels` has {len(self.labels)}'
            yield clash(f'{text}; use "{of_one[0]}_macro"', "task.metrics", "task.labels")
