"""The interface of tasks; code outside of this package does not depend on a particular task.

A task is immutable. `build_task` may return a task without labels; `resolve` returns the task with labels. A new task
is a subclass of `TextTask`, or of another one below `Task`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from trainer.base.digests import digest_of
from trainer.base.errors import UsageError
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.recipe.schema import TaskKeys
from trainer.tasks.exported import Card, ExportedFolder
from trainer.tasks.metrics.metric import Metric
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.preview import RowPreview
from trainer.tasks.types import Dataset, Encoded, EncodedRows, EvaluatedSplit, Tokenizer

if TYPE_CHECKING:
    from trainer.parallel.microbatch import TokenMasking
    from trainer.parallel.tensor.cross_entropy import VocabularyCut
    from trainer.tasks.text.packing import Packer

_KEYS = {
    "metric_names": "metrics", "class_names": "labels", "settings": "generation", "text_columns": "text",
    "answer_columns": "answers", "choice_columns": "choices", "document_columns": "documents",
}  # fmt: skip
"""The keys of the recipe for fields of tasks with another name; a column `NAME_column` has the key `NAME`."""


class Loss(ABC):
    """From the inputs of a microbatch to its loss: the part of a task that an engine calls in a step."""

    extra_columns: tuple[str, ...] = ()
    """The encoded columns that the model does not take."""

    @property
    def rows_are_labels(self) -> bool:
        """Whether every row holds one valid label; the loss is then divided by the number of rows."""
        return True

    def num_valid(self, labels: Tensor) -> Tensor:
        """Return the number of `labels` `[batch, ...]` that enter the loss, as an int64 scalar on their device.

        If labels have weights, return the sum of their weights, as a float64 scalar.
        """
        return torch.tensor(len(labels), device=labels.device)

    @abstractmethod
    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, summed (never averaged) over all valid labels, as a float32 scalar.

        Args:
            logits: the logits, of shape `[batch, ...]` and any floating dtype. After `for_vocabulary`, they are this
                rank's shard, and every rank of the group must call this method.
            labels: the labels, of shape `[batch, ...]`.
        """

    def model_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the keyword arguments of the model for the inputs of a microbatch."""
        return {name: tensor for name, tensor in inputs.items() if name not in self.extra_columns}

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the tensor that `loss_sum` and `predictions` take as `logits`.

        Args:
            labels: its labels; None for rows without labels.
        """
        logits: Tensor = output.logits
        return logits

    def for_evaluation(self) -> Self:
        """Return the task with the loss of evaluations, without class weights and label smoothing."""
        return self

    def label_weights(self, labels: Tensor) -> Tensor:
        """Return the weight of each label in the loss, of the shape of `labels`, zero for ignored ones.

        This is for tasks with one class or token for each label, the only ones that learn from a teacher.
        """
        return (labels != IGNORED_LABEL).float()

    @property
    def rows_depend(self) -> bool:
        """Whether the loss of a row depends on the other rows of the global batch.

        `joint_losses` then computes the loss in training, and `split_metrics` returns the `loss` of an evaluation.
        """
        return False

    @property
    def inputs_of_start(self) -> str | None:
        """The function that adds the inputs which the model at the start of a training computes; None: there are none.

        It is the text "module:function". The arguments are recipe, data, engine, mesh, and the facts of the model
        beside its weights; the result are the data. All ranks call it before the first step.
        """
        return None

    def at_step(self, step: int) -> Self:
        """Return the task with the weights of its loss after `step` steps."""
        return self

    def row_labels(self, labels: Tensor) -> Tensor:
        """Return the labels that `joint_losses` needs, of one shape in all microbatches; `[batch, 0]`: none."""
        return labels

    def joint_losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the losses of all rows of a global batch `[rows]`, for tasks with `rows_depend`.

        Args:
            scores: the scores of all rows, in their order in the global batch, of shape `[rows, ...]`.
            labels: the labels of the rows `[rows, ...]` as float64; zeros `[rows]` for rows without labels.
        """
        raise NotImplementedError


class VocabularyLoss(Loss):
    """The part of a loss over a vocabulary; tensor ranks may share its tokens."""

    labels_are_tokens = False
    """Whether the labels that `encode` returns are token ids, for which the model needs embeddings."""

    @property
    def trains_all_tokens(self) -> bool:
        """Whether all tokens of rows are trained, and not answers alone."""
        return False

    @property
    def head_blocks(self) -> Literal["vocabulary", "tokens"] | None:
        """The key by which a head may compute `token_scores`, or `tokens`: always; None: the task needs its logits."""
        return None

    takes_token_scores = False
    """Whether `loss_sum` and `predictions` take token scores instead of logits."""

    def for_vocabulary(self, cut: VocabularyCut | None) -> Self:
        """Return the task for logits that are sharded over the vocabulary; None if they are not sharded."""
        assert cut is None, "its logits are not of a vocabulary"
        return self

    def for_token_scores(self) -> Self:
        """Return the task for a head that computes the scores of tokens instead of their logits."""
        raise NotImplementedError

    def token_scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scores of tokens: the loss and, without gradients, 1 if the prediction is right, else 0.

        They are `[..., 1]` or `[..., 2]`. The labels are `[...]`, and the logits `[..., vocabulary]`, or this rank's
        shard of the vocabulary.
        """
        raise NotImplementedError


class Scores(ABC):
    """From the model's output to metrics: the part of a task that an evaluation calls."""

    metric_names: tuple[str, ...]
    """The metrics that `metrics` computes, the deciding one first."""

    @abstractmethod
    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the input of `metrics` for each row: small tensors, each of shape `[batch, ...]`.

        Rows of different batches may differ in the size of the second dimension; `metrics` gets them padded with
        `IGNORED_LABEL`. Arguments and callers are those of `loss_sum`.
        """

    def metrics(self, predictions: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics over a whole split; the default compares `predictions` with `labels`.

        Args:
            predictions: the predictions of the whole split, each of shape `[rows, ...]`, in the order of its rows.
        """
        return {name: self._measured(METRICS[name], name, predictions) for name in self.metric_names}

    def _measured(self, metric: Metric, name: str, predictions: Mapping[str, Tensor]) -> Any:
        return metric.compute(predictions[metric.reads].numpy(), predictions["labels"].numpy())

    def _constant_metrics(self, labels: Tensor, constant: float) -> dict[str, float]:
        """Return the metrics of one prediction for all rows."""
        return self.metrics({"predictions": torch.full_like(labels, constant), "labels": labels})

    def split_metrics(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit) -> dict[str, float]:
        """Return the metrics over a whole split, for tasks with metrics that need the texts of the split."""
        return self.metrics(predictions)

    def baselines(self, labels: Tensor | None, vocabulary: int | None) -> dict[str, float]:
        """Return metrics, and perhaps the `loss`, of predictions that ignore the input.

        Args:
            labels: the label of each row of the validation split, of shape `[rows]`; None if it has no such labels.
            vocabulary: the number of tokens; None if the model has none.
        """
        return {}

    def split_baselines(self, split: EvaluatedSplit) -> dict[str, float]:
        """Return `baselines` of tasks with metrics that need the split; a ranking is one at random."""
        return {}

    def picture(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit | None) -> dict[str, Any] | None:
        """Return the part of an evaluation that a report shows, as JSON values; None: its metrics alone.

        The keys are `classes` and `confusion`, the rows of each true class by their predicted class, or `texts`, rows
        of texts by the names of their columns. The arguments are those of `split_metrics`.
        """
        return None


class Answers:
    """From the model's output to the rows of `trainer predict`."""

    def without_labels(self) -> Self:
        """Return the resolved task for rows without labels.

        Raises:
            UsageError: the task has no predictions.
        """
        raise UsageError(f"`trainer predict` does not support {type(self).__name__}")

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the input of `readable` for each row, as `predictions` does, but without labels.

        If the task generates texts, the engine does not call this method, and `generated` is the input.
        """
        raise NotImplementedError

    def embedding(self, columns: Sequence[str]) -> Self | None:
        """Return the task that embeds the texts of these columns; None: it embeds no texts."""
        return None

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        """Return one JSON object for each row of `split.rows`, in order.

        Args:
            answers: the answers for the whole split, each of shape `[encoded rows, ...]`, in the order of the rows.
        """
        raise NotImplementedError


class Generates:
    """The texts that a task generates; the default generates none."""

    @property
    def generates(self) -> bool:
        """Whether the engine adds generated tokens to predictions and answers.

        `generated` is `[batch, tokens]`: the tokens between the prompt and the end token, then `IGNORED_LABEL`.
        """
        return False

    @property
    def generation(self) -> Any:
        """The section `task.generation`, which an exported model has too; None: the settings of the model stay."""
        return None

    @property
    def first_tokens(self) -> Mapping[str, int | None]:
        """The tokens with which a generated text starts, by key of transformers; missing: those of the model."""
        return {}

    def end_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of the tokens at which a generated text ends, the tokenizer's first; none: those of the model.

        An exported model has them too.
        """
        return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


class Classes:
    """The named classes of a task; the default has none."""

    class_names: tuple[str, ...] | None = ()
    """The name of class `i` at index `i`; None: only the training split names them."""

    @property
    def positive_class(self) -> str | None:
        """The class that the metric `f1` counts as positive; None without this metric."""
        return None

    def in_checkpoint_order(self, checkpoint: Sequence[str], chosen: bool) -> tuple[Self, list[str]]:
        """Return the task with its classes in the order of a fine-tuned checkpoint's head, and notes for the user.

        Args:
            chosen: whether the recipe lists the classes in `task.labels`; their order then stays.

        Raises:
            UsageError: only some of the names match, and the recipe does not list the classes.
        """
        return self, []

    def without_data(self, names: Sequence[str]) -> Self:
        """Return the task for plans, which read no data; `names` stand for classes that only the data names."""
        return self


class Task(VocabularyLoss, Scores, Answers, Generates, Classes):
    """A task: its model and its columns, beside its loss, metrics, predictions and generated texts.

    Attributes:
        auto_class_name: the transformers auto class that builds the model, such as
            `AutoModelForSequenceClassification`.
        card: the facts of the model card.
        cut_targets: the start of a note on the targets that `encode` cuts.
        unencoded_fields: the attributes of the instance that encoded rows do not depend on.
        unused_modules: modules of the base model that do not take part in the loss; they are frozen if the model has
            them.
        own_lengths: the encoded columns with one list of integers for each row that is not as long as its `input_ids`.
    """

    auto_class_name: str
    card: Card = Card()
    unused_modules: tuple[str, ...] = ()
    own_lengths: tuple[str, ...] = ()
    cut_targets = "targets cut to `task.max_target_length`"

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        """Build the task from its section of a recipe; `resolve` adds the labels of the training split.

        Each field has the value of the key of its name, or of `_KEYS`; `given` holds those that no single key has.
        """
        kind: Any = cls
        for field in fields(kind):
            named = _KEYS.get(field.name, field.name.removesuffix("_column"))
            key = field.name if field.name in type(section).model_fields else named
            if key in type(section).model_fields and field.name not in given:
                value = getattr(section, key)
                value = (value,) if field.name.endswith("_columns") and isinstance(value, str) else value
                # pydantic reads lists, but the fields of a task must not change.
                given[field.name] = tuple(value) if isinstance(value, list) else value
        task: Task = kind(**given)
        return task

    def changed(self, **values: Any) -> Self:
        """Return the task, a frozen dataclass, with other values of its fields."""
        task: Any = self
        changed: Self = replace(task, **values)
        return changed

    @property
    def unencoded_fields(self) -> tuple[str, ...]:
        return ()

    @property
    def packs_documents(self) -> bool:
        """Whether rows hold several documents, which the model must keep apart by their positions."""
        return False

    @property
    def keeps_rows(self) -> bool:
        """Whether a row is encoded as one row."""
        return True

    def packer(self, max_length: int) -> Packer | None:
        """Return a new packer, which turns the documents that `encode` returns into rows; None: they are the rows."""
        return None

    @property
    def labelled_share(self) -> float:
        """The expected share of labels that are not ignored, for plans."""
        return 1.0

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the inputs beside those of the tokenizer, and the labels, of a microbatch without data, for plans.

        Args:
            shape: that of `input_ids`, `[rows, tokens]` or `[rows, texts, tokens]`; `[rows]` without texts.

        Raises:
            UsageError: a registered task does not have this method.
        """
        raise UsageError(
            f"`trainer plan` needs the shapes of a batch, but {type(self).__name__} has no method `empty_batch`; add it"
        )

    @property
    def exported(self) -> ExportedFolder:
        """The exported folder in other programs."""
        return ExportedFolder()

    @property
    def preview(self) -> RowPreview:
        """How previews show the rows."""
        return RowPreview(dict(enumerate(self.class_names or ())))

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of the data set that the task reads."""

    @property
    def value_columns(self) -> tuple[str, ...]:
        """Those of the columns that may hold numbers or booleans, and not only texts or classes."""
        label = getattr(self, "label_column", None)
        return () if label is None else (label,)

    @property
    def cell_kinds(self) -> dict[str, Literal["text", "class"]]:
        """The columns of CSV files that hold texts or names of classes, whatever their cells look like."""
        return {name: "text" for name in self.columns if name not in self.value_columns}

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever the same tokenizer or processor would encode the same rows differently.

        The default covers all attributes of the instance but `unencoded_fields`. The key of prepared rows covers the
        source file of the class, too.
        """
        return digest_of({name: value for name, value in vars(self).items() if name not in self.unencoded_fields})

    @abstractmethod
    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        """Check the columns of a split.

        Raises:
            DataError: a column is missing or has the wrong type.
        """

    def resolve(self, train: Dataset, where: str) -> Self:
        """Return the task with the labels of the training split.

        Raises:
            DataError: a column is missing or of the wrong type, or the labels do not form classes.
            UsageError: a metric is not defined for these labels.
        """
        self.check_columns(train.features, where)
        return self

    def answer_notes(self, train: EncodedRows) -> list[str]:
        """Return notes for the user on encoded answers of the training split that teach nothing."""
        return []

    def conversion_notes(self, features: Mapping[str, Any]) -> list[str]:
        """Return notes for the user on columns that are converted, or not read."""
        return []

    def model_options(self) -> dict[str, Any]:
        """Return the keys that a resolved task sets in the model's configuration."""
        return {}

    def for_configuration(self, config: Any) -> Self:
        """Return the task with the parts of the model's configuration that `encode` needs.

        Raises:
            UsageError: the model does not fit the task.
        """
        return self

    def added_module(self) -> nn.Module | None:
        """Return a module that computes the last hidden states that `scores` gets; None: those of the model.

        It gets the hidden states and the attention mask, and has the values with which its parameters begin. It runs in
        the forward pass of the model, which every layout trains.
        """
        return None


class TextTask(Task):
    """A task on texts."""

    def for_split(self, rows: Dataset, first_row: int) -> Self:
        """Return the task that encodes `rows`, all rows of a split, for tasks that need facts on the whole split.

        Args:
            first_row: the value of `first_row` with which `encode` gets `rows[0]`.
        """
        return self

    @abstractmethod
    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        """Tokenise rows and convert their labels to numbers.

        Args:
            rows: consecutive rows of a split that passed `check_columns`.
            max_length: the maximum number of tokens of a row; longer rows are truncated.
            first_row: the index of `rows[0]` in the split, from 0; messages count from 1.

        Returns:
            The tokenizer's columns, such as `input_ids`: one list of integers for each row. `labels`: for each row, one
            number, one array, or one list as long as its `input_ids`; absent if there is a `masking`. `cut`: whether
            the row was truncated. `cut_target`: whether its target was truncated. A row of several texts has one list
            of lists in each column of the tokenizer. A task may return more or fewer rows than it got, for example
            windows of a long text.

        Raises:
            DataError: a value is not valid; the message names the column, the row and the value.
        """

    def tokenizer_notes(self, tokenizer: Tokenizer) -> list[str]:
        """Return notes for the user on how the task uses the tokenizer."""
        return []

    def masking(self, tokenizer: Tokenizer, seed: int) -> TokenMasking | None:
        """Return the masking that makes labels from tokens in each epoch; None if `encode` returns labels.

        Raises:
            UsageError: the tokenizer has no mask token.
        """
        return None
