"""The kernel of AdamW in Triton's interpreter, beside torch; `test_adamw_kernel.py` runs this file.

The reference of one step is torch's `_single_tensor_adam`, with each operation rounded by itself. Torch on CPUs fuses
some products and sums, so its own results may be the next number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.families import CONFIGS
from tests.helpers.joint_products import joined
from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    Curve,
    build_tiny,
    parallel_keys,
    tiny_recipe,
    tiny_training,
    train_tiny,
    whole_state,
)
from trainer.engine import ddp, native
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.features.shared_casts.weights import StepWeights
from trainer.parallel import kernel_support
from trainer.parallel.device_traits import DeviceTraits, planned_traits
from trainer.parallel.weight_copies import kept_copy
from trainer.recipe.schema import AdamW

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN and overflow

CPU = torch.device("cpu")
SIZES = [(1,), (7,), (30522, 3), (1024,), (33, 64)]
_ADDS_NO_GRADIENTS = ddp._adds_no_gradients
OPTIONS = {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1}


def test_the_interpreter_is_on():
    assert kernel_support.obstacle(CPU) is None


def built(weights: list[Tensor], **options: Any) -> tuple[Any, list[nn.Parameter]]:
    """Return the optimizer of weights, of which the first has no weight decay."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    optimizer = build_optimizer(AdamW(**{**OPTIONS, **options}), TrainedParameters(named, {"0"}))
    assert optimizer.scales_gradients
    return optimizer, parameters


def copied(parameter: nn.Parameter, dtype: torch.dtype = torch.bfloat16, memory: Tensor | None = None) -> Tensor:
    """Let the optimizer of a parameter write a copy, as a reader does."""
    copy = kept_copy(parameter)
    assert copy is not None
    copy.tensor = parameter.detach().to(dtype) if memory is None else memory.copy_(parameter.detach())
    copy.version = parameter._version
    return copy.tensor


def one_step(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, group: dict[str, Any]) -> None:
    """Step one tensor by the formula of torch's `_single_tensor_adam`; each operation rounds by itself."""
    (beta_1, beta_2), rate = group["betas"], group["lr"]
    weight.mul_(1 - rate * group["weight_decay"])
    share = torch.tensor(1 - beta_1)
    first.copy_(first + share * (gradient - first) if share < 0.5 else gradient - (gradient - first) * (1 - share))
    second.mul_(beta_2).add_(torch.tensor(1 - beta_2) * gradient * gradient)
    root = torch.from_numpy(np.sqrt(second.numpy())) / torch.tensor((1 - beta_2**step) ** 0.5)
    weight.add_(torch.tensor(-(rate / (1 - beta_1**step))) * first / (root + torch.tensor(group["eps"])))


@pytest.mark.parametrize(("betas", "rounded"), [([0.9, 0.999], False), ([0.3, 0.5], True)])
def test_every_bit_is_that_of_the_formula(betas: list[float], rounded: bool):
    torch.manual_seed(0)
    weights = [torch.randn(size) for size in SIZES]
    optimizer, parameters = built(weights, betas=betas)
    copies = [copied(parameter) for parameter in parameters]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    for step in range(1, 5):
        factor = torch.tensor(0.37)
        optimizer.begin(1e-2 / step, step - 1, torch.zeros(()), factor)
        for parameter, weight, (first, second) in zip(parameters, weights, moments, strict=True):
            gradient = torch.randn(weight.shape).bfloat16()
            # A parameter takes a gradient of another type only if it says so.
            parameter.grad_dtype = None
            parameter.grad = gradient.clone() if rounded else gradient.float()
            group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
            one_step(weight, gradient.float() * factor, first, second, step, group)
        optimizer.step()
        for parameter, weight, (first, second), copy in zip(parameters, weights, moments, copies, strict=True):
            assert torch.equal(parameter, weight)
            state = optimizer.state[parameter]
            assert state["step"] == step
            assert torch.equal(state["exp_avg"], first)
            assert torch.equal(state["exp_avg_sq"], second)
            assert torch.equal(copy, weight.bfloat16())
            assert kept_copy(parameter).is_current(parameter)


def test_torch_differs_by_one_rounding():
    torch.manual_seed(1)
    weights = [torch.randn(size) for size in SIZES]
    optimizer, parameters = built(weights)
    others = [nn.Parameter(weight.clone()) for weight in weights]
    groups = [{"params": others[1:]}, {"params": others[:1], "weight_decay": 0.0}]
    of_torch = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=False, fused=False)
    for step in range(10):
        optimizer.begin(1e-2, step, None, None)
        for parameter, other in zip(parameters, others, strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        optimizer.step()
        of_torch.step()
    for parameter, other in zip(parameters, others, strict=True):
        # Ten steps of rounding in the last bit of numbers of up to 5.
        torch.testing.assert_close(parameter, other, rtol=0, atol=2e-6)
        assert optimizer.state[parameter].keys() == of_torch.state[other].keys()


def test_a_bad_step_changes_nothing():
    optimizer, (parameter,) = built([torch.randn(70)])
    copy = copied(parameter)
    states = []
    for step, flag in enumerate([1.0, 0.0, 1.0]):
        optimizer.begin(1e-2, step, torch.tensor(flag), torch.tensor(torch.nan if flag else 1.0))
        parameter.grad = torch.full((70,), torch.nan if flag else 1.0)
        optimizer.step()
        state = optimizer.state[parameter]
        states.append([parameter.detach().clone(), copy.clone(), *(value.clone() for value in state.values())])
        assert torch.equal(copy, parameter.detach().bfloat16())
        assert kept_copy(parameter).is_current(parameter)
    assert states[0][2] == 0
    assert states[1][2] == 1
    assert not torch.equal(states[0][0], states[1][0])
    assert all(torch.equal(one, other) for one, other in zip(states[1], states[2], strict=True))


def test_parameters_without_a_gradient_wait():
    optimizer, parameters = built([torch.ones(5), torch.ones(2000), torch.ones(0, 3)], weight_decay=0.0)
    for step, present in enumerate([[1], [0, 1, 2], [0]]):
        optimizer.begin(1e-2, step)
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.ones_like(parameter) if number in present else None
        optimizer.step()
        assert (parameters[0] in optimizer.state) == (step > 0)
    assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == [2, 2, 1]
    assert [float(1 - parameter.detach().mean()) for parameter in parameters[:2]] == pytest.approx(
        [0.02, 0.02], rel=1e-4
    )


def test_addresses_that_16_does_not_divide():
    memory = torch.zeros(5000)
    weight = nn.Parameter(memory[1:3001])
    optimizer = build_optimizer(AdamW(**OPTIONS), TrainedParameters({"0": weight}))
    aligned, (other,) = built([torch.zeros(3000)])
    aligned.param_groups[0]["weight_decay"] = 0.1
    copied(weight, memory=torch.zeros(5000, dtype=torch.bfloat16)[3:3003])
    for step in range(3):
        other.grad = torch.randn(3000)
        weight.grad = torch.zeros(4000)[5:3005].copy_(other.grad)
        for one in (optimizer, aligned):
            one.begin(1e-2, step)
            one.step()
    assert torch.equal(weight, other)
    assert torch.equal(kept_copy(weight).tensor, other.detach().bfloat16())
    assert not memory[0]
    assert not memory[3001:].any()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_side_by_side(dim: int, dtype: torch.dtype):
    """Those of q, k and v in one tensor, which a product reads; along dimension 1 their rows lie apart."""
    optimizer, parameters = built([torch.randn(40, 48) for _ in range(3)])
    optimizer._by_kernel._rounded = dtype
    joined = torch.empty((120, 48) if dim == 0 else (40, 144), dtype=dtype)
    for parameter, memory in zip(parameters, joined.chunk(3, dim), strict=True):
        copied(parameter, memory=memory)
    for step in range(2):
        optimizer.begin(1e-2, step)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert torch.equal(joined, torch.cat([parameter.detach().to(dtype) for parameter in parameters], dim))


def test_a_change_by_others_puts_the_copy_out_of_date():
    layer = nn.Linear(8, 8)
    optimizer = build_optimizer(AdamW(**OPTIONS), TrainedParameters(dict(layer.named_parameters())))
    rounded = StepWeights([layer], torch.bfloat16)

    def step(flag: float) -> None:
        layer.weight.grad, layer.bias.grad = torch.ones(8, 8), torch.ones(8)
        optimizer.begin(1e-2, 0, torch.tensor(flag))
        optimizer.step()

    with rounded.use():
        first = layer.weight
    step(0.0)
    with mock.patch.object(torch, "_foreach_copy_", side_effect=AssertionError("the kernel rounded")), rounded.use():
        assert layer.weight.data_ptr() == first.data_ptr()
        assert torch.equal(layer.weight, vars(layer)["_parameters"]["weight"].detach().bfloat16())
    with torch.no_grad():
        layer.weight.mul_(2.0)
    step(1.0)  # writes nothing
    with rounded.use():
        assert layer.weight.data_ptr() == first.data_ptr()
        assert torch.equal(layer.weight, vars(layer)["_parameters"]["weight"].detach().bfloat16())


def further(names: Iterable[str], *nightly: str) -> list[Any]:
    """Return the names as parameters, of which some run each night only."""
    return [pytest.param(name, marks=pytest.mark.nightly) if name in nightly else name for name in names]


@contextmanager
def kernels_of(*names: str) -> Iterator[None]:
    """Leave other kernels out, which the interpreter runs slowly."""
    kept = {name: kernel_support.KERNELS[name] for name in names}
    with mock.patch.dict(kernel_support.KERNELS, kept, clear=True):
        yield


def trained(sections: dict[str, Any], *names: str) -> Curve:
    with kernels_of(*names), planned_traits(DeviceTraits(is_cpu=True, captures_graphs=False)):
        return train_tiny(tiny_recipe(**sections), num_steps=4)


def curves(*sections: dict[str, Any]) -> list[Curve]:
    """Train each recipe by the kernel, and the first one by torch."""
    return [*(trained(one, "adamw") for one in sections), trained(sections[0])]


def assert_equal_curves(found: list[Curve]) -> None:
    *ours, of_torch = found
    for curve in ours:
        assert curve.losses == pytest.approx(of_torch.losses, rel=1e-5)
        assert curve.grad_norms == pytest.approx(of_torch.grad_norms, rel=1e-4)
        for name, weight in of_torch.weights.items():
            torch.testing.assert_close(curve.weights[name], weight, rtol=0, atol=1e-5)


TRAININGS: dict[str, dict[str, Any]] = {
    "clipped": {"training": {"max_grad_norm": 0.01}},
    "bf16": {"precision": "bf16", "training": {"max_grad_norm": 0.01}},
    "accumulation": {"precision": "bf16", "training": {"micro_batch_size": 5}},
    "fp16": {"precision": "fp16"},
    "graphs": {"precision": "bf16", "cuda_graphs": True},
    "averages": {"precision": "bf16", "training": {"ema_decay": 0.5}},
    "late": {"model": {"freeze": ["bert"], "unfreeze_at_step": 2}},
    "groups": {"optimizer": {"layer_decay": 0.5}},
    "lora": {"precision": "bf16", "model": {"adapter": {"type": "lora", "rank": 4, "alpha": 8}}},
}


@pytest.mark.parametrize("name", further(TRAININGS, "averages", "late", "groups", "lora"))
def test_a_training_is_that_of_torch(name: str):
    assert_equal_curves(curves(TRAININGS[name]))


def test_it_writes_the_joint_copies_of_queries_keys_and_values():
    recipe = tiny_recipe(precision="bf16")
    with joined() as found, kernels_of("adamw"), tiny_training(recipe) as training:
        for number, batch in enumerate(islice(training.loader, 3)):
            with mock.patch.object(torch, "_foreach_copy_", side_effect=torch._foreach_copy_) as copy:
                training.engine.train_step(batch)
            casts = [call for call in copy.call_args_list if call.args[0][0].dtype == torch.bfloat16]
            assert len(casts) == (number == 0), "the kernel rounds from the second step on"
        for _, layers in chain.from_iterable(joint.parameters() for joint in found):
            copies = [kept_copy(weight).tensor for weight in layers]
            assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
            assert all(torch.equal(a, b.detach().bfloat16()) for a, b in zip(copies, layers, strict=True))
            assert all(kept_copy(weight).is_current(weight) for weight in layers)
    assert len(found) == 2


@pytest.mark.parametrize(("strategy", "number"), [("ddp", 2), ("fsdp", 3)])
def test_on_several_ranks(ranks: RankPools, strategy: str, number: int):
    sections = {"precision": "bf16", "parallel": parallel_keys(strategy, number)}
    for found in ranks(number).run(curves, sections):
        assert_equal_curves(found)


@pytest.mark.parametrize("names", [("adamw", ""), ("", "adamw"), ("adamw", "adamw")])
def test_a_checkpoint_of_either_update_resumes_with_either(names: tuple[str, str]):
    recipe = tiny_recipe(precision="bf16")
    engines = []
    for name in names:
        with kernels_of(*filter(None, [name])):
            engines.append(build_tiny(recipe))
    first, second = engines
    batches = list(islice(first.loader, 4))
    with kernels_of():  # an optimizer keeps the update that it was built with
        for batch in batches[:2]:
            first.engine.train_step(batch)
        second.engine.train_step(batches[3])  # its copies and addresses are of another training
        second.engine.load_state(whole_state(first.engine, first.mesh), 2)
        for batch in batches[2:]:
            one, other = first.engine.train_step(batch), second.engine.train_step(batch)
            assert one.loss == pytest.approx(other.loss, rel=1e-6)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    if names == ("adamw", "adamw"):
        for name, weight in first.engine.held().items():
            assert torch.equal(weight, second.engine.held()[name]), name


def curve_and_types(left: bool, sections: dict[str, Any]) -> tuple[Curve, dict[str, torch.dtype]]:
    """Train with gradients of products in 16 bits, or all in fp32; return the types of the gradients, too."""
    types: dict[str, torch.dtype] = {}
    step = native.NativeEngine._update

    def noted(engine: Any, *arguments: Any) -> None:
        types.update({name: p.grad.dtype for name, p in engine.parameters.items() if p.grad is not None})
        step(engine, *arguments)

    with mock.patch.object(native.NativeEngine, "_update", noted), mock.patch.object(ddp, "_adds_no_gradients") as once:
        once.side_effect = _ADDS_NO_GRADIENTS if left else lambda plan: False
        return trained(sections, "adamw"), types


def in_both_ways(sections: dict[str, Any]) -> tuple[dict[str, torch.dtype], ...]:
    """Assert that all numbers are the same bits, and return the types of the gradients."""
    (ours, types), (exact, others) = (curve_and_types(left, sections) for left in (True, False))
    assert ours.losses == exact.losses
    assert ours.grad_norms == exact.grad_norms
    for name, weight in exact.weights.items():
        assert torch.equal(ours.weights[name], weight), name
    return types, others


ROUNDED_GRADIENTS: dict[str, dict[str, Any]] = {
    "classes": {},
    "tied": {"task": {"type": "masked_lm"}},
    "several uses": {"model": {"config": {"model_type": "albert", **CONFIGS["albert"]}, "tokenizer": "none"}},
    "recomputed": {"activation_checkpointing": "full"},
    "graphs": {"cuda_graphs": True},
    "sent in bf16": {"parallel": {"communication": {"gradients": "bf16"}}},
    "sent in fp16": {"parallel": {"communication": {"gradients": "fp16"}}},
    "several microbatches": {"training": {"micro_batch_size": 5}},
    "lora": {"model": {"adapter": {"type": "lora", "rank": 4, "alpha": 8}}},
    "fp16": {"precision": "fp16"},
}


@pytest.mark.parametrize(
    "name", further(ROUNDED_GRADIENTS, "recomputed", "graphs", "sent in bf16", "sent in fp16", "lora", "fp16")
)
def test_gradients_in_16_bits_change_no_bit(name: str):
    types, others = in_both_ways({"precision": "bf16", "training": {"max_grad_norm": 0.01}, **ROUNDED_GRADIENTS[name]})
    rounded = {name for name, dtype in types.items() if dtype == torch.bfloat16}
    assert set(others.values()) == {torch.float32}
    assert bool(rounded) == (name not in ("sent in fp16", "several microbatches", "fp16"))
    assert not any("_embeddings" in one or "norm" in one.lower() for one in rounded)
    if name == "classes":
        assert {one for one in types if "dense" in one or "query" in one} <= rounded


def test_parts_of_tensor_ranks_are_summed_in_fp32(ranks: RankPools):
    sections = {"precision": "bf16", "training": {"max_grad_norm": 0.01}, "parallel": {"tensor": 2}}
    for types, _ in ranks(2).run(in_both_ways, sections):
        assert types["bert.encoder.layer.0.attention.self.query.weight"] == torch.bfloat16
        assert types["bert.embeddings.word_embeddings.weight"] == torch.float32
