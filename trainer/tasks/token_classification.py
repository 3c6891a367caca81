"""Token classification: entities (IOB2, IOBES) and plain tags of words, or entities as spans of characters.

The words of a row are joined to one text, which the tokenizer splits as it splits the texts of a transformers pipeline.
A long row becomes several windows that overlap. Each token is labelled in one of them, the one with most context, so
that loss and metrics count each word once.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import DataError, UsageError
from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.classes import NamedClasses, holds_names, kind_of, shown
from trainer.tasks.columns import STRING_TYPES, cell, require_columns, require_text, type_name
from trainer.tasks.entities import OUTSIDE, Indices, TagScheme, continuation, scheme_of, tags_of_span
from trainer.tasks.metrics import METRICS
from trainer.tasks.types import Dataset, EncodedRows, EvaluatedSplit, Tokenizer

_WORD, _ROW = "word_numbers", "row_numbers"
_OF_ENTITIES = ("f1", "precision", "recall")
_NO_CLASS = -1


@dataclass(frozen=True)
class _Text:
    """A tokenised row: the tokenizer's columns, the first and the last content token, and the words of the content."""

    columns: dict[str, list[int]]
    start: int
    end: int
    word_of: list[int]  # for each content token, the index of its word; -1: none
    words: list[tuple[int, int]]  # the characters of each word


@dataclass(frozen=True)
class TokenClassificationTask(NamedClasses):
    """Classification of words.

    Attributes:
        words_column: the column of words; None: the rows are texts with spans.
        text_column: the column of texts; None: the rows are words with tags.
        label_all: whether all tokens of a word have a label, not only the first. In a text each token is then a word.
        overlap: the number of tokens that two windows of a row share; None: a quarter of the maximum length.
        labelled: whether rows have labels.
    """

    words_column: str | None
    text_column: str | None
    label_column: str
    metric_names: tuple[str, ...]
    class_names: tuple[str, ...] | None = None
    labels_are_names: bool | None = None
    label_all: bool = False
    overlap: int | None = None
    labelled: bool = True

    auto_class_name = "AutoModelForTokenClassification"
    rows_are_labels = False
    common_names = (OUTSIDE,)

    @property
    def input_column(self) -> str:
        """The column of words or texts."""
        column = self.words_column or self.text_column
        assert column is not None
        return column

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.input_column, self.label_column) if self.labelled else (self.input_column,)

    @property
    def fingerprint(self) -> str:
        names = self.class_names if self.labelled else None
        facts = [self.words_column, self.text_column, self.label_column, names, self.label_all, self.overlap]
        return json.dumps(["token_classification", *facts, self.labelled])

    def with_classes(self, names: tuple[str, ...], labels_are_names: bool | None) -> TokenClassificationTask:
        return replace(self, class_names=names, labels_are_names=labels_are_names)

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
            labels.update(label for _, _, label in _spans(value, cell(self.label_column, row, where)))
        if not labels:
            raise DataError(f"column `{self.label_column}` of {where} must hold spans, but all its lists are empty")
        return (OUTSIDE, *(f"{prefix}-{label}" for label in sorted(labels) for prefix in "BI"))

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        if self.text_column is not None:
            require_text(features, [self.text_column], where)
            if self.labelled:
                require_columns(features, [self.label_column], "task.spans", where)
                if not _holds_spans(features[self.label_column]):
                    raise DataError(
                        "`task.spans` must name a column of lists of {start, end, label}, but column"
                        f" `{self.label_column}` of {where} holds {type_name(features[self.label_column])}"
                    )
            return
        assert self.words_column is not None
        require_columns(features, [self.words_column], "task.words", where)
        if _dtype_in_list(features[self.words_column]) not in (*STRING_TYPES, "null"):
            raise DataError(
                f"`task.words` must name a column of lists of strings, but column `{self.words_column}` of {where}"
                f" holds {type_name(features[self.words_column])}; JSON Lines and Parquet can hold lists"
            )
        if not self.labelled:
            return
        require_columns(features, [self.label_column], "task.tags", where)
        feature = features[self.label_column]
        are_names = holds_names(getattr(feature, "feature", None))
        if are_names is None and _dtype_in_list(feature) != "null":
            raise DataError(
                f"`task.tags` must name a column of lists of tags or of integers from 0, but column"
                f" `{self.label_column}` of {where} holds {type_name(feature)}"
            )
        if None not in (are_names, self.labels_are_names) and are_names != self.labels_are_names:
            raise DataError(
                f"column `{self.label_column}` of {where} must hold {kind_of(not are_names)}, as the training split"
                f" does, but holds {kind_of(bool(are_names))}"
            )

    def encode(
        self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int
    ) -> dict[str, list[Any]]:
        """Tokenise rows; a row longer than `max_length` tokens becomes several windows, a row without tokens none.

        Returns:
            The columns of the tokenizer and `labels`; `word_numbers`: for the first token of a word, the number of the
            word in its row, from 1, in the window that labels it, else 0; `row_numbers`: the index of the row.
        """
        special = tokenizer.num_special_tokens_to_add()
        size = max_length - special
        overlap = max_length // 4 if self.overlap is None else self.overlap
        if size <= overlap:
            raise UsageError(
                f"`data.max_length` must be more than the {special} special tokens and the overlap of {overlap} tokens,"
                f" but is {max_length}; change it or `task.overlap`"
            )
        texts = self._read(rows, tokenizer, where, first_row)
        labels = self._labels(rows, texts, where, first_row) if self.labelled else None
        found: dict[str, list[Any]] = {}
        for row, text in enumerate(texts):
            own = labels[row] if labels is not None else None
            for window in self._windows(text, own, size, overlap):
                for name, values in {**window, _ROW: first_row + row}.items():
                    found.setdefault(name, []).append(values)
        return found

    def _read(self, rows: Dataset, tokenizer: Tokenizer, where: str, first_row: int) -> list[_Text]:
        if not tokenizer.is_fast:
            raise UsageError(
                f"`task.type` token_classification needs a fast tokenizer, which knows the place of each token, but"
                f" `{tokenizer.name_or_path}` is a slow one ({type(tokenizer).__name__}); name a model or a"
                " `model.tokenizer` with a `tokenizer.json`"
            )
        inputs = list(rows[self.input_column])
        for row, value in enumerate(inputs):
            if value is None or (self.words_column is not None and None in value):
                inside = "" if value is None else f", word {value.index(None) + 1},"
                place = cell(self.input_column, first_row + row, where)
                raise DataError(f"{place}{inside} is null; every row needs its words")
        texts = inputs if self.words_column is None else [" ".join(words) for words in inputs]
        if not texts:
            return []
        encoded = tokenizer(texts, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
        offsets = encoded.pop("offset_mapping")
        read = []
        for row, text in enumerate(texts):
            content = [place for place, sequence in enumerate(encoded.sequence_ids(row)) if sequence is not None]
            start, end = (content[0], content[-1] + 1) if content else (0, 0)
            places = offsets[row][start:end]
            if self.words_column is not None:
                words = _ranges(inputs[row])
                word_of = _words_of_tokens(text, places, words)
            else:
                word_of, words = _words_of_text(text, places, encoded.word_ids(row)[start:end], self.label_all)
            columns = {name: values[row] for name, values in encoded.items()}
            read.append(_Text(columns, start, end, word_of, words))
        return read

    def _windows(
        self, text: _Text, labels: Sequence[int] | None, size: int, overlap: int
    ) -> Iterator[dict[str, list[int]]]:
        names = self._known_class_names if labels is not None else ()
        further = [names.index(continuation(name, names)) for name in names] if self.label_all else []
        owners = _owners(text.end - text.start, size, overlap)
        for window, (start, end) in enumerate(_windows(text.end - text.start, size, overlap)):
            numbers, own = [], []
            for token in range(start, end):
                word = text.word_of[token]
                is_first = word >= 0 and (token == 0 or text.word_of[token - 1] != word)
                owned = word >= 0 and owners[token] == window
                numbers.append(word + 1 if owned and is_first else 0)
                if labels is not None:
                    label = IGNORED_LABEL
                    if owned and (is_first or self.label_all):
                        label = labels[word] if is_first else further[labels[word]]
                    own.append(label)
            before, after = [0] * text.start, [0] * (len(text.columns["input_ids"]) - text.end)
            found = {
                name: values[: text.start] + values[text.start + start : text.start + end] + values[text.end :]
                for name, values in text.columns.items()
            }
            found[_WORD] = before + numbers + after
            if labels is not None:
                found["labels"] = [IGNORED_LABEL] * len(before) + own + [IGNORED_LABEL] * len(after)
            yield found

    def _labels(self, rows: Dataset, texts: Sequence[_Text], where: str, first_row: int) -> list[list[int]]:
        """Return the class of each word of each row."""
        if self.text_column is None:
            return self._classes_of_tags(rows, where, first_row)
        values = zip(rows[self.text_column], rows[self.label_column], texts, strict=True)
        return [
            self._classes_of_spans(text, spans, read, cell(self.label_column, first_row + row, where))
            for row, (text, spans, read) in enumerate(values)
        ]

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

    def _classes_of_spans(self, text: str, value: Any, read: _Text, place: str) -> list[int]:
        names = self._known_class_names
        tags = [OUTSIDE] * len(read.words)
        starts = {start: word for word, (start, _) in enumerate(read.words)}
        ends = {end: word + 1 for word, (_, end) in enumerate(read.words)}
        last: tuple[int, int, str] | None = None
        for span in sorted(_spans(value, place)):
            start, end, label = span
            if not 0 <= start < end <= len(text):
                raise DataError(
                    f"{place} has the span {_span(span)}, but the text has {len(text)} characters; a span is"
                    " start >= 0, before its end, in characters of the text"
                )
            if last is not None and start < last[1]:
                raise DataError(f"{place} has spans that overlap: {_span(last)} and {_span(span)}; keep one of them")
            if start not in starts or end not in ends:
                unit = "token" if self.label_all else "word"
                near = " ".join(text[s:e] for s, e in read.words if s < end and start < e)
                fix = "correct the span" if self.label_all else "correct the span, or set `task.label_all` to true"
                raise DataError(
                    f"{place} has the span {_span(span)}, {text[start:end]!r}, which does not start and end with a"
                    f" {unit} of the tokenizer ({near!r}); {fix}"
                )
            if f"B-{label}" not in names:
                known = scheme_of(names)
                raise DataError(
                    f"{place} has the label {label!r}, which is not among those of the training split or of"
                    f" `task.labels`: {shown(known.types if known else names)}"
                )
            tags[starts[start] : ends[end]] = tags_of_span(label, ends[end] - starts[start], names)
            last = span
        index_of = {name: index for index, name in enumerate(names)}
        return [index_of[tag] for tag in tags]

    def model_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in inputs.items() if name not in (_WORD, _ROW)}

    def num_valid(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED_LABEL).sum()

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy, summed over the labelled tokens; 0 if there are none.

        Args:
            logits: the logits, of shape `[batch, sequence, num_labels]`.
            labels: the class indices, of shape `[batch, sequence]`.
        """
        scores = at_least_fp32(logits).flatten(0, 1)
        return F.cross_entropy(scores, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"predictions": logits.argmax(dim=-1).int().cpu()}

    def split_metrics(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit) -> dict[str, float]:
        """Return metrics over all words; a word without a token is predicted as `O`, or wrong if there is no `O`."""
        if self.text_column is None:
            classes = self._classes_of_tags(split.rows, split.where, 0)
            num_words = np.array([len(row) for row in classes])
            true = np.array([index for row in classes for index in row], np.int64)
        else:  # words of a text are made from its tokens
            num_words = _num_words(split)
            true = _joined(split.encoded.tokens["labels"], split.encoded, num_words, _NO_CLASS)
        predicted = self._predicted(predictions, split.encoded, num_words)
        computed = dict.fromkeys(self.metric_names, 0.0)  # the order of the recipe
        scheme = scheme_of(self._known_class_names)
        if scheme is not None:
            computed |= _entity_metrics(scheme, predicted, true, num_words, self.metric_names)
        of_words = [name for name in self.metric_names if scheme is None or name not in (*_OF_ENTITIES, "f1_macro")]
        return computed | {name: METRICS[name].compute(predicted, true) for name in of_words}

    def without_labels(self) -> TokenClassificationTask:
        return replace(self, labelled=False)

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scores, classes = at_least_fp32(logits).softmax(dim=-1).max(dim=-1)
        return {"predictions": classes.int().cpu(), "scores": scores.cpu()}

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        """Return `entities` for each row, or `tags` and `scores` of words if the tags are plain.

        An entity has `label`, `text`, `start`, `end` and `score`, the mean probability of its words. `start` and `end`
        count characters of a text, or words of a list. A word without a token has the score 0.
        """
        inputs = list(split.rows[self.input_column])
        if self.text_column is None:
            places = [[(word, word + 1) for word in range(len(words))] for words in inputs]
        else:
            assert split.tokenizer is not None
            places = [text.words for text in self._read(split.rows, split.tokenizer, split.where, 0)]
        num_words = np.array([len(words) for words in places])
        predicted = self._predicted(answers, split.encoded, num_words)
        scores = _of_words(answers, "scores", split.encoded, num_words, 0.0)
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
        found: list[dict[str, Any]] = [{"entities": []} for _ in inputs]
        entities = scheme.entities(predicted, _is_first(num_words))
        rows = np.repeat(np.arange(len(inputs)), num_words)[entities.start]
        for row, start, end, kind in zip(rows, entities.start, entities.end, entities.type, strict=True):
            words = places[row][start - first[row] : end - first[row]]
            part = inputs[row][words[0][0] : words[-1][1]]
            entity = {
                "label": scheme.types[kind],
                "text": part if isinstance(part, str) else " ".join(part),
                "start": words[0][0],
                "end": words[-1][1],
                "score": float(scores[start:end].mean()),
            }
            found[row]["entities"].append(entity)
        return found

    def _predicted(self, answers: Mapping[str, Tensor], encoded: EncodedRows, num_words: Indices) -> Indices:
        """Return the predicted class of each word of all rows, of shape `[words]`."""
        names = self._known_class_names
        outside = names.index(OUTSIDE) if OUTSIDE in names else _NO_CLASS
        return _of_words(answers, "predictions", encoded, num_words, outside).astype(np.int64)


def _windows(num_tokens: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """Return start and end of windows of at most `size` tokens that cover all tokens; none without tokens."""
    step = size - overlap
    starts = range(0, max(num_tokens - overlap, 1), step) if num_tokens else ()
    return [(start, min(start + size, num_tokens)) for start in starts]


def _owners(num_tokens: int, size: int, overlap: int) -> list[int]:
    """Return for each token the window with the most context on its shorter side; ends of the row do not count."""
    best = [-1] * num_tokens
    owners = [0] * num_tokens
    for window, (start, end) in enumerate(_windows(num_tokens, size, overlap)):
        for token in range(start, end):
            left = token - start if start > 0 else num_tokens
            right = end - 1 - token if end < num_tokens else num_tokens
            if min(left, right) > best[token]:
                best[token], owners[token] = min(left, right), window
    return owners


def _ranges(words: Sequence[str]) -> list[tuple[int, int]]:
    """Return the characters of each word in the text of all words, joined by spaces."""
    ranges, start = [], 0
    for word in words:
        ranges.append((start, start + len(word)))
        start += len(word) + 1
    return ranges


def _visible(text: str, place: tuple[int, int]) -> tuple[int, int]:
    """Return the characters of a token without the white space around it."""
    start, end = place
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _words_of_tokens(text: str, places: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each token the index of the word in which it starts; -1 for white space only."""
    starts = [start for start, _ in words]
    seen = [_visible(text, place) for place in places]
    found = np.searchsorted(starts, [start for start, _ in seen], side="right") - 1
    # An empty word starts where no character is.
    return [int(word) if end > start else -1 for word, (start, end) in zip(found, seen, strict=True)]


def _words_of_text(
    text: str, places: Sequence[tuple[int, int]], ids: Sequence[int | None], each_token: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """Divide a text into words: the tokenizer's, divided further before and after punctuation.

    Tokenizers of SentencePiece put punctuation into words.

    Args:
        text: the text.
        places: the characters of each token.
        ids: the tokenizer's index of each token's word.
        each_token: whether each token is a word.

    Returns:
        For each token, the index of its word, or -1 for white space only; the characters of each word.
    """
    word_of: list[int] = []
    words: list[tuple[int, int]] = []
    last = None
    for place, word in zip(places, ids, strict=True):
        start, end = _visible(text, place)
        if start == end:
            word_of.append(-1)
            continue
        apart = each_token or word != last or start == 0 or _separates(text[start - 1]) or _separates(text[start])
        if words and (start < words[-1][1] or not apart):  # tokens of bytes share their character
            words[-1] = (words[-1][0], max(end, words[-1][1]))
        else:
            words.append((start, end))
        word_of.append(len(words) - 1)
        last = word
    return word_of, words


def _separates(character: str) -> bool:
    return character.isspace() or unicodedata.category(character)[0] in "PS"


def _num_words(split: EvaluatedSplit) -> Indices:
    rows: Indices = np.repeat(split.encoded.scalars[_ROW], np.diff(split.encoded.offsets))
    return np.bincount(rows[split.encoded.tokens[_WORD] > 0], minlength=len(split.rows))


def _of_tokens(values: Tensor, encoded: EncodedRows) -> NDArray[Any]:
    """Return padded values `[windows, sequence]` without padding, of shape `[tokens]`."""
    lengths = np.diff(encoded.offsets)
    found: NDArray[Any] = values.numpy()[np.arange(values.shape[1]) < lengths[:, None]]
    return found


def _of_words(
    answers: Mapping[str, Tensor], name: str, encoded: EncodedRows, num_words: Indices, fill: float
) -> NDArray[Any]:
    """Return the answers of words, of shape `[words]`; all are `fill` if there are no answers, without any token."""
    if not answers:
        return np.full(int(num_words.sum()), fill)
    return _joined(_of_tokens(answers[name], encoded), encoded, num_words, fill)


def _joined(values: NDArray[Any], encoded: EncodedRows, num_words: Indices, fill: float) -> NDArray[Any]:
    """Return the values of the first tokens of words, of shape `[words]`; `fill` for words without a token.

    Args:
        values: one value for each token, of shape `[tokens]`.
        encoded: the windows of all rows.
        num_words: the number of words of each row, of shape `[rows]`.
        fill: the value of words without a token.
    """
    numbers = np.asarray(encoded.tokens[_WORD])
    chosen = numbers > 0
    rows = np.repeat(encoded.scalars[_ROW], np.diff(encoded.offsets))[chosen]
    joined = np.full(int(num_words.sum()), fill, values.dtype)
    joined[(np.cumsum(num_words) - num_words)[rows] + numbers[chosen] - 1] = values[chosen]
    return joined


def _is_first(num_words: Indices) -> NDArray[np.bool_]:
    first: NDArray[np.bool_] = np.zeros(int(num_words.sum()), bool)
    first[(np.cumsum(num_words) - num_words)[num_words > 0]] = True
    return first


def _entity_metrics(
    scheme: TagScheme, predicted: Indices, true: Indices, num_words: Indices, names: Sequence[str]
) -> dict[str, float]:
    is_first = _is_first(num_words)
    found = scheme.counts(scheme.entities(predicted, is_first), scheme.entities(true, is_first))
    right, num_predicted, num_true = found
    f1 = 2 * right / np.maximum(num_predicted + num_true, 1)
    seen = num_predicted + num_true > 0
    values = {
        "f1": 2 * right.sum() / max(1, num_predicted.sum() + num_true.sum()),
        "precision": right.sum() / max(1, num_predicted.sum()),
        "recall": right.sum() / max(1, num_true.sum()),
        "f1_macro": f1[seen].mean() if seen.any() else 0.0,  # undefined for types that do not occur
    }
    computed = {name: float(value) for name, value in values.items() if name in names}
    if "f1" in names:
        computed |= {f"f1/{name}": float(value) for name, value in zip(scheme.types, f1, strict=True)}
    return computed


def _dtype_in_list(feature: Any) -> str | None:
    """Return the type in a column of lists; None for other columns."""
    if type(feature).__name__ not in ("List", "LargeList"):
        return None
    return str(getattr(feature.feature, "dtype", ""))


_KEYS = ("start", "end", "label")


def _holds_spans(feature: Any) -> bool:
    if isinstance(feature, dict):  # a `Sequence` of dictionaries of `datasets`
        return set(_KEYS) <= feature.keys()
    inner = getattr(feature, "feature", None)
    return set(_KEYS) <= inner.keys() if isinstance(inner, dict) else _dtype_in_list(feature) == "null"


def _spans(value: Any, place: str) -> list[tuple[int, int, str]]:
    """Return the spans of one row as (start, end, label).

    Raises:
        DataError: the list or a value of a span is null, or has the wrong type.
    """
    if value is None:
        raise DataError(f"{place} is null; a row without entities has an empty list")
    if isinstance(value, dict):
        value = [dict(zip(value, span, strict=True)) for span in zip(*value.values(), strict=True)]
    spans = []
    for span in value:
        start, end, label = (span[key] if span else None for key in _KEYS)
        if not isinstance(start, int) or not isinstance(end, int) or not isinstance(label, str):
            raise DataError(f"{place} has the span {span}; a span needs start and end (integers) and label (a string)")
        spans.append((start, end, label))
    return spans


def _span(span: tuple[int, int, str]) -> str:
    start, end, label = span
    return f"{start}-{end} {label}"
