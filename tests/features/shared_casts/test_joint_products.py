"""One product for queries, keys and values, beside the products of three layers."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.families import CONFIGS
from tests.helpers.joint_products import joined
from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, TINY_DECODERS, Curve, tiny_recipe, tiny_training, train_tiny
from tests.parity.cases import TOLERANCES, Case, assert_same_curve
from tests.parity.test_graphs import train as train_graphs
from trainer.features.shared_casts import joint_products
from trainer.features.shared_casts.joint_products import AttentionWatch
from trainer.models.attention import JOINT_STATES
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.plan.simulated_step import plan_step

BF16 = TOLERANCES["bf16"]
LLAMA = {"config": TINY_DECODERS["llama"], "tokenizer": "none"}
CAUSAL = {"task": {"type": "causal_lm"}, "model": LLAMA}
LORA = {"adapter": {"type": "lora", "rank": 4, "alpha": 8}}


def train(recipe: Recipe, is_joined: bool = True, steps: int = 4) -> tuple[Curve, list[tuple[int, bool]]]:
    """Train some steps; return the curve, and the layers of each joint product and whether attention gets it whole."""
    with joined(is_joined) as found:
        curve = train_tiny(recipe, num_steps=steps)
    return curve, [(len(joint._layers), joint._is_asked) for joint in found]


class Attention(nn.Module):
    """Attention with four heads, whose queries have a norm or not."""

    def __init__(self, key_heads: int, has_norm: bool, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, heads * 6, bias) for heads in (4, key_heads, key_heads))
        self.norm = nn.LayerNorm(6) if has_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        states = [layer(x).view(*x.shape[:2], -1, 6).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        query, key, value = self.norm(states[0]), states[1], states[2]
        if joint := getattr(self, JOINT_STATES, None):
            whole = joint.whole(query, key, value)
            if whole is not None:
                parts = whole.split([self.q.out_features, self.k.out_features, self.v.out_features], -1)
                query, key, value = (part.view(*x.shape[:2], -1, 6).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("key_heads", "has_norm"), [(4, False), (2, False), (2, True)])
def test_outputs_and_gradients_are_those_of_three_layers(key_heads: int, has_norm: bool, bias: bool):
    torch.manual_seed(0)
    attention = Attention(key_heads, has_norm, bias).double()
    alone = copy.deepcopy(attention)
    x = torch.randn(3, 7, 24, dtype=torch.float64, requires_grad=True)
    watch = AttentionWatch(attention, [attention.q, attention.k, attention.v])
    attention(x)
    (joint,) = watch.joints(lambda weight: True)
    assert joint._is_asked == (not has_norm)
    for name, parts in joint.parameters():
        joint.attributes[name] = torch.cat([*parts])
    found, expected = attention(x), alone(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    of_found = torch.autograd.grad(found.square().sum(), [x, *attention.parameters()])
    of_expected = torch.autograd.grad(expected.square().sum(), [x, *alone.parameters()])
    torch.testing.assert_close(of_found, of_expected, rtol=0, atol=1e-12)
    assert joint._input is joint._whole is None
    assert joint._parts == ()


def test_states_that_passed_other_operations_are_no_parts():
    attention = Attention(4, False, True)
    watch = AttentionWatch(attention, [attention.q, attention.k, attention.v])
    attention(torch.randn(2, 5, 24))
    (joint,) = watch.joints(lambda weight: True)
    for name, parts in joint.parameters():
        joint.attributes[name] = torch.cat([*parts])
    x = torch.randn(2, 5, 24)
    states = [layer(x).view(2, 5, 4, 6).transpose(1, 2) for layer in (attention.q, attention.k, attention.v)]
    assert joint.whole(states[0] * 2, *states[1:]) is None
    states = [layer(x).view(2, 5, 4, 6).transpose(1, 2) for layer in (attention.q, attention.k, attention.v)]
    assert joint.whole(states[1], states[0], states[2]) is None
    other = attention.k(torch.ones_like(x))  # an input of its own
    torch.testing.assert_close(other, F.linear(torch.ones_like(x), attention.k.weight, attention.k.bias))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [(3, True)] * 2),
        ({"task": {"type": "seq2seq_lm"}}, [(3, True)] * 4 + [(2, False)] * 2),
        (CAUSAL, [(3, False)] * 2),  # rotated queries and keys
        ({"activation_checkpointing": "full"}, [(3, True)] * 2),
        ({"activation_checkpointing": "selective"}, [(3, True)] * 2),
        ({"training": {"micro_batch_size": 5}}, [(3, True)] * 2),
        ({"data": {"padding_free": True}}, [(3, True)] * 2),
        ({"model": {"config": {"model_type": "albert", **CONFIGS["albert"]}, "tokenizer": "none"}}, [(3, True)]),
        pytest.param({"compile": True}, [(3, True)] * 2, marks=pytest.mark.slow),
        pytest.param(CAUSAL | {"compile": True}, [(3, False)] * 2, marks=pytest.mark.nightly),
        ({"model": {"freeze": ["bert.encoder.layer.0"], "config": TINY_BERT}}, [(3, True)]),
        (CAUSAL | {"model": LLAMA | LORA}, []),
        ({"precision": "fp16"}, []),
        ({"precision": "fp32"}, []),
        ({"weights": "bf16_compensated"}, []),
        ({"training": {"layout_invariant_dropout": False}}, []),
    ],
    ids=str,
)
def test_a_training_is_that_of_three_products(
    sections: dict[str, Any], expected: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainer.models.compiled.BACKEND", "aot_eager")
    recipe = tiny_recipe(**{"precision": "bf16", **sections})
    curve, found = train(recipe)
    assert sorted(found, reverse=True) == sorted(expected, reverse=True)
    alone, none = train(recipe, is_joined=False)
    assert none == []
    assert_same_curve(curve, alone, BF16)
    if not expected:
        assert curve.losses == alone.losses
    torch._dynamo.reset()


def test_layers_of_one_kind_share_a_compiled_graph(monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr("trainer.models.compiled.BACKEND", lambda graph, inputs: made.append(graph) or graph)
    recipe = tiny_recipe(precision="bf16", compile=True, model={"config": {**TINY_BERT, "num_hidden_layers": 3}})
    _, found = train(recipe, steps=3)
    assert found == [(3, True)] * 3
    assert len(made) == 1
    torch._dynamo.reset()


@cache
def of_one_process() -> Curve:
    return train(Case("ddp", 1, False, "bf16", "none", 0.1).recipe())[0]


@pytest.mark.parametrize(
    ("ranks_of", "layout"),
    [(2, {}), (2, {"tensor": 2}), pytest.param(2, {"stages": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_layouts_train_as_one_process(ranks: RankPools, ranks_of: int, layout: dict[str, int]):
    recipe = Case("ddp", ranks_of, False, "bf16", "none", 0.1, **layout).recipe()
    for curve, found in ranks(ranks_of).run(train, recipe):
        assert found == [(3, True)] * (1 if "stages" in layout else 2)
        assert_same_curve(curve, of_one_process(), BF16)


def train_late(recipe: Recipe) -> tuple[Curve, list[tuple[int, bool]], list[bool]]:
    """Train with gradients of weights behind the messages of tensor ranks; the last result tells of each use of one."""
    from tests.features.late_weights.test_late_weights import as_on_gpus
    from trainer.features.late_weights import products

    used: list[bool] = []
    gradient = products._Use.gradient

    def noted(use: products._Use) -> Tensor | None:
        used.append((found := gradient(use)) is not None)
        return found

    with as_on_gpus(), mock.patch.object(products._Use, "gradient", noted):
        return *train(recipe), used


@pytest.mark.skipif(find_spec("trainer.features.late_weights") is None, reason="the feature is deleted")
def test_the_gradient_of_a_joint_weight_is_computed_behind_a_message(ranks: RankPools):
    recipe = Case("ddp", 2, False, "bf16", "none", 0.1, tensor=2).recipe()
    for curve, found, used in ranks(2).run(train_late, recipe):
        assert found == [(3, True)] * 2
        assert_same_curve(curve, of_one_process(), BF16)
        # Two layers have six products each in the first step; in three more, one stands for three.
        assert (used.count(True), used.count(False)) == (2 * 6 + 3 * 2 * 4, 3 * 2 * 2)


def test_graphs_read_the_joint_copies():
    recipe = tiny_recipe(
        precision="bf16", model={"dropout": 0.1}, data={"pad_to": 32}, training={"micro_batch_size": 4}
    )
    with joined() as found:
        graphed, captures, replays = train_graphs(recipe, graphed=True)
        assert (len(found), captures > 0, replays > 0) == (2, True, True)
        eager, *_ = train_graphs(recipe, graphed=False)
    assert graphed.losses == eager.losses
    assert graphed.grad_norms == eager.grad_norms


def test_a_plan_counts_one_product():
    """Each layer has two products less forward, two of inputs and two of weights backward, and two sums of each."""
    plan, found = plan_run(tiny_recipe(precision="bf16"), 1), []
    for none in (True, False):
        with mock.patch.object(joint_products, "watches", return_value=()) if none else nullcontext():
            work = plan_step(plan, 0, 16).totals.work
        found.append({name: sum(of.number for kind, of in work.items() if kind.name == name) for name in COUNTED})
    apart, joint = found
    assert {name: apart[name] - joint[name] for name in COUNTED} == COUNTED


COUNTED = {"addmm": 4, "mm": 8, "sum": 4, "add": 4, "cat": 0, "_to_copy": 0, "_foreach_copy_": 0}
"""The operations that two layers save."""


def test_parameters_keep_their_names_and_an_evaluation_reads_them():
    with joined() as found, tiny_training(tiny_recipe(precision="bf16")) as training:
        names = [name for name, _ in training.model.named_parameters()]
        batches = iter(training.loader)
        training.engine.train_step(next(batches))
        assert len(found) == 2
        assert [name for name, _ in training.model.named_parameters()] == names
        assert all(isinstance(layer, nn.Linear) for joint in found for layer in joint._layers)
        batch = next(batches).microbatches[0]
        before = training.engine.eval_step(batch).loss_sum
        with torch.no_grad():
            found[0]._layers[0].weight.zero_()
        assert training.engine.eval_step(batch).loss_sum != before
