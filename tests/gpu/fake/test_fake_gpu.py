"""Steps of every strategy, task and precision on fake CUDA tensors, without a GPU: `make fake-gpu`.

A CUDA build of torch, with the driver of `no_driver.c`, knows the device of each fake tensor. A step fails if an
operation has tensors of two devices, if a weight or a state of the optimizer is left on the host, or if the host reads
a value of the device.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.reads import READS
from tests.helpers.training import (
    OPTIMIZERS,
    RANK_STRATEGIES,
    TINY_DECODERS,
    TINY_TASKS,
    parallel_keys,
    tiny_recipe,
    tiny_task,
)
from trainer.features.generation.generation import generate, set_generation
from trainer.features.generation.section import Generation
from trainer.models.attention import padding_known
from trainer.parallel import kernel_support
from trainer.parallel.device_traits import planned_traits
from trainer.parallel.flat_rows import FlatRows
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import RankBatch
from trainer.recipe.plan import RunPlan, plan_run
from trainer.tools.plan import simulated_rank, simulated_step
from trainer.tools.plan.shape_batch import blank_batch
from trainer.tools.plan.simulated_deepspeed import simulated_deepspeed
from trainer.tools.plan.simulated_rank import replaced

DRIVER = os.environ.get("FAKE_DRIVER")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DRIVER is None, reason="is for `make fake-gpu`")]

GPU = torch.device("cuda", 0)
LENGTH = 12


class Watch(TorchDispatchMode):
    """A list of the values of the device that the host reads, each with the lines of code that do it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = function in READS and args[0].is_cuda
        if function is torch.ops.aten._to_copy.default and not (kwargs or {}).get("non_blocking"):
            device = (kwargs or {}).get("device")
            waits = device is not None and torch.device(device).type != args[0].device.type
        if waits:
            frames = [
                f"{frame.filename}:{frame.lineno} in {frame.name}"
                for frame in traceback.extract_stack()
                if "/trainer/" in frame.filename
            ]
            self.found.append(f"{function} of {args[0].dtype} {tuple(args[0].shape)} at {' '.join(frames[-2:])}")
        return function(*args, **(kwargs or {}))


class _Stream:
    """A stream or an event that does nothing."""

    device = GPU
    device_index = 0
    cuda_stream = stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


@pytest.fixture(scope="module", autouse=True)
def driver() -> None:
    """Let torch take fake tensors for those of a GPU."""
    torch._C._ensureCUDADeviceGuardSet()  # does nothing once there is a GPU
    ctypes.CDLL(DRIVER).show_gpu()


@contextmanager
def gpu_found() -> Iterator[None]:
    """Answer questions about a GPU: it has capability 9.0."""
    with (
        replaced(
            torch.cuda,
            is_available=lambda: False,  # else fake tensors start it
            get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
            set_rng_state=lambda *_: None,
            Stream=_Stream,
            Event=_Stream,
            current_stream=_Stream,
            stream=lambda _: nullcontext(),
            current_device=lambda: 0,
            default_stream=_Stream,
            synchronize=lambda *_: None,
            reset_peak_memory_stats=lambda *_: None,
            device_count=lambda: 8,
            set_device=lambda _: None,
            get_device_capability=lambda *_: (9, 0),
            get_device_name=lambda *_: "a fake GPU",
            is_bf16_supported=lambda *_, **__: True,
            get_device_properties=lambda *_: SimpleNamespace(total_memory=2**36, multi_processor_count=132, major=9),
        ),
        replaced(torch.cuda.amp.common, amp_definitely_not_available=lambda: False),
        sdpa_kernel(SDPBackend.MATH),  # others ask the GPU, and so do convolutions of cuDNN in bf16
        torch.backends.cudnn.flags(enabled=False),
        replaced(Tensor, pin_memory=lambda tensor, *_: tensor),  # fake tensors have no such operation
        replaced(distributed, _verify_param_shape_across_processes=lambda *_: None),  # reads values
        mock.patch.object(kernel_support, "capability", return_value=(9, 0)),
    ):
        yield


@contextmanager
def shapes_only(*_: Any) -> Iterator[None]:
    """Make every new tensor a fake one, on its own device."""
    before_forward = replaced(DistributedDataParallel, _pre_forward=_pre_forward)
    with simulated_rank.shapes_only(cuda=False), before_forward, planned_traits(None):
        yield


def _pre_forward(wrapped: Any, *inputs: Any, **kwargs: Any) -> Any:
    wrapped.logger = None  # it would time the backward pass by events, as the rest of this method the forward pass
    return inputs, kwargs


@contextmanager
def mesh_on_gpu(plan: RunPlan, rank: int) -> Iterator[ParallelMesh]:
    with simulated_rank.simulated_mesh(plan, rank):
        yield ParallelMesh(GPU, **plan.layout.sizes)


@contextmanager
def zero_on_gpu(plan: RunPlan) -> Iterator[None]:
    """Let DeepSpeed take its accelerator for a GPU."""
    with simulated_deepspeed(plan):
        if not plan.strategy.package:
            yield
            return
        from deepspeed.accelerator import real_accelerator
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        accelerator = CUDA_Accelerator()
        accelerator.is_available = lambda: True
        with replaced(real_accelerator, ds_accelerator=accelerator):
            yield


def batch_on_host(*arguments: Any) -> RankBatch:
    """Return a blank batch on the host; the engine copies it. Joined rows are listed on the device, as a run does."""
    batch = blank_batch(*arguments)
    ones = [
        one if one.flat is None else replace(one, flat=FlatRows.of(one.flat.lengths, LENGTH, GPU))
        for one in batch.microbatches
    ]
    return replace(batch, microbatches=ones)


def allocate_on_gpu(model: torch.nn.Module) -> None:
    model.to_empty(device=GPU)


@contextmanager
def rank_on_gpu(plan: RunPlan, rank: int) -> Iterator[tuple[Any, RankBatch]]:
    """Yield the engine of a rank on a fake GPU, and a batch."""
    with (
        gpu_found(),
        mock.patch.object(simulated_step, "planned_task", lambda plan: tiny_task(plan.recipe)),
        mock.patch.object(simulated_step, "simulated_mesh", mesh_on_gpu),
        mock.patch.object(simulated_step, "shapes_only", shapes_only),
        mock.patch.object(simulated_step, "_allocate", allocate_on_gpu),
        mock.patch.object(simulated_step, "blank_batch", batch_on_host),
        mock.patch.object(simulated_step, "copied_ahead", lambda rows, _: rows),
        zero_on_gpu(plan),
        mesh_on_gpu(plan, rank) as mesh,
    ):
        simulation = simulated_step._Simulation(plan, tiny_task(plan.recipe), mesh, LENGTH, cuda=True, fused=True)
        with simulation.opened(simulation.build()) as (engine, _, batch):
            yield engine, batch


def step(keys: Mapping[str, Any], ranks: int, rank: int) -> list[str]:
    """Take two steps of a rank, and return what is wrong with the second one and the tensors that stay."""
    plan = plan_run(tiny_recipe(**keys), ranks)
    with rank_on_gpu(plan, rank) as (engine, batch):
        engine.train_step(batch)
        with Watch() as watch:
            read = engine.begin_step(batch)
        read()
        tensors = dict(engine.held())
        for state in engine.optimizer.state.values():
            tensors |= {f"{key} of the optimizer": value for key, value in state.items() if isinstance(value, Tensor)}
        left = [name for name, tensor in tensors.items() if not tensor.is_cuda]
    # DeepSpeed's own step waits for the device, so that the engine reads its results at once.
    reads = {read for read in watch.found if not (plan.strategy.package and " in begin_step" in read)}
    return [*sorted(reads), *(f"{name} is on the host" for name in sorted(set(left)))]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (4 if name == "hsdp" else 2, parallel_keys(name, 4 if name == "hsdp" else 2)) for name in RANK_STRATEGIES},
    "tensor": (2, {"tensor": 2}),
    "tensor, sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline": (2, {"pipeline": {"stages": 2}}),
    "gpipe": (2, {"pipeline": {"stages": 2, "schedule": "gpipe"}}),
    "context": (2, {"context": 2}),
    "fsdp, tensor": (4, {"strategy": "fsdp", "tensor": 2}),
}
LLAMA = {"config": TINY_DECODERS["llama"], "tokenizer": "none"}
RECIPES: dict[str, dict[str, Any]] = {
    "recomputed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "flat rows": {"data": {"padding_free": True}},
    "microbatches": {"training": {"global_batch_size": 12, "micro_batch_size": 4}},
    "torch's dropout": {"training": {"layout_invariant_dropout": False}},
    "averages": {"training": {"ema_decay": 0.9}},
    "stochastic weights": {"precision": "bf16", "weights": "bf16_stochastic"},
    "compensated weights": {"precision": "bf16", "weights": "bf16_compensated"},
    **OPTIMIZERS,
    "lora": {"task": TINY_TASKS["causal_lm"].keys, "model": {**LLAMA, "adapter": {"type": "lora"}}},
    "chunks of logits": {"task": {**TINY_TASKS["causal_lm"].keys, "logits_chunk": 20}, "model": LLAMA},
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, precision: str):
    ranks, parallel = LAYOUTS[layout]
    training = {"global_batch_size": 12, "micro_batch_size": 3}
    keys = {"parallel": parallel, "precision": precision, "training": training}
    assert {rank: step(keys, ranks, rank) for rank in (0, ranks - 1)} == {0: [], ranks - 1: []}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("task", TINY_TASKS)
def test_every_task(task: str, precision: str):
    tiny = TINY_TASKS[task]
    assert step({"task": tiny.keys, "model": tiny.model, "precision": precision}, 1, 0) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_keys(recipe: str):
    assert step(RECIPES[recipe], 1, 0) == []


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tensor", "pipeline", "context"])
def test_decoders(layout: str):
    ranks, parallel = LAYOUTS[layout]
    tiny = TINY_TASKS["causal_lm"]
    keys = {"task": tiny.keys, "model": tiny.model, "parallel": parallel, "precision": "bf16"}
    assert {rank: step(keys, ranks, rank) for rank in (0, ranks - 1)} == {0: [], ranks - 1: []}


class Generating(Watch):
    """A watch that answers reads of truths: no, until the model has made a number of tokens."""

    def __init__(self, model: torch.nn.Module, num_tokens: int) -> None:
        super().__init__()
        self.left, self.reads = num_tokens, 0
        model.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.left -= 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
            return self.left <= 0
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("task", ["seq2seq_lm", "causal_lm"])
def test_generated_texts(task: str, sampled: bool):
    """Tokens and masks are made on the device, and a token causes one read: whether all texts have ended."""
    tiny = TINY_TASKS[task]
    with rank_on_gpu(plan_run(tiny_recipe(task=tiny.keys, model=tiny.model), 1), 0) as (engine, batch):
        model, ready, found = engine._forward._model.eval(), batch.microbatches[0].to(GPU), []
        for num_tokens in (3, 7):
            settings = Generation(max_new_tokens=num_tokens, do_sample=sampled)
            set_generation(model, settings, None, [1], {"pad_token_id": 0, "decoder_start_token_id": 0})
            with Generating(model, num_tokens) as watch, padding_known(True):
                tokens = generate(model, ready.inputs, False, 1, batch.microbatches[0].rows)
            assert (tokens.device, tokens.shape[1]) == (GPU, num_tokens)
            found.append((watch.reads, len(watch.found)))
    assert found[1] == (found[0][0] + 7 - 3, found[0][1])
