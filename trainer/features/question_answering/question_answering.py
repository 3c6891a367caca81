"""Extractive question answering: the answer is a span of the context, as in SQuAD (Rajpurkar et al. 2016 and 2018)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import DataError
from trainer.features.question_answering.squad import accepted_answers
from trainer.parallel.dtypes import at_least_fp32
from trainer.tasks.exported import Card
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.preview import Inputs, RowPreview, ShownToken
from trainer.tasks.task import TextTask
from trainer.tasks.text.columns import bare, cell, frame_of, require_columns, require_kind, require_text
from trainer.tasks.text.windows import cut_columns, require_fast, shared_tokens, windows
from trainer.tasks.types import Dataset, Encoded, EncodedRows, EvaluatedSplit, Tokenizer

NO_ANSWER = 0
"""The position that stands for no answer: the first token, which is the classification token of most encoders."""

_PADDING = -1e4  # score of padding: a probability of 0, and finite in sums
WINDOW = "window"
_ROWS_AT_ONCE = 1000
_METRIC_ROWS = {"f1": "token_f1"}  # the row of the table of metrics, if its name differs


class Answer(NamedTuple):
    """A span of the context: its first character and the one after its last, and its score."""

    start: int
    end: int
    score: float


class _Pair(NamedTuple):
    """A tokenised question and context: its columns, and the place of the context's tokens."""

    columns: dict[str, list[int]]
    first: int
    spans: NDArray[np.int64]  # characters of each token of the context: `[tokens, 2]`


class Found(NamedTuple):
    """The best answers of one question, best first, and its score for no answer."""

    context: str
    answers: list[Answer]
    no_answer: float


class _Answers(RowPreview):
    def label(self, labels: Tensor, inputs: Inputs) -> str:
        first, last = labels.tolist()
        return f"tokens {first} to {last}" if last else "no answer"

    def tokens(self, ids: Sequence[int], labels: Tensor, inputs: Inputs) -> Sequence[ShownToken]:
        first, last = labels.tolist()
        answer = range(first, last + 1) if last else range(0)
        return [
            ShownToken(token, "trained", "answer") if place in answer else ShownToken(token)
            for place, token in enumerate(ids)
        ]

    def source_rows(self, encoded: EncodedRows) -> NDArray[Any] | None:
        rows: NDArray[Any] = encoded.arrays[WINDOW][:, 0]
        return rows


@dataclass(frozen=True)
class QuestionAnsweringTask(TextTask):
    """Extractive question answering with cross entropy over the positions of the first and last token.

    A context longer than a window is read in windows that overlap. A window without the whole answer learns
    `NO_ANSWER`, as in Devlin et al. 2019. Rows of the encoded split are windows.
    """

    question_column: str
    context_column: str
    # one column in the form of SQuAD, or the columns of the text and of its first character
    answer_columns: tuple[str, ...]
    stride: int | None  # the tokens that two windows share; None: a third of the window
    unanswerable: bool  # whether questions may have no answer, as in SQuAD 2.0
    n_best: int  # the start and end positions of a window that are combined, and the answers that are kept
    max_answer_length: int  # the maximum number of tokens of an answer
    null_threshold: float  # the difference of scores from which no answer is preferred to the best answer
    metric_names: tuple[str, ...]
    has_answers: bool = True  # False for rows to predict

    auto_class_name = "AutoModelForQuestionAnswering"
    card = Card("question-answering", has_pipeline=False, peft_type="QUESTION_ANS")
    unencoded_fields = ("n_best", "max_answer_length", "null_threshold", "metric_names")
    extra_columns = (WINDOW,)
    cut_targets = "answers that no window holds as a whole, learned as no answer"

    @property
    def preview(self) -> RowPreview:
        return _Answers()

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.question_column, self.context_column, *(self.answer_columns if self.has_answers else ()))

    @property
    def value_columns(self) -> tuple[str, ...]:
        return self.answer_columns[1:]

    def model_options(self) -> dict[str, Any]:
        return {"num_labels": 2}  # the scores of start and end

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        require_text(features, [self.question_column], where, "task.question")
        require_text(features, [self.context_column], where, "task.context")
        if not self.has_answers:
            return
        require_columns(features, self.answer_columns, "task.answers", where)
        if len(self.answer_columns) == 1:
            needed = 'a column of the form {"text": [...], "answer_start": [...]}, or two columns for text and start'
            require_kind(features, self.answer_columns[0], "task.answers", where, _is_of_squad, needed)

    @property
    def keeps_rows(self) -> bool:
        return False

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        """Return the windows of all rows.

        The column `window` has four numbers for each window: its row in the split, the place of the first token of the
        context in the window, the number of these tokens, and the number of tokens of the context before them.
        `labels` are the positions of the first and last token of the answer. `cut_target` has one value for each row.
        """
        pairs = self._tokenised(rows, tokenizer, where, first_row)
        found: Encoded = {}
        for place, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
            answer = None
            if self.has_answers:
                answers = self._answers(row, where, first_row + place)
                answer = self._tokens(answers, pair, where, first_row + place)
            first, is_cut = pair.first, answer is not None
            for start, end in self._windows(pair, max_length, where, first_row + place):
                window = cut_columns(pair.columns, (first, first + len(pair.spans)), (start, end))
                for name, values in window.items():
                    found.setdefault(name, []).append(values)
                # Answers are mapped back from tokens of windows to characters of the context by these numbers.
                found.setdefault(WINDOW, []).append(np.array([first_row + place, first, end - start, start]))
                if self.has_answers:
                    inside = answer is not None and start <= answer[0] and answer[1] < end
                    is_cut &= not inside
                    # From tokens of the context to positions in the window.
                    label = np.array(answer) - start + first if inside else np.full(2, NO_ANSWER)
                    found.setdefault("labels", []).append(label)
            found.setdefault("cut_target", []).append(is_cut)
        return found

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the scores of start and end, of shape `[batch, sequence, 2]`.

        Padding gets no probability, because its amount depends on the layout.
        """
        scores = at_least_fp32(torch.stack([output.start_logits, output.end_logits], dim=-1))
        return scores.masked_fill(inputs["attention_mask"].unsqueeze(-1) == 0, _PADDING)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of the cross entropies of start and end, `[batch, sequence, 2]`, summed over the windows."""
        return F.cross_entropy(logits, labels, reduction="sum") / 2

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self.answers(logits, {})

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the best `n_best` positions of start and end with their scores, and the score for no answer."""
        # `topk` may choose any of equal scores; a stable sort chooses the first positions.
        ordered, order = logits.sort(dim=1, descending=True, stable=True)
        scores, positions = ordered[:, : self.n_best], order[:, : self.n_best]
        return {
            "starts": positions[..., 0],
            "ends": positions[..., 1],
            "start_scores": scores[..., 0],
            "end_scores": scores[..., 1],
            "no_answer": logits[:, NO_ANSWER].sum(-1),
        }

    def split_metrics(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit) -> dict[str, float]:
        return self._computed(self._answered(predictions, split))

    def split_baselines(self, split: EvaluatedSplit) -> dict[str, float]:
        return self._computed(("", self._accepted(row, split.where, number)) for number, row in enumerate(split.rows))

    def _computed(self, answered: Iterable[tuple[str, Sequence[str]]]) -> dict[str, float]:
        arrays = [np.fromiter(values, object, len(values)) for values in zip(*answered, strict=True)]
        return {name: METRICS[_METRIC_ROWS.get(name, name)].compute(*arrays) for name in self.metric_names}

    def picture(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit | None) -> dict[str, Any] | None:
        """Return the first questions with the answers found and those accepted; an empty one means no answer."""
        if split is None:
            return None
        return {
            "texts": [
                {"question": row[self.question_column], "answer found": text, "answers accepted": " | ".join(accepted)}
                for row, (text, accepted) in zip(split.few, self._answered(predictions, split), strict=False)
            ]
        }

    def _answered(
        self, predictions: Mapping[str, Tensor], split: EvaluatedSplit
    ) -> Iterator[tuple[str, Sequence[str]]]:
        for number, (row, found) in enumerate(zip(split.rows, self._found(predictions, split), strict=True)):
            best = self._best(found)
            answer = "" if best is None else found.context[best.start : best.end]
            yield answer, self._accepted(row, split.where, number)

    def _accepted(self, row: Mapping[str, Any], where: str, number: int) -> Sequence[str]:
        return accepted_answers([text for text, _ in self._answers(row, where, number)], self.unanswerable)

    def without_labels(self) -> QuestionAnsweringTask:
        return replace(self, has_answers=False)

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        """Return the answer of each row, its characters in the context, its probability, and the best answers.

        The probabilities are a softmax over the scores of the best answers, and of no answer if there may be none. An
        empty answer, with null for `start` and `end`, means no answer.
        """
        return [self._shown(found) for found in self._found(answers, split)]

    def _shown(self, found: Found) -> dict[str, Any]:
        scores = [answer.score for answer in found.answers] + [found.no_answer] * self.unanswerable
        odds = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
        best = [
            {"answer": found.context[start:end], "start": start, "end": end, "score": score}
            for (start, end, _), score in zip(found.answers, odds, strict=False)
        ]
        none = {"answer": "", "start": None, "end": None, "score": odds[-1] if self.unanswerable else 0.0}
        shown = {**(none if self._best(found) is None else best[0]), "n_best": best}
        return {**shown, "no_answer_probability": odds[-1]} if self.unanswerable else shown

    def _best(self, found: Found) -> Answer | None:
        """Return the best answer; None for no answer."""
        if not found.answers:
            return None
        best = found.answers[0]
        return None if self.unanswerable and found.no_answer - best.score > self.null_threshold else best

    def _found(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> Iterator[Found]:
        """Merge the windows of each row; positions become characters of the context."""
        assert split.tokenizer is not None
        arrays = {name: tensor.numpy() for name, tensor in answers.items()}
        windows = split.encoded.arrays[WINDOW]
        # A row has one window or more, and `windows[:, 0]` names its row.
        counts = np.bincount(windows[:, 0], minlength=len(split.rows))
        bounds = [0, *counts.cumsum().tolist()]  # the windows of a row follow each other
        for first_row in range(0, len(split.rows), _ROWS_AT_ONCE):
            rows = split.rows.select(range(first_row, min(first_row + _ROWS_AT_ONCE, len(split.rows))))
            pairs = self._tokenised(rows, split.tokenizer, split.where, first_row)
            for place, (context, pair) in enumerate(zip(rows[self.context_column], pairs, strict=True)):
                own = range(bounds[first_row + place], bounds[first_row + place + 1])
                scored = [
                    span
                    for number in own
                    for span in self._spans({name: values[number] for name, values in arrays.items()}, windows[number])
                ]
                # Equal scores are in the order of the context, so that no layout and no batch size changes the answer.
                # A set: windows that overlap find the same span.
                best = sorted(set(scored), key=lambda span: (-span[2], span))
                yield Found(context, self._distinct(best, pair, context), float(arrays["no_answer"][own].min()))

    def _spans(self, answers: Mapping[str, Any], window: NDArray[np.int64]) -> Iterator[tuple[int, int, float]]:
        """Iterate over the spans of a window: first and last token in the whole context, and score."""
        _, first, size, skipped = window.tolist()
        starts, ends = answers["starts"] - first, answers["ends"] - first
        length = ends[None, :] - starts[:, None] + 1
        inside = ((starts >= 0) & (starts < size))[:, None] & ((ends >= 0) & (ends < size))[None, :]
        valid = inside & (length >= 1) & (length <= self.max_answer_length)
        scores = answers["start_scores"][:, None] + answers["end_scores"][None, :]
        found = np.argwhere(valid)
        found = found[np.argsort(-scores[valid], kind="stable")[: 2 * self.n_best]]  # some differ in spaces only
        for start, end in found:
            yield int(starts[start]) + skipped, int(ends[end]) + skipped, float(scores[start, end])

    def _distinct(self, spans: Sequence[tuple[int, int, float]], pair: _Pair, context: str) -> list[Answer]:
        """Return the best `n_best` answers; windows that overlap have some answers in common."""
        found: dict[tuple[int, int], Answer] = {}
        for first, last, score in spans:
            start, end = int(pair.spans[first, 0]), int(pair.spans[last, 1])
            text = context[start:end]
            start, end = end - len(text.lstrip()), start + len(text.rstrip())  # some tokens begin with a space
            if start < end:
                found.setdefault((start, end), Answer(start, end, score))
            if len(found) == self.n_best:
                break
        return list(found.values())

    def _tokenised(self, rows: Dataset, tokenizer: Tokenizer, where: str, first_row: int) -> Iterator[_Pair]:
        """Tokenise questions with their contexts, without truncation."""
        require_fast(tokenizer, "`task.type` question_answering")
        texts = []
        for column in (self.question_column, self.context_column):
            texts.append(list(rows[column]))
            for place, text in enumerate(texts[-1]):
                if text is None or not text.strip():
                    state = "null" if text is None else "empty"
                    raise DataError(
                        f"{cell(column, first_row + place, where)} is {state}; every row needs a question and a context"
                    )
        start, end = frame_of(tokenizer)
        # As in the examples of transformers: blanks before a question would take tokens from the context.
        questions = [question.lstrip() for question in bare(texts[0], tokenizer, start, end)]
        contexts = bare(texts[1], tokenizer, [], end)  # the characters of its answers are counted from its start
        encoded = tokenizer(
            questions, contexts, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        spans = encoded.pop("offset_mapping")
        for place in range(len(rows)):
            sequences = encoded.sequence_ids(place)
            if 1 not in sequences:
                place_text = cell(self.context_column, first_row + place, where)
                raise DataError(f"{place_text} is a text without a token; leave the row out")
            first, size = sequences.index(1), sequences.count(1)
            columns = {name: values[place] for name, values in encoded.items()}
            yield _Pair(columns, first, np.array(spans[place][first : first + size]))

    def _windows(self, pair: _Pair, max_length: int, where: str, row: int) -> list[tuple[int, int]]:
        """Return the first token of each window, counted from the context's first, and the one after its last."""
        stride = shared_tokens(self.stride, max_length)
        size = len(pair.spans)
        others = len(pair.columns["input_ids"]) - size
        room = max_length - others
        if size > room and room <= stride:
            raise DataError(
                f"{cell(self.question_column, row, where)} leaves room for {max(room, 0)} tokens of the context in a"
                f" window of `data.max_length` {max_length}, with {others} tokens for the question and special tokens,"
                f" but windows share {stride} tokens (`task.stride`); shorten the question, increase"
                " `data.max_length`, or lower `task.stride`"
            )
        return windows(size, room, stride)

    def _answers(self, row: Mapping[str, Any], where: str, number: int) -> list[tuple[str, int]]:
        place = cell(self.answer_columns[0], number, where)
        texts, starts = _texts_and_starts([row[column] for column in self.answer_columns])
        if len(texts) != len(starts):
            raise DataError(
                f"{place} has {len(texts)} texts but {len(starts)} starts; it needs one start for each text"
            )
        answers = [
            (text, self._checked_start(text, start, row[self.context_column], place))
            for text, start in zip(texts, starts, strict=True)
        ]
        if not answers and not self.unanswerable:
            raise DataError(f"{place} has no answer; leave the row out, or set `task.unanswerable` to true")
        return answers

    def _checked_start(self, text: Any, start: Any, context: str, place: str) -> int:
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{place} has the answer {text!r}; an answer must be a text that is not empty")
        if isinstance(start, float) and start.is_integer():  # a column of integers with gaps is one of floats
            start = int(start)
        if isinstance(start, bool) or not isinstance(start, int):
            raise DataError(f"{place} has the start {start!r}; it must be the number of a character, from 0")
        problem = None
        if start < 0 or start + len(text) > len(context):
            problem = f"is outside of the context, which has {len(context)} characters"
        elif (found := context[start : start + len(text)]) != text:
            problem = f"does not match: the context has {found!r} there"
        if problem is not None:
            at = context.find(text)
            fix = f"the context has it at {at}" if at >= 0 else "the context does not have it at all"
            raise DataError(f"{place} has the answer {text!r} at character {start}, which {problem}; {fix}")
        return start

    def _tokens(self, answers: list[tuple[str, int]], pair: _Pair, where: str, row: int) -> tuple[int, int] | None:
        """Return the first and last token, in the context, of the answer that is trained on; None if there is none."""
        if not answers:
            return None
        # Training has one span for each row; evaluations accept all answers.
        text, start = answers[0]
        start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
        # Tokens that overlap the answer: the first one may begin with the space before it.
        tokens = np.flatnonzero((pair.spans[:, 1] > start) & (pair.spans[:, 0] < end))
        if not len(tokens):
            place = cell(self.answer_columns[0], row, where)
            raise DataError(f"{place} has the answer {text!r}, which the tokenizer removes; leave the row out")
        return int(tokens[0]), int(tokens[-1])

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        return {}, torch.zeros(shape[0], 2, dtype=torch.long)


def _is_of_squad(feature: Any) -> bool:
    inner = getattr(feature, "feature", feature)  # of a list
    return isinstance(inner, Mapping) and {"text", "answer_start"} <= set(inner)


def _texts_and_starts(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return texts and starts of the value of one column in the form of SQuAD, or of the values of two columns."""
    if len(values) == 2:
        text, start = values
        if isinstance(text, list) or isinstance(start, list):
            return text or [], start or []
        return ([], []) if text in (None, "") else ([text], [start])
    (value,) = values
    if value is None:
        return [], []
    if isinstance(value, list):
        return [answer["text"] for answer in value], [answer["answer_start"] for answer in value]
    return value["text"] or [], value["answer_start"] or []
