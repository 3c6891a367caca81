"""Parity: the same recipe gives the same training with every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankError, RankPools
from tests.helpers.training import RANK_STRATEGIES, tiny_recipe, train_tiny
from tests.helpers.turns import once
from tests.parity.cases import (
    OTHER_FAMILIES,
    SHORT,
    Case,
    Outcome,
    assert_parity,
    assert_same_curve,
    communication_matrix,
    context_matrix,
    image_cases,
    largest_difference,
    matrix,
    optimizer_matrix,
    pipeline_matrix,
    reference,
    relative,
    tensor_matrix,
    train,
    weights_matrix,
)
from trainer.models.families.table import FAMILIES

ALL = [
    case
    for cases in (
        matrix,
        tensor_matrix,
        context_matrix,
        pipeline_matrix,
        communication_matrix,
        optimizer_matrix,
        weights_matrix,
        image_cases,
    )
    for case in cases()
    if case.is_registered
]


def _has_near_relative(case: Case) -> bool:
    """Whether other cases have the same parts in other pairs: a family in a cut, and an optimizer or type in a layout.

    `tests/models/` compares each family in each cut with the whole model.
    """
    is_cut = max(case.tensor, case.stages, case.context) > 1
    if case.model_type in ("albert", "deberta-v2", "llama", "qwen3") and case.world_size == 2:
        return is_cut
    if case.gradients != "fp32":
        return is_cut or case.strategy in ("hsdp", "zero3")
    if case.weights != "fp32":
        return is_cut and case.strategy == "ddp"
    return case.optimizer in ("adamw_8bit", "schedule_free_adamw", "adafactor") and case.strategy != "ddp"


def _marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    if case.is_nightly or (not case.is_fast and _has_near_relative(case)):
        return (pytest.mark.nightly,)
    return () if case.is_fast else (pytest.mark.slow,)


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=_marks(case)) for case in ALL])
def test_any_layout_is_one_process(ranks: RankPools, case: Case):
    assert_parity(ranks(case.world_size).run(train, case), case)


def test_the_matrix_holds_any_two_levels_together():
    cases = list(matrix())
    assert len({str(case) for case in cases}) == len(cases)
    assert {case.strategy for case in cases if case.is_fast} == set(RANK_STRATEGIES)
    assert {case.strategy for case in cases if case.num_steps >= 10} == set(RANK_STRATEGIES)
    assert {case.strategy for case in cases if case.precision == "fp32" and case.accumulates} == set(RANK_STRATEGIES)
    levels: dict[str, Sequence[object]] = {
        "strategy": RANK_STRATEGIES,
        "world_size": (2, 3, 4),
        "accumulates": (False, True),
        "precision": ("fp32", "bf16", "fp16"),
        "checkpointing": ("none", "selective", "full"),
        "dropout": (0.0, 0.1),
    }
    for one, other in combinations(levels, 2):
        met = {(getattr(case, one), getattr(case, other)) for case in cases if not case.is_extra}
        assert met == set(product(levels[one], levels[other])), (one, other)


def test_the_tensor_matrix_covers_its_promise():
    cases = list(tensor_matrix())
    assert {case.model_type for case in cases} == FAMILIES.keys() - {*OTHER_FAMILIES}
    for strategy in {case.strategy for case in matrix()}:
        own = [case for case in cases if case.strategy == strategy and case.model_type == "bert"]
        assert {case.tensor for case in own} == {2, 4}
        assert {case.sequence for case in own} == {True, False}
        assert {case.precision for case in own} == {"fp32", "bf16", "fp16"}
        assert {case.checkpointing for case in own} == {"none", "selective", "full"}
        assert {case.dropout for case in own} == {0.0, 0.1}


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no_dropout", "dropout"])
@pytest.mark.parametrize("micro_batch_size", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_accumulation_on_one_process_changes_nothing(micro_batch_size, dropout):
    recipe = tiny_recipe(model={"dropout": dropout}, training={"micro_batch_size": micro_batch_size})
    assert_same_curve(train_tiny(recipe, num_steps=SHORT), reference("fp32", dropout).curve)


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "zero3"))]
)
def test_the_ragged_last_batch_leaves_a_rank_without_rows(ranks: RankPools, strategy):
    """Use 13 rows in batches of 12: the second step has one row, and two of three ranks have only padding rows."""
    keys = {"model": {"dropout": 0.1}}
    expected = train_tiny(tiny_recipe(**keys, training={"max_steps": 4}), num_rows=13)
    recipe = tiny_recipe(**keys, training={"max_steps": 4, "micro_batch_size": 2}, parallel={"strategy": strategy})
    for curve in ranks(3).run(train_tiny, recipe, num_rows=13):
        assert_same_curve(curve, expected)


MIXED = {"data": {"train": ["few", "many"], "mixture": [0.7, 0.3]}, "model": {"dropout": 0.1}}


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {"strategy": "ddp"}),
        pytest.param(3, {"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "ddp", "pipeline": {"stages": 2}}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "ddp", "tensor": 2}, marks=pytest.mark.nightly),
        pytest.param(2, {"strategy": "zero2"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_mixture_is_that_of_one_process(ranks: RankPools, world_size: int, parallel: dict[str, Any]):
    """A source of ten rows gives 35 of the 50 rows of an epoch."""
    expected = once("parity of a mixture", lambda: train_tiny(tiny_recipe(**MIXED), num_steps=SHORT))
    plain = reference("fp32", 0.1).curve
    assert relative(expected.losses[0], plain.losses[0]) > 1e-3, "or the mixture changes nothing"
    recipe = tiny_recipe(**MIXED, training={"micro_batch_size": 2}, parallel=parallel)
    for curve in ranks(world_size).run(train_tiny, recipe, num_steps=SHORT):
        assert_same_curve(curve, expected)


def test_the_same_layout_twice_is_equal_bit_for_bit(ranks: RankPools):
    recipe = Case("ddp", 2, True, "fp32", "none", 0.1).recipe()
    one, two = (ranks(2).run(train_tiny, recipe, num_steps=SHORT)[0] for _ in range(2))
    assert one.losses == two.losses
    assert one.grad_norms == two.grad_norms
    assert largest_difference(one, two) == 0.0


class TestTheTestCanFail:
    """Deliberate mistakes, which the comparison must detect."""

    def test_another_seed(self):
        with pytest.raises(AssertionError):
            assert_same_curve(
                train_tiny(tiny_recipe(model={"dropout": 0.0}, training={"seed": 1})), reference("fp32", 0.0).curve
            )

    @pytest.mark.parametrize(
        ("strategy", "mistake", "words"),
        [
            ("ddp", "doubled_buckets", "norm of step 1"),
            pytest.param("fsdp", "doubled_shards", "norm of step 1", marks=pytest.mark.slow),
            pytest.param("fsdp", "averaged_shards", "norm of step 1", marks=pytest.mark.nightly),
            pytest.param("hsdp", "doubled_shards", "norm of step 1", marks=pytest.mark.nightly),
            pytest.param("zero2", "doubled_losses", "norm of step 1", marks=pytest.mark.slow),
            pytest.param("zero3", "doubled_losses", "norm of step 1", marks=pytest.mark.nightly),
            pytest.param("fsdp", "mean_of_means", "loss of step", marks=pytest.mark.slow),
            pytest.param("zero1", "mean_of_means", "loss of step", marks=pytest.mark.nightly),
            pytest.param("fsdp", "dropout_keyed_by_rank", "loss of step 1", marks=pytest.mark.slow),
            pytest.param("zero3", "dropout_keyed_by_rank", "loss of step 1", marks=pytest.mark.nightly),
        ],
    )
    def test_a_planted_mistake(self, ranks: RankPools, strategy, mistake, words):
        case = Case(strategy, 3 if mistake == "mean_of_means" else 2, False, "fp32", "none", 0.1)
        with pytest.raises(AssertionError, match=words):
            assert_parity(ranks(case.world_size).run(train_with, mistake, case), case)

    def test_a_layer_left_whole(self, ranks: RankPools):
        case = Case("fsdp", 2, False, "fp32", "none", 0.1)
        with pytest.raises(RankError, match="a parameter was left whole"):
            ranks(2).run(train_with, "layer_left_whole", case)


def train_with(mistake: str, case: Case) -> Outcome:
    """Train a case on this rank, with a mistake in the trainer."""
    with MISTAKES[mistake]():
        return train(case)


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within the context, replace `owner.name` by `make(owner.name)`."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _doubled_buckets():
    from trainer.engine import ddp

    return _replaced(
        ddp,
        "_sum_gradients",
        lambda summed: (
            lambda group, sent_in, bucket: summed(group, sent_in, bucket).then(lambda future: future.value() * 2)
        ),
    )


def _doubled_shards():
    from torch.distributed.fsdp import FSDPModule

    return _replaced(FSDPModule, "set_gradient_divide_factor", lambda set_: lambda self, factor: set_(self, factor / 2))


def _averaged_shards():
    """Average the gradients over ranks, which is the default of `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    return _replaced(FSDPModule, "set_gradient_divide_factor", lambda set_: lambda self, factor: set_(self, 2.0))


def _doubled_losses():
    import deepspeed

    return _replaced(
        deepspeed.DeepSpeedEngine,
        "backward",
        lambda backward: lambda self, loss, **options: backward(self, loss * 2, **options),
    )


def _mean_of_means():
    """Average the mean losses of ranks, as most trainers do. It is wrong if ranks have different numbers of rows."""
    from trainer.tasks.sequence_classification import SequenceClassificationTask

    return _replaced(
        SequenceClassificationTask,
        "loss_sum",
        lambda summed: lambda self, logits, labels: summed(self, logits, labels) / len(labels) * 4,
    )


def _dropout_keyed_by_rank():
    from trainer.engine import forward

    rank = torch.distributed.get_rank()
    return _replaced(
        forward, "MicrobatchKey", lambda key: lambda step, rows, *rest: key(step, rows + 1000 * rank, *rest)
    )


def _layer_left_whole():
    from trainer.engine import sharded

    def skipping(fully_shard: Any) -> Any:
        def shard(module: Any, **options: Any) -> Any:
            first = getattr(module, "bert", None)
            ignored = set(first.encoder.layer[0].parameters()) if first else set()
            return (
                module
                if type(module).__name__ == "BertLayer"
                else fully_shard(module, ignored_params=ignored, **options)
            )

        return shard

    return _replaced(sharded, "fully_shard", skipping)


MISTAKES = {
    "doubled_buckets": _doubled_buckets,
    "doubled_shards": _doubled_shards,
    "averaged_shards": _averaged_shards,
    "doubled_losses": _doubled_losses,
    "mean_of_means": _mean_of_means,
    "dropout_keyed_by_rank": _dropout_keyed_by_rank,
    "layer_left_whole": _layer_left_whole,
}
