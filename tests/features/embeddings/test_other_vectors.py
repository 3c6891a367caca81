"""Sparse embeddings, vectors for each token, and the scores of a teacher, beside sentence-transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from sentence_transformers.multi_vector_encoder import losses as multi_vector
from sentence_transformers.multi_vector_encoder.scoring import colbert_scores
from sentence_transformers.sentence_transformer import losses as dense
from sentence_transformers.sparse_encoder import losses as sparse
from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import SpladeRegularizerWeightSchedulerCallback
from sentence_transformers.sparse_encoder.modules import SpladePooling
from sentence_transformers.util import pairwise_cos_sim
from sklearn.metrics import ndcg_score
from torch import Tensor
from torch.nn import functional as F

from tests.features.embeddings.test_embedding import WHERE, gradient_of, split_of
from trainer.base.errors import DataError, UsageError
from trainer.features.embeddings import multi_vector as ours
from trainer.features.embeddings.metrics import NDCG
from trainer.features.embeddings.section import Embedding, MultiVectorEmbedding, SparseEmbedding
from trainer.parallel.microbatch import POOLED
from trainer.tasks.registry import build_task

SECTIONS = {
    "embedding": Embedding,
    "sparse_embedding": SparseEmbedding,
    "multi_vector_embedding": MultiVectorEmbedding,
}
TAUGHT = torch.tensor([[3.0, -1.0, 0.5], [0.2, 0.1, 0.4], [5.0, 4.0, -2.0], [1.0, 2.0, 3.0]], dtype=torch.float64)


def task_of(kind: str = "sparse_embedding", **keys: Any) -> Any:
    return build_task(SECTIONS[kind](type=kind, **{"texts": ["a", "b", "c", "d"], **keys}))


def test_weights_of_0_only_end_a_run():
    """No gradient is left, so more steps would be lost."""
    split = split_of(**{name: [f"{name}0", f"{name}1"] for name in "abcd"})
    weights = torch.zeros(2, 4, 7)
    with pytest.raises(UsageError, match=r"`task.query_flops` 0.5 .* must leave weights above 0.*lower these keys"):
        task_of(query_flops=0.5).split_metrics({"embeddings": weights}, split)
    weights[0, 0, 3] = 1.0
    assert task_of().split_metrics({"embeddings": weights}, split)["query_active_tokens"] == 0.5


def random_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def assert_same(found: Tensor, expected: Tensor, inputs: Tensor) -> None:
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss, inputs, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_weights_of_tokens_are_those_of_splade():
    logits = random_of(4, 5, 7)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    inputs = {"input_ids": torch.ones(2, 2, 5), "attention_mask": mask.view(2, 2, 5)}
    pooled = SpladePooling()({"token_embeddings": logits, "attention_mask": mask})["sentence_embedding"]
    found = task_of().scores(SimpleNamespace(logits=logits), inputs)
    assert found.shape == (2, 2, 7)
    torch.testing.assert_close(found.flatten(0, 1), pooled)
    factor = torch.rand(4, 7)
    torch.testing.assert_close(
        gradient_of((found.flatten(0, 1) * factor).sum(), logits), gradient_of((pooled * factor).sum(), logits)
    )


@pytest.mark.parametrize("loss", ["multiple_negatives", "margin_mse", "kl_divergence"])
def test_the_loss_of_sparse_embeddings(loss: str):
    values = random_of(4, 4, 9)
    task = task_of(
        loss=loss, temperature=0.5, query_flops=0.3, document_flops=0.2, score=None if loss[:2] == "mu" else "score"
    )
    inner = {
        "multiple_negatives": lambda: sparse.SparseMultipleNegativesRankingLoss(None, scale=2.0),
        "margin_mse": lambda: sparse.SparseMarginMSELoss(None, similarity_fct=lambda a, b: 2 * (a * b).sum(-1)),
        "kl_divergence": lambda: sparse.SparseDistillKLDivLoss(None, student_temperature=0.5, teacher_temperature=1.0),
    }[loss]()
    splade = sparse.SpladeLoss(None, inner, document_regularizer_weight=0.2, query_regularizer_weight=0.3)
    embeddings = values.relu()
    columns, labels = list(embeddings.unbind(1)), TAUGHT.float()
    base = inner.compute_loss_from_embeddings(columns, None if loss[:2] == "mu" else labels)
    flops = splade.document_regularizer.compute_loss_from_embeddings
    expected = (
        base
        + 0.2 * flops(torch.cat(columns[1:]))
        + 0.3 * splade.query_regularizer.compute_loss_from_embeddings(columns[0])
    )
    assert_same(task.joint_losses(embeddings, TAUGHT).mean(), expected, values)
    alone = task.for_evaluation().joint_losses(embeddings, TAUGHT).mean()
    torch.testing.assert_close(alone, base)


@pytest.mark.parametrize("growth", ["quadratic", "linear"])
def test_the_regulariser_grows_as_in_sentence_transformers(growth: str):
    splade = sparse.SpladeLoss(None, sparse.SparseMultipleNegativesRankingLoss(None), 0.2, 0.3)
    callback = SpladeRegularizerWeightSchedulerCallback(splade, growth, warmup_ratio=0.5)
    callback.on_train_begin(None, SimpleNamespace(max_steps=16), None)
    task = task_of(query_flops=0.3, document_flops=0.2, flops_warmup=8, flops_growth=growth)
    for step in (0, 1, 5, 8, 12):
        callback.on_step_begin(None, SimpleNamespace(global_step=step), None)
        assert task.at_step(step).flops_share * 0.3 == pytest.approx(splade.query_regularizer_weight)
    assert task_of().at_step(0).flops_share == 1


class _Known(torch.nn.Module):
    """A model of sentence-transformers with given outputs."""

    def forward(self, features: dict[str, Any], task: str | None = None) -> dict[str, Any]:
        return features


def vectors_of_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Return values, the vectors `[rows, texts, tokens, size]` with zeros, and the mask of tokens."""
    values = random_of(4, 4, 6, 3)
    lengths = torch.tensor([[6, 3, 2, 5], [6, 1, 6, 4], [6, 2, 2, 2], [6, 4, 3, 6]])
    mask = torch.arange(6) < lengths[..., None]
    mask[0, 3, 2] = False  # punctuation
    return values, F.normalize(values, dim=-1) * mask[..., None], mask


@pytest.mark.parametrize("products", [2**26, 1])
@pytest.mark.parametrize("loss", ["multiple_negatives", "margin_mse", "kl_divergence"])
def test_the_loss_of_vectors_for_each_token(monkeypatch: pytest.MonkeyPatch, loss: str, products: int):
    monkeypatch.setattr(ours, "_MOST_PRODUCTS", products)
    values, vectors, mask = vectors_of_tokens()
    score = None if loss == "multiple_negatives" else "score"
    task = task_of("multi_vector_embedding", loss=loss, dimensions=3, score=score)
    theirs: Any = {
        "multiple_negatives": multi_vector.MultiVectorMultipleNegativesRankingLoss,
        "margin_mse": multi_vector.MultiVectorMarginMSELoss,
        "kl_divergence": multi_vector.MultiVectorDistillKLDivLoss,
    }[loss](_Known())
    features = [
        {"token_embeddings": vectors[:, text], "attention_mask": mask[:, text].long(), "task": kind}
        for text, kind in enumerate(("query", *["document"] * 3))
    ]
    expected = theirs(features, TAUGHT.float())
    assert_same(task.joint_losses(vectors.flatten(2), TAUGHT).mean(), expected, values)
    assert task.rows_depend == (loss == "multiple_negatives")


def test_max_sim_of_all_pairs():
    _, vectors, mask = vectors_of_tokens()
    task = task_of("multi_vector_embedding", dimensions=3)
    query, document = vectors[:, 0], vectors[:, 1]
    expected = colbert_scores(query, document[:, None], mask[:, 0], mask[:, 1:2])
    torch.testing.assert_close(task.similarities(query, document), expected)
    with torch.no_grad():
        torch.testing.assert_close(task.similarities(query, document), expected)


@pytest.mark.parametrize("loss", ["margin_mse", "kl_divergence"])
def test_dense_embeddings_learn_from_a_teacher(loss: str):
    values = random_of(4, 4, 9)
    task = task_of("embedding", loss=loss, score="score", temperature=0.2, **_divisor(loss, 0.7))
    theirs: Any = {
        "margin_mse": lambda: dense.MarginMSELoss(None, similarity_fct=lambda a, b: pairwise_cos_sim(a, b) / 0.2),
        "kl_divergence": lambda: dense.DistillKLDivLoss(
            None, similarity_fct=pairwise_cos_sim, student_temperature=0.2, teacher_temperature=0.7
        ),
    }[loss]()
    expected = theirs.compute_loss_from_embeddings(list(values.unbind(1)), TAUGHT.float())
    assert_same(task.loss_sum(values, TAUGHT) / 4, expected, values)
    assert not task.rows_depend


def _divisor(loss: str, value: float) -> dict[str, float]:
    return {"teacher_temperature": value} if loss == "kl_divergence" else {}


def test_scores_of_a_teacher_are_read_and_refused(tokenizer: Any):
    texts = {name: ["word1 word2", "word3"] for name in "abc"}
    task = task_of("embedding", texts=["a", "b", "c"], loss="margin_mse", score="score")
    rows = datasets.Dataset.from_dict({**texts, "score": [[1, 2.5], [0, -1]]})
    assert np.stack(task.encode(rows, tokenizer, 16, WHERE, 0)["labels"]).tolist() == [[1, 2.5], [0, -1]]
    for value, message in (
        ([1.0], r"`score`, row 2 of `rows.jsonl` must be a list with a score for each of the 2 documents, but has 1"),
        ([1.0, None], r"row 2 .* must hold finite numbers, but holds null"),
    ):
        wrong = datasets.Dataset.from_dict({**texts, "score": [[1.0, 2.0], value]})
        with pytest.raises(DataError, match=message):
            task.encode(wrong, tokenizer, 16, WHERE, 0)


def test_queries_are_filled_and_punctuation_is_skipped(tokenizer: Any):
    rows = datasets.Dataset.from_dict({"a": ["the file"], "b": ["the file."]})
    task = task_of("multi_vector_embedding", texts=["a", "b"], query_length=8)
    (query, document), (kept, of_document) = (
        task.encode(rows, tokenizer, 16, WHERE, 0)[name][0] for name in ("input_ids", POOLED)
    )
    assert query[-4:] == [tokenizer.mask_token_id] * 4
    assert len(query) == len(kept) == sum(kept) == 8
    assert of_document == [1, 1, 1, 0, 1]
    assert document[3] == tokenizer.convert_tokens_to_ids(".")
    shorter = task_of("multi_vector_embedding", texts=["a", "b"], query_length=8, query_expansion=False)
    assert len(shorter.encode(rows, tokenizer, 16, WHERE, 0)["input_ids"][0][0]) == 4
    with pytest.raises(UsageError, match=r"`task.query_length` must be at most `data.max_length` 6, but is 8"):
        task.encode(rows, tokenizer, 6, WHERE, 0)


def test_ndcg_is_that_of_scikit_learn():
    relevant = np.array([[0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1], [0] * 12 + [1], [1] * 13])
    scores = -np.arange(13.0)[None].repeat(3, 0)
    queries, places = relevant.nonzero()
    assert NDCG.compute(places + 1, queries) == pytest.approx(ndcg_score(relevant, scores, k=10))


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("sparse_embedding", {"loss": "margin_mse"}, "is missing, but `task.loss` margin_mse needs it"),
        ("multi_vector_embedding", {"score": "s"}, "reads no score; remove it, or use the loss margin_mse or kl_div"),
        ("embedding", {"loss": "kl_divergence", "score": "s"}, "must name a query and two or more documents"),
        ("sparse_embedding", {"flops_growth": "linear"}, "applies to `task.flops_warmup`, but that is 0"),
        ("embedding", {"teacher_temperature": 2.0}, "applies to the loss kl_divergence, but `task.loss` is multiple"),
    ],
)
def test_contradictions(kind: str, keys: dict[str, Any], message: str):
    section = SECTIONS[kind](type=kind, texts=["a", "b"], **keys)
    assert message in " ".join(str(one) for one in section.contradictions())
