"""Token classification: entities (IOB2, IOBES) and plain tags of words, or entities as spans of characters.

The words of a row are joined to one text, which the tokenizer splits as it splits the texts of a transformers pipeline.
A long row becomes several windows that overlap. Each token is labelled in one of them, the one with most context, so
that loss and metrics count each word once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import DataError, UsageError
from trainer.features.token_classification.entities import (
    OUTSIDE,
    Indices,
    TagScheme,
    continuation,
    entity_metrics,
    scheme_of,
)
from trainer.features.token_classification.section import TokenClassification
from trainer.features.token_classification.spans import holds_spans, read_spans, tags_of_words
from trainer.features.token_classification.words import (
    ROW,
    WORD,
    TokenisedText,
    is_first,
    joined,
    num_words_of,
    of_words,
    read_words,
)
from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.recipe.schema import TaskKeys
from trainer.tasks.classes import NamedClasses, holds_names
from trainer.tasks.exported import Card
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.preview import Inputs, RowPreview, ShownToken
from trainer.tasks.task import Task, TextTask
from trainer.tasks.text.columns import (
    STRING_TYPES,
    bare,
    cell,
    dtype_in_list,
    frame_of,
    require_kind,
    require_text,
    shown,
)
from trainer.tasks.text.windows import cut_columns, require_fast, shared_tokens, windows
from trainer.tasks.types import Dataset, Encoded, EncodedRows, EvaluatedSplit, Tokenizer

_OF_ENTITIES = ("f1", "precision", "recall")
_NO_CLASS = -1


class _TaggedWords(RowPreview):
    def labelled(self, ids: Sequence[int], labels: Sequence[Any], inputs: Inputs) -> Sequence[ShownToken]:
        words = inputs[WORD][: len(ids)].tolist()
        return [
            ShownToken(token, "input", "", word)
            if label == IGNORED_LABEL
            else ShownToken(token, "trained", str(self.classes[label]), word)
            for token, label, word in zip(ids, labels, words, strict=True)
        ]

    def source_rows(self, encoded: EncodedRows) -> NDArray[Any] | None:
        return encoded.scalars[ROW]


@dataclass(frozen=True)
class TokenClassificationTask(NamedClasses, TextTask):
    """Classification of words."""

    words_column: str | None  # the column of words; None: the rows are texts with spans
    text_column: str | None  # the column of texts; None: the rows are words with tags
    label_column: str
    metric_names: tuple[str, ...]
    # Whether all tokens of a word have a label, not only the first. In a text each token is then a word.
    label_all: bool = False
    # the number of tokens that two windows of a row share; None: a third of the maximum length
    stride: int | None = None

    auto_class_name = "AutoModelForTokenClassification"
    card = Card("token-classification", peft_type="TOKEN_CLS")
    unencoded_fields = ("metric_names",)
    extra_columns = (WORD, ROW)
    rows_are_labels = False
    common_names = (OUTSIDE,)

    @property
    def input_column(self) -> str:
        """The column of words or texts."""
        column = self.words_column or self.text_column
        assert column is not None
        return column

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        assert isinstance(section, TokenClassification)
        return super().of(section, label_column=section.spans if section.words is None else section.tags, **given)

    @property
    def preview(self) -> RowPreview:
        return _TaggedWords(dict(enumerate(self.class_names or ())))

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.input_column, self.label_column) if self.labelled else (self.input_column,)

    @property
    def keeps_rows(self) -> bool:
        return False

    def resolve(self, train: Dataset, where: str) -> TokenClassificationTask:
        self.check_columns(train.features, where)
        feature = train.features[self.label_column]
        if self.text_column is not None:
            names, are_names = self.class_names or self._names_of_spans(train, where), True
        else:
            found = {tag for tags in train[self.label_column] for tag in tags or ()}
            names = self.class_names or self.find_names(feature.feature, found, where)
            are_names = bool(holds_names(feature.feature))
        scheme = scheme_of(names)
        refused = [metric for metric in self.metric_names if metric in _OF_ENTITIES]
        if scheme is None and refused:
            raise UsageError(
                f"`task.metrics` may name {refused[0]} only for tags of entities, such as B-PER, I-PER and O, but the"
                f" tags of column `{self.label_column}` are {shown(names)}; use accuracy or f1_macro, or list the tags"
                " of integers in `task.labels`"
            )
        return self.with_classes(names, are_names)

    def _names_of_spans(self, train: Dataset, where: str) -> tuple[str, ...]:
        labels: set[str] = set()
        for row, value in enumerate(train[self.label_column]):
            labels.update(label for _, _, label in read_spans(value, cell(self.label_column, row, where)))
        if not labels:
            raise DataError(
                f"column `{self.label_column}` of {where} must hold spans, but all its lists are empty; label rows"
            )
        return (OUTSIDE, *(f"{prefix}-{label}" for label in sorted(labels) for prefix in "BI"))

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        if self.text_column is not None:
            require_text(features, [self.text_column], where)
            if self.labelled:
                needed = "a column of lists of {start, end, label}"
                require_kind(features, self.label_column, "task.spans", where, holds_spans, needed)
            return
        assert self.words_column is not None
        needed = "a column of lists of strings, as JSON Lines and Parquet can hold them"
        require_kind(features, self.words_column, "task.words", where, _holds_words, needed)
        if not self.labelled:
            return
        needed = "a column of lists of tags or of integers from 0"
        require_kind(features, self.label_column, "task.tags", where, _holds_tags, needed)
        are_names = holds_names(getattr(features[self.label_column], "feature", None))
        if are_names is not None:
            self.require_same_kind(are_names, "class names", "integers", where)

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        """Tokenise rows; a row longer than `max_length` tokens becomes several windows, a row without tokens none.

        Returns:
            The columns of the tokenizer and `labels`; `word_numbers`: for the first token of a word, the number of the
            word in its row, from 1, in the window that labels it, else 0; `row_numbers`: the index of the row.
        """
        special = tokenizer.num_special_tokens_to_add()
        size = max_length - special
        stride = shared_tokens(self.stride, max_length)
        if size <= stride:
            raise UsageError(
                f"`data.max_length` must be more than the {special} special tokens and the {stride} tokens that windows"
                f" share, but is {max_length}; change it or `task.stride`"
            )
        texts = self._read(rows, tokenizer, where, first_row)
        labels = self._labels(rows, texts, where, first_row) if self.labelled else None
        found: Encoded = {}
        for row, text in enumerate(texts):
            own = labels[row] if labels is not None else None
            for window in self._windows(text, own, size, stride):
                for name, values in {**window, ROW: first_row + row}.items():
                    found.setdefault(name, []).append(values)
        return found

    def _read(self, rows: Dataset, tokenizer: Tokenizer, where: str, first_row: int) -> list[TokenisedText]:
        require_fast(tokenizer, "`task.type` token_classification")
        inputs = list(rows[self.input_column])
        for row, value in enumerate(inputs):
            if value is None or (self.words_column is not None and None in value):
                inside = "" if value is None else f", word {value.index(None) + 1},"
                place = cell(self.input_column, first_row + row, where)
                raise DataError(f"{place}{inside} is null; every row needs its words")
        words = None if self.words_column is None else inputs
        texts = inputs if words is None else [" ".join(of_text) for of_text in words]
        for row, (text, own) in enumerate(zip(texts, bare(texts, tokenizer, *frame_of(tokenizer)), strict=True)):
            if text != own:
                raise DataError(
                    f"{cell(self.input_column, first_row + row, where)} begins or ends with a special token, which the"
                    " tokenizer adds; remove it with its label"
                )
        return read_words(texts, words, tokenizer, self.label_all)

    def _windows(
        self, text: TokenisedText, labels: Sequence[int] | None, size: int, stride: int
    ) -> Iterator[dict[str, list[int]]]:
        names = self._known_class_names if labels is not None else ()
        # By class: the label of the later tokens of a word.
        further = [names.index(continuation(name, names)) if self.label_all else IGNORED_LABEL for name in names]
        owner_of = _owners(text.end - text.start, size, stride)
        for window, (start, end) in enumerate(windows(text.end - text.start, size, stride)):
            numbers, own = [], []
            for token in range(start, end):
                word = text.word_of[token]
                is_first = word >= 0 and (token == 0 or text.word_of[token - 1] != word)
                # A token may be in several windows, and one of them labels it.
                owned = word >= 0 and owner_of[token] == window
                numbers.append(word + 1 if owned and is_first else 0)
                if labels is not None:
                    own.append((labels[word] if is_first else further[labels[word]]) if owned else IGNORED_LABEL)
            before, after = [0] * text.start, [0] * (len(text.columns["input_ids"]) - text.end)
            found = cut_columns(text.columns, (text.start, text.end), (start, end))
            found[WORD] = before + numbers + after
            if labels is not None:
                found["labels"] = [IGNORED_LABEL] * len(before) + own + [IGNORED_LABEL] * len(after)
            yield found

    def _labels(self, rows: Dataset, texts: Sequence[TokenisedText], where: str, first_row: int) -> list[list[int]]:
        if self.text_column is None:
            return self._classes_of_tags(rows, where, first_row)
        values = zip(rows[self.text_column], rows[self.label_column], texts, strict=True)
        names = self._known_class_names
        index_of = {name: index for index, name in enumerate(names)}
        classes = []
        for row, (text, spans, read) in enumerate(values):
            place = cell(self.label_column, first_row + row, where)
            tags = tags_of_words(text, spans, read, names, self.label_all, place)
            classes.append([index_of[tag] for tag in tags])
        return classes

    def _classes_of_tags(self, rows: Dataset, where: str, first_row: int) -> list[list[int]]:
        index_of, declared = self.index_of(rows.features[self.label_column].feature)
        classes = []
        for row, (words, tags) in enumerate(zip(rows[self.input_column], rows[self.label_column], strict=True)):
            place = cell(self.label_column, first_row + row, where)
            if tags is None or len(tags) != len(words):
                number = "null" if tags is None else f"{len(tags)} tags"
                raise DataError(
                    f"{place} must have one tag for each of the {len(words)} words of column `{self.words_column}`, but"
                    f" is {number}; correct the row"
                )
            found = [index_of.get(tag, _NO_CLASS) for tag in tags]
            if _NO_CLASS in found:
                word = found.index(_NO_CLASS)
                raise self.unknown(tags[word], declared, f"{place}, word {word + 1},")
            classes.append(found)
        return classes

    def num_valid(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED_LABEL).sum()

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of logits `[batch, sequence, num_labels]`, summed over the labelled tokens."""
        scores = at_least_fp32(logits).flatten(0, 1)
        return F.cross_entropy(scores, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"predictions": logits.argmax(dim=-1).int()}

    def split_metrics(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit) -> dict[str, float]:
        """Return metrics over all words; a word without a token is predicted as `O`, or wrong if there is no `O`."""
        num_words, true = self._labelled_words(split)
        return self._computed(self._predicted(predictions, split.encoded, num_words), true, num_words)

    def split_baselines(self, split: EvaluatedSplit) -> dict[str, float]:
        num_words, true = self._labelled_words(split)
        names = self._known_class_names
        constant = names.index("O") if "O" in names else np.bincount(true[true != _NO_CLASS]).argmax()
        return self._computed(np.full_like(true, constant), true, num_words)

    def _computed(self, predicted: Indices, true: Indices, num_words: Indices) -> dict[str, float]:
        computed = dict.fromkeys(self.metric_names, 0.0)  # the order of the recipe
        scheme = scheme_of(self._known_class_names)
        if scheme is not None:
            computed |= entity_metrics(scheme, predicted, true, is_first(num_words), self.metric_names)
        of_words = [name for name in self.metric_names if scheme is None or name not in (*_OF_ENTITIES, "f1_macro")]
        return computed | {name: METRICS[name].compute(predicted, true) for name in of_words}

    def picture(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit | None) -> dict[str, Any] | None:
        """Return the entities of the first rows, found and labelled; None for plain tags."""
        scheme = scheme_of(self._known_class_names)
        if split is None or scheme is None:
            return None
        inputs, places = self._words(split.few, split)
        num_words, true = self._labelled_words(split)
        predicted = self._predicted(predictions, split.encoded, num_words)
        size = [len(words) for words in places]
        found, labelled = (
            [
                ", ".join(f"{entity['text']} ({entity['label']})" for entity in row)
                for row in _entities(scheme, classes[: sum(size)], inputs, places)
            ]
            for classes in (predicted, true)
        )
        texts = [text if isinstance(text, str) else " ".join(text) for text in inputs]
        columns = ("text", "entities found", "entities labelled")
        return {"texts": [dict(zip(columns, row, strict=True)) for row in zip(texts, found, labelled, strict=True)]}

    def without_labels(self) -> TokenClassificationTask:
        return replace(self, labelled=False)

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scores, classes = at_least_fp32(logits).softmax(dim=-1).max(dim=-1)
        return {"predictions": classes.int(), "scores": scores}

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        """Return `entities` for each row, or `tags` and `scores` of words if the tags are plain.

        An entity has `label`, `text`, `start`, `end` and `score`, the mean probability of its words. `start` and `end`
        count characters of a text, or words of a list. A word without a token has the score 0.
        """
        inputs, places = self._words(split.rows, split)
        num_words = np.array([len(words) for words in places])
        predicted = self._predicted(answers, split.encoded, num_words)
        scores = of_words(answers, "scores", split.encoded, num_words, 0.0)
        first = np.cumsum(num_words) - num_words
        names, scheme = self._known_class_names, scheme_of(self._known_class_names)
        if scheme is None:
            parts = [slice(start, start + size) for start, size in zip(first, num_words, strict=True)]
            return [
                {
                    "tags": [names[index] if index != _NO_CLASS else None for index in predicted[part]],
                    "scores": [float(score) for score in scores[part]],
                }
                for part in parts
            ]
        found = _entities(scheme, predicted, inputs, places)
        for entity in chain.from_iterable(found):
            entity["score"] = float(scores[entity.pop("words")].mean())
        return [{"entities": row} for row in found]

    def _labelled_words(self, split: EvaluatedSplit) -> tuple[Indices, Indices]:
        """Return the number of words of each row, and the class of each word of all rows."""
        if self.text_column is None:
            classes = self._classes_of_tags(split.rows, split.where, 0)
            return np.array([len(row) for row in classes]), np.array([i for row in classes for i in row], np.int64)
        num_words = num_words_of(split)  # words of a text are made from its tokens
        return num_words, joined(split.encoded.tokens["labels"], split.encoded, num_words, _NO_CLASS)

    def _words(self, rows: Dataset, split: EvaluatedSplit) -> tuple[list[Any], list[Any]]:
        inputs = list(rows[self.input_column])
        if self.text_column is None:
            return inputs, [[(word, word + 1) for word in range(len(words))] for words in inputs]
        assert split.tokenizer is not None
        return inputs, [text.words for text in self._read(rows, split.tokenizer, split.where, 0)]

    def _predicted(self, answers: Mapping[str, Tensor], encoded: EncodedRows, num_words: Indices) -> Indices:
        """Return the predicted class of each word of all rows, of shape `[words]`."""
        names = self._known_class_names
        outside = names.index(OUTSIDE) if OUTSIDE in names else _NO_CLASS
        return of_words(answers, "predictions", encoded, num_words, outside).astype(np.int64)

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        return {}, torch.zeros(shape, dtype=torch.long)


def _holds_words(feature: Any) -> bool:
    return dtype_in_list(feature) in (*STRING_TYPES, "null")


def _holds_tags(feature: Any) -> bool:
    return dtype_in_list(feature) == "null" or holds_names(getattr(feature, "feature", None)) is not None


def _entities(
    scheme: TagScheme, classes: Indices, inputs: Sequence[Any], places: Sequence[Any]
) -> list[list[dict[str, Any]]]:
    """Return the entities of each row, with `label`, `text`, `start`, `end`, and the slice of all `words`."""
    num_words = np.array([len(words) for words in places])
    first = np.cumsum(num_words) - num_words
    found: list[list[dict[str, Any]]] = [[] for _ in inputs]
    entities = scheme.entities(classes, is_first(num_words))
    rows = np.repeat(np.arange(len(inputs)), num_words)[entities.start]
    for row, start, end, kind in zip(rows, entities.start, entities.end, entities.type, strict=True):
        words = places[row][start - first[row] : end - first[row]]
        part = inputs[row][words[0][0] : words[-1][1]]
        entity = {
            "label": scheme.types[kind],
            "text": part if isinstance(part, str) else " ".join(part),
            "start": words[0][0],
            "end": words[-1][1],
            "words": slice(start, end),
        }
        found[row].append(entity)
    return found


def _owners(num_tokens: int, size: int, stride: int) -> list[int]:
    """Return for each token the window with the most context on its shorter side; ends of the text do not count."""
    best = [-1] * num_tokens
    found = [0] * num_tokens
    for window, (start, end) in enumerate(windows(num_tokens, size, stride)):
        for token in range(start, end):
            left = token - start if start > 0 else num_tokens
            right = end - 1 - token if end < num_tokens else num_tokens
            if min(left, right) > best[token]:
                best[token], found[token] = min(left, right), window
    return found
