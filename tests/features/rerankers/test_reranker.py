from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from sentence_transformers.cross_encoder import CrossEncoder, losses
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from transformers import T5Config

from trainer.base.errors import DataError, UsageError
from trainer.features.rerankers.section import Reranker
from trainer.tasks.registry import build_task
from trainer.tasks.types import EvaluatedSplit

WHERE = "`rows.jsonl`"
LISTS = [[1.0, 0.0, 0.0, 2.0], [0.0, 3.0], [0.5, 0.5, 0.0]]
BINARY = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0], [0.0, 0.0, 1.0]]


def task_of(**keys):
    return build_task(Reranker(type="reranker", **keys))


class _Known(CrossEncoder):
    """A cross-encoder with given scores, in the order of pairs."""

    def __init__(self, scores):
        torch.nn.Module.__init__(self)
        self.known, self.prompts, self.default_prompt_name = scores, {}, None

    num_labels = 1
    device = torch.device("cpu")

    def preprocess(self, pairs, prompt=None, task=None):
        return {"place": torch.tensor([int(document) for _, document in pairs])}

    def forward(self, features):
        return {"scores": self.known[features["place"]][:, None]}

    def predict(self, pairs, **_):
        return self.known[[int(document) for _, document in pairs]].detach().numpy()


def padded(lists):
    return torch.tensor([[*of_row, *[-1.0] * (4 - len(of_row))] for of_row in lists], dtype=torch.float64)


def scores_of(lists):
    """Return scores `[rows, 4]`, those of the documents alone, and the documents, which name their scores."""
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    known = scores[padded(lists) >= 0]
    numbers = iter(range(len(known)))
    return scores, known, [[str(next(numbers)) for _ in of_row] for of_row in lists]


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "list_net", "lambda"])
def test_losses_of_lists_equal_sentence_transformers(loss):
    lists = BINARY if loss == "binary_cross_entropy" else LISTS
    scores, known, documents = scores_of(lists)
    if loss == "binary_cross_entropy":
        theirs = losses.BinaryCrossEntropyLoss(_Known(known), pos_weight=torch.tensor(3.0))
        flat = [text for of_row in documents for text in of_row]
        expected = theirs([["q"] * len(flat), flat], torch.tensor([label for of_row in lists for label in of_row]))
        task = task_of(label="label", positive_weight=3.0)
    else:
        kind = {"list_net": losses.ListNetLoss, "lambda": losses.LambdaLoss}[loss]
        expected = kind(_Known(known))([["q"] * 3, documents], [torch.tensor(of_row) for of_row in lists])
        task = task_of(label="label", loss=loss)
    labels = padded(lists)
    found = task.loss_sum(scores, labels) / task.num_valid(labels)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    gradients = [torch.autograd.grad(of, scores, retain_graph=True)[0] for of in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scale", [10.0, None])
def test_the_cross_entropy_of_negatives_is_that_of_sentence_transformers(scale):
    scores, known, documents = scores_of([[1.0, 0.0, 0.0, 0.0]] * 3)
    keys = {"scale": scale} if scale else {"scale": None, "activation_fn": None}
    theirs = losses.MultipleNegativesRankingLoss(_Known(known), num_negatives=0, **keys)
    theirs.get_in_batch_negatives = lambda *_: []  # a row has its own negatives only
    columns = [list(column) for column in zip(*documents, strict=True)]
    expected = theirs([["q"] * 3, *columns], None)
    task = task_of(documents=["a", "b", "c", "d"], loss="cross_entropy", scale=scale)
    found = task.loss_sum(scores, padded([[1.0, 0.0, 0.0, 0.0]] * 3)) / 3
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def split_of(scores, queries, documents):
    rows = datasets.Dataset.from_dict({"query": queries, "documents": documents})
    ids = np.unique(scores, return_inverse=True)[1].ravel()
    return EvaluatedSplit(rows, SimpleNamespace(offsets=np.arange(scores.size + 1), tokens={"input_ids": ids}), None)


def test_metrics_equal_sentence_transformers(monkeypatch):
    """Queries and documents repeat, scores are equal, and a query has no relevant document.

    Its order of equal scores is that of numpy's sort; with a stable one, relevant documents are last.
    """
    monkeypatch.setattr(np, "argsort", partial(np.argsort, kind="stable"))
    random = np.random.default_rng(0)
    queries = [f"q{row % 7}" for row in range(20)]
    documents = [[str(random.integers(40)) for _ in range(4)] for _ in queries]
    known = torch.from_numpy(random.integers(0, 9, 40) / 8).float()
    labels = random.integers(0, 2, (20, 4)).astype(float)
    labels[[row for row, query in enumerate(queries) if query == "q3"]] = 0
    metrics = ["ndcg_at_5", "ndcg_at_10", "mrr_at_5", "mrr_at_10", "map"]
    task = task_of(label="label", metrics=metrics, activation="identity")
    scores = torch.stack([known[[int(text) for text in of_row]] for of_row in documents])
    predictions = task.predictions(scores, torch.from_numpy(labels))
    found = task.split_metrics(predictions, split_of(scores.numpy(), queries, documents))
    samples = []
    for query in dict.fromkeys(queries):
        rows = [row for row, name in enumerate(queries) if name == query]
        of_query = [pair for row in rows for pair in zip(documents[row], labels[row], strict=True)]
        right = list(dict.fromkeys(text for text, label in of_query if label))
        others = [text for text in dict.fromkeys(text for text, _ in of_query) if text not in right]
        samples.append({"query": query, "positive": right, "negative": others})
    for k in (5, 10):
        theirs = CrossEncoderRerankingEvaluator(samples, at_k=k, write_csv=False)
        theirs.store_metrics_in_model_card_data = lambda *_: None
        expected = theirs(_Known(known))
        assert found[f"ndcg_at_{k}"] == pytest.approx(expected[f"ndcg@{k}"], abs=1e-12)
        assert found[f"mrr_at_{k}"] == pytest.approx(expected[f"mrr@{k}"], abs=1e-12)
    assert found["map"] == pytest.approx(expected["map"], abs=1e-12)
    assert 0.2 < found["map"] < 0.9


def test_rows_become_pairs(tokenizer):
    rows = datasets.Dataset.from_dict({"query": ["p", "q"], "documents": [["x", "y"], ["z"]], "label": [[0, 1], [2]]})
    task = task_of(label="label", loss="list_net").for_split(rows, 0)
    found = task.encode(rows, tokenizer, 16, WHERE, 0)
    assert [len(of_row) for of_row in found["input_ids"]] == [2, 2]
    assert found["input_ids"][0][1] == tokenizer("p", "y")["input_ids"]
    assert len(found["input_ids"][1][1]) == 1
    assert np.stack(found["labels"]).tolist() == [[0, 1], [2, -1]]
    scores = {"scores": torch.tensor([[0.5, 0.25], [1, 0]])}
    assert task.without_labels().readable(scores, EvaluatedSplit(rows, None, None)) == [
        {"scores": [0.5, 0.25]},
        {"scores": [1]},
    ]


def encoded(task, rows, tokenizer):
    task.check_columns(rows.features, WHERE)
    return task.for_split(rows, 0).encode(rows, tokenizer, 16, WHERE, 0)


@pytest.mark.parametrize(
    ("keys", "columns", "problem"),
    [
        ({}, {"documents": ["x"]}, "`task.label` must name a column of relevances"),
        ({"label": "label", "loss": "lambda"}, {"documents": ["x"], "label": [1]}, "for the loss lambda, but"),
        ({"label": "label"}, {"documents": [["x"]], "label": [[1, 0]]}, "each of the 1 documents, but has 2"),
        ({"label": "label"}, {"documents": ["x"], "label": [2]}, "must hold a number from 0 to 1, but holds 2"),
        ({"label": "label", "loss": "lambda"}, {"documents": [["x"]], "label": [[-1]]}, "of at least 0, but holds -1"),
        ({"label": "label", "loss": "cross_entropy"}, {"documents": [["x", "y"]], "label": [[1, 1]]}, "but marks 2"),
        ({}, {"documents": [["x", " "]]}, "document 2 of column `documents`, row 1 of .* is empty"),
        ({}, {"documents": [[]]}, "row 1 of .* has no document"),
        ({}, {"documents": [1]}, "strings or of lists of strings, but column `documents` .* holds int64"),
        ({}, {"query": [None], "documents": [["x"]]}, "column `query`, row 1 of .* is null"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tokenizer, keys, columns, problem):
    kinds = {"documents": datasets.List(datasets.Value("string"))} if columns["documents"] == [[]] else {}
    rows = datasets.Dataset.from_dict({"query": ["p"], **columns})
    for name, kind in kinds.items():
        rows = rows.cast_column(name, kind)
    rows = rows.cast_column("query", datasets.Value("string"))
    with pytest.raises(DataError, match=problem):
        encoded(task_of(**keys), rows, tokenizer)


def test_an_encoder_with_a_decoder_is_refused():
    with pytest.raises(UsageError, match=r"reranker, which needs an encoder or a decoder, but .* type t5"):
        task_of().for_configuration(T5Config())
