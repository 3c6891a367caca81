"""Every strategy trains BERT-base on one GPU with the same loss curve. `pytest -rP` prints memory and speed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.training import RANK_STRATEGIES, weights_of
from trainer.engine.builders import build_engine
from trainer.parallel.mesh import ParallelMesh, init_process_group
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.plan.reference import task_and_models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS, WARM_UP, BATCH, LENGTH = 20, 5, 32, 128
BERT_BASE = {"model_type": "bert", "vocab_size": 30522}  # transformers' defaults are BERT-base
# Relative, over 20 steps from random weights: the order of sums depends on the strategy.
LOSS_TOLERANCE = {"bf16": 0.02, "fp16": 0.01}


@dataclass(frozen=True)
class Measured:
    losses: list[float]
    peak_bytes: int
    samples_per_second: float


def recipe_of(strategy: str, precision: str) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "gpu",
            "task": {"type": "sequence_classification", "text": "text"},
            "model": {"config": BERT_BASE, "tokenizer": "none"},
            "data": {"source": "files", "train": "none"},
            "training": {"max_steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": BATCH},
            "optimizer": {"name": "adamw", "learning_rate": 5e-5},
            "precision": precision,
            "parallel": {"strategy": strategy},
        }
    )


def batches() -> Iterator[RankBatch]:
    """Iterate over batches of random rows. The first token of a row determines its label."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        ids = torch.randint(5, 30522, (BATCH, LENGTH), generator=generator)
        labels = (ids[:, 0] > 15000).long()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        yield RankBatch([Microbatch(inputs, labels, torch.arange(BATCH))], BATCH, ids.numel())


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    init_process_group(device, 0, 1, dist.HashStore(), timedelta(minutes=1))
    yield ParallelMesh(device)
    dist.destroy_process_group()


def train(strategy: str, precision: str, mesh: ParallelMesh) -> Measured:
    plan = plan_run(recipe_of(strategy, precision), 1)
    torch.cuda.reset_peak_memory_stats()
    task, built = task_and_models(plan, mesh)
    engine: Any = build_engine(built, task, mesh, plan, STEPS)
    losses, seconds = [], []
    for batch in batches():
        torch.cuda.synchronize()
        started = time.perf_counter()
        losses.append(engine.train_step(batch).loss)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated()
    weights = weights_of(engine, mesh)
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    assert _parameters(weights) == 109_483_778, "BERT-base with a head of two classes"
    if hasattr(engine, "_engine"):
        engine._engine.destroy()
    return Measured(losses, peak, BATCH / statistics.median(seconds[WARM_UP:]))


def _parameters(weights: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in weights.values())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_strategy_trains_bert_base(mesh: ParallelMesh, precision: str):
    strategies = [name for name in RANK_STRATEGIES if name != "hsdp"]  # on one rank hsdp is fsdp
    measured = {}
    for strategy in strategies:
        measured[strategy] = train(strategy, precision, mesh)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"\n| strategy, {precision} | peak memory (GiB) | samples/s |\n|---|---|---|")
    for strategy, row in measured.items():
        print(f"| `{strategy}` | {row.peak_bytes / 2**30:.2f} | {row.samples_per_second:.0f} |")
    expected = measured["ddp"].losses
    for strategy, row in measured.items():
        for step, (found, wanted) in enumerate(zip(row.losses, expected, strict=True), 1):
            assert found == pytest.approx(wanted, rel=LOSS_TOLERANCE[precision]), f"{strategy}, step {step}"
