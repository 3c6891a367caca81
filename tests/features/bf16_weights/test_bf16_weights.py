"""Weights in bf16: their updates, the same bits under every layout, and bad steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ranks import RankPools
from tests.helpers.training import MemorySource, build_tiny, tiny_recipe, train_tiny, whole_state
from tests.parity.cases import model_config
from trainer.engine.optimizers import tensor_batches
from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.engine.optimizers.whole_access import WholeAccess
from trainer.features.bf16_weights.optimizer import COMPENSATION, _cut_off
from trainer.features.bf16_weights.rounding import KeyedRounding, Piece
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.boxes import tensor_part
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import AdamW
from trainer.training.process_group import open_mesh

METHODS = ["bf16_compensated", "bf16_stochastic"]
ULP = 2.0**-7  # of bf16 numbers from 1 to 2


@pytest.fixture
def mesh() -> ParallelMesh:
    return open_mesh(plan_run(tiny_recipe(), 1).layout, torch.device("cpu"))


def in_bf16(values: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values.bfloat16())
    parameter.grad_dtype = torch.float32
    return parameter


def optimizer_of(parameter: nn.Parameter, mesh: ParallelMesh, weights: str, **options: Any) -> EngineOptimizer:
    placement = ParameterPlacement("weight", tuple(parameter.shape))
    recipe = tiny_recipe(precision="bf16", weights=weights, training={"seed": 7})
    trained = TrainedParameters({"weight": parameter}, whole=WholeAccess({parameter: placement}, mesh), recipe=recipe)
    return build_optimizer(AdamW(**options), trained)


def updated(weights: str, mesh: ParallelMesh, steps: int = 200, **options: Any) -> tuple[nn.Parameter, Tensor]:
    """Return weights after steps with random gradients of mean 1, and those of torch's AdamW in fp64."""
    start = torch.linspace(-2.0, 2.0, 512).bfloat16()
    parameter, expected = in_bf16(start), nn.Parameter(start.double())
    optimizer = optimizer_of(parameter, mesh, weights, learning_rate=1e-4, **options)
    exact = torch.optim.AdamW([expected], lr=1e-4, weight_decay=options.get("weight_decay", 0.0))
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        parameter.grad = 1.0 + torch.randn(512, generator=generator)
        expected.grad = parameter.grad.double()
        optimizer.begin(1e-4, step)
        optimizer.step()
        exact.step()
    return parameter, expected.detach()


class TestUpdates:
    def test_weight_and_compensation_are_the_bits_of_fp32(self, mesh: ParallelMesh):
        parameter = in_bf16(torch.linspace(-2.0, 2.0, 512))
        expected = nn.Parameter(parameter.detach().float())
        optimizer = optimizer_of(parameter, mesh, "bf16_compensated", learning_rate=1e-4, weight_decay=0.1)
        exact = torch.optim.AdamW([expected], lr=1e-4, weight_decay=0.1, fused=True)
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            parameter.grad = expected.grad = 1.0 + torch.randn(512, generator=generator)
            optimizer.step()
            exact.step()
        assert torch.equal(parameter.detach(), expected.detach().bfloat16())
        bits = parameter.detach().float().view(torch.int32) + optimizer.state[parameter][COMPENSATION]
        assert (bits - expected.detach().view(torch.int32)).abs().max() <= 2  # after ties

    def test_a_number_in_the_middle_of_two_loses_one_bit(self):
        for bits in (0x3F80_8000, 0x3F81_8000, -0x407F_8000, 0x3F80_7FFF, 0x3F81_8001):
            exact = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
            found = exact.bfloat16().float().view(torch.int32) + _cut_off(exact)
            assert 0 <= bits - int(found) <= 1
            assert torch.equal(found.view(torch.float32).bfloat16(), exact.bfloat16())

    def test_the_mean_of_random_roundings_is_exact(self, mesh: ParallelMesh):
        parameter, expected = updated("bf16_stochastic", mesh)
        assert abs((parameter.detach().double() - expected).mean()) < 5e-4  # of a movement of 0.02

    @pytest.mark.parametrize("weights", ["nearest", *METHODS])
    def test_small_updates_are_lost_in_bf16_alone(self, mesh: ParallelMesh, weights: str):
        """A weight of 1 moves by 1e-4 in a step, and the next bf16 numbers are 0.004 below and 0.008 above it."""
        parameter = in_bf16(torch.ones(256))
        if weights == "nearest":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.0)
            parameter.grad_dtype = torch.bfloat16
        else:
            optimizer = optimizer_of(parameter, mesh, weights, learning_rate=1e-4)
        for step in range(1000):
            parameter.grad = (parameter.detach().float() - 0.9).to(parameter.grad_dtype)
            if weights != "nearest":
                optimizer.begin(1e-4, step)
            optimizer.step()
        found = parameter.detach().float()
        if weights == "nearest":
            assert torch.equal(found, torch.ones(256))
        else:
            assert 0.92 < found.mean() < 0.93  # 0.926 in fp32

    @pytest.mark.parametrize("weights", METHODS)
    def test_pieces_change_no_bit(self, mesh: ParallelMesh, weights: str, monkeypatch: pytest.MonkeyPatch):
        whole, _ = updated(weights, mesh, steps=3)
        monkeypatch.setattr(tensor_batches, "MOST_ON_CPU", 7)
        assert torch.equal(updated(weights, mesh, steps=3)[0], whole)

    @pytest.mark.parametrize("weights", METHODS)
    def test_a_bad_step_changes_no_bit(self, mesh: ParallelMesh, weights: str):
        """On GPUs, a flag on the device skips the update."""
        parameter = in_bf16(torch.linspace(1.0, 1.9, 64))
        optimizer = optimizer_of(parameter, mesh, weights, learning_rate=1e-2)
        parameter.grad = torch.ones(64)
        optimizer.step()
        state = optimizer.state[parameter]
        if weights == "bf16_compensated":
            state[COMPENSATION][:32].fill_(2**15 - 1)  # the ends of the range
            state[COMPENSATION][32:].fill_(-(2**15) + 1)
        before = [one.clone() for one in (parameter.detach(), *state.values())]
        optimizer.found_inf = torch.ones(())
        parameter.grad = torch.full((64,), torch.nan)
        optimizer.step()
        for one, expected in zip((parameter.detach(), *state.values()), before, strict=True):
            assert torch.equal(one, expected)
        optimizer.found_inf = torch.zeros(())
        parameter.grad = torch.ones(64)
        optimizer.step()
        assert not torch.equal(parameter.detach(), before[0])
        assert state["step"] == 2


class TestRandomRounding:
    def round(self, mesh: ParallelMesh, value: float, step: int = 0, name: str = "weight", seed: int = 7) -> Tensor:
        parameter = in_bf16(torch.zeros(64, 1024))
        rounding = KeyedRounding({parameter: ParameterPlacement(name, (64, 1024))}, mesh, seed)
        return rounding.round_([Piece(parameter, 0, 64 * 1024)], torch.full((64 * 1024,), value), step).float()

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    @pytest.mark.parametrize("share", [0.0, 1 / 65536, 0.3, 0.5, 0.99])
    def test_the_probability_is_the_distance(self, mesh: ParallelMesh, share: float, sign: float):
        found = self.round(mesh, sign * (1.0 + share * ULP))
        low, high = sign * 1.0, sign * (1.0 + ULP)
        assert bool(((found == low) | (found == high)).all())
        deviation = (share * (1 - share) / found.numel()) ** 0.5
        assert (found == high).double().mean() == pytest.approx(share, abs=5 * deviation)

    def test_bits_depend_on_seed_step_name_and_position(self, mesh: ParallelMesh):
        found = self.round(mesh, 1.0 + ULP / 2)
        assert torch.equal(found, self.round(mesh, 1.0 + ULP / 2))
        others = (self.round(mesh, 1.0 + ULP / 2, **other) for other in ({"step": 1}, {"name": "other"}, {"seed": 8}))
        for other in (*others, found.roll(1), found.roll(1024), found.view(64, 1024).flip(0).flatten()):
            assert (other == found).double().mean() == pytest.approx(0.5, abs=0.01)


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash_of(name) + step)
    return torch.randn(shape, generator=generator)


def hash_of(name: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**40


def same_gradients(weights: str, model_type: str, layouts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the state after two steps with given gradients in each layout, one after the other."""
    source: MemorySource | None = None
    step = 0
    for parallel in layouts:
        recipe = tiny_recipe(
            model={"config": model_config(model_type)}, precision="bf16", weights=weights, parallel=parallel
        )
        training = build_tiny(recipe)
        engine: Any = training.engine
        if source is None:
            with torch.no_grad():  # biases start at zero, which hides their rounding
                for label, parameter in engine.parameters.items():
                    fill(parameter.detach(), engine.placements[label], training.mesh, -1)
        else:
            engine.load_state(source, step)
        for _ in range(2):
            for label, parameter in engine.parameters.items():
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
                fill(parameter.grad, engine.placements[label], training.mesh, step)
            engine._update(5e-5, torch.tensor(0.5), torch.zeros(()))
            engine.optimizer.zero_grad()
            engine._step = step = step + 1
        source = whole_state(engine, training.mesh)
    assert source is not None
    return source.tensors


def fill(tensor: Tensor, placement: ParameterPlacement, mesh: ParallelMesh, step: int) -> None:
    whole = gradient(placement.name, placement.shape, step)
    for box in tensor_part("", tensor, placement, mesh).boxes:
        slices = tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))
        box.view.copy_(whole[slices])


@pytest.mark.parametrize("weights", METHODS)
@pytest.mark.parametrize(
    ("world_size", "model_type", "layouts"),
    [
        (2, "gpt2", [{"tensor": 2, "sequence": True}, {"strategy": "fsdp"}]),  # blocks of q, k and v
        pytest.param(2, "bert", [{"pipeline": {"stages": 2}}, {"strategy": "ddp"}], marks=pytest.mark.slow),
        pytest.param(
            4, "bert", [{"strategy": "fsdp"}, {"strategy": "fsdp", "tensor": 2}], marks=pytest.mark.slow
        ),  # three classes on four ranks
    ],
)
def test_updates_and_checkpoints_are_equal_bit_for_bit_in_every_layout(
    ranks: RankPools, weights: str, world_size: int, model_type: str, layouts: list[dict[str, Any]]
):
    expected = same_gradients(weights, model_type, [{}, {}])
    stored = [name for name, tensor in expected.items() if tensor.dtype == torch.bfloat16]
    assert len(stored) >= 8
    kept = [name for name, tensor in expected.items() if tensor.dtype == torch.int16]
    assert len(kept) == (len(stored) if weights == "bf16_compensated" else 0)
    for found in ranks(world_size).run(same_gradients, weights, model_type, layouts):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("weights", "keys"),
    [
        ("bf16_compensated", {}),
        ("bf16_stochastic", {}),
        ("bf16_compensated", {"model": {"dropout": 0.1, "adapter": {"type": "lora", "rank": 2, "alpha": 4.0}}}),
        ("bf16_compensated", {"activation_checkpointing": "full"}),
    ],
    ids=["compensated", "stochastic", "lora", "recomputed"],
)
def test_training_is_that_of_fp32_weights(weights: str, keys: dict[str, Any]):
    """The first passes bit for bit: autocast rounds the weights of matrix products anyway."""
    found, expected = (
        train_tiny(tiny_recipe(**{"model": {"dropout": 0.1}, **keys}, precision="bf16", weights=stored), num_steps=3)
        for stored in (weights, "fp32")
    )
    assert found.losses[0] == expected.losses[0]
    assert found.grad_norms[0] == expected.grad_norms[0]
    assert found.losses != expected.losses, "the weights are rounded"
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=2e-3)
