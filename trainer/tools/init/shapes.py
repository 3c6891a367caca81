"""The tasks that columns allow, by their names and kinds: known shapes of data sets first."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.base.extensions import registered, resolved
from trainer.base.text import listed
from trainer.recipe.registered import task_sections
from trainer.tools.init.columns import ADDRESSES, DATES, LISTS, SCALARS, Column, Kind

_TEXT: tuple[Kind, ...] = ("text",)
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
_SINGLE = (
    "text", "sentence", "content", "review", "comment", "message", "body", "document", "utterance", "tweet", "post",
    "article", "abstract", "description", "texte", "texto", "testo", "satz", "nachricht", "kommentar",
)  # fmt: skip
_MOST_NUMBERS = 20
"""Distinct integers that still count as classes."""
_NAME_CHARACTERS = 40
"""Mean characters of the names of classes, in a column that is not called a label."""


_LABEL_WORDS = frozenset((
    *_LABELS, "classe", "klasse", "clase", "kategorie", "categoria", "catégorie", "categoría", "etikett", "etiqueta",
    "étiquette", "sentimento", "sentimiento", "stimmung", "bewertung", "thema", "note", "grade", "polarity", "stance",
    "emotion", "price", "salary", "preis", "gehalt", "prix", "precio", "prezzo", "метка", "класс", "标签", "类别",
    "ラベル",
))  # fmt: skip
"""Words of the names of labels, also in other languages."""
_OTHER_WORDS = frozenset((
    "id", "ids", "uuid", "guid", "key", "hash", "index", "idx", "row", "nr", "no", "number", "user", "username",
    "author", "name", "customer", "client", "account", "speaker", "sender", "reviewer", "annotator", "rater", "worker",
    "email", "phone", "url", "link", "sku", "asin", "isbn", "doi", "nickname", "nutzer", "benutzer", "date", "time",
    "timestamp", "created", "updated", "year", "split", "fold", "file",
    "path",
))  # fmt: skip
"""Words of the names of columns that identify or count rows, or say where they are from."""
_IDENTIFIER_WORDS = frozenset(("id", "ids", "uuid", "guid", "key", "hash", "index", "idx", "url", "link", "email"))
"""Those that make even `comment_id` no text."""
_SPLITS = frozenset(("train", "training", "valid", "validation", "val", "dev", "test", "testing", "eval"))
_MOST_SHOWN = 5


@dataclass(frozen=True)
class Shape:
    """The section `task` for some columns, and the reason for it.

    `columns` is `data.map.columns`, if columns of the source must be read in another form. `labels` are columns that
    may hold the label instead, the likeliest first.
    """

    task: dict[str, Any]
    why: str
    columns: Mapping[str, Any] | None = None
    labels: Sequence[Column] = ()

    @property
    def type(self) -> str:
        return str(self.task["type"])


def shapes(columns: Sequence[Column], given: Mapping[str, Any] | None = None) -> list[Shape]:
    """Return the tasks that the columns allow, the likeliest first.

    `given` holds keys of the section `task`; the columns that `text` and `label` name are taken.
    """
    found = _Columns(columns, given or {})
    return [shape for rule in _rules() for shape in rule(found)]


class _Columns:
    """Columns by their names, in any case of letters, with any signs between words: `Sentence 1` is `sentence1`."""

    def __init__(self, columns: Sequence[Column], given: Mapping[str, Any]) -> None:
        self.all = columns
        self.texts = [column for column in columns if _may_be_text(column)]
        self._by_name = {_plain(column.name): column for column in columns}
        self.text, self.label = (
            next((column for column in columns if column.name == given.get(key)), None) for key in ("text", "label")
        )

    def get(self, kinds: Sequence[Kind], *names: str) -> Column | None:
        found = (self._by_name.get(_plain(name)) for name in names)
        return next((column for column in found if column is not None and column.kind in kinds), None)

    def every(self, kinds: Sequence[Kind], *names: str) -> list[str]:
        """Return the columns of all these names; empty if one is missing or has another kind."""
        found = [self.get(kinds, name) for name in names]
        return [column.name for column in found if column is not None] if all(found) else []

    def labels(self, texts: Sequence[str] = ()) -> list[Column]:
        """Return the columns that may hold the label: the one that is given, or the likeliest first."""
        if self.label is not None:
            return [self.label]
        scalars = [column for column in self.all if column.kind in SCALARS and column.name not in texts]
        # Data sets mostly have the label last.
        found = list(filter(_may_label, reversed(scalars)))
        exact = [column for name in _LABELS for column in found if column.name.strip().lower() == name]
        worded = sorted(
            filter(_is_named, found),
            key=lambda column: (bool(column.words & _OTHER_WORDS), not column.repeats, len(column.words)),
        )
        declared = [column for column in reversed(found) if column.names]
        others = [column for column in found if not column.words & _OTHER_WORDS and not column.numbers_rows]
        others.sort(key=lambda column: (column.kind == "number", not column.repeats))
        return list({column.name: column for column in (*exact, *worded, *declared, *others)}.values())


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.lower()) or name


def _may_be_text(column: Column) -> bool:
    """Return whether a column holds texts to learn, and no identifiers, names of persons or labels."""
    if column.kind != "text" or column.notation is not None or column.words & _IDENTIFIER_WORDS or column.identifies:
        return False
    if column.words & _LABEL_WORDS and not column.words & {*_SINGLE} and column.repeats:
        return False
    return bool(column.words & {*_SINGLE}) or not column.words & _OTHER_WORDS


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
    texts = _texts(columns)
    several = columns.get(("texts", "numbers"), *_LABELS) if columns.label is None else columns.label
    labels = columns.labels(texts)
    if several is not None and several.kind in ("texts", "numbers"):
        if single := texts or _text(columns, several.name):
            keys = {"text": single, "label": several.name, "multi_label": True}
            yield Shape({"type": "sequence_classification", **keys}, f"lists in `{several.name}`")
        return
    if sum(column.is_flag for column in labels) > 1 and not _names_one(labels[0]):
        yield from _of_flags(columns, texts, labels)
        return
    for place, label in enumerate(labels):
        if single := texts or _text(columns, label.name):
            yield from _of_label(label, single, [*labels[:place], *labels[place + 1 :]])
            return


def _names_one(column: Column) -> bool:
    """Return whether a column is the label by its name alone, whatever columns of 0 and 1 are there."""
    return column.name.strip().lower() in _LABELS or (_is_named(column) and not column.is_flag)


def _of_flags(columns: _Columns, texts: Sequence[str], labels: Sequence[Column]) -> Iterator[Shape]:
    """Yield the task of several columns of 0 and 1: each is a label, or one of them is the class."""
    flags = [column for column in columns.all if column.is_flag and not column.words & _OTHER_WORDS]
    names = [column.name for column in flags]
    text = list(texts) or _text(columns, "")
    if not text:
        return
    single = [text] if isinstance(text, str) else text
    new = next(name for name in ("labels", "classes", "flags") if name not in single)
    counts = {sum(map(bool, cells)) for cells in zip(*(column.cells for column in flags), strict=True)}
    task: dict[str, Any] = {"type": "sequence_classification", "text": text, "label": new, "labels": names}
    read: dict[str, Any] = {"flags": names}
    if counts == {1}:
        read["exactly_one"], rule = True, "exactly one is 1 in each row"
    else:
        task["multi_label"], rule = True, "each is a label of its own"
    made = {**{name: name for name in single}, new: read}
    others = [label for label in labels if label.name not in names]
    yield Shape(task, f"{len(names)} columns of 0 and 1, {rule}", made, others)


def _of_label(label: Column, text: str | list[str], others: Sequence[Column]) -> Iterator[Shape]:
    """Yield the tasks of a column of labels: classes, numbers, or both where integers may be either."""
    keys = {"text": text, "label": label.name}
    made = None
    if label.mapped is not None:
        single = [text] if isinstance(text, str) else text
        made = {**{name: name for name in single}, label.name: {"column": label.name, **label.mapped}}
    numbers = Shape({"type": "sequence_regression", **keys}, f"`{label.name}` holds numbers", made, others)
    names = {"labels": [str(value) for value in label.distinct]}
    is_count = label.kind != "integer" or label.distinct == list(range(len(label.distinct)))  # needs no names
    why = f"`{label.name}` has {len(label.names or label.distinct):,} classes"
    keys |= {} if is_count or label.names else names
    classes = Shape({"type": "sequence_classification", **keys}, why, made, others)
    if label.kind == "number":
        yield numbers
    elif label.kind != "integer" or label.names:
        yield classes
    elif len(label.distinct) <= _MOST_NUMBERS or (is_count and 2 * len(label.distinct) <= len(label.values)):
        yield from (classes, numbers)
    else:
        yield from (numbers, classes)


def _is_named(column: Column) -> bool:
    """Return whether the name of a column says that it holds labels."""
    return bool(column.words & _LABEL_WORDS) and (column.repeats or not column.words & _OTHER_WORDS)


def _may_label(column: Column) -> bool:
    """Return whether values are numbers, or names of classes that rows share."""
    if column.names:
        return True
    is_short = bool(column.words & _LABEL_WORDS) or column.characters <= _NAME_CHARACTERS
    is_right = column.kind != "text" or (
        column.repeats and is_short and column.notation not in (DATES, ADDRESSES, LISTS)
    )
    return is_right and len(column.distinct) > 1


def _texts(columns: _Columns) -> list[str]:
    """Return the two columns of a pair of texts; empty without."""
    return next((texts for pair in _PAIRS if (texts := columns.every(_TEXT, *pair))), []) if not columns.text else []


def _text(columns: _Columns, label: str) -> str | None:
    """Return the column of the text: the given one, by its name, or else the longest."""
    named = columns.text or columns.get(_TEXT, *_SINGLE)
    if named is not None and named.name != label:
        return named.name
    texts = [column for column in columns.texts if column.name != label]
    texts = [column for column in texts if column.words & {*_SINGLE}] or texts
    return max(texts, key=lambda column: column.characters).name if texts else None


def _of_texts(columns: _Columns) -> Iterator[Shape]:
    if (text := _text(columns, "")) is None:
        return
    why = f"`{text}` holds texts, and {_without_label(columns, text)}"
    others = [
        column
        for column in columns.all
        if column.name != text and _may_label(column) and not column.numbers_rows
        and (column.repeats or not column.words & _OTHER_WORDS)
    ]  # fmt: skip
    for task, use in (("causal_lm", "learn to continue them"), ("masked_lm", "learn hidden words")):
        if task in task_sections():  # features may be deleted
            yield Shape({"type": task, "text": text}, f"{why}: {use}", labels=others)
    for label in others:  # one that only the user can know to be a label
        yield from _of_label(label, text, [column for column in others if column is not label])


def unlearnable(columns: Sequence[Column], shape: Shape) -> str | None:
    """Return why the label teaches nothing, if its column has one value or none, and the task reads a text alone."""
    if shape.task.keys() - {"type", "text"} and shape.task.get("label") not in [
        column.name for column in columns if len(column.distinct) < 2
    ]:
        return None
    name = shape.task.get("label")
    for column in columns:
        if not name and column.name.strip().lower() in _LABELS and column.kind in ("object", "objects"):
            return f"`{column.name}` holds objects; write one of their values as a column"
        is_label = column.name == name if name else column.words & _LABEL_WORDS and column.name != shape.task["text"]
        if is_label and column.kind in (*SCALARS, "empty") and len(column.distinct) < 2:
            only = [json.dumps(value, ensure_ascii=False) for value in column.distinct]
            return f"`{column.name}` is " + (f"{only[0]} in all rows" if only else "empty in all rows")
    return None


def _without_label(columns: _Columns, text: str) -> str:
    """Return why no column is taken as the label."""
    label = next((one for one in columns.all if one.name != text and one.words & _LABEL_WORDS), None)
    if label is None:
        return "no column has labels"
    if label.kind == "text" and label.notation is not None:
        return f"`{label.name}` holds {label.notation}"
    if len(label.distinct) == 1:
        return f"`{label.name}` has one class only, {json.dumps(label.distinct[0], ensure_ascii=False)}"
    if label.kind == "text" and not label.repeats:
        return f"the labels in `{label.name}` differ in nearly all rows"
    return f"`{label.name}` holds no labels ({label.shown})"


def _unread(columns: Sequence[Column], shape: Shape) -> list[Column]:
    """Return the columns that a task does not read, without those that number or describe rows."""
    read = {*_texts_in(shape.task), *_texts_in(shape.columns), *(column.name for column in shape.labels)}
    if read.isdisjoint(column.name for column in columns):  # those of a known form, such as Alpaca's
        return []
    others = [column for column in columns if column.name not in read and len(column.distinct) != 1]
    others = [column for column in others if column.kind != "empty"]
    others = [column for column in others if not column.words & _OTHER_WORDS and not column.numbers_rows]
    return [column for column in others if f"`{column.name}`" not in shape.why]  # where the reason tells it


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts_in(inner)


def names_read(columns: Sequence[Column], shape: Shape) -> list[Column]:
    """Return the columns that a task reads; those of images have no cells."""
    keys = {
        key: value for key, value in shape.task.items() if key not in ("type", "labels", "loss", "metrics", "tools")
    }
    read = {*_texts_in(keys), *_texts_in(shape.columns)}
    found = [column for column in columns if column.name in read]
    return found or [column for column in columns if column.name in ("instruction", "output")]  # Alpaca's


def _notes_on_texts(column: Column) -> Iterator[str]:
    if column.may_have_decimals:
        first = next(text for text in column.cells if isinstance(text, str) and "," in text)
        yield (
            f"`{column.name}`: {first} is read with a separator of thousands; if its comma is a decimal one, replace"
            ' `thousands: ","` by `decimal: ","`'
        )
    if column.notation not in (None, DATES, ADDRESSES):
        fix = (
            "to read them as such, write the rows as JSON Lines or Parquet"
            if column.notation == LISTS
            else "to learn numbers, write them plainly, such as 1234.5, and leave out other rows"
        )
        yield f"`{column.name}` holds {column.notation}, which are read as texts; {fix}"
    splits = column.distinct if column.kind == "text" else []
    if len(splits) > 1 and {name.strip().lower() for name in splits} <= _SPLITS:
        yield (
            f"the rows of {listed(splits, _MOST_SHOWN)} in `{column.name}` are taken together; to keep them apart,"
            " write each split into a file"
        )


def _notes_on_classes(column: Column) -> Iterator[str]:
    if column.kind == "integer" and column.distinct[:3] == [-1, 0, 1]:
        yield (
            f"`{column.name}` is -1 in {column.values.count(-1):,} rows, which is a class; if it marks rows"
            f" without a label, set `data.map.where` to {json.dumps([f'{column.name} != -1'])}"
        )


def notes(columns: Sequence[Column], shape: Shape, is_label_given: bool) -> Iterator[str]:
    """Yield notes on columns that are not read as they look, and on other columns that may be the label."""
    for column in columns:
        yield from _notes_on_texts(column)
    taken = {shape.task.get("label"), *(column.name for column in shape.labels)}
    for column in columns if "label" in shape.task else ():
        if column.name in taken:
            yield from _notes_on_classes(column)
        elif column.name.strip().lower() in _LABELS and len(column.distinct) < 2:
            yield f"`{column.name}` is not taken as the label, since it has one value or none: {column.shown}"
    others = [
        f"{shlex.quote(f'task.label={one.name}')} {one.shown.removeprefix(one.name).strip()}" for one in shape.labels
    ]
    if others and not is_label_given:
        more = "" if "label" in shape.task else "task.type=sequence_classification and "
        yield f"the label may be another column: {more}{listed(others, _MOST_SHOWN)}"
    if unread := [column.shown for column in _unread(columns, shape)]:
        yield f"the task does not read {listed(unread, _MOST_SHOWN)}"


_Rule = Callable[[_Columns], Iterator[Shape]]
_RULES: tuple[tuple[int, _Rule], ...] = ((90, _of_completions), (100, _of_labels), (110, _of_texts))
"""Rules by their places: of the tasks that columns allow, the first is proposed."""


def _rules() -> list[_Rule]:
    """Return all rules in order. The name of a registered one starts with its place; it yields arguments of `Shape`."""

    def registered_rule(value: Any) -> _Rule:
        return lambda columns: (Shape(*shape) for shape in resolved(value)(columns))

    features = [(int(row.name.split()[0]), registered_rule(row.value)) for row in registered("shape")]
    return [rule for _, rule in sorted([*_RULES, *features], key=lambda row: row[0])]
