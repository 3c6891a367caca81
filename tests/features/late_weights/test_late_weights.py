"""Gradients of weights behind messages: equal bit for bit, in which order, and where they stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BART, TINY_BERT, TINY_DECODERS, TINY_T5, TINY_TASKS, tiny_recipe, train_tiny
from tests.tools.plan.measured import recipe_of
from trainer.features.late_weights import products
from trainer.models import compiled
from trainer.models.place import PlacedModel
from trainer.parallel import communication
from trainer.parallel.device_traits import DeviceTraits
from trainer.parallel.tensor.linear import SHARED_INPUT, ColumnParallelLinear, RowParallelLinear, SharedInput
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.plan.hardware import LIKELY, parse_devices
from trainer.tools.plan.pipeline_plan import plan_steps
from trainer.tools.plan.timing import COMMUNICATION, COMPUTE, collective_seconds, link_of, step_time
from trainer.tools.plan.work import BACKWARD, MATMUL

BERT = {**TINY_BERT, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48}
DECODING = {"task": TINY_TASKS["causal_lm"].keys}
LARGE = {
    "model_type": "bert",
    "vocab_size": 1009,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


@contextmanager
def as_on_gpus(least_bytes: int = 0) -> Iterator[None]:
    """Let ranks on CPUs compute late gradients, as ranks on GPUs do, for messages of so many bytes."""
    traits = patch.object(products, "traits_of", lambda _: DeviceTraits(is_cpu=False))
    with traits, patch.object(products, "_LEAST_BYTES", least_bytes):
        yield


def both(recipe: Recipe) -> tuple[Any, Any, list[bool]]:
    """Train with and without late gradients; the last result tells of each use whether it had a gradient."""
    used: list[bool] = []
    gradient = products._Use.gradient

    def noted(use: products._Use) -> Tensor | None:
        found = gradient(use)
        used.append(found is not None)
        return found

    with as_on_gpus(), patch.object(products._Use, "gradient", noted):
        late = train_tiny(recipe)
    return late, train_tiny(recipe), used


BF16 = {"precision": "bf16", "training": {"micro_batch_size": 2}}
LAYOUTS = {
    "bert": (2, BF16, {}),
    "bert sequence": (2, {}, {"sequence": True}),
    "gpt2 sequence bf16": (2, {**DECODING, **BF16, "model": {"config": TINY_DECODERS["gpt2"]}}, {"sequence": True}),
    "llama": (2, {**DECODING, "model": {"config": TINY_DECODERS["llama"]}}, {}),
    "three ranks, 7 positions": (3, {"model": {"config": BERT}, "data": {"max_length": 7}}, {"sequence": True}),
    "fsdp sequence bf16": (4, BF16, {"strategy": "fsdp", "sequence": True}),
    "context": (4, {}, {"context": 2, "sequence": True}),
    "stages": (4, {}, {"pipeline": {"stages": 2}, "sequence": True}),
    "zero2 bf16": (2, BF16, {"strategy": "zero2"}),
    "t5": (2, {"model": {"config": TINY_T5}}, {"sequence": True}),
    "bart": (2, {"model": {"config": TINY_BART}}, {}),
    "lora": (2, {"model": {"adapter": {"type": "lora", "rank": 2}}}, {"sequence": True}),
}
QUICK = ("bert", "bert sequence", "gpt2 sequence bf16", "three ranks, 7 positions")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_numbers_are_those_without_it_bit_for_bit(ranks: RankPools, name: str):
    number, keys, layout = LAYOUTS[name]
    training = {"max_steps": 3, **keys.get("training", {})}
    parallel = {"strategy": "ddp", "tensor": 3 if number == 3 else 2, **layout}
    recipe = tiny_recipe(**{**keys, "training": training, "parallel": parallel})
    for late, plain, used in ranks(number).run(both, recipe):
        assert any(used) == (name != "lora")  # frozen weights have no gradients
        assert late.losses == plain.losses
        assert late.grad_norms == plain.grad_norms
        assert late.digests == plain.digests


def both_compiled(recipe: Recipe) -> tuple[Any, Any, list[bool]]:
    with patch.object(compiled, "BACKEND", "aot_eager"):
        return both(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_compiled_layers_wait_for_sums_at_once(ranks: RankPools, sequence: bool):
    parallel = {"strategy": "ddp", "tensor": 2, "sequence": sequence}
    model = {"config": {**TINY_BERT, "num_hidden_layers": 1}}
    recipe = tiny_recipe(compile=True, model=model, training={"max_steps": 2}, parallel=parallel)
    for late, plain, used in ranks(2).run(both_compiled, recipe):
        assert used == [True] * 6  # the weights of the layer in the first step, which is not compiled
        assert late.losses == plain.losses
        assert late.digests == plain.digests


class Layer(nn.Module):
    """Two column-parallel layers that share an input, and the row-parallel one behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        group = dist.group.WORLD if dist.is_initialized() else None
        self.one, self.other = (ColumnParallelLinear(nn.Linear(4, 8), group) for _ in range(2))
        self.down = RowParallelLinear(nn.Linear(8, 4), group)
        vars(self)[SHARED_INPUT] = SharedInput(group)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        x = vars(self)[SHARED_INPUT](x)
        columns = sum(self.one(x) for _ in range(times))
        return self.down(columns * self.other(x)) if times else self.down(self.other(x))


def late_layer(recipe: Recipe | None = None) -> Layer:
    layer = Layer()
    products.hide_sums(PlacedModel(layer, {}), recipe or tiny_recipe(parallel={"tensor": 2}))
    return layer


class Products(TorchDispatchMode):
    """Notes the products, by the shape of their result."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._events.append(tuple(result.shape))
        return result


def events_of_a_backward_pass() -> list[Any]:
    events: list[Any] = []
    send = communication._send

    def noted(collective: Any, *tensors: Tensor, group: Any, begun: Any) -> None:
        events.append("send")
        send(collective, *tensors, group=group, begun=begun)
        if begun:
            wait = begun.pop()
            begun.append(lambda: (wait(), events.append("wait")))

    with as_on_gpus(), patch.object(communication, "_send", noted):
        x = torch.ones(3, 2, 4, requires_grad=True)
        loss = late_layer()(x * 1.0).sum()
        with Products(events):
            loss.backward()
    return events


def test_products_of_weights_run_between_the_message_and_the_wait(ranks: RankPools):
    of_x, of_weights = [(6, 4)] * 3, [(4, 4), (4, 4), (4, 4)]
    expected = [*of_x, "send", *of_weights, "wait"]
    assert ranks(2).run(events_of_a_backward_pass) == [expected] * 2


@pytest.mark.parametrize("times", [0, 1, 2], ids=["a layer without a use", "once", "a layer twice"])
def test_each_use_of_a_layer_counts_once(times: int):
    with as_on_gpus():
        late, plain = late_layer(), Layer()
    for _ in range(2):
        for layer in (late, plain):
            with as_on_gpus():
                layer(torch.ones(3, 4, requires_grad=True) * 2.0, times).sum().backward()
    for (name, found), expected in zip(late.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None) == (times == 0 and name.startswith("one"))
        if found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-6, atol=0)


def test_a_pass_without_a_backward_pass_leaves_nothing_to_the_next_one():
    with as_on_gpus():
        layer = late_layer()
        layer(torch.ones(3, 4, requires_grad=True) * 2.0, 0)  # `one` is prepared, but not used
        with torch.no_grad():
            layer(torch.ones(3, 4))
        layer.one.weight = nn.Parameter(torch.ones_like(layer.one.weight))
        loss = layer(torch.ones(3, 4)).sum()  # an input without a gradient has no message
        loss.backward()
    assert layer.one.weight.grad is not None


def test_a_second_backward_pass_is_refused():
    with as_on_gpus():
        loss = late_layer()(torch.ones(3, 4, requires_grad=True) * 2.0).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(AssertionError, match="one backward pass"):
            loss.backward()


@pytest.mark.parametrize(
    "keys",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"parallel": {"strategy": "zero3"}},
        {"parallel": {"pipeline": {"stages": 2, "schedule": "zero_bubble"}}},
    ],
    ids=["full", "selective", "zero3", "zero bubble"],
)
def test_where_it_stays_off(keys: dict[str, Any]):
    recipe = tiny_recipe(**{**keys, "parallel": {"tensor": 2, **keys.get("parallel", {})}})
    with as_on_gpus():
        assert "prepared" not in vars(vars(late_layer(recipe))[SHARED_INPUT])
        assert "prepared" in vars(vars(late_layer())[SHARED_INPUT])
    assert "prepared" not in vars(vars(late_layer())[SHARED_INPUT])  # on a CPU


def test_a_short_message_is_waited_for_at_once():
    with as_on_gpus(least_bytes=3 * 4 * 4 + 1):
        layer = late_layer()
        _, begun = vars(layer)[SHARED_INPUT].prepared(x := torch.ones(3, 4, requires_grad=True) * 2.0, x.nbytes)
        assert begun is None
        _, begun = vars(layer)[SHARED_INPUT].prepared(x, x.nbytes + 1)
        assert begun == []


@pytest.mark.parametrize("sequence", [False, True])
def test_a_plan_hides_messages_behind_products(sequence: bool):
    """Its traffic and its products are those of a step without late gradients; less of its messages is exposed."""
    keys = {
        "precision": "bf16",
        "model": {"config": LARGE, "tokenizer": "none"},
        "training": {"max_steps": 4, "global_batch_size": 16, "micro_batch_size": 16},
        "parallel": {"strategy": "ddp", "tensor": 2, "sequence": sequence},
    }
    plan, machine = plan_run(recipe_of(keys), 2), parse_devices("2xH100").machine
    assert machine is not None
    (late,) = plan_steps(plan, 512)
    with patch.object(products, "hide_sums", lambda *_: None):
        (plain,) = plan_steps(plan, 512)
    assert plain.totals.behind == {}
    assert late.totals.traffic == plain.totals.traffic
    assert late.totals.flops == plain.totals.flops
    rows, layers = 16 * 512, 2
    behind = sum(amount.flops for (_, kind), amount in late.totals.behind.items() if kind.operation == MATMUL)
    assert behind == layers * 2 * rows * 12 * 1024**2 // 2  # each weight of a layer once, of two ranks
    assert all(message.phase == kind.phase == BACKWARD for message, kind in late.totals.behind)
    operation = "_reduce_scatter_base_" if sequence else "allreduce_"
    link = link_of(plan.layout, "tp", machine.local_ranks)
    speed = machine.speed(LIKELY)
    message = collective_seconds(operation, 2 * rows * 1024, link, speed)
    weight = speed.matmul["bf16"].seconds(
        2 * rows * 1024**2 // 2
    )  # of queries; that of the feed-forward has four times
    hidden = layers * (min(message, 4 * weight) + min(message, 8 * weight))
    assert (message < 4 * weight) == sequence
    before, after = (step_time(plan, [step], machine, 512).parts for step in (plain, late))
    assert before[COMMUNICATION] - after[COMMUNICATION] == pytest.approx(hidden, rel=1e-6)
    assert after[COMPUTE] == pytest.approx(before[COMPUTE], rel=1e-6)
