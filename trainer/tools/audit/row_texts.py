"""The texts of rows: all texts of a row as one, its label in words, and a prompt with its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset

AT_ONCE = 1000
_PAIRS = (("prompt", "completion"), ("source", "target"))
"""The keys of a task for a prompt and its answer."""
_SHORTENED = 200


@dataclass(frozen=True)
class RowText:
    """A row as texts; `label` is empty without one, and so is `answer`."""

    text: str
    label: str
    prompt: str = ""
    answer: str = ""


@dataclass(frozen=True)
class TextReader:
    """Reader of the texts of rows.

    Attributes:
        columns: the columns with texts.
        label: the column of labels; None: there is none.
        pair: the columns of a prompt and its answer; None: the answer of a chat is its last message.
    """

    columns: tuple[str, ...]
    label: str | None
    pair: tuple[str, str] | None

    @classmethod
    def of(cls, recipe: Recipe, task: Task, names: Sequence[str]) -> TextReader:
        """Return the reader for a task and the columns of its rows."""
        label = getattr(task, "label_column", None)
        columns = tuple(name for name in task.columns if name != label and name in names)
        keys = [tuple(getattr(recipe.task, key, None) for key in pair) for pair in _PAIRS]
        pair = next(((first, second) for first, second in keys if first in columns and second in columns), None)
        return cls(columns, label if label in names else None, pair)

    def batches(self, rows: Dataset, numbers: Sequence[int] | None = None) -> Iterator[list[RowText]]:
        """Yield the texts of rows in order, some rows at a time; None: of all rows."""
        chosen = rows if numbers is None else rows.select(numbers)
        wanted = [*self.columns, *([self.label] if self.label else [])]
        if not wanted or not len(chosen):
            return
        features = rows.features
        for batch in chosen.select_columns(wanted).iter(AT_ONCE):
            number = len(next(iter(batch.values())))
            yield [
                self._of_row({name: values[row] for name, values in batch.items()}, features) for row in range(number)
            ]

    def _of_row(self, row: Mapping[str, Any], features: Mapping[str, Any]) -> RowText:
        text = "\n".join(filter(None, (flat(row[name]) for name in self.columns)))
        label = "" if self.label is None else _label(row[self.label], features[self.label])
        if self.pair:
            return RowText(text, label, flat(row[self.pair[0]]), flat(row[self.pair[1]]))
        first = row[self.columns[0]] if self.columns else None
        if isinstance(first, list) and _is_chat(first):
            *before, last = first
            return RowText(text, label, flat(before), flat(last))
        return RowText(text, label)


def flat(value: Any) -> str:
    """Return the texts of a value as one: those of a message are its content."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return flat(value["content"]) if "content" in value else " ".join(filter(None, map(flat, value.values())))
    if isinstance(value, list | tuple):
        parts = list(filter(None, map(flat, value)))
        return ("\n" if _is_chat(value) else " ").join(parts)
    return str(value) if isinstance(value, int | float) else ""


def shortened(text: str, most: int = _SHORTENED) -> str:
    """Return a text on one line, without its middle if it is long."""
    line = " ".join(text[: 4 * most].split()) if len(text) > 4 * most else " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(isinstance(one, Mapping) and "content" in one for one in value)
    )


def _label(value: Any, feature: Any) -> str:
    names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
    if isinstance(value, list):
        return " ".join(_label(one, getattr(feature, "feature", None)) if names else flat(one) for one in value)
    if names and isinstance(value, int) and 0 <= value < len(names):
        return str(names[value])
    return "" if value is None else str(value)
