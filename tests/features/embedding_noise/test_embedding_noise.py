"""NEFTune's noise: its law, and that of transformers, whose rows have the length of the padded batch."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from tests.helpers.training import TINY_BERT, TINY_DECODERS, TINY_TASKS, tiny_recipe, tiny_training, train_tiny
from trainer.base.errors import RecipeError
from trainer.features.embedding_noise.noise import add_noise
from trainer.models.place import PlacedModel
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.recipe.reading.loading import load_recipe

ALPHA, WIDTH, POSITIONS = 5.0, 512, 40
MASK = (torch.arange(POSITIONS) < torch.tensor([[POSITIONS], [10]])).long()


class Model(nn.Module):
    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, WIDTH)
        nn.init.zeros_(self.embedding.weight)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding


def noise_of(rows: list[int], step: int = 0, mask: torch.Tensor | None = MASK) -> torch.Tensor:
    model, keys = Model(), DropoutKeys(1)
    add_noise(PlacedModel(model, dropout_keys=keys), ALPHA)
    ids = torch.zeros(len(rows), POSITIONS, dtype=torch.long)
    assert not model.eval().embedding(ids).any()
    with torch.no_grad(), keys.use(MicrobatchKey(step, torch.tensor(rows), mask=mask)):
        found: torch.Tensor = model.train().embedding(ids)
    return found


def test_the_noise_of_rows_without_padding_has_the_law_of_transformers():
    found = noise_of([0, 1], mask=None)
    hook = SimpleNamespace(training=True, neftune_noise_alpha=ALPHA)
    expected = neftune_post_forward_hook(hook, None, torch.zeros(2, POSITIONS, WIDTH))
    assert found.abs().max() == pytest.approx(ALPHA / (POSITIONS * WIDTH) ** 0.5, rel=1e-3)
    torch.testing.assert_close(found.std(), expected.std(), rtol=0.02, atol=0)
    assert abs(found.mean()) < 4 * found.std() / found.numel() ** 0.5
    quantiles = torch.linspace(0.05, 0.95, 7)
    close = {"rtol": 0.05, "atol": 1e-3}
    torch.testing.assert_close(found.flatten().quantile(quantiles), expected.flatten().quantile(quantiles), **close)


def test_a_row_has_the_scale_of_its_own_length_and_its_own_noise():
    both = noise_of([4, 7])
    assert both[1].std() / both[0].std() == pytest.approx(2, rel=0.02)  # the square root of 40 / 10 tokens
    assert torch.equal(noise_of([7], mask=MASK[1:])[0], both[1])
    assert not torch.equal(noise_of([7], step=1, mask=MASK[1:])[0], both[1])
    assert not torch.equal(noise_of([5], mask=MASK[1:])[0], both[1])


def test_it_is_drawn_in_training_only_and_is_part_of_the_loss():
    losses = {}
    for alpha in (None, 5.0):
        tiny = TINY_TASKS["causal_lm"]
        with tiny_training(tiny_recipe(task=tiny.keys, model={**tiny.model, "neftune_alpha": alpha})) as training:
            (batch,) = islice(training.loader, 1)
            evaluated = training.engine.eval_step(batch.microbatches[0])
            losses[alpha] = evaluated.loss_sum, training.engine.train_step(batch).loss
    assert losses[None][0] == losses[5.0][0]
    assert losses[None][1] != losses[5.0][1]


def test_other_tasks_are_refused():
    with pytest.raises(RecipeError, match=r"`model.neftune_alpha` applies to causal language models, but `task.type`"):
        load_recipe("bert_sample", ["model.neftune_alpha=5"])


@pytest.mark.parametrize("config", [{**TINY_BERT, "is_decoder": True}, TINY_DECODERS["gpt2"]], ids=["bert", "gpt2"])
def test_it_is_the_same_without_padding(config: dict[str, Any]):
    losses = []
    for padding_free in (False, True):
        model = {"config": config, "neftune_alpha": 5.0}
        data = {"padding_free": padding_free, "group_by_length": False}
        keys = {"task": TINY_TASKS["causal_lm"].keys, "data": data, "training": {"max_steps": 2}}
        losses.append(train_tiny(tiny_recipe(model=model, **keys), num_rows=24).losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
