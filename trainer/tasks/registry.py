"""The table of shipped and registered tasks, which a recipe selects by name, never by code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import trainer.recipe.registered  # noqa: F401  # checks registered tasks
from trainer.base.errors import UsageError
from trainer.base.extensions import Registration, consume, resolved
from trainer.recipe.schema import (
    CausalLM,
    Embedding,
    Preference,
    RewardModel,
    Seq2SeqLM,
    TaskSection,
    TokenClassification,
)
from trainer.tasks.task import ImageTask, TextTask

TEXT_TO_TEXT = "text2text-generation"

WITHOUT_PIPELINE = frozenset({"question-answering", "multiple-choice", "text-ranking"})
"""Task names for which transformers 5 has no pipeline."""


class _Row(NamedTuple):
    """A task: its class, its name on the hub, its type in PEFT, and the library that opens an exported folder."""

    class_name: str  # In the module of the type's name; a text, so that a run imports its own task only
    pipeline_tag: str
    peft_type: str | None = None  # None: PEFT has none
    library: str = "transformers"


_TASKS = {
    "sequence_classification": _Row("SequenceClassificationTask", "text-classification", "SEQ_CLS"),
    "sequence_regression": _Row("SequenceRegressionTask", "text-classification", "SEQ_CLS"),
    "masked_lm": _Row("MaskedLMTask", "fill-mask"),
    "causal_lm": _Row("CausalLMTask", "text-generation", "CAUSAL_LM"),
    "seq2seq_lm": _Row("Seq2SeqLMTask", TEXT_TO_TEXT, "SEQ_2_SEQ_LM"),
    "token_classification": _Row("TokenClassificationTask", "token-classification", "TOKEN_CLS"),
    "question_answering": _Row("QuestionAnsweringTask", "question-answering", "QUESTION_ANS"),
    "multiple_choice": _Row("MultipleChoiceTask", "multiple-choice"),
    "image_classification": _Row("ImageClassificationTask", "image-classification"),
    "preference": _Row("PreferenceTask", "text-generation", "CAUSAL_LM"),
    "reward_model": _Row("RewardModelTask", "text-classification", "SEQ_CLS"),
    "embedding": _Row("EmbeddingTask", "feature-extraction", "FEATURE_EXTRACTION", "sentence-transformers"),
    "reranker": _Row("RerankerTask", "text-ranking", "SEQ_CLS", "sentence-transformers"),
}
PIPELINE_TAGS = {name: row.pipeline_tag for name, row in _TASKS.items()}
"""The task names of the hub, which transformers also uses for pipelines, except for text to text."""
PEFT_TASK_TYPES = {name: row.peft_type for name, row in _TASKS.items()}
LIBRARIES = {name: row.library for name, row in _TASKS.items()}
"""The libraries that open an exported folder; transformers opens those of registered tasks."""

_KEYS = {
    "metric_names": "metrics", "class_names": "labels", "settings": "generation", "label_column": "label",
    "text_columns": "text", "text_column": "text", "words_column": "words", "image_column": "image",
    "score_column": "score", "learns_temperature": "learn_temperature", "question_column": "question",
    "context_column": "context", "answer_columns": "answers", "choice_columns": "choices", "query_column": "query",
    "document_columns": "documents",
}  # fmt: skip
"""The keys of the recipe for fields of tasks with another name."""

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
    own = f"{recipe.type}:{_TASKS[recipe.type].class_name}"
    kind = resolved(f"trainer.tasks.{'multi_label:MultiLabelTask' if getattr(recipe, 'multi_label', False) else own}")
    given, keys = _computed(recipe), type(recipe).model_fields
    for one in fields(kind):
        key = one.name if one.name in keys else _KEYS.get(one.name)
        if key in keys and one.name not in given:
            value = getattr(recipe, key)
            value = (value,) if one.name.endswith("_columns") and isinstance(value, str) else value
            given[one.name] = tuple(value) if isinstance(value, list) else value
    built: TextTask | ImageTask = kind(**given)
    return built


def _computed(recipe: TaskSection) -> dict[str, Any]:
    """Return the fields of a task that are not the value of one key."""
    match recipe:
        case Embedding():
            from trainer.tasks.embedding import Prompts

            sizes = recipe.dimensions or []
            return {
                "text_columns": tuple(recipe.texts),
                "poolings": (recipe.pooling or "mean",),
                "normalize": recipe.normalize is not False,
                "prompts": Prompts(recipe.query_prompt, recipe.document_prompt),
                "dimensions": tuple(zip(sizes, recipe.dimension_weights or [1.0] * len(sizes), strict=True)),
            }
        case CausalLM():
            columns = {key: getattr(recipe, key) for key in ("text", "prompt", "completion", "messages")}
            return {"sources": {key: column for key, column in columns.items() if column is not None}}
        case Preference():
            is_kto, is_orpo = recipe.loss.type == "kto", recipe.loss.type == "orpo"
            answers = {key: getattr(recipe, key) for key in (["completion"] if is_kto else ["chosen", "rejected"])}
            label = recipe.label if is_kto else None
            return {"answer_columns": answers, "label": label, "labels_prompts": is_orpo}
        case RewardModel():
            return {"answer_columns": (recipe.chosen, recipe.rejected)}
        case Seq2SeqLM():
            return {"languages": (recipe.source_language, recipe.target_language)}
        case TokenClassification():
            return {"label_column": recipe.spans if recipe.words is None else recipe.tags}
    return {}
