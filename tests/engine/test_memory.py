"""The bytes of training state that a rank holds, measured in its tensors, against the formulas of the summary."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    RANK_STRATEGIES,
    TinyTraining,
    parallel_keys,
    tiny_recipe,
    tiny_training,
)
from trainer.parallel.shards.gathering import local_part
from trainer.parallel.state_bytes import StateBytes
from trainer.recipe.plan import plan_run
from trainer.recipe.strategies import STRATEGIES
from trainer.training.run_info import planned_state_bytes

# Large enough that padding is small beside it, with a vocabulary that no number of ranks divides.
MODEL = {
    "model_type": "bert",
    "vocab_size": 1511,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 32,
}
LARGEST_BYTES = 1511 * 64 * 4  # the word embedding
BUCKET_ELEMENTS = 50_000  # DeepSpeed's, made small so that it does not hide everything else
BUCKET_BYTES = BUCKET_ELEMENTS * 4
MICROBATCHES = 3


@dataclass
class Measured:
    """Of one rank: the most that it held of each kind, and the most of what is none of the three."""

    held: StateBytes
    other_bytes: int
    planned: StateBytes


def storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the memory behind the tensors; what two of them share, or what was `seen` before, counts once."""
    total = 0
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def gradients_of(training: TinyTraining) -> Iterator[Tensor]:
    yield from (p.grad for p in training.model.parameters() if p.grad is not None)
    for module in training.model.modules():
        if isinstance(module, FSDPModule):  # summed within a group of hsdp, and not across groups yet
            group = module._get_fsdp_state()._fsdp_param_group
            yield from tensors_in(group._partial_reduce_output)
    if deepspeed := getattr(training.engine, "_engine", None):  # which keeps a rank's part apart from the parameters
        yield from tensors_in(deepspeed.optimizer.averaged_gradients)
        yield from tensors_in(getattr(deepspeed.optimizer, "grad_partitions_flat_buffer", None))


def master_copies_of(training: TinyTraining) -> Iterator[Tensor]:
    if deepspeed := getattr(training.engine, "_engine", None):
        zero = deepspeed.optimizer
        is_partitioned = hasattr(zero, "fp32_partitioned_groups_flat")  # stage 3
        yield from zero.fp32_partitioned_groups_flat if is_partitioned else zero.single_partition_of_fp32_groups


def live_tensors() -> list[Tensor]:
    gc.collect()
    return [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]


def measure(strategy: str, world_size: int, **sections: Any) -> Measured:
    """Looks before each forward pass of two steps and, also at all else that is alive, at each optimizer step."""
    parallel = parallel_keys(strategy, world_size)
    if STRATEGIES[strategy].package:
        parallel["deepspeed"] = {"zero_optimization": {"reduce_bucket_size": BUCKET_ELEMENTS}}
    recipe = tiny_recipe(
        model={"config": MODEL},
        training={"max_steps": 2, "micro_batch_size": 1, "global_batch_size": MICROBATCHES * world_size},
        parallel=parallel,
        **sections,
    )
    earlier, known = live_tensors(), set[int]()  # DeepSpeed keeps engines of stage 3 that earlier tests have closed
    storage_bytes(earlier, known)
    with tiny_training(recipe) as training:
        optimizer, looks = training.engine.optimizer, []

        def look(others: list[Tensor]) -> None:
            seen = set(known)
            looks.append(
                (
                    storage_bytes(training.engine.held().values(), seen),
                    storage_bytes(gradients_of(training), seen),
                    storage_bytes([*tensors_in(list(optimizer.state.values())), *master_copies_of(training)], seen),
                    storage_bytes(others, seen),
                )
            )

        training.model.register_forward_pre_hook(lambda *_: look([]), prepend=True)
        optimizer.register_step_pre_hook(lambda *_: look(live_tensors()))
        training.steps(2)
        parameters, gradients, state, other = (max(column) for column in zip(*looks, strict=True))
        return Measured(
            StateBytes(parameters, gradients, state),
            other,
            planned_state_bytes(
                plan_run(recipe, world_size), training.parts.models, training.engine.placements, training.mesh
            ),
        )


def padding_bytes(strategy: str, world_size: int) -> int:
    """What makes parts equal: of each of two groups of parameters, or of each tensor."""
    if STRATEGIES[strategy].package and strategy != "zero3":
        return 4 * 2 * 2 * world_size  # each group's flat copy is a multiple of twice the ranks
    return 4 * 60  # of AdamW, a count of steps beside each tensor


def border_bytes(strategy: str) -> int:
    """ZeRO-2 holds whole the gradient of a parameter that lies across a border between two ranks: at most two."""
    return 2 * LARGEST_BYTES if strategy == "zero2" else 0


def working_bytes(strategy: str, measured: Measured, world_size: int) -> int:
    """What a strategy holds beside the three while it steps; see docs/strategies.md."""
    flat_gradients = measured.held.parameters // (1 if strategy == "zero3" else world_size)
    if strategy in ("zero1", "zero2"):
        return flat_gradients + 2 * LARGEST_BYTES + 2 * BUCKET_BYTES
    if strategy == "zero3":
        return flat_gradients + 2 * BUCKET_BYTES
    return 0


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        *(
            pytest.param(name, 2, marks=() if name in ("ddp", "fsdp", "zero3") else pytest.mark.slow)
            for name in RANK_STRATEGIES
        ),
        *(
            pytest.param(name, 3, marks=pytest.mark.slow if name == "zero3" else pytest.mark.nightly)
            for name in RANK_STRATEGIES
        ),
    ],
)
def test_a_rank_holds_the_bytes_of_the_summary(ranks: RankPools, strategy, world_size):
    outcomes = ranks(world_size).run(measure, strategy, world_size)
    padding = padding_bytes(strategy, world_size)
    for kind in ("parameters", "gradients", "optimizer"):
        held = max(getattr(measured.held, kind) for measured in outcomes)
        planned = getattr(outcomes[0].planned, kind)
        named = padding + (border_bytes(strategy) if kind == "gradients" else 0)
        assert 0.95 * planned <= held <= 1.05 * planned + named, kind
    for measured in outcomes:
        allowed = 0.01 * measured.planned.total + working_bytes(strategy, measured, world_size)
        assert measured.other_bytes <= allowed, "beside parameters, gradients and optimizer state"


@pytest.mark.parametrize("weights", ["bf16_compensated", pytest.param("bf16_stochastic", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_bf16_weights_hold_the_bytes_of_the_summary(ranks: RankPools, weights: str):
    measured = ranks(2).run(measure, "ddp", 2, precision="bf16", weights=weights)[0]
    (fp32,) = {found.planned.total for found in ranks(2).run(measure, "ddp", 2)}
    for kind in ("parameters", "gradients", "optimizer"):
        held, planned = getattr(measured.held, kind), getattr(measured.planned, kind)
        assert 0.95 * planned <= held <= 1.05 * planned + padding_bytes("ddp", 2), kind
    assert measured.planned.total == fp32 if weights == "bf16_compensated" else measured.planned.total < 0.95 * fp32


@pytest.mark.slow
def test_each_strategy_holds_less_than_the_one_before(ranks: RankPools):
    """In bytes, not in words: ZeRO's three stages, then fully_shard, which needs no master copy."""
    held = {
        strategy: max(m.held.total for m in ranks(2).run(measure, strategy, 2))
        for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp")
    }
    assert sorted(held, key=held.__getitem__, reverse=True) == list(held)
    assert held["fsdp"] == pytest.approx(held["ddp"] / 2, rel=0.05)
