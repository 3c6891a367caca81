"""The tasks that columns allow, by their names and kinds: known shapes of data sets first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.tools.init.columns import Column, Kind

_TEXT: tuple[Kind, ...] = ("text",)
_ANSWERS: tuple[Kind, ...] = ("text", "chat")
_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_COMPLETIONS = ("completion", "response", "output", "answer")
_LABELS = (
    "label", "labels", "class", "category", "target", "topic", "sentiment", "intent", "tag", "score", "rating", "stars",
    "similarity", "y",
)  # fmt: skip
_PAIRS = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("text1", "text2"), ("question1", "question2"),
    ("text_a", "text_b"), ("question", "sentence"), ("query", "document"), ("query", "passage"),
)  # fmt: skip
_SINGLE = ("text", "sentence", "content", "review", "comment", "message", "body", "document", "title", "utterance")
_SEQUENCES = (
    ("source", "target"), ("document", "summary"), ("article", "highlights"), ("article", "summary"),
    ("dialogue", "summary"), ("text", "summary"), ("input_text", "target_text"),
)  # fmt: skip
_TRIPLES = (("anchor", "positive", "negative"), ("query", "positive", "negative"), ("question", "positive", "negative"))
_MOST_NUMBERS = 20
"""Distinct integers that still count as classes."""
_NAME_CHARACTERS = 40
"""Mean characters of the names of classes, in a column that is not called a label."""


@dataclass(frozen=True)
class Shape:
    """The section `task` for some columns, and the reason for it."""

    task: dict[str, Any]
    why: str

    @property
    def type(self) -> str:
        return str(self.task["type"])


def shapes(columns: Sequence[Column]) -> list[Shape]:
    """Return the tasks that the columns allow, the likeliest first."""
    found = _Columns(columns)
    return [shape for rule in _RULES for shape in rule(found)]


class _Columns:
    """Columns by their names, in any case of letters."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.all = columns
        self.texts = [column for column in columns if column.kind == "text"]
        self._by_name = {column.name.lower(): column for column in columns}

    def get(self, kinds: Sequence[Kind], *names: str) -> Column | None:
        found = (self._by_name.get(name) for name in names)
        return next((column for column in found if column is not None and column.kind in kinds), None)

    def every(self, kinds: Sequence[Kind], *names: str) -> list[str]:
        """Return the columns of all these names; empty if one is missing or has another kind."""
        found = [self.get(kinds, name) for name in names]
        return [column.name for column in found if column is not None] if all(found) else []


def _of_images(columns: _Columns) -> Iterator[Shape]:
    image = next((column for column in columns.all if column.kind == "image"), None)
    label = columns.get(("integer", "text"), *_LABELS) or next(iter(_labels(columns, ())), None)
    if image is not None and label is not None:
        task = {"type": "image_classification", "image": image.name, "label": label.name}
        yield Shape(task, f"`{image.name}` holds images")


def _of_preferences(columns: _Columns) -> Iterator[Shape]:
    pair = columns.every(_ANSWERS, "chosen", "rejected")
    prompt = columns.get(_ANSWERS, *_PROMPTS)
    if pair:
        names = {"prompt": prompt and prompt.name, "chosen": pair[0], "rejected": pair[1]}
        yield Shape({"type": "preference", **names}, "a better and a worse answer in each row (DPO)")
        yield Shape({"type": "reward_model", **names}, "a better and a worse answer in each row")
    completion, label = columns.get(_ANSWERS, *_COMPLETIONS), columns.get(("boolean",), "label", "desirable")
    if prompt and completion and label:
        names = {"prompt": prompt.name, "completion": completion.name, "label": label.name}
        yield Shape({"type": "preference", "loss": {"type": "kto"}, **names}, "answers that are good or bad (KTO)")


def _of_questions(columns: _Columns) -> Iterator[Shape]:
    question, context = columns.get(_TEXT, "question"), columns.get(_TEXT, "context")
    if question is None or context is None:
        return
    answers = columns.get(("object", "objects"), "answers", "answer")
    start = columns.get(("integer", "number"), "answer_start")
    text = columns.get(_TEXT, "answer_text", "answer", "answers")
    if answers is None and (start is None or text is None):
        return
    keys: dict[str, Any] = {"question": question.name, "context": context.name}
    if answers is not None:
        keys["answers"] = answers.name
        empty = any(isinstance(value, dict) and not value.get("text") for value in answers.values)
        if empty:
            keys["unanswerable"] = True
    elif start is not None and text is not None:
        keys["answers"] = [text.name, start.name]
    yield Shape({"type": "question_answering", **keys}, "answers as parts of a context, as in SQuAD")


def _of_chats(columns: _Columns) -> Iterator[Shape]:
    chat = columns.get(("chat",), "messages", "conversations", "conversation", "chat")
    chat = chat or next((column for column in columns.all if column.kind == "chat"), None)
    if chat is not None:
        tools = columns.get(("objects", "text"), "tools")
        keys = {} if tools is None else {"tools": tools.name}
        yield Shape({"type": "causal_lm", "messages": chat.name, **keys}, f"`{chat.name}` holds chats")


def _of_words(columns: _Columns) -> Iterator[Shape]:
    words = columns.get(("texts",), "words", "tokens")
    tags = columns.get(("texts", "numbers"), "tags", "ner_tags", "pos_tags", "labels")
    if words and tags:
        yield Shape(
            {"type": "token_classification", "words": words.name, "tags": tags.name}, "a tag for each word of a list"
        )
    text, spans = columns.get(_TEXT, "text"), columns.get(("objects",), "spans", "entities")
    if text and spans:
        yield Shape(
            {"type": "token_classification", "text": text.name, "spans": spans.name}, "entities as spans of a text"
        )


def _of_choices(columns: _Columns) -> Iterator[Shape]:
    choices = columns.get(("texts", "object"), "choices", "options", "endings")
    context = columns.get(_TEXT, "context", "question", "sentence", "article", "ctx")
    label = columns.get(("integer", "text"), "label", "answer", "answerkey")
    several = [column.name for column in columns.all if column.name.lower().startswith(("ending", "choice"))]
    names: Any = choices.name if choices else several if len(several) > 1 else None
    if names and context and label:
        task = {"type": "multiple_choice", "context": context.name, "choices": names, "label": label.name}
        yield Shape(task, "choices, and the number of the right one")


def _of_embeddings(columns: _Columns) -> Iterator[Shape]:
    for names in (*_TRIPLES, ("anchor", "positive"), ("query", "positive")):
        if texts := columns.every(_TEXT, *names):
            yield Shape({"type": "embedding", "texts": texts}, "texts that belong together")
            return


def _of_sequences(columns: _Columns) -> Iterator[Shape]:
    for names in _SEQUENCES:
        pair = columns.every(_TEXT, *names)
        if pair and sum(column.characters for column in columns.all if column.name == pair[1]) > _NAME_CHARACTERS:
            yield Shape({"type": "seq2seq_lm", "source": pair[0], "target": pair[1]}, "a source and its target text")
            return


def _of_completions(columns: _Columns) -> Iterator[Shape]:
    prompt, completion = columns.get(_TEXT, *_PROMPTS), columns.get(_TEXT, *_COMPLETIONS)
    if columns.every(_TEXT, "instruction", "output") == ["instruction", "output"]:
        names = {"prompt": "prompt", "completion": "completion"}  # `data.map` makes them, with `input`
        yield Shape(
            {"type": "causal_lm", **names}, "`instruction` and `output` of Alpaca, with `input` if there is one"
        )
    elif prompt and completion:
        names = {"prompt": prompt.name, "completion": completion.name}
        yield Shape({"type": "causal_lm", **names}, "a prompt and its completion")


def _of_labels(columns: _Columns) -> Iterator[Shape]:
    several = columns.get(("texts", "numbers"), *_LABELS)
    for pair in _PAIRS:
        texts: Any = columns.every(_TEXT, *pair)
        if texts:
            break
    for label in [several] if several else _labels(columns, texts):
        single = texts or _text(columns, label.name)
        if not single:
            continue
        keys = {"text": single, "label": label.name}
        if several:
            yield Shape({"type": "sequence_classification", **keys, "multi_label": True}, f"lists in `{label.name}`")
            continue
        kinds = list(_of_label(label, keys))
        yield from kinds
        return


def _of_label(label: Column, keys: dict[str, Any]) -> Iterator[Shape]:
    """Yield the tasks of a column of labels: classes, numbers, or both where integers may be either."""
    numbers = Shape({"type": "sequence_regression", **keys}, f"`{label.name}` holds numbers")
    names = {"labels": [str(value) for value in label.distinct]}
    is_count = label.kind != "integer" or label.distinct == list(range(len(label.distinct)))  # needs no names
    why = f"`{label.name}` has {len(label.names or label.distinct):,} classes"
    classes = Shape({"type": "sequence_classification", **keys, **({} if is_count or label.names else names)}, why)
    if label.kind == "number":
        yield numbers
    elif label.kind != "integer" or label.names:
        yield classes
    elif len(label.distinct) <= _MOST_NUMBERS or (is_count and 2 * len(label.distinct) <= len(label.values)):
        yield from (classes, numbers)
    else:
        yield from (numbers, classes)


def _labels(columns: _Columns, texts: Sequence[str]) -> list[Column]:
    scalars: tuple[Kind, ...] = ("text", "integer", "number", "boolean")
    named = [column for name in _LABELS if (column := columns.get(scalars, name))]
    declared = [column for column in columns.all if column.names]
    others = [column for column in reversed(columns.all) if column.kind in scalars and not _is_count(column)]
    others.sort(key=lambda column: column.kind == "number" or not column.repeats)
    found = {column.name: column for column in (*named, *declared, *others) if column.name not in texts}
    return [column for column in found.values() if column.names or (len(column.distinct) > 1 and _may_label(column))]


def _may_label(column: Column) -> bool:
    """Return whether values are numbers, or names of classes that rows share."""
    is_short = column.name.lower() in _LABELS or column.characters <= _NAME_CHARACTERS
    return column.kind in ("integer", "number", "boolean") or (column.repeats and is_short)


def _is_count(column: Column) -> bool:
    """Return whether integers only number the rows."""
    words = re.split(r"[^a-z]+", column.name.lower())
    return column.kind == "integer" and ({"id", "index", "idx", ""} >= {*words} or "id" in words)


def _text(columns: _Columns, label: str) -> str | None:
    """Return the column of the text: by its name, or else the longest."""
    named = columns.get(_TEXT, *_SINGLE)
    if named is not None and named.name != label:
        return named.name
    texts = [column for column in columns.texts if column.name != label]
    return max(texts, key=lambda column: column.characters).name if texts else None


def _of_texts(columns: _Columns) -> Iterator[Shape]:
    text, label = _text(columns, ""), columns.get(_TEXT, *_LABELS)
    if text is not None:
        differ = label is not None and label.name != text
        why = f"`{text}` holds texts, and {'labels differ in nearly all rows' if differ else 'no column has labels'}"
        yield Shape({"type": "causal_lm", "text": text}, f"{why}: learn to continue them")
        yield Shape({"type": "masked_lm", "text": text}, f"{why}: learn hidden words")


_RULES: tuple[Callable[[_Columns], Iterator[Shape]], ...] = (
    _of_images, _of_preferences, _of_questions, _of_chats, _of_words, _of_choices, _of_embeddings, _of_sequences,
    _of_completions, _of_labels, _of_texts,
)  # fmt: skip
