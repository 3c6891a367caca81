"""The table of shipped and registered tasks, which a recipe selects by name, never by code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, cast

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

Built = TypeVar("Built", bound=TextTask | ImageTask)

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
    match recipe:
        case SequenceClassification(multi_label=True):
            return _built(MultiLabelTask, recipe, **_labels(recipe), text_columns=_columns(recipe.text))
        case SequenceClassification():
            return _built(SequenceClassificationTask, recipe, **_labels(recipe), text_columns=_columns(recipe.text))
        case SequenceRegression():
            columns = _columns(recipe.text)
            return _built(SequenceRegressionTask, recipe, text_columns=columns, label_column=recipe.label)
        case MaskedLM():
            return _built(MaskedLMTask, recipe, text_columns=_columns(recipe.text))
        case Embedding():
            return _built(
                EmbeddingTask,
                recipe,
                text_columns=tuple(recipe.texts),
                score_column=recipe.score,
                poolings=(recipe.pooling or "mean",),
                normalize=recipe.normalize is not False,
                prompts=Prompts(recipe.query_prompt, recipe.document_prompt),
                has_roles=recipe.has_roles,
                dimensions=_dimensions(recipe),
                learns_temperature=recipe.learn_temperature,
            )
        case CausalLM():
            return _built(CausalLMTask, recipe, examples=_examples(recipe), settings=recipe.generation)
        case Preference():
            examples, is_whole = _answer_columns(recipe), recipe.loss.type == "orpo"
            return _built(
                PreferenceTask, recipe, examples=examples, settings=recipe.generation, labels_prompts=is_whole
            )
        case RewardModel():
            return _built(RewardModelTask, recipe, answer_columns=(recipe.chosen, recipe.rejected))
        case Seq2SeqLM():
            languages = (recipe.source_language, recipe.target_language)
            return _built(Seq2SeqLMTask, recipe, settings=recipe.generation, languages=languages)
        case TokenClassification():
            label = recipe.spans if recipe.words is None else recipe.tags
            return _built(
                TokenClassificationTask,
                recipe,
                words_column=recipe.words,
                text_column=recipe.text,
                label_column=label,
                class_names=_names(recipe.labels),
            )
        case QuestionAnswering():
            return _built(
                QuestionAnsweringTask,
                recipe,
                question_column=recipe.question,
                context_column=recipe.context,
                answer_columns=_columns(recipe.answers),
            )
        case MultipleChoice():
            return _built(
                MultipleChoiceTask,
                recipe,
                context_column=recipe.context,
                question_column=recipe.question,
                choice_columns=_columns(recipe.choices),
                label_column=recipe.label,
            )
        case Reranker():
            documents = _columns(recipe.documents)
            return _built(
                RerankerTask,
                recipe,
                query_column=recipe.query,
                document_columns=documents,
                label_column=recipe.label,
            )
        case ImageClassification():
            shape = None if recipe.shape is None else tuple(recipe.shape)
            return _built(ImageClassificationTask, recipe, **_labels(recipe), image_column=recipe.image, shape=shape)


def _built(kind: Callable[..., Built], recipe: TaskSection, **others: Any) -> Built:
    """Build a task from `others`, and from the keys of the recipe with the names of its other fields."""
    same = {one.name for one in fields(cast(Any, kind))} & type(recipe).model_fields.keys()
    taken = {name: getattr(recipe, name) for name in same}
    return kind(**{**taken, "metric_names": tuple(recipe.metrics), **others})


def _labels(recipe: SequenceClassification | ImageClassification) -> dict[str, Any]:
    return {"label_column": recipe.label, "class_names": _names(recipe.labels)}


def _answer_columns(recipe: Preference) -> PairColumns | LabelledColumns:
    if recipe.loss.type != "kto":
        return PairColumns(recipe.prompt, recipe.chosen, recipe.rejected)
    assert recipe.prompt is not None, "a rule requires it"
    return LabelledColumns(recipe.prompt, recipe.completion, recipe.label)


def _examples(recipe: CausalLM) -> Examples:
    if recipe.messages is not None:
        return ChatColumn(recipe.messages, recipe.tools)
    if recipe.prompt is not None and recipe.completion is not None:
        return CompletionColumns(recipe.prompt, recipe.completion, recipe.tools)
    assert recipe.text is not None, "a rule requires one of them"
    return TextColumn(recipe.text)


def _dimensions(recipe: Embedding) -> tuple[tuple[int, float], ...]:
    sizes = recipe.dimensions or []
    return tuple(zip(sizes, recipe.dimension_weights or [1.0] * len(sizes), strict=True))


def _columns(text: str | list[str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else tuple(text)


def _names(labels: list[str] | None) -> tuple[str, ...] | None:
    return None if labels is None else tuple(labels)
