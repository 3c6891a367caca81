"""Learning from preferences: one answer to a prompt is better than another one, or is desirable or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.base.errors import DataError, UsageError
from trainer.features.preferences.labels import desirable
from trainer.features.preferences.losses import Answers, divergence, labelled_losses, pair_losses, rewards
from trainer.features.preferences.pairs import equal_pairs_notes, require_apart, tokens_of_whole_pair
from trainer.features.preferences.section import Preference, PreferenceLoss
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.recipe.schema import TaskKeys
from trainer.tasks.causal_lm import CausalLMTask
from trainer.tasks.exported import GENERATION
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.preview import Inputs, NextTokens, RowPreview
from trainer.tasks.task import Task
from trainer.tasks.text.answers import (
    Tokens,
    check_texts_or_chats,
    features_of,
    messages_of,
    required_chats,
    tokens_after,
    unread_notes,
)
from trainer.tasks.text.columns import cell, cells_of, require_columns
from trainer.tasks.token_labels import TokenLabels
from trainer.tasks.types import Dataset, Encoded, EncodedRows, Tokenizer

_ANSWER, _REFERENCE, DESIRABLE = "answer", "reference", "desirable"
"""Columns beside the inputs of the model: the tokens of answers, if labels cover more; the log-probabilities of the
reference; and KTO's labels."""


class _DesirableAnswers(NextTokens):
    def label(self, labels: Tensor, inputs: Inputs) -> str:
        return "desirable" if inputs[DESIRABLE] else "undesirable"


@dataclass(frozen=True)
class PreferenceTask(TokenLabels):
    """A loss over the log-probabilities of two answers of each row.

    Row `i` of KTO has its own answer, and that of row `i - 1`, for the estimate of the divergence. For the other fields
    see `TokenLabels`.

    Attributes:
        prompt: the column of prompts; None: the answers are whole texts or chats, for KTO chats.
        answer_columns: by the recipe's keys, `chosen` and `rejected`; for KTO `completion`.
        label: for KTO, the column of whether an answer is desirable; None: rows are pairs.
        tools: the column of tools; None: chats have none.
        settings: the texts of `trainer predict`.
        labels_prompts: whether the tokens of prompts have labels too, for a loss over whole texts.
        is_chat: whether columns hold messages; known after `resolve`.
        others: all rows of the split and the index of the first one, from `for_split`.
    """

    prompt: str | None
    answer_columns: Mapping[str, str]
    label: str | None
    loss: PreferenceLoss
    metric_names: tuple[str, ...]
    tools: str | None = None
    settings: Any = None
    labels_prompts: bool = False
    is_chat: bool = False
    others: tuple[Dataset, int] | None = None

    auto_class_name = "AutoModelForCausalLM"
    card = GENERATION
    rows_are_labels = True
    extra_columns = (_ANSWER, _REFERENCE, DESIRABLE)
    unencoded_fields = (
        "loss",
        "metric_names",
        "settings",
        "vocabulary",
        "takes_token_scores",
        "others",
    )

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        assert isinstance(section, Preference)
        is_kto = section.loss.type == "kto"
        answers = ("completion",) if is_kto else ("chosen", "rejected")
        return super().of(
            section,
            answer_columns={key: getattr(section, key) for key in answers},
            label=section.label if is_kto else None,
            labels_prompts=section.loss.type == "orpo",
            **given,
        )

    @property
    def preview(self) -> RowPreview:
        if self.label is None:
            return NextTokens(roles=("chosen", "rejected"))
        return _DesirableAnswers(roles=("answer", "answer of the row before, for the divergence"), num_trained=1)

    @property
    def columns(self) -> tuple[str, ...]:
        found = (self.prompt, self.tools, *self.answer_columns.values(), self.label)
        return tuple(column for column in found if column is not None)

    @property
    def value_columns(self) -> tuple[str, ...]:
        return () if self.label is None else (self.label,)

    @property
    def rows_depend(self) -> bool:
        return self.label is not None

    @property
    def inputs_of_start(self) -> str | None:
        return "trainer.features.preferences.referencing:with_reference" if self.loss.has_reference else None

    @property
    def generation(self) -> Any:
        return self._causal().generation

    def end_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        return self._causal().end_tokens(tokenizer)

    def resolve(self, train: Dataset, where: str) -> PreferenceTask:
        self.check_columns(train.features, where)
        return replace(self, is_chat=check_texts_or_chats(train.features, self._text_columns(), where))

    def for_configuration(self, config: Any) -> PreferenceTask:
        if config.is_encoder_decoder:
            raise UsageError(
                f"`task.type` is preference, which needs a decoder, but the model is of type {config.model_type}, which"
                " has an encoder too; use another model"
            )
        self._causal().for_configuration(config)
        return self

    def answer_notes(self, train: EncodedRows) -> list[str]:
        if self.label is None:
            return equal_pairs_notes(train)
        first, *others = np.unique(train.scalars[DESIRABLE]).tolist()
        kind = "desirable" if first else "undesirable"
        return [] if others else [f"all training answers are {kind}, so nothing contrasts with them; add others"]

    def conversion_notes(self, features: Mapping[str, Any]) -> list[str]:
        return unread_notes(features, self.columns, self.is_chat)

    def _text_columns(self) -> dict[str, str]:
        return {**({} if self.prompt is None else {"prompt": self.prompt}), **self.answer_columns}

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        is_chat = check_texts_or_chats(features, self._text_columns(), where)
        if self.prompt is None and self.label is not None and not is_chat:
            raise DataError(
                f"`task.prompt` is null, so the column of `task.completion` in {where} must hold whole chats, but it"
                " holds texts; name the column of the prompts"
            )
        if self.tools is not None:
            require_columns(features, [self.tools], "task.tools", where)
            if not is_chat:
                raise DataError(f"`task.tools` applies to chats, but the answers of {where} are texts; remove it")
        if self.label is not None:
            require_columns(features, [self.label], "task.label", where)

    def for_split(self, rows: Dataset, first_row: int) -> PreferenceTask:
        return replace(self, others=(rows, first_row))

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        """Return two texts of each row: the prompt with each answer; their labels are the next tokens of answers.

        Raises:
            DataError: a cell is null, empty or cut by `max_length`; a label is not true or false; a chat has no answer.
            UsageError: the tokenizer has no end token or no chat template.
        """
        cells = cells_of(rows, self.columns, where, first_row, nullable=self.tools)
        before = None if self.label is None else self._answer_before(rows, where, first_row)
        found = list(self._tokens(cells, before, tokenizer, where, first_row))
        features = features_of(found, max_length)
        if self.labels_prompts:
            features[_ANSWER] = [[int(label != IGNORED_LABEL) for label in of_text] for of_text in features["labels"]]
            # ORPO trains whole texts, so the answer needs a mask of its own.
            features["labels"] = [ids[1:max_length] for _, (ids, _) in found]
        paired: Encoded = {
            name: [list(pair) for pair in zip(values[::2], values[1::2], strict=True)]
            for name, values in features.items()
        }
        paired["cut"] = [any(pair) for pair in paired["cut"]]
        if self.label is not None:
            paired[DESIRABLE] = desirable(cells[self.label], self.columns, where, first_row)
        else:
            for row, (texts_of_row, is_cut) in enumerate(zip(paired["input_ids"], paired["cut"], strict=True)):
                require_apart(texts_of_row, is_cut, max_length, found[2 * row][0])
        return paired

    def _tokens(
        self, cells: Mapping[str, Sequence[Any]], before: Any, tokenizer: Tokenizer, where: str, first_row: int
    ) -> Iterator[tuple[str, Tokens]]:
        """Yield the place and the tokens of each text; `before` is the answer of the row before, for KTO."""
        texts = [cells[column] for column in self._text_columns().values()]
        tools = [None] * len(texts[0]) if self.tools is None else cells[self.tools]
        for row, (of_tools, *of_row) in enumerate(zip(tools, *texts, strict=True)):
            places = [cell(column, first_row + row, where) for column in self.answer_columns.values()]
            if self.prompt is None and not self.is_chat:
                yield from zip(places, tokens_of_whole_pair(of_row, tokenizer, places[0]), strict=True)
                continue
            if before is not None:
                prompt, own = _ended(of_row[0]) if self.prompt is None else of_row
                # KTO: the second text is the answer of the row before, to the prompt of this row.
                answers, places, before = [own, before], places * 2, own
            elif self.prompt is None:
                prompt, *answers = _divided(of_row[0], of_row[1], places[0])
            else:
                prompt, *answers = of_row
            described = None
            if self.tools is not None:
                described = required_chats().tools(of_tools, tokenizer, cell(self.tools, first_row + row, where))
            if self.is_chat:  # a text among messages is then an error, and no pair of texts
                prompt, answers = messages_of(prompt), list(map(messages_of, answers))
            for place, answer in zip(places, answers, strict=True):
                yield place, tokens_after(prompt, answer, tokenizer, described, place)

    def _answer_before(self, rows: Dataset, where: str, first_row: int) -> Any:
        """Return the answer of the row before `rows`; the last row of the split comes before its first one."""
        (column,) = self.answer_columns.values()
        every, first = self.others or (rows, first_row)
        # Around the end: a row's partner must not depend on how the split is encoded in parts.
        index = (first_row - first - 1) % len(every)
        before = cells_of(every.select([index]), [column], where, first + index)[column][0]
        return _ended(before)[1] if self.prompt is None else before

    def model_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs `[batch * 2, sequence]`: the model reads each answer by itself."""
        return {name: tensor.flatten(0, -2) for name, tensor in super().model_inputs(inputs).items()}

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the scores `[batch, 2, 5]` of the answers: the fields of `Answers`, in fp32 at least."""
        assert labels is not None, "rows without labels have generated texts"
        if self.takes_token_scores:
            losses = output.logits[..., :1].view(labels.shape)
        else:
            losses = self._cross_entropy(output.logits.view(*labels.shape, -1), labels, "none")
        labelled = (labels != IGNORED_LABEL).to(losses.dtype)
        answer = inputs[_ANSWER].to(losses.dtype) if self.labels_prompts else labelled
        # Ignored labels have a loss of 0.
        logps = -(losses * answer).sum(-1)
        reference = inputs[_REFERENCE].to(logps.dtype) if _REFERENCE in inputs else torch.zeros_like(logps)
        # An answer may have no token left after the cut to `max_length`, and means divide by this number.
        lengths = answer.sum(-1).clamp(min=1)
        nll = losses.sum(-1) / labelled.sum(-1).clamp(min=1)
        desirable = torch.zeros_like(logps)
        if DESIRABLE in inputs:
            desirable = desirable + inputs[DESIRABLE].to(logps.dtype)[:, None]
        # One tensor, because engines gather the scores of rows as one.
        return torch.stack([logps, reference, lengths, nll, desirable], -1)

    def num_valid(self, labels: Tensor) -> Tensor:
        return torch.tensor(len(labels), device=labels.device)

    def row_labels(self, labels: Tensor) -> Tensor:
        # No labels: the scores hold all that the loss needs, so nothing is gathered.
        return labels[:, :0, 0]

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, summed over the rows.

        Args:
            logits: the scores `[rows, 2, 5]`; of the whole batch if `rows_depend`.
            labels: not read.
        """
        return self.joint_losses(logits, labels).sum()

    def joint_losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row `[rows]`; arguments are those of `loss_sum`, in the order of the global batch."""
        answers = Answers.of(scores)
        if self.rows_depend:
            return labelled_losses(answers, self.loss, divergence(answers))
        return pair_losses(answers, self.loss)

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"scores": logits.float()}

    def metrics(self, predictions: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics; with `rows_depend` also the loss of the split as one batch."""
        scores = predictions["scores"].double()
        answers = Answers.of(scores)
        gained, logps = rewards(answers, self.loss), answers.logps
        found: dict[str, float] = {}
        if self.rows_depend:
            is_desirable, kl = answers.desirable > 0.5, divergence(answers)
            found["loss"] = float(self.joint_losses(scores, scores).mean())
            sides = (is_desirable, ~is_desirable)
            compared = [gained[side, 0].numpy() for side in sides]
            probable = [logps[side, 0].numpy() for side in sides]
            signs = torch.where(is_desirable, 1.0, -1.0)
            distances = (signs * (gained[:, 0] - self.loss.scale * kl)).numpy()
            ordered = (distances, np.zeros_like(distances))
            divergences = kl[None].numpy()
        else:
            compared, probable = [of.numpy() for of in gained.unbind(1)], [of.numpy() for of in logps.unbind(1)]
            ordered, divergences = (compared[0], compared[1]), np.zeros(1)
        arguments = {
            "reward_accuracy": ordered,
            "reward_margin": compared,
            "chosen_logps": (probable[0], probable[1]),
            "rejected_logps": (probable[1], probable[0]),
            "kl": (divergences, divergences),
        }
        return found | {name: METRICS[name].compute(*arguments[name]) for name in self.metric_names}

    def baselines(self, labels: Tensor | None, vocabulary: int | None) -> dict[str, float]:
        return {"reward_accuracy": 0.5}

    def _causal(self) -> CausalLMTask:
        column = self.prompt or next(iter(self.answer_columns.values()))
        sources = {"messages" if self.is_chat else "prompt": column}
        return CausalLMTask(sources, "none", (), settings=self.settings)

    def without_labels(self) -> Task:  # type: ignore[override]
        """Return the task that continues prompts."""
        if self.tools is not None:
            raise UsageError("`task.tools` is set, but `trainer predict` describes no tools; predict without it")
        return self._causal().without_labels()

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        further = {"reference": torch.zeros(shape[:2])} if self.loss.has_reference else {}
        if self.loss.type == "orpo":
            further["answer"] = torch.ones(shape, dtype=torch.long)
        if self.loss.type == "kto":
            further["desirable"] = torch.zeros(shape[0], dtype=torch.long)
        return further, torch.zeros(shape[0], 2, shape[-1], dtype=torch.long)


def _divided(chosen: Any, rejected: Any, place: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages that two chats start with, and the rest of each."""
    one, other = messages_of(chosen), messages_of(rejected)
    shorter = min(len(one), len(other))
    number = next((at for at in range(shorter) if one[at] != other[at]), shorter)
    if number in (0, shorter):
        problem = "start with the same message" if number == 0 else "continue in different ways"
        raise DataError(
            f"{place} and the rejected chat must {problem}, since `task.prompt` is null; correct the row, or leave"
            " it out"
        )
    return one[:number], one[number:], other[number:]


def _ended(chat: Any) -> tuple[list[Any], list[Any]]:
    """Return the messages of a chat up to the last one that the model does not answer with, and its answer."""
    messages = messages_of(chat)
    own = takewhile(lambda one: isinstance(one, Mapping) and one.get("role") in ("assistant", "tool"), messages[::-1])
    number = len(messages) - len(list(own))
    return messages[:number], messages[number:]
