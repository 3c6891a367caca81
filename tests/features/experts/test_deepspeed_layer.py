"""A layer with experts on two ranks beside the MoE layer of DeepSpeed, with the same weights; no token is dropped."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.features.experts.tiny_experts import build_experts
from tests.helpers.ranks import RankPools
from trainer.features.experts.axis import divide_experts
from trainer.features.experts.products import use_products
from trainer.parallel.placement import whole

WIDTH, INNER, NUM_EXPERTS = 32, 64, 4


class Expert(nn.Module):
    """An expert of a Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        output: Tensor = self.down(F.silu(gate) * up)
        return output


def deepspeed_layer(block: Any) -> Any:
    """Return the layer of DeepSpeed with the router of a layer of ours, and this rank's part of its experts."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
    how = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
    layer = MoE(WIDTH, Expert(), num_experts=NUM_EXPERTS, ep_size=dist.get_world_size(), k=2, **how)
    # The ranks of an earlier test are gone.
    for table in (groups._get_expert_parallel_group_dict(), groups._get_expert_data_parallel_group_dict()):
        table.clear()
    layer.set_deepspeed_parallelism()
    local = NUM_EXPERTS // dist.get_world_size()
    first = dist.get_rank() * local
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(block.gate.weight)
        for number, expert in enumerate(experts_of(layer), first):
            expert.gate_up.weight.copy_(block.experts.gate_up_proj[number])
            expert.down.weight.copy_(block.experts.down_proj[number])
    return layer


def experts_of(layer: Any) -> list[Any]:
    return list(layer.deepspeed_moe.experts.deepspeed_experts)


def compared() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return outputs and gradients of this rank: ours, and those of DeepSpeed."""
    model: Any = build_experts("mixtral")
    use_products(model)
    block = model.model.layers[0].mlp
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = deepspeed_layer(block)
    divide_experts(model, dist.group.WORLD, whole(model))
    random = torch.Generator().manual_seed(dist.get_rank())
    shape = (2, 5 + 4 * dist.get_rank(), WIDTH)
    hidden, direction = (torch.randn(shape, generator=random) for _ in range(2))
    found = []
    for layer in (block, theirs):
        inputs = hidden.clone().requires_grad_()
        output = layer(inputs)
        output = output[0] if isinstance(output, tuple) else output
        (output * direction).sum().backward()
        assert inputs.grad is not None
        found.append({"output": output.detach(), "hidden states": inputs.grad})
    ours, other = found
    ours |= {"router": block.gate.weight.grad}
    ours |= {"gate_up": block.experts.gate_up_proj.grad, "down": block.experts.down_proj.grad}
    other |= {"router": theirs.deepspeed_moe.gate.wg.weight.grad}
    for name in ("gate_up", "down"):
        other[name] = torch.stack([getattr(expert, name).weight.grad for expert in experts_of(theirs)])
    return ours, other


@pytest.mark.nightly
def test_outputs_and_gradients_are_those_of_deepspeed(ranks: RankPools):
    for ours, theirs in ranks(2).run(compared):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.abs().max() > 0.01
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-5)
