"""Multiple choice: one of several texts fits a context, as in SWAG (Zellers et al. 2018) and RACE (Lai et al. 2017).

The model reads the context with each choice and gives each pair one score, as in Radford et al. 2018, section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.base.errors import DataError
from trainer.base.text import listed
from trainer.parallel.dtypes import at_least_fp32
from trainer.tasks.classes import PROBABILITY_DIGITS, holds_names
from trainer.tasks.exported import Card
from trainer.tasks.several_texts import grouped, most_texts, texts_of_rows
from trainer.tasks.task import TextTask
from trainer.tasks.text.columns import bare, cell, filled, frame_of, is_text, require_kind, require_text
from trainer.tasks.types import Dataset, Encoded, EvaluatedSplit, Tokenizer

LabelFormat = Literal["index", "number", "letter", "text"]

_ABSENT = -1e4  # score of a choice that the row does not have: a probability of 0, and finite in sums
_NUM_CHOICES = "num_choices"
_NAMES_SHOWN = 10


_USAGE = """\
from transformers import AutoTokenizer, ARCHITECTURE

model = ARCHITECTURE.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
context, choices = "...", ["...", "..."]  # a question stands before each choice
inputs = tokenizer([context] * len(choices), choices, padding=True, return_tensors="pt")
scores = model(**{name: tensor[None] for name, tensor in inputs.items()}).logits[0]
print(choices[int(scores.argmax())])"""


@dataclass(frozen=True)
class MultipleChoiceTask(TextTask):
    """Cross entropy over the scores of the choices of each row."""

    context_column: str
    question_column: str | None  # the column of the text before each choice; None: there is none
    # the text in place of each value of the question column; None: the value itself
    question_texts: Mapping[str, str] | None
    blank: str | None  # the part of a question that the choice replaces; None: the choice always follows the question
    # One column of lists of texts, or the columns of the first choice, the second and so on. Instead of a list, a row
    # may hold {"text": [...], "label": [...]}; a label is then one of these labels.
    choice_columns: tuple[str, ...]
    label_column: str
    label_format: LabelFormat | None  # the meaning of labels; None: they must have one meaning only
    metric_names: tuple[str, ...]
    labelled: bool = True
    num_texts: int = 0  # the largest number of choices of a row, from `for_split`

    auto_class_name = "AutoModelForMultipleChoice"
    card = Card(
        "multiple-choice",
        has_pipeline=False,
        rows='["...", "..."], ["one choice", "another"], padding=True',
        usage=_USAGE,
        graph="inputs = {name: tensor[None] for name, tensor in inputs.items()}",
    )
    unencoded_fields = ("metric_names",)
    extra_columns = (_NUM_CHOICES,)

    @property
    def columns(self) -> tuple[str, ...]:
        question = () if self.question_column is None else (self.question_column,)
        label = (self.label_column,) if self.labelled else ()
        return (self.context_column, *question, *self.choice_columns, *label)

    @property
    def value_columns(self) -> tuple[str, ...]:
        return ()  # the text of a choice may be a number

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        require_text(features, [self.context_column], where, "task.context")
        if self.question_column is not None:
            require_text(features, [self.question_column], where, "task.question")
        if len(self.choice_columns) > 1:
            require_text(features, self.choice_columns, where, "task.choices")
        else:
            needed = 'a column of lists of strings or of {"text": [...], "label": [...]}, or several columns of strings'
            require_kind(features, self.choice_columns[0], "task.choices", where, _holds_choices, needed)
        if self.labelled:
            needed = "a column of integers or strings"
            require_kind(
                features, self.label_column, "task.label", where, lambda one: holds_names(one) is not None, needed
            )

    def for_split(self, rows: Dataset, first_row: int) -> MultipleChoiceTask:
        return replace(self, num_texts=most_texts(rows, self.choice_columns, _texts))

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        """Return the texts of all rows: the context, and the question with the choice.

        Truncation shortens the context. Each row has `num_texts` texts; texts without a choice have one token.
        `num_choices` is the number of choices, and `labels` is the index of the right one.
        """
        choices = self._choices(rows, where, first_row)
        counts = [len(of_row) for of_row in choices]
        columns, cut = self._tokenised(rows, choices, tokenizer, max_length, where, first_row)
        found: Encoded = {name: grouped(values, counts, self.num_texts) for name, values in columns.items()}
        found |= {_NUM_CHOICES: counts, "cut": [row in cut for row in range(len(rows))]}
        if self.labelled:
            found["labels"] = self._labels(rows, choices, where, first_row)
        return found

    def _tokenised(
        self,
        rows: Dataset,
        choices: Sequence[Sequence[str]],
        tokenizer: Tokenizer,
        max_length: int,
        where: str,
        first_row: int,
    ) -> tuple[Encoded, set[int]]:
        """Return the tokenizer's columns with one list for each choice of each row, and the truncated rows."""
        contexts = filled(rows, self.context_column, where, first_row, "every row needs a text")
        questions = self._questions(rows, where, first_row)
        places = [(row, choice) for row, of_row in enumerate(choices) for choice in range(len(of_row))]
        frame = frame_of(tokenizer)
        firsts = bare([contexts[row] for row, _ in places], tokenizer, *frame)
        joined = [self._joined(questions[row], choices[row][choice]) for row, choice in places]
        seconds = bare(joined, tokenizer, *frame)
        columns = dict(tokenizer(firsts, seconds, return_attention_mask=False, verbose=False))
        # Tokenised whole first: only long pairs need the check, and the second call.
        long = [place for place, ids in enumerate(columns["input_ids"]) if len(ids) > max_length]
        if not long:
            return columns, set()
        num_special = tokenizer.num_special_tokens_to_add(pair=True)
        too_long = [firsts[place] for place in long], [seconds[place] for place in long]
        own = tokenizer(too_long[1], add_special_tokens=False, verbose=False)["input_ids"]
        for place, ids in zip(long, own, strict=True):
            if len(ids) + num_special >= max_length:
                row, choice = places[place]
                beside = " with its question" * (self.question_column is not None)
                raise DataError(
                    f"{self._place(choice, first_row + row, where)} has {len(ids)} tokens{beside}, which leaves no room"
                    f" for the context in `data.max_length` {max_length}, with {num_special} special tokens; increase"
                    " `data.max_length`, or shorten the choice"
                )
        shortened = tokenizer(*too_long, truncation="only_first", max_length=max_length, return_attention_mask=False)
        for name, values in shortened.items():
            for place, value in zip(long, values, strict=True):
                columns[name][place] = value
        return columns, {places[place][0] for place in long}

    def _choices(self, rows: Dataset, where: str, first_row: int) -> list[list[str]]:
        lists = texts_of_rows(rows, self.choice_columns, _texts)
        for place, found in enumerate(lists):
            if len(found) < 2:
                raise DataError(
                    f"{cell(self.choice_columns[0], first_row + place, where)} must have at least two choices, but has"
                    f" {len(found)}; add choices, or leave the row out"
                )
            for number, choice in enumerate(found):
                if choice is None or not choice.strip():
                    raise DataError(
                        f"{self._place(number, first_row + place, where)} is {'null' if choice is None else 'empty'};"
                        " every choice needs a text"
                    )
        return lists

    def _place(self, choice: int, row: int, where: str) -> str:
        """Return the name of a choice for a message; numbers in messages count from 1."""
        if len(self.choice_columns) > 1:
            return cell(self.choice_columns[choice], row, where)
        return f"choice {choice + 1} of {cell(self.choice_columns[0], row, where)}"

    def _questions(self, rows: Dataset, where: str, first_row: int) -> list[str]:
        if self.question_column is None:
            return [""] * len(rows)
        questions = filled(rows, self.question_column, where, first_row, "every row needs a text")
        known = self.question_texts
        if known is None:
            return questions
        for place, question in enumerate(questions):
            if question not in known:
                raise DataError(
                    f"{cell(self.question_column, first_row + place, where)} is {question!r}, but `task.question_texts`"
                    f" has texts for {listed(list(known), _NAMES_SHOWN)} only; add it there, or correct the row"
                )
        return [known[question] for question in questions]

    def _joined(self, question: str, choice: str) -> str:
        """Return the question with the choice in its blanks, or behind it."""
        if self.blank is not None and self.blank in question:
            return question.replace(self.blank, choice)
        return f"{question} {choice}".strip()

    def _labels(self, rows: Dataset, choices: Sequence[Sequence[str]], where: str, first_row: int) -> list[int]:
        labels = []
        named = rows[self.choice_columns[0]]  # may hold the labels of the choices
        for place, (label, of_row, value) in enumerate(zip(rows[self.label_column], choices, named, strict=True)):
            names = (value.get("label") or []) if isinstance(value, Mapping) else []
            meanings = self._meanings(label, of_row, names)
            # Several meanings are fine if they name one choice.
            if len({index for _, index in meanings}) != 1:
                place_name = cell(self.label_column, first_row + place, where)
                raise DataError(f"{place_name} {self._unclear(label, len(of_row), names, meanings)}")
            labels.append(meanings[0][1])
        return labels

    def _meanings(self, label: str | int | None, choices: Sequence[str], names: Sequence[Any]) -> list[tuple[str, int]]:
        """Return the choices that a label may mean: the format, and the index of the choice."""
        text = "" if label is None else str(label).strip()
        # `isdigit` would accept superscripts, which `int` refuses.
        number = int(text) if text.isdecimal() else -1
        indices = {
            "index": [number],
            "number": [number - 1],
            "letter": [ascii_uppercase.find(text.upper())] if len(text) == 1 else [],
            "text": [index for index, choice in enumerate(choices) if choice.strip() == text],
            "label": [index for index, name in enumerate(names) if str(name).strip() == text],
        }
        if self.label_format is not None:
            formats: tuple[str, ...] = (self.label_format,)
        elif names:
            formats = ("label",)
        else:
            formats = ("index", "letter", "text") if isinstance(label, str) else ("index",)
        return [(name, index) for name in formats for index in indices[name] if 0 <= index < len(choices)]

    def _unclear(
        self, label: str | int | None, num_choices: int, names: Sequence[Any], meanings: Sequence[tuple[str, int]]
    ) -> str:
        """Return the problem of a label that means no choice of its row, or several."""
        if label is None:
            return "is null; every row needs a label"
        if meanings:
            shown = ", ".join(f"choice {index + 1} as {name}" for name, index in meanings)
            return (
                f"is {label!r}, which may mean several choices: {shown}; set `task.label_format`, or use an index from"
                " 0 as label"
            )
        kinds = {
            "index": f"an index from 0 to {num_choices - 1}",
            "number": f"a number from 1 to {num_choices}",
            "letter": f"a letter from A to {ascii_uppercase[min(num_choices, 26) - 1]}",
            "text": "the text of one of them",
        }
        if self.label_format is not None:
            needed = kinds[self.label_format]
        elif names:
            needed = f"one of their labels {listed(names, _NAMES_SHOWN)}"
        else:
            needed = f"{kinds['index']}, a letter, or {kinds['text']}"
        fix = "correct the row"
        if self.label_format is None and not names and str(label).strip() == str(num_choices):
            fix += ', or set `task.label_format` to "number" if labels count from 1'
        return f"must name one of the {num_choices} choices, by {needed}, but is {label!r}; {fix}"

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the score of each choice, of shape `[batch, num_texts]`."""
        scores = at_least_fp32(output.logits)
        numbers = torch.arange(scores.shape[1], device=scores.device)
        # Rows have as many texts as the longest one of the split; the further ones are no choices.
        return scores.masked_fill(numbers >= inputs[_NUM_CHOICES][:, None], _ABSENT)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of scores `[batch, num_texts]`, summed over the rows."""
        return F.cross_entropy(logits, labels, reduction="sum")

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"predictions": logits.argmax(dim=-1), "labels": labels}

    def baselines(self, labels: Tensor | None, vocabulary: int | None) -> dict[str, float]:
        return {} if labels is None else self._constant_metrics(labels, int(labels.mode().values))

    def without_labels(self) -> MultipleChoiceTask:
        return replace(self, labelled=False, metric_names=())

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"probabilities": logits.softmax(-1)}

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        """Return the text of the best choice, its index from 0, and the probability of each choice, for each row."""
        shown = []
        choices = self._choices(split.rows, split.where, 0)
        for of_row, odds in zip(choices, answers["probabilities"].tolist(), strict=True):
            best = max(range(len(of_row)), key=odds.__getitem__)
            probabilities = [round(value, PROBABILITY_DIGITS) for value in odds[: len(of_row)]]
            shown.append({"prediction": of_row[best], "index": best, "probabilities": probabilities})
        return shown

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        return {"num_choices": torch.full(shape[:1], shape[1])}, torch.zeros(shape[0], dtype=torch.long)


def _holds_choices(feature: Any) -> bool:
    return is_text(getattr(feature.get("text") if isinstance(feature, Mapping) else feature, "feature", None))


def _texts(value: Any) -> list[str]:
    """Return the texts of the choices of a row: those of a list, or of {"text": [...]}; none for null."""
    return (value["text"] if isinstance(value, Mapping) else value) or []
