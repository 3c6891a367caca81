"""AdamW with moments in 8 bits: its codes, its blocks under any placement, and its updates."""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.interpreting import run_interpreted
from tests.helpers.ranks import RankPools
from tests.helpers.training import build_tiny, tiny_recipe
from tests.tools.plan.measured import SMALL_BERT, recipe_of
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer, optimizer_class
from trainer.engine.optimizers.whole_access import WholeAccess
from trainer.features.adamw_8bit import fused as fused_eight_bits
from trainer.features.adamw_8bit import optimizer as eight_bits
from trainer.features.adamw_8bit.dynamic_map import FIRST, MAPS, SECOND, code_index
from trainer.features.adamw_8bit.optimizer import SCALES
from trainer.features.adamw_8bit.scale_blocks import BLOCK, block_rows, num_blocks
from trainer.features.adamw_8bit.section import AdamW8bit
from trainer.parallel import kernel_support
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement, Split
from trainer.parallel.shards.slices import part_of
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import AdamW
from trainer.tools.plan.ledger import PARAMETERS
from trainer.tools.plan.simulated_step import plan_step
from trainer.tools.plan.work import OPTIMIZER_STEP

ROWS, COLUMNS = Split(0, "tp"), Split(1, "tp")
SHARDS = Split(0, "dp_shard")
PLACEMENTS = {
    "whole": ParameterPlacement("a", (70, 64)),
    "rows that do not divide": ParameterPlacement("b", (70, 64), (ROWS,)),
    "columns": ParameterPlacement("c", (64, 96), (COLUMNS,)),
    "q, k and v": ParameterPlacement("d", (64, 72), (Split(1, "tp", blocks=3),)),
    "shards": ParameterPlacement("e", (71, 60), (SHARDS,)),
    "columns in shards": ParameterPlacement("f", (71, 60), (COLUMNS, SHARDS)),
    "padded rows in shards": ParameterPlacement("g", (2111, 2), (ROWS, SHARDS)),
    "a vector": ParameterPlacement("h", (4099,), (ROWS,)),
    "kernels": ParameterPlacement("i", (12, 40, 3, 3), (COLUMNS,)),
}
"""Parameters with blocks that ranks share, of 4,096 elements at least."""


def part(whole: Tensor, placement: ParameterPlacement, mesh: Any) -> Tensor:
    """Return a rank's part of a tensor: padded for tensor ranks, as torch shards it for data ranks."""
    for split in placement.splits:
        index, size = mesh.index(split.axis), mesh.size(split.axis)
        if split.axis == "tp":
            whole = part_of(whole, split, index, size)
        else:
            shards = whole.chunk(size)
            whole = shards[index] if index < len(shards) else whole[:0]
    return whole.contiguous()


def ranks_of(tensor: int, shards: int) -> list[Any]:
    """Return a mesh without processes for each rank."""
    sizes = {"tp": tensor, "dp_shard": shards}
    return [
        SimpleNamespace(size=sizes.__getitem__, index={"tp": one, "dp_shard": other}.__getitem__)
        for one, other in product(range(tensor), range(shards))
    ]


CPU = torch.device("cpu")


def coded(key: str, numbers: Tensor) -> Tensor:
    """Return the codes of numbers as unsigned bytes."""
    return MAPS[key].codes(CPU)[code_index(numbers).long()].view(torch.uint8).long()


class TestTheMaps:
    def test_unsigned_codes_equal_the_paper(self):
        """Dettmers et al. 2022, section 2.1: a decimal exponent, and linear fractions from 0.1 to 1 for the rest."""
        expected = [0.0, 1.0]
        for zeros in range(7):
            edges = torch.linspace(0.1, 1, 2 ** (7 - zeros) + 1, dtype=torch.float64)
            expected += ((edges[:-1] + edges[1:]) / 2 * 10.0**-zeros).tolist()
        values = MAPS[SECOND].values(CPU).tolist()
        assert values[1:] == pytest.approx(sorted(expected)[1:])
        assert 0 < values[0] < values[1]  # instead of 0

    @pytest.mark.parametrize("key", MAPS)
    def test_each_number_has_the_code_of_its_cell(self, key: str):
        values = MAPS[key].values(CPU)
        used = torch.tensor([code for code in range(256) if key == SECOND or code != 128])
        assert torch.equal(coded(key, values[used]), used)
        numbers = torch.rand(10_000, generator=torch.Generator().manual_seed(0)).pow(6)
        decade = ((numbers * 1.002).log10().floor() + 7).clamp(min=0)
        cells = 2 ** (decade + int(key == SECOND)) - (decade == 6).float() * int(key == FIRST)
        half = 0.45 * 10 ** (decade - 6) / cells + 1e-7
        for sign in (1, -1) if key == FIRST else (1,):
            found = values[coded(key, sign * numbers)]
            assert ((found - sign * numbers).abs() <= half + numbers / 1024).all()  # 9 bits of the fraction count

    def test_the_largest_numbers_are_exact(self):
        codes = coded(FIRST, torch.tensor([1.0, -1.0, 0.0, -0.0]))
        assert MAPS[FIRST].values(CPU)[codes].tolist() == [1.0, -1.0, 0.0, 0.0]
        assert MAPS[SECOND].values(CPU)[coded(SECOND, torch.ones(1))].tolist() == [1.0]


@pytest.mark.parametrize(("tensor", "shards"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_element_lies_in_the_block_of_the_whole_parameter(name: str, tensor: int, shards: int):
    placement = PLACEMENTS[name]
    index = torch.arange(1, prod(placement.shape) + 1).view(placement.shape)
    seen = []
    for mesh in ranks_of(tensor, shards):
        own = part(index, placement, mesh)
        for rows in block_rows(placement, own.shape, mesh, own.device).pieces(BLOCK * 3):
            found = rows.of(own)
            is_real = found > 0  # padding is 0
            blocks = rows.spread(torch.arange(num_blocks(placement.shape))).expand_as(found)
            assert torch.equal(((found - 1) // BLOCK)[is_real], blocks[is_real])
            seen.append(found[is_real])
    assert set(torch.cat(seen).tolist()) == set(range(1, index.numel() + 1))


def trained(placements: dict[str, ParameterPlacement], mesh: ParallelMesh | None, steps: int = 3) -> list[dict]:
    """Return the state and the part of each parameter after some steps with the same gradients on all ranks."""
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, placement in placements.items():
        whole = torch.randn(placement.shape, generator=generator)
        parameters[name] = nn.Parameter(whole if mesh is None else part(whole, placement, mesh))
    named = list(parameters.items())
    access = WholeAccess({parameter: placements[name] for name, parameter in named}, mesh)
    recipe = AdamW8bit(name="adamw_8bit", learning_rate=0.01, weight_decay=0.1)
    optimizer = build_optimizer(recipe, TrainedParameters(parameters, whole=access))
    for _ in range(steps):
        for name, parameter in named:
            # Sizes differ by element, as those of gradients do.
            shape = placements[name].shape
            whole = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(4)
            parameter.grad = whole if mesh is None else part(whole, placements[name], mesh)
        optimizer.step()
    return [{"weight": parameter.detach(), **optimizer.state[parameter]} for parameter in parameters.values()]


def on_ranks(tensor: int, shards: int) -> dict[str, tuple[bool, ...]]:
    """Return whether a rank has its part of the state of one process, bit for bit."""
    mesh = ParallelMesh(torch.device("cpu"), tp=tensor, dp_shard=shards)
    found = {}
    for name, mine, whole in zip(PLACEMENTS, trained(PLACEMENTS, mesh), trained(PLACEMENTS, None), strict=True):
        own = {key: part(whole[key], PLACEMENTS[name], mesh) for key in ("weight", FIRST, SECOND)}
        is_padding = part(torch.ones(PLACEMENTS[name].shape), PLACEMENTS[name], mesh) == 0
        same = [torch.equal(mine[key].masked_fill(is_padding, 0), one) for key, one in own.items()]
        found[name] = (*same, torch.equal(mine[SCALES], whole[SCALES]))
    return found


@pytest.mark.parametrize(("tensor", "shards"), [(1, 3), pytest.param(2, 2, marks=pytest.mark.nightly)])
def test_any_placement_has_the_codes_and_scales_of_one_process(ranks: RankPools, tensor: int, shards: int):
    for found in ranks(tensor * shards).run(on_ranks, tensor, shards):
        assert {name for name, same in found.items() if not all(same)} == set(), found


class TestOneProcess:
    @staticmethod
    def both(size: int, steps: int, scale: float = 1.0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the changes of a vector under AdamW and with 8 bits, and the state of the latter."""
        changes = []
        for recipe in (AdamW(weight_decay=0.1), AdamW8bit(name="adamw_8bit", weight_decay=0.1)):
            generator = torch.Generator().manual_seed(0)
            weight = torch.randn(size, generator=generator)
            parameter = nn.Parameter(weight.clone())
            optimizer = build_optimizer(recipe, TrainedParameters({"weight": parameter}))
            mean = torch.randn(size, generator=generator)
            for _ in range(steps):
                parameter.grad = (mean + torch.randn(size, generator=generator)) * scale
                optimizer.step()
            changes.append(parameter.detach() - weight)
            held = sum(value.nbytes for key, value in optimizer.state[parameter].items() if key != "step")
            assert optimizer.state_bytes(parameter, (size,), size) == held
        return changes[0], changes[1], optimizer.state[parameter]

    @pytest.mark.parametrize("size", [1, 4095])
    def test_small_parameters_have_the_moments_of_adamw(self, size: int):
        plain, found, state = self.both(size, 3)
        assert torch.equal(found, plain)
        assert state["exp_avg"].dtype == torch.float32

    def test_the_first_step_is_that_of_adamw(self):
        """Moments are rounded after the update that they make."""
        plain, found, _ = self.both(5000, 1)
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-7)

    def test_later_steps_are_close_to_adamw(self):
        plain, found, state = self.both(5000, 30)
        assert (found - plain).norm() / plain.norm() < 0.02
        held = sum(state[key].nbytes for key in (FIRST, SECOND, SCALES))
        assert held == 2 * 5000 + 8 * 20

    def test_without_a_gradient_nothing_changes_and_zeros_stay_zeros(self):
        parameter, other = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64))
        optimizer = build_optimizer(AdamW8bit(name="adamw_8bit"), TrainedParameters({"a": parameter, "b": other}))
        parameter.grad = torch.zeros(64, 64)
        for _ in range(2):
            optimizer.step()
        assert torch.equal(parameter, torch.ones(64, 64))
        assert other not in optimizer.state
        assert not optimizer.state[parameter][SCALES].any()
        parameter.grad = torch.ones(64, 64)  # the first gradient of a row of an embedding
        optimizer.step()
        assert (1 - parameter.detach()).abs().max() < 3e-4

    def test_a_small_second_moment_beside_a_first_one_makes_no_huge_step(self):
        """A second moment that is rounded to 0 would."""
        parameter = nn.Parameter(torch.zeros(64, 64))
        optimizer = build_optimizer(
            AdamW8bit(name="adamw_8bit", learning_rate=1.0), TrainedParameters({"a": parameter})
        )
        parameter.grad = torch.full((64, 64), 1e-4)
        parameter.grad[:, 0] = 1.0
        optimizer.step()
        before = parameter.detach().clone()
        parameter.grad[:, 1:] = 0.0
        optimizer.step()
        assert (parameter.detach() - before).abs().max() < 2

    @pytest.mark.parametrize("scale", [1e-30, 1e25])
    def test_huge_and_tiny_gradients_leave_finite_weights(self, scale: float):
        _, found, state = self.both(5000, 3, scale)
        assert found.isfinite().all()
        assert state[SCALES].isfinite().all()

    def test_pieces_change_nothing(self, monkeypatch: pytest.MonkeyPatch):
        _, expected, _ = self.both(5000, 3)
        monkeypatch.setattr(eight_bits, "_PIECE", 1024)
        assert torch.equal(self.both(5000, 3)[1], expected)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
class TestTheKernels:
    @pytest.mark.slow
    def test_in_tritons_interpreter(self):
        run_interpreted(Path(__file__).with_name("interpreted_eight_bits.py"))

    @pytest.mark.parametrize("is_whole", [True, False])
    def test_their_code_rounds_each_operation(self, is_whole: bool):
        """A product and a sum in one instruction, or a quick quotient, would have other codes than a CPU."""
        from triton import compile
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from trainer.features.adamw_8bit import adamw_8bit_kernels as eight_bit_kernels

        kernel = eight_bit_kernels.update_kernel
        options = fused_eight_bits._options(BLOCK if is_whole else 64)
        constants = {name: options.pop(name) for name in ("WIDTH", "ROWS")}
        constants |= dict.fromkeys(("blocks", "maxima", "flag") if is_whole else ())
        types = {
            **dict.fromkeys(("num_elements", "num_blocks"), "i32"),
            **dict.fromkeys(("eps", "decay"), "fp32"),
            **{"first": "*i8", "second": "*u8", "blocks": "*i32", "shares": ("fp32",) * 4},
            **{"values": ("*fp32", "*fp32"), "codes": ("*i8", "*u8")},
        }
        signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): one for name, one in constants.items()})
        code = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert {"mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= set(code.split())
        assert re.findall(r"\w*(?:fma|mad|ftz|approx|full)\w*\.[\w.]*f32", code) == []


@pytest.mark.parametrize(
    ("capability", "note"),
    [
        ((9, 0), "moments in 8 bits are updated in a fused kernel"),
        (
            (7, 5),
            "moments in 8 bits are updated by operations of torch, because the GPU Tesla T4 is older than compute"
            " capability 8.0",
        ),
    ],
)
def test_a_run_on_a_gpu_notes_the_kernel_of_8_bit_moments(monkeypatch, capability: tuple[int, int], note: str):
    monkeypatch.setattr(kernel_support, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    recipe = AdamW8bit(name="adamw_8bit")
    assert optimizer_class(recipe).notes(torch.device("cuda", 0)) == [note]
    assert optimizer_class(recipe).notes(torch.device("cpu")) == []
    other = optimizer_class(AdamW())([nn.Parameter(torch.zeros(1))])
    assert all("8 bits" not in line for line in other.notes(torch.device("cuda", 0)))


class TestPlans:
    VOCABULARY = 30_011
    RECIPE = recipe_of(
        {
            "model": {"config": {**SMALL_BERT, "vocab_size": VOCABULARY}, "tokenizer": "none"},
            "training": {"global_batch_size": 1, "micro_batch_size": 1},
            "optimizer": {"name": "adamw_8bit"},
        }
    )

    @pytest.mark.slow
    def test_count_one_pass_over_memory_where_the_kernel_runs(self):
        """The eager functions compute a piece of 2**20 elements in fp32, in some temporary tensors."""
        fused, eager = (plan_step(plan_run(self.RECIPE, 1), 0, 8, True, how) for how in (True, False))
        moved = [
            sum(amount.num_bytes for kind, amount in step.totals.work.items() if kind.phase == OPTIMIZER_STEP)
            for step in (fused, eager)
        ]
        elements = fused.peak.by_component[PARAMETERS] // 4
        assert 16 * elements <= moved[0] < 17 * elements
        assert moved[1] > 10 * moved[0]
        assert eager.peak.num_bytes - fused.peak.num_bytes > 3 * 4 * eight_bits._PIECE


def test_loaded_codes_are_in_the_order_of_the_elements():
    """The kernels read them so, whatever the strides of the parameter."""
    engine = build_tiny(tiny_recipe(optimizer={"name": "adamw_8bit"})).engine
    assert all(engine.optimizer.blank(key, torch.ones(4, 3).t()).is_contiguous() for key in MAPS)
