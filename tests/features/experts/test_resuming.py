"""Checkpoints and folders of mixtures of experts: resumed under another layout, and exported as the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.families import EXPERTS
from tests.helpers.ranks import RankPools
from tests.helpers.training import Curve, parallel_keys, tiny_recipe, tiny_training, weights_of
from tests.helpers.turns import once
from tests.parity.cases import FEW_ROWS, assert_same_curve, largest_difference
from tests.parity.test_resuming import DONE_STEPS, MORE_STEPS, all_steps, first_steps, last_steps
from trainer.recipe.schema import Recipe


def recipe_of(strategy: str = "ddp", ranks: int = 1, expert: int = 1, model_type: str = "mixtral") -> Recipe:
    config = {"model_type": model_type, **EXPERTS[model_type], "initializer_range": 0.2}
    return tiny_recipe(
        task={"type": "causal_lm", "text": "text"},
        model={"config": config, "tokenizer": "none"},
        training={"micro_batch_size": 12 // ranks},
        parallel=parallel_keys(strategy, ranks) | {"expert": expert},
    )


def of_one_process() -> Curve:
    return once("resuming of experts", lambda: all_steps(recipe_of()))


LAYOUTS: dict[str, tuple[Any, ...]] = {
    "one process": (), "experts": ("ddp", 2, 2), "shards": ("fsdp", 2, 1), "experts and shards": ("fsdp", 4, 2),
    "experts and replicas": ("ddp", 4, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("experts", "one process"),
        pytest.param("one process", "experts and shards", marks=pytest.mark.slow),
        pytest.param("experts and shards", "experts and replicas", marks=pytest.mark.slow),
        pytest.param("experts", "shards", marks=pytest.mark.nightly),
        pytest.param("shards", "experts and replicas", marks=pytest.mark.nightly),
    ],
)
def test_a_run_resumes_under_another_layout(ranks: RankPools, tmp_path: Path, saved: str, resumed: str):
    def run(function: Any, layout: str) -> Any:
        recipe = recipe_of(*LAYOUTS[layout])
        number = LAYOUTS[layout][1] if LAYOUTS[layout] else 1
        return ranks(number).run(function, recipe, tmp_path)

    run(first_steps, saved)
    expected = of_one_process()
    for curve in run(last_steps, resumed):
        rest = Curve(expected.losses[DONE_STEPS:], expected.grad_norms[DONE_STEPS:])
        assert len(curve.losses) == MORE_STEPS
        assert_same_curve(curve, rest)
        assert largest_difference(curve, expected) < 1e-5


def train_and_export(recipe: Recipe, folder: Path) -> dict[str, torch.Tensor]:
    with tiny_training(recipe, num_rows=FEW_ROWS) as training:
        training.steps(2)
        training.engine.export(folder)
        return weights_of(training.engine, training.mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "number"), [pytest.param("ddp", 2, marks=pytest.mark.nightly), ("fsdp", 4)])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_an_exported_folder_is_the_whole_model(
    ranks: RankPools, tmp_path: Path, model_type: str, strategy: str, number: int
):
    trained = ranks(number).run(train_and_export, recipe_of(strategy, number, 2, model_type), tmp_path)[0]
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = dict(model.named_parameters())
    assert weights.keys() == trained.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in trained.items())
