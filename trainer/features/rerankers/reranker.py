"""Rerankers: cross-encoders that score a query with each of its documents (Nogueira and Cho 2019, arXiv:1901.04085).

A row holds one query and one or several documents. The model reads each pair by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import DataError
from trainer.tasks.exported import Card, ExportedFolder, Program
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.several_texts import ScoredTexts, grouped, mean_of_draws, most_texts, texts_of_rows
from trainer.tasks.text.columns import (
    cell,
    finite_number,
    is_text,
    require_columns,
    require_kind,
    require_text,
    tokenise_texts,
)  # fmt: skip
from trainer.tasks.text.tied_texts import first_of_equal
from trainer.tasks.types import ROWS_PICTURED, Dataset, Encoded, EvaluatedSplit, Tokenizer

ACTIVATIONS = {"sigmoid": "torch.nn.modules.activation.Sigmoid", "identity": "torch.nn.modules.linear.Identity"}
"""The values of `task.activation`, and their names in folders of cross-encoders."""
Loss = Literal["binary_cross_entropy", "cross_entropy", "list_net", "lambda"]

_ABSENT = -1.0  # the label of a document that the row does not have
_NEVER = -1e16  # the score of such a document: a probability of 0, and finite in sums
# The defaults of `LambdaLoss` with `NDCGLoss2PPScheme` in sentence-transformers.
_MU, _LEAST_GAIN = 10.0, 1e-10


_USAGE = """\
from sentence_transformers import CrossEncoder

scores = CrossEncoder("path/to/this/folder").predict([("a query", "a document")])"""
_PROGRAM = Program("`CrossEncoder`", ("sentence-transformers",), "trainer.features.rerankers.opener", reads_texts=True)


@dataclass(frozen=True)
class RerankerTask(ScoredTexts):
    """Scores of pairs of a query and a document."""

    query_column: str
    # one column of documents or of lists of documents; or the column of the right document, then those of wrong ones
    document_columns: tuple[str, ...]
    label_column: str | None  # the column of relevances; None: the first document of a row is right
    loss: Loss
    metric_names: tuple[str, ...]
    positive_weight: float = 1.0  # the weight of right documents in the binary cross entropy
    scale: float | None = None  # the factor of the sigmoid of scores in the cross entropy; None: it takes the scores
    activation: str | None = None  # the function of predicted scores
    labelled: bool = True  # whether rows have labels
    num_texts: int = 1  # the largest number of documents of a row, from `for_split`

    recipe_type = "reranker"
    card = Card("text-ranking", has_pipeline=False, peft_type="SEQ_CLS", program=_PROGRAM, usage=_USAGE)
    unencoded_fields = ("metric_names", "positive_weight", "scale", "activation")

    @property
    def rows_are_labels(self) -> bool:
        return self.loss in ("cross_entropy", "list_net")

    @property
    def columns(self) -> tuple[str, ...]:
        label = () if self.label_column is None or not self.labelled else (self.label_column,)
        return (self.query_column, *self.document_columns, *label)

    def model_options(self) -> dict[str, Any]:
        return {"num_labels": 1, "sentence_transformers": {"activation_fn": ACTIVATIONS[self.folder_activation]}}

    @property
    def folder_activation(self) -> str:
        return self.activation or "sigmoid"

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        require_text(features, [self.query_column], where, "task.query")
        if len(self.document_columns) > 1:
            require_text(features, self.document_columns, where, "task.documents")
            return
        (column,), needed = self.document_columns, "a column of strings or of lists of strings"
        require_kind(
            features, column, "task.documents", where, lambda one: is_text(one) or is_text(_inside(one)), needed
        )
        is_list = is_text(_inside(features[column]))
        if not self.labelled:
            return
        if self.label_column is not None:
            require_columns(features, [self.label_column], "task.label", where)
        elif not is_list:
            raise DataError(
                f"`task.label` must name a column of relevances, because column `{column}` of {where} holds one"
                " document in each row; set it, or name a column of lists"
            )
        if not is_list and self.loss != "binary_cross_entropy":
            raise DataError(
                f"`task.documents` must name a column of lists, or several columns, for the loss {self.loss}, but"
                f" column `{column}` of {where} holds one document in each row; use binary_cross_entropy"
            )

    def for_split(self, rows: Dataset, first_row: int) -> RerankerTask:
        return replace(self, num_texts=most_texts(rows, self.document_columns, _listed))

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        """Return the pairs of all rows; each has `num_texts`, and those without a document have one token.

        `labels` are the relevances `[num_texts]`, -1 without a document.
        """
        documents = self._documents(rows, where, first_row)
        queries = list(rows[self.query_column])
        self._require_text(queries, self.query_column, where, first_row)
        places = [row for row, of_row in enumerate(documents) for _ in of_row]
        texts = [queries[row] for row in places], [document for of_row in documents for document in of_row]
        tokens = tokenise_texts(texts, tokenizer, max_length)
        cut = tokens.pop("cut")
        found: Encoded = {"cut": [False] * len(rows)}
        for row, is_cut in zip(places, cut, strict=True):
            found["cut"][row] |= is_cut
        counts = [len(of_row) for of_row in documents]
        for name, values in tokens.items():
            found[name] = values if self.num_texts == 1 else grouped(values, counts, self.num_texts)
        if self.labelled:
            found["labels"] = self._labels(rows, documents, where, first_row)
        return found

    def documents_of(self, rows: Dataset) -> list[list[str]]:
        """Return the documents of each row of a split that is sound."""
        return self._documents(rows, "", 0)

    def _documents(self, rows: Dataset, where: str, first_row: int) -> list[list[str]]:
        lists = texts_of_rows(rows, self.document_columns, _listed)
        if len(self.document_columns) > 1:
            for place, name in enumerate(self.document_columns):
                self._require_text([of_row[place] for of_row in lists], name, where, first_row)
            return lists
        (column,) = self.document_columns
        for place, of_row in enumerate(lists):
            if not of_row:
                raise DataError(f"{cell(column, first_row + place, where)} has no document; leave the row out")
            self._require_text(of_row, column, where, first_row + place, is_list=True)
        return lists

    def _require_text(
        self, texts: Sequence[str | None], column: str, where: str, first_row: int, is_list: bool = False
    ) -> None:
        for place, text in enumerate(texts):
            if text is None or not text.strip():
                at = cell(column, first_row + (0 if is_list else place), where)
                problem = "null" if text is None else "empty"
                document, left_out = (f"document {place + 1} of ", "it") if is_list else ("", "the row")
                raise DataError(f"{document}{at} is {problem}; leave {left_out} out")

    def _labels(
        self, rows: Dataset, documents: Sequence[Sequence[str]], where: str, first_row: int
    ) -> list[NDArray[np.float64]]:
        """Return the relevances of each row `[num_texts]`."""
        if self.label_column is None:
            found = [[1.0] + [0.0] * (len(of_row) - 1) for of_row in documents]
        else:
            found = []
            for place, (value, of_row) in enumerate(zip(rows[self.label_column], documents, strict=True)):
                at = cell(self.label_column, first_row + place, where)
                found.append(self._numbers(value, len(of_row), at))
        return [np.array(numbers + [_ABSENT] * (self.num_texts - len(numbers))) for numbers in found]

    def _numbers(self, value: Any, number: int, at: str) -> list[float]:
        values = value if isinstance(value, list) else [value]
        if len(values) != number:
            raise DataError(
                f"{at} must have one number for each of the {number} documents, but has {len(values)}; add them"
            )
        is_probability, numbers = self.loss == "binary_cross_entropy", list[float]()
        highest, needed = (1, "a number from 0 to 1") if is_probability else (math.inf, "a number of at least 0")
        for label in values:
            found = finite_number(label)
            if found is None or not 0 <= found <= highest:
                raise DataError(f"{at} must hold {needed}, but holds {'null' if label is None else repr(label)}")
            numbers.append(found)
        right = sum(found > 0 for found in numbers)
        if self.loss == "cross_entropy" and right != 1:
            raise DataError(
                f"{at} must mark one right document for the loss cross_entropy, but marks {right}; use list_net, lambda"
                " or binary_cross_entropy"
            )
        return numbers

    def num_valid(self, labels: Tensor) -> Tensor:
        if self.loss == "binary_cross_entropy":
            return (labels >= 0).sum()
        if self.loss == "lambda":
            return _ordered_pairs(labels).sum()
        return torch.tensor(len(labels), device=labels.device)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, summed over documents, rows, or pairs of documents with different labels.

        Scores and relevances are `[batch, documents]`; a relevance is -1 without a document.
        """
        present, targets = labels >= 0, labels.to(logits.dtype)
        if self.loss == "binary_cross_entropy":
            weight = logits.new_full((), self.positive_weight)  # on the device; a copy from the host would wait
            losses = F.binary_cross_entropy_with_logits(
                logits, targets.clamp(min=0), pos_weight=weight, reduction="none"
            )
            return losses.masked_fill(~present, 0.0).sum()
        if self.loss == "lambda":
            return _lambda_loss(logits.masked_fill(~present, _NEVER), targets)
        if self.loss == "list_net":
            # ListNet compares two softmaxes, of relevances and of scores (Cao et al. 2007, ICML), as
            # sentence-transformers does.
            shares = targets.masked_fill(~present, -torch.inf).softmax(1)
            return F.cross_entropy(logits.masked_fill(~present, _NEVER), shares, reduction="sum")
        scaled = logits if self.scale is None else logits.sigmoid() * self.scale
        return F.cross_entropy(scaled.masked_fill(~present, _NEVER), labels.argmax(1), reduction="sum")

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"scores": self._activated(logits), "labels": labels.float()}

    def _activated(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid() if self.folder_activation == "sigmoid" else logits.float()

    def split_metrics(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit) -> dict[str, float]:
        ranked = list(self._ranked(predictions, split).values())
        scores, relevances = (
            [np.array([found[place] for found in of_query.values()]) for of_query in ranked] for place in (0, 1)
        )
        return {name: METRICS[name].compute(scores, relevances) for name in self.metric_names}

    def split_baselines(self, split: EvaluatedSplit) -> dict[str, float]:
        own, rows = self.for_split(split.rows, 0), split.rows
        labels = torch.from_numpy(np.stack(own._labels(rows, self.documents_of(rows), split.where, 0))).float()
        return mean_of_draws(lambda draw: own.split_metrics({"scores": draw, "labels": labels}, split), labels.shape)

    def _ranked(
        self, predictions: Mapping[str, Tensor], split: EvaluatedSplit
    ) -> dict[str, dict[str, tuple[float, float]]]:
        """Return score and relevance of the distinct documents of each query; the highest relevance counts."""
        scores = predictions["scores"]
        alike = scores.flatten()[torch.from_numpy(first_of_equal(split.encoded))].view_as(scores)
        found: dict[str, dict[str, tuple[float, float]]] = {}
        documents = self._documents(split.rows, split.where, 0)
        queries, labels_of = split.rows[self.query_column], predictions["labels"].tolist()
        # scikit-learn refuses NaN, and a model that computes it must not rank a document first.
        rows = zip(queries, documents, alike.nan_to_num(_NEVER).tolist(), labels_of, strict=True)
        for query, texts, numbers, labels in rows:
            of_query = found.setdefault(query, {})
            for text, score, label in zip(texts, numbers, labels, strict=False):
                of_query[text] = (score, max(label, of_query.get(text, (score, label))[1]))
        return found

    def picture(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit | None) -> dict[str, Any] | None:
        """Return the best document beside a relevant one for the first queries."""
        if split is None:
            return None
        shown = []
        for query, documents in list(self._ranked(predictions, split).items())[:ROWS_PICTURED]:
            best = max(documents, key=lambda text: documents[text][0])
            right = max(documents, key=lambda text: documents[text][1])
            rank = 1 + sum(score > documents[right][0] for score, _ in documents.values())
            shown.append({"query": query, "first": best, "relevant": right, "rank of the relevant one": str(rank)})
        return {"texts": shown}

    def without_labels(self) -> RerankerTask:
        return replace(self, labelled=False, metric_names=())

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"scores": self._activated(logits)}

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        """Return the score of the document of each row, or the scores of its documents."""
        documents = self._documents(split.rows, split.where, 0)
        lists = [
            [float(f"{score:.6g}") for score in of_row[: len(texts)]]
            for of_row, texts in zip(answers["scores"].tolist(), documents, strict=True)
        ]
        is_list = len(self.document_columns) > 1 or isinstance(split.rows[0][self.document_columns[0]], list)
        return [{"scores": scores} if is_list else {"score": scores[0]} for scores in lists]

    @property
    def exported(self) -> ExportedFolder:
        return _CrossEncoder(self)

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        num_documents = shape[1] if len(shape) > 2 else 1
        return {}, torch.zeros(shape[0], num_documents, dtype=torch.float64)


@dataclass(frozen=True)
class _CrossEncoder(ExportedFolder):
    """A folder of a cross-encoder of sentence-transformers."""

    task: RerankerTask

    def inputs(self, rows: Dataset) -> dict[str, Any]:
        """Return the pairs of all rows, for CrossEncoder."""
        of_rows = zip(rows[self.task.query_column], self.task.documents_of(rows), strict=True)
        return {"pairs": [[query, document] for query, documents in of_rows for document in documents]}

    def scores(self, outputs: Tensor, rows: Dataset) -> Tensor:
        counts = torch.tensor([len(documents) for documents in self.task.documents_of(rows)])
        scores = torch.zeros(len(counts), self.task.for_split(rows, 0).num_texts)
        scores[torch.arange(scores.shape[1]) < counts[:, None]] = outputs.float()
        return scores

    def files(self, max_length: int, hidden_size: int | None) -> dict[str, Any]:
        """Return the files, by name, that make an exported folder a cross-encoder of sentence-transformers."""
        transformer = "sentence_transformers.base.modules.transformer.Transformer"
        return {
            "modules.json": [{"idx": 0, "name": "0", "path": "", "type": transformer}],
            "sentence_bert_config.json": {
                "transformer_task": "sequence-classification",
                "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
                "module_output_name": "scores",
                "max_seq_length": max_length,
            },
            "config_sentence_transformers.json": {
                "activation_fn": ACTIVATIONS[self.task.folder_activation],
                "default_prompt_name": None,
                "model_type": "CrossEncoder",
                "prompts": {},
            },
        }


def _inside(feature: Any) -> Any:
    return getattr(feature, "feature", None)


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def _ordered_pairs(labels: Tensor) -> Tensor:
    """Return which documents `i` have a higher label than `j`, both present `[batch, documents, documents]`."""
    present = labels >= 0
    return (labels[:, :, None] > labels[:, None, :]) & present[:, :, None] & present[:, None, :]


def _lambda_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return LambdaLoss with the weights NDCG-Loss2++, summed over ordered pairs (Wang et al. 2018, CIKM, eq. 17).

    Args:
        scores: the scores `[batch, documents]`, very low without a document.
        labels: the relevances `[batch, documents]`, -1 without a document.
    """
    scores, order = scores.sort(descending=True, dim=-1)
    labels = labels.gather(1, order)
    pairs, gains = _ordered_pairs(labels), labels.clamp(min=0).exp2() - 1
    ranks = torch.arange(1, labels.shape[1] + 1, device=labels.device, dtype=scores.dtype)
    discounts = (1 + ranks).log2()
    best = (gains.sort(descending=True, dim=-1).values / discounts).sum(-1, keepdim=True)
    gains = gains / best.clamp(min=_LEAST_GAIN)
    apart = (ranks[:, None] - ranks).abs().long()
    inverse = discounts.reciprocal()
    # |1 / D(k) - 1 / D(k + 1)| for ranks that are k apart, with D(1) at place 0; a document is not apart from itself.
    by_distance = (inverse[(apart - 1).clamp(min=0)] - inverse[apart]).abs().fill_diagonal_(0)
    by_rank = (inverse[:, None] - inverse).abs()
    weights = (_MU * by_distance + by_rank) * (gains[:, :, None] - gains[:, None, :]).abs()
    differences = (scores[:, :, None] - scores[:, None, :]).masked_fill(~pairs, 0.0)
    return -(weights * F.logsigmoid(differences)).masked_fill(~pairs, 0.0).sum() / log(2)
