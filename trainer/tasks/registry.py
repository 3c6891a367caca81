"""The table of shipped and registered tasks, which a recipe selects by name, never by code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trainer.recipe.registered  # noqa: F401  # checks registered tasks
from trainer.base.errors import UsageError
from trainer.base.extensions import Registration, consume, resolved
from trainer.recipe.schema import (
    CausalLM,
    Embedding,
    ImageClassification,
    MaskedLM,
    MultipleChoice,
    Preference,
    QuestionAnswering,
    Reranker,
    RewardModel,
    Seq2SeqLM,
    SequenceClassification,
    SequenceRegression,
    TaskSection,
    TokenClassification,
)
from trainer.tasks.causal_lm import CausalLMTask, ChatColumn, CompletionColumns, Examples, TextColumn
from trainer.tasks.embedding import EmbeddingTask, Prompts
from trainer.tasks.image_classification import ImageClassificationTask
from trainer.tasks.masked_lm import MaskedLMTask
from trainer.tasks.multi_label import MultiLabelTask
from trainer.tasks.multiple_choice import MultipleChoiceTask
from trainer.tasks.preference import LabelledColumns, PairColumns, PreferenceTask
from trainer.tasks.question_answering import QuestionAnsweringTask
from trainer.tasks.reranker import RerankerTask
from trainer.tasks.reward_model import RewardModelTask
from trainer.tasks.seq2seq_lm import Seq2SeqLMTask
from trainer.tasks.sequence_classification import SequenceClassificationTask
from trainer.tasks.sequence_regression import SequenceRegressionTask
from trainer.tasks.task import ImageTask, TextTask
from trainer.tasks.token_classification import TokenClassificationTask

TEXT_TO_TEXT = "text2text-generation"

PIPELINE_TAGS = {
    "sequence_classification": "text-classification",
    "sequence_regression": "text-classification",
    "masked_lm": "fill-mask",
    "causal_lm": "text-generation",
    "seq2seq_lm": TEXT_TO_TEXT,
    "token_classification": "token-classification",
    "question_answering": "question-answering",
    "multiple_choice": "multiple-choice",
    "image_classification": "image-classification",
    "preference": "text-generation",
    "reward_model": "text-classification",
    "embedding": "feature-extraction",
    "reranker": "text-ranking",
}
"""The task names of the hub, which transformers also uses for pipelines, except for text to text."""

PEFT_TASK_TYPES = {
    "sequence_classification": "SEQ_CLS",
    "sequence_regression": "SEQ_CLS",
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
    "embedding": "FEATURE_EXTRACTION",
    "preference": "CAUSAL_LM",
    "reward_model": "SEQ_CLS",
    "reranker": "SEQ_CLS",
}
"""The task types of PEFT; it has none for the other tasks."""

LIBRARIES = {"embedding": "sentence-transformers", "reranker": "sentence-transformers"}
"""The libraries that open an exported folder; transformers opens those of the other tasks."""

WITHOUT_PIPELINE = frozenset({"question-answering", "multiple-choice", "text-ranking"})
"""Task names for which transformers 5 has no pipeline."""

_REGISTERED: dict[str, Callable[[Any], TextTask | ImageTask]] = {}
"""The builders of registered tasks."""


def _add(row: Registration) -> None:
    _REGISTERED[row.name] = resolved(row.value.build)
    if row.value.pipeline_tag is not None:
        PIPELINE_TAGS[row.name] = row.value.pipeline_tag


consume("task", _add)


def build_task(recipe: TaskSection) -> TextTask | ImageTask:
    """Build the task of a recipe's section `task`; `resolve` adds the labels of the training split."""
    if recipe.type in _REGISTERED:
        task = _REGISTERED[recipe.type](recipe)
        if not isinstance(task, TextTask | ImageTask):
            raise UsageError(
                f"the registered task {recipe.type} must be a `TextTask` or an `ImageTask` of `trainer.tasks.task`, but"
                f" its builder returns a {type(task).__name__}; make it a subclass"
            )
        return task
    metrics = tuple(recipe.metrics)
    match recipe:
        case SequenceClassification():
            text, names = _columns(recipe.text), _names(recipe.labels)
            if recipe.multi_label:
                return MultiLabelTask(text, recipe.label, metrics, names, threshold=recipe.threshold)
            return SequenceClassificationTask(
                text,
                recipe.label,
                metrics,
                names,
                class_weights=recipe.class_weights,
                label_smoothing=recipe.label_smoothing,
                positive=recipe.positive,
            )
        case SequenceRegression():
            return SequenceRegressionTask(_columns(recipe.text), recipe.label, metrics)
        case MaskedLM():
            return MaskedLMTask(
                _columns(recipe.text), recipe.mask_probability, metrics, vocabulary_chunk=recipe.vocabulary_chunk
            )
        case Embedding():
            return EmbeddingTask(
                tuple(recipe.texts),
                recipe.score,
                (recipe.pooling or "mean",),
                recipe.normalize is not False,
                recipe.loss,
                recipe.temperature,
                metrics,
                recipe.mask_duplicates,
                prompts=Prompts(recipe.query_prompt, recipe.document_prompt),
                has_roles=recipe.has_roles,
                dimensions=_dimensions(recipe),
                learns_temperature=recipe.learn_temperature,
            )
        case CausalLM():
            return CausalLMTask(
                _examples(recipe),
                recipe.packing,
                metrics,
                vocabulary_chunk=recipe.vocabulary_chunk,
                train_on=recipe.train_on,
                settings=recipe.generation,
            )
        case Preference():
            return _preference(recipe, metrics)
        case RewardModel():
            answers = (recipe.chosen, recipe.rejected)
            return RewardModelTask(recipe.prompt, answers, recipe.margin, recipe.center_coefficient, metrics)
        case Seq2SeqLM():
            return Seq2SeqLMTask(
                recipe.source,
                recipe.target,
                recipe.prefix,
                recipe.max_target_length,
                metrics,
                recipe.generation,
                (recipe.source_language, recipe.target_language),
                vocabulary_chunk=recipe.vocabulary_chunk,
            )
        case TokenClassification():
            label = recipe.spans if recipe.words is None else recipe.tags
            assert label is not None, "a rule requires one pair of columns"
            return TokenClassificationTask(
                recipe.words,
                recipe.text,
                label,
                metrics,
                _names(recipe.labels),
                label_all=recipe.label_all,
                stride=recipe.stride,
            )
        case QuestionAnswering():
            return QuestionAnsweringTask(
                recipe.question, recipe.context, _columns(recipe.answers), recipe.stride, recipe.unanswerable,
                recipe.n_best, recipe.max_answer_length, recipe.null_threshold, metrics,
            )  # fmt: skip
        case MultipleChoice():
            return MultipleChoiceTask(
                recipe.context, recipe.question, recipe.question_texts, recipe.blank, _columns(recipe.choices),
                recipe.label, recipe.label_format, metrics,
            )  # fmt: skip
        case Reranker():
            return RerankerTask(
                recipe.query,
                _columns(recipe.documents),
                recipe.label,
                recipe.loss,
                metrics,
                recipe.positive_weight,
                recipe.scale,
                recipe.activation,
            )
        case ImageClassification():
            shape = None if recipe.shape is None else tuple(recipe.shape)
            return ImageClassificationTask(
                recipe.image,
                recipe.label,
                metrics,
                _names(recipe.labels),
                shape=shape,
                class_weights=recipe.class_weights,
                label_smoothing=recipe.label_smoothing,
                positive=recipe.positive,
            )


def _preference(recipe: Preference, metrics: tuple[str, ...]) -> PreferenceTask:
    columns: PairColumns | LabelledColumns
    if recipe.loss.type == "kto":
        assert recipe.prompt is not None, "a rule requires it"
        columns = LabelledColumns(recipe.prompt, recipe.completion, recipe.label)
    else:
        columns = PairColumns(recipe.prompt, recipe.chosen, recipe.rejected)
    return PreferenceTask(
        columns,
        recipe.loss,
        metrics,
        recipe.tools,
        recipe.generation,
        labels_prompts=recipe.loss.type == "orpo",
        vocabulary_chunk=recipe.vocabulary_chunk,
    )


def _examples(recipe: CausalLM) -> Examples:
    if recipe.messages is not None:
        return ChatColumn(recipe.messages)
    if recipe.prompt is not None and recipe.completion is not None:
        return CompletionColumns(recipe.prompt, recipe.completion)
    assert recipe.text is not None, "a rule requires one of them"
    return TextColumn(recipe.text)


def _dimensions(recipe: Embedding) -> tuple[tuple[int, float], ...]:
    sizes = recipe.dimensions or []
    return tuple(zip(sizes, recipe.dimension_weights or [1.0] * len(sizes), strict=True))


def _columns(text: str | list[str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else tuple(text)


def _names(labels: list[str] | None) -> tuple[str, ...] | None:
    return None if labels is None else tuple(labels)
