from __future__ import annotations

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from scipy import stats
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn import functional as F
from transformers import BertConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, ModernBertConfig, XLNetConfig

from trainer.base.errors import DataError, UsageError
from trainer.features.embeddings import embedding, retrieval
from trainer.features.embeddings.names import POOLINGS
from trainer.features.embeddings.section import Embedding
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.registry import build_task
from trainer.tasks.types import EvaluatedSplit
from trainer.tools.plan.simulated_rank import shapes_only

WHERE = "`rows.jsonl`"
SCORED = {"texts": ["a", "b"], "score": "score", "metrics": ["spearman"]}


def task_of(**keys):
    return build_task(Embedding(type="embedding", **{"texts": ["a", "b"], **keys}))


def embeddings_of(num_rows, num_texts=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_texts, 8, generator=generator).requires_grad_()


def gradient_of(loss, embeddings):
    return torch.autograd.grad(loss, embeddings)[0]


@pytest.mark.parametrize("at_once", [512, 3])
@pytest.mark.parametrize("num_texts", [2, 4])
def test_multiple_negatives_against_sentence_transformers(monkeypatch, num_texts, at_once):
    monkeypatch.setattr(embedding, "_ROWS_AT_ONCE", at_once)
    embeddings = embeddings_of(10, num_texts)
    task = task_of(texts=list("abcd")[:num_texts], temperature=0.1)
    theirs = losses.MultipleNegativesRankingLoss(None, scale=10.0)
    expected = theirs.compute_loss_from_embeddings(list(embeddings.unbind(1)), None)
    loss = task.joint_losses(embeddings, torch.zeros(10)).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient_of(loss, embeddings), gradient_of(expected, embeddings))


@pytest.mark.parametrize("at_once", [512, 2])
def test_duplicates_are_no_negatives(monkeypatch, tokenizer, at_once):
    """Rows 0 and 1 have one positive, rows 2 and 3 one anchor; the hard negative of row 4 is the anchor of row 0."""
    monkeypatch.setattr(embedding, "_ROWS_AT_ONCE", at_once)
    columns = {"a": list("pqrrt"), "b": list("xxyzw"), "c": list("klmnp")}
    rows, keys = datasets.Dataset.from_dict(columns), {"texts": ["a", "b", "c"], "temperature": 0.5}
    task, embeddings = task_of(**keys, mask_duplicates=True), embeddings_of(5, 3)
    numbers = torch.from_numpy(np.stack(task.encode(rows, tokenizer, 16, WHERE, 0)["labels"])).double()
    unit = F.normalize(embeddings, dim=-1)
    logits = unit[:, 0] @ torch.cat([unit[:, 1], unit[:, 2]]).T / 0.5
    for anchor, other in ((0, 1), (1, 0), (2, 3), (3, 2), (0, 9)):  # positives are 0 to 4, hard negatives 5 to 9
        logits[anchor, other] = -torch.inf
    expected = F.cross_entropy(logits, torch.arange(5), reduction="none")
    found = task.joint_losses(embeddings, numbers)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient_of(found.sum(), embeddings), gradient_of(expected.sum(), embeddings))
    predictions = task.predictions(embeddings.detach(), numbers)
    assert task.split_metrics(predictions, split_of(range(15), **columns))["loss"] == pytest.approx(
        expected.mean().item()
    )
    assert not torch.allclose(task_of(**keys).joint_losses(embeddings, torch.zeros(5)), found)


@pytest.mark.parametrize("labels", [[0.2, 1.0, 0.2, 0.6, 0.0, 1.0, 0.4], [1.0] * 7])
def test_cosent_against_sentence_transformers(labels):
    embeddings, scores = embeddings_of(7), torch.tensor(labels)
    theirs = losses.CoSENTLoss(None, scale=20.0)
    expected = theirs.compute_loss_from_embeddings(list(embeddings.unbind(1)), scores)
    found = task_of(**SCORED, loss="cosent").joint_losses(embeddings, scores)
    assert len(found) == 7
    torch.testing.assert_close(found, expected.expand(7))
    torch.testing.assert_close(gradient_of(found.mean(), embeddings), gradient_of(expected, embeddings))


@pytest.mark.parametrize("loss", ["cosine", "cosent", "angle"])
def test_a_plan_needs_no_values_of_scores(loss):
    task = task_of(**SCORED, loss=loss)
    with shapes_only(cuda=True):
        assert task.joint_losses(torch.empty(5, 2, 8), torch.empty(5)).shape == (5,)


def test_cosine_is_a_squared_error_of_each_row():
    task, embeddings = task_of(**SCORED, loss="cosine"), embeddings_of(5)
    cosines, scores = F.cosine_similarity(embeddings[:, 0], embeddings[:, 1], dim=-1), torch.rand(5)
    assert not task.rows_depend
    torch.testing.assert_close(task.loss_sum(embeddings, scores), ((cosines - scores) ** 2).sum())


def test_poolings_equal_sentence_transformers():
    states = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": torch.ones(1, 2, 3), "attention_mask": torch.tensor([[[1, 1, 0], [1, 1, 1]]])}
    output, texts = SimpleNamespace(last_hidden_state=states), inputs["attention_mask"][0]
    for pooling, names in POOLINGS.items():
        features = {"token_embeddings": states, "attention_mask": texts}
        expected = Pooling(4, names.name)(features)["sentence_embedding"]
        scores = task_of(pooling=pooling, normalize=False).scores(output, inputs)
        torch.testing.assert_close(scores, expected[None], atol=1e-6, rtol=1e-6)
        unit = task_of(pooling=pooling).scores(output, inputs)
        torch.testing.assert_close(unit.norm(dim=-1), torch.ones(1, 2))


class _Known(torch.nn.Module):
    """A model of sentence-transformers with given embeddings, one for each feature."""

    def forward(self, features):
        return {"sentence_embedding": features["embedding"]}

    def get_embedding_dimension(self):
        return 8

    def __getitem__(self, _):
        return self


@pytest.mark.parametrize("loss", ["multiple_negatives", "cosent", "angle"])
def test_nested_embeddings_against_sentence_transformers(loss):
    """The sizes are odd too, for which the angle pads with a zero."""
    embeddings, scores = (
        embeddings_of(7).detach().double().requires_grad_(),
        torch.tensor([0.2, 1.0, 0.2, 0.6, 0.0, 1.0, 0.4]),
    )
    kinds = {
        "multiple_negatives": losses.MultipleNegativesRankingLoss,
        "cosent": losses.CoSENTLoss,
        "angle": losses.AnglELoss,
    }
    model = _Known()
    theirs = losses.MatryoshkaLoss(model, kinds[loss](model, scale=20.0), [8, 5, 2], [1, 0.5, 2])
    labels = None if loss == "multiple_negatives" else scores
    expected = theirs([{"embedding": texts} for texts in embeddings.unbind(1)], labels)
    keys = {} if labels is None else SCORED
    task = task_of(loss=loss, dimensions=[2, 8, 5], dimension_weights=[2, 1, 0.5], **keys)
    found = task.joint_losses(embeddings, scores).mean()
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
    torch.testing.assert_close(gradient_of(found, embeddings), gradient_of(expected, embeddings))


def test_metrics_are_computed_for_each_size():
    task = task_of(dimensions=[4, 2], metrics=["mrr"])
    columns, embeddings = {"a": list("pqr"), "b": list("xyz")}, embeddings_of(3).detach()
    found = task.split_metrics({"embeddings": embeddings}, split_of(**columns))
    for size in (4, 2):
        nested = task_of(metrics=["mrr"]).split_metrics({"embeddings": embeddings[..., :size]}, split_of(**columns))
        assert found[f"mrr/{size}"] == nested["mrr"]
    with pytest.raises(UsageError, match=r"at most the 3 values of an embedding, but is \[4, 2\]"):
        task.for_configuration(BertConfig(hidden_size=3))


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (GPT2Config(), True),
        (LlamaConfig(), True),
        (BertConfig(is_decoder=True), True),
        (BertConfig(), False),
        (ModernBertConfig(), False),
        (XLNetConfig(), False),
        (Gemma3TextConfig(use_bidirectional_attention=True), False),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_the_first_token_of_a_decoder_is_refused(config, causal):
    if causal:
        with pytest.raises(UsageError, match=r'`task.pooling` is "cls", .* sees no other token.*"last" or "mean"'):
            task_of(pooling="cls").for_configuration(config)
    else:
        task_of(pooling="cls").for_configuration(config)
    task_of(pooling="last").for_configuration(config)


def split_of(tokens=None, **columns):
    """Return a split; `tokens` are the ids of texts in the order of rows, by default a different one for each text."""
    rows = datasets.Dataset.from_dict(columns)
    texts = [row[name] for row in rows for name in columns if isinstance(row[name], str)]
    ids = np.unique(texts, return_inverse=True)[1] if tokens is None else np.array(tokens)
    encoded = SimpleNamespace(offsets=np.arange(len(ids) + 1), tokens={"input_ids": ids})
    return EvaluatedSplit(rows, encoded, None, WHERE)


def test_retrieval_is_over_the_whole_split(monkeypatch):
    monkeypatch.setattr(retrieval, "_PAIRS_AT_ONCE", 16)
    embeddings = embeddings_of(50, 3).detach()
    embeddings[:, 1] += embeddings[:, 0]
    unit = F.normalize(embeddings, dim=-1).numpy()
    candidates = np.concatenate([unit[:, 1], unit[:, 2]])
    order = (-unit[:, 0] @ candidates.T).argsort(axis=1)
    ranks = 1 + np.array([int(np.where(order[row] == row)[0][0]) for row in range(50)])
    task = task_of(texts=["a", "b", "c"], metrics=["recall_at_1", "recall_at_5", "recall_at_10", "mrr"])
    split = split_of(**{name: [f"{name}{row}" for row in range(50)] for name in "abc"})
    found = task.split_metrics(task.predictions(embeddings, torch.empty(50, 0)), split)
    assert found["mrr"] == pytest.approx((1 / ranks).mean())
    assert [found[f"recall_at_{k}"] for k in (1, 5, 10)] == [(ranks <= k).mean() for k in (1, 5, 10)]
    assert 0.2 < found["recall_at_1"] < 1
    expected = F.cross_entropy(torch.tensor(unit[:, 0] @ candidates.T).double() / 0.05, torch.arange(50))
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_perfect_model_finds_all_answers_though_texts_repeat():
    """Each hard negative is the right answer of another row, and the last row repeats a query with another answer."""
    a, b, c = ["q0", "q1", "q2", "q0"], ["x", "y", "z", "z"], ["y", "z", "x", "y"]
    places = torch.tensor([["xyz".index(text) for text in of_row] for of_row in zip(b, c, strict=True)])
    texts = torch.eye(3)[places]
    anchors = texts[:, 0] + torch.tensor([[0.0, 0, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]])  # q0 means x and z
    task = task_of(texts=["a", "b", "c"], metrics=["recall_at_1", "recall_at_5", "mrr"])
    predictions = {"embeddings": torch.cat([anchors[:, None], texts], 1)}
    found = task.split_metrics(predictions, split_of(a=a, b=b, c=c))
    assert found["recall_at_1"] == pytest.approx((1 / 2 + 1 + 1) / 3)  # one of the two answers of q0 is first
    assert found["recall_at_5"] == found["mrr"] == 1


def test_rounding_does_not_decide_ties():
    """The texts of rows 0 and 1 have equal tokens; rounding differs, as in batches with other padding."""
    task = task_of(metrics=["recall_at_1", "mrr"])
    split = split_of([0, 1, 0, 1, 2, 3, 4, 5], a=["q", "Q", "r", "s"], b=["x", "X", "y", "z"])
    embeddings = embeddings_of(4).detach()
    embeddings[:, 1] = embeddings[:, 0]
    found = [
        task.split_metrics({"embeddings": embeddings + shift * 1e-7}, split)
        for shift in embeddings_of(20, 2 * 4).detach().view(20, 4, 2, 8)
    ]
    assert {(one["recall_at_1"], one["mrr"]) for one in found} == {(0.75, 0.875)}  # "X" is before "x" for "q" and "Q"


def test_equal_embeddings_of_all_texts_find_by_chance():
    task, columns = task_of(metrics=["recall_at_1", "mrr"]), {"a": [f"q{row}" for row in range(20)]}
    split = split_of(**columns, b=[f"{row:02}" for row in range(20)])
    noise = embeddings_of(20).detach() * 1e-7
    found = task.split_metrics({"embeddings": torch.ones(20, 2, 8) + noise}, split)
    assert found["recall_at_1"] == 1 / 20
    assert found["mrr"] == pytest.approx(np.mean(1 / np.arange(1, 21)))


def test_undefined_embeddings_find_nothing():
    split = split_of(a=list("pqr"), b=list("xyz"))
    found = task_of(metrics=["recall_at_1"]).split_metrics({"embeddings": torch.full((3, 2, 8), torch.nan)}, split)
    assert found["recall_at_1"] == 0


def test_the_preview_shows_the_nearest_and_the_right_text():
    task = task_of(texts=["a", "b", "c"], metrics=["mrr"])
    split = split_of(**{name: [f"{name}{row}" for row in range(7)] for name in "abc"})
    embeddings = torch.eye(21).view(7, 3, 21)
    embeddings[:, 0] = embeddings[:, 1]  # the right one is nearest,
    embeddings[2, 0] = embeddings[6, 2] + 0.5 * embeddings[2, 1]  # but a negative of another row in row 2
    pictured = task.picture({"embeddings": embeddings}, split)["texts"]
    assert [row["nearest"] for row in pictured] == ["b0", "b1", "c6", "b3", "b4"]
    assert [row["right: b"] for row in pictured] == ["b0", "b1", "b2", "b3", "b4"]
    assert [row["rank of the right one"] for row in pictured] == ["1", "1", "2", "1", "1"]
    assert task.picture({"embeddings": embeddings}, None) is None


def test_scores_are_pictured_beside_similarities():
    split = split_of(a=["x", "y"], b=["z", "w"], score=[0.5, 1.0], other=[1, 2])
    embeddings = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [1.0, 0.0]]])
    assert task_of(**SCORED, loss="cosent").picture({"embeddings": embeddings}, split)["texts"] == [
        {"a": "x", "b": "z", "score": 0.5, "similarity": "0.000"},
        {"a": "y", "b": "w", "score": 1.0, "similarity": "1.000"},
    ]


def test_spearman_of_cosines_and_scores():
    task, split = task_of(**SCORED, loss="cosent"), split_of(a=list("pqr"), b=list("xqr"))
    embeddings = torch.eye(3)[torch.tensor([[0, 1], [0, 0], [1, 1]])]
    embeddings[0, 1, 0] = 0.5
    found = task.split_metrics(task.predictions(embeddings, torch.tensor([0.1, 0.9, 0.8])), split)
    assert found["spearman"] == pytest.approx(np.sqrt(3) / 2)


def test_equal_pairs_are_ties_of_spearman():
    """Rows 0 to 3 are pairs of equal texts, and rows 4 and 5 one pair twice; scipy gets the similarities by hand."""
    task, scores = task_of(**SCORED, loss="cosent"), torch.tensor([0.9, 0.8, 1.0, 0.7, 0.2, 0.6, 0.1])
    split = split_of(a=list("pqrsttu"), b=list("pqrsvvw"))
    embeddings = embeddings_of(7).detach()
    embeddings[:4, 1] = embeddings[:4, 0]
    embeddings[5] = embeddings[4]
    similarity = F.cosine_similarity(embeddings[:, 0], embeddings[:, 1], dim=-1)
    expected = stats.spearmanr([1, 1, 1, 1, *similarity[[4, 4, 6]].tolist()], scores).statistic
    for seed in range(5):
        noisy = embeddings + embeddings_of(7, seed=seed + 1).detach() * 1e-7
        found = task.split_metrics(task.predictions(noisy, scores), split)
        assert found["spearman"] == pytest.approx(expected, abs=1e-12)


class TestRows:
    def rows(self, **columns):
        return datasets.Dataset.from_dict({"a": ["one two", "three"], "b": ["two", "one three two"], **columns})

    def test_each_text_is_tokenised_by_itself(self, tokenizer):
        rows = self.rows()
        features = task_of().resolve(rows, WHERE).encode(rows, tokenizer, 4, WHERE, 0)
        expected = [[tokenizer(row[name], truncation=True, max_length=4)["input_ids"] for name in "ab"] for row in rows]
        assert features["input_ids"] == expected
        assert features["cut"] == [False, True]
        assert "labels" not in features

    @pytest.mark.parametrize(
        ("columns", "problem"),
        [
            ({"b": ["two", None]}, "column `b`, row 9 of `rows.jsonl` is null"),
            ({"a": [" \n", "three"]}, "column `a`, row 8 of `rows.jsonl` is empty"),
            (
                {"score": [1.0, 1.5]},
                "column `score`, row 9 .* must be a number from -1 to 1, but is 1.5",
            ),
            ({"score": [float("nan"), 1.0]}, "column `score`, row 8 .* but is nan"),
        ],
    )
    def test_unreadable_values_are_named_with_their_row(self, tokenizer, columns, problem):
        rows = self.rows(**{"score": [0.5, 1.0], **columns})
        task = task_of(**SCORED, loss="cosine").resolve(rows, WHERE)
        with pytest.raises(DataError, match=problem):
            task.encode(rows, tokenizer, 16, WHERE, 7)

    def test_cosent_takes_scores_of_any_range(self, tokenizer):
        rows = self.rows(score=[3.5, 5])
        assert task_of(**SCORED, loss="cosent").encode(rows, tokenizer, 16, WHERE, 0)["labels"] == [3.5, 5.0]

    def test_a_missing_column_and_one_of_numbers(self):
        with pytest.raises(DataError, match=r"`task.texts` names the column `c`"):
            task_of(texts=["a", "c"]).resolve(self.rows(), WHERE)
        with pytest.raises(DataError, match=r"`task.score` names the column `score`"):
            task_of(**SCORED, loss="cosent").resolve(self.rows(), WHERE)
        with pytest.raises(DataError, match=r"`task.texts` must name columns of strings, but column `b` .* int64"):
            task_of().resolve(self.rows(b=[1, 2]), WHERE)

    def test_answers_are_embeddings_of_the_first_column(self, tokenizer):
        task, rows = task_of().without_labels(), datasets.Dataset.from_dict({"a": ["one", "two"]})
        task.check_columns(rows.features, WHERE)
        assert len(task.encode(rows, tokenizer, 8, WHERE, 0)["input_ids"][0]) == 1
        found = task.answers(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), {})
        assert task.readable(found, None) == [{"embedding": [1.0, 2.0]}, {"embedding": [3.0, 4.0]}]


def test_ranks_of_several_right_texts_of_a_query():
    """Query 0 finds its three right texts at 1, 4 and 7, query 1 its only one at 2."""
    ranks, queries = np.array([7, 1, 4, 2]), np.array([0, 0, 0, 1])
    found = {name: METRICS[name].compute(ranks, queries) for name in ("recall_at_1", "recall_at_5", "mrr")}
    assert found == pytest.approx({"recall_at_1": (1 / 3 + 0) / 2, "recall_at_5": (2 / 3 + 1) / 2, "mrr": 0.75})
