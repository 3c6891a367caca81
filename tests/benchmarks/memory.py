"""Host memory of a rank in loading, training and saving, for each strategy.

A tied BERT for masked language modelling is loaded, trained for two steps, saved and exported in two sizes. They differ
in the number of layers only. The growth of each peak, divided by the growth of the weights, is the multiple of the
whole model that a rank holds; everything that does not grow with the model cancels out. From the root of the
repository:

    python -m tests.benchmarks.memory --ranks 2 4

Peaks are those of resident memory (`VmHWM`) in new processes, after the same work with a tiny model. They include
mapped pages of files. On a CPU, the memory of the device is host memory, so training is not divided between the two.
The last column is the peak of a GPU in a step, from `trainer plan`; no GPU has measured it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, BertForMaskedLM

from tests.helpers.memory import return_freed_memory, status_bytes
from tests.helpers.ranks import RankPool
from tests.helpers.training import tiny_recipe, tiny_training
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.models import save
from trainer.models.weight_files import plan_files
from trainer.parallel.shards.gathering import local_part
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.plan.pipeline_plan import plan_steps

BERT = {
    "model_type": "bert",
    "vocab_size": 8000,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "max_position_embeddings": 64,
}
LARGEST_BYTES = 8000 * 512 * 4  # its word embedding, which is tied to the head
LAYERS = (4, 8)
FILE_BYTES = 8_000_000
"""The size of exported files: far below that of the model, as 5 GB are far below that of a large one."""
_FEW = 1 << 18  # elements, 1 MB
DEEPSPEED = {
    "zero_optimization": {
        "reduce_bucket_size": _FEW,
        "allgather_bucket_size": _FEW,
        "stage3_max_live_parameters": _FEW,
        "stage3_max_reuse_distance": _FEW,
        "stage3_prefetch_bucket_size": _FEW,
        "stage3_param_persistence_threshold": 1000,
        "sub_group_size": _FEW,
    }
}
"""Buffers far below the model. The defaults, of up to 4 GB, hold all of a small model."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, broadcast": {"strategy": "fsdp", "load": "broadcast"},
    "fsdp, offload": {"strategy": "fsdp", "offload": "parameters"},
    "hsdp, 2 groups": {"strategy": "hsdp", "shard": 2},
    "zero1": {"strategy": "zero1", "deepspeed": DEEPSPEED},
    "zero1, offload": {"strategy": "zero1", "offload": "optimizer", "deepspeed": DEEPSPEED},
    "zero2": {"strategy": "zero2", "deepspeed": DEEPSPEED},
    "zero2, offload": {"strategy": "zero2", "offload": "optimizer", "deepspeed": DEEPSPEED},
    "zero3": {"strategy": "zero3", "deepspeed": DEEPSPEED},
    "zero3, offload": {"strategy": "zero3", "offload": "parameters", "deepspeed": DEEPSPEED},
    "tensor": {"strategy": "ddp", "tensor": "all"},
    "pipeline": {"strategy": "ddp", "pipeline": {"stages": "all"}},
    "fsdp x tensor 2": {"strategy": "fsdp", "tensor": 2},
    "zero3 x tensor 2": {"strategy": "zero3", "tensor": 2, "deepspeed": DEEPSPEED},
}
LONGEST = 17  # tokens of a row
FOUR_ONLY = ("hsdp, 2 groups", "fsdp x tensor 2", "zero3 x tensor 2")


@dataclass(frozen=True)
class Peaks:
    """The bytes of one rank: the weights that it keeps, and the growth of its memory at the peak of each phase.

    `checkpoint` and `export` are beyond the memory before them, the others beyond that of a rank without a model.
    """

    held: int
    loading: int
    drawing: int
    training: int
    checkpoint: int
    export: int


PHASES = ("loading", "drawing", "training", "checkpoint", "export")
DEVICE = "planned device"


def _settled() -> int:
    """Return free memory to the system, forget the peak, and return the resident bytes."""
    gc.collect()
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def live(recipe: Recipe, folder: Path, without: int | None = None) -> dict[str, int]:
    """Load, train, save and export on this rank; return the peaks, of the last two beyond the memory before each."""
    before = _settled()
    with tiny_training(recipe) as training:
        found = {"loading": status_bytes("VmHWM") - before}
        held = {local_part(part).data_ptr(): part.nbytes for part in training.engine.held().values()}
        found["held"] = sum(held.values())
        _settled()
        training.steps(2)
        found["training"] = status_bytes("VmHWM") - before
        disk = Disk(CheckpointStore(folder, 1), training.mesh, asynchronous=False)
        saver = Saver([disk], training.engine, training.mesh, Saved({}))
        training.mesh.on_rank_zero(disk.store.open)
        saver.progress = Progress(2, 24)
        for phase, action in (
            ("checkpoint", saver.save),
            ("export", lambda: training.parts.export(folder / "model")),
        ):
            start = _settled()
            action()
            found[phase] = status_bytes("VmHWM") - start
    return found


def drawing(recipe: Recipe) -> int:
    """Build a training with random weights, and return the growth at the peak."""
    before = _settled()
    with tiny_training(recipe):
        return status_bytes("VmHWM") - before


def measure(layout: Mapping[str, Any], num_layers: int, weights: str, folder: Path) -> Peaks:
    """Measure one layout on this rank."""
    return_freed_memory()
    save.plan_files = partial(plan_files, largest_file_bytes=FILE_BYTES)
    small = {**BERT, "num_hidden_layers": 4, "vocab_size": 400, "hidden_size": 64, "intermediate_size": 128}
    live(recipe_of(layout, {"config": small, "tokenizer": "none"}), folder / "small")  # imports, threads and buffers
    found = live(recipe_of(layout, {"name_or_path": weights}), folder / "large")
    config = {**BERT, "num_hidden_layers": num_layers}
    return Peaks(**found, drawing=drawing(recipe_of(layout, {"config": config, "tokenizer": "none"})))


def recipe_of(layout: Mapping[str, Any], model: Mapping[str, Any]) -> Recipe:
    return tiny_recipe(
        task={"type": "masked_lm", "text": "text"},
        model={"config": None, "tokenizer": None, **model},
        training={"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 1},
        parallel=layout,
    )


def planned(layout: Mapping[str, Any], ranks: int, num_layers: int) -> int:
    """Return the bytes of the largest rank's device at the peak of a step, as `trainer plan` counts them for a GPU."""
    plan = plan_run(
        recipe_of(layout, {"config": {**BERT, "num_hidden_layers": num_layers}, "tokenizer": "none"}), ranks
    )
    return max(step.peak.num_bytes for step in plan_steps(plan, LONGEST))


def layouts_of(ranks: int, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the layouts with their degrees for a number of ranks."""
    for name in names:
        if ranks == 4 or name not in FOUR_ONLY:
            yield name, json.loads(json.dumps(LAYOUTS[name]).replace('"all"', str(ranks)))


def on_fresh_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    pool = RankPool(ranks)
    try:
        return pool.run(function, *args, timeout_seconds=900)
    finally:
        pool.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=(2, 4), help="numbers of processes")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--layers", type=int, nargs=2, default=LAYERS, help="layers of the two models")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # before a rank imports torch, because ranks share the cores
    print(f"| ranks | layout | {' | '.join(('weights kept', *PHASES, DEVICE))} |")
    print(f"|---|---|{'---|' * (len(PHASES) + 2)}")
    with tempfile.TemporaryDirectory() as name:
        sizes = []
        for num_layers in options.layers:
            model = BertForMaskedLM(AutoConfig.for_model(**BERT, num_hidden_layers=num_layers))
            model.save_pretrained(Path(name, str(num_layers)))
            sizes.append(4 * sum(parameter.numel() for parameter in model.parameters()))
            del model
        for ranks in options.ranks:
            for layout, keys in layouts_of(ranks, options.layouts):
                peaks = []
                for num_layers in options.layers:
                    folder = Path(name, f"{ranks} {layout} {num_layers}")
                    found = on_fresh_ranks(ranks, measure, keys, num_layers, str(Path(name, str(num_layers))), folder)
                    peaks.append({phase: max(asdict(one)[phase] for one in found) for phase in ("held", *PHASES)})
                    peaks[-1][DEVICE] = planned(keys, ranks, num_layers)
                cells = [
                    f"{(large - small) / (sizes[1] - sizes[0]):.2f} ({large / 1e6:.0f} MB)"
                    for small, large in zip(*(one.values() for one in peaks), strict=True)
                ]
                print(f"| {ranks} | {layout} | {' | '.join(cells)} |", flush=True)
        print(f"\nmodels of {' and '.join(f'{size / 1e6:.0f} MB' for size in sizes)};", end=" ")
        print(f"their largest tensor has {LARGEST_BYTES / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
