"""The rotary kernel: all its tests in Triton's interpreter, and its part of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaModel, ModernBertConfig, ModernBertModel

from tests.features.rotations.test_rotary import SIZES
from tests.helpers.interpreting import needs_triton, run_interpreted
from trainer.features.rotations.rotary import CheapRotation
from trainer.parallel.device_traits import DeviceTraits, planned_traits


@needs_triton
@pytest.mark.slow
def test_in_tritons_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_rotation.py"))


class _Types(TorchDispatchMode):
    """The types of the results of all rotations, and the other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if function.name() == "trainer::rotated":
            self.found.append(results[0].dtype)
        elif function.name() == "trainer::rotated_into":
            self.found.append(args[4].dtype)
        else:
            self.others.append(function.name())
        return results


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        (ModernBertModel, ModernBertConfig(**SIZES, pad_token_id=0, eos_token_id=1), torch.bfloat16),
        # Cosines of states in fp32 are in fp32, so products are, too.
        (LlamaModel, LlamaConfig(**SIZES), torch.float32),
    ],
    ids=["ModernBERT", "Llama"],
)
def test_a_plan_has_one_operation_for_each_pass(kind, config, expected):
    """The kernels of a plan count as running, and its tensors have no numbers to choose a function by."""
    model = kind(config)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with planned_traits(DeviceTraits(is_cpu=False, assumes_kernels=True)), fake:
        with CheapRotation(model), _Types() as types, torch.autocast("cpu", torch.bfloat16):
            states = model(torch.zeros(2, 5, dtype=torch.int64)).last_hidden_state
        with types:
            states.sum().backward()
    assert types.found == [expected, torch.bfloat16]
    assert "aten::stack" not in types.others  # ModernBERT's queries, keys and values have one gradient
