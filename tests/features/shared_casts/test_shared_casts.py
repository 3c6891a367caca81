"""Weights and inputs of matrix products that are rounded once, beside those that autocast rounds for each product."""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.families import CONFIGS
from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, TINY_DECODERS, Curve, build_tiny, tiny_recipe, train_tiny
from tests.parity.cases import Case
from trainer.engine.ddp import GradientPlaces
from trainer.features.shared_casts import casts as shared
from trainer.features.shared_casts.inputs import share_rounded_inputs
from trainer.features.shared_casts.weights import StepWeights
from trainer.parallel.rounded_inputs import after_products
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.plan.ledger import Ledger
from trainer.tools.plan.simulated_step import plan_step

SEVERAL = {"micro_batch_size": 5}
ALBERT = {"config": {"model_type": "albert", **CONFIGS["albert"]}, "tokenizer": "none"}
LLAMA = {"config": {**TINY_DECODERS["llama"], "tie_word_embeddings": True}, "tokenizer": "none"}
CHUNKS = {"config": {**TINY_BERT, "chunk_size_feed_forward": 16}}
LORA = {"adapter": {"type": "lora", "rank": 4, "alpha": 8}}


def built(by_autocast: bool, **sections: Any) -> Any:
    """Build a training; by autocast, products do not share inputs, and each weight and gradient is cast alone."""
    if not by_autocast:
        return build_tiny(tiny_recipe(**sections))
    with (
        mock.patch.object(shared, "share_rounded_inputs", list),
        mock.patch("trainer.engine.rounded_weights.rounded_weights") as none,
    ):
        none.return_value = None
        return build_tiny(tiny_recipe(**sections))


def trained(by_autocast: bool, **sections: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    training = built(by_autocast, **sections)
    assert (training.engine._forward._rounded is None) == by_autocast
    results = [training.engine.train_step(batch) for batch in islice(training.loader, 3)]
    evaluated = training.engine.eval_step(next(iter(training.loader)).microbatches[0])
    return [*results, evaluated.loss_sum], training.engine.held()


def assert_as_autocast(**sections: Any) -> None:
    (results, weights), (of_autocast, others) = trained(False, **sections), trained(True, **sections)
    assert results == of_autocast
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"precision": "fp16"},
        {"task": {"type": "masked_lm"}},  # the decoder is tied to the embedding
        {"task": {"type": "seq2seq_lm"}},
        {"task": {"type": "embedding"}},  # with several microbatches, two passes
        {"task": {"type": "causal_lm"}, "model": LLAMA | LORA},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"model": ALBERT},  # one layer runs several times
        {"weights": "bf16_compensated"},
        {"weights": "bf16_compensated", "model": ALBERT},
        {"weights": "bf16_compensated", "activation_checkpointing": "full"},
        # a row of the second step is the first to have two chunks
        {"weights": "bf16_compensated", "model": CHUNKS, "data": {"pad_to": 16}, "training": {"micro_batch_size": 3}},
        {"weights": "bf16_compensated", "task": {"type": "causal_lm"}, "model": LLAMA},
    ],
    ids=str,
)
def test_numbers_equal_autocast(sections):
    assert_as_autocast(**{"precision": "bf16", "training": SEVERAL, **sections})


def test_copies_of_frozen_weights_stay_until_the_weights_change():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
    layer = model[0]
    rounded = StepWeights([model], torch.bfloat16)
    seen = []
    for _ in range(2):
        with rounded.use():
            seen.append(layer.weight)
            assert model[1].weight.dtype == torch.float32
        assert layer.weight.dtype == torch.float32
    assert seen[0] is seen[1]
    layer.load_state_dict({"weight": torch.full((4, 4), 3.0), "bias": torch.zeros(4)})
    with rounded.use():
        assert torch.equal(layer.weight, torch.full((4, 4), 3.0, dtype=torch.bfloat16))


def test_an_error_in_a_pass_leaves_the_weights():
    layer = nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), StepWeights([layer], torch.bfloat16).use():
        raise ZeroDivisionError
    assert isinstance(layer.weight, nn.Parameter)


class _Casts(TorchDispatchMode):
    """Counts the operations that write tensors of some shapes in another type, by name."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._shapes = shapes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = function is torch.ops.aten._to_copy.default and args[0].shape in self._shapes
        if is_copy or function is torch.ops.aten._foreach_copy_.default:
            self.found[function.name()] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [12, 5])
@pytest.mark.parametrize(("weights", "others"), [("fp32", 1), ("bf16_compensated", 6)])
def test_a_step_casts_weights_once(size: int, weights: str, others: int):
    """However many microbatches; gradients once for each group in each microbatch. An update of bf16 has six casts."""
    training = build_tiny(tiny_recipe(precision="bf16", training={"micro_batch_size": size}, weights=weights))
    batches = iter(training.loader)
    training.engine.train_step(next(batches))  # learns which weights have one use
    batch = next(batches)
    with _Casts({p.shape for p in training.model.parameters() if p.dim() == 2}) as casts:
        training.engine.train_step(batch)
    groups = 4  # two layers, the pooler and the classifier
    assert casts.found == {"aten::_foreach_copy_": others + groups * len(batch.microbatches)}


def test_products_share_a_rounded_input():
    """Each layer has four products of two inputs, and each product a gradient, which autocast returns to fp32."""
    found = []
    for by_autocast in (False, True):
        training = built(by_autocast, precision="bf16", training={"micro_batch_size": 12})
        batches = iter(training.loader)
        training.engine.train_step(next(batches))  # learns the number of products
        batch = next(batches)
        (microbatch,) = batch.microbatches
        shape = torch.Size((*microbatch.inputs["input_ids"].shape, training.model.config.hidden_size))
        with _Casts({shape}) as casts:
            training.engine.train_step(batch)
        found.append(casts.found["aten::_to_copy"])
    assert found[1] - found[0] == 2 * (2 + 4)


def test_products_of_sharded_layers_share_a_rounded_input():
    """FSDP gives a layer new tensors, and gathers its weights in 16 bits; its products still share."""
    plan = plan_run(tiny_recipe(precision="bf16", parallel={"strategy": "fsdp"}), 2)
    found = []
    for share in (share_rounded_inputs, list):
        with mock.patch.object(shared, "share_rounded_inputs", share):
            work = plan_step(plan, 0, 12).totals.work
        found.append(sum(amount.number for kind, amount in work.items() if kind.name == "_to_copy"))
    assert found[1] - found[0] == 2 * (2 + 4)


def test_an_input_is_freed_after_its_products():
    layer, after = nn.Linear(4, 4), nn.Linear(4, 4)
    share_rounded_inputs([after])
    x = layer(torch.ones(2, 4))
    freed = weakref.ref(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = after(x).sum() + after_products(x).sum()
    del x
    loss.backward()
    del loss
    assert freed() is None


def test_a_product_without_gradients_takes_none_from_other_users():
    layer, after = nn.Linear(4, 4), nn.Linear(4, 4)
    share_rounded_inputs([after])
    x = layer(torch.ones(2, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        after(x)
    after_products(x).sum().backward()
    assert layer.weight.grad is not None


def train_ddp(recipe: Recipe, in_place: bool) -> tuple[Curve, int]:
    """Train five steps, and return the curve and the number of copies."""
    place_of = GradientPlaces.of if in_place else lambda self, parameter: None
    with mock.patch.object(GradientPlaces, "of", place_of), Ledger() as ledger:
        curve = train_tiny(recipe, num_steps=5)
    return curve, sum(of.number for kind, of in ledger.totals.work.items() if kind.name == "copy_")


@pytest.mark.parametrize(("accumulates", "task"), [(False, {}), (True, {}), (False, {"task": "masked_lm"})])
def test_ddp_finds_gradients_in_its_buckets(ranks: RankPools, accumulates: bool, task: dict[str, Any]):
    """From the third step on, no gradient of a product is copied, and no digit changes."""
    recipe = Case("ddp", 2, accumulates, "bf16", "none", 0.1, **task).recipe()
    found, copies = ranks(2).run(train_ddp, recipe, True)[0]
    expected, all_copies = ranks(2).run(train_ddp, recipe, False)[0]
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name
    # Weights and biases of two layers, and of the pooler and the classifier, or of the head with a tied decoder.
    assert all_copies - copies == 3 * (2 * 2 * 6 + (3 if task else 4))
