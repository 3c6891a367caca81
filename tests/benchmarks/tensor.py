"""A BERT on two tensor ranks: our blocks, DTensor's `parallelize_module` and transformers' `DistributedConfig`.

All three shard the same matrices of the same model, without dropout, and take the same AdamW steps. They alternate in
the same processes in blocks of steps, and the ratios are medians over the rounds. The peak memory is measured in
separate processes for each of them. From the root of the repository:

    python -m tests.benchmarks.tensor --models small medium --rounds 20
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DistributedConfig,
)

from tests.helpers.memory import status_bytes
from tests.helpers.ranks import RankPool
from trainer.models.tensor_split import split_model
from trainer.parallel.row_groups import RowGroups

RANKS, ROWS, LENGTH, LABELS = 2, 16, 128, 3
MODELS = {
    "small": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "medium": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "base": {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072},
}
"""BERT sizes. `base` has the width of BERT-base and a third of its layers."""
COLUMNS = ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
ROWS_CUT = ("attention.output.dense", "output.dense")


def config(size: str) -> BertConfig:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(vocab_size=8000, num_labels=LABELS, **MODELS[size], **dropout)


def blocks(folder: Path) -> nn.Module:
    model = BertForSequenceClassification.from_pretrained(folder)
    split_model(model, RowGroups(dist.group.WORLD))
    return model


def dtensor(folder: Path) -> nn.Module:
    model = BertForSequenceClassification.from_pretrained(folder)
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS_CUT}
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.bert.encoder.layer:
        parallelize_module(layer, mesh, plan)
    return model


def distributed_config(folder: Path) -> nn.Module:
    plan = {f"encoder.layer.*.{name}": "colwise" for name in COLUMNS}
    plan |= {f"encoder.layer.*.{name}": "rowwise" for name in ROWS_CUT}
    return AutoModelForSequenceClassification.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=RANKS, tp_plan={f"bert.{k}": v for k, v in plan.items()})
    )


OURS = "our blocks"
CONTESTANTS: dict[str, Callable[[Path], nn.Module]] = {
    OURS: blocks,
    "DTensor, parallelize_module": dtensor,
    "transformers, DistributedConfig": distributed_config,
}


@dataclass
class Training:
    """A model with its optimizer and batch. The step is the same for all contestants."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: dict[str, Tensor]
    labels: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> Training:
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(5, 8000, (ROWS, LENGTH), generator=random)
        labels = torch.randint(0, LABELS, (ROWS,), generator=random)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        return cls(model.train(), optimizer, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels)

    def step(self) -> float:
        loss = F.cross_entropy(self.model(**self.inputs).logits, self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def compete(folder: Path, num_rounds: int, num_steps: int) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Return this rank's seconds per step (by round and contestant), and the losses of a first round, the warm-up."""
    _name_rank_in_environment()
    trainings = {name: Training.of(make(folder)) for name, make in CONTESTANTS.items()}
    first = {name: [training.step() for _ in range(num_steps)] for name, training in trainings.items()}
    rounds = []
    for number in range(num_rounds):
        order = list(trainings)
        order = order[number % 3 :] + order[: number % 3]  # rotates the order to cancel the effect of the predecessor
        seconds = {}
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(num_steps):
                trainings[name].step()
            seconds[name] = (time.perf_counter() - start) / num_steps
        rounds.append(seconds)
    return rounds, first


def peak_bytes(folder: Path, name: str, num_steps: int) -> int:
    """Return the peak memory that a contestant's model and steps add on this rank, alone in its process."""
    _name_rank_in_environment()
    gc.collect()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    training = Training.of(CONTESTANTS[name](folder))
    for _ in range(num_steps):
        training.step()
    return status_bytes("VmHWM") - before


def _name_rank_in_environment() -> None:
    """Set the variables by which transformers finds the existing process group."""
    variables = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def on_fresh_ranks(function: Callable[..., object], *args: object) -> list[object]:
    pool = RankPool(RANKS)
    try:
        return pool.run(function, *args, timeout_seconds=3600)
    finally:
        pool.close()


def report(size: str, num_rounds: int, num_steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        BertForSequenceClassification(config(size)).save_pretrained(folder)
        rounds, first = on_fresh_ranks(compete, folder, num_rounds, num_steps)[0]
        peaks = {name: max(on_fresh_ranks(peak_bytes, folder, name, num_steps)) for name in CONTESTANTS}
    for losses in first.values():  # otherwise they do not compute the same training
        assert all(abs(one - other) < 1e-4 for one, other in zip(losses, first[OURS], strict=True)), first
    print(f"\n{size} BERT, {RANKS} tensor ranks, {ROWS} rows of {LENGTH} tokens\n")
    print("| | ms a step | time of our blocks | peak memory of a rank |\n|---|---|---|---|")
    for name in CONTESTANTS:
        ratios = [seconds[name] / seconds[OURS] for seconds in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        milliseconds = 1000 * statistics.median(seconds[name] for seconds in rounds)
        times = f"{middle:.2f} ({low:.2f} to {high:.2f}) times"
        print(f"| {name} | {milliseconds:.1f} | {times} | {peaks[name] / 1e6:.1f} MB |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["small", "medium"], help="sizes of BERT")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count; one more warms up")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each contestant in a round")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # before a rank imports torch, because ranks share the cores
    for size in options.models:
        report(size, options.rounds, options.steps)


if __name__ == "__main__":
    main()
