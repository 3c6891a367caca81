"""Losses of sentence-transformers: the parameters that its classes write, and the values that they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.cross_encoder import CrossEncoder
from sentence_transformers.cross_encoder import losses as cross_losses
from sentence_transformers.sentence_transformer import losses

from trainer.base.errors import RecipeError
from trainer.features.embeddings.section import Embedding
from trainer.tasks.registry import build_task
from trainer.tools.convert.convert import Conversion, convert
from trainer.tools.convert.draft import Outcome
from trainer.tools.convert.sources import Tool

Write = Callable[..., Path]
ROWS = 7


def of(write: Write, loss: str, parameters: object = None, tool: Tool = Tool.SENTENCE_TRANSFORMER) -> Conversion:
    keys = {"output_dir": "x", "per_device_train_batch_size": 8, "loss": loss}
    return convert([write(keys | ({} if parameters is None else {"loss_parameters": parameters}))], tool, 1)


class _Embedded(torch.nn.Module):
    """A model that returns the embeddings that it gets."""

    def get_embedding_dimension(self) -> int:
        return 8

    def __getitem__(self, _: int) -> _Embedded:
        return self

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": features["embedding"]}


MODEL: Any = _Embedded()
RANKING = losses.MultipleNegativesRankingLoss(MODEL, scale=8.0)
OF_CACHE = {"mini_batch_size": 2, "mini_batch_num_tokens": None, "show_progress_bar": False}
KINDS = [
    ("MultipleNegativesRankingLoss", RANKING, {}),
    ("CachedMultipleNegativesRankingLoss", RANKING, OF_CACHE),  # it has the value of the loss without a cache
    ("CosineSimilarityLoss", losses.CosineSimilarityLoss(MODEL), {}),
    ("CoSENTLoss", losses.CoSENTLoss(MODEL, scale=8.0), {}),
    ("AnglELoss", losses.AnglELoss(MODEL, scale=8.0), {}),
    ("MatryoshkaLoss", losses.MatryoshkaLoss(MODEL, losses.CoSENTLoss(MODEL), [8, 4], [1, 0.5]), {}),
]


@pytest.mark.parametrize(("name", "theirs", "further"), KINDS, ids=[kind[0] for kind in KINDS])
def test_a_loss_computes_the_same_value(write: Write, name: str, theirs: Any, further: dict[str, Any]):
    found = of(write, name, theirs.get_config_dict() | further)
    keys = found.recipe["task"]
    has_scores = keys["loss"] != "multiple_negatives"
    assert ("score" in keys) == has_scores
    filled = {"texts": ["a", "b"]} | ({"score": "score", "metrics": ["spearman"]} if has_scores else {})
    task: Any = build_task(Embedding.model_validate(keys | filled))
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(ROWS, 2, 8, generator=generator)
    scores = torch.rand(ROWS, generator=generator)
    features = [{"embedding": texts} for texts in embeddings.unbind(1)]
    expected = theirs(features, scores if has_scores else None)
    loss = (
        task.joint_losses(embeddings, scores).mean() if task.rows_depend else task.loss_sum(embeddings, scores) / ROWS
    )
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("loss", "parameters", "words"),
    [
        ("TripletLoss", None, "losses with a margin are not trained; MultipleNegativesRankingLoss reads the same"),
        ("losses.OnlineContrastiveLoss", None, "losses with a margin are not trained"),
        ("GISTEmbedLoss", None, "there is no guide model"),
        ("MyLoss", None, "losses are MultipleNegativesRankingLoss, Cached"),
        ("MultipleNegativesRankingLoss", {"similarity_fct": "dot_score"}, "similarity_fct is dot_score there, and cos"),
        ("MultipleNegativesRankingLoss", {"hardness_strength": 5.0}, "hardness_strength is 5.0 there, and 0 here"),
        (
            "CosineSimilarityLoss",
            {"loss_fct": "torch.nn.modules.loss.L1Loss"},
            "loss_fct is .* there, and MSELoss here",
        ),
        ("CoSENTLoss", {"margin": 1}, "margin is 1 there, and not a parameter here"),
        ("MatryoshkaLoss", None, "needs loss_parameters with `loss` and `matryoshka_dims`"),
        ("MatryoshkaLoss", {"loss": "CoSENTLoss", "matryoshka_dims": [4], "n_dims_per_step": 1}, "losses of all dim"),
        ("MatryoshkaLoss", {"loss": "TripletLoss", "matryoshka_dims": [4]}, "losses with a margin"),
        ("CosineSimilarityLoss", [1], "must be an object, as in the model card"),
    ],
)
def test_other_losses_are_refused_with_a_reason(write: Write, loss: str, parameters: Any, words: str):
    with pytest.raises(RecipeError, match=words):
        of(write, loss, parameters)


class _CrossEncoder(CrossEncoder):
    """A model that has nothing but the number of its labels."""

    num_labels = 1

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


def test_losses_of_rerankers(write: Write):
    tool, model = Tool.CROSS_ENCODER, _CrossEncoder()
    binary = cross_losses.BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(3.0)).get_config_dict()
    task = of(write, "BinaryCrossEntropyLoss", binary, tool).recipe["task"]
    assert (task["loss"], task["positive_weight"]) == ("binary_cross_entropy", 3.0)
    ranking = cross_losses.MultipleNegativesRankingLoss(model, num_negatives=0).get_config_dict()
    task = of(write, "MultipleNegativesRankingLoss", ranking, tool).recipe["task"]
    assert (task["loss"], task["scale"]) == ("cross_entropy", 10.0)
    with pytest.raises(RecipeError, match="num_negatives is 4 there, and 0 here"):
        of(write, "MultipleNegativesRankingLoss", None, tool)
    for kind, name in ((cross_losses.ListNetLoss, "list_net"), (cross_losses.LambdaLoss, "lambda")):
        assert of(write, kind.__name__, kind(model).get_config_dict(), tool).recipe["task"]["loss"] == name
    scheme = cross_losses.LambdaLoss(model, weighting_scheme=cross_losses.NDCGLoss1Scheme()).get_config_dict()
    with pytest.raises(RecipeError, match=r"weighting_scheme is .*NDCGLoss1Scheme there"):
        of(write, "LambdaLoss", scheme, tool)
    with pytest.raises(RecipeError, match=r"use `task\.type` sequence_classification"):
        of(write, "CrossEntropyLoss", None, tool)


def test_negatives_of_other_ranks_are_a_difference(write: Write):
    found = of(write, "MultipleNegativesRankingLoss")
    assert "negatives are the texts of all ranks" in next(
        line.text for line in found.lines if line.item.name == "loss" and line.outcome is Outcome.DIFFERS
    )
    found = of(write, "MultipleNegativesRankingLoss", {"gather_across_devices": True})
    assert not [line for line in found.lines if line.item.name == "loss" and line.outcome is Outcome.DIFFERS]
